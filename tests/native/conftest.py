"""Both implementations of the native floor, so that one test judges them alike."""

from __future__ import annotations

from types import ModuleType

import pytest

from skymemory import native
from skymemory.native.twin import backend

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
