"""Real orbits in the daemon, against the Python host's: delays of beams, links through the Earth, hosts that move."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.flight.share import Share

from skymemory.constellation.ground_track import Waypoint
from skymemory.constellation.presets import PRESETS, FlownShell, preset_named
from skymemory.constellation.torus import SatelliteId
from skymemory.constellation.visibility import GroundHost
from skymemory.testbed.connect import clock_of, shell_of, sky_of
from skymemory.testbed.plan import Ground, make_plan
from skymemory.transport.udp_host import PATIENCE_S

EPOCH_S = 1_750_000_000.0
BOUND_S = 1e-9
"""Both compute the same closed form; this is a third of a metre."""
_PHASES = (Phase.explicit, Phase.generate)
"""A wrong closed form is wrong nearly everywhere: there is nothing to shrink."""
REAL = [name for name, preset in PRESETS.items() if preset.fixed_centre is None]
TRACKS: dict[str, tuple[Waypoint, ...]] = {
    "still": (),
    "flight": (Waypoint(600.0, 50.0, 8.5), Waypoint(30_000.0, 40.6, -73.8), Waypoint(60_000.0, 21.3, -157.9)),
    "ship": (Waypoint(-5_000.0, -33.9, 18.4), Waypoint(600_000.0, -34.6, -58.4)),
    "there and back": (Waypoint(0.0, 10.0, 179.9), Waypoint(4_000.0, 12.0, -178.0), Waypoint(8_000.0, 10.0, 179.9)),
    "one": (Waypoint(777.0, 35.0, 139.0),),
}


def plan_of(name: str, version: int, ground: Ground, scale: float, **more: Any) -> Any:
    found = make_plan(name, access="ideal", ground=ground, epoch_s=EPOCH_S, time_scale=scale, **more)
    if version != found.preset_version:
        centre = ground.centre(preset_named(name, version))
        found = replace(found, preset_version=version, centre=centre)
    return found


@pytest.mark.brief()
@settings(max_examples=40, phases=_PHASES)
@given(
    st.sampled_from(REAL),
    st.integers(1, 2),
    st.sampled_from(sorted(TRACKS)),
    st.floats(-50, 50),
    st.floats(-180, 180),
    st.sampled_from([0.0, 1.0, 60.0, 3600.0]),
    st.tuples(st.integers(-40, 40), st.integers(-80, 80)),
    st.integers(0, 2**32),
)
def test_beams_are_as_long_as_in_the_python_host(
    name: str,
    version: int,
    track: str,
    latitude: float,
    longitude: float,
    scale: float,
    pushed: tuple[int, int],
    seed: int,
) -> None:
    """Over half a year of the daemon's life, for hosts that stand or move, seen from there and from other places."""
    draw = random.Random(seed)
    ground = Ground(latitude, longitude, waypoints=TRACKS[track])
    plan = plan_of(name, version, ground, scale)
    share, sky, clock = Share(plan), sky_of(plan), clock_of(plan).push(*pushed)
    other = GroundHost(draw.uniform(-55, 55), draw.uniform(-180, 360))
    sight, others = plan.sight(), plan.sight(other)
    for _ in range(8):
        now_us = round((EPOCH_S + draw.choice([1.0, 1e3, 1e5, 1.5e7]) * draw.random()) * 1e6)
        now_s = now_us / 1e6
        moves, sky_s = clock.moves(now_s), clock.sky_s(now_s)
        if draw.random() < 0.2:  # a satellite that has not followed the last move yet
            moves = moves[0] - 1, moves[1]
        centre = sky.centre_at(moves)
        above = sight.in_sight(centre, sky_s)
        satellites = plan.torus.satellites()
        for satellite in {*draw.sample(satellites, 4), *above[:3], *others.in_sight(centre, sky_s)[:2]}:
            twin = sight.one_way_s(satellite, centre, sky_s)
            assert abs(share.beam_s(satellite, moves, now_us) - twin) < BOUND_S
            twin = others.one_way_s(satellite, centre, sky_s)
            assert abs(share.beam_s(satellite, moves, now_us, other) - twin) < BOUND_S
            here = satellite
            for there in plan.torus.neighbours(here):
                assert share.blocked(here, there, moves, now_us) == sight.blocked(here, there, centre, sky_s)


@pytest.mark.parametrize("name", REAL)
def test_satellites_in_sight_are_near(name: str) -> None:
    plan = make_plan(name, access="ideal", ground=Ground(20.0, 30.0), epoch_s=EPOCH_S, time_scale=60.0)
    share, sky, clock, sight = Share(plan), sky_of(plan), clock_of(plan), plan.sight()
    seen = 0
    for minute in range(30):
        now_s = EPOCH_S + 60.0 * minute
        moves = clock.moves(now_s)
        for satellite in sight.in_sight(sky.centre_at(moves), clock.sky_s(now_s)):
            seen += 1
            assert share.beam_s(satellite, moves, round(now_s * 1e6)) <= sight.longest_s * 1.01
    assert seen > 20


