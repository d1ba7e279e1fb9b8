"""Anchors, gateways and elevations, watched over hours of flight."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.constellation.ground_track import planes_of_turn, seam_free, track_over
from skymemory.constellation.orbit import Shell
from skymemory.constellation.presets import DEFAULT_HOST, EPOCH_UNIX_S, PRESETS, preset_named
from skymemory.constellation.visibility import (
    GroundHost,
    anchor,
    earth_angle_rad,
    elevations_deg,
    elevations_of,
    gateway,
    host_position_m,
    overhead_argument_rad,
    overhead_cell,
    plane_move_period_s,
    slants_m,
    slot_move_period_s,
    visible,
)
from skymemory.errors import InvalidInput
from skymemory.units import EARTH_RADIUS_M

PAPER_A = preset_named("starlink-a", 1)
STARLINK_A = PAPER_A.shell


def test_earth_angle_is_the_almanacs() -> None:
    # Earth rotation angle at J2000.0 (JD 2451545.0 UT1): 280.46061837504 degrees.
    assert math.degrees(earth_angle_rad(946_728_000.0, 0.0)) == pytest.approx(280.46061837504, abs=1e-6)
    assert math.degrees(earth_angle_rad(0.0, 86_164.0905)) - math.degrees(earth_angle_rad(0.0, 0.0)) == pytest.approx(
        360, abs=1e-4
    )


def test_moves_of_starlink_a_come_at_the_pace_of_the_specification() -> None:
    assert slot_move_period_s(STARLINK_A) == pytest.approx(260, abs=1)
    assert plane_move_period_s(STARLINK_A) / 60 == pytest.approx(19.7, abs=0.05)
    assert plane_move_period_s(STARLINK_A) / slot_move_period_s(STARLINK_A) == pytest.approx(4.5, abs=0.1)


@pytest.mark.parametrize("name", ["starlink-a", "kuiper-a", "kuiper-b", "starlink-b"])
def test_the_anchor_is_the_centre_moved_by_its_moves(name: str) -> None:
    preset = PRESETS[name]
    for now_s in np.linspace(-50_000, 200_000, 400):
        now = anchor(preset.shell, preset.host, preset.epoch_unix_s, float(now_s))
        slot_moves, plane_moves = now.moves
        assert now.satellite == preset.torus.wrap(preset.centre.plane + plane_moves, preset.centre.slot - slot_moves)
        assert now.moves == preset.moves_at(float(now_s))
    assert preset.moves_at(0.0) == (0, 0)


def test_moves_come_one_at_a_time_and_as_often_as_they_should() -> None:
    preset = PRESETS["starlink-a"]
    seen = [preset.moves_at(float(now_s)) for now_s in range(0, 86_400, 10)]
    for before, after in itertools.pairwise(seen):
        assert after[0] - before[0] in (0, 1) and after[1] - before[1] in (0, 1)
    assert seen[-1][0] == pytest.approx(86_400 / slot_move_period_s(STARLINK_A), abs=1)
    assert seen[-1][1] == pytest.approx(86_400 / plane_move_period_s(STARLINK_A), abs=1)


def test_the_anchor_stays_overhead_and_without_plane_moves_it_sinks_in_two_hours() -> None:
    preset = PAPER_A
    kept, sunk = [], []
    for now_s in range(0, 4 * 3600, 60):
        elevation = elevations_deg(STARLINK_A, DEFAULT_HOST, EPOCH_UNIX_S, now_s)
        now = anchor(STARLINK_A, DEFAULT_HOST, EPOCH_UNIX_S, now_s)
        kept.append(elevation[now.satellite])
        sunk.append(elevation[preset.centre.plane, now.satellite.slot])
    assert min(kept) > 20
    assert max(sunk[120:]) < 7
    assert max(sunk[150:]) < 0


def test_a_square_box_is_not_line_of_sight() -> None:
    u_rad = overhead_argument_rad(STARLINK_A, DEFAULT_HOST)
    r, ground = STARLINK_A.radius_m, EARTH_RADIUS_M

    def elevation_deg(slant_m: float) -> float:
        return math.degrees(math.asin((r**2 - ground**2 - slant_m**2) / (2 * ground * slant_m)))

    box = [(x, y) for y in range(-4, 5) for x in range(-4, 5)]
    above = [cell for cell in box if elevation_deg(STARLINK_A.slant_m(*cell, u_rad)) >= 25]
    assert above == [(0, -2), (0, -1), (0, 0), (0, 1), (0, 2)]


@pytest.mark.brief()
def test_the_nearest_satellite_changes_about_every_54_seconds() -> None:
    nearest = [gateway(STARLINK_A, DEFAULT_HOST, EPOCH_UNIX_S, now_s) for now_s in range(0, 6000, 4)]
    changes = sum(before != after for before, after in itertools.pairwise(nearest))
    assert 6000 / changes == pytest.approx(54, rel=0.15)


@given(latitude=st.floats(-60, 60), longitude=st.floats(-180, 180), now_s=st.floats(0, 1e5))
def test_the_gateway_is_the_nearest_and_visible_means_above_the_mask(
    latitude: float, longitude: float, now_s: float
) -> None:
    host = GroundHost(latitude, longitude)
    elevation = elevations_deg(STARLINK_A, host, EPOCH_UNIX_S, now_s)
    slant = slants_m(STARLINK_A, host, EPOCH_UNIX_S, now_s)
    in_sight = visible(STARLINK_A, host, EPOCH_UNIX_S, now_s, mask_deg=25)
    assert len(in_sight) == np.count_nonzero(elevation >= 25)
    chosen = gateway(STARLINK_A, host, EPOCH_UNIX_S, now_s, mask_deg=25)
    if in_sight:
        assert chosen == in_sight[0]
        assert slant[chosen] == pytest.approx(slant.min())
    else:
        assert chosen is None


@given(latitude=st.floats(-90, 90), longitude=st.floats(-180, 180), now_s=st.floats(0, 1e5))
def test_straight_up_is_ninety_degrees_and_the_far_side_is_below(
    latitude: float, longitude: float, now_s: float
) -> None:
    host = GroundHost(latitude, longitude)
    elevation = elevations_deg(STARLINK_A, host, EPOCH_UNIX_S, now_s)
    cosine = (STARLINK_A.positions_m(now_s) @ host_position_m(host, EPOCH_UNIX_S, now_s)) / (
        STARLINK_A.radius_m * EARTH_RADIUS_M
    )
    # Above the horizon exactly when the angle at the Earth's centre is below acos(r_E / r).
    assert np.array_equal(elevation > 1e-6, cosine > EARTH_RADIUS_M / STARLINK_A.radius_m + 1e-8)


def test_bad_hosts_are_refused() -> None:
    with pytest.raises(InvalidInput, match="latitude"):
        GroundHost(91, 0)
    with pytest.raises(InvalidInput, match="longitude"):
        GroundHost(0, 999)


@pytest.mark.parametrize("pattern", ["delta", "star"])
@pytest.mark.parametrize("descending", [False, True])
def test_the_overhead_cell_of_a_branch_is_straight_up(pattern: str, descending: bool) -> None:
    shell = Shell(18, 36, 1200e3, 80.0, pattern=pattern, model="j2")  # type: ignore[arg-type]
    host, seen = GroundHost(48.0, 13.0), 0
    for now_s in range(0, 86_400, 3600):
        plane, slot = overhead_cell(shell, host, EPOCH_UNIX_S, float(now_s), descending)
        u_rad = 2 * np.pi * (slot / 36 + now_s / shell.period_s)
        node_rad = shell.span_rad * plane / 18 + shell.node_rate_rad_s * now_s
        here = np.array(shell.position_m(u_rad, node_rad))
        assert float(elevations_of(here, host, EPOCH_UNIX_S, float(now_s))) > 89.9
        ahead = shell.position_m(u_rad + 1e-4, node_rad)
        assert (ahead[2] < here[2]) is np.bool_(descending)
        seen += plane % planes_of_turn(shell) < 18
    assert seen == 24 if pattern == "delta" else 10 <= seen <= 14
    track = track_over(shell, host, EPOCH_UNIX_S, descending)
    assert track.cell(50_000.0) == pytest.approx(
        overhead_cell(shell, host, EPOCH_UNIX_S, 50_000.0, descending), abs=1e-4
    )
    if pattern == "star":
        wait_s, for_s = seam_free(track, shell, 2, 3, 5000.0)
        for at_s, free in ((-5, wait_s == 0), (5, True), (for_s - 5, True), (for_s + 5, False)):
            centre = track.cell_at(5000.0 + wait_s + at_s)[0] % planes_of_turn(shell)
            assert (2 <= centre <= 18 - 1 - 3) is free


def test_no_satellite_is_in_sight_from_the_pole() -> None:
    assert gateway(PRESETS["kuiper-b"].shell, GroundHost(90, 0), EPOCH_UNIX_S, 0.0) is None
