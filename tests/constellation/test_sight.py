"""What a host sees, by closed form, against every satellite's position worked out and looked at."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skymemory.constellation.ground_track import Trajectory, Waypoint, host_at
from skymemory.constellation.orbit import PATTERNS, SKY_MODELS, Shell
from skymemory.constellation.presets import EPOCH_UNIX_S, PRESETS, preset_named
from skymemory.constellation.sight import BoxSight, OrbitSight, reach_cosine, slant_s
from skymemory.constellation.torus import SatelliteId
from skymemory.constellation.visibility import (
    GroundHost,
    anchor,
    elevations_deg,
    gateway,
    overhead_argument_rad,
    slants_m,
    visible,
)
from skymemory.errors import InvalidInput
from skymemory.units import EARTH_RADIUS_M, SPEED_OF_LIGHT_M_S

REAL = sorted(name for name, preset in PRESETS.items() if preset.fixed_centre is None)


def agree(shell: Shell, host: GroundHost, now_s: float, mask_deg: float, seen: list[SatelliteId]) -> None:
    """``seen`` is what brute force sees, nearest first, up to rounding at the very edge and between equals."""
    elevation = elevations_deg(shell, host, EPOCH_UNIX_S, now_s)
    expected = visible(shell, host, EPOCH_UNIX_S, now_s, mask_deg)
    for satellite in set(seen) ^ set(expected):
        assert abs(elevation[satellite] - mask_deg) < 1e-6
    heights = [elevation[satellite] for satellite in seen]
    assert all(a >= b - 1e-6 for a, b in itertools.pairwise(heights))
    assert len(set(seen)) == len(seen)


@pytest.mark.brief("starlink-b-1")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", REAL)
def test_a_day_over_every_real_preset(name: str, version: int) -> None:
    preset = preset_named(name, version)
    draw = random.Random(name)
    for host in (preset.host, GroundHost(0.0, 17.0), GroundHost(-preset.shell.inclination_deg, 100.0)):
        for mask_deg in (10.0, 25.0):
            sight = OrbitSight(preset.shell, host, EPOCH_UNIX_S, mask_deg)
            for _ in range(25):
                now_s = draw.uniform(0, 86_400)
                now = anchor(preset.shell, host, EPOCH_UNIX_S, now_s)
                seen = list(sight.in_sight(now.satellite, now_s))
                agree(preset.shell, host, now_s, mask_deg, seen)
                best = gateway(preset.shell, host, EPOCH_UNIX_S, now_s, mask_deg)
                elevation = elevations_deg(preset.shell, host, EPOCH_UNIX_S, now_s)
                assert bool(seen) == (best is not None)
                assert best is None or elevation[seen[0]] == pytest.approx(elevation[best], abs=1e-6)
                slants = slants_m(preset.shell, host, EPOCH_UNIX_S, now_s)
                for satellite in seen:
                    light_s = sight.one_way_s(satellite, now.satellite, now_s)
                    assert light_s * SPEED_OF_LIGHT_M_S == pytest.approx(slants[satellite], rel=1e-9)


@given(
    planes=st.integers(1, 40),
    slots=st.integers(1, 40),
    altitude_m=st.floats(2e5, 1.9e6),
    inclination=st.floats(5, 175),
    phase=st.integers(0, 39),
    pattern=st.sampled_from(PATTERNS),
    model=st.sampled_from(SKY_MODELS),
    latitude=st.floats(-90, 90),
    longitude=st.floats(-180, 180),
    now_s=st.floats(0, 1e6),
    mask=st.floats(0, 80),
)
@settings(max_examples=150)
def test_any_shell_over_any_place(
    planes, slots, altitude_m, inclination, phase, pattern, model, latitude, longitude, now_s, mask
):
    shell = Shell(planes, slots, altitude_m, inclination, phase % planes, pattern, model)
    host = GroundHost(latitude, longitude)
    agree(shell, host, now_s, mask, OrbitSight(shell, host, EPOCH_UNIX_S, mask).overhead(now_s))


@given(now_s=st.floats(0, 1e5), push=st.tuples(st.integers(-30, 30), st.integers(-90, 90)))
@settings(max_examples=50)
def test_a_box_pushed_on_by_hand_is_seen_as_if_it_had_flown(now_s: float, push: tuple[int, int]) -> None:
    preset = PRESETS["starlink-a"]
    sight = OrbitSight(preset.shell, preset.host, EPOCH_UNIX_S)
    wrap = preset.torus.wrap
    centre = anchor(preset.shell, preset.host, EPOCH_UNIX_S, now_s).satellite
    pushed = wrap(centre.plane + push[1], centre.slot - push[0])
    before = sight.in_sight(centre, now_s)
    after = sight.in_sight(pushed, now_s)
    assert after == tuple(wrap(plane + push[1], slot - push[0]) for plane, slot in before)
    for here, there in zip(before, after, strict=True):
        assert sight.one_way_s(here, centre, now_s) == pytest.approx(sight.one_way_s(there, pushed, now_s), rel=1e-12)


def test_the_climbing_rule_keeps_to_the_boxs_branch_while_it_can() -> None:
    preset = PRESETS["starlink-a"]
    nearest = OrbitSight(preset.shell, preset.host, EPOCH_UNIX_S)
    climbing = OrbitSight(preset.shell, preset.host, EPOCH_UNIX_S, rule="climbing")
    far = {"nearest": 0, "climbing": 0}
    for now_s in range(0, 7200, 30):
        centre = anchor(preset.shell, preset.host, EPOCH_UNIX_S, now_s).satellite
        for name, sight in (("nearest", nearest), ("climbing", climbing)):
            seen = sight.in_sight(centre, now_s)
            assert set(seen) == set(nearest.in_sight(centre, now_s))
            far[name] += preset.torus.hops(seen[0], centre) > 6
    assert far["climbing"] == 0 and far["nearest"] > 60


def test_a_moving_host_sees_what_one_standing_there_sees() -> None:
    shell = PRESETS["kuiper-a"].shell
    way = Trajectory((Waypoint(0, 10.0, 0.0), Waypoint(40_000, -30.0, 60.0)))
    moving = OrbitSight(shell, way, EPOCH_UNIX_S)
    for now_s in (-10.0, 0.0, 12_345.0, 39_999.0, 80_000.0):
        standing = OrbitSight(shell, host_at(way, now_s), EPOCH_UNIX_S)
        assert moving.overhead(now_s) == standing.overhead(now_s)


def test_beyond_the_mask_a_beam_is_as_long_as_the_paper_has_it() -> None:
    preset = PRESETS["starlink-a"]
    sight = OrbitSight(preset.shell, preset.host, EPOCH_UNIX_S)
    u_rad = overhead_argument_rad(preset.shell, preset.host)
    assert u_rad == pytest.approx(math.asin(math.sin(math.radians(40)) / math.sin(math.radians(53))), abs=0.01)
    far = preset.torus.wrap(preset.centre.plane, preset.centre.slot + 9)
    assert sight.one_way_s(far, preset.centre, 0.0) == preset.shell.slant_one_way_s(9, 0, u_rad)


def test_the_testbeds_sight_is_by_offset() -> None:
    preset = PRESETS["testbed-19x5"]
    sight = BoxSight(preset.shell, preset.torus, 25.0)
    seen = sight.in_sight(preset.centre, 1e9)
    assert seen[0] == preset.centre and set(seen[1:]) == {
        preset.torus.north(preset.centre),
        preset.torus.south(preset.centre),
    }
    elsewhere = sight.in_sight(SatelliteId(0, 0), 0.0)
    assert elsewhere[0] == SatelliteId(0, 0) and SatelliteId(4, 0) in elsewhere
    assert len(BoxSight(preset.shell, preset.torus, 5.0).in_sight(preset.centre, 0.0)) > len(seen)


@given(altitude_m=st.floats(2e5, 1.9e6), mask=st.floats(0, 89))
def test_reach_is_the_angle_whose_elevation_is_the_mask(altitude_m: float, mask: float) -> None:
    shell = Shell(2, 2, altitude_m, 50.0)
    cosine = reach_cosine(shell, mask)
    slant_m = slant_s(shell, cosine) * SPEED_OF_LIGHT_M_S
    up_m = shell.radius_m * cosine - EARTH_RADIUS_M
    assert math.degrees(math.asin(max(-1.0, min(1.0, up_m / slant_m)))) == pytest.approx(mask, abs=1e-4)


@pytest.mark.parametrize("mask", [-1.0, 90.0, float("nan")])
def test_masks_that_no_antenna_has(mask: float) -> None:
    with pytest.raises(InvalidInput, match="elevation mask"):
        BoxSight(PRESETS["testbed-19x5"].shell, PRESETS["testbed-19x5"].torus, mask)
    assert np.isfinite(reach_cosine(PRESETS["testbed-19x5"].shell, 0.0))


def test_links_are_blocked_where_the_earth_is_between_the_positions() -> None:
    preset, place = PRESETS["starlink-b"], GroundHost(40.0, -75.0)
    shell, torus = preset.shell, preset.torus
    sight = OrbitSight(shell, place, preset.epoch_unix_s)
    assert sight.track is not None and sight.any_blocked
    dice, found = random.Random(4), []
    for _ in range(300):
        sky_s, push = dice.uniform(0, 1e6), (dice.randrange(5), dice.randrange(75))
        centre = torus.wrap(*sight.track.cell_at(sky_s))
        here = torus.satellite(dice.randrange(torus.size))
        where = shell.positions_m(sky_s)
        for there in torus.neighbours(here):
            chord_m = float(np.linalg.norm(where[tuple(here)] - where[tuple(there)]))
            moved = [torus.wrap(each.plane + push[0], each.slot + push[1]) for each in (here, there, centre)]
            assert sight.blocked(*moved, sky_s) == shell.link_blocked(chord_m)
            found.append((here.plane != there.plane, shell.link_blocked(chord_m)))
    share = found.count((True, True)) / sum(across for across, _ in found)
    assert 0.22 < share < 0.32 and (False, True) not in found, "27 % of the orbit, between planes only"
    assert not OrbitSight(PRESETS["starlink-a"].shell, place, preset.epoch_unix_s).any_blocked
