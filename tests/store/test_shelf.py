"""Who goes when a store is full: what a naive twin of the policy says, and never a block before those behind it."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.naive_policies import TWINS

from skymemory.errors import InvalidInput
from skymemory.store.base import LoadTicket, Presence, StoreTicket
from skymemory.store.chains import Chains
from skymemory.store.memory import MemoryStore
from skymemory.store.policies import POLICIES
from skymemory.store.shelf import Shelf

TREE = {  # each key's neighbour before it: two roots, forks, and a chain of four
    0: None, 1: 0, 2: 1, 3: 2, 4: 1, 5: 0, 6: None, 7: 6, 8: 7, 9: 6
}  # fmt: skip
BUDGET_BYTES = 1000


def key(number: int) -> bytes:
    """Its depth in the first byte, which is what ``naive_policies.depth_of`` looks at."""
    return bytes([len(chain(number)) - 1, number]) * 16


def chain(number: int | None) -> list[int]:
    return [] if number is None else [*chain(TREE[number]), number]


ANCESTORS = {key(number): [key(one) for one in chain(number)[:-1]] for number in TREE}
CHAINS = {number: [key(one) for one in chain(number)] for number in TREE}


class NaiveShelf:
    """Everything counted anew whenever it is asked for."""

    def __init__(self, policy: str) -> None:
        self.twin = TWINS[policy]()
        self.sizes: dict[bytes, int] = {}
        self.held: list[bytes] = []

    def may_go(self, without: list[bytes]) -> set[bytes]:
        staying = [one for one in self.sizes if one not in without] + self.held
        return {
            one
            for one in self.sizes
            if one not in without and one not in self.held and not any(one in ANCESTORS[other] for other in staying)
        }

    def put(self, items: list[tuple[bytes, int]]) -> None:
        reserved: list[tuple[bytes, int]] = []
        for one, size in items:
            excess = sum(self.sizes.values()) + sum(size for _, size in reserved) + size - BUDGET_BYTES
            victims: list[bytes] = []
            behind = ANCESTORS[one][-1:]
            self.held += behind
            while excess > 0:
                victim = self.twin.victim(self.may_go(victims))
                if victim is None:
                    break
                victims.append(victim)
                excess -= self.sizes[victim]
            del self.held[len(self.held) - len(behind) :]
            if excess <= 0:
                for victim in victims:
                    del self.sizes[victim]
                    self.twin.gone(victim, evicted=True)
                reserved.append((one, size))
                self.held.append(one)
        for one, size in reserved:
            self.held.remove(one)
            self.sizes[one] = size
            self.twin.noted(one)
        self.touch([one for one, _ in items])

    def touch(self, keys: list[bytes]) -> None:
        for one in reversed(keys):
            if one in self.sizes:
                self.twin.noted(one)

    def use(self, keys: list[bytes]) -> None:
        for one in reversed(keys):
            if one in self.sizes:
                self.twin.used(one)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["serve", "serve", "serve", "serve", "touch", "delete", "lease", "release", "pin", "unpin"]),
        st.sampled_from(list(TREE)),
        st.sampled_from([90, 150, 400]),
    ),
    max_size=60,
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_a_store_holds_what_its_naive_twin_holds(policy: str, steps: list[tuple[str, int, int]]) -> None:
    store, naive = MemoryStore(BUDGET_BYTES, policy=policy, pin_fraction=1.0), NaiveShelf(policy)
    leases: list[tuple[LoadTicket, list[bytes]]] = []
    pinned: list[bytes] = []
    for verb, number, size in steps:
        keys = CHAINS[number]
        if verb == "serve":
            found = store.prefix(keys)
            store.get_many(keys[:found])
            naive.use(keys[:found])
            missing = [one for one in keys if one not in naive.sizes]
            store.put_many([(one, bytes(size)) for one in missing])
            naive.put([(one, size) for one in missing])
            pinned = [one for one in pinned if one in naive.sizes]
        elif verb == "touch":
            store.touch(keys)
            naive.touch(keys)
        elif verb == "delete":
            there = keys[-1] in naive.sizes
            assert store.delete(keys[-1:]) == [there]
            if there:
                del naive.sizes[keys[-1]]
                naive.twin.gone(keys[-1])
                if keys[-1] in pinned:
                    pinned.remove(keys[-1])
                    naive.held.remove(keys[-1])
        elif verb == "lease":
            there_now = [one for one in keys if one in naive.sizes]
            leases.append((store.prepare_load(keys), there_now))
            naive.held += there_now
        elif verb == "release" and leases:
            ticket, held = leases.pop(0)
            store.release(ticket)
            for one in held:
                naive.held.remove(one)
        elif verb == "pin":
            assert store.pin(keys[-1:], 100.0) == [keys[-1] in naive.sizes]
            if keys[-1] in naive.sizes and keys[-1] not in pinned:
                pinned.append(keys[-1])
                naive.held.append(keys[-1])
        elif verb == "unpin":
            store.pin(keys[-1:], 0.0)
            if keys[-1] in pinned:
                pinned.remove(keys[-1])
                naive.held.remove(keys[-1])
        everything = [key(one) for one in TREE]
        held_now = {one for one, at in zip(everything, store.lookup(everything), strict=True) if at is Presence.HIT}
        assert held_now == set(naive.sizes), (verb, number, size)
        assert store.stats()["used_bytes"] == sum(naive.sizes.values()) <= BUDGET_BYTES


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=30, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(list(TREE)), st.booleans()), max_size=60))
def test_presence_stays_prefix_closed(policy: str, steps: list[tuple[int, bool]]) -> None:
    store = MemoryStore(600, policy=policy)
    for number, is_read in steps:
        keys = CHAINS[number]
        found = store.prefix(keys)
        if is_read:
            store.get_many(keys[:found])
        store.put_many([(one, bytes(100)) for one in keys[found:]])
        assert store.prefix(keys) == len(keys), "what was just stored is there to its end"
        here = {one for one in ANCESTORS if store.lookup([one]) == [Presence.HIT]}
        assert all(before in here for one in here for before in ANCESTORS[one])


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_stored_in_parts_is_one_chain(policy: str) -> None:
    """An engine stores batch by batch: the end of a batch is not the end of the chain."""
    store = MemoryStore(1000, policy=policy)
    long = [bytes([number]) * 32 for number in range(8)]
    assert store.prefix(long) == 0
    store.put_many([(one, bytes(100)) for one in long[:4]])
    store.put_many([(one, bytes(100)) for one in long[4:]])
    for number in range(100, 108):
        store.put_many([(bytes([number]) * 32, bytes(100))])
        there = [at is Presence.HIT for at in store.lookup(long)]
        assert there == sorted(there, reverse=True)


def test_a_lease_keeps_what_is_before_it_too() -> None:
    store = MemoryStore(300)
    keys = CHAINS[3]
    store.prefix(keys)
    store.put_many([(one, bytes(100)) for one in keys[:3]])
    ticket = store.prepare_load(keys[2:3])
    assert store.put_many([(key(6), bytes(100))]) == [False]
    store.complete_load(ticket)
    assert store.put_many([(key(6), bytes(100))]) == [True]
    assert store.prefix(keys) == 2


def test_room_that_cannot_be_made_costs_nobody_anything() -> None:
    store = MemoryStore(300)
    store.put_many([(one, bytes(100)) for one in CHAINS[2]])
    store.pin([key(0)], 100.0)
    assert store.put_many([(key(6), bytes(250))]) == [False]
    assert store.prefix(CHAINS[2]) == 3
    assert store.put_many([(key(6), bytes(200))]) == [True], "the two behind what is pinned may go"
    assert store.prefix(CHAINS[2]) == 1


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidInput, match="lru, lfu, lfuda, length, arc, lrfu"):
        MemoryStore(1000, policy="fifo")


# --- chains ---


class Watcher:
    def __init__(self, remembered: int = 100) -> None:
        self.may: dict[bytes, bool] = {}
        self.chains = Chains(self.may.__setitem__, remembered)


calls = st.tuples(
    st.sampled_from(["learn", "learn", "came", "came", "left", "hold", "free"]),
    st.lists(st.sampled_from([key(number) for number in range(6)]), min_size=1, max_size=4),
)


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(calls, max_size=60), remembered=st.sampled_from([1, 3, 100]))
def test_calls_that_are_no_chains_never_make_anybody_immortal(
    steps: list[tuple[str, list[bytes]]], remembered: int
) -> None:
    """Whatever was named after whatever: in the end all can go, one after the other, and nothing is left of them."""
    watcher = Watcher(remembered)
    chains, here, held = watcher.chains, set[bytes](), Counter[bytes]()
    for verb, keys in steps:
        one = keys[0]
        if verb == "learn":
            chains.learn(keys)
        elif verb == "came" and one not in here:
            here.add(one)
            watcher.may[one] = True
            chains.came(one)
        elif verb == "left":
            here.discard(one)
            watcher.may.pop(one, None)
            chains.left(one)
        elif verb == "hold":
            held[one] += 1
            chains.hold(one)
        elif verb == "free" and held[one]:
            held[one] -= 1
            chains.free(one)
        assert set(watcher.may) == here
        assert not any(watcher.may[one] for one in here if held[one])
    for one in held.elements():
        chains.free(one)
    while here:
        free = [one for one in here if watcher.may[one]]
        assert free, "everybody waits for somebody"
        here.discard(free[0])
        del watcher.may[free[0]]
        chains.left(free[0])
    assert len(chains) == 0


def test_what_was_deleted_still_joins_what_is_before_it_and_behind_it() -> None:
    watcher = Watcher()
    chains = watcher.chains
    chains.learn(CHAINS[3])
    for one in CHAINS[3]:
        watcher.may[one] = True
        chains.came(one)
    chains.left(key(2))
    chains.left(key(1))
    assert not watcher.may[key(0)], "3 is behind it"
    chains.left(key(3))
    assert watcher.may[key(0)]


def test_a_neighbour_learnt_late_counts() -> None:
    watcher = Watcher()
    for number in (0, 1, 2):
        watcher.may[key(number)] = True
        watcher.chains.came(key(number))
    watcher.chains.learn([key(1), key(2)])
    watcher.chains.learn([key(0), key(1), key(2)])
    assert [watcher.may[key(number)] for number in (0, 1, 2)] == [False, False, True]
    assert watcher.chains.depth(key(1)) == 1 and watcher.chains.before(key(2)) == key(1)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_victim_is_found_without_a_look_at_all_entries(policy: str) -> None:
    """Ten times the entries may not make an eviction ten times as long."""
    seconds = {}
    for entries in (1_000, 10_000):
        shelf = Shelf(entries, 0, policy)
        for number in range(entries):
            shelf.put(number.to_bytes(4) * 8, 1)
        tickets = [StoreTicket(((number.to_bytes(4) * 8, b"x"),), 1e9) for number in range(50_000, 50_500)]
        began_s = time.perf_counter()
        for ticket in tickets:
            shelf.set_aside(ticket, 0.0)
            shelf.put(ticket.items[0][0], 1)
            shelf.end_store(ticket)
        seconds[entries] = time.perf_counter() - began_s
    assert seconds[10_000] < 5 * seconds[1_000] + 0.02
