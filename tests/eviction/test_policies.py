"""Policies of eviction against naive twins, and the store with each of them under pressure and shields."""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.eviction.naive_policies import TWINS, NaiveLrfu, depth_of

from skymemory import eviction
from skymemory.eviction import (
    POLICIES,
    REPLACEMENTS,
    LeastRecentlyAndFrequentlyUsed,
    RankedKeys,
    policy_named,
    replacement_named,
)
from skymemory.protocol.satellite.memory import ChunkStore
from skymemory.protocol.wire import CHUNK_REF_BYTES, ChunkRef, PlacementTag

KEYS = [bytes([number]) * 32 for number in range(8)]


calls = st.tuples(
    st.sampled_from(["touched", "arrived", "used", "used", "removed", "evict", "evict", "hold", "free"]),
    st.sampled_from(KEYS),
)


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(steps=st.lists(calls, max_size=6) | st.lists(calls, min_size=40, max_size=120))
def test_a_policy_does_what_its_naive_twin_does(name, steps):
    policy, twin = policy_named(name, depth_of), TWINS[name]()
    held: set[bytes] = set()
    for verb, key in steps:
        if verb == "evict":
            victim = policy.victim(key)
            assert victim == twin.victim(set(twin.order()) - held - {key})
            if victim is not None:
                policy.removed(victim, evicted=True)
                twin.removed(victim, evicted=True)
        elif verb in ("hold", "free"):
            if key in twin.order():
                getattr(policy, verb)(key)
                (held.add if verb == "hold" else held.discard)(key)
        else:
            getattr(policy, verb)(key)
            getattr(twin, verb)(key)
            if verb == "removed":
                held.discard(key)
        assert policy.order() == twin.order()
        assert policy.victim() == twin.victim(set(twin.order()) - held)


def test_arc_gives_room_back_to_what_was_seen_again():
    """Of a key seen once that comes back it learns that those seen once need room; of one seen again, the other."""
    policy = policy_named("arc", depth_of)
    once, again, other = (bytes([number]) * 32 for number in range(3))
    for key in (once, again, other):
        policy.touched(key)
    policy.removed(once, evicted=True)
    policy.touched(once)
    assert policy.victim() == again, "of the two that were seen once"
    policy.used(again)
    assert policy.victim() == once, "one seen once has its room now"
    policy.removed(again, evicted=True)
    policy.touched(again)
    assert policy.victim() == other


def test_lfu_never_ages_and_lfuda_does():
    """What was requested twice long ago goes before a newcomer only where the evicted have raised the age."""
    orders = {}
    for name in ("lfu", "lfuda"):
        policy = policy_named(name, depth_of)
        once, twice, newcomer = (bytes([number]) * 32 for number in range(3))
        policy.touched(once)
        policy.touched(twice)
        policy.used(twice)
        policy.removed(once, evicted=True)
        policy.touched(newcomer)
        orders[name] = policy.order()
    assert orders == {"lfu": [newcomer, twice], "lfuda": [twice, newcomer]}


def test_what_was_held_and_goes_late_does_not_turn_the_age_back():
    """It has the rank of a time long past; newcomers start where the others were."""
    policy = policy_named("lfuda", depth_of)
    held, often, newcomer, latest = (bytes([number]) * 32 for number in range(4))
    policy.touched(held)
    policy.hold(held)
    for verb in (policy.touched, policy.used, policy.used):
        verb(often)
    assert policy.victim() == often
    policy.removed(often, evicted=True)
    policy.touched(newcomer)
    policy.free(held)
    assert policy.victim() == held
    policy.removed(held, evicted=True)
    policy.touched(latest)
    assert policy.order() == [newcomer, latest]


def test_the_heap_does_not_grow_with_the_uses():
    keys: RankedKeys[int] = RankedKeys()
    for rank in range(5000):
        keys.put(KEYS[0], rank)
    assert len(keys._heap) < 100 and keys.first() == KEYS[0]
    for _ in range(5000):
        keys.hold(KEYS[0])
        keys.free(KEYS[0])
    assert len(keys._heap) < 100 and keys.first() == KEYS[0]


