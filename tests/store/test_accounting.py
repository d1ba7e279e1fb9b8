"""Who goes when a store is full: what a naive twin of the policy says, and never a block before those behind it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.eviction.naive_policies import TWINS
from tests.store.key_tree import ANCESTORS, CHAINS, TREE, key

from skymemory.errors import InvalidInput
from skymemory.eviction import POLICIES
from skymemory.store.accounting import Inventory
from skymemory.store.base import LoadTicket, Presence, StoreTicket
from skymemory.store.memory import MemoryStore

BUDGET_BYTES = 1000


class NaiveShelf:
    """Everything counted again at each call."""

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
                    self.twin.removed(victim, evicted=True)
                reserved.append((one, size))
                self.held.append(one)
        for one, size in reserved:
            self.held.remove(one)
            self.sizes[one] = size
            self.twin.touched(one)
        self.touch([one for one, _ in items])

    def touch(self, keys: list[bytes]) -> None:
        for one in reversed(keys):
            if one in self.sizes:
                self.twin.touched(one)

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


@pytest.mark.brief(every=3)
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
                naive.twin.removed(keys[-1])
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


def test_room_that_cannot_be_made_evicts_nothing() -> None:
    store = MemoryStore(300)
    store.put_many([(one, bytes(100)) for one in CHAINS[2]])
    store.pin([key(0)], 100.0)
    assert store.put_many([(key(6), bytes(250))]) == [False]
    assert store.prefix(CHAINS[2]) == 3
    assert store.put_many([(key(6), bytes(200))]) == [True], "the two behind what is pinned may go"
    assert store.prefix(CHAINS[2]) == 1


def test_of_keys_that_are_used_together_the_first_is_the_most_recent() -> None:
    """In one order for all: in memory it is that of the policy, on a disk that of the files' times."""
    shelf = Inventory(BUDGET_BYTES, 0, "lru")
    keys = [bytes([number]) * 32 for number in range(3)]
    for one in keys:
        shelf.put(one, 10)
    assert shelf.use(keys[:2]) == [keys[1], keys[0]]
    assert shelf._policy.order() == [keys[2], keys[1], keys[0]]


@pytest.mark.parametrize(("policy", "ages"), [("lfu", False), ("lfuda", True)])
def test_what_was_asked_for_often_once_goes_in_the_end_only_where_the_policy_ages(policy: str, ages: bool) -> None:
    store, often = MemoryStore(20, policy=policy), b"often".ljust(32)
    store.put_many([(often, bytes(10))])
    for _ in range(5):
        store.get_many([often])
    for number in range(40):
        fresh = number.to_bytes(32, "big")
        assert store.put_many([(fresh, bytes(10))]) == [True]
        store.get_many([fresh])
    assert store.lookup([often]) == [Presence.MISS if ages else Presence.HIT]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidInput, match="lru, lfu, lfuda, length, arc, lrfu"):
        MemoryStore(1000, policy="fifo")


def _evictions_s(policy: str) -> dict[int, float]:
    """Of this thread's processor time, by the number of entries."""
    seconds = {}
    for entries in (1_000, 10_000):
        shelf = Inventory(entries, 0, policy)
        for number in range(entries):
            shelf.put(number.to_bytes(4) * 8, 1)
        tickets = [StoreTicket(((number.to_bytes(4) * 8, b"x"),), 1e9) for number in range(50_000, 50_500)]
        began_s = time.thread_time()
        for ticket in tickets:
            shelf.reserve(ticket, 0.0)
            (victim,) = shelf.in_the_way([(ticket.items[0][0], 1)])[1]
            shelf.evict(victim)
            shelf.put(ticket.items[0][0], 1)
            shelf.end_store(ticket)
        seconds[entries] = time.thread_time() - began_s
    return seconds


@pytest.mark.brief("lru")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_victim_is_found_without_a_look_at_all_entries(policy: str) -> None:
    """Ten times the entries may not make an eviction ten times as long: the shortest of three, for what else runs takes
    caches, too.
    """
    runs = [_evictions_s(policy) for _ in range(3)]
    assert min(run[10_000] for run in runs) < 5 * min(run[1_000] for run in runs) + 0.02
