"""The books of a satellite: they close after every step, by cause, and against a naive account of the same steps."""

from __future__ import annotations

import zlib
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.satellite import ledgers

from skymemory.protocol import messages
from skymemory.protocol.clock import MoveClock
from skymemory.protocol.satellite import memory
from skymemory.protocol.satellite.memory import ChunkStore
from skymemory.protocol.wire import CHUNK_REF_BYTES, ChunkRef, Op, PlacementTag

KEYS = [bytes([n]) * 32 for n in range(3)]


def ref_of(key: bytes, index: int, payload: bytes, version: int = 1) -> bytes:
    tag = PlacementTag(3, 10, index % 10, 0, 0)
    return ChunkRef(key, index, 100, len(payload), zlib.crc32(payload), 5000, version, tag).pack()


verbs = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 2), st.integers(0, 9), st.sampled_from([0, 9, 100, 400]), st.booleans()),
    st.tuples(st.just("run"), st.integers(0, 2), st.sets(st.integers(0, 9), min_size=1, max_size=4), st.booleans()),
    st.tuples(st.just("remove"), st.integers(0, 2), st.integers(0, 9), st.sampled_from(memory.CAUSES)),
    st.tuples(st.just("remove_key"), st.integers(0, 2), st.sampled_from(memory.CAUSES)),
)


@settings(max_examples=200)
@given(steps=st.lists(verbs, max_size=50), limit=st.integers(0, 2500))
def test_the_books_of_a_store_close_by_cause(steps, limit):
    store, booked = ChunkStore(limit), Counter()

    def sizes() -> dict[tuple[bytes, int], int]:
        return {name: len(chunk.payload) + CHUNK_REF_BYTES for name, chunk in store.items()}

    for verb, key_number, *rest in steps:
        key, before = KEYS[key_number], sizes()
        stored: list[int] = []
        if verb == "put":
            index, size, migrated = rest
            payload = bytes(size)
            if store.put((key, index), ref_of(key, index, payload), payload, migrated).stored:
                stored = [index]
                booked["replaced"] += before.get((key, index), 0)
        elif verb == "run":
            indices, migrated = sorted(rest[0]), rest[1]
            chunks = [(ref_of(key, index, b"x" * 50, 2), b"x" * 50) for index in indices]
            if store.put_run(key, indices, chunks, len(chunks) * (50 + CHUNK_REF_BYTES), migrated) is not None:
                stored = indices
                booked["replaced"] += sum(before.get((key, index), 0) for index in indices)
        elif verb == "remove":
            store.remove((key, rest[0]), rest[1])
            booked[rest[1]] += before.get((key, rest[0]), 0)
        else:
            store.remove_key(key, rest[0])
            booked[rest[0]] += sum(size for name, size in before.items() if name[0] == key)
        after = sizes()
        if verb in ("put", "run"):
            touched = {(key, rest[0])} if verb == "put" else {(key, index) for index in stored}
            booked["evicted"] += sum(size for name, size in before.items() if name not in after.keys() | touched)
            booked["migrated_in" if migrated else "set"] += sum(after[key, index] for index in stored)
        figures = store.ledger.figures()
        assert {name.removeprefix("bytes_"): size for name, size in figures.items() if size} == +booked
        assert ledgers.unaccounted_bytes(figures | {"memory_used_bytes": sum(after.values())}) == 0


def test_the_books_close_through_moves_deaths_and_deletions(world, value_of):
    clock = MoveClock(slot_period_s=260.0, plane_period_s=1184.0, time_scale=200.0)
    sky = world(clock=clock, memory_bytes=40_000)
    for turn in range(12):
        value = value_of(150_000, turn)
        sky.put(f"v{turn % 8}", value)
        _, info = sky.put(f"v{turn % 8}", value)
        read, out = sky.get(info)
        assert not read.ok or out == value
        if turn % 4 == 1:
            victim = next(iter(sky.spread(info)))
            sky.sim.kill(victim)
            sky.sim.revive(victim)
        if turn % 5 == 2:
            for here in list(sky.spread(info)):
                sky.ask(Op.EVICT, messages.pack_keys([info.key]), here)
        books = {here: machine.housekeeping() for here, machine in sky.sim.satellites.items()}
        assert ledgers.open_books(books) == {}
        sky.settle(0.7)
    together = ledgers.total({here: machine.housekeeping() for here, machine in sky.sim.satellites.items()})
    assert ledgers.unaccounted_bytes(together) == 0
    assert all(size > 0 for size in together.values()), together


def test_a_gap_is_found_and_named():
    store = ChunkStore(1000)
    store.put((KEYS[0], 0), ref_of(KEYS[0], 0, b"abc"), b"abc")
    figures = store.ledger.figures() | {"memory_used_bytes": store.used_bytes}
    wrong = figures | {"memory_used_bytes": store.used_bytes - 5}
    assert ledgers.open_books({"a": figures, "b": wrong}) == {"b": 5}
