"""Leases that EXISTS begins."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.contract.store_contract import key

from skymemory.store.base import LoadTicket
from skymemory.store.memory import MemoryStore
from skymemory.store.redis_server import leases
from skymemory.store.redis_server.leases import Leases


def test_where_no_further_lease_has_room_one_that_is_there_is_extended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_MAX_LEASES", 2)
    with MemoryStore(1 << 20) as store:
        store.put_many([(key(number), b"x") for number in range(3)])
        held = Leases(store, 1 << 20, lambda: 0.0, lambda keys: [60.0] * len(keys))
        assert held.begin([key(0), key(1)]) == [True, True]
        assert held.begin([key(0), key(2), key(1)]) == [True, False, True]


def test_two_that_begin_a_lease_of_a_key_at_the_same_time_both_have_it() -> None:
    meeting = threading.Barrier(2, timeout=20)

    class Meeting(MemoryStore):
        def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
            meeting.wait()
            return super().prepare_load(keys)

    with Meeting(1 << 20) as store, ThreadPoolExecutor(2) as threads:
        store.put_many([(key(0), b"x")])
        held = Leases(store, 1 << 20, lambda: 0.0, lambda keys: [60.0] * len(keys))
        assert list(threads.map(held.begin, [[key(0)], [key(0)]])) == [[True], [True]]
        assert held.take(key(0)) is not None and held.take(key(0)) is None
