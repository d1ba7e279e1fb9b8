"""Both implementations of the native floor, so that one test judges them alike."""

from __future__ import annotations

from types import ModuleType

import pytest

from skymemory import native
from skymemory.native.twin import backend
from skymemory.transport.udp_socket import udp_socket

# Without a C compiler where the package was installed the twin serves alone.
IMPLEMENTATIONS: list[ModuleType] = [backend] if native._fast is None else [backend, native._fast]


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda module: module.__name__.rpartition(".")[2])
def impl(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.param
    return module


@pytest.fixture
def fast() -> ModuleType:
    """The compiled helper; tests that compare it with the twin skip visibly without it."""
    if len(IMPLEMENTATIONS) < 2:
        pytest.skip("the compiled helper was not built")
    return IMPLEMENTATIONS[1]


@pytest.fixture(params=["127.0.0.1", "::1"])
def loopback(request: pytest.FixtureRequest) -> str:
    """This computer's own address, in either family; skips where it has none."""
    host: str = request.param
    try:
        with udp_socket(host) as sock:
            sock.bind((host, 0))
    except OSError as error:
        pytest.skip(f"{host} cannot be bound here: {error}")
    return host
