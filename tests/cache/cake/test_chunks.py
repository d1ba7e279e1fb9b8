"""A prompt's chunks out of a store: what was leased is given back, whatever came of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.cache.test_manager import BLOCK, LAYOUT, TOKENS, Engine, context, save

from skymemory.cache.blocks import BlockCache
from skymemory.cache.cake.cake import StoredChunks
from skymemory.cache.cake.scheduler import PromptChunk
from skymemory.cache.patience import Latencies
from skymemory.store.base import LoadTicket
from skymemory.store.memory import MemoryStore


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_chunk_of_which_a_block_is_lacking_does_not_come_and_keeps_no_lease(lacking: int) -> None:
    store = MemoryStore()
    cache = BlockCache(context(), LAYOUT, store)
    save(cache, TOKENS)
    hashes = cache.hashes(TOKENS)
    chunks = [PromptChunk(0, 2 * BLOCK, 1, True), PromptChunk(2 * BLOCK, 2 * BLOCK, 1, True)]
    engine = Engine(TOKENS)
    source = StoredChunks([cache], [hashes], [engine], chunks, Latencies())
    store.delete(hashes[2 + lacking : 3 + lacking])
    released = []
    release = cache.release
    cache.release = lambda ticket: (released.append(ticket), release(ticket))  # type: ignore[method-assign]
    assert source.fetch(1) is None and len(released) == 1
    assert source.failures() == {"absent": 1}
    fetched = source.fetch(0)
    assert fetched is not None and fetched.place()
    fetched.release()
    assert len(released) == 2 and set(engine.placed) == {0, 1} and store.stats()["open_leases"] == 0


def test_a_fault_in_a_later_part_keeps_no_lease_of_an_earlier_one() -> None:
    class Faulty(MemoryStore):
        def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
            raise TypeError("a fault of the program")

    sound, faulty = MemoryStore(), Faulty()
    parts = [BlockCache(context(), LAYOUT, sound), BlockCache(replace(context(), adapter="b"), LAYOUT, faulty)]
    for part in parts:
        save(part, TOKENS)
    chunks, engine = [PromptChunk(0, 2 * BLOCK, 1, True)], Engine(TOKENS)
    hashes = [part.hashes(TOKENS) for part in parts]
    source = StoredChunks(parts, hashes, [engine, engine], chunks, Latencies())
    with pytest.raises(TypeError):
        source.fetch(0)
    assert [store.stats()["open_leases"] for store in (sound, faulty)] == [0, 0]
