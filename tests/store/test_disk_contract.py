"""The disk store under the contract of every tier, and beside its judge, the memory store, in random traces."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.evicting_contract import SIZE, EvictingContract
from tests.contract.store_contract import BUDGETED, Clock, StoreContract, Tier, key, value

from skymemory.store.base import Presence
from skymemory.store.disk import DiskStore
from skymemory.store.memory import MemoryStore


class TestDisk(StoreContract):
    can = BUDGETED | {"clock"}

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        clock = Clock()
        store = DiskStore(tmp_path / "disk", 256_000, clock=clock)

        def another() -> DiskStore:
            store.close()
            return DiskStore(tmp_path / "disk", 256_000)

        yield Tier(store, budget_bytes=256_000, another=another, later=clock.later)
        store.close()


class TestSyncedDisk(StoreContract):
    can = BUDGETED | {"clock"}

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        clock = Clock()
        store = DiskStore(tmp_path / "disk", 256_000, sync="each", clock=clock)
        yield Tier(store, budget_bytes=256_000, later=clock.later)
        store.close()


class TestDiskTellsOfEvictions(EvictingContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[DiskStore]:
        store = DiskStore(tmp_path / "disk", 4 * SIZE)
        yield store
        store.close()


@pytest.mark.parametrize("size_bytes", [1, 1000])
def test_a_file_that_was_spoiled_or_is_gone_is_evicted_and_not_reported(tmp_path: Path, size_bytes: int) -> None:
    """Its listener cannot take it."""
    store = DiskStore(tmp_path / "disk", 2000 + size_bytes)
    reported: list[bytes] = []
    store.on_evict = lambda evicted, data, place: reported.append(evicted)
    store.put_many([(key(0), value(0, size_bytes)), (key(1), value(1, 1000)), (key(2), value(2, 1000))])
    spoiled, gone = (tmp_path / "disk" / "values" / key(number).hex() for number in (2, 1))
    spoiled.write_bytes(spoiled.read_bytes()[:-1] + b"?")
    gone.unlink()
    assert store.put_many([(key(9), value(9, 2000 + size_bytes))]) == [True]
    assert reported == [key(0)] and store.lookup([key(n) for n in range(3)]) == [Presence.MISS] * 3
    store.close()


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("seed", range(5))
def test_keeps_and_evicts_what_the_judge_does(tmp_path: Path, seed: int) -> None:
    now_s = [0.0]
    disk = DiskStore(tmp_path / "disk", 20_000, lease_s=5.0, clock=lambda: now_s[0])
    judge = MemoryStore(20_000, lease_s=5.0, clock=lambda: now_s[0])
    dice = random.Random(seed)
    every = [key(number) for number in range(40)]
    leases: list[tuple[object, object]] = []
    for _ in range(300):
        now_s[0] += dice.choice((0.0, 0.1, 1.0))
        chain = dice.sample(every, dice.randint(1, 6))
        match dice.choice(("put", "put", "put", "get", "touch", "pin", "delete", "lease", "end")):
            case "put":
                items = [(k, value(dice.randrange(99), dice.randint(0, 3000))) for k in chain]
                assert disk.put_many(items) == judge.put_many(items)
            case "get":
                assert disk.get_many(chain) == judge.get_many(chain)
            case "touch":
                disk.touch(chain), judge.touch(chain)
            case "pin":
                ttl_s = dice.choice((0.0, 3.0))
                assert disk.pin(chain, ttl_s) == judge.pin(chain, ttl_s)
            case "delete":
                assert disk.delete(chain) == judge.delete(chain)
            case "lease":
                leases.append((disk.prepare_load(chain), judge.prepare_load(chain)))
            case "end" if leases:
                ours, theirs = leases.pop()
                disk.release(ours), judge.release(theirs)  # type: ignore[arg-type]
        assert disk.lookup(every) == judge.lookup(every)
        assert disk.stats()["used_bytes"] == judge.stats()["used_bytes"]
    assert disk.stats()["evicted_total"] == judge.stats()["evicted_total"] > 0
    disk.close()
