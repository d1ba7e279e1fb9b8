"""Parts of a model under names of their own: what is found has all that is seen, whatever else is gone or wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cache.test_manager import BLOCK, context
from tests.contract.rows import receive

from skymemory.cache.blocks import BlockCache, LoadResult, Part, Parts
from skymemory.kv.block import KVLayout
from skymemory.metrics import Counters
from skymemory.native import Rows
from skymemory.store.memory import MemoryStore

TOKENS = np.arange(40)
BLOCKS = len(TOKENS) // BLOCK


class Engine:
    """One part's blocks, whose contents are a function of the part and their tokens."""

    def __init__(self, number: int, layout: KVLayout) -> None:
        self.number = number
        self.layout = layout
        self.placed: dict[int, bytes] = {}
        self._rooms: dict[int, bytearray] = {}

    def truth(self, index: int) -> bytes:
        return np.random.default_rng([self.number, index]).bytes(self.layout.block_bytes)

    def read(self, index: int, out: memoryview) -> None:
        out[:] = self.truth(index)

    def place(self, index: int, block: memoryview) -> None:
        self.placed[index] = bytes(block)

    def rows(self, index: int, head: memoryview) -> Rows | None:
        if index in self.placed:
            return None
        self._rooms[index] = bytearray(self.layout.block_bytes)
        return Rows(head, memoryview(self._rooms[index]), 0, 1, self.layout.block_bytes, self.layout.block_bytes)

    def on_block(self, index: int) -> None:
        self.placed[index] = bytes(self._rooms[index])


class Losing(MemoryStore):
    """Memory that loses ``lost`` between a lookup and the load, and hands out ``spoiled`` with a wrong byte."""

    lost: frozenset[bytes] = frozenset()
    spoiled: frozenset[bytes] = frozenset()
    in_place = False
    """Whether it puts values where they are wanted."""

    def complete_load(self, ticket):  # type: ignore[no-untyped-def]
        values = super().complete_load(ticket)
        return receive(ticket, values) if self.in_place else values

    def prepare_load(self, keys):  # type: ignore[no-untyped-def]
        self.delete([key for key in keys if key in self.lost])
        for key in self.spoiled.intersection(keys):
            if key in self._values:
                self._values[key] = self._values[key][:-1] + bytes([self._values[key][-1] ^ 1])
        return super().prepare_load(keys)


def parts_in(store: MemoryStore, windows: tuple[int | None, ...], counters: Counters | None = None) -> Parts:
    made = []
    for number, window in enumerate(windows):
        layout = KVLayout(layers=1 + number, kv_heads=2, head_dim=8, block_tokens=BLOCK, dtype="float32")
        named = dataclasses.replace(context(), layout=f"{layout.describe()} {number}")
        made.append(Part(BlockCache(named, layout, store, counters=counters), window))
    return Parts(made)


def engines(parts: Parts) -> list[Engine]:
    return [Engine(number, part.blocks.layout) for number, part in enumerate(parts.parts)]


def save(parts: Parts) -> int:
    hashes = parts.hashes(TOKENS)
    return parts.save(hashes, parts.missing(hashes), engines(parts)).blocks


def load(parts: Parts, limit_tokens: int = len(TOKENS) - 1) -> tuple[LoadResult, list[Engine]]:
    """Checks that what is seen behind the tokens that were found is there, and true."""
    sinks = engines(parts)
    result = parts.load(TOKENS, sinks, limit_tokens=limit_tokens)
    for part, sink in zip(parts.parts, sinks, strict=True):
        assert all(sink.placed[index] == sink.truth(index) for index in part.get_visible_blocks(result.cached_tokens))
    assert result.prompt_tokens == result.computed_tokens + sum(result.hit_tokens.values())
    assert result.found_blocks == result.loaded_blocks + sum(result.failed_blocks.values())
    return result, sinks


WINDOWS = st.sampled_from([(None, 3, 10), (None, 10), (10,), (1,), (3, 10), (None, 100), (None,)])
SOME = st.lists(st.tuples(st.integers(0, 2), st.integers(0, BLOCKS - 1)), max_size=5)


