"""Where the blocks of the stand-in engine are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
import torch
from tests.engine.vllm.engine import Engine
from tests.engine.vllm.queued import QueuedDevice

from skymemory.engine.vllm.copier import Cuda

_GPU = ["cuda"] if torch.cuda.is_available() else []


# On a CPU nothing is queued: what an accelerator could do in another order is tried at night.
@pytest.fixture(scope="module", params=["cpu", pytest.param("queued device", marks=pytest.mark.slow), *_GPU])
def place(request: pytest.FixtureRequest) -> Iterator[None]:
    """In this process's memory, on a device that does its work late, or on a GPU where there is one."""
    seeds = count()
    if request.param == "cuda":
        Engine.new_device = lambda: Cuda(torch.device("cuda", 0))
    elif request.param != "cpu":
        Engine.new_device = lambda: QueuedDevice(next(seeds))
    yield
    Engine.new_device = lambda: None
