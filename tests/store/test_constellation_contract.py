"""The constellation under the contract of every tier: simulated and over UDP, with an index and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.store_contract import StoreContract, Tier
from tests.store.conftest import simulated, store_over, udp_store

from skymemory.protocol.pointing import ACCESS_MODES
from skymemory.store.shared_index import SharedIndex
from skymemory.testbed.plan import make_plan
from skymemory.testbed.virtual import VirtualConstellation


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
        with udp_store(SharedIndex(tmp_path / "index", born=True)) as store:
            yield Tier(store, pins=False, leases=False)


class TestUdpWithIncompleteIndexFile(StoreContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        with udp_store(SharedIndex(tmp_path / "index")) as store:
            yield Tier(store, pins=False, leases=False, knows_absence=False)


class TestUdpWithoutIndex(StoreContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        with udp_store() as store:
            yield Tier(store, pins=False, leases=False, knows_absence=False)


@pytest.mark.parametrize("access", [mode for mode in ACCESS_MODES if mode != "los"])
class TestOtherWaysToReachIt(StoreContract):
    @pytest.fixture
    def tier(self, access: str) -> Iterator[Tier]:
        plan = make_plan("testbed-19x5", access=access, memory_per_satellite_bytes=8 << 20)
        store = VirtualConstellation(plan).store(index=SharedIndex())
        yield Tier(store, pins=False, leases=False)
        store.close()