@given(windows=WINDOWS, gone=SOME, lost=SOME, spoiled=SOME, limit=st.integers(0, len(TOKENS)), in_place=st.booleans())
def test_what_is_found_has_all_that_is_seen(
    windows: tuple[int | None, ...],
    gone: list[tuple[int, int]],
    lost: list[tuple[int, int]],
    spoiled: list[tuple[int, int]],
    limit: int,
    in_place: bool,
) -> None:
    store = Losing()
    store.in_place = in_place
    parts = parts_in(store, windows)
    assert save(parts) == BLOCKS
    hashes = parts.hashes(TOKENS)
    gone, lost, spoiled = ([(at % len(windows), index) for at, index in some] for some in (gone, lost, spoiled))
    store.delete([hashes[at][index] for at, index in gone])
    store.lost = frozenset(hashes[at][index] for at, index in lost)
    store.spoiled = frozenset(hashes[at][index] for at, index in spoiled)
    result, _ = load(parts, limit)
    least = min((index for _, index in (*gone, *lost, *spoiled)), default=BLOCKS)
    assert result.loaded_blocks >= min(least, -(-limit // BLOCK)), "no less than what lacks nothing at all"
    if not lost and not spoiled:
        assert not result.failed_blocks
        broken = {(at, index) for at, index in gone}
        for blocks in range(result.loaded_blocks + 1, -(-limit // BLOCK) + 1):
            end = min(blocks * BLOCK, limit)
            assert any(
                (at, index) in broken for at, part in enumerate(parts.parts) for index in part.get_visible_blocks(end)
            )
    store.delete(list(store.spoiled))
    store.lost = store.spoiled = frozenset()
    save(parts)
    assert load(parts)[0].loaded_blocks == BLOCKS


def test_tokens_are_counted_once_and_bytes_by_all_parts() -> None:
    counters = Counters()
    parts = parts_in(MemoryStore(), (None, 3, 10), counters)
    save(parts)
    assert counters.total("stored_blocks_total") == BLOCKS
    assert counters.total("stored_bytes_total") == sum(
        BLOCKS * (128 + part.blocks.layout.block_bytes) for part in parts.parts
    )
    result, sinks = load(parts)
    assert [sorted(sink.placed) for sink in sinks] == [list(range(10)), [9], [7, 8, 9]]
    assert counters.total("hit_tokens_total") == 39 and counters.total("lookup_tokens_total") == 40
    sizes = [len(sink.placed) * (128 + sink.layout.block_bytes) for sink in sinks]
    assert counters.total("loaded_bytes_total") == result.size_bytes == sum(sizes)


def test_tokens_out_of_every_window_came_from_where_the_others_came() -> None:
    parts = parts_in(MemoryStore(name="near"), (10,))
    save(parts)
    result, sinks = load(parts)
    assert result.hit_tokens == {"near": 39} and sorted(sinks[0].placed) == [7, 8, 9]


def test_what_is_brought_later_is_only_what_is_there() -> None:
    store = MemoryStore()
    parts = parts_in(store, (None, 10))
    save(parts)
    store.delete(parts.hashes(TOKENS)[1][3:4])
    sinks = engines(parts)
    parts.load_blocks(TOKENS[:22], sinks, [[], [1, 2, 3, 4]])
    assert sinks[0].placed == {} and sinks[1].placed == {index: sinks[1].truth(index) for index in (1, 2)}
    parts.load_blocks(TOKENS[:22], sinks, [[], [4, 5]])
    assert sorted(sinks[1].placed) == [1, 2, 4], "the sixth block is not whole"


@pytest.mark.parametrize("windows", [(None, 10), (10,)])
def test_why_no_more_was_found(windows: tuple[int | None, ...]) -> None:
    store = MemoryStore()
    parts = parts_in(store, windows)
    assert load(parts)[0].not_found == "absent"
    save(parts)
    assert load(parts)[0].not_found is None
    store.delete(parts.hashes(TOKENS)[-1][8:])
    assert load(parts)[0].not_found == "absent"
    sinks = engines(parts)
    assert parts.load(TOKENS[:3], sinks, limit_tokens=2).not_found == "shorter than a block"
