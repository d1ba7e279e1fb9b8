"""An orbit run fast: nothing is lost in a day of it, and readers do not pay for the moves."""

from __future__ import annotations

import random

import pytest
from tests.protocol.conftest import World
from tests.protocol.satellite import ledgers

from skymemory.protocol.clock import MoveClock


@pytest.mark.brief()
@pytest.mark.parametrize("strategy", ["rotation", "rotation_hop", "cost"])
def test_a_read_just_after_a_move_takes_one_round_trip(world, value_of, strategy):
    sky = world(clock=MoveClock(slot_period_s=10.0, plane_period_s=36.0, time_scale=1.0))
    value = value_of(60_000)
    _, info = sky.put("v", value, 1000, strategy)
    for move_s in (10.0, 20.0, 30.0, 36.0, 40.0):
        for later_s in (0.0001, 0.013, 0.1, 0.29, 0.31):
            sky.sim.settle(move_s + later_s)
            read, out = sky.get(info)
            assert read.ok and out == value
            assert read.report.requests == 10 and read.report.seconds < 2.5 * sky.link_s, (move_s, later_s)


def test_what_was_written_a_moment_ago_is_looked_for_where_it_was_written(world, value_of):
    sky = world(clock=MoveClock(slot_period_s=10.0, plane_period_s=1000.0, time_scale=1.0))
    for later_s in (10.001, 20.1, 30.2):
        sky.sim.settle(later_s)
        value = value_of(30_000, int(later_s))
        _, info = sky.put(f"v{later_s}", value, 1000)
        read, out = sky.get(info)
        assert read.ok and out == value and read.report.requests == 10


@pytest.mark.slow
def test_an_accelerated_day_loses_nothing(value_of):
    """A day at 240 times its pace: 332 slot moves (17 turns) and 72 plane moves (14 turns) in six minutes."""
    sky = World(clock=MoveClock(slot_period_s=260.0, plane_period_s=1184.0, time_scale=240.0))
    dice = random.Random(4)
    values = [value_of(20_000, n) for n in range(5)]
    infos = [sky.put(f"v{n}", value, 1000)[1] for n, value in enumerate(values)]
    reads = 0
    while sky.now_s < 360.0:
        sky.settle(dice.uniform(0.0, 2.0))
        which = dice.randrange(5)
        read, out = sky.get(infos[which])
        assert read.ok and out == values[which], (sky.now_s, read.report)
        reads += 1
    sky.settle(1.0)
    moves = sky.sim.clock.moves(sky.now_s)
    assert moves[0] >= 332 and moves[1] >= 72 and reads > 300
    for info in infos:
        holders, homes = sky.holders(info), sky.homes(info, moves)
        assert all(homes[index][0] in here for index, here in holders.items())
    books = {here: machine.housekeeping() for here, machine in sky.sim.satellites.items()}
    together = ledgers.total(books)
    assert ledgers.open_books(books) == {} and together["bytes_evicted"] == together["bytes_deleted"] == 0


@pytest.mark.slow
@pytest.mark.seeded
def test_what_was_written_between_moves_that_follow_fast_is_found_in_one_round_trip(world, value_of):
    """It is looked for where it was written, not where a handover that has only begun will have brought it."""
    sky = world(clock=MoveClock(slot_period_s=0.12, plane_period_s=1000.0, time_scale=1.0))
    value = value_of(600_000)
    for at_s in (10.13, 20.13, 30.13):
        sky.sim.settle(at_s)
        _, info = sky.put(f"v{at_s}", value, 6000)
        for _ in range(6):
            read, out = sky.get(info)
            assert read.ok and out == value and read.report.requests == 10, sky.now_s
            sky.settle(0.09)


def test_satellites_that_hand_over_much_spread_it_over_the_time_they_have(world, value_of):
    """The bursts of one move, of all satellites together: nowhere more than a few in the same 5 ms."""
    sky = world(clock=MoveClock(slot_period_s=10.0, plane_period_s=1000.0, time_scale=1.0))
    for number in range(8):
        sky.put(f"v{number}", value_of(480_000, number), 1000)
    sent, send = [], sky.sim._send

    def recording(batch, sender, receiver) -> None:
        first = next(iter(batch.datagrams()))
        if first[0] & 0x10 and first[9] == 0x05:
            sent.append(sky.sim.now_s)
        send(batch, sender, receiver)

    sky.sim._send = recording
    sky.sim.settle(11.0)
    assert len(sent) > 100 and sent[0] >= 10.0 and sent[-1] < 10.3
    assert max(sum(begin_s <= time_s < begin_s + 0.005 for time_s in sent) for begin_s in sent) < len(sent) / 8


def test_a_plane_move_right_after_a_slot_move_finds_chunks_on_their_way_and_turns_them_round(world, value_of):
    """What arrives where it belonged a moment ago goes on at once: readers are not sent after it."""
    sky = world(clock=MoveClock(slot_period_s=10.0, plane_period_s=10.03, time_scale=1.0))
    infos = [sky.put(f"v{number}", value_of(240_000, number), 1000)[1] for number in range(4)]
    for move_s in (10.0, 20.0, 30.0):
        for later_s in (0.45, 0.6, 0.9):
            sky.sim.settle(move_s + later_s)
            for number, info in enumerate(infos):
                read, out = sky.get(info)
                assert read.ok and out == value_of(240_000, number)
                assert read.report.requests == 10, (sky.now_s, read.report)
