"""One engine for the tests that leave it as they find it, on a single thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("aiohttp", reason="serving needs skymemory[router]")

if TYPE_CHECKING:
    from tests.lab.door import Door


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shared_door() -> Iterator[Door]:
    from tests.lab.door import open_door

    from skymemory_lab.engine.run import EngineSettings

    with open_door(EngineSettings(cache_bytes=32 << 20, max_running=4)) as door:
        yield door


@pytest.fixture
def door(shared_door: Door) -> Door:
    """With nothing cached."""
    assert shared_door.ask("/reset_prefix_cache", {}).status == 200
    return shared_door


@pytest.fixture(scope="session")
def ready() -> Any:
    """The same model and tokenizer without an engine."""
    from skymemory.engine.transformers.models import ready_model

    return ready_model("small", dtype="float32")
