"""A store read at a bounded rate: the contract of every tier, and loads that take the time of their bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from tests.contract.hostile_store import HostileStore
from tests.contract.store_contract import BUDGETED, StoreContract, Tier, key, value
from tests.contract.store_contract import Clock as ContractClock

from skymemory.errors import InvalidInput
from skymemory.native import Rows
from skymemory.store.memory import MemoryStore
from skymemory.store.wrappers import RateLimited


class TestRateLimited(StoreContract):
    can = BUDGETED | {"clock"}

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        clock = ContractClock()
        store = RateLimited(MemoryStore(256_000, clock=clock), 1e12)
        yield Tier(store, budget_bytes=256_000, later=clock.later)
        store.close()


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def limited(**options: float) -> tuple[RateLimited, Clock]:
    clock, inner = Clock(), MemoryStore(1 << 20)
    inner.put_many([(key(number), value(number, 1000)) for number in range(8)])
    return RateLimited(inner, 1000.0, clock=clock, sleep=clock.sleep, **options), clock


def test_a_load_takes_the_time_of_its_bytes_and_a_miss_none() -> None:
    store, clock = limited()
    assert store.get_many([key(0), key(1), key(99)]) == [value(0), value(1), None]
    assert clock.now_s == pytest.approx(2.0)
    store.get_many([key(99)])
    assert clock.now_s == pytest.approx(2.0)
    clock.now_s = 10.0  # the link was idle: what it did not carry is not made up for
    store.get_many([key(2)])
    assert clock.now_s == pytest.approx(11.0)
    store.bytes_per_s = 500.0
    store.get_many([key(2)])
    assert clock.now_s == pytest.approx(13.0)


def test_a_bucket_left_alone_lets_a_burst_through() -> None:
    store, clock = limited(burst_s=1.5)
    clock.now_s = 100.0
    store.get_many([key(0)])
    assert clock.now_s == 100.0
    store.get_many([key(0)])
    assert clock.now_s == pytest.approx(100.5)


def test_loads_of_several_threads_share_the_rate() -> None:
    inner = MemoryStore(1 << 20)
    inner.put_many([(key(number), value(number, 10_000)) for number in range(4)])
    store = RateLimited(inner, 400_000.0)
    began_s = time.monotonic()
    threads = [threading.Thread(target=store.get_many, args=([key(number)],)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.1 <= time.monotonic() - began_s < 10
    assert store.backlog_s == 0
    assert store.estimate_load_s([key(0)], 0.0) >= 0


def test_a_rate_that_is_none_is_refused() -> None:
    for rate in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidInput, match="above 0"):
            RateLimited(MemoryStore(), rate)


def test_what_is_received_in_place_takes_the_time_of_all_its_bytes() -> None:
    clock = Clock()
    store = RateLimited(HostileStore(in_place=True), 1000.0, clock=clock, sleep=clock.sleep)
    assert all(store.put_many([(key(number), bytes(100)) for number in range(2)]))
    ticket = store.prepare_load([key(0), key(1)])
    ticket.rows = [Rows(memoryview(bytearray(10)), memoryview(bytearray(90)), 0, 9, 10, 10), None]
    assert [len(value) for value in store.complete_load(ticket) if value is not None] == [10, 100]
    assert clock.now_s == pytest.approx(0.2)