def test_prompts_seen_once_do_not_push_out_a_shared_prefix():
    """What LRU loses and LFU with aging keeps; and what is not requested any more goes in the end."""
    shared, scan = KEYS[0], [bytes([1, number]) * 16 for number in range(200)]
    survived = {}
    for name in REPLACEMENTS:
        policy, held = replacement_named(name), 1
        policy.touched(shared)
        for _ in range(9):
            policy.used(shared)
        for at, key in enumerate(scan):
            policy.touched(key)
            held += 1
            if held > 8:
                victim = policy.victim(key)
                policy.removed(victim, evicted=True)
                held -= 1
                if victim == shared:
                    survived[name] = at
                    break
    assert survived["lru"] == 7 and 40 < survived["lfuda"] < 150
    assert "lrfu" not in survived, "two hundred events are no time: a half-life is two thousand to begin with"


def serve(policy, here: set[bytes], prompt: list[bytes], room: int) -> int:
    """What a satellite's memory of so many keys sees of one prompt, as clients do it; how many blocks hit."""
    found = next((at for at, key in enumerate(prompt) if key not in here), len(prompt))
    for key in reversed(prompt[:found]):
        policy.used(key)
    for key in reversed(prompt[found:]):
        while len(here) >= room and key not in here:
            victim = policy.victim(key)
            here.discard(victim)
            policy.removed(victim, evicted=True)
        here.add(key)
        policy.touched(key)
    for key in reversed(prompt[:found]):
        if key in here:
            policy.touched(key)
    return found


def test_conversations_among_documents_read_once_are_kept():
    """LRU turns over before any key returns and hits nothing; a policy with a memory of evicted keys learns it."""
    hits = {}
    for name in REPLACEMENTS:
        policy, here, hits[name] = replacement_named(name), set(), 0
        for turn in range(1000):
            talk = [bytes([turn % 40, depth]) * 16 for depth in range(4)]
            hits[name] += serve(policy, here, talk, 200)
            serve(policy, here, [turn.to_bytes(2) + bytes([depth]) * 30 for depth in range(10)], 200)
    assert hits["lru"] == hits["lfuda"] == 0 and hits["lrfu"] > 3500, hits


@pytest.mark.parametrize(("late", "room"), [(1, 400), (2, 800)])
def test_what_is_stored_stays_until_its_reader_comes(late, room):
    """Prefill and decode apart: each block is stored by one engine and read once by another, a few prompts later."""
    policy, here, hits = replacement_named("lrfu"), set(), 0
    prompts = [[number.to_bytes(4) + bytes([depth]) * 28 for depth in range(25)] for number in range(300)]
    for number, prompt in enumerate(prompts):
        serve(policy, here, prompt, room)
        hits += serve(policy, here, prompts[number - late], room) if number >= late else 0
    assert hits == 25 * (300 - late)


def test_the_half_life_follows_the_returns_of_keys_that_are_gone_too():
    policy = LeastRecentlyAndFrequentlyUsed()
    for round_number in range(60):
        for number in range(300):
            key = number.to_bytes(4) * 8
            policy.touched(key)
            policy.removed(key, evicted=True)
        assert round_number or policy.half_life == 2000
    assert 590 < policy.half_life < 610


def test_no_float_overflows_and_the_order_stays(monkeypatch):
    monkeypatch.setattr(eviction, "_MOST", 1.01)
    policy, twin = LeastRecentlyAndFrequentlyUsed(), NaiveLrfu()
    rng = random.Random(1)
    for _ in range(3000):
        key = rng.choice(KEYS)
        verb = rng.choice(["touched", "used", "removed"])
        getattr(policy, verb)(key)
        getattr(twin, verb)(key)
        assert policy._now <= 1.01
    assert policy.order() == twin.order()


def test_the_departed_are_forgotten_in_turn():
    policy = LeastRecentlyAndFrequentlyUsed(departed=10)
    for number in range(50):
        policy.touched(number.to_bytes(4) * 8)
        policy.removed(number.to_bytes(4) * 8)
    assert list(policy._departed) == [number.to_bytes(4) * 8 for number in range(40, 50)]


