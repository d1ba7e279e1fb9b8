"""Shells of model ``j2`` against SGP4 and skyfield, phases against collisions, and old plans against their old sky."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from skymemory.constellation.orbit import Shell, altitude_of_mean_motion_m
from skymemory.constellation.presets import DEFAULT_HOST, EPOCH_UNIX_S, PRESETS, preset_named
from skymemory.constellation.sight import OrbitSight
from skymemory.constellation.torus import SatelliteId
from skymemory.constellation.visibility import (
    GroundHost,
    elevations_deg,
    elevations_of,
    overhead_argument_rad,
    sidereal_angle_rad,
)
from skymemory.errors import InvalidInput
from skymemory.testbed.connect import clock_of, shell_of, sky_of
from skymemory.testbed.plan import make_plan
from skymemory.testbed.plan_file import from_json, to_json
from skymemory.units import SPEED_OF_LIGHT_M_S

REAL = sorted(name for name, preset in PRESETS.items() if preset.fixed_centre is None)
DAY_S = 86_400.0
JULIAN = EPOCH_UNIX_S / DAY_S + 2440587.5
OLD_SKIES = json.loads((Path(__file__).parent / "old_skies.json").read_text("utf-8"))


def flown(shell: Shell, satellites: list[SatelliteId], times_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Their positions by SGP4 without drag, in metres; ``(satellites, times, 3)``."""
    api = pytest.importorskip("sgp4.api")
    records = []
    for plane, slot in satellites:
        record = api.Satrec()
        argument, node = shell.argument_rad(plane, slot) % (2 * math.pi), shell.node_rad(plane) % (2 * math.pi)
        inclination = math.radians(shell.inclination_deg)
        mean = (0.0, 0.0, inclination, argument, shell.kozai_rad_min, node)
        record.sgp4init(api.WGS72, "i", 1, JULIAN - 2433281.5, 0.0, 0.0, 0.0, *mean)
        records.append(record)
    errors, found, _ = api.SatrecArray(records).sgp4(np.full(len(times_s), JULIAN), times_s / DAY_S)
    assert not errors.any()
    return np.asarray(found * 1e3)


@pytest.mark.parametrize("name", REAL)
def test_no_two_satellites_of_a_preset_ever_meet(name: str) -> None:
    shell = PRESETS[name].shell
    assert shell.nearest_approach_m() > 49_000
    if shell.planes % 2 == 0:  # those of opposite planes did
        assert preset_named(name, 1).shell.nearest_approach_m() < 1


@pytest.mark.parametrize("pattern", ["delta", "star"])
def test_the_nearest_approach_is_that_of_a_fine_scan(pattern: Any) -> None:
    draw = np.random.default_rng(21)
    for _ in range(12):
        planes, slots = int(draw.integers(2, 8)), int(draw.integers(1, 8))
        shell = Shell(planes, slots, 6e5, float(draw.uniform(5, 175)), int(draw.integers(planes)), pattern, "j2")
        # Nothing moves faster against another than twice 8 km/s: between two instants, at most 16 km/s · step / 2.
        step_s = 4.0
        positions = shell.positions_m(np.arange(0.0, shell.period_s, step_s))
        least = min(
            float(np.linalg.norm(positions[:, a, :, None] - positions[:, b, None, :], axis=-1).min())
            for a in range(planes)
            for b in range(a)
        )
        assert -1 <= least - shell.nearest_approach_m() <= 16e3 * step_s / 2


@pytest.mark.parametrize(("name", "longest_km"), [("starlink-a", 1511), ("kuiper-a", 1472), ("kuiper-b", 2402)])
def test_no_link_is_longer_than_terminals_reach_nor_behind_the_earth(name: str, longest_km: int) -> None:
    # Kuiper's terminals are stated to reach 2,600 km.
    shell = PRESETS[name].shell
    lengths = [shell.longest_plane_link_m(plane) for plane in range(shell.planes)]
    assert max(lengths) / 1e3 == pytest.approx(longest_km, abs=2)
    assert not any(shell.link_blocked(length) for length in (*lengths, shell.d_m_m()))
    assert shell.isl_one_way_s("plane") == pytest.approx(sum(lengths) / shell.planes / SPEED_OF_LIGHT_M_S)
    # Every link as it is flown, across the seam too: a grid with Walker's names has some of 10,000 km there.
    positions = shell.positions_m(np.linspace(0, shell.period_s, 40))
    flown_m = np.linalg.norm(np.roll(positions, -1, axis=1) - positions, axis=-1).max(axis=(0, 2))
    assert np.all(flown_m <= np.array(lengths) + 1) and np.all(flown_m > 0.98 * np.array(lengths))


def test_slots_are_renamed_and_the_satellites_are_walkers() -> None:
    draw = np.random.default_rng(5)
    for _ in range(30):
        planes, slots = int(draw.integers(1, 30)), int(draw.integers(1, 30))
        phase = int(draw.integers(planes))
        shell = Shell(planes, slots, 6e5, 53.0, phase)
        for plane in range(planes):
            named = [shell.walker_slot(plane, slot) for slot in range(slots)]
            assert sorted(named) == list(range(slots))
            for slot, walker in enumerate(named):
                expected = 2 * math.pi * (walker / slots + phase * plane / (planes * slots))
                assert math.remainder(shell.argument_rad(plane, slot) - expected, 2 * math.pi) == pytest.approx(0)
                offset = (shell.argument_rad(plane, slot) / (2 * math.pi)) * slots - slot
                assert -0.5 - 1e-9 <= offset < 0.5


