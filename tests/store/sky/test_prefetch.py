"""Prefetch: after it a read asks only satellites overhead; whatever fails on the way, the value is where it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.conftest import PRESET, store_over, udp_store

from skymemory.cache.predictor import DAY_S
from skymemory.cache.prefetching import PrefetchScheduler
from skymemory.constellation.ground_track import Trajectory, Waypoint, host_at, track_over
from skymemory.constellation.presets import preset_named
from skymemory.constellation.sight import OrbitSight
from skymemory.constellation.torus import SatelliteId
from skymemory.constellation.visibility import visible
from skymemory.index.radix import BlockInfo
from skymemory.keys import first_ring
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.clock import STRATEGY_CODES, MoveClock, SkyMap
from skymemory.protocol.satellite.state import EvictionConfig
from skymemory.store.base import LEASE_S, Prefetching, Presence
from skymemory.store.sealed import SealedStore
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore, SkySettings
from skymemory.transport.faults import FaultInjector
from skymemory.transport.simulated import SimulatedConstellation

KEYS = [bytes([number]) * 32 for number in range(1, 7)]
VALUES = [os.urandom(70_000 * number + 13) for number in range(1, 7)]
ITEMS = list(zip(KEYS, VALUES, strict=True))
SLOT_S, PLANE_S = 260.0, 1184.0
CHUNK_BYTES = 6144


class Sky:
    """A constellation whose box moves by the clock, with a note of which satellites the ground speaks to."""

    def __init__(
        self, faults: FaultInjector | None = None, memory_bytes: int = 8 << 20, eviction: EvictionConfig | None = None
    ) -> None:
        preset = preset_named(PRESET)
        self.map = SkyMap(preset.torus, preset.centre)
        self.clock = MoveClock(slot_period_s=SLOT_S, plane_period_s=PLANE_S, time_scale=1.0)
        self.asked: set[SatelliteId] = set()
        self.sim = SimulatedConstellation(self.map, memory_bytes, self.clock, self._link_s, faults, eviction=eviction)

    def _link_s(self, sender: object, receiver: object) -> float:
        if not isinstance(sender, SatelliteId) and isinstance(receiver, SatelliteId):
            self.asked.add(receiver)
        return 0.002

    def store(self, strategy: str = "hop", index: SharedIndex | None = None, ground: int = 1) -> ConstellationStore:
        return store_over(self.sim, ground, SharedIndex() if index is None else index, strategy=strategy)

    def until(self, time_s: float) -> None:
        self.sim.settle(time_s)

    def around(self, time_s: float, servers: int = 10) -> set[SatelliteId]:
        """The satellites of a value placed around the satellite overhead at ``time_s``."""
        moves = self.clock.moves(time_s)
        return set(self.map.servers_at(STRATEGY_CODES["hop"], servers, moves, moves))

    def chunks_of(self, key: bytes) -> int:
        return sum(len(machine.store.shares.get(key, ())) for machine in self.sim.satellites.values())


def read(store: ConstellationStore | SealedStore, keys: list[bytes] = KEYS) -> list[bytes | None]:
    return [None if view is None else bytes(view) for view in store.get_many(keys)]


def test_the_constellation_can_prefetch_and_memory_need_not() -> None:
    assert isinstance(Sky().store(), Prefetching)


@pytest.mark.brief()
@pytest.mark.parametrize("hours", [0.05, 1.0, 5.3, 24.0])
def test_after_a_prefetch_a_read_asks_only_the_satellites_overhead(hours: float) -> None:
    sky = Sky()
    store = sky.store()
    assert all(store.put_many(ITEMS))
    at_s = 3600 * hours
    sky.until(at_s - 30)
    assert store.prefetch(KEYS, at=at_s) == [True] * len(KEYS)
    sky.until(at_s)
    sky.asked.clear()
    assert read(store) == VALUES
    assert sky.asked == sky.around(at_s)
    assert all(machine.counters.get("chunks_migrated_out") == 0 for machine in sky.sim.satellites.values())


def test_long_before_its_time_it_waits_on_satellites_that_are_not_here_yet() -> None:
    sky = Sky()
    store = sky.store()
    store.put_many(ITEMS[:1])
    assert store.prefetch(KEYS[:1], at=4 * SLOT_S + 1) == [True]
    assert read(store, KEYS[:1]) == VALUES[:1]
    sky.until(4 * SLOT_S + 1)
    sky.asked.clear()
    assert read(store, KEYS[:1]) == VALUES[:1]
    assert sky.asked == sky.around(4 * SLOT_S + 1)


@pytest.mark.parametrize("strategy", ["rotation", "rotation_hop", "cost"])
def test_what_follows_the_box_needs_no_copy(strategy: str) -> None:
    sky = Sky()
    store = sky.store(strategy)
    store.put_many(ITEMS)
    sky.asked.clear()
    assert store.prefetch([*KEYS, bytes(32)], at=7200.0) == [True] * len(KEYS) + [False]
    assert sky.asked == set() and store.stats()["prefetched"] == 0


def test_baseline_is_parked_too_and_a_second_prefetch_of_the_same_time_costs_nothing() -> None:
    sky = Sky()
    store = sky.store("baseline")
    store.put_many(ITEMS)
    assert store.prefetch(KEYS, at=3000.0) == [True] * len(KEYS)
    sky.asked.clear()
    assert store.prefetch(KEYS, at=3000.0) == [True] * len(KEYS)
    assert sky.asked == set()
    sky.until(3000.0)
    assert read(store) == VALUES and sky.asked == sky.around(3000.0)


def test_another_region_gets_a_copy_of_what_follows_our_box() -> None:
    sky = Sky()
    store = sky.store("rotation_hop")
    store.put_many(ITEMS)
    assert store.prefetch(KEYS, at=500.0, moves=(9, 2)) == [True] * len(KEYS)
    sky.asked.clear()
    assert read(store) == VALUES
    assert sky.asked == set(sky.map.servers_at(STRATEGY_CODES["hop"], 10, (9, 2), (0, 0)))


def test_a_dead_target_loses_nothing_and_the_next_attempt_succeeds() -> None:
    sky = Sky()
    store = sky.store()
    store.put_many(ITEMS)
    sky.until(2000.0)
    here = sky.around(0.0)
    dead = sorted(sky.around(2600.0) - here)[0]
    sky.sim.kill(dead)
    assert store.prefetch(KEYS, at=2600.0) == [False] * len(KEYS)
    assert store.stats()["prefetch_failures"] == len(KEYS)
    sky.asked.clear()
    assert read(store) == VALUES and sky.asked == here
    sky.sim.revive(dead)
    sky.until(2100.0)
    assert store.prefetch(KEYS, at=2600.0) == [True] * len(KEYS)
    sky.asked.clear()
    assert read(store) == VALUES and sky.asked == sky.around(2600.0)


def test_a_dead_source_is_a_failure_and_the_entry_stays_for_its_return() -> None:
    sky = Sky()
    store = sky.store()
    store.put_many(ITEMS)
    dead = sorted(sky.around(0.0))[0]
    assert dead not in sky.around(2600.0)
    sky.sim.kill(dead)
    assert store.prefetch(KEYS, at=2600.0) == [False] * len(KEYS)
    assert store.lookup(KEYS) == [Presence.HIT] * len(KEYS)


def test_a_crowded_target_makes_room_and_nothing_of_ours_is_lost() -> None:
    sky = Sky(memory_bytes=300_000)
    store = sky.store()
    assert all(store.put_many(ITEMS[:2]))
    other = sky.store(ground=2)
    sky.until(3 * PLANE_S)
    assert other.put_many([(KEYS[5], os.urandom(2_800_000))]) == [True]
    target = next(iter(sky.around(sky.sim.now_s)))
    assert len(sky.sim.satellites[target].store.shares) >= 1
    assert store.prefetch(KEYS[:2], at=sky.sim.now_s) == [True, True]
    assert read(store, KEYS[:2]) == VALUES[:2]


def test_a_chain_stays_a_chain_when_another_process_brings_one_link(tmp_path: Path) -> None:
    sky = Sky()
    writer = sky.store(index=SharedIndex(tmp_path / "index"))
    writer.prefix(KEYS)
    writer.put_many(ITEMS)
    other = sky.store(index=SharedIndex(tmp_path / "index"), ground=2)
    assert other.prefetch(KEYS[3:4], at=9000.0) == [True]
    assert other.prefix(KEYS) == len(KEYS) and writer.prefix(KEYS) == len(KEYS)
    assert read(writer) == VALUES


def test_what_is_left_behind_is_forgotten_a_lease_later() -> None:
    sky = Sky()
    store = sky.store()
    store.put_many(ITEMS)
    chunks = {key: sky.chunks_of(key) for key in KEYS}
    sky.until(8 * SLOT_S)
    store.prefetch(KEYS, at=9 * SLOT_S + 1)
    assert {key: sky.chunks_of(key) for key in KEYS} == {key: 2 * count for key, count in chunks.items()}
    sky.until(8 * SLOT_S + LEASE_S + 1)
    store.prefetch([], at=0.0)
    assert {key: sky.chunks_of(key) for key in KEYS} == chunks
    assert read(store) == VALUES


def test_what_another_has_stored_where_ours_was_left_behind_stays() -> None:
    """Another computer, with an index of its own, stores other bytes under the same key in the same places."""
    sky = Sky()
    store, other = sky.store(), sky.store(ground=2)
    assert store.put_many(ITEMS[:1]) == [True]
    assert store.prefetch(KEYS[:1], 40 * SLOT_S) == [True]
    theirs = os.urandom(70_000)
    assert other.put_many([(KEYS[0], theirs)]) == [True]
    sky.until(LEASE_S + 1.0)
    store.prefetch(KEYS[1:2], 40 * SLOT_S)
    assert read(other, KEYS[:1]) == [theirs] and read(store, KEYS[:1]) == VALUES[:1]


def test_a_prefetched_value_keeps_its_replicas_and_leaves_none_behind() -> None:
    sky = Sky()
    store = store_over(sky.sim, 1, SharedIndex(), strategy="hop", replicas=2)
    assert store.put_many(ITEMS[:1]) == [True]
    assert store.prefetch(KEYS[:1], 40 * SLOT_S) == [True]
    sky.until(LEASE_S + 1.0)
    store.prefetch([], at=0.0)
    moves = sky.clock.moves(40 * SLOT_S)
    wanted = {at for replica in (0, 1) for at in sky.map.servers_at(STRATEGY_CODES["hop"], 10, moves, moves, replica)}
    assert {at for at, machine in sky.sim.satellites.items() if machine.store.shares.get(KEYS[0])} == wanted
    assert read(store, KEYS[:1]) == VALUES[:1]


def test_a_reader_who_holds_the_old_entry_still_finds_everything() -> None:
    """In boxes that overlap, too."""
    for ahead_slots in (1, 2, 8):
        sky = Sky()
        store = sky.store()
        store.put_many(ITEMS)
        old = store._catalog.find(KEYS)
        assert all(store.prefetch(KEYS, at=ahead_slots * SLOT_S + 1))
        sky.until(LEASE_S - 1)
        store.prefetch([], at=0.0)
        late = sky.sim.connect(ClientConfig(9, expected_rtt_s=0.004))
        for key, value in ITEMS:
            out = bytearray(len(value))
            number = late.machine.get(old[key], memoryview(out), late.now_s())
            outcome = late.run([number])[number]
            assert outcome.ok and out == value


@pytest.mark.brief("1-migration", "2-gossip", "8-migration")
@pytest.mark.parametrize("policy", ["gossip", "periodic", "migration"])
@pytest.mark.parametrize("ahead_slots", [1, 2, 8])
def test_satellites_that_look_for_dead_blocks_take_no_copy_for_one(policy: str, ahead_slots: int) -> None:
    """Satellites of both places still hold chunks of the old one when the rest of it is gone."""
    sky = Sky(eviction=EvictionConfig.of([policy], sweep_s=5.0))
    store = sky.store()
    store.put_many(ITEMS)
    assert all(store.prefetch(KEYS, at=ahead_slots * SLOT_S + 1))
    sky.until(LEASE_S + 1)
    store.prefetch([], at=0.0)
    sky.until(LEASE_S + 120)
    assert read(store) == VALUES


@pytest.mark.parametrize("ahead_slots", [1, 2, 8])
def test_who_lost_the_index_finds_the_copy(ahead_slots: int) -> None:
    sky = Sky()
    store = sky.store()
    store.put_many(ITEMS)
    at_s = ahead_slots * SLOT_S + 1
    store.prefetch(KEYS, at=at_s)
    sky.until(at_s)
    store.prefetch([], at=0.0)
    other = store_over(sky.sim, 2, None, strategy="hop")
    assert other.prefix(KEYS) == len(KEYS) and read(other) == VALUES


def test_sealed_values_are_copied_by_one_who_has_no_key() -> None:
    pytest.importorskip("cryptography")
    sky = Sky()
    index = SharedIndex()
    ring = first_ring(bytes(range(32)))
    owner = SealedStore(sky.store(index=index), lambda: ring, lambda: 1000.0)
    assert all(owner.put_many(ITEMS))
    sky.until(2000.0)
    assert sky.store(index=index, ground=2).prefetch(KEYS, at=2600.0) == [True] * len(KEYS)
    assert owner.prefetch(KEYS, at=2600.0) == [True] * len(KEYS)
    sky.asked.clear()
    assert read(owner) == VALUES and sky.asked == sky.around(2600.0)


@pytest.mark.slow
def test_a_host_that_travels_finds_its_values_where_it_arrives() -> None:
    """An aircraft over real orbits: what it parked at the start waits overhead when it is over the ocean."""
    preset = preset_named("starlink-a")
    way = Trajectory((Waypoint(0.0, 40.0, -75.0), Waypoint(25_000.0, 49.0, 8.0)))
    track = track_over(preset.shell, way, preset.epoch_unix_s)
    sight = OrbitSight(preset.shell, way, preset.epoch_unix_s, 25.0, "nearest")
    sky = Sky()
    sky.map = SkyMap(preset.torus, preset.torus.wrap(*track.cell_at(0.0)), sight=sight)
    sky.clock = MoveClock(time_scale=1.0, track=track)
    sky.sim = SimulatedConstellation(sky.map, 8 << 20, sky.clock, sky._link_s)
    driver = sky.sim.connect(ClientConfig(1, "hybrid", expected_rtt_s=0.1))
    store = ConstellationStore(driver, sky.map, SkySettings("hop"), index=SharedIndex())
    assert all(store.put_many(ITEMS))
    at_s = 10_800.0
    assert sky.clock.moves(at_s) != track_over(preset.shell, preset.host, preset.epoch_unix_s).moves(at_s)
    sky.until(at_s - 600)
    assert store.prefetch(KEYS, at=at_s) == [True] * len(KEYS)
    sky.until(at_s)
    centre = sky.map.centre_at(sky.clock.moves(at_s))
    holders = sky.around(at_s)
    assert max(preset.torus.hops(centre, satellite) for satellite in holders) == 2
    sky.asked.clear()
    assert read(store) == VALUES
    in_sight = set(visible(preset.shell, host_at(way, at_s), preset.epoch_unix_s, at_s))
    assert centre in in_sight and sky.asked <= in_sight and sky.asked & holders


def test_through_loss_and_reordering() -> None:
    sky = Sky(FaultInjector(loss=0.05, duplicate=0.05, reorder=0.2, reorder_delay_s=0.01, corrupt=0.01, seed=3))
    store = sky.store()
    assert all(store.put_many(ITEMS))
    assert store.prefetch(KEYS, at=3600.0) == [True] * len(KEYS)
    assert read(store) == VALUES


@pytest.mark.slow
def test_what_is_asked_for_daily_is_overhead_when_it_comes() -> None:
    """The scheduler over the machines: learned on two days, prefetched on the third without a request."""
    sky = Sky()
    store = sky.store()
    store.prefix(KEYS)
    store.put_many(ITEMS)
    scheduler = PrefetchScheduler(sky.store(index=store._catalog.index, ground=2), clock=lambda: sky.sim.now_s)
    for day in range(4):
        at_s = day * DAY_S + 40_000.0
        sky.until(at_s - 60)
        brought = scheduler.tick()
        sky.until(at_s)
        sky.asked.clear()
        scheduler.record_prompt(KEYS)
        assert store.prefix(KEYS) == len(KEYS) and read(store) == VALUES
        assert (brought, sky.asked == sky.around(at_s)) == ((0, False) if day < 2 else (len(KEYS), True))


@pytest.mark.brief()
@settings(max_examples=25, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 4000), st.integers(-1500, 3000), st.booleans()), min_size=1, max_size=5))
def test_wherever_it_is_brought_in_whatever_order_it_can_be_read(steps: list[tuple[int, int, bool]]) -> None:
    """Overlapping boxes, times gone by, targets that are dead: what stays behind never takes the value with it."""
    sky = Sky()
    store = sky.store()
    store.put_many(ITEMS[:3])
    died: set[SatelliteId] = set()
    for wait_s, ahead_s, dies in steps:
        sky.until(sky.sim.now_s + wait_s)
        at_s = sky.sim.now_s + ahead_s
        holders = {here for here, machine in sky.sim.satellites.items() if machine.store.shares}
        victims = sorted(sky.around(at_s) - holders)[:1] if dies else []
        for victim in victims:
            sky.sim.kill(victim)
        brought = store.prefetch(KEYS[:3], at=at_s)
        if died.isdisjoint(victims):  # else the box may be displaced around what the store still takes for dead
            assert brought == [not victims] * 3
        assert read(store, KEYS[:3]) == VALUES[:3]
        died.update(victims)
        for victim in victims:
            sky.sim.revive(victim)
        sky.until(sky.sim.now_s + 2)


def test_an_entry_that_changed_meanwhile_is_not_replaced() -> None:
    index = SharedIndex()
    entry = BlockInfo(2, 100, 7, 1.0, 0, 0, "hop", 10)
    index.add(KEYS[:2], [entry, entry], 0, None)
    assert not index.replace(KEYS[0], lambda now: now.value_crc == 8, lambda now: entry)
    assert not index.replace(KEYS[5], lambda now: True, lambda now: entry)
    fresh = BlockInfo(2, 100, 7, 2.0, 5, 1, "hop", 10)
    assert index.replace(KEYS[1], lambda now: now == entry, lambda now: fresh)
    assert index.infos(KEYS[:2]) == [entry, fresh] and index.longest_prefix(KEYS[:2]) == 2


def test_over_real_sockets() -> None:
    with udp_store() as other:
        store = ConstellationStore(other._driver, other._sky, SkySettings("hop"), index=SharedIndex())
        assert all(store.put_many(ITEMS))
        assert store.prefetch(KEYS, at=0.0, moves=(7, 2)) == [True] * len(KEYS)
        places: Callable[..., tuple[SatelliteId, ...]] = other._sky.servers_at
        assert set(places(2, 10, (7, 2), (0, 0))).isdisjoint(places(2, 10, (0, 0), (0, 0)))
        assert read(store) == VALUES
        assert store.stats()["prefetched"] == len(KEYS)