@pytest.mark.parametrize("name", REPLACEMENTS)
@settings(max_examples=100, deadline=None)
@given(prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=60), room=st.integers(3, 12))
def test_a_block_never_outlives_the_one_before_it(name, prompts, room):
    """Whatever is asked for and whenever something goes, what is left of a tree of prompts is closed under prefixes."""
    policy, here = replacement_named(name), set()
    for path in prompts:
        serve(policy, here, [bytes(path[: depth + 1]).ljust(32, b"x") for depth in range(len(path))], 1000)
        while len(here) > room:
            victim = policy.victim()
            here.discard(victim)
            policy.removed(victim, evicted=True)
        for key in here:
            parent = bytes(key.rstrip(b"x")[:-1]).ljust(32, b"x")
            assert parent in here or parent == b"x" * 32


def put(store: ChunkStore, key: bytes, index: int, version: int = 1) -> bool:
    payload = bytes([index, version]) * 50
    tag = PlacementTag(3, 10, index % 10, 0, 0)
    ref = ChunkRef(key, index, 10, 100, zlib.crc32(payload), 5000, version, tag).pack()
    return store.put((key, index), ref, payload).stored


verbs = st.tuples(
    st.sampled_from(["put", "put", "put", "get", "refresh", "remove", "remove_key", "pin", "unpin"]),
    st.sampled_from(KEYS[:5]),
    st.integers(0, 4),
)


@pytest.mark.parametrize("name", REPLACEMENTS)
@settings(max_examples=120, deadline=None)
@given(steps=st.lists(verbs, max_size=100), room=st.integers(1, 14))
def test_the_store_keeps_its_books_under_every_policy(name, steps, room):
    store = ChunkStore(room * (100 + CHUNK_REF_BYTES), replacement_named(name))
    store.evicted = {}
    for verb, key, index in steps:
        shielded = {name: chunk for name, chunk in store.items() if name[0] in store.pins}
        if verb == "put":
            store.evicted.clear()
            before = dict(store.items())
            stored = put(store, key, index)
            after = dict(store.items())
            gone = before.keys() - after.keys() - {(key, index)}
            assert store.evicted.keys() == {its_key for its_key, _ in gone} - {key} | store.evicted.keys() & {key}
            assert not (stored and key in store.evicted) and ((key, index) in after) == stored
            assert not {name for name in gone if name in shielded}
        elif verb == "get":
            store.get_run(key, [index])
        elif verb == "remove":
            store.remove((key, index))
        elif verb == "pin":
            if store.presence(key) is not None:
                store.pin(key)
        else:
            getattr(store, verb)(key)
        items = list(store.items())
        assert len(items) == len(store) == len(dict(items))
        assert store.used_bytes == len(items) * (100 + CHUNK_REF_BYTES) <= store.limit_bytes
        assert {its_key for (its_key, _), _ in items} == set(store.shares)
        assert all(store.presence(its_key) is not None for its_key in KEYS[:5] if its_key in store.pins)


def test_what_is_shielded_stays_and_the_rest_is_full():
    store = ChunkStore(4 * (100 + CHUNK_REF_BYTES))
    for index in range(4):
        put(store, KEYS[0], index)
    store.pin(KEYS[0])
    assert not put(store, KEYS[1], 0)
    chunk = (ChunkRef(KEYS[1], 0, 10, 100, 0, 5000, 1, PlacementTag(3, 10, 0, 0, 0)).pack(), bytes(100))
    assert store.put_run(KEYS[1], [0], [chunk], 100 + CHUNK_REF_BYTES) is None
    assert put(store, KEYS[0], 2), "replacing a chunk of a shielded key leaves it shielded"
    assert KEYS[0] in store.pins and len(store) == 4
    store.unpin(KEYS[0])
    assert put(store, KEYS[1], 0) and len(store) == 4


def test_what_comes_round_again_and_again_by_handovers_does_not_outrank_what_people_ask_for():
    """A satellite sees the same dead value once in every turn; that must not add up."""
    policy = LeastRecentlyAndFrequentlyUsed()
    for _ in range(50):
        policy.arrived(KEYS[0])
        policy.removed(KEYS[0])
    policy.arrived(KEYS[0])
    assert policy.half_life == LeastRecentlyAndFrequentlyUsed().half_life
    policy.touched(KEYS[1])
    policy.used(KEYS[1])
    assert policy.order() == [KEYS[0], KEYS[1]]
