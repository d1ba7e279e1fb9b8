"""Where the blocks of the stand-in engine are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from tests.engine.vllm.engine import Engine
from tests.engine.vllm.queued import QueuedDevice


# On a CPU nothing is queued: what an accelerator could do in another order is tried at night.
@pytest.fixture(scope="module", params=["cpu", pytest.param("queued device", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest) -> Iterator[None]:
    """In this process's memory, or on a device that does its work late."""
    seeds = count()
    if request.param != "cpu":
        Engine.new_device = lambda: QueuedDevice(next(seeds))
    yield
    Engine.new_device = lambda: None