def test_some_links_are_blocked_and_come_back() -> None:
    """Starlink B's planes are behind the Earth from each other for a quarter of their orbit, also without delays."""
    plan = plan_of("starlink-b", 2, Ground(), 1.0, delay_scale=0.0)
    share, sky, clock = Share(plan), sky_of(plan), clock_of(plan)
    here, there = SatelliteId(1, 10), SatelliteId(2, 10)
    found, twin = [], []
    for minute in range(0, 24 * 60, 3):
        now_s = EPOCH_S + 60.0 * minute
        moves = clock.moves(now_s)
        found.append(share.blocked(here, there, moves, round(now_s * 1e6)))
        twin.append(plan.sight().blocked(here, there, sky.centre_at(moves), clock.sky_s(now_s)))
    assert found == twin and 0.1 < sum(found) / len(found) < 0.5


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_links_take_as_long_as_light(name: str) -> None:
    plan = make_plan(name, access="ideal", delay_scale=3.0)
    share, shell = Share(plan), shell_of(plan)
    for here in plan.torus.satellites()[:: max(1, plan.torus.size // 60)]:
        for there in plan.torus.neighbours(here):
            light_s = 3.0 * shell.hop_one_way_s(plan.torus, here, there)
            assert light_s <= share.hop_us(here, there) / 1e6 < light_s + 2e-6


GAPS = tuple(SatelliteId(*gap) for gap in ((0, 5), (1, 2), (1, 3), (3, 0)))
FLOWN = FlownShell("made", 1.75e9, 6, 550e3, 53.0, (0.1, 1.7, 3.2, 4.8), (0.1, -0.4, 0.2, 0.3), GAPS)


def test_real_satellites_with_gaps() -> None:
    """Planes that are spread unevenly, with cells that are empty: beams, links, and how long a neighbour may take."""
    plan = make_plan(FLOWN.preset(), access="ideal", epoch_s=EPOCH_S, time_scale=60.0, delay_scale=2.0)
    share, sky, clock, sight, shell = Share(plan), sky_of(plan), clock_of(plan), plan.sight(), shell_of(plan)
    torus = plan.torus
    for here in torus.satellites():
        longest_s = 0.0
        for there in set(torus.neighbours(here)) - {here}:
            light_s = 2.0 * shell.hop_one_way_s(torus, here, there)
            longest_s = max(longest_s, light_s)
            assert light_s <= share.hop_us(here, there) / 1e6 < light_s + 5e-6
        timeout_s = share.timeout_us(here) / 1e6
        assert PATIENCE_S + 2 * longest_s <= timeout_s < PATIENCE_S + 2 * longest_s + 20e-6
        for minute in range(0, 600, 7):
            now_s = EPOCH_S + minute
            moves = clock.moves(now_s)
            twin_s = sight.one_way_s(here, sky.centre_at(moves), clock.sky_s(now_s))
            assert abs(share.beam_s(here, moves, round(now_s * 1e6)) - twin_s) < BOUND_S


@settings(max_examples=40, phases=_PHASES)
@given(st.sampled_from(REAL), st.sampled_from(sorted(TRACKS)), st.sampled_from([1.0, 60.0, 3600.0]), st.floats(0, 1.2))
def test_a_box_follows_a_host_that_moves(name: str, track: str, scale: float, share_of_path: float) -> None:
    """Satellites in C count the same moves, and know to a few microseconds when the next comes."""
    ground = Ground(20.0, 30.0, waypoints=TRACKS[track])
    plan = plan_of(name, 2, ground, scale)
    share, twin = Share(plan), clock_of(plan)
    last_s = ground.waypoints[-1].time_s if ground.waypoints else 1e5
    now_us = round((EPOCH_S + share_of_path * last_s / scale) * 1e6)
    for _ in range(12):
        slots, planes, next_us = share.counted(now_us)
        assert (slots, planes) == twin.moves(now_us / 1e6)
        next_s = twin.next_move_s(now_us / 1e6)
        assert next_s is not None and abs(next_us - next_s * 1e6) <= 4
        assert twin.moves(next_us / 1e6) != (slots, planes)
        now_us = next_us


def test_the_share_holds_for_good() -> None:
    """Its text grows with planes and waypoints, not with time or satellites' passes."""
    plan = make_plan("starlink-a", access="ideal")
    share, sky, clock = Share(plan), sky_of(plan), clock_of(plan)
    for years in (1, 10):
        now_s = plan.epoch_s + years * 365.25 * 86_400
        moves = clock.moves(now_s)
        twin_s = plan.sight().one_way_s(SatelliteId(3, 4), sky.centre_at(moves), clock.sky_s(now_s))
        assert math.isclose(share.beam_s(SatelliteId(3, 4), moves, round(now_s * 1e6)), twin_s, abs_tol=1e-9)
