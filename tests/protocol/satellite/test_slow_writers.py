"""Values that take long to write, over virtual time: neither readers nor satellites take them for dead meanwhile."""

from __future__ import annotations

import math

import pytest
from tests.protocol.conftest import World, key_of

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.client.transfer import Striping, ValueInfo, WriteKeepalive, WriteTransfer
from skymemory.protocol.clock import MoveClock
from skymemory.protocol.messages import Retain, pack_retain
from skymemory.protocol.satellite.state import EvictionConfig
from skymemory.store.sky.store import ConstellationStore, SkySettings
from skymemory.transport.faults import FaultInjector

SLOW = {"access": "gateway", "link_s": 0.04, "memory_bytes": 512 << 20}
"""A window at a time through one satellite: 14 MB take 9 s."""
SIZE = 14_000_000


def held(sky: World, info: ValueInfo) -> int:
    return sum(map(bool, sky.holders(info).values()))


@pytest.mark.slow
@pytest.mark.seeded
def test_who_reads_what_is_still_being_written_forgets_nothing_of_it(world, value_of):
    sky = world(**SLOW)
    sky.access = "los"
    reader = ConstellationStore(sky.connect(8), sky.sky, SkySettings(servers=40), index=None)
    number, info = sky.begin_put("v", value_of(SIZE), servers=40)
    failures = set()
    for _ in range(20):
        sky.settle(1.0)
        before = held(sky, info)
        assert reader.get_many([info.key]) in ([None], [value_of(SIZE)])
        failures |= {name for name, count in reader.stats().items() if "failures" in name and count}
        assert held(sky, info) >= before
        if before == info.chunks:
            break
    assert failures == {"failures{under way}"}, "half written is neither lost nor silent"
    assert sky.host.run([number])[number].ok and held(sky, info) == info.chunks
    assert sky.get(info)[1] == value_of(SIZE)


@pytest.mark.slow
@pytest.mark.seeded
def test_sweeps_leave_alone_what_takes_longer_to_write_than_a_second_look(world, value_of):
    config = EvictionConfig.of(["periodic"], sweep_s=1.0)
    sky = world(eviction=config, **SLOW)
    done, info = sky.put("v", value_of(SIZE), servers=40)
    assert done.ok and done.report.seconds > 3 * config.confirm_s
    sky.settle(3.0)
    assert sky.counted("chunks_purged") == 0 and held(sky, info) == info.chunks


@pytest.mark.brief()
def test_a_hole_in_what_has_been_written_is_found_all_the_same(world, value_of):
    sky = world(eviction=EvictionConfig.of(["periodic"], sweep_s=1.0), **SLOW)
    _, info = sky.put("v", value_of(1_000_000), servers=40)
    holder = sky.sim.satellites[sky.holders(info)[7][0]]
    assert holder.store.remove_key(info.key)
    sky.settle(30.0)
    assert held(sky, info) == 0


def test_a_writer_that_stalled_longer_than_satellites_wait_gets_no_confirmation(world, value_of):
    """Its process was stopped while the last answers came. What became of the first chunks is unknown then."""
    for pause_s, stored in ((1.0, True), (5.0, False)):
        sky = world()
        machine = sky.host.machine
        number, _ = sky.begin_put("v", value_of(20_000))
        answers = []
        machine_receives = machine.receive_runs
        machine.receive_runs = lambda runs, now_s, kept=answers: kept.extend(bytes(view) for view, _ in runs)
        sky.settle(0.1)
        assert answers
        for answer in answers:
            machine_receives([(memoryview(answer), len(answer))], sky.now_s + pause_s)
        done = machine.next_event()
        assert done.number == number and (done.ok, done.report.failure) == (stored, None if stored else "interrupted")


def test_satellites_hear_each_half_second_of_what_is_being_written_and_of_nothing_that_began_too_long_ago(value_of):
    places = [SatelliteId(0, 1), SatelliteId(0, 2)]
    words = WriteKeepalive()
    writes = [
        WriteTransfer.of(key_of(name), value_of(3000), Striping(1000, 3, 2), (0, 0), lambda moves: tuple(places))
        for name in "ab"
    ]
    words.on_write_begin(1, writes[0], 10.0)
    assert words.next_s == 10.5
    words.on_write_begin(2, writes[1], 10.4)
    words.on_write_begin(1, writes[0], 10.4)
    late, sent = words.take_due(10.5, lambda transfer, now_s: places)
    assert late == [] and words.next_s == 11.0
    both = pack_retain(Retain.WRITING, 0.0, [write.info.key for write in writes])
    assert sent == [(place, both) for place in places]
    assert not words.on_write_end(1, 12.0) and words.next_s == 11.0
    assert words.take_due(12.6, lambda transfer, now_s: places) == ([2], [])
    assert words.on_write_end(2, 12.6) and words.next_s == math.inf


@pytest.mark.brief()
def test_a_notice_that_is_on_its_way_costs_nothing_that_was_stored_since(world, value_of):
    """Same bytes, same moves: the setting that the notice is about."""
    sky = world(memory_bytes=60_000, eviction=EvictionConfig.of(["gossip"]))
    values = {f"v{n}": value_of(120_000, n) for n in range(12)}
    missing = 0
    for step in range(60):
        sky.put(f"v{step % 12}", values[f"v{step % 12}"])
        sky.settle((step * 37 % 100) / 1000)
        again = f"v{(step - 3 - step % 5) % 12}"
        done, info = sky.put(again, values[again])
        sky.settle(0.2)
        missing += done.ok and not sky.get(info)[0].ok
    assert missing == 0


@pytest.mark.brief()
def test_chunks_follow_a_box_that_moves_as_often_as_suspicions_are_looked_at(world, value_of):
    """What is held back under suspicion at one move must not look dead for that at the next."""
    period_s = 4.3
    faults = FaultInjector(seed=2, loss=0.05)
    sky = world(
        clock=MoveClock(0.0, period_s, 19.7, 1.0),
        faults=faults,
        memory_bytes=64 << 20,
        eviction=EvictionConfig.of(["migration"]),
    )
    _, info = sky.put("v", value_of(7_000_000))
    for move in range(14, 19):
        sky.sim.settle(period_s * (move + 1) - 0.4)
        homes, holders = sky.homes(info, sky.host.machine.moves(sky.now_s)), sky.holders(info)
        assert sum(homes[index][0] not in holders[index] for index in holders) < info.chunks // 20


@pytest.mark.slow
@pytest.mark.seeded
def test_what_is_written_while_the_box_moves_under_it_is_whole_in_the_end(world, value_of):
    """Satellites that only get chunks by handover hear of the writer, too."""
    config = EvictionConfig.of(["gossip", "periodic", "migration"], sweep_s=1.0)
    sky = world(clock=MoveClock(0.0, 4.3, 19.7, 1.0), eviction=config, **SLOW)
    sky.access = "los"
    reader = ConstellationStore(sky.connect(8), sky.sky, SkySettings(servers=40), index=None)
    number, info = sky.begin_put("v", value_of(SIZE // 2), servers=40)
    for _ in range(6):
        sky.settle(1.0)
        reader.get_many([info.key])
    assert sky.host.run([number])[number].ok
    sky.settle(3.0)
    assert sky.counted("chunks_purged") == 0 and held(sky, info) == info.chunks
    assert sky.get(info)[1] == value_of(SIZE // 2)
