"""The parts of a hierarchy by themselves: breaker, bytes in flight, workers, keys held, outbound values, dirty keys."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

import pytest
from tests.contract.store_contract import key

from skymemory.cache.tiers.load import InFlightBudget
from skymemory.cache.tiers.outbound import Moving, Outbound
from skymemory.cache.tiers.tier import Backlog, DirtyKeys, Tier, TierSettings
from skymemory.cache.tiers.workers import TierWorkers, WorkerCall
from skymemory.circuit_breaker import BreakerConfig, CircuitBreaker
from skymemory.errors import InvalidInput
from skymemory.kv.block import Place
from skymemory.metrics import SharedCounters
from skymemory.store.base import KeyLocks, Presence, Store
from skymemory.store.memory import MemoryStore

CONFIG = BreakerConfig(failures=3, first_wait_s=1.0, last_wait_s=4.0, probe_limit_s=10.0)


def opened(now_s: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker(CONFIG)
    for _ in range(3):
        breaker.failed(now_s)
    return breaker


def test_a_breaker_opens_after_failures_in_a_row() -> None:
    breaker = CircuitBreaker(CONFIG)
    for outcome in "ffsff":
        breaker.succeeded() if outcome == "s" else breaker.failed(0.0)
    assert breaker.closed
    breaker.failed(0.0)
    assert breaker.state == "open" and breaker.times_opened == 1


def test_a_breaker_probes_at_growing_intervals_one_at_a_time() -> None:
    breaker = opened()
    now_s, probes = 0.0, []
    while now_s < 16.0:
        if breaker.probe_due(now_s):
            assert breaker.state == "half-open" and not breaker.probe_due(now_s)
            probes.append(now_s)
            breaker.probed(False, now_s)
        now_s += 0.25
    assert probes == [1.0, 3.0, 7.0, 11.0, 15.0] and breaker.times_opened == 1


def test_a_breaker_closes_on_a_probe_and_is_on_trial_at_first() -> None:
    breaker = opened()
    breaker.succeeded()  # an answer to something asked long ago
    assert not breaker.closed
    assert breaker.probe_due(1.0)
    breaker.probed(True, 1.0)
    assert breaker.closed
    breaker.failed(1.5)
    assert breaker.state == "open" and not breaker.probe_due(3.4) and breaker.probe_due(3.5)
    breaker.probed(True, 3.5)
    breaker.succeeded()
    breaker.failed(4.0)
    assert breaker.closed


def test_a_call_that_loads_nothing_proves_nothing_of_loads() -> None:
    breaker = CircuitBreaker(CONFIG)
    for _ in range(3):
        assert breaker.closed
        breaker.succeeded(loaded=False)
        breaker.failed(0.0, load=True)
    assert breaker.state == "open" and breaker.probe_due(1.0)
    breaker.probed(True, 1.0)
    breaker.succeeded(loaded=False)
    breaker.failed(2.0, load=True)
    assert breaker.state == "open" and not breaker.probe_due(3.9) and breaker.probe_due(4.0), "on trial until it loads"
    breaker.probed(True, 4.0)
    breaker.succeeded()
    for load in (True, True, False):
        breaker.failed(5.0, load=load)
        breaker.succeeded(loaded=not load)
    assert breaker.closed


def test_a_probe_that_is_never_heard_of_counts_as_failed() -> None:
    breaker = opened()
    assert breaker.probe_due(1.0) and not breaker.probe_due(10.9)
    assert not breaker.probe_due(11.0) and breaker.state == "open"
    breaker.probed(True, 11.5)
    assert breaker.state == "open"
    assert breaker.probe_due(13.0)


def test_a_breaker_that_could_not_work_is_refused() -> None:
    with pytest.raises(InvalidInput, match="first_wait"):
        BreakerConfig(first_wait_s=5.0, last_wait_s=1.0)


def test_bytes_in_flight_are_bounded_and_the_oversized_goes_alone() -> None:
    budget = InFlightBudget(100)
    assert budget.take(60, 0.0) and not budget.take(60, 0.0) and budget.take(40, 0.0)
    threading.Timer(0.02, lambda: budget.give_back(60)).start()
    assert budget.take(50, 5.0)
    budget.give_back(40)
    budget.give_back(50)
    assert budget.take(500, 0.0) and not budget.take(1, 0.0)
    assert budget.bytes.most_bytes == 500
    with pytest.raises(InvalidInput):
        InFlightBudget(0)


def test_who_waits_for_room_has_it_as_soon_as_bytes_are_given_back() -> None:
    budget, had = InFlightBudget(10), threading.Event()
    assert budget.take(8, 0.0)
    waiting = threading.Thread(target=lambda: budget.take(5, 60.0) and had.set(), daemon=True)
    waiting.start()
    assert not had.wait(0.05)
    budget.give_back(8)
    assert had.wait(20.0) and budget.bytes.used_bytes == 5


def test_a_call_does_not_wait_for_a_thread_that_has_just_taken_another() -> None:
    taken, begin, second = threading.Event(), threading.Event(), threading.Event()

    class Slow(queue.SimpleQueue[WorkerCall[object] | None]):
        """Who takes the first call from it is held before it goes on."""

        def get(self, block: bool = True, timeout: float | None = None) -> WorkerCall[object] | None:
            call = super().get(block, timeout)
            if not taken.is_set():
                taken.set()
                begin.wait(30)
            return call

    workers = TierWorkers("two", threads=2)
    workers._calls = Slow()
    assert workers.submit(WorkerCall(lambda: None)) and taken.wait(30)
    assert workers.submit(WorkerCall(second.set)) and second.wait(30), "a second thread is allowed, and not started"
    begin.set()
    workers.close()


def test_abandoned_work_is_reported_at_its_end_or_not_begun() -> None:
    workers, gate, late = TierWorkers("slow", threads=1, waiting=1), threading.Event(), []
    first: WorkerCall[object] = WorkerCall(lambda: gate.wait(5.0) and "landed")
    second: WorkerCall[object] = WorkerCall(lambda: late.append("must not run"))
    assert workers.submit(first)
    while not workers.submit(second):
        time.sleep(0.001)
    while workers.submit(WorkerCall(lambda: None)):  # until the one thread and the one waiting place are taken
        time.sleep(0.001)
    assert not first.wait(0.0) and first.give_up(late.append) and second.give_up(late.append)
    gate.set()
    assert second.wait(5.0)
    assert late == ["landed", None]
    assert not first.give_up(late.append)
    workers.close()


def test_an_error_goes_to_the_one_who_waits() -> None:
    call: WorkerCall[object] = WorkerCall(lambda: 1 // 0)
    call.run()
    assert isinstance(call.error, ZeroDivisionError)


def test_moving_takes_only_what_is_free_and_unchanged() -> None:
    locks = KeyLocks()
    versions = locks.versions([key(1), key(1 << 16), key(3 << 16)])
    with locks.exclusive([key(1)]), locks.try_lock([key(1), key(1 << 16)]) as held:
        assert held == {key(1 << 16)}
    with locks.try_lock([key(1), key(1 << 16)], versions) as held:
        assert held == {key(1 << 16)}
    order: list[str] = []
    with locks.try_lock([key(2)]):
        thread = threading.Thread(target=lambda: _change(locks, order))
        thread.start()
        time.sleep(0.02)
        order.append("moved")
    thread.join()
    assert order == ["moved", "changed"]


def _change(locks: KeyLocks, order: list[str]) -> None:
    with locks.exclusive([key(2)]):
        order.append("changed")


def test_what_is_dirty_is_never_dropped_for_room() -> None:
    outbound = Outbound(250)
    assert outbound.add(Moving(key(1), bytes(100), (1,), dirty=True))
    assert outbound.add(Moving(key(2), bytes(100), (1,)))
    assert not outbound.add(Moving(key(3), bytes(100), (1,))) and outbound.dropped == 1
    assert outbound.add(Moving(key(4), bytes(100), (1,), dirty=True)) and outbound.dropped == 2
    assert not outbound.add(Moving(key(5), bytes(100), (1,), dirty=True))
    assert set(outbound.get([key(n) for n in range(9)])) == {key(1), key(4)} and outbound.used_bytes == 200


def test_only_the_latest_value_of_a_key_is_on_its_way() -> None:
    outbound = Outbound(1000)
    old, new = Moving(key(1), b"old", (1,), dirty=True), Moving(key(1), b"new", (1,), dirty=True)
    outbound.add(old)
    outbound.add(new)
    outbound.add(Moving(key(1), b"evicted meanwhile", (1,)))
    outbound.done([old])
    assert outbound.get([key(1)])[key(1)] is new and outbound.still_queued([old, new]) == [new]
    assert outbound.discard([key(1), key(2)]) == {key(1)} and outbound.used_bytes == len(outbound) == 0


def test_batches_have_one_destination_and_bounded_bytes() -> None:
    outbound = Outbound(1000)
    movings = [Moving(key(n), bytes(100), (1 + n % 2,)) for n in range(6)]
    for moving in movings:
        outbound.add(moving)
    assert outbound.next_batch(200) == [movings[0], movings[2]] and outbound.next_batch(1) == [movings[0]]
    outbound.requeue([movings[0], movings[2], movings[4]])
    assert outbound.next_batch(1000) == [movings[1], movings[3], movings[5]]


def test_a_doubt_is_settled_only_when_no_call_is_under_way() -> None:
    dirty_keys = DirtyKeys(limit=3)
    dirty_keys.call_given_up([key(1)])
    assert dirty_keys.uncertain(key(1)) and key(1) not in dirty_keys and not dirty_keys.uncertain(key(2))
    dirty_keys.add([key(1), key(2)])
    assert dirty_keys.to_delete(9) == [key(2)]
    dirty_keys.clear([key(1), key(2)])
    assert key(1) in dirty_keys and key(2) not in dirty_keys
    dirty_keys.call_ended([key(1)])
    assert dirty_keys.to_delete(9) == [key(1)]
    dirty_keys.clear([key(1)])
    assert not dirty_keys
    dirty_keys.add([key(n) for n in range(3)])
    assert dirty_keys.full


def test_a_doubt_ends_only_where_nothing_has_happened_since() -> None:
    dirty_keys = DirtyKeys(limit=9)
    mark = dirty_keys.add([key(1), key(2), key(3), key(4)])
    dirty_keys.add([key(2)])
    dirty_keys.add([key(3)], deleted=True)
    dirty_keys.call_given_up([key(4)])
    dirty_keys.clear_since([key(n) for n in range(6)], mark)
    assert [key(n) in dirty_keys for n in range(6)] == [False, False, True, True, True, False]
    assert [dirty_keys.delete_pending(key(n)) for n in range(5)] == [False, False, False, True, False]
    dirty_keys.add([key(3)])
    assert dirty_keys.delete_pending(key(3)), "put again, but not there"
    dirty_keys.clear([key(3)])
    assert not dirty_keys.delete_pending(key(3))


def test_what_is_owed_is_bounded_and_keeps_its_order() -> None:
    backlog = Backlog(limit=3)
    backlog.add({key(n): Place(0) for n in range(4)})
    backlog.add({key(1): Place(0)})
    assert (
        list(backlog.first(9)) == [key(1), key(2), key(3)]
        and list(backlog.first(1)) == [key(1)]
        and backlog.dropped == 1
    )
    backlog.discard([key(2), key(7)])
    assert list(backlog.first(9)) == [key(1), key(3)] and len(backlog) == 2


class Scripted(MemoryStore):
    """Answers a lookup and a prefix as scripted."""

    def __init__(self) -> None:
        super().__init__(name="scripted")
        self.presences: list[Presence] = []
        self.error: BaseException | None = None

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        if self.error is not None:
            raise self.error
        return self.presences

    def prefix(self, keys: Sequence[bytes]) -> int:
        return len(keys)


def tier_of(store: Store) -> Tier:
    return Tier(store, TierSettings(local=True), 1, KeyLocks(), SharedCounters(), time.monotonic)


def test_what_a_tier_is_doubted_about_is_neither_there_nor_in_a_prefix() -> None:
    store = Scripted()
    tier, keys = tier_of(store), [key(number) for number in range(4)]
    store.presences = [Presence.HIT] * 4
    assert tier.lookup(keys) == [Presence.HIT] * 4 and tier.prefix(keys) == 4
    tier.dirty_keys.add([keys[2]])
    assert tier.lookup(keys) == [Presence.HIT, Presence.HIT, Presence.MISS, Presence.HIT] and tier.prefix(keys) == 2
    tier.close()


def test_an_answer_of_another_length_is_none() -> None:
    store = Scripted()
    tier, keys = tier_of(store), [key(number) for number in range(3)]
    for presences in ([], [Presence.HIT] * 2, [Presence.HIT] * 4):
        store.presences = presences
        assert tier.lookup(keys) == [Presence.MISS] * 3
    tier.close()


def test_a_tier_that_is_broken_is_a_miss_and_a_programming_error_is_not() -> None:
    store = Scripted()
    tier = tier_of(store)
    store.error = ConnectionError("gone")
    assert tier.lookup([key(1)]) == [Presence.MISS] and tier.counters.as_dict()["tier_failures_total{scripted}"] == 1
    store.error = TypeError("ours")
    with pytest.raises(TypeError, match="ours"):
        tier.lookup([key(1)])
    tier.close()
