"""The memory store under the contract of every tier."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.contract.evicting_contract import SIZE, EvictingContract
from tests.contract.store_contract import BUDGETED, Clock, StoreContract, Tier

from skymemory.store.memory import MemoryStore


class TestMemory(StoreContract):
    can = BUDGETED | {"clock"}

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        clock = Clock()
        store = MemoryStore(256_000, clock=clock)
        yield Tier(store, budget_bytes=256_000, later=clock.later)
        store.close()


class TestMemoryTellsOfEvictions(EvictingContract):
    @pytest.fixture
    def tier(self) -> Iterator[MemoryStore]:
        store = MemoryStore(4 * SIZE)
        yield store
        store.close()
