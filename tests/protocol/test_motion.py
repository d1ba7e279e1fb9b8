"""The clock of moves, the clock a ground host follows, and the map of the sky."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.constellation.ground_track import CellGrid, Stop
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput
from skymemory.placement.layout import STRATEGIES
from skymemory.placement.locate import Placement
from skymemory.protocol.clock import HANDED_OVER_S, LISTENERS, STRATEGY_CODES, FollowedClock, Locator, MoveClock, SkyMap
from skymemory.protocol.wire import ChunkRef, PlacementTag


def test_moves_are_counted_from_the_epoch_with_what_was_pushed():
    clock = MoveClock(epoch_s=1000.0, slot_period_s=260.0, plane_period_s=1182.0, time_scale=2.0, pushed=(5, -1))
    assert clock.moves(1000.0) == (5, -1)
    assert clock.moves(1000.0 + 130.0) == (6, -1)
    assert clock.moves(1000.0 + 591.0) == (9, 0)
    assert clock.moves(999.0) == (4, -2)
    assert clock.push(1, 1).moves(1000.0) == (6, 0)
    assert MoveClock().moves(1e12) == (0, 0) and MoveClock().next_move_s(1e12) is None
    assert MoveClock(slot_period_s=1.0).next_move_s(0.0) is None
    assert MoveClock(time_scale=1.0).next_move_s(0.0) is None


@given(
    epoch_s=st.floats(-1e9, 1.8e9),
    now_s=st.floats(0, 1.8e9),
    slot_s=st.floats(0.5, 1e4),
    plane_s=st.floats(0.5, 1e5),
    scale=st.floats(1e-3, 1e4),
)
def test_the_next_move_comes_and_never_before_its_time(epoch_s, now_s, slot_s, plane_s, scale):
    """A timer set to it sees the moves change, at once; and hardly later than they do."""
    clock = MoveClock(epoch_s, slot_s, plane_s, scale)
    at_s = clock.next_move_s(now_s)
    assert at_s is not None and at_s > now_s
    assert clock.moves(at_s) != clock.moves(now_s)
    tolerance_s = 64 * math.ulp(max(now_s, abs(epoch_s), slot_s / scale, plane_s / scale))
    assert at_s - now_s <= min(slot_s, plane_s) / scale + tolerance_s
    just_before_s = at_s - tolerance_s
    assert just_before_s <= now_s or clock.moves(just_before_s) == clock.moves(now_s)


def reported(clock: FollowedClock, moves: tuple[int, int], now_s: float, satellites: int = LISTENERS) -> None:
    """So many satellites say the same, one after the other."""
    for slot in range(satellites):
        clock.report(SatelliteId(0, slot), moves, round_trip_s=0.3, now_s=now_s)


def test_a_followed_clock_adopts_a_report_unless_it_is_merely_late():
    clock = FollowedClock(MoveClock(slot_period_s=10.0, time_scale=1.0))
    assert clock.moves(9.9) == (0, 0)
    assert clock.moves(10.1) == (1, 0)
    reported(clock, (0, 0), 10.1)
    assert clock.moves(10.1) == (1, 0)
    reported(clock, (0, 0), 12.0)
    assert clock.moves(12.0) == (0, 0)
    reported(clock, (7, -2), 13.0)
    assert clock.moves(13.0) == (7, -2) and clock.moves(20.0) == (8, -2)
    assert clock.nearby(20.0)[:4] == [(8, -2), (7, -2), (0, 0), (1, 0)]
    assert {(7, -2), (9, -2), (8, -1), (8, -3)} <= set(clock.nearby(20.0))


def test_no_single_satellite_moves_the_clock_and_a_majority_does():
    clock = FollowedClock(MoveClock())
    for turn in range(3):
        clock.report(SatelliteId(0, 0), (5 + turn, 0), 0.0, 0.0)
        assert clock.moves(0.0) == (0, 0) and (5 + turn, 0) in clock.nearby(0.0)
    clock.report(SatelliteId(0, 1), (0, 0), 0.0, 0.0)
    clock.report(SatelliteId(0, 2), (0, 0), 0.0, 0.0)
    clock.report(SatelliteId(0, 3), (7, 0), 0.0, 0.0)
    assert clock.moves(0.0) == (0, 0), "two of four"
    clock.report(SatelliteId(0, 4), (7, 0), 0.0, 0.0)
    assert clock.moves(0.0) == (7, 0), "three of five"


def test_what_a_satellite_said_half_a_minute_ago_is_no_word_of_now():
    clock = FollowedClock(MoveClock())
    clock.report(SatelliteId(0, 0), (5, 0), 0.0, 0.0)
    clock.report(SatelliteId(0, 1), (5, 0), 0.0, 40.0)
    assert clock.moves(40.0) == (0, 0)
    clock.report(SatelliteId(0, 2), (5, 0), 0.0, 41.0)
    assert clock.moves(41.0) == (5, 0)


def test_flapping_between_two_counts_forgets_neither():
    clock = FollowedClock(MoveClock())
    reported(clock, (5, 0), 0.0)
    for turn in range(10):
        reported(clock, (6 + turn % 2, 0), 0.0)
    assert (5, 0) in clock.nearby(0.0) and (0, 0) in clock.nearby(0.0)


SKY = SkyMap(Torus(5, 19), SatelliteId(2, 9))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_satellite_and_reader_compute_the_same_place(strategy):
    """``Locator`` (from the packed tag) against ``SkyMap.servers_at`` and the placement itself."""
    placement = Placement.of(strategy, 10, SKY.torus, SKY.centre)
    locator = Locator(SatelliteId(0, 0), SKY, MoveClock(), 0.0)
    for now in [(0, 0), (3, 1), (-2, 4)]:
        locator.push_to(now)
        locator.follow(0.0)
        assert locator.moves == locator.pushed == now
        for set_moves in [(0, 0), (-1, 2), (5, -3)]:
            servers = SKY.servers_at(STRATEGY_CODES[strategy], 10, set_moves, now)
            for server in range(10):
                tag = PlacementTag(STRATEGY_CODES[strategy], 10, server, *set_moves)
                ref = ChunkRef(bytes(32), server, 99, 1, 0, 99, 0, tag).pack()
                assert locator.home(ref) == servers[server] == placement.locate(server, set_moves, now)
    assert SKY.centre_at((3, 1)) == SatelliteId(3, 6)


def test_impossible_placements_are_named():
    with pytest.raises(InvalidInput, match="strategy 9"):
        SKY.placement(9, 10)
    with pytest.raises(InvalidInput):
        SKY.placement(3, 96)
    for servers in range(1, 96):
        for code in STRATEGY_CODES.values():
            SKY.placement(code, servers)
    assert len(SKY._placements) <= 257


@pytest.mark.parametrize("way", [(4, 5), (4, 3), (5, 4), (3, 4)])
def test_what_was_set_after_a_move_is_not_looked_for_where_it_was_before(way):
    """A user who walks east or north moves the box back: later is not more."""
    path = [Stop(0.0, 4, 4), Stop(10.0, *way)]
    base = MoveClock(time_scale=1.0, track=CellGrid(9, 9).track(path, 1))
    clock = FollowedClock(base)
    before, after = base.moves(4.9), base.moves(5.1)
    assert before == (0, 0) != after
    assert clock.to_read_at(before, 5.1) == before
    assert clock.to_read_at(after, 5.1) == after
    assert clock.to_read_at(before, 5.1 + HANDED_OVER_S) == after


def test_a_box_that_was_pushed_is_searched_wherever_a_chunk_can_have_been_left():
    """The clock counts past the setting a second time: it says nothing of where the box went in between."""
    placement = SKY.placement(STRATEGY_CODES["rotation_hop"], 10)
    before = MoveClock(slot_period_s=10.0, plane_period_s=1e9, time_scale=1.0)
    set_moves, left_at = before.moves(100.0), [before.moves(time_s) for time_s in (100.0, 120.0, 150.0)]
    pushed = before.push(-8, 0)  # at 150 s
    assert pushed.moves(190.0) == (11, 0) and set_moves in pushed.moves_before(190.0, 20)
    looked_at = pushed.moves_since(set_moves, placement, 190.0)
    for server in range(10):
        places = {placement.locate(server, set_moves, moves) for moves in looked_at}
        assert places >= {placement.locate(server, set_moves, moves) for moves in left_at}
