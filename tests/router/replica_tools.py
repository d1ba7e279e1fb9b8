"""Indices of replicas, and waiting for what happens in the background."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np

from skymemory import native
from skymemory.conductor.prefix_index.approximate import Blocks
from skymemory.conductor.prefix_index.replicated import SharedPrefixIndex

KIND = "tokens 16"


def chain(number: int, blocks: int = 20) -> Blocks:
    return native.chain_hashes(np.full(blocks, number, dtype="<u4").tobytes(), 4, 1)


def an_index(*names: str, blocks_per_server: int = 1000) -> SharedPrefixIndex:
    slots = {name: slot for slot, name in enumerate(names)}
    return SharedPrefixIndex({slot: name for name, slot in slots.items()}.get, slots.get, blocks_per_server)


async def until(true: Callable[[], bool], within_s: float = 25.0) -> float:
    """Seconds that it took."""
    started_s = time.monotonic()
    while not true():
        assert time.monotonic() - started_s < within_s, "it did not happen"
        await asyncio.sleep(0.01)
    return time.monotonic() - started_s
