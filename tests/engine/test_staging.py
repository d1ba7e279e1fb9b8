"""What goes to a device and comes back is what the processor's own path moves: the same code on the processor."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from skymemory.engine.kv_cache import CacheSource, Gathered, RoomPool, SkyCache, Staging  # noqa: E402  # noqa: E402
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
