"""What strategies keep is bounded, whatever they are sent."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
from tests.conductor.strategies.fleets import a_fleet

from skymemory.conductor.picker import Picker
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.strategies.registry import NAMES, named

BOUNDS = {
    "hash-trie": {"max_blocks": 1_000},
    "approximate": {"blocks_per_server": 250},
    "radix": {"blocks_per_server": 250},
    "least-ttft": {"blocks_per_server": 250},
}


def flood(picker: Picker, count: int, first: int) -> None:
    """Different prompts of three blocks, each for an adapter of its own; one in ten fails, and time goes by."""
    blocks = np.random.default_rng(first).integers(1, 2**63, size=(count, 3), dtype=np.uint64)
    for number in range(count):
        name = f"{first + number}"
        request = Request(
            Prompt(blocks[number], blocks[number], 16, 50, name.encode()),
            adapter=f"adapter {name}",
            session=f"session {name}",
        )
        now_s = (first + number) * 0.05
        decision = picker.pick(request, now_s)
        picker.routed(decision, now_s)
        if number % 10:
            picker.succeeded(decision, now_s, None if number % 3 else 0)
            picker.on_request_end(decision, now_s, 0)
        else:
            picker.failed(decision, now_s)


def grown(name: str, warm: int, more: int) -> int:
    picker = Picker(a_fleet(4), named(name, **BOUNDS.get(name, {})), seed=1)
    flood(picker, warm, 0)
    gc.collect()
    tracemalloc.start()
    try:
        flood(picker, more, warm)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_different_prompts_and_adapters_leave_no_growing_memory(name: str) -> None:
    assert grown(name, warm=2_000, more=1_000) < 400_000


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_60_000_prompts_and_adapters(name: str) -> None:
    assert grown(name, warm=20_000, more=40_000) < 400_000  # ten bytes of each would be too much
