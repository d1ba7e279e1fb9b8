"""Passes over a place against skyfield's, and against elevations taken every few seconds."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime
from itertools import pairwise

import numpy as np
import pytest
from tests.constellation.synthetic import EPOCH_UNIX_S, element_set

from skymemory.constellation.presets import PRESETS
from skymemory.constellation.tle import ElementSet
from skymemory.constellation.visibility import GroundHost, ground_angle_rad, place_m, place_up
from skymemory.errors import InvalidInput
from skymemory_lab.passes import ElementSky, Passes, ShellSky, find_passes


def some_satellites(draw: random.Random, count: int) -> list[ElementSet]:
    return [
        element_set(
            number,
            node_rad=draw.uniform(0, 2 * math.pi),
            argument_rad=draw.uniform(0, 2 * math.pi),
            altitude_m=draw.choice([350e3, 550e3, 1200e3, 8_000e3]),
            inclination_deg=draw.uniform(20, 100),
            eccentricity=draw.choice([1e-4, 0.01]),
            bstar=draw.choice([0.0, 1e-4]),
        )
        for number in range(count)
    ]


def check_against_skyfield(seed: int, count: int) -> int:
    """Rises, culminations and sets within a second, elevations within 0.01°; how many passes were compared."""
    skyfield = pytest.importorskip("skyfield.api")
    scale = skyfield.load.timescale(builtin=True)
    draw = random.Random(seed)
    place = GroundHost(draw.uniform(-80, 80), draw.uniform(-180, 180))
    mask_deg = draw.choice([0.0, 5.0, 10.0, 25.0, 40.0, 60.0])
    elements = some_satellites(draw, count)
    hours = 24.0
    found = find_passes(ElementSky(elements), place, EPOCH_UNIX_S, hours * 3600, mask_deg)
    there = skyfield.wgs84.latlon(place.latitude_deg, place.longitude_deg)

    def at(unix_s: float) -> object:
        return scale.from_datetime(datetime.fromtimestamp(unix_s, UTC))

    compared = 0
    for number, one in enumerate(elements):
        satellite = skyfield.EarthSatellite.from_satrec(one.satrec, scale)
        times, kinds = satellite.find_events(
            there, at(EPOCH_UNIX_S), at(EPOCH_UNIX_S + hours * 3600), altitude_degrees=mask_deg
        )
        events = [(time.utc_datetime().timestamp(), int(kind)) for time, kind in zip(times, kinds, strict=True)]
        mine = [each for each in found.passes if each.satellite == number]
        for kind, ours in (
            (0, [each.rise_unix_s for each in mine if each.rise_unix_s is not None]),
            (2, [each.set_unix_s for each in mine if each.set_unix_s is not None]),
        ):
            theirs = [time for time, its in events if its == kind]
            assert len(ours) == len(theirs), (seed, number, kind)
            assert all(abs(a - b) < 1 for a, b in zip(sorted(ours), theirs, strict=True)), (seed, number, kind)
        culminations = [time for time, its in events if its == 1]
        for each in mine:
            offset = (satellite - there).at(at(each.culmination_unix_s))
            elevation, azimuth, _ = offset.altaz()
            assert abs(elevation.degrees - each.elevation_deg) < 0.01
            if elevation.degrees < 80:
                assert abs((azimuth.degrees - each.azimuth_deg + 180) % 360 - 180) < 0.05
            # One that is cut by the start or the end, or one of several of a high orbit, has another or no event.
            if each.rise_unix_s is not None and each.set_unix_s is not None:
                inside = [time for time in culminations if each.rise_unix_s <= time <= each.set_unix_s]
                if len(inside) == 1:
                    assert abs(inside[0] - each.culmination_unix_s) < 1
            compared += 1
    return compared


def test_passes_are_those_of_skyfield() -> None:
    assert sum(check_against_skyfield(seed, 4) for seed in range(3)) > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_passes_of_many_satellites_are_those_of_skyfield(seed: int) -> None:
    check_against_skyfield(seed, 40)


def elevations_deg(sky: ShellSky, place: GroundHost, unix_s: float) -> np.ndarray:
    angle = ground_angle_rad(sky.shell.model, sky.epoch_unix_s, unix_s - sky.epoch_unix_s)
    turn = np.array([[math.cos(angle), -math.sin(angle), 0], [math.sin(angle), math.cos(angle), 0], [0, 0, 1]])
    ground, up = turn @ place_m(place), turn @ place_up(place)
    offset = sky.shell.positions_m(unix_s - sky.epoch_unix_s).reshape(-1, 3) - ground
    return np.degrees(np.arcsin(offset @ up / np.linalg.norm(offset, axis=1)))


@pytest.mark.parametrize(("name", "mask_deg"), [("kuiper-b", 25.0), ("starlink-b", 50.0)])
def test_passes_of_a_preset_are_what_sampling_sees(name: str, mask_deg: float) -> None:
    preset = PRESETS[name]
    sky = ShellSky(preset.shell, preset.epoch_unix_s)
    place = GroundHost(25.0, 100.0)
    start, duration_s, every_s = preset.epoch_unix_s + 7_000, 3600.0, 4.0
    found = find_passes(sky, place, start, duration_s, mask_deg)
    counts, highest = [], []
    for at in np.arange(start, start + duration_s + 0.1, every_s):
        elevation = elevations_deg(sky, place, at)
        seen = set(np.flatnonzero(elevation >= mask_deg))
        inside = {
            one.satellite
            for one in found.passes
            if (one.rise_unix_s or start) <= at <= (one.set_unix_s or start + duration_s)
        }
        # Within a millimetre of the mask either is right.
        assert all(abs(elevation[one] - mask_deg) < 1e-4 for one in seen ^ inside)
        counts.append(len(seen))
        highest.append(int(np.argmax(elevation)) if seen else -1)
    assert found.in_sight.fewest <= min(counts) and found.in_sight.most >= max(counts)
    assert found.in_sight.mean == pytest.approx(np.mean(counts), abs=0.05)
    assert found.in_sight.covered == pytest.approx(np.mean(np.array(counts) > 0), abs=0.005)
    changes = sum(one != two for one, two in pairwise(highest) if two >= 0) + (highest[0] >= 0)
    seen_s = every_s * sum(one >= 0 for one in highest)
    assert found.in_sight.highest_for_s == pytest.approx(seen_s / changes, rel=0.06)
    gaps, run = [0.0], 0.0
    for count in counts:
        run = 0.0 if count else run + every_s
        gaps.append(run)
    assert found.in_sight.longest_gap_s == pytest.approx(max(gaps), abs=2 * every_s)


def everything(found: Passes) -> tuple[object, ...]:
    return found.passes, found.in_sight, found.highest


def test_the_answer_does_not_depend_on_the_piece_a_satellite_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    elements = some_satellites(random.Random(1), 40)
    place = GroundHost(10.0, 20.0)
    whole = find_passes(ElementSky(elements), place, EPOCH_UNIX_S, 7200.0, 0.0)
    monkeypatch.setattr("skymemory_lab.passes._SAMPLES_AT_ONCE", 500)
    done: list[int] = []
    pieces = find_passes(ElementSky(elements), place, EPOCH_UNIX_S, 7200.0, 0.0, lambda now, of: done.append(now))
    assert everything(pieces) == everything(whole) and done[-1] == 40 and len(done) == 10


def test_passes_that_are_shorter_than_a_step_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    preset = PRESETS["kuiper-a"]
    sky = ShellSky(preset.shell, preset.epoch_unix_s)
    asked = (sky, GroundHost(45.0, 10.0), preset.epoch_unix_s, 2400.0, 80.0)
    coarse = find_passes(*asked)
    monkeypatch.setattr("skymemory_lab.passes.STEP_S", 12.0)
    fine = find_passes(*asked)
    assert len(coarse.passes) == len(fine.passes) >= 5
    for one, other in zip(coarse.passes, fine.passes, strict=True):
        assert one.satellite == other.satellite and abs(one.elevation_deg - other.elevation_deg) < 1e-3
        assert (one.set_unix_s or 0) - (one.rise_unix_s or 0) < 60


def test_a_satellite_that_hangs_over_a_place_is_in_sight_throughout() -> None:
    """A geostationary one has no culmination in the sense of a low one."""
    elements = [element_set(1, node_rad=0.0, argument_rad=0.0, altitude_m=35_786e3, inclination_deg=0.01)]
    sky = ElementSky(elements)
    over_deg = -math.degrees(sky.angle_rad(np.array([EPOCH_UNIX_S]))[0])
    found = find_passes(sky, GroundHost(0.0, (over_deg + 180) % 360 - 180), EPOCH_UNIX_S, 86_400.0, 80.0)
    assert [(one.rise_unix_s, one.set_unix_s) for one in found.passes] == [(None, None)]
    assert found.in_sight.fewest == found.in_sight.most == 1 and found.in_sight.covered == 1.0
    assert found.passes[0].elevation_deg > 89


def test_satellites_that_sgp4_gives_up_are_left_out_with_the_reason() -> None:
    falling = element_set(7, node_rad=1, argument_rad=1, altitude_m=160e3, bstar=0.05)
    sky = ElementSky([falling, *some_satellites(random.Random(2), 3)])
    later = EPOCH_UNIX_S + 30 * 86400
    found = find_passes(sky, GroundHost(10.0, 20.0), later, 86_400.0, 0.0)
    assert list(sky.left_out) == [0] and sky.left_out[0]
    assert found.passes and all(one.satellite != 0 for one in found.passes)
    alone = ElementSky([falling])
    nothing = find_passes(alone, GroundHost(10.0, 20.0), later, 86_400.0, 0.0)
    assert nothing.passes == () and nothing.highest is None and nothing.in_sight.longest_gap_s == 86_400.0


def test_a_place_that_nothing_sees_is_an_answer_and_impossible_input_an_error() -> None:
    preset = PRESETS["kuiper-b"]
    sky = ShellSky(preset.shell, preset.epoch_unix_s)
    found = find_passes(sky, GroundHost(80.0, 0.0), preset.epoch_unix_s, 3600.0, 25.0)
    assert found.passes == () and found.highest_deg < 0 and found.in_sight.most == 0
    assert found.in_sight.highest_for_s is None and found.in_sight.covered == 0.0
    for words, duration_s, mask_deg in (
        ("elevation mask 90", 60.0, 90.0),
        ("elevation mask -1", 60.0, -1.0),
        ("elevation mask nan", 60.0, math.nan),
        ("0 hours", 0.0, 25.0),
        ("169 hours", 169 * 3600.0, 25.0),
    ):
        with pytest.raises(InvalidInput, match=words):
            find_passes(sky, GroundHost(0.0, 0.0), preset.epoch_unix_s, duration_s, mask_deg)
