"""The chunk memory, eviction and history in C against the Python ones: the same calls, the same state after each."""

from __future__ import annotations

import ctypes
import random
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.flight.parts import library, numbers

from skymemory.eviction import REPLACEMENTS, LeastRecentlyAndFrequentlyUsed, Replacement, replacement_named
from skymemory.metrics import Counters
from skymemory.protocol.messages import pack_presences
from skymemory.protocol.satellite.memory import CAUSES, Cause, ChunkStore, KeyHistory, as_copy, latest_index, setting_of
from skymemory.protocol.wire import ChunkRef, PlacementTag

KEYS = [zlib.crc32(bytes([number])).to_bytes(4, "big") * 8 for number in range(7)]
LISTS = {"by key": 0, "pins": 1, "leases": 2, "expiries": 3}
VERBS = {
    name: number for number, name in enumerate(("touch", "refresh", "remove", "pin", "unpin", "remove_key", "lease"))
}
RELEASE, END_LEASE, EXPIRE, RELABEL, FIND_LEASE, LATEST = 7, 8, 9, 10, 11, 12
NEVER_US = (1 << 63) - 1


def ref_of(
    key: bytes, index: int, chunks: int, length: int, servers: int, setting: int, replica: int, payload: bytes
) -> bytes:
    """A chunk of a value: ``setting`` decides its bytes and moves."""
    value_bytes = max(length, (chunks - 1) * length + (length if index == chunks - 1 else length // 2))
    tag = PlacementTag(3, servers, index % servers, setting % 3 - 1, setting % 2, replica)
    return ChunkRef(
        key, index, chunks, length, zlib.crc32(payload), max(value_bytes, chunks - 1), 1000 + setting, tag
    ).pack()


class Both:
    """A memory of each kind; every call is made to both, and what it gives compared."""

    def __init__(
        self,
        limit_bytes: int,
        replacement: str,
        pin_share: int = 1 << 15,
        gossip: bool = True,
        most_chunks: int = 512,
        cell_bytes: int = 64,
        departed: int = 16384,
    ) -> None:
        self.counters = Counters()
        policy: Replacement = replacement_named(replacement)
        if departed != 16384:
            policy = LeastRecentlyAndFrequentlyUsed(departed)
        self.twin = ChunkStore(limit_bytes, policy, pin_share / 65536, gossip, self.counters)
        self.lib = library()
        settings_of = (
            limit_bytes,
            REPLACEMENTS.index(replacement),
            pin_share,
            gossip,
            most_chunks,
            0,
            cell_bytes,
            departed,
        )
        self.it = self.lib.parts_memory(numbers(settings_of))
        self.out = numbers([0] * 3)

    def __enter__(self) -> Both:
        return self

    def __exit__(self, *_: object) -> None:
        self.lib.parts_memory_end(self.it)

    def put(self, ref: bytes, payload: bytes, migrated: bool = False) -> bool:
        twin = self.twin.put((ref[:32], ChunkRef.unpack(ref).index), ref, payload, migrated)
        self.lib.parts_put(self.it, ref, payload, len(payload), migrated, self.out)
        assert tuple(self.out) == (twin.stored, twin.replaced, twin.evicted)
        return twin.stored

    def put_run(self, refs: Sequence[bytes], payloads: Sequence[bytes], migrated: bool = False) -> bool:
        chunks = list(zip(refs, payloads, strict=True))
        size = sum(map(len, payloads)) + 72 * len(refs)
        indices = [ChunkRef.unpack(ref).index for ref in refs]
        twin = self.twin.put_run(refs[0][:32], indices, chunks, size, migrated)
        ours = self.lib.parts_put_run(self.it, b"".join(refs), b"".join(payloads), len(refs), migrated, self.out)
        assert bool(ours) == (twin is not None)
        if twin is not None:
            assert tuple(self.out) == (twin.stored, twin.replaced, twin.evicted)
        return twin is not None

    def verb(self, number: int, key: bytes, a: int = 0, b: int = 0) -> int:
        return self.lib.parts_verb(self.it, number, key, a, b)

    def page(self, function: Any, *arguments: Any, width: int = 32) -> list[bytes]:
        out = (ctypes.c_uint8 * (1 << 16))()
        count = function(self.it, *arguments, out)
        return [bytes(out[at : at + width]) for at in range(0, count * width, width)]

    def compare(self) -> None:
        twin, lib = self.twin, self.lib
        figures = (ctypes.c_uint64 * 18)()
        lib.parts_figures(self.it, figures)
        amounts = twin.used_bytes, twin.pinned_bytes, twin.leased_bytes, len(twin), len(twin.shares)
        assert tuple(figures[:6]) == (*amounts, self.counters.get("pins_refused"))
        assert tuple(figures[7:10]) == (len(twin.pins), len(twin.leases), len(twin.expiries))
        assert figures[6] == 0
        ledger = twin.ledger.figures()
        assert list(figures[11:]) == [ledger[f"bytes_{name}"] for name in ("set", "migrated_in", *CAUSES)]
        assert self.page(lib.parts_order) == twin.order()
        assert self.page(lib.parts_list, 0) == sorted(twin.shares)
        assert self.page(lib.parts_list, 4) == list(twin.shares)
        for which, keys in ((1, twin.pins), (2, twin.leases), (3, twin.expiries)):
            assert self.page(lib.parts_list, which) == list(keys)
        if twin.evicted is not None:
            found = self.page(lib.parts_list, 5, width=104)
            assert [(record[:32], record[32:]) for record in found] == list(twin.evicted.items())
        noted = [(record[:72], record[72]) for record in self.page(lib.parts_conflicts, width=73)]
        expected = [
            (twin.shares[key][index][0], before[61]) for (key, index), before in twin.conflicts if key in twin.shares
        ]
        assert noted == expected
        twin.conflicts.clear()
        record, payload = (ctypes.c_uint8 * 36)(), (ctypes.c_uint8 * 70000)()
        for key in KEYS:
            share = twin.shares.get(key, {})
            assert self.page(lib.parts_refs, key, width=72) == [share[index][0] for index in sorted(share)]
            lib.parts_presence(self.it, key, record)
            assert bytes(record) == pack_presences([twin.presence(key)])[4:]
            assert not share or self.verb(LATEST, key) == latest_index(share)
            for index, (ref, held) in share.items():
                assert lib.parts_get(self.it, key, index, record_room := (ctypes.c_uint8 * 72)(), payload) == len(held)
                assert bytes(record_room) == ref and bytes(payload[: len(held)]) == held
        for key in KEYS[:2]:
            assert sorted(twin.shares)[lib.parts_after(self.it, key) :][:3] == twin.keys_after(key, 3)


geometry = st.tuples(st.integers(1, 6), st.sampled_from([1, 40, 64, 100, 150]), st.integers(1, 3))
one_put = st.tuples(
    st.just("put"),
    st.sampled_from(KEYS),
    st.integers(0, 5),
    geometry,
    st.integers(0, 3),
    st.integers(0, 2),
    st.booleans(),
)
run = st.tuples(
    st.just("run"),
    st.sampled_from(KEYS),
    st.integers(0, 5),
    geometry,
    st.integers(0, 3),
    st.integers(0, 2),
    st.booleans(),
)
plain = st.tuples(
    st.sampled_from(["touch", "refresh", "unpin", "end_lease", "remove_key", "presence"]), st.sampled_from(KEYS)
)
numbered = st.tuples(
    st.sampled_from(["remove", "pin", "lease", "release", "expire", "relabel", "forget", "outdated"]),
    st.sampled_from(KEYS),
    st.integers(0, 5),
    st.integers(0, 4),
)
steps = st.lists(one_put | one_put | run | plain | numbered, max_size=60)


def step(both: Both, verb: str, key: bytes, *rest: Any) -> None:
    twin, here = both.twin, key in both.twin.shares
    if verb in ("put", "run"):
        index, (chunks, length, servers), setting, replica, migrated = rest
        index %= chunks
        if length < chunks:
            length = chunks
        part = range(index % servers, chunks, servers) if verb == "run" else [index]
        payloads = [bytes([setting, at]) * (length // 2) + bytes(length % 2) for at in part]
        refs = [
            ref_of(key, at, chunks, length, servers, setting, replica, payload)
            for at, payload in zip(part, payloads, strict=True)
        ]
        if verb == "put" or not both.put_run(refs, payloads, migrated):
            for ref, payload in zip(refs, payloads, strict=True):
                both.put(ref, payload, migrated)
    elif verb == "remove_key":
        assert both.verb(VERBS[verb], key, CAUSES.index("deleted")) == twin.remove_key(key)
    elif verb == "forget":
        setting = setting_of(ref_of(key, 0, 1, 40, 1, rest[0], 0, b""))
        cause: Cause = ("deleted", "evicted")[rest[1] % 2]  # type: ignore[assignment]
        ours = both.lib.parts_remove_setting(both.it, key, setting, CAUSES.index(cause))
        assert ours == twin.remove_values([(key, setting)], cause)
    elif verb == "outdated":
        both.lib.parts_outdated(both.it, rest[0])
        twin.count_outdated(rest[0])
    elif not here:
        assert both.verb(VERBS.get(verb, RELEASE), key) == -1
    elif verb in ("touch", "refresh", "unpin"):
        both.verb(VERBS[verb], key)
        getattr(twin, verb)(key)
    elif verb == "end_lease":
        both.verb(END_LEASE, key)
        twin.end_lease(key)
    elif verb == "remove":
        cause = CAUSES[rest[1]]
        assert both.verb(VERBS[verb], key, rest[0], CAUSES.index(cause)) == twin.remove((key, rest[0]), cause)
    elif verb == "pin":
        if key not in twin.pins:  # as Retention does
            twin.end_lease(key)
            both.verb(END_LEASE, key)
        twin.pin(key, rest[0])
        both.verb(VERBS[verb], key, rest[0])
    elif verb == "lease" and key not in twin.pins:
        twin.lease(key, rest[0], rest[1])
        assert both.verb(VERBS[verb], key, rest[0], rest[1])
        assert both.verb(FIND_LEASE, key, rest[0]) == len(twin.leases[key])
    elif verb == "release":
        twin.release(key, rest[0])
        both.verb(RELEASE, key, rest[0])
    elif verb == "expire":
        if rest[1]:
            twin.expiries[key] = rest[1]
        else:
            twin.expiries.pop(key, None)
        assert both.verb(EXPIRE, key, rest[1] or NEVER_US) == 1
    elif verb == "relabel" and rest[0] in twin.shares[key]:
        twin.relabel((key, rest[0]), as_copy(twin.shares[key][rest[0]][0], rest[1]))
        assert both.verb(RELABEL, key, rest[0], rest[1])


@pytest.mark.parametrize("replacement", REPLACEMENTS)
@settings(max_examples=80)
@given(
    steps, st.sampled_from([900, 1700, 5000]), st.sampled_from([1 << 14, 1 << 15, 1 << 16]), st.sampled_from([64, 96])
)
def test_the_memory_does_what_its_twin_does(
    replacement: str, calls: list[Any], limit_bytes: int, pin_share: int, cell_bytes: int
) -> None:
    with Both(limit_bytes, replacement, pin_share, cell_bytes=cell_bytes) as both:
        for call in calls:
            step(both, *call)
        both.compare()


@pytest.mark.brief()
@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_the_memory_is_the_same_after_each_of_many_calls(replacement: str) -> None:
    rng = random.Random(7)
    kinds = ["put"] * 5 + ["run"] * 3 + ["touch", "touch", "refresh", "unpin", "end_lease", "remove_key"]
    kinds += ["remove", "pin", "lease", "release", "expire", "relabel", "forget", "outdated"]
    with Both(2000, replacement, gossip=replacement != "lru") as both:
        for _ in range(400):
            verb, key = rng.choice(kinds), rng.choice(KEYS)
            if verb in ("put", "run"):
                shape = rng.randint(1, 6), rng.choice([1, 40, 64, 100, 150]), rng.randint(1, 3)
                step(
                    both, verb, key, rng.randint(0, 5), shape, rng.randint(0, 3), rng.randint(0, 2), rng.random() < 0.3
                )
            else:
                step(both, verb, key, rng.randint(0, 5), rng.randint(0, 4))
            both.compare()


def test_chunks_of_one_value_are_judged_by_what_is_still_to_come() -> None:
    """Of any lengths, also such as contradict the length of their value: the same verdict as the twin's."""
    rng = random.Random(11)
    for limit_bytes in (400, 700, 1100):
        with Both(limit_bytes, "lru") as both:
            for _ in range(400):
                key, index, length = rng.choice(KEYS[:3]), rng.randrange(5), rng.choice([1, 40, 60, 150])
                tag = PlacementTag(3, 2, index % 2, 0, 0, rng.choice([0, 0, 1]))
                value_bytes, payload = rng.choice([160, 300, 600]), rng.randbytes(length)
                ref = ChunkRef(key, index, 5, length, zlib.crc32(payload), value_bytes, 7, tag).pack()
                both.put(ref, payload)
                if rng.random() < 0.05:
                    step(both, rng.choice(["pin", "unpin", "remove_key"]), key, 5, 1)
                both.compare()


def test_a_pin_ends_only_beyond_its_share_of_the_memory() -> None:
    with Both(1000, "lrfu", pin_share=1 << 15) as both:
        for index, pinned in enumerate((True, True, False)):
            payload = bytes(250 - 72)
            both.put(ref_of(KEYS[0], index, 3, len(payload), 1, 0, 0, payload), payload)
            if index == 0:
                step(both, "pin", KEYS[0], 5)
            assert (KEYS[0] in both.twin.pins) == pinned, "500 of 500 bytes are not too many"
            both.compare()


def fill(both: Both, values: Iterable[int], chunks: int = 12, length: int = 6144, servers: int = 1) -> None:
    for value in values:
        key = value.to_bytes(32, "big")
        payloads = [random.Random(value * 100 + at).randbytes(length) for at in range(chunks)]
        refs = [ref_of(key, at, chunks, length, servers, value % 4, 0, payload) for at, payload in enumerate(payloads)]
        if not both.put_run(refs, payloads):
            for ref, payload in zip(refs, payloads, strict=True):
                both.put(ref, payload)


def test_payloads_stay_in_cells_side_by_side_after_many_evictions() -> None:
    with Both(1 << 20, "lru", most_chunks=0, cell_bytes=2048) as both:
        fill(both, range(60))
        for key in both.twin.shares:
            for index in both.twin.shares[key]:
                assert both.lib.parts_pieces(both.it, key, index) == 1
        figures = (ctypes.c_uint64 * 18)()
        both.lib.parts_figures(both.it, figures)
        assert figures[10] == 3 * len(both.twin)


def test_freed_cells_that_are_held_stay_as_they_are() -> None:
    with Both(100_000, "lru", most_chunks=0, cell_bytes=2048) as both:
        fill(both, range(1))
        room = (ctypes.c_uint8 * 72)(), (ctypes.c_uint8 * 6144)()
        figures = (ctypes.c_uint64 * 18)()
        both.lib.parts_hold(both.it, 1)
        both.lib.parts_get(both.it, (0).to_bytes(32, "big"), 3, *room)
        assert (
            both.verb(VERBS["remove_key"], (0).to_bytes(32, "big"), 2)
            == both.twin.remove_key((0).to_bytes(32, "big"))
            == 12
        )
        fill(both, range(1, 2))
        both.lib.parts_figures(both.it, figures)
        assert figures[10] == 72, "36 of what is held, 36 of what came"
        both.lib.parts_hold(both.it, 0)
        both.lib.parts_figures(both.it, figures)
        assert figures[10] == 36
        fill(both, range(2, 30))
        both.compare()


def test_while_freed_cells_are_held_nothing_is_evicted_in_vain() -> None:
    with Both(20_000, "lru", most_chunks=4, cell_bytes=64) as both:
        both.lib.parts_hold(both.it, 1)
        refused = []
        for number in range(200):
            payload, out = bytes(1500), numbers([0] * 3)
            ref = ref_of(KEYS[number % 2], 0, 1, 1500, 1, number % 4, 0, payload)
            both.lib.parts_put(both.it, ref, payload, 1500, 0, out)
            refused.append(not out[0])
            assert out[2] == 0
        assert refused.index(True) > 50 and all(refused[refused.index(True) :])
        both.lib.parts_hold(both.it, 0)
        both.lib.parts_put(both.it, ref_of(KEYS[0], 0, 1, 1500, 1, 0, 0, payload), payload, 1500, 0, out)
        assert out[0] == 1


def test_where_chunks_end_before_the_budget_others_are_evicted() -> None:
    """A pool of ours: the twin has no such bound."""
    both = Both(1 << 20, "lru", most_chunks=4, cell_bytes=64)
    stored = [numbers([0] * 3) for _ in range(6)]
    for number, out in enumerate(stored):
        key = bytes([number]) * 32
        both.lib.parts_put(both.it, ref_of(key, 0, 1, 40, 1, 0, 0, bytes(40)), bytes(40), 40, 0, out)
    assert [tuple(out) for out in stored] == [(1, 0, 0)] * 4 + [(1, 0, 1)] * 2
    assert [key[:1] for key in both.page(both.lib.parts_list, 0)] == [bytes([number]) for number in range(2, 6)]
    for number in range(2, 6):
        both.verb(VERBS["pin"], bytes([number]) * 32, 1)
    out = numbers([0] * 3)
    both.lib.parts_put(both.it, ref_of(bytes(32), 0, 1, 40, 1, 0, 0, bytes(40)), bytes(40), 40, 0, out)
    assert tuple(out) == (0, 0, 0), "full: nothing may be evicted"
    both.lib.parts_memory_end(both.it)


def test_an_empty_memory_touches_hardly_any_page() -> None:
    lib = library()
    it = lib.parts_memory(numbers([64 << 20, 2, 1 << 15, 1, 0, 0, 2048, 16384]))
    assert lib.parts_memory_bytes(it) > 64 << 20
    assert lib.parts_memory_resident(it) <= 4096
    lib.parts_memory_end(it)


# --- Eviction alone: long sequences of its own ---


def test_a_policy_ranks_as_its_twin_through_many_events() -> None:
    for replacement in REPLACEMENTS:
        compare_policies(replacement, events=4000, keys=40, departed=30, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("keys", "departed"), [(600, 200), (60, 16_384), (8, 6)])
@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_a_policy_ranks_as_its_twin_through_very_many_events(
    replacement: str, keys: int, departed: int, seed: int
) -> None:
    """With 8 keys the twin's worths reach the end of floats, and are rescaled, several times."""
    compare_policies(replacement, events=150_000, keys=keys, departed=departed, seed=seed)


def compare_policies(replacement: str, events: int, keys: int, departed: int, seed: int) -> None:
    """Keys come, are used by a skewed law, held, removed, and evicted by each policy's own choice."""
    lib, rng = library(), random.Random(seed)
    twin: Replacement = (
        LeastRecentlyAndFrequentlyUsed(departed) if replacement == "lrfu" else replacement_named(replacement)
    )
    it = lib.parts_ranking(numbers([REPLACEMENTS.index(replacement), keys + 2, departed]))
    names = [number.to_bytes(4, "big") * 8 for number in range(1, keys * 3 + 1)]
    here: set[bytes] = set()
    held: set[bytes] = set()
    out = (ctypes.c_uint32 * (keys + 2))()
    weights = [1 / (1 + number) for number in range(len(names))]
    for event, key in enumerate(rng.choices(names, weights, k=events)):
        draw = rng.random()
        if draw < 0.05 and key in here:
            verb = "on_removal"
        elif draw < 0.10 and key in here:
            verb = "hold"
        elif draw < 0.20 and held:
            key, verb = sorted(held)[0], "free"
        elif draw < 0.30:
            verb = "on_handover"
        else:
            verb = "on_store_or_touch" if key not in here or draw < 0.4 else "on_use"
        if verb in ("on_store_or_touch", "on_handover") and key not in here and len(here) >= keys:
            victim = twin.victim(key)
            ours = lib.parts_rank(it, 7, key)
            assert ours == (-1 if victim is None else int.from_bytes(victim[:4], "big")), event
            if victim is None:
                continue
            twin.on_removal(victim, evicted=True)
            lib.parts_rank(it, 4, victim)
            here.discard(victim)
            held.discard(victim)
        getattr(twin, verb)(key)
        lib.parts_rank(
            it,
            {"on_store_or_touch": 0, "on_use": 1, "on_handover": 2, "on_removal": 3, "hold": 5, "free": 6}[verb],
            key,
        )
        (here.discard if verb == "on_removal" else here.add)(key)
        (held.add if verb == "hold" else held.discard if verb in ("on_removal", "free") else set[bytes]().add)(key)
        if event % max(1, events // 200) == 0:
            count = lib.parts_ranked(it, out)
            assert list(out[:count]) == [int.from_bytes(each[:4], "big") for each in twin.order()], event
            now_held: list[bytes] = []
            while (victim := twin.victim()) is not None:  # all victims, one after the other
                assert lib.parts_rank(it, 7, bytes(32)) == int.from_bytes(victim[:4], "big"), event
                twin.hold(victim)
                lib.parts_rank(it, 5, victim)
                now_held.append(victim)
            assert lib.parts_rank(it, 7, bytes(32)) == -1
            for each in now_held:
                twin.free(each)
                lib.parts_rank(it, 6, each)
    if isinstance(twin, LeastRecentlyAndFrequentlyUsed):
        assert abs(lib.parts_mean_return(it) - twin.half_life / 2) < 1e-6 * twin.half_life


# --- History ---

moments = st.lists(
    st.tuples(
        st.sampled_from(["written", "still_written", "deleted", "deleted", "forgotten", "dropped"]),
        st.sampled_from(KEYS),
        st.integers(0, 2),
        st.sampled_from([0, 0, 1, 300, 999, 1000, 2500, 3000, 11_000]),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(moments)
def test_what_was_written_and_deleted_is_remembered_alike(events: list[tuple[str, bytes, int, int]]) -> None:
    lib, twin, now_us = library(), KeyHistory(), 1_700_000_000_000_000
    it = lib.parts_history(numbers([1 << 16, 1 << 14, 4096]))
    refs = [[ref_of(key, 0, 1, 40, 1, setting, 0, b"") for setting in range(3)] for key in KEYS]
    for verb, key, setting, wait_ms in events:
        now_us += wait_ms * 1000
        now_s, its = now_us / 1e6, setting_of(refs[0][setting])
        if verb == "written":
            twin.written(key, now_s)
            lib.parts_recall(it, 0, key, None, now_us)
        elif verb == "still_written":
            twin.still_written(key, now_s)
            lib.parts_recall(it, 1, key, None, now_us)
        elif verb == "dropped":
            twin.dropped([(key, its)])
            lib.parts_recall(it, 4, key + its, None, now_us)
        else:
            twin.deleted([(key, b"" if verb == "deleted" else its)], now_s)
            lib.parts_recall(it, 2 if verb == "deleted" else 3, key, its, now_us)
        for at, each in enumerate(KEYS):
            for back_us in (0, 500_000, 3_000_000, 10_000_000, 10_000_001):
                assert lib.parts_recall(it, 5, each, None, now_us - back_us) == twin.was_written_since(
                    each, (now_us - back_us) / 1e6
                )
            for ref in refs[at]:
                for ahead_us in (-1_000_000, 0, 999_999, 1_000_000):
                    assert lib.parts_recall(it, 6, ref, None, now_us + ahead_us) == twin.is_deleted(
                        ref, (now_us + ahead_us) / 1e6
                    )
                assert lib.parts_recall(it, 7, each, setting_of(ref), 0) == (twin.dead.get(each) == setting_of(ref))


def test_history_forgets_the_earliest_where_it_is_full() -> None:
    lib = library()
    it = lib.parts_history(numbers([4, 3, 2]))
    names = [bytes([number]) * 32 for number in range(8)]
    for number, key in enumerate(names[:6]):
        lib.parts_recall(it, 0, key, None, 1_000_000 + number)
    assert [lib.parts_recall(it, 5, key, None, 1_000_002) for key in names] == [0, 0, 1, 1, 1, 1, 0, 0]
    assert all(lib.parts_recall(it, 5, key, None, 1_000_001) for key in names), "not known any more"
    for number, key in enumerate(names[:5]):
        lib.parts_recall(it, 2, key, None, 2_000_000 + number)
        lib.parts_recall(it, 4, key + bytes(12), None, 0)
    refs = [key + bytes(40) for key in names[:5]]
    assert [lib.parts_recall(it, 6, ref, None, 2_000_000) for ref in refs] == [0, 0, 1, 1, 1]
    assert [lib.parts_recall(it, 7, key, bytes(12), 0) for key in names[:5]] == [0, 0, 0, 1, 1]
