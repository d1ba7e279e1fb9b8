"""What a hierarchy does beyond the contract: attribution, promotion, demotion, write-back, estimates."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cache.test_manager import LAYOUT, TOKENS, context, load, save
from tests.cache.tiers.faulty_tier import sealed
from tests.cache.tiers.small_tiers import LOCAL, REMOTE, items, near_and_far, over, soon, sources
from tests.contract.store_contract import key
from tests.store.conftest import simulated, store_over

from skymemory.cache.blocks import BlockCache
from skymemory.cache.tiers.load import OUTBOUND
from skymemory.cache.tiers.store import HierarchySettings, TieredStore
from skymemory.cache.tiers.tier import TierSettings
from skymemory.errors import InvalidInput, ValueTooLarge
from skymemory.store.base import LEASE_S, Presence
from skymemory.store.disk import DiskStore
from skymemory.store.memory import MemoryStore
from skymemory.store.sky.shared_index import SharedIndex


def test_the_nearest_tier_that_holds_a_key_supplies_it() -> None:
    stores = [MemoryStore(1 << 20, name=name) for name in ("near", "middle", "far")]
    tiers = over(*stores, promote="never")
    for store, numbers in zip(stores, [(1,), (1, 2), (1, 2, 3)], strict=True):
        store.put_many(items(*numbers))
    assert sources(tiers, 3, 1, 2, 4, 1) == ["far", "near", "middle", "", "near"]
    stats = tiers.stats()
    assert [stats[f"tier_hits_total{{{name}}}"] for name in ("near", "middle", "far")] == [1, 1, 1]
    assert stats["tier_bytes_total{middle}"] == 1000
    assert stats["far_hits_total"] == 1 and stats["misses_total"] == 1
    tiers.close()


def test_prefix_and_lookup_over_blocks_spread_over_tiers() -> None:
    for seed in range(40):
        dice = random.Random(seed)
        stores = [MemoryStore(1 << 20, name=name) for name in ("near", "middle", "far")]
        tiers = over(*stores)
        chain = list(range(dice.randrange(1, 12)))
        held = {number for number in chain if dice.random() < 0.85}
        for number in held:
            for store in dice.sample(stores, dice.randrange(1, 3)):
                store.put_many(items(number))
        keys = [key(number) for number in chain]
        assert tiers.prefix(keys) == next((n for n in chain if n not in held), len(chain)), seed
        assert [one is Presence.HIT for one in tiers.lookup(keys)] == [n in held for n in chain]
        tiers.close()


@pytest.mark.parametrize(
    ("promote", "expected"),
    [("always", ["far", "near", "near"]), ("second hit", ["far", "far", "near"]), ("never", ["far", "far", "far"])],
)
def test_promotion_follows_the_policy(promote: str, expected: list[str]) -> None:
    tiers, near, far = near_and_far(promote=promote)
    far.put_many(items(1))
    assert [sources(tiers, 1)[0] for _ in range(3)] == expected
    assert near.stats()["entries"] == (promote != "never") == tiers.stats().get("promoted_total", 0)
    tiers.close()


def test_promotion_into_a_tier_that_is_not_local() -> None:
    near, far = MemoryStore(1 << 20, name="near"), MemoryStore(1 << 20, name="far")
    tiers = TieredStore([(near, REMOTE), (far, REMOTE)])
    far.put_many(items(1))
    assert sources(tiers, 1) == ["far"] and tiers.flush(5.0)
    assert sources(tiers, 1) == ["near"]
    tiers.close()


def test_a_promotion_does_not_undo_a_put_or_a_delete() -> None:
    tiers, _near, far = near_and_far()
    far.put_many(items(1, 2))
    ticket = tiers.prepare_load([key(1), key(2)])
    new = sealed(key(1), b"new")
    real = far.complete_load

    def changed_meanwhile(ticket: object) -> object:
        values = real(ticket)  # type: ignore[arg-type]
        far.complete_load = real  # type: ignore[method-assign]
        tiers.put_many([(key(1), new)])
        tiers.delete([key(2)])
        return values

    far.complete_load = changed_meanwhile  # type: ignore[method-assign,assignment]
    tiers.complete_load(ticket)
    assert tiers.get_many([key(1), key(2)]) == [new, None]
    tiers.close()


@pytest.mark.parametrize("demote", [True, False])
def test_what_the_upper_tier_evicts_goes_to_the_next(demote: bool) -> None:
    near, middle, far = MemoryStore(2000, name="near"), MemoryStore(2000, name="middle"), MemoryStore(1 << 20, name="f")
    tiers = over(near, middle, far, demote=demote, promote="never")
    near.put_many(items(1, 2))
    near.put_many(items(3, 4))
    assert tiers.flush(5.0)
    assert sources(tiers, 3, 4, 1, 2) == (["near"] * 2 + (["middle"] * 2 if demote else [""] * 2))
    near.put_many(items(5, 6))
    assert tiers.flush(5.0)
    assert sources(tiers, 5, 3, 1) == (["near", "middle", "f"] if demote else ["near", "", ""])
    tiers.close()


def test_what_a_disk_evicts_goes_to_the_next(tmp_path: Path) -> None:
    near, far = MemoryStore(1000, name="near"), MemoryStore(1 << 20, name="far")
    tiers = over(near, DiskStore(tmp_path / "disk", 2000), far, promote="never")
    for number in range(1, 7):
        near.put_many(items(number))
        assert tiers.flush(5.0)
    assert sources(tiers, 6, 5, 4) == ["near", "disk", "disk"]
    assert sources(tiers, 3, 2, 1) == ["far"] * 3
    assert tiers.get_many([key(1)]) == [items(1)[0][1]]
    tiers.close()


def test_a_listener_in_use_is_refused_and_not_taken_over() -> None:
    near, middle, far = MemoryStore(2000, name="near"), MemoryStore(2000, name="middle"), MemoryStore(name="far")
    middle.on_evict = heard = lambda evicted, data, place: None
    with pytest.raises(InvalidInput, match="the middle store reports evictions to another hierarchy"):
        over(near, middle, far)
    assert near.on_evict is None and middle.on_evict is heard


def test_a_leased_block_stays_in_whichever_tier_has_it() -> None:
    near, far = MemoryStore(1000, name="near"), MemoryStore(1000, name="far")
    tiers = over(near, far)
    near.put_many(items(1))
    far.put_many(items(2))
    ticket = tiers.prepare_load([key(1), key(2)])
    assert tiers.put_many(items(3)) == [False]
    assert tiers.complete_load(ticket) == [stored for _, stored in items(1, 2)]
    tiers.release(ticket)
    assert tiers.put_many(items(3)) == [True]
    tiers.close()


def test_a_store_that_is_completed_after_its_lease_stores_nothing() -> None:
    now_s = [0.0]
    near = MemoryStore(name="near")
    tiers = TieredStore([(near, LOCAL)], clock=lambda: now_s[0])
    ticket = tiers.prepare_store(items(1))
    now_s[0] = LEASE_S + 1.0
    assert tiers.complete_store(ticket) == [False] and near.get_many([key(1)]) == [None]
    tiers.close()


def test_write_through_waits_for_all_and_write_back_for_the_nearest() -> None:
    for write_back in (False, True):
        tiers, _near, far = near_and_far(write_back=write_back)
        tiers.tiers[1].settings = replace(REMOTE, ask_deadline_s=5.0, store_deadline_s=5.0)
        hangs = far.hangs = threading.Event()
        if not write_back:
            threading.Timer(0.1, hangs.set).start()
        assert tiers.put_many(items(1)) == [True]
        assert hangs.is_set() != write_back
        hangs.set()
        assert tiers.flush(30.0)
        assert far.get_many([key(1)]) == [items(1)[0][1]]
        tiers.close()


def test_a_dirty_value_is_served_though_the_nearest_has_evicted_it_and_the_far_has_an_older_one() -> None:
    tiers, near, far = near_and_far(near_bytes=1000, write_back=True, promote="never")
    far.put_many([(key(1), sealed(key(1), b"old"))])
    far.trouble = "raise"
    assert tiers.put_many(items(1)) == [True] and near.put_many(items(2)) == [True]
    assert tiers.get_many([key(1)]) == [items(1)[0][1]] and sources(tiers, 1) == [OUTBOUND]
    assert tiers.estimate_load_s([key(1)], 0.0) == 0.0 and tiers.prefix([key(1), key(2)]) == 2
    far.trouble = ""
    assert soon(lambda: tiers.stats().get("written_back_total", 0) == 1)
    assert soon(lambda: sources(tiers, 1) == ["far"])
    assert tiers.get_many([key(1)]) == [items(1)[0][1]]
    tiers.close()


def test_write_back_is_bounded_and_a_full_queue_waits_for_all_tiers() -> None:
    tiers, _near, far = near_and_far(write_back=True, outbound_bytes=2000)
    far.trouble = "raise"
    assert tiers.put_many(items(1, 2)) == [True, True]
    assert tiers.stats()["outbound_bytes"] == 2000
    assert tiers.put_many(items(3)) == [True]
    assert tiers.stats()["outbound_bytes"] == 2000 and tiers.stats()["far_keys_in_doubt"] >= 1
    far.trouble = ""
    assert tiers.flush(5.0)
    assert far.get_many([key(1), key(2)]) == [stored for _, stored in items(1, 2)]
    tiers.close()


@pytest.mark.parametrize("trouble", ["", "raise"])
def test_close_writes_back_and_counts_what_it_could_not(trouble: str) -> None:
    tiers, _near, far = near_and_far(write_back=True, close_deadline_s=0.2)
    closed, far.close = far.close, lambda: None  # type: ignore[method-assign]
    far.trouble = trouble
    tiers.put_many(items(1, 2))
    tiers.close()
    far.trouble = ""
    stats = tiers.stats()
    assert stats["write_back_lost_total"] == (2 if trouble else 0)
    assert stats["write_back_lost_bytes_total"] == (2000 if trouble else 0)
    assert (far.get_many([key(1)]) == [None]) == bool(trouble)
    closed()


def test_what_no_lower_tier_takes_is_counted() -> None:
    near, far = MemoryStore(4000, name="near"), MemoryStore(500, name="far")
    tiers = over(near, far, write_back=True)
    assert tiers.put_many(items(1)) == [True] and tiers.flush(5.0)
    assert tiers.stats()["write_back_refused_total"] == 1
    assert tiers.put_many(items(2, size_bytes=100)) == [True]
    with pytest.raises(ValueTooLarge, match="budget"):
        tiers.put_many(items(3, size_bytes=5000))
    tiers.close()


def test_a_value_too_large_for_one_tier_goes_to_the_other() -> None:
    for write_back in (False, True):
        near, far = MemoryStore(1500, name="near"), MemoryStore(1 << 20, name="far")
        tiers = over(near, far, write_back=write_back)
        assert tiers.put_many([*items(1), *items(2, size_bytes=2000)]) == [True, True]
        assert sources(tiers, 1, 2) == ["near", "far"]
        tiers.close()


def test_estimates_are_summed_by_tier() -> None:
    near = MemoryStore(name="near", read_bytes_per_s=1e6)
    far = MemoryStore(name="far", read_bytes_per_s=1e3)
    tiers = over(near, far)
    near.put_many(items(1, 2))
    far.put_many(items(2, 3))
    assert tiers.estimate_load_s([key(1), key(2), key(3)], 0.0) == pytest.approx(2e-3 + 1.0)
    assert tiers.estimate_load_s([key(1), key(4)], 0.0) == float("inf")
    tiers.close()


def test_a_hierarchy_of_ambiguous_tiers_is_refused() -> None:
    with pytest.raises(InvalidInput, match="different names"):
        over(MemoryStore(), MemoryStore())
    with pytest.raises(InvalidInput, match="different names"):
        TieredStore([])
    with pytest.raises(InvalidInput, match="promote"):
        HierarchySettings(promote="sometimes")
    shared = MemoryStore(name="shared")
    first = over(shared, MemoryStore())
    with pytest.raises(InvalidInput, match="to another hierarchy"):
        over(shared, MemoryStore())
    first.close()


def test_a_block_cache_counts_tokens_by_the_tier_that_supplied_them() -> None:
    sky = store_over(simulated(), index=SharedIndex())
    near, middle = MemoryStore(name="near"), MemoryStore(name="middle")
    tiers = TieredStore([(near, LOCAL), (middle, TierSettings()), (sky, TierSettings())])
    cache = BlockCache(context(), LAYOUT, tiers)
    assert save(cache, TOKENS) == 5
    hashes = cache.hashes(TOKENS)
    near.delete([hashes[1], hashes[2], hashes[4]])
    middle.delete([hashes[0], hashes[2]])
    result, _ = load(cache, TOKENS)  # prompt = computed + the sum over tiers, asserted there
    assert result.hit_tokens == {"near": 8, "middle": 8, "constellation": 4} and result.computed_tokens == 2
    result, _ = load(cache, TOKENS)
    assert result.hit_tokens == {"near": 20}  # promoted
    counters = cache.counters
    assert [counters.get("hit_tokens_total", tier) for tier in ("near", "middle", "constellation")] == [28, 8, 4]
    assert counters.get("lookup_tokens_total") == 44 == counters.get("computed_tokens_total") + 40
    tiers.close()
