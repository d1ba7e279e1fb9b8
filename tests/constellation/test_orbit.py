"""Distances and delays against the papers' figures and against plain vectors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.constellation.orbit import PATTERNS, SKY_MODELS, Shell
from skymemory.constellation.presets import PRESETS, preset_named
from skymemory.errors import InvalidInput

STARLINK_A = preset_named("starlink-a", 1).shell
SHELLS = st.builds(
    Shell,
    st.integers(3, 40),
    st.integers(3, 40),
    st.floats(160e3, 2000e3),
    st.floats(10, 170),
    st.integers(0, 2),
    st.sampled_from(PATTERNS),
    st.sampled_from(SKY_MODELS),
)
TURN = st.floats(0, 2 * math.pi)


def test_starlink_a_is_as_the_disclosure_says() -> None:
    assert STARLINK_A.d_m_m() == pytest.approx(1_969_922, abs=0.5)
    assert STARLINK_A.isl_one_way_s("slot") == pytest.approx(6.571e-3, abs=5e-7)
    assert STARLINK_A.d_n_max_m() == pytest.approx(603_780, abs=0.5)
    assert STARLINK_A.isl_one_way_s("plane") == pytest.approx(2.014e-3, abs=5e-7)
    assert min(STARLINK_A.d_n_m(0, slot) for slot in range(22)) > 363_300
    assert STARLINK_A.chord_m(0, 1, math.pi / 2) == pytest.approx(363_400, abs=100)


def test_starlink_b_loses_its_cross_links_behind_the_earth_for_27_percent_of_the_orbit() -> None:
    shell = preset_named("starlink-b", 1).shell
    lengths = [shell.chord_m(0, 1, u) for u in np.linspace(0, 2 * math.pi, 20_001)]
    assert min(lengths) == pytest.approx(1_406e3, rel=1e-3)
    assert max(lengths) == pytest.approx(8_988e3, rel=1e-3)
    assert np.mean([shell.link_blocked(length) for length in lengths]) == pytest.approx(0.27, abs=0.005)
    assert shell.link_blocked(2 * shell.radius_m)


@pytest.mark.parametrize(
    ("name", "planes", "slots", "altitude_m", "inclination_deg", "phase"),
    [
        ("starlink-a", 72, 22, 550e3, 53.0, 39),
        ("starlink-b", 5, 75, 1275e3, 81.0, 4),
        ("kuiper-a", 34, 34, 630e3, 51.9, 7),
        ("kuiper-b", 28, 28, 590e3, 33.0, 17),
    ],
)
def test_presets_are_those_of_the_disclosures_table_2(
    name: str, planes: int, slots: int, altitude_m: float, inclination_deg: float, phase: int
) -> None:
    preset = PRESETS[name]
    assert preset.shell == Shell(planes, slots, altitude_m, inclination_deg, phase, model="j2")
    assert preset_named(name, 1).shell == Shell(planes, slots, altitude_m, inclination_deg)
    assert preset.torus == preset.shell.torus


@given(shell=SHELLS, now_s=st.floats(0, 20_000))
def test_all_positions_are_on_the_shell_and_neighbours_in_a_plane_are_d_m_apart(shell: Shell, now_s: float) -> None:
    positions = shell.positions_m(now_s)
    assert positions.shape == (shell.planes, shell.slots_per_plane, 3)
    assert np.allclose(np.linalg.norm(positions, axis=-1), shell.radius_m)
    gaps = np.linalg.norm(positions - np.roll(positions, 1, axis=1), axis=-1)
    assert np.allclose(gaps, shell.d_m_m())
    assert np.abs(positions[..., 2]).max() <= shell.radius_m * math.sin(math.radians(shell.inclination_deg)) + 1


@given(shell=SHELLS, now_s=st.floats(0, 20_000), data=st.data())
def test_chords_are_the_distances_between_the_positions(shell: Shell, now_s: float, data: st.DataObject) -> None:
    positions = shell.positions_m(now_s)
    plane = data.draw(st.integers(0, shell.planes - 1))
    other_plane = data.draw(st.integers(plane, shell.planes - 1))
    slot, other_slot = (data.draw(st.integers(0, shell.slots_per_plane - 1)) for _ in "ab")
    measured = float(np.linalg.norm(positions[other_plane, other_slot] - positions[plane, slot]))
    chord = shell.chord_m(other_slot - slot, other_plane - plane, shell.argument_rad(plane, slot, now_s), plane)
    assert chord == pytest.approx(measured, rel=1e-9, abs=1e-3)
    if plane + 1 < shell.planes or shell.pattern == "delta":
        across = float(np.linalg.norm(positions[(plane + 1) % shell.planes, slot] - positions[plane, slot]))
        assert across <= shell.longest_plane_link_m(plane) + 1e-3
        assert shell.d_n_m(now_s, slot, plane) == pytest.approx(across, rel=1e-9, abs=1e-3)


@given(shell=SHELLS, u_rad=TURN, d_slot=st.integers(-9, 9), d_plane=st.integers(-9, 9))
def test_slant_is_the_distance_from_the_ground_below(shell: Shell, u_rad: float, d_slot: int, d_plane: int) -> None:
    overhead = np.array(shell.position_m(u_rad, 0.0))
    ground = overhead * shell.earth_radius_m / shell.radius_m
    other = np.array(shell.position_m(u_rad + shell.argument_rad(d_plane, d_slot), shell.node_rad(d_plane)))
    measured = float(np.linalg.norm(other - ground))
    assert shell.slant_m(d_slot, d_plane, u_rad) == pytest.approx(measured, rel=1e-9)


def test_the_papers_slant_is_equations_3_and_4() -> None:
    flat = math.sqrt((2 * STARLINK_A.d_m_m()) ** 2 + (3 * STARLINK_A.d_n_max_m()) ** 2)
    assert STARLINK_A.slant_m(2, -3, model="paper") == pytest.approx(math.sqrt(flat**2 + 550e3**2))
    assert STARLINK_A.slant_m(0, 0) == STARLINK_A.slant_m(0, 0, model="paper") == 550e3
    assert STARLINK_A.slant_one_way_s(0, 0) == pytest.approx(1.8346e-3, abs=1e-7)
    # On a round Earth the links bend with it, so the straight way down is shorter than the flat sky says.
    assert STARLINK_A.slant_m(2, -3) < STARLINK_A.slant_m(2, -3, model="paper")


def test_d_n_of_the_disclosure_is_exact_without_phase_and_not_with_it() -> None:
    twisted = Shell(72, 22, 550e3, 53.0, phase=39)
    closed_form = STARLINK_A.d_n_max_m()
    assert STARLINK_A.d_n_m(0.0) == pytest.approx(closed_form)
    assert abs(twisted.d_n_m(0.0) - closed_form) > 10_000


def test_the_nodes_drift_west_about_four_and_a_half_degrees_a_day() -> None:
    assert math.degrees(STARLINK_A.node_rate_rad_s) * 86_400 == pytest.approx(-4.49, abs=0.05)
    assert STARLINK_A.period_s == pytest.approx(5730, abs=5)


@pytest.mark.parametrize(
    ("altitude_m", "inclination_deg", "words"),
    [(0, 53, "altitude"), (9e9, 53, "altitude"), (550e3, 0, "no nodes"), (550e3, 180, "less than 180")],
)
def test_orbits_through_the_ground_or_without_a_tilt_are_refused(
    altitude_m: float, inclination_deg: float, words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        Shell(10, 10, altitude_m, inclination_deg)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"phase": 10}, "Walker phase 10: expected a whole number from 0 to 9"),
        ({"phase": -1}, "Walker phase -1"),
        ({"pattern": "rosette"}, "expected one of delta, star"),
        ({"model": "sgp8"}, "one of paper, j2"),
        ({"plane_offsets": (0.1,) * 9}, "plane_offsets has 9 numbers: expected a finite one for each of 10"),
        ({"plane_offsets": (math.nan,) * 10}, "plane_offsets"),
        ({"plane_offsets": (0.1,) * 10, "phase": 3}, "give one of them"),
        ({"plane_nodes_rad": tuple(range(10))}, "eastward"),
        ({"planes": 0}, "planes is 0: expected 1 to 4096"),
        ({"slots_per_plane": 5000}, "slots_per_plane"),
    ],
)
def test_shells_that_cannot_be_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Shell(**{"planes": 10, "slots_per_plane": 12, "altitude_m": 550e3, "inclination_deg": 53.0, **given})