@pytest.mark.parametrize("name", REAL)
def test_shells_do_not_drift_against_sgp4(name: str) -> None:
    shell = PRESETS[name].shell
    assert altitude_of_mean_motion_m(shell.kozai_rad_min, shell.inclination_deg) == pytest.approx(
        shell.altitude_m, abs=1e-3
    )
    times_s = np.arange(0.0, 7 * DAY_S, 1993.0)
    satellites = [SatelliteId(0, 0), SatelliteId(shell.planes // 2, 3), SatelliteId(shell.planes - 1, 7)]
    ours = np.stack([shell.positions_m(times_s)[:, plane, slot] for plane, slot in satellites])
    theirs = flown(shell, satellites, times_s)
    ahead = (shell.positions_m(times_s + 1.0) - shell.positions_m(times_s - 1.0)) / 2
    for at, (plane, slot) in enumerate(satellites):
        velocity = ahead[:, plane, slot] / np.linalg.norm(ahead[:, plane, slot], axis=-1, keepdims=True)
        up = ours[at] / shell.radius_m
        for axis, most_m in ((velocity, 30e3), (np.cross(up, velocity), 10e3), (up, 15e3)):
            apart_m = ((theirs[at] - ours[at]) * axis).sum(axis=-1)
            slope = np.polyfit(times_s / DAY_S, apart_m, 1)[0]
            assert abs(slope) < 150, "metres a day"
            assert np.abs(apart_m).max() < most_m, "periodic terms"


def test_the_highest_satellite_is_sgp4s_for_a_week() -> None:
    shell = PRESETS["starlink-a"].shell
    times_s = np.sort(np.random.default_rng(7).uniform(0, 7 * DAY_S, 150))
    theirs = flown(shell, shell.torus.satellites(), times_s)
    same = 0
    for at, now_s in enumerate(times_s):
        highest = int(elevations_of(theirs[:, at], DEFAULT_HOST, EPOCH_UNIX_S, float(now_s)).argmax())
        same += highest == int(elevations_deg(shell, DEFAULT_HOST, EPOCH_UNIX_S, float(now_s)).argmax())
    assert same >= 0.95 * len(times_s), same


@pytest.mark.parametrize(
    ("moments", "places"), [(2, 40), pytest.param(40, 250, marks=pytest.mark.slow)], ids=["quick", "10,000"]
)
def test_what_is_in_sight_is_what_skyfield_sees(moments: int, places: int) -> None:
    api, lib = pytest.importorskip("skyfield.api"), pytest.importorskip("skyfield.sgp4lib")
    positionlib, units = pytest.importorskip("skyfield.positionlib"), pytest.importorskip("skyfield.units")
    timescale = api.load.timescale(builtin=True)
    draw, shell, mask_deg = np.random.default_rng(2025), PRESETS["starlink-a"].shell, 25.0
    times_s = draw.uniform(0, 7 * DAY_S, moments)
    theirs = flown(shell, shell.torus.satellites(), times_s)
    same = 0
    for at, now_s in enumerate(times_s):
        t = timescale.utc(2025, 1, 1, 0, 0, float(now_s))
        place_m = units.Distance(m=theirs[:, at].T), units.Velocity(km_per_s=np.zeros((3, shell.torus.size)))
        inertial = positionlib.ICRF.from_time_and_frame_vectors(t, lib.TEME, *place_m).xyz.m
        for _ in range(places):
            latitude, longitude = float(np.degrees(np.arcsin(draw.uniform(-1, 1)))), float(draw.uniform(-180, 180))
            station = api.wgs84.latlon(latitude, longitude)
            offsets = station.rotation_at(t) @ (inertial - station.at(t).xyz.m[:, None])
            expected = np.degrees(np.arcsin(offsets[2] / np.linalg.norm(offsets, axis=0)))
            ours = elevations_of(theirs[:, at], GroundHost(latitude, longitude), EPOCH_UNIX_S, float(now_s))
            other = (ours >= mask_deg) != (expected >= mask_deg)
            same += not other.any()
            assert np.all(np.abs(expected[other] - mask_deg) < 0.2)
            assert np.abs(ours - expected).max() < 0.02
    assert same >= 0.995 * moments * places


def test_sidereal_time_is_sgp4s() -> None:
    gstime = pytest.importorskip("sgp4.propagation").gstime
    for days in (0.0, 0.3, 7.0, 365.25):
        ours = sidereal_angle_rad(EPOCH_UNIX_S, days * DAY_S)
        assert math.remainder(ours - gstime(JULIAN + days), 2 * math.pi) == pytest.approx(0, abs=1e-8)


def test_the_anchor_is_straight_up_along_the_geodetic_vertical() -> None:
    shell = PRESETS["starlink-a"].shell
    for latitude in (-52.0, -10.0, 0.0, 33.0, 50.0):
        u_rad = overhead_argument_rad(shell, GroundHost(latitude, 0.0))
        position = np.array(shell.position_m(u_rad, 0.0))
        longitude = math.degrees(math.atan2(position[1], position[0]) - sidereal_angle_rad(EPOCH_UNIX_S, 0.0))
        below = GroundHost(latitude, math.remainder(longitude, 360.0))
        assert float(elevations_of(position, below, EPOCH_UNIX_S, 0.0)) == pytest.approx(90, abs=1e-3)


def test_many_times_at_once_are_the_same_as_one_by_one() -> None:
    shell, times_s = PRESETS["kuiper-b"].shell, np.array([0.0, 17.5, 86_400.0])
    together = shell.positions_m(times_s)
    assert together.shape == (3, 28, 28, 3)
    assert all(np.array_equal(at, shell.positions_m(float(now_s))) for at, now_s in zip(together, times_s, strict=True))


def test_planes_that_are_no_walker_constellation_are_where_they_were_put() -> None:
    """As from element sets: nodes and offsets of no pattern, the first plane anywhere."""
    draw = np.random.default_rng(3)
    nodes = tuple(
        float(x) % (2 * math.pi) for x in 5.0 + 2 * math.pi * np.arange(20) / 20 + draw.uniform(-0.05, 0.05, 20)
    )
    offsets = tuple(float(x) for x in 7.3 + draw.uniform(-0.4, 0.4, 20))
    shell = Shell(20, 22, 550e3, 53.0, model="j2", plane_offsets=offsets, plane_nodes_rad=nodes)
    positions = shell.positions_m(500.0)
    for plane, slot in ((0, 0), (7, 3), (19, 21)):
        u_rad = 2 * math.pi * ((slot + offsets[plane]) / 22 + 500.0 / shell.period_s)
        expected = shell.position_m(u_rad, nodes[plane] + 500.0 * shell.node_rate_rad_s)
        assert np.allclose(positions[plane, slot], expected, atol=1e-3)
    sight = OrbitSight(shell, DEFAULT_HOST, EPOCH_UNIX_S)
    for now_s in range(0, 7200, 600):
        elevation = elevations_deg(shell, DEFAULT_HOST, EPOCH_UNIX_S, float(now_s))
        assert sight.track is not None
        # Half a plane of nine degrees and a slot of sixteen, at most.
        assert elevation[shell.torus.wrap(*sight.track.cell_at(float(now_s)))] > 0
        assert {*sight.overhead(float(now_s))} == {SatelliteId(*map(int, at)) for at in np.argwhere(elevation >= 25.0)}


def test_only_j2_shells_have_a_mean_motion_for_sgp4() -> None:
    with pytest.raises(InvalidInput, match="expected model 'j2'"):
        _ = preset_named("starlink-a", 1).shell.kozai_rad_min


# --- Plans of earlier releases ---


@pytest.mark.parametrize("case", OLD_SKIES["skies"])
def test_a_plan_of_an_earlier_release_keeps_its_sky_to_the_bit(case: str) -> None:
    """``old_skies.json`` was written by the release before presets had versions."""
    text, expected = json.dumps(OLD_SKIES["plans"][case]), OLD_SKIES["skies"][case]
    plan = from_json(text)
    assert plan.preset_version == 1 and json.loads(to_json(plan)) == OLD_SKIES["plans"][case]
    clock, sky = clock_of(plan), sky_of(plan)
    assert sky.sight is not None and list(plan.centre) == expected["centre"]
    assert [shell_of(plan).isl_one_way_s(axis).hex() for axis in ("slot", "plane")] == expected["links_s"]  # type: ignore[arg-type]
    for row in expected["rows"]:
        now_s, moves = row["at_s"], clock.moves(row["at_s"])
        next_s, centre = clock.next_move_s(now_s), sky.centre_at(moves)
        seen = sky.sight.in_sight(centre, now_s)
        assert next_s is not None and (list(moves), next_s.hex()) == (row["moves"], row["next_s"])
        assert [list(satellite) for satellite in seen] == row["seen"]
        beams_s = [sky.sight.one_way_s(satellite, centre, now_s) for satellite in seen[:3]]
        assert beams_s == pytest.approx([float.fromhex(beam) for beam in row["beams_s"]], rel=1e-12)


def test_a_new_plan_names_the_version_and_one_of_a_later_release_is_refused() -> None:
    plan = make_plan("starlink-a")
    assert plan.preset_version == 2 and json.loads(to_json(plan))["preset_version"] == 2
    assert from_json(to_json(plan)) == plan
    assert "preset_version" not in json.loads(to_json(make_plan()))
    with pytest.raises(InvalidInput, match="version 3 of constellation preset starlink-a: expected 1 to 2"):
        from_json(json.dumps({**json.loads(to_json(plan)), "preset_version": 3}))
    old, new = (OLD_SKIES["plans"]["starlink-a/default"], json.loads(to_json(plan)))
    assert shell_of(from_json(json.dumps(old))).phase == 0 and shell_of(from_json(json.dumps(new))).phase == 39
