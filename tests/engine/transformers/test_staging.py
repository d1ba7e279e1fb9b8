"""What goes to a device and comes back is what the processor's own path moves: the same code on the processor."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from skymemory.cache.blocks import BlockCache, Part, Parts  # noqa: E402
from skymemory.engine.page_locked import CpuPages, LockedMemory  # noqa: E402
from skymemory.engine.transformers.kv_cache import CacheSource, Gathered, RoomPool, SkyCache, Staging  # noqa: E402
from skymemory.kv.block import KVLayout  # noqa: E402
from skymemory.kv.context import CacheContext  # noqa: E402
from skymemory.store.base import Presence  # noqa: E402
from skymemory.store.memory import MemoryStore  # noqa: E402

pytestmark = pytest.mark.engine

LAYOUTS = [KVLayout(3, 2, 4, 8, "float32"), KVLayout(2, 3, 6, 4, "bfloat16"), KVLayout(2, 1, 6, 4, "float16", 2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("at_once", [1, 3, 1 << 20])
def test_both_paths_move_the_same_bytes(layout: KVLayout, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skymemory.engine.transformers.kv_cache._AT_ONCE_BYTES", at_once * layout.block_bytes)
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


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("at_once", [1, 3, 1 << 20])
@pytest.mark.parametrize("locked_blocks", [7, 4])
def test_blocks_in_locked_memory_are_copied_from_there(
    layout: KVLayout, at_once: int, locked_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skymemory.engine.transformers.kv_cache._AT_ONCE_BYTES", at_once * layout.block_bytes)
    count, size = 7, layout.block_bytes
    blocks = np.random.default_rng(1).bytes(count * size)
    store = SimpleNamespace(memory=memoryview(bytearray(blocks[: locked_blocks * size])), prepare_rooms=None)
    memory = LockedMemory(store, CpuPages(), size * 2 // 3)  # type: ignore[arg-type]
    assert memory.wait(10)
    cache = SkyCache(layout, count * layout.block_tokens, torch.device("cpu"), RoomPool())
    staging = Staging(cache.groups[0]._rooms, layout, memory)
    for index in [4, 0, 6, 2, 1, 5, 3]:
        lies_in = store.memory if index < locked_blocks else memoryview(blocks)
        staging.place(index, lies_in[index * size : (index + 1) * size].toreadonly())
    staging.flush()
    cache.fill(np.arange(count * layout.block_tokens))
    source, out = CacheSource(cache, layout), bytearray(size)
    for index in range(count):
        source.read(index, memoryview(out))
        assert bytes(out) == blocks[index * size : (index + 1) * size]
    memory.close()


@pytest.mark.parametrize("at_once", [1, 5])
def test_blocks_come_from_several_threads(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cake's workers place two chunks at a time, while the engine's thread has what came copied."""
    layout = KVLayout(2, 2, 4, 64, "float32")
    monkeypatch.setattr("skymemory.engine.transformers.kv_cache._AT_ONCE_BYTES", at_once * layout.block_bytes)
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


@pytest.mark.parametrize("wrong", [0, 5, 11])
def test_of_blocks_placed_at_the_same_time_those_before_a_damaged_one_count(wrong: int) -> None:
    """A sink that takes several at a time is given all; what counts is the prefix, and the damaged one is deleted."""

    class Sink:
        threads = 3

        def __init__(self) -> None:
            self.placed: set[int] = set()

        def place(self, index: int, block: memoryview) -> None:
            time.sleep(0.001 * (index % 3))
            self.placed.add(index)

    layout = KVLayout(2, 2, 4, 8, "float32")
    store = MemoryStore(1 << 20)
    context = CacheContext("m", "w", "t", "float32", layout.describe(), block_tokens=layout.block_tokens)
    cache = Parts([Part(BlockCache(context, layout, store), None)])
    ids = np.arange(12 * layout.block_tokens)
    draw = np.random.default_rng(3)
    blocks = [draw.bytes(layout.block_bytes) for _ in range(12)]

    class Source:
        def read(self, index: int, out: memoryview) -> None:
            out[:] = blocks[index]

    (hashes,) = cache.hashes(ids)
    cache.first.save(hashes, range(12), Source())
    value = bytearray(store.get_many([hashes[wrong]])[0] or b"")
    value[-1] ^= 1
    store.delete([hashes[wrong]])
    store.put_many([(hashes[wrong], bytes(value))])
    result = cache.load(ids, [sink := Sink()])
    assert result.cached_tokens == wrong * layout.block_tokens and result.failed_blocks
    assert sink.placed >= set(range(wrong)) and wrong not in sink.placed
    assert store.lookup([hashes[wrong]]) == [Presence.MISS]


@pytest.mark.parametrize("at_once", [2, 64])
def test_a_block_that_does_not_fit_leaves_its_tokens_alone(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed instead: what is copied later must not be written over them."""
    layout = KVLayout(2, 2, 4, 8, "float32")
    monkeypatch.setattr("skymemory.engine.transformers.kv_cache._AT_ONCE_BYTES", at_once * layout.block_bytes)
    cache = SkyCache(layout, 5 * layout.block_tokens, torch.device("cpu"), RoomPool())
    staging = Staging(cache.groups[0]._rooms, layout)
    draw = np.random.default_rng(4)
    blocks = [draw.bytes(layout.block_bytes) for _ in range(5)]
    for index in range(5):
        cache.groups[0].place(index, memoryview(blocks[index]))  # as if computed
    other = [draw.bytes(layout.block_bytes) for _ in range(5)]
    staging.place(0, memoryview(other[0]))
    with pytest.raises(ValueError):
        staging.place(3, memoryview(other[3])[:-1])
    staging.place(1, memoryview(other[1]))
    staging.flush()
    cache.fill(np.arange(5 * layout.block_tokens))
    source, out = CacheSource(cache, layout), bytearray(layout.block_bytes)
    for index, expected in enumerate([other[0], other[1], *blocks[2:]]):
        source.read(index, memoryview(out))
        assert bytes(out) == expected, index


def test_a_flush_waits_for_what_is_being_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KVLayout(2, 2, 4, 8, "float32")
    cache = SkyCache(layout, layout.block_tokens, torch.device("cpu"), RoomPool())
    staging = Staging(cache.groups[0]._rooms, layout)
    block = np.random.default_rng(5).bytes(layout.block_bytes)
    begun, go, copy = threading.Event(), threading.Event(), np.copyto

    def slow(*args: object) -> None:
        begun.set()
        assert go.wait(60)
        copy(*args)  # type: ignore[call-overload]

    monkeypatch.setattr("skymemory.engine.transformers.kv_cache.np.copyto", slow)
    with ThreadPoolExecutor(2) as pool:
        placed = pool.submit(staging.place, 0, memoryview(block))
        assert begun.wait(60)
        flushed = pool.submit(staging.flush)
        time.sleep(0.1)
        assert not flushed.done()
        go.set()
        placed.result(60), flushed.result(60)
    cache.fill(np.arange(layout.block_tokens))
    out = bytearray(layout.block_bytes)
    CacheSource(cache, layout).read(0, memoryview(out))
    assert bytes(out) == block
