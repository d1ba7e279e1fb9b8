"""A satellite's memory against a naive twin, and its rules one by one."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skymemory.metrics import Counters
from skymemory.protocol.satellite.memory import ChunkStore, names_by_tag
from skymemory.protocol.wire import CHUNK_REF_BYTES, TAG_BYTES, TAG_OFFSET, ChunkRef, PlacementTag

KEYS = [bytes([n]) * 32 for n in range(4)]


def ref_of(key: bytes, index: int, payload: bytes, version: int = 1) -> bytes:
    """Of a value of ten chunks, each for a server of its own."""
    tag = PlacementTag(3, 10, index % 10, 0, 0)
    return ChunkRef(key, index, 10, len(payload), zlib.crc32(payload), 5000, version, tag).pack()


def part(key: bytes, chunks: int, servers: int = 1, server: int = 0, version: int = 1) -> list[tuple[int, bytes]]:
    """Indices and packed references of what one server has of a value of so many chunks: 100 bytes, the last one 40."""
    sizes = [100] * (chunks - 1) + [40]
    return [
        (
            index,
            ChunkRef(
                key, index, chunks, sizes[index], 0, sum(sizes), version, PlacementTag(3, servers, server, 0, 0)
            ).pack(),
        )
        for index in range(server, chunks, servers)
    ]


def put_part(store: ChunkStore, refs: list[tuple[int, bytes]]) -> list[bool]:
    return [store.put((ref[:32], at), ref, bytes(ChunkRef.unpack(ref).length_bytes)).stored for at, ref in refs]


def put(store: ChunkStore, key: bytes, index: int, payload: bytes, version: int = 1) -> bool:
    return store.put((key, index), ref_of(key, index, payload, version), payload).stored


def room(chunks: int, payload_bytes: int = 100) -> ChunkStore:
    return ChunkStore(chunks * (payload_bytes + CHUNK_REF_BYTES))


verbs = st.one_of(
    st.tuples(
        st.just("put"), st.integers(0, 3), st.integers(0, 9), st.sampled_from([0, 1, 100, 100, 300]), st.integers(1, 2)
    ),
    st.tuples(st.just("get"), st.integers(0, 3), st.integers(0, 9)),
    st.tuples(st.just("remove"), st.integers(0, 3), st.integers(0, 9)),
    st.tuples(st.just("remove_key"), st.integers(0, 3)),
    st.tuples(st.just("shield"), st.integers(0, 3)),
    st.tuples(st.just("unshield"), st.integers(0, 3)),
)


@settings(max_examples=200)
@given(steps=st.lists(verbs, max_size=60), limit=st.integers(0, 2500))
def test_budget_contents_and_indexes_always_agree(steps, limit):
    store, seen = ChunkStore(limit), {}
    for verb, key_number, *rest in steps:
        key = KEYS[key_number]
        keys_before = {name[0] for name, _ in store.items()}
        store.expiries = dict.fromkeys(keys_before, 1.0)
        if verb == "put":
            index, size, version = rest
            payload = bytes([index, version]) * size
            before = dict(store.items())
            outcome = store.put((key, index), ref_of(key, index, payload, version), payload)
            if outcome.stored:
                seen[key, index] = payload
            after = dict(store.items())
            gone = before.keys() - after.keys() - {(key, index)}
            assert len(gone) == outcome.evicted
            if outcome.stored:
                assert (key, index) in after and outcome.replaced == int((key, index) in before)
            else:
                assert before == after and (outcome.replaced, outcome.evicted) == (0, 0)
        elif verb == "get":
            chunks, missing = store.get_run(key, rest)
            assert len(chunks) + len(missing) == 1
            assert bool(chunks) == (store.peek((key, rest[0])) is not None)
        elif verb == "remove":
            there = store.peek((key, rest[0])) is not None
            assert store.remove((key, rest[0])) is there
        elif verb == "shield":
            if store.refresh(key):
                store.pin(key)
        elif verb == "unshield":
            store.unpin(key)
        else:
            held = sum(name[0] == key for name, _ in store.items())
            assert store.remove_key(key) == held
        items = dict(store.items())
        assert len(items) == len(store)
        assert store.used_bytes == sum(len(c.payload) + CHUNK_REF_BYTES for c in items.values()) <= max(limit, 0)
        shielded = sum(len(c.payload) + CHUNK_REF_BYTES for name, c in items.items() if name[0] in store.pins)
        assert store.pinned_bytes == shielded
        gone_keys = keys_before - store.expiries.keys()
        assert gone_keys >= keys_before - {name[0] for name in items}, "what was promised of a key goes with it"
        assert key not in gone_keys or verb in ("put", "remove", "remove_key")
        assert all(chunk.payload == seen[name] for name, chunk in items.items())
        by_tag = names_by_tag(store.shares)
        assert sorted(name for names in by_tag.values() for name in names) == sorted(items)
        for tag, names in by_tag.items():
            assert all(items[name].ref[TAG_OFFSET : TAG_OFFSET + TAG_BYTES] == tag for name in names)
        held_keys = sorted({name[0] for name in items})
        assert store.keys_after(bytes(32), 9) == [key for key in held_keys if key > bytes(32)]
        for key in KEYS:
            presence = store.presence(key)
            indices = sorted(index for its_key, index in items if its_key == key)
            assert (presence is None) == (not indices)
            if presence is not None:
                assert (presence.index, presence.held) == (indices[0], len(indices))
                assert presence.length_bytes == len(items[key, indices[0]].payload)


def test_the_least_recently_used_value_goes_first():
    store = room(6)
    for key in KEYS[:3]:
        put(store, key, 0, b"x" * 100)
        put(store, key, 1, b"x" * 100)
    store.get_run(KEYS[0], [0])
    put(store, KEYS[3], 0, b"x" * 100)
    put(store, KEYS[3], 1, b"x" * 100)
    assert {name[0] for name, _ in store.items()} == {KEYS[0], KEYS[2], KEYS[3]}
    assert store.peek((KEYS[2], 0)) is not None


def test_looking_does_not_use():
    store = room(2)
    put(store, KEYS[0], 0, b"x" * 100)
    put(store, KEYS[1], 0, b"x" * 100)
    store.peek((KEYS[0], 0))
    store.presence(KEYS[0])
    put(store, KEYS[2], 0, b"x" * 100)
    assert store.peek((KEYS[0], 0)) is None


def test_a_value_never_pushes_itself_out():
    store = room(4)
    assert all(put(store, KEYS[0], index, b"x" * 100) for index in range(4))
    assert not put(store, KEYS[0], 4, b"x" * 100)
    assert len(store) == 4


def test_an_older_version_makes_room_for_the_newer():
    store = room(4)
    assert all(put(store, KEYS[0], index, b"x" * 100, version=1) for index in range(4))
    assert all(put(store, KEYS[0], index, b"y" * 100, version=2) for index in range(4, 8))
    assert sorted(name[1] for name, _ in store.items()) == [4, 5, 6, 7]


@pytest.mark.parametrize("size", [101, 5000])
def test_what_could_not_fit_alone_evicts_nothing(size):
    store = room(1)
    assert put(store, KEYS[0], 0, b"x" * 100)
    assert not put(store, KEYS[1], 0, b"x" * size)
    assert store.peek((KEYS[0], 0)) is not None


def test_a_run_is_stored_as_its_chunks_would_be():
    payloads = [bytes([index]) * 100 for index in range(3)]
    chunks = [(ref_of(KEYS[0], index, payload), payload) for index, payload in enumerate(payloads)]
    size = 3 * (100 + CHUNK_REF_BYTES)
    for others in range(8):
        together, apart = room(7), room(7)
        for store in (together, apart):
            for index in range(others):
                put(store, KEYS[1 + index % 2], index, b"o" * 100)
        outcome = together.put_run(KEYS[0], [0, 1, 2], chunks, size)
        singly = [apart.put((KEYS[0], index), *chunk) for index, chunk in enumerate(chunks)]
        assert outcome is not None and outcome.stored
        assert outcome.evicted == sum(one.evicted for one in singly)
        assert dict(together.items()) == dict(apart.items())
        again = together.put_run(KEYS[0], [0, 1, 2], chunks, size)
        assert again is None or (again.replaced, again.evicted) == (3, 0)
        assert len(together) == len(apart) == sum(1 for _ in together.items())
        assert together.used_bytes == apart.used_bytes
    assert room(2).put_run(KEYS[0], [0, 1, 2], chunks, size) is None


def test_a_shield_goes_with_the_last_chunk():
    """What comes later under the key is as any other."""
    for take_away in (lambda store: store.remove((KEYS[0], 0)), lambda store: store.remove_key(KEYS[0])):
        store = room(2)
        put(store, KEYS[0], 0, b"a" * 100)
        store.pin(KEYS[0])
        take_away(store)
        assert KEYS[0] not in store.pins and store.pinned_bytes == 0
        put(store, KEYS[0], 0, b"b" * 100)
        assert put(store, KEYS[1], 0, b"c" * 100) and put(store, KEYS[2], 0, b"d" * 100)
        assert store.peek((KEYS[0], 0)) is None


def test_the_latest_placement_of_a_key_is_reported():
    """A value set again elsewhere leaves chunks behind where both places have a satellite; negative moves count too."""
    store, payload = room(10), b"x" * 100
    for index, moves in [(0, (-7, 2)), (13, (-3, -1)), (3, (-3, -1)), (10, (-7, 2))]:
        tag = PlacementTag(2, 10, index % 10, *moves)
        ref = ChunkRef(KEYS[0], index, 100, len(payload), zlib.crc32(payload), 5000, 1, tag).pack()
        assert store.put((KEYS[0], index), ref, payload).stored
    answer = store.presence(KEYS[0])
    assert (answer.index, answer.held, answer.tag.slot_moves, answer.tag.plane_moves) == (3, 4, -3, -1)


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("as_run", [True, False])
def test_a_value_that_cannot_fit_evicts_nothing(fits: bool, servers: int, as_run: bool):
    """Its other chunks are counted before the first of them pushes anything out."""
    store = room(20)
    for number in range(20):
        assert put(store, number.to_bytes(32, "big"), 0, b"x" * 100)
    refs = part(b"big" * 10 + b"!!", 20 * servers + (0 if fits else 1), servers)
    if as_run:
        chunks = [(ref, bytes(ChunkRef.unpack(ref).length_bytes)) for _, ref in refs]
        size = sum(len(payload) + CHUNK_REF_BYTES for _, payload in chunks)
        outcome = store.put_run(refs[0][1][:32], [at for at, _ in refs], chunks, size)
        assert outcome is not None if fits else outcome is None
    if not as_run or not fits:
        assert put_part(store, refs) == [fits] * len(refs)
    assert len(store) == 20 and (len(store.keys_after(b"", 99)) == 1) is fits


@pytest.mark.parametrize("chunks, fits", [(10, True), (11, False)])
def test_a_value_that_fits_beside_no_pins_evicts_nothing_beside_them(chunks: int, fits: bool):
    store = room(20)
    for number in range(20):
        key = number.to_bytes(32, "big")
        assert put(store, key, 0, b"x" * 100)
        if number % 2:
            store.pin(key)
    assert put_part(store, part(b"k" * 32, chunks)) == [fits] * chunks
    assert len(store.keys_after(b"", 99)) == (11 if fits else 20)


def test_a_value_stored_again_in_a_full_memory_takes_its_own_place():
    store = room(10)
    refs = part(b"k" * 32, 10)
    assert put_part(store, refs) == [True] * 10
    assert put_part(store, refs) == [True] * 10
    assert put_part(store, part(b"k" * 32, 10, version=2)) == [True] * 10 and len(store) == 10


def test_a_shielded_key_that_outgrows_its_share_of_the_memory_is_shielded_no_longer():
    counters = Counters()
    store = ChunkStore(10 * (100 + CHUNK_REF_BYTES), pin_share=0.5, counters=counters)
    small, large = part(KEYS[0], 2), part(KEYS[0], 9, version=2)
    assert put_part(store, small) == [True] * 2
    store.pin(KEYS[0])
    assert put_part(store, part(KEYS[0], 4, version=2)) == [True] * 4 and KEYS[0] in store.pins
    assert put_part(store, large) == [True] * 9
    assert counters.get("pins_refused") == 1 and store.pinned_bytes == 0 and KEYS[0] not in store.pins
    assert put(store, KEYS[1], 0, b"x" * 100) and put(store, KEYS[1], 1, b"x" * 100), "it may be evicted again"
