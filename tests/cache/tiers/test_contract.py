"""Hierarchies under the contract of every tier: of one store, of several, written through and written back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.store_contract import BUDGETED, Clock, StoreContract, Tier
from tests.store.conftest import simulated, store_over

from skymemory.cache.tiers.load import OUTBOUND
from skymemory.cache.tiers.store import HierarchySettings, TieredStore
from skymemory.cache.tiers.tier import TierSettings
from skymemory.store.base import Store
from skymemory.store.memory import MemoryStore
from skymemory.store.sky.shared_index import SharedIndex

LOCAL, REMOTE = TierSettings(local=True), TierSettings()


class TestOneStore(StoreContract):
    """With a single tier every rule about budgets, leases and pins is that tier's."""

    can = BUDGETED | {"clock"}

    @pytest.fixture(params=[LOCAL, REMOTE], ids=["local", "threads"])
    def tier(self, request: pytest.FixtureRequest) -> Iterator[Tier]:
        clock = Clock()
        store = TieredStore([(MemoryStore(256_000, clock=clock), request.param)], clock=clock)
        yield Tier(store, budget_bytes=256_000, supplied_by=("memory",), later=clock.later)
        store.close()


@pytest.mark.parametrize("write_back", [False, True], ids=["through", "back"])
class TestThreeStores(StoreContract):
    can = frozenset({"limit", "leases", "pins", "clock"})

    @pytest.fixture
    def tier(self, write_back: bool) -> Iterator[Tier]:
        clock = Clock()
        names = ("near", "middle", "far")
        sizes = (100_000, 200_000, 1 << 24)
        store = TieredStore(
            [
                (MemoryStore(size, name=name, clock=clock), LOCAL if name == "near" else REMOTE)
                for name, size in zip(names, sizes, strict=True)
            ],
            HierarchySettings(write_back=write_back),
            clock=clock,
        )
        yield Tier(store, most_bytes=sizes[-1], supplied_by=(*names, OUTBOUND), later=clock.later)
        store.close()


@pytest.mark.parametrize("write_back", [False, True], ids=["through", "back"])
class TestMemoryOverTheSky(StoreContract):
    can = frozenset({"limit", "leases", "pins", "clock"})

    @pytest.fixture
    def tier(self, write_back: bool, tmp_path: Path) -> Iterator[Tier]:
        sky, journal, clock = simulated(), tmp_path / "index", Clock()
        far = store_over(sky, index=SharedIndex(journal, born=True), memory_per_satellite_bytes=8 << 20)
        store = TieredStore(
            [(MemoryStore(100_000, clock=clock), LOCAL), (far, REMOTE)],
            HierarchySettings(write_back=write_back),
            clock=clock,
        )

        def later(seconds: float) -> None:
            clock.later(seconds)
            sky.settle(sky.now_s + seconds)

        def another() -> Store:
            assert store.flush(5.0)
            return store_over(sky, 2, SharedIndex(journal))

        yield Tier(
            store,
            most_bytes=far.settings.largest_value_bytes,
            supplied_by=("memory", "constellation", OUTBOUND),
            another=another,
            later=later,
        )
        store.close()
