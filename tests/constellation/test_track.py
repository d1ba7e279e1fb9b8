"""The overhead point's way over the grid: the anchor's closed form, moving hosts, and the clock that counts by it."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skymemory.constellation.ground_track import Knot, Track, Trajectory, Waypoint, host_at, parse_waypoints, track_over
from skymemory.constellation.presets import EPOCH_UNIX_S, PRESETS
from skymemory.constellation.torus import SatelliteId
from skymemory.constellation.visibility import GroundHost, anchor, overhead_cell
from skymemory.errors import InvalidInput
from skymemory.protocol.clock import MoveClock
from skymemory.units import EARTH_RADIUS_M

REAL = sorted(name for name, preset in PRESETS.items() if preset.fixed_centre is None)
HOSTS = st.builds(GroundHost, st.floats(-89, 89), st.floats(-180, 180))
STARLINK_A = PRESETS["starlink-a"].shell


@given(name=st.sampled_from(REAL), host=HOSTS, now_s=st.floats(-1e5, 1e6))
@settings(max_examples=200)
def test_the_track_of_a_host_that_stands_is_the_anchor(name: str, host: GroundHost, now_s: float) -> None:
    shell = PRESETS[name].shell
    track = track_over(shell, host, EPOCH_UNIX_S)
    expected = anchor(shell, host, EPOCH_UNIX_S, now_s)
    plane, slot = overhead_cell(shell, host, EPOCH_UNIX_S, now_s)
    if min(abs(math.remainder(cell - 0.5, 1)) for cell in (plane, slot)) > 1e-6:  # rounding decides at the very edge
        assert track.moves(now_s) == expected.moves
        assert shell.torus.wrap(*track.cell_at(now_s)) == expected.satellite


@pytest.mark.parametrize("name", REAL)
def test_a_day_of_moves_is_the_anchors_and_every_next_move_is_announced(name: str) -> None:
    preset = PRESETS[name]
    scale, epoch_s = 600.0, 1.7e9
    clock = MoveClock(epoch_s, time_scale=scale, track=track_over(preset.shell, preset.host, preset.epoch_unix_s))
    now_s, seen = epoch_s, 0
    assert clock.moves(now_s) == (0, 0)
    while (later_s := clock.next_move_s(now_s)) is not None and later_s < epoch_s + 86_400 / scale:
        before = clock.moves(now_s)
        assert clock.moves((now_s + later_s) / 2) == before, "a move went by unannounced"
        now_s, seen = later_s, seen + 1
        now = clock.moves(now_s)
        assert now != before
        middle_s = (now_s - epoch_s) * scale + 1e-2
        assert now == preset.moves_at(middle_s)
    expected = preset.moves_at(86_400.0)
    assert seen == pytest.approx(sum(expected), abs=2) and seen > 100


def ways() -> st.SearchStrategy[Trajectory]:
    """Ships and aircraft below 75 degrees: steps of a few degrees, an hour or so each."""

    @st.composite
    def way(draw: st.DrawFn) -> Trajectory:
        time_s, latitude, longitude = 0.0, draw(st.floats(-60, 60)), draw(st.floats(-180, 180))
        points = [Waypoint(time_s, latitude, longitude)]
        for _ in range(draw(st.integers(0, 5))):
            time_s += draw(st.floats(1200, 10_000))
            latitude = max(-75.0, min(75.0, latitude + draw(st.floats(-5, 5))))
            longitude = (longitude + draw(st.floats(-5, 5)) + 180) % 360 - 180
            points.append(Waypoint(time_s, latitude, longitude))
        return Trajectory(tuple(points))

    return way()


@given(way=ways(), times=st.lists(st.floats(-1000, 40_000), min_size=1, max_size=20))
def test_a_moving_hosts_track_is_continuous_and_goes_through_the_cells_below_it(
    way: Trajectory, times: list[float]
) -> None:
    track = track_over(STARLINK_A, way, EPOCH_UNIX_S)
    for time_s in times:
        here, there = track.cell(time_s), track.cell(time_s + 0.01)
        assert max(abs(a - b) for a, b in zip(here, there, strict=True)) < 0.01
    for time_s in [point.time_s for point in way.waypoints] + times:
        host = host_at(way, time_s)
        exact = overhead_cell(STARLINK_A, host, EPOCH_UNIX_S, time_s)
        plane, slot = track.cell(time_s)
        # Where the host's latitude meets the inclination the branch ends with a vertical tangent: chords are coarser.
        tolerance = 0.02 if abs(host.latitude_deg) < 50 or abs(host.latitude_deg) > 54 else 0.8
        if time_s in [point.time_s for point in way.waypoints]:
            tolerance = 1e-6
        assert abs(math.remainder(plane - exact[0], STARLINK_A.planes)) < 4 * tolerance
        assert abs(slot - exact[1]) < tolerance


@pytest.mark.parametrize("slot", [0.5, 5.5, -3.5, 71.5])
@pytest.mark.parametrize("scale", [0.5, 1.0, 960.0])
def test_a_cell_that_ends_at_time_0_is_left_just_after_it(slot: float, scale: float) -> None:
    """There a rounding of the clock is 5e-324 s: no step of which any cell changes."""
    clock = MoveClock(track=Track((Knot(0.0, 3.2, slot),), (0.0008, -1 / 260)), time_scale=scale)
    first_s = clock.next_move_s(0.0)
    assert first_s is not None and 0.0 < first_s < 1e-8
    assert clock.moves(first_s) == (1, 0)
    following_s = clock.next_move_s(first_s)
    assert following_s is not None and following_s * scale == pytest.approx(260.0)


@given(way=ways(), starts=st.lists(st.floats(0, 3e4), min_size=1, max_size=5), scale=st.sampled_from([1.0, 60.0, 1e4]))
def test_the_next_move_of_a_moving_host_is_exact(way: Trajectory, starts: list[float], scale: float) -> None:
    clock = MoveClock(1.7e9, time_scale=scale, track=track_over(STARLINK_A, way, EPOCH_UNIX_S))
    for start in starts:
        now_s = 1.7e9 + start / scale
        next_s = clock.next_move_s(now_s)
        assert next_s is not None and next_s > now_s
        assert clock.moves(next_s) != clock.moves(now_s)
        for share in (0.1, 0.5, 0.9, 0.999):
            before_s = now_s + share * (next_s - now_s)
            assert before_s == next_s or clock.moves(before_s) == clock.moves(now_s)


def through(*knots: tuple[float, float, float]) -> Track:
    return Track(tuple(Knot(*knot) for knot in knots))


def test_a_way_that_turns_back_at_an_edge_and_one_that_stands() -> None:
    touching = MoveClock(time_scale=1.0, track=through((0, 0.0, 0.0), (10, 0.0, 0.49), (20, 0.0, 0.0)))
    assert touching.next_move_s(0.0) is None and touching.moves(10.0) == (0, 0)
    walk = MoveClock(time_scale=1.0, track=through((0, 0.0, 0.0), (10, 0.0, 1.0), (20, 1.0, 1.0)))
    assert walk.next_move_s(0.0) == pytest.approx(5.0) and walk.moves(6.0) == (-1, 0)
    assert walk.next_move_s(6.0) == pytest.approx(15.0) and walk.moves(16.0) == (-1, 1)
    assert walk.next_move_s(16.0) is None and walk.moves(1e9) == (-1, 1)
    assert Track((Knot(0.0, 0.0, 0.0),)).next_crossing_s(5.0) == math.inf


def test_an_airliner_over_the_date_line_does_not_jump() -> None:
    way = Trajectory((Waypoint(0, 35.0, 140.0), Waypoint(36_000, 37.0, -122.0)))
    track = track_over(STARLINK_A, way, EPOCH_UNIX_S)
    cells = [track.cell(float(time_s)) for time_s in range(0, 40_000, 60)]
    assert max(abs(b[0] - a[0]) for a, b in itertools.pairwise(cells)) < 0.3
    assert host_at(way, 18_000).latitude_deg > 45, "a great circle bends towards the pole"


@given(way=ways(), share=st.floats(0, 1))
def test_legs_are_great_circles_at_constant_speed(way: Trajectory, share: float) -> None:
    for leg in range(len(way.waypoints) - 1):
        here, there = way.waypoints[leg], way.waypoints[leg + 1]
        place = way.at(here.time_s + share * (there.time_s - here.time_s))
        between = Trajectory((here, there))
        part = Trajectory((here, Waypoint(here.time_s + 1e6, place.latitude_deg, place.longitude_deg)))
        rest = Trajectory((Waypoint(0, place.latitude_deg, place.longitude_deg), there._replace(time_s=1e6)))
        assert part.leg_rad(0) + rest.leg_rad(0) == pytest.approx(between.leg_rad(0), abs=1e-7)
        assert part.leg_rad(0) == pytest.approx(share * between.leg_rad(0), abs=1e-7)
    first, last = way.at(-1e9), way.at(1e9)
    assert (first.latitude_deg, first.longitude_deg) == way.waypoints[0][1:]
    assert (last.latitude_deg, last.longitude_deg) == way.waypoints[-1][1:]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "without waypoints"),
        (["0 40"], "sky.txt, line 1: '0 40': expected seconds"),
        (["0 40 x"], "line 1"),
        (["0 95 0"], "latitude 95"),
        (["10 40 0", "# a comment", "", "5 41 0"], "waypoint 2 is at 5 s"),
        (["0 40 0", "10 50 0"], "111195 m/s from waypoint 1 to 2"),
        (["0 0 0", "1e6 0 179"], "nearly opposite"),
        (["0 80 0", "100000 80 170"], "avoids the pole"),
        (["nan 0 0"], "waypoint at nan s"),
    ],
)
def test_ways_that_cannot_be_are_named(lines: list[str], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        parse_waypoints(lines, "sky.txt")


def test_a_plausible_ship() -> None:
    points = parse_waypoints(["0 40.5 -74  # New York", "604800, 50.9, -1.4"], "ship")
    metres = Trajectory(points).leg_rad(0) * EARTH_RADIUS_M
    assert metres == pytest.approx(5.5e6, rel=0.02)
    assert SatelliteId(0, 0) in STARLINK_A.torus
