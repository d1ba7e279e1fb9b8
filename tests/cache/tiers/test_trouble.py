"""A hierarchy with tiers that are dead, slow or lying: deadlines, breakers, copies in doubt, bounded bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from tests.cache.test_manager import LAYOUT, TOKENS, context, load, save
from tests.cache.tiers.faulty_tier import FaultyTier, sealed
from tests.cache.tiers.small_tiers import LOCAL, QUICK, items, near_and_far, over, soon, sources
from tests.contract.hostile_store import FAULTS, OUTAGES, HostileStore
from tests.contract.store_contract import key

from skymemory.cache.blocks import BlockCache
from skymemory.cache.tiers.outbound import Moving
from skymemory.cache.tiers.store import HierarchySettings, TieredStore
from skymemory.cache.tiers.tier import TierSettings
from skymemory.circuit_breaker import BreakerConfig
from skymemory.kv.value import is_sound_block
from skymemory.store.base import LoadTicket, Presence, StoreTicket
from skymemory.store.memory import MemoryStore

PATIENT = {"ask_deadline_s": 10.0, "load_deadline_s": 10.0, "store_deadline_s": 10.0}
"""Where what is tested is not the deadlines, a busy computer must not look like a dead tier."""


def test_a_dead_tier_costs_next_to_nothing_and_comes_back_by_itself() -> None:
    tiers, near, far = near_and_far()
    far.put_many(items(1, 2))
    near.put_many(items(1))
    far.trouble, far.slow_s = "slow", 0.3
    expected = [items(1)[0][1], None]
    assert soon(lambda: tiers.get_many([key(1), key(2)]) == expected and tiers.stats()["far_breaker_open"] == 1)
    # Only probes call it, four times each, and calls given up before, which may still be under way. If not skipped,
    # each read would wait for its deadline, and 50 of them would make some 60 calls.
    calls = far.calls
    far.asked_by.clear()
    for _ in range(50):
        assert tiers.get_many([key(1), key(2)]) == expected
    assert far.calls - calls <= 4 * tiers.stats().get("tier_probes_total{far}", 0) + 12
    assert far.asked_by.keys() <= {"tier far"}, "no reader waits for it"
    far.trouble = ""
    assert soon(lambda: tiers.get_many([key(2)]) == [items(2)[0][1]])
    assert tiers.stats()["far_breaker_open"] == 0 and tiers.stats()["tier_probes_total{far}"] >= 1
    tiers.close()


@pytest.mark.parametrize("settings", [LOCAL, TierSettings(**PATIENT)], ids=["local", "threads"])
def test_a_load_that_fails_is_a_miss_and_the_next_tier_is_asked(settings: TierSettings) -> None:
    class Failing(MemoryStore):
        def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
            raise OSError("broken")

    near, far = Failing(name="near"), MemoryStore(name="far")
    with TieredStore([(near, settings), (far, TierSettings(**PATIENT))]) as tiers:
        assert tiers.put_many(items(1)) == [True] and near.put_many(items(2)) == [True]
        assert tiers.get_many([key(1), key(2)]) == [items(1)[0][1], None]
        assert tiers.stats()["in_flight_bytes"] == 0
        assert near.stats()["open_leases"] == 0


def test_a_tier_that_answers_lookups_and_fails_all_loads_is_skipped() -> None:
    class Failing(MemoryStore):
        mended = False

        def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
            if not self.mended:
                raise OSError("broken")
            return super().complete_load(ticket)

    far = Failing(name="far")
    seldom = BreakerConfig(failures=3, first_wait_s=0.3, last_wait_s=60.0)
    with TieredStore([(MemoryStore(name="near"), LOCAL), (far, TierSettings(**PATIENT, breaker=seldom))]) as tiers:
        far.put_many(items(1))
        for _ in range(3):
            assert tiers.lookup([key(1)]) == [Presence.HIT] and tiers.get_many([key(1)]) == [None]
        assert tiers.stats()["far_breaker_open"] == 1
        assert tiers.lookup([key(1)]) == [Presence.MISS] and tiers.get_many([key(1)]) == [None]
        far.mended = True
        assert soon(lambda: tiers.get_many([key(1)]) == [items(1)[0][1]])


def test_a_tier_that_fails_all_stores_is_still_read() -> None:
    class Full(MemoryStore):
        def complete_store(self, ticket: StoreTicket) -> list[bool]:
            raise OSError("read-only file system")

    far = Full(name="far")
    MemoryStore.complete_store(far, far.prepare_store(items(1)))
    with TieredStore([(MemoryStore(name="near"), LOCAL), (far, TierSettings(**PATIENT))]) as tiers:
        for number in range(2, 9):
            tiers.put_many(items(number))
            assert tiers.lookup([key(1)]) == [Presence.HIT]
        assert tiers.stats()["far_breaker_opened_total"] == 0 and tiers.get_many([key(1)]) == [items(1)[0][1]]


def test_a_probe_of_a_tier_that_fails_keeps_no_lease() -> None:
    class Failing(MemoryStore):
        def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
            raise OSError("broken")

    far = Failing(name="far")
    with TieredStore([(MemoryStore(name="near"), LOCAL), (far, TierSettings(**PATIENT))]) as tiers:
        far.put_many(items(1))
        tiers.tiers[1]._probe(key(1))
        assert far.stats()["open_leases"] == 0


def test_a_tier_without_requests_comes_back_too() -> None:
    tiers, _near, far = near_and_far()
    far.trouble = "raise"
    assert [tiers.lookup([key(1)]) for _ in range(2)] == [[Presence.MISS]] * 2
    assert not tiers.tiers[1].breaker.closed
    far.trouble = ""
    assert soon(lambda: tiers.tiers[1].breaker.closed)
    tiers.close()


def test_a_load_has_a_deadline_and_what_comes_late_is_let_go() -> None:
    tiers, near, far = near_and_far(load_deadline_s=0.05)
    far.put_many(items(1))
    near.put_many(items(2))
    ticket = tiers.prepare_load([key(1), key(2)])
    far.hangs = hangs = threading.Event()
    assert tiers.complete_load(ticket) == [None, items(2)[0][1]] and not hangs.is_set()
    assert ticket.report is not None and ticket.report.keys[0].reason == "deadline"
    hangs.set()
    assert soon(lambda: far.stats()["open_leases"] == 0 and tiers.stats()["in_flight_bytes"] == 0)
    tiers.close()


def test_a_lease_that_came_too_late_is_let_go() -> None:
    leased = threading.Event()

    class Slow(FaultyTier):
        def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
            ticket = super().prepare_load(keys)
            leased.set()
            return ticket

    far = Slow("far", slow_s=0.4)
    tiers = TieredStore([(MemoryStore(name="near"), LOCAL), (far, TierSettings(ask_deadline_s=0.5))])
    far.put_many(items(1))
    far.trouble = "slow"
    assert tiers.get_many([key(1)]) == [None], "lookup and lease take longer together"
    assert leased.wait(20.0)
    far.trouble = ""
    assert soon(lambda: far.stats()["open_leases"] == 0)
    tiers.close()


def test_a_late_lease_that_cannot_be_let_go_costs_no_thread() -> None:
    """What a tier raises after its caller gave up would end its thread, and with the last one the tier."""
    failing = threading.Event()

    class Failing(FaultyTier):
        def release(self, ticket: LoadTicket) -> None:
            if failing.is_set():
                failing.clear()
                raise ConnectionError("gone")
            super().release(ticket)

    far = Failing("far", slow_s=0.3)
    settings = TierSettings(ask_deadline_s=0.05, threads=1, breaker=QUICK)
    tiers = TieredStore([(MemoryStore(name="near"), LOCAL), (far, settings)])
    far.put_many(items(1))
    failing.set()
    far.trouble = "slow"
    assert tiers.get_many([key(1)]) == [None]
    far.trouble = ""
    assert soon(lambda: not failing.is_set())
    assert soon(lambda: tiers.get_many([key(1)]) == [items(1)[0][1]])
    assert tiers.stats()["tier_failures_total{far}"] >= 1
    tiers.close()


def test_tiers_of_one_batch_are_loaded_at_once() -> None:
    stores = [FaultyTier(name) for name in ("one", "two", "three")]
    tiers = TieredStore(
        [(MemoryStore(name="near"), LOCAL), *((store, TierSettings(**PATIENT)) for store in stores)],
        HierarchySettings(promote="never"),
    )
    for number, store in enumerate(stores):
        store.put_many(items(number))
    ticket = tiers.prepare_load([key(number) for number in range(3)])
    all_at_once = threading.Barrier(len(stores))  # each waits there for the others
    for store in stores:
        store.hangs = all_at_once
    assert None not in tiers.complete_load(ticket)
    for store in stores:
        store.hangs = None
    tiers.close()


def test_a_tier_that_spoils_values_is_passed_over_and_mended() -> None:
    near, middle, far = MemoryStore(name="near"), FaultyTier("middle"), FaultyTier("far")
    tiers = over(near, middle, far, promote="never")
    tiers.put_many(items(1))
    near.delete([key(1)])
    middle.trouble = "spoil"
    assert tiers.get_many([key(1)]) == [items(1)[0][1]] and sources(tiers, 1) == ["far"]
    assert tiers.stats()["tier_corrupt_total{middle}"] == 1
    middle.trouble = ""
    assert soon(lambda: middle.lookup([key(1)]) == [Presence.MISS])
    assert soon(lambda: not tiers.tiers[1].dirty_keys)
    tiers.put_many(items(1))
    near.delete([key(1)])
    assert sources(tiers, 1) == ["middle"]
    tiers.close()


def test_a_tier_that_missed_a_put_or_a_delete_is_not_believed_when_it_is_back() -> None:
    tiers, near, far = near_and_far(promote="never")
    tiers.put_many(items(1, 2, 3))
    far.trouble = "raise"
    new = sealed(key(1), b"new")
    assert tiers.put_many([(key(1), new)]) == [True]
    assert tiers.delete([key(2)]) == [None]
    near.delete([key(1), key(2), key(3)])  # only what is far is left
    far.trouble = ""
    assert soon(lambda: tiers.get_many([key(3)]) == [items(3)[0][1]])
    assert tiers.get_many([key(1), key(2)]) == [None, None]
    assert soon(lambda: far.lookup([key(1), key(2)]) == [Presence.MISS] * 2)
    tiers.close()


def test_a_tier_that_a_write_back_missed_is_not_believed_when_it_is_back() -> None:
    """Another took what was written back, so it is not tried again: the old value must not come back to life."""
    near, middle, far = MemoryStore(name="near"), FaultyTier("middle"), FaultyTier("far")
    tiers = over(near, middle, far, write_back=True, promote="never")
    far.put_many([(key(1), sealed(key(1), b"old"))])
    far.trouble = "raise"
    assert tiers.put_many([(key(1), sealed(key(1), b"new"))]) == [True] and tiers.flush(5.0)
    assert middle.lookup([key(1)]) == [Presence.HIT]
    near.delete([key(1)])
    middle.delete([key(1)])
    far.trouble = ""
    assert soon(lambda: tiers.tiers[2].breaker.closed)
    assert tiers.get_many([key(1)]) == [None]
    assert soon(lambda: far.lookup([key(1)]) == [Presence.MISS])
    tiers.close()


def test_a_write_that_lands_after_it_was_given_up_is_not_believed() -> None:
    tiers, near, far = near_and_far(promote="never")
    far.trouble, far.slow_s = "slow", 0.15
    tiers.tiers[1].settings = TierSettings(ask_deadline_s=1.0, store_deadline_s=0.05)
    assert tiers.put_many([(key(1), sealed(key(1), b"late"))]) == [True]
    assert key(1) in tiers.tiers[1].dirty_keys
    far.trouble = ""
    assert tiers.put_many([(key(1), sealed(key(1), b"new"))]) == [True]
    near.delete([key(1)])
    for _ in range(40):
        assert tiers.get_many([key(1)]) == [None]
        time.sleep(0.005)
    assert soon(lambda: not tiers.tiers[1].dirty_keys)
    assert tiers.get_many([key(1)]) == [None] and far.lookup([key(1)]) == [Presence.MISS]
    tiers.close()


def test_what_the_nearest_tier_is_doubted_about_is_not_promoted_into_it() -> None:
    """Its deletion there is still to come, and would take the new copy for the old one."""
    tiers, near, far = near_and_far()
    far.put_many(items(1, 2))
    near.delete = lambda keys: (_ for _ in ()).throw(ConnectionError("not now"))  # type: ignore[method-assign]
    tiers.tiers[0].dirty_keys.add([key(1)])
    assert tiers.get_many([key(1), key(2)]) == [data for _, data in items(1, 2)]
    assert near.lookup([key(1), key(2)]) == [Presence.MISS, Presence.HIT]
    del near.delete
    tiers.close()


@pytest.mark.parametrize("write_back", [False, True])
def test_a_put_replaces_what_is_on_its_way_between_tiers(write_back: bool) -> None:
    tiers, _near, _far = near_and_far(write_back=write_back)
    tiers._mover.stop(5.0)  # so that it stays on its way
    tiers._outbound.add(Moving(key(1), b"old", (1,)))
    assert tiers.put_many([(key(1), sealed(key(1), b"new"))]) == [True]
    moving = tiers._outbound.get([key(1)])
    assert [one.value for one in moving.values()] == ([sealed(key(1), b"new")] if write_back else [])
    tiers.settings = HierarchySettings(close_deadline_s=0.01)
    tiers.close()


def test_too_many_keys_in_doubt_refuse_writes() -> None:
    tiers, _near, far = near_and_far()
    far.trouble = "raise"
    tiers.tiers[1].dirty_keys._limit = 2
    assert tiers.put_many(items(1, 2)) == [True, True]
    assert tiers.put_many(items(3)) == [False]
    assert tiers.stats()["writes_refused_in_doubt_total"] == 1
    far.trouble = ""
    assert soon(lambda: tiers.put_many(items(3)) == [True])
    tiers.close()


def test_bytes_in_flight_are_bounded() -> None:
    far = FaultyTier("far", slow_s=0.3)
    tiers = over(MemoryStore(name="near"), far, in_flight_bytes=10_000, promote="never", load_deadline_s=0.03)
    tiers.tiers[1].mean_value_bytes = 1000
    far.put_many(items(*range(12)))
    first, second = (tiers.prepare_load([key(n) for n in part]) for part in (range(6), range(6, 12)))
    assert tiers._budget.take(6000, 0.0), "another key's bytes"
    assert tiers.complete_load(first) == [None] * 6
    assert first.report is not None and first.report.keys[0].reason == "too many bytes in flight"
    tiers._budget.give_back(6000)
    far.trouble = "slow"
    assert tiers.complete_load(second) == [None] * 6
    assert tiers.stats()["in_flight_most_bytes"] == 6000
    assert tiers.stats()["in_flight_bytes"] == 0, "what was given up delays no caller"
    tiers.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_blocks_that_one_tier_spoils_come_from_the_next(fault: str) -> None:
    near, hostile, far = MemoryStore(name="near"), HostileStore(fault), MemoryStore(name="far")
    believed_not = TierSettings(verify=is_sound_block, **PATIENT)
    tiers = TieredStore([(near, LOCAL), (hostile, believed_not), (far, believed_not)])
    cache = BlockCache(context(), LAYOUT, tiers)
    save(cache, TOKENS)
    near.delete(cache.hashes(TOKENS))
    result, _ = load(cache, TOKENS)
    assert result.hit_tokens["far"] + result.hit_tokens.get("hostile", 0) == 20 and not result.failed_blocks
    assert soon(lambda: load(cache, TOKENS)[0].hit_tokens == {"near": 20}), "not while what is spoiled is being deleted"
    tiers.close()


@pytest.mark.parametrize("outage", [name for name in OUTAGES if name != "delete"])
def test_an_outage_of_one_tier_is_made_up_for_by_the_next(outage: str) -> None:
    near, hostile, far = MemoryStore(name="near"), HostileStore(), MemoryStore(name="far")
    tiers = TieredStore([(near, LOCAL), (hostile, TierSettings(**PATIENT)), (far, TierSettings(**PATIENT))])
    cache = BlockCache(context(), LAYOUT, tiers)
    hostile.outage = outage
    assert save(cache, TOKENS) == 5
    near.delete(cache.hashes(TOKENS))
    assert load(cache, TOKENS)[0].cached_tokens == 20
    assert cache.counters.total("tier_failures_total") == 0
    tiers.close()


@pytest.mark.parametrize("trouble", ["raise", "slow", "lie", "spoil"])
def test_a_block_cache_over_tiers_in_trouble_computes(trouble: str) -> None:
    near, far = MemoryStore(name="near"), FaultyTier("far", 1 << 24, slow_s=0.3)
    quick = TierSettings(
        ask_deadline_s=0.05, load_deadline_s=0.05, store_deadline_s=0.05, verify=is_sound_block, breaker=QUICK
    )
    tiers = TieredStore([(near, LOCAL), (far, quick)])
    cache = BlockCache(context(), LAYOUT, tiers)
    save(cache, TOKENS)
    near.delete(cache.hashes(TOKENS)[2:])
    far.trouble = trouble
    for _ in range(4):
        result, _ = load(cache, TOKENS)
        assert result.hit_tokens.get("near", 0) >= 8
    save(cache, np.arange(30))
    far.trouble = ""
    assert soon(lambda: save(cache, TOKENS) + load(cache, TOKENS)[0].loaded_blocks == 5)
    tiers.close()


def test_a_load_that_came_too_late_is_let_go() -> None:
    """What was leased for it would else stay in its tier for as long as a lease lasts, whatever else needs the room."""
    hangs, begun, released = threading.Event(), list[LoadTicket](), list[LoadTicket]()

    class Slow(FaultyTier):
        def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
            begun.append(ticket)
            hangs.wait(60.0)
            return super().complete_load(ticket)

        def release(self, ticket: LoadTicket) -> None:
            super().release(ticket)
            released.append(ticket)

    far = Slow("far")
    tiers = TieredStore([(MemoryStore(name="near"), LOCAL), (far, TierSettings(load_deadline_s=0.2))])
    far.put_many(items(1))
    assert tiers.get_many([key(1)]) == [None]
    assert soon(lambda: len(begun) == 1) and not released
    hangs.set()
    assert soon(lambda: released == begun)
    tiers.close()
