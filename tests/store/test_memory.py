"""What the memory store does beyond the contract: leases that end, hostile eviction, its own account."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.store_contract import key, value

from skymemory.errors import InvalidInput
from skymemory.eviction import POLICIES
from skymemory.store.base import ABANDONED_S, LEASE_S, Presence
from skymemory.store.memory import MemoryStore


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_budget_must_be_above_zero() -> None:
    with pytest.raises(InvalidInput, match="above 0"):
        MemoryStore(0)


def test_a_lease_ends_by_itself() -> None:
    clock = Clock()
    store = MemoryStore(2000, lease_s=30.0, clock=clock)
    store.put_many([(key(1), value(1)), (key(2), value(2))])
    forgotten = store.prepare_load([key(1), key(2)])
    assert store.put_many([(key(3), value(3))]) == [False]
    clock.now_s = 31.0
    assert store.put_many([(key(3), value(3))]) == [True]
    assert store.lookup([key(2)]) == [Presence.MISS]
    assert forgotten.report is None


def test_a_store_that_took_too_long_stores_nothing() -> None:
    clock = Clock()
    store = MemoryStore(2000, lease_s=30.0, clock=clock)
    late = store.prepare_store([(key(1), value(1))])
    clock.now_s = 31.0
    assert store.complete_store(late) == [False]
    assert store.stats()["used_bytes"] == 0


def test_uncompleted_tickets_are_not_kept_forever() -> None:
    clock = Clock()
    store = MemoryStore(1 << 20, clock=clock)
    for _ in range(5):
        store.prepare_store([(key(1), value(1))])
        store.prepare_load([key(1)])
    assert store.stats()["open_leases"] == 10
    clock.now_s = LEASE_S + ABANDONED_S + 1
    store.complete_store(store.prepare_store([(key(1), value(1))]))
    store.complete_load(store.prepare_load([key(1)]))
    assert store.stats()["open_leases"] == 0


def test_a_pin_ends_by_itself_and_has_a_budget() -> None:
    clock = Clock()
    store = MemoryStore(4000, pin_fraction=0.5, clock=clock)
    store.put_many([(key(n), value(n)) for n in range(4)])
    assert store.pin([key(0), key(1), key(2)], 60.0) == [True, True, False]
    clock.now_s = 61.0
    assert store.pin([key(2)], 60.0) == [True]


def test_a_pin_lasts_as_long_as_the_latest_says_and_goes_with_its_value() -> None:
    clock = Clock()
    store = MemoryStore(4000, clock=clock)
    store.put_many([(key(1), value(1, 2000))])
    assert store.pin([key(1)], 10.0) == store.pin([key(1)], 100.0) == [True]
    clock.now_s = 50.0
    assert store.put_many([(key(2), value(2, 3000))]) == [False], "the first end has passed, the second has not"
    assert store.put_many([(key(1), value(3, 2000))]) == [True]
    assert store.put_many([(key(2), value(2, 3000))]) == [True] and store.get_many([key(1)]) == [None]


def test_a_closed_store_holds_nothing() -> None:
    store = MemoryStore(4000)
    store.put_many([(key(1), value(1))])
    ticket = store.prepare_load([key(1)])
    store.close()
    store.release(ticket)
    stats = store.stats()
    assert stats["used_bytes"] == stats["entries"] == stats["open_leases"] == 0 and stats["budget_bytes"] == 4000


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "lease", "complete", "release", "delete", "touch", "pin"]),
        st.integers(0, 7),
        st.integers(1, 900),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS)
def test_hostile_eviction_never_takes_what_is_leased_and_never_breaks_the_budget(
    operations: list[tuple[str, int, int]],
) -> None:
    store = MemoryStore(2000)
    last: dict[int, bytes] = {}
    leases: list[tuple[object, int, bytes | None]] = []
    for step, (verb, number, size) in enumerate(operations):
        if verb == "put":
            data = value(step, size)
            if store.put_many([(key(number), data)]) == [True]:
                last[number] = data
                leases = [(t, n, data if n == number else expected) for t, n, expected in leases]
        elif verb == "lease":
            there = store.lookup([key(number)]) == [Presence.HIT]
            leases.append((store.prepare_load([key(number)]), number, last[number] if there else None))
        elif verb == "complete" and leases:
            ticket, _, expected = leases.pop(0)
            (got,) = store.complete_load(ticket)  # type: ignore[arg-type]
            assert expected is None or got == expected
        elif verb == "release" and leases:
            store.release(leases.pop()[0])  # type: ignore[arg-type]
        elif verb == "delete":
            store.delete([key(number)])
            leases = [(t, n, None if n == number else expected) for t, n, expected in leases]
        elif verb == "touch":
            store.touch([key(number)])
        elif verb == "pin":
            store.pin([key(number)], size)
        stats = store.stats()
        assert 0 <= stats["used_bytes"] <= 2000
        held = [v for v in store.get_many([key(n) for n in range(8)]) if v is not None]
        assert stats["used_bytes"] == sum(map(len, held)) and stats["entries"] == len(held)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_one_step_does_what_two_do(policy: str, data: st.DataObject) -> None:
    """Puts, loads, deletions, leases and pins in a store with little room: whatever is evicted is the same."""
    clock = Clock()
    one, two = (MemoryStore(3000, policy=policy, clock=clock) for _ in range(2))
    for _ in range(data.draw(st.integers(1, 40))):
        clock.now_s += 1.0
        what, number = data.draw(st.sampled_from("ppppgggdlns")), data.draw(st.integers(0, 9))
        if what == "p":
            item = (key(number), bytes([number]) * data.draw(st.sampled_from([0, 300, 800, 1400])))
            assert (one.put_now(*item) or one.put_many([item])[0]) == two.put_many([item])[0]
        elif what == "g":
            keys = [key(number), key(data.draw(st.integers(0, 9)))]
            assert one.get_now(keys) == two.get_many(keys)
        elif what == "d":
            assert one.delete([key(number)]) == two.delete([key(number)])
        elif what == "l":
            for store in (one, two):
                store.prepare_load([key(number)])
        elif what == "n":
            assert one.pin([key(number)], 5.0) == two.pin([key(number)], 5.0)
        else:
            for store in (one, two):
                store.prepare_store([(key(number), bytes(500))])
    keys = [key(number) for number in range(10)]
    assert one.get_many(keys) == two.get_many(keys)
    mine, theirs = ({name: count for name, count in store.stats().items() if count} for store in (one, two))
    assert mine == theirs


def test_a_value_that_is_put_in_one_step_keeps_its_known_depth() -> None:
    """The policy sees it as it is put: what was known of its place must not be forgotten before."""
    for put in (lambda store, item: store.put_now(*item), lambda store, item: store.put_many([item])[0]):
        store = MemoryStore(3000, policy="length")
        assert put(store, (key(2), bytes(300)))
        store.get_many([key(1), key(0)])  # 0 follows 1
        assert put(store, (key(0), bytes(1400))) and put(store, (key(1), bytes(1400)))
        assert [one is None for one in store.get_many([key(0), key(1), key(2)])] == [True, False, False]
