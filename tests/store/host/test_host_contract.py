"""The host store under the contract of every tier: its owner, and a client beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.evicting_contract import SIZE, EvictingContract
from tests.contract.store_contract import BUDGETED, Clock, StoreContract, Tier

from skymemory.store.host.client import HostStore
from skymemory.store.host.owner import ArenaStore
from skymemory.store.host.server import ArenaServer, listen_in


class TestOwner(StoreContract):
    can = BUDGETED | {"clock"}

    @pytest.fixture
    def tier(self, folder: Path) -> Iterator[Tier]:
        clock = Clock()
        store = ArenaStore(folder, 256_000, clock=clock)
        yield Tier(store, budget_bytes=256_000, later=clock.later)
        store.close()


class TestOwnerTellsOfEvictions(EvictingContract):
    @pytest.fixture
    def tier(self, folder: Path) -> Iterator[ArenaStore]:
        store = ArenaStore(folder, 4 * SIZE)
        yield store
        store.close()


class TestClient(StoreContract):
    can = BUDGETED | {"clock"}

    @pytest.fixture
    def tier(self, folder: Path) -> Iterator[Tier]:
        clock = Clock()
        owner = ArenaStore(folder, 256_000, clock=clock)
        server = ArenaServer(owner, listen_in(folder))
        store = HostStore(folder, clock=clock)
        yield Tier(
            store,
            budget_bytes=256_000,
            later=clock.later,
            another=lambda: HostStore(folder, clock=clock),
            settle=owner.enter_posts,
        )
        store.close()
        server.close()
        owner.close()
