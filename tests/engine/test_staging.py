"""What goes to a device and comes back is what the processor's own path moves: the same code on the processor."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from skymemory.engine.kv_cache import CacheSource, Gathered, RoomPool, SkyCache, Staging  # noqa: E402
from skymemory.kv.block import KVLayout  # noqa: E402

pytestmark = pytest.mark.engine

LAYOUTS = [KVLayout(3, 2, 4, 8, "float32"), KVLayout(2, 3, 6, 4, "bfloat16"), KVLayout(2, 1, 6, 4, "float16", 2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("at_once", [1, 3, 1 << 20])
def test_both_paths_move_the_same_bytes(layout: KVLayout, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skymemory.engine.kv_cache._AT_ONCE_BYTES", at_once * layout.block_bytes)
    draw = np.random.default_rng(1)
    blocks = [draw.bytes(layout.block_bytes) for _ in range(7)]
    tokens = len(blocks) * layout.block_tokens
    straight, staged = (SkyCache(layout, tokens + 3, torch.device("cpu"), RoomPool()) for _ in range(2))
    staging = Staging(staged.groups[0]._rooms, layout)
    for index in [4, 0, 6, 2, 1, 5, 3]:
        straight.groups[0].place(index, memoryview(blocks[index]))
        staging.place(index, memoryview(blocks[index]))
    staging.flush()
    for cache in (straight, staged):
        cache.fill(np.arange(tokens))
    pairs = [(layer.keys[0], layer.values[0]) for layer in staged.layers]
    gathered, source, out = Gathered(pairs, layout), CacheSource(straight, layout), bytearray(layout.block_bytes)
    for index in [0, 1, 2, 6, 3]:
        for reader in (gathered, source):
            reader.read(index, memoryview(out))
            assert bytes(out) == blocks[index]


@pytest.mark.parametrize("at_once", [1, 5])
def test_blocks_come_from_several_threads(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cake's workers place two chunks at a time, while the engine's thread has what came copied."""
    layout = KVLayout(2, 2, 4, 64, "float32")
    monkeypatch.setattr("skymemory.engine.kv_cache._AT_ONCE_BYTES", at_once * layout.block_bytes)
    draw = np.random.default_rng(2)
    count, threads = 400, 4
    blocks = [draw.bytes(layout.block_bytes) for _ in range(count)]
    cache = SkyCache(layout, count * layout.block_tokens, torch.device("cpu"), RoomPool())
    staging = Staging(cache.groups[0]._rooms, layout)

    def work(first: int) -> None:
        for index in range(first, count, threads):
            staging.place(index, memoryview(blocks[index]))
            if index % 7 == 0:
                staging.flush()

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
    finally:
        sys.setswitchinterval(interval_s)
    staging.flush()
    cache.fill(np.arange(count * layout.block_tokens))
    source, out = CacheSource(cache, layout), bytearray(layout.block_bytes)
    for index, block in enumerate(blocks):
        source.read(index, memoryview(out))
        assert bytes(out) == block, index
