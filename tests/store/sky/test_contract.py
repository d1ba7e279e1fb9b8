"""The constellation under the contract of every tier: simulated and over UDP, with an index and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.store_contract import StoreContract, Tier
from tests.store.conftest import (
    connection,
    cut_off,
    put_forward,
    simulated,
    stopped,
    store_on,
    store_over,
    udp_sky_and_loop,
)

from skymemory.placement.fan_out import FanOut
from skymemory.protocol.client.gateway import ACCESS_MODES
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.testbed.plan import make_plan
from skymemory.testbed.virtual import VirtualConstellation

MEMORY_BYTES = 8 << 20
ASKED = frozenset({"limit", "clock", "outage"})


class TestSimulatedWithIndex(StoreContract):
    can = ASKED

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        sky, journal = simulated(), tmp_path / "index"
        store = store_over(sky, index=SharedIndex(journal, born=True), memory_per_satellite_bytes=MEMORY_BYTES)
        yield Tier(
            store,
            most_bytes=store.settings.largest_value_bytes,
            pins=False,
            leases=False,
            another=lambda: store_over(sky, 2, SharedIndex(journal)),
            later=lambda seconds: sky.settle(sky.now_s + seconds),
            outage=lambda: cut_off(sky),
        )
        store.close()


@pytest.mark.slow
@pytest.mark.seeded
class TestSimulatedWithAnIndexOfItsOwn(StoreContract):
    can = frozenset({"clock", "outage"})

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        sky = simulated()
        store = store_over(sky, index=SharedIndex())
        yield Tier(
            store,
            pins=False,
            leases=False,
            later=lambda seconds: sky.settle(sky.now_s + seconds),
            outage=lambda: cut_off(sky),
        )
        store.close()


class TestSimulatedWithoutIndex(StoreContract):
    can = ASKED

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        sky = simulated()
        store = store_over(sky, memory_per_satellite_bytes=MEMORY_BYTES)
        yield Tier(
            store,
            most_bytes=store.settings.largest_value_bytes,
            pins=False,
            leases=False,
            knows_absence=False,
            another=lambda: store_over(sky, 2),
            later=lambda seconds: sky.settle(sky.now_s + seconds),
            outage=lambda: cut_off(sky),
        )
        store.close()


@pytest.mark.slow
@pytest.mark.seeded
class TestSimulatedWithLittleMemory(StoreContract):
    """Ten satellites of 128 KiB: loads are leased there, too."""

    can = frozenset({"limit", "flood", "leases", "clock", "outage"})

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        sky = simulated(memory_bytes=128 << 10)
        store = store_over(sky, index=SharedIndex(), memory_per_satellite_bytes=128 << 10)
        yield Tier(
            store,
            most_bytes=store.settings.largest_value_bytes,
            pins=False,
            flood_bytes=10 * 128 << 10,
            later=lambda seconds: sky.settle(sky.now_s + seconds),
            outage=lambda: cut_off(sky),
        )
        store.close()


@pytest.mark.slow
@pytest.mark.seeded
class TestSimulatedBySize(StoreContract):
    """Each value on as many satellites as its size is worth, and with little memory."""

    can = frozenset({"limit", "flood", "leases", "clock", "outage"})

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        memory_bytes = 128 << 10
        sky, journal = simulated(memory_bytes), tmp_path / "index"
        how = {
            "memory_per_satellite_bytes": memory_bytes,
            "fan_out": FanOut({1: 0.004, 4: 0.006, 10: 0.01}, 1e-4, memory_bytes),
        }
        store = store_over(sky, index=SharedIndex(journal, born=True), **how)
        yield Tier(
            store,
            most_bytes=store.settings.largest_value_bytes,
            pins=False,
            flood_bytes=10 * memory_bytes,
            another=lambda: store_over(sky, 2, SharedIndex(journal), **how),
            later=lambda seconds: sky.settle(sky.now_s + seconds),
            outage=lambda: cut_off(sky),
        )
        store.close()


class UdpContract(StoreContract):
    """A real host over real sockets: its outage is that it is stopped."""

    can = ASKED
    INDEXED = True
    COMPLETE = True

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        def index(name: str, born: bool = False) -> SharedIndex | None:
            return SharedIndex(tmp_path / name, born=born) if self.INDEXED else None

        with udp_sky_and_loop() as (plan, loop):
            store = store_on(plan, index("index", self.COMPLETE))
            client = connection(store)
            yield Tier(
                store,
                most_bytes=store.settings.largest_value_bytes,
                pins=False,
                leases=False,
                knows_absence=self.INDEXED and self.COMPLETE,
                another=lambda: store_on(plan, index("index" if self.COMPLETE else "other"), None, 8),
                later=lambda seconds: put_forward(client, seconds),
                outage=lambda: stopped(loop, client),
            )
            store.close()


class TestUdpWithIndexFile(UdpContract):
    pass


@pytest.mark.slow
class TestUdpWithIncompleteIndexFile(UdpContract):
    COMPLETE = False


@pytest.mark.slow
@pytest.mark.seeded
class TestUdpWithoutIndex(UdpContract):
    INDEXED = False


@pytest.mark.slow
@pytest.mark.parametrize("access", [mode for mode in ACCESS_MODES if mode != "ideal"])
class TestOtherWaysToReachIt(StoreContract):
    can = ASKED

    @pytest.fixture
    def tier(self, access: str) -> Iterator[Tier]:
        plan = make_plan("testbed-19x5", access=access, memory_per_satellite_bytes=MEMORY_BYTES)
        virtual = VirtualConstellation(plan)
        store, sky = virtual.store(index=SharedIndex()), virtual.simulated
        yield Tier(
            store,
            most_bytes=store.settings.largest_value_bytes,
            pins=False,
            leases=False,
            later=lambda seconds: sky.settle(sky.now_s + seconds),
            outage=lambda: cut_off(sky),
        )
        store.close()
