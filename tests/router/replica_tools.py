"""Indices of replicas, and waiting for what happens in the background."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from skymemory import native
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex, Blocks
from skymemory.conductor.prefix_index.replicated import SharedPrefixIndex, take_snapshot
from skymemory.router.prefix_state import write_snapshot

KIND = "tokens 16"


def chain(number: int, blocks: int = 20) -> Blocks:
    return native.chain_hashes(np.full(blocks, number, dtype="<u4").tobytes(), 4, 1)


def an_index(*names: str, blocks_per_server: int = 1000) -> SharedPrefixIndex:
    slots = {name: slot for slot, name in enumerate(names)}
    return SharedPrefixIndex({slot: name for name, slot in slots.items()}.get, slots.get, blocks_per_server)


def save_index(path: Path, index: ApproximatePrefixIndex, kind: str, slots: Mapping[str, int]) -> int:
    """Write the blocks of ``slots`` (servers by name); the file's size in bytes."""
    return write_snapshot(path, take_snapshot(index, kind, slots))


async def until(true: Callable[[], bool], within_s: float = 60.0) -> float:
    """Seconds that it took."""
    started_s = time.monotonic()
    while not true():
        assert time.monotonic() - started_s < within_s, "it did not happen"
        await asyncio.sleep(0.01)
    return time.monotonic() - started_s
