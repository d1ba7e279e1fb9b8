"""Values that expire in a memory and in a disk store."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.contract.store_contract import Clock, key, value

from skymemory.errors import InvalidInput
from skymemory.store.accounting import BudgetedStore
from skymemory.store.base import Expiring, Presence
from skymemory.store.disk import DiskStore
from skymemory.store.memory import MemoryStore
from skymemory.store.named_values import NamedValues

BUDGET_BYTES = 100_000


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, clock: Clock, tmp_path: Path) -> Iterator[BudgetedStore]:
    kinds: dict[str, Callable[[], BudgetedStore]] = {
        "memory": lambda: MemoryStore(BUDGET_BYTES, clock=clock),
        "disk": lambda: DiskStore(tmp_path / "disk", BUDGET_BYTES, clock=clock),
    }
    with kinds[request.param]() as store:
        yield store


def test_a_value_is_gone_after_its_lifetime_and_not_before(store: BudgetedStore, clock: Clock) -> None:
    assert isinstance(store, Expiring)
    store.put_many([(key(number), value(number)) for number in range(3)])
    assert store.expire([key(1), key(2), key(9)], 10.0) == [True, True, False]
    assert store.expire([key(2)], math.inf) == [True]
    lease = store.prepare_load([key(1)])
    (view,) = store.get_many([key(1)])
    clock.later(9.9)
    assert store.prefix([key(number) for number in range(3)]) == 3
    clock.later(0.2)
    assert store.lookup([key(number) for number in range(3)]) == [Presence.HIT, Presence.MISS, Presence.HIT]
    assert store.sizes([key(1)]) == [None] and store.complete_load(lease) == [None] and view == value(1)
    stats = store.stats()
    assert stats["expired_total"] == 1 and stats["used_bytes"] == 2000 and stats["entries"] == 2
    clock.later(1e6)
    assert store.get_many([key(0), key(2)]) == [value(0), value(2)]


def test_another_value_under_the_key_has_no_lifetime(store: BudgetedStore, clock: Clock) -> None:
    store.put_many([(key(1), value(1)), (key(2), value(2))])
    store.expire([key(1), key(2)], 10.0)
    store.put_many([(key(1), value(3))])
    store.delete([key(2)])
    store.put_many([(key(2), value(4))])
    store.put_many([(key(5), value(5))])
    store.expire([key(5)], 5.0)
    for number in range(50, 56):  # evicts it
        store.put_many([(key(number), value(number, BUDGET_BYTES // 5))])
    store.put_many([(key(5), value(6))])
    clock.later(11.0)
    assert store.get_many([key(5)]) == [value(6)] and store.stats().get("expired_total", 0) == 0


def test_the_last_lifetime_counts(store: BudgetedStore, clock: Clock) -> None:
    store.put_many([(key(1), value(1)), (key(2), value(2))])
    for seconds in (10.0, 100.0, 20.0):
        store.expire([key(1)], seconds)
    for _ in range(300):
        store.expire([key(2)], 15.0)
    assert len(store._inventory.lifetimes._heap) < 100
    clock.later(14.0)
    assert store.lookup([key(1), key(2)]) == [Presence.HIT] * 2
    clock.later(2.0)
    assert store.lookup([key(1), key(2)]) == [Presence.HIT, Presence.MISS]
    clock.later(5.0)
    assert store.lookup([key(1)]) == [Presence.MISS]
    store.put_many([(key(1), value(1))])
    assert store.expire([key(1)], 0.0) == [True] and store.lookup([key(1)]) == [Presence.MISS]
    with pytest.raises(InvalidInput):
        store.expire([key(1)], math.nan)


def test_named_values_expire(store: BudgetedStore, clock: Clock) -> None:
    assert NamedValues(store).put("report", b"text", ttl_s=60.0).ok
    clock.later(59.0)
    assert NamedValues(store).get("report") == b"text"
    clock.later(2.0)
    assert NamedValues(store).get("report") is None


def test_the_next_process_ends_lifetimes_on_disk(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "disk", BUDGET_BYTES) as store:
        store.put_many([(key(number), value(number)) for number in range(4)])
        assert store.expire([key(1)], 0.05) == [True] and store.expire([key(2)], 3.0) == [True]
        assert store.expire([key(3)], 2.0) == [True] and store.expire([key(3)], math.inf) == [True]
    time.sleep(0.06)
    with DiskStore(tmp_path / "disk", BUDGET_BYTES) as store:
        assert store.get_many([key(number) for number in range(4)]) == [value(0), None, value(2), value(3)]
        assert not (tmp_path / "disk" / "values" / key(1).hex()).exists()
        time.sleep(3.0)
        assert store.get_many([key(number) for number in (0, 2, 3)]) == [value(0), None, value(3)]


def test_a_file_system_without_attributes_promises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "setxattr", refused)
    clock = Clock()
    with DiskStore(tmp_path / "disk", BUDGET_BYTES, clock=clock) as store:
        store.put_many([(key(1), value(1))])
        assert store.expire([key(1)], 10.0) == [False]
        clock.later(20.0)
        assert store.get_many([key(1)]) == [value(1)]
