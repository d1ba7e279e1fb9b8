"""The constellation under the contract of every tier: simulated and over UDP, with an index and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.store_contract import StoreContract, Tier
from tests.store.conftest import simulated, store_over, udp_store

from skymemory.store.shared_index import SharedIndex


class TestSimulatedWithIndex(StoreContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        store = store_over(simulated(), index=SharedIndex())
        yield Tier(store, pins=False, leases=False)
        store.close()


class TestSimulatedWithoutIndex(StoreContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        store = store_over(simulated())
        yield Tier(store, pins=False, leases=False, knows_absence=False)
        store.close()


class TestUdpWithIndexFile(StoreContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        with udp_store(SharedIndex(tmp_path / "index")) as store:
            yield Tier(store, pins=False, leases=False)


class TestUdpWithoutIndex(StoreContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        with udp_store() as store:
            yield Tier(store, pins=False, leases=False, knows_absence=False)
