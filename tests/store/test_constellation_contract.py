"""The constellation under the contract of every tier: simulated and over UDP, with an index and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.store_contract import StoreContract, Tier
from tests.store.conftest import cut_off, simulated, store_on, store_over, udp_sky

from skymemory.protocol.pointing import ACCESS_MODES
from skymemory.store.shared_index import SharedIndex
from skymemory.testbed.plan import make_plan
from skymemory.testbed.virtual import VirtualConstellation


class TestSimulatedWithIndex(StoreContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        sky, journal = simulated(), tmp_path / "index"
        store = store_over(sky, index=SharedIndex(journal, born=True))
        yield Tier(
            store, pins=False, leases=False, another=lambda: store_over(sky, 2, SharedIndex(journal)),
            later=lambda seconds: sky.settle(sky.now_s + seconds), outage=lambda: cut_off(sky),
        )  # fmt: skip
        store.close()


class TestSimulatedWithAnIndexOfItsOwn(StoreContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        store = store_over(simulated(), index=SharedIndex())
        yield Tier(store, pins=False, leases=False)
        store.close()


class TestSimulatedWithoutIndex(StoreContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        sky = simulated()
        store = store_over(sky)
        yield Tier(
            store, pins=False, leases=False, knows_absence=False, another=lambda: store_over(sky, 2),
            later=lambda seconds: sky.settle(sky.now_s + seconds), outage=lambda: cut_off(sky),
        )  # fmt: skip
        store.close()


class TestSimulatedWithLittleMemory(StoreContract):
    """Ten satellites of 128 KiB: loads are leased there, too."""

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        store = store_over(simulated(memory_bytes=128 << 10), index=SharedIndex())
        yield Tier(store, pins=False, flood_bytes=10 * 128 << 10)
        store.close()


class TestUdpWithIndexFile(StoreContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        with udp_sky() as plan:
            store = store_on(plan, SharedIndex(tmp_path / "index", born=True))
            yield Tier(
                store,
                pins=False,
                leases=False,
                another=lambda: store_on(plan, SharedIndex(tmp_path / "index"), None, 8),
            )
            store.close()


class TestUdpWithIncompleteIndexFile(StoreContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        with udp_sky() as plan:
            store = store_on(plan, SharedIndex(tmp_path / "index"))
            yield Tier(
                store, pins=False, leases=False, knows_absence=False,
                another=lambda: store_on(plan, SharedIndex(tmp_path / "other"), None, 8),
            )  # fmt: skip
            store.close()


class TestUdpWithoutIndex(StoreContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        with udp_sky() as plan:
            store = store_on(plan)
            yield Tier(
                store, pins=False, leases=False, knows_absence=False, another=lambda: store_on(plan, None, None, 8)
            )
            store.close()


@pytest.mark.parametrize("access", [mode for mode in ACCESS_MODES if mode != "los"])
class TestOtherWaysToReachIt(StoreContract):
    @pytest.fixture
    def tier(self, access: str) -> Iterator[Tier]:
        plan = make_plan("testbed-19x5", access=access, memory_per_satellite_bytes=8 << 20)
        store = VirtualConstellation(plan).store(index=SharedIndex())
        yield Tier(store, pins=False, leases=False)
        store.close()
