"""Planes, slots and gaps of synthetic constellations are recovered exactly, and of the real ones as they are known."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.constellation.synthetic import EPOCH_UNIX_S, Made, element_set, shell

from skymemory.constellation.clustering import ClusteredShell, Clustering, cluster, drift, fit
from skymemory.constellation.tle import ElementSet, read_elements, teme_states
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput

FILES = Path(__file__).parents[3] / "shared/data/tle"


def real(name: str) -> Clustering:
    path = FILES / name
    if not path.exists():
        pytest.skip(f"no {path.name} beside this checkout")
    read = read_elements(path.read_text("ascii"))
    elements = read.elements
    assert not read.skipped and all(one.name for one in elements) and elements[0].where == "line 2"
    found = cluster(elements)
    placed = [one.number for shell in found.shells for plane in shell.placed for one in plane if one is not None]
    everything = sorted(placed + [one.elements.number for one in found.left_out])
    assert everything == sorted(one.number for one in elements)
    return found


def check_recovered(found: ClusteredShell, made: Made, truth: dict[int, tuple[int, int]]) -> None:
    assert (found.planes, found.slots_per_plane, found.gaps) == (made.planes, made.slots, len(made.gaps))
    shifts: dict[int, set[tuple[int, int]]] = {}
    aheads = []
    for plane, row in enumerate(found.placed):
        for slot, one in enumerate(row):
            if one is not None:
                true_plane, true_slot = truth[one.number]
                shifts.setdefault(true_plane, set()).add((plane, (slot - true_slot) % made.slots))
                true = true_slot + made.phase * true_plane / made.planes
                aheads.append(slot + found.offsets_slots[plane] - true)
    # Until the epoch of the clustering all have flown equally far.
    turns = np.exp(2j * np.pi * np.array(aheads) / made.slots)
    off_slots = np.angle(turns / turns.mean()) / (2 * np.pi) * made.slots
    assert np.abs(off_slots).max() < 0.2
    # All satellites of a plane are moved alike, and planes keep their order: then gaps are where they were made.
    assert all(len(moved) == 1 for moved in shifts.values())
    assert len({(moved[0] - plane) % made.planes for plane, (moved,) in shifts.items()}) == 1
    assert all(-0.5 <= offset < 0.5 for offset in found.offsets_slots)


def disturbers(draw: random.Random, first_number: int, altitude_m: float, inclination_deg: float) -> list[ElementSet]:
    """Satellites of no shell: other inclinations, on their way up, thrusting, eccentric."""
    made = []
    for number in range(first_number, first_number + 24):
        orbit = {
            0: {"inclination_deg": inclination_deg + draw.uniform(1, 20)},
            1: {"altitude_m": altitude_m - draw.uniform(20e3, 250e3)},
            2: {"ndot_rev_day2": draw.uniform(0.011, 0.05), "altitude_m": altitude_m - draw.uniform(0, 200e3)},
            3: {"eccentricity": draw.uniform(0.006, 0.02)},
        }[number % 4]
        angles = {"node_rad": draw.uniform(0, 2 * math.pi), "argument_rad": draw.uniform(0, 2 * math.pi)}
        made.append(
            element_set(number, **{"altitude_m": altitude_m, "inclination_deg": inclination_deg, **angles, **orbit})
        )
    return made


def recover(seed: int) -> None:
    draw = random.Random(seed)
    planes, slots = draw.randint(4, 72), draw.randint(6, 40)
    while not 80 <= planes * slots <= 1800:
        planes, slots = draw.randint(4, 72), draw.randint(6, 40)
    phase = draw.randrange(planes)
    orbit = {"altitude_m": draw.uniform(340e3, 1200e3), "inclination_deg": draw.uniform(30, 75)}
    elements, made, truth = shell(draw, planes, slots, phase, gap_share=draw.uniform(0, 0.3), **orbit)
    others = disturbers(draw, 20_000, **orbit)
    # A second shell of the same inclination, so that none is a run of the other.
    beside, _, _ = shell(
        draw, 12, 10, 3, gap_share=0.1, first_number=30_000, **{**orbit, "altitude_m": orbit["altitude_m"] - 30e3}
    )
    mixed = elements + others + beside
    draw.shuffle(mixed)
    found = cluster(mixed)
    ours = [one for one in found.shells if abs(one.altitude_m - orbit["altitude_m"]) < 5e3]
    assert len(ours) == 1, (seed, [str(one) for one in found.shells])
    check_recovered(ours[0], made, truth)
    assert ours[0].phase == phase and not ours[0].star
    assert abs(ours[0].inclination_deg - orbit["inclination_deg"]) < 1e-6
    left_out = {one.elements.number for one in found.left_out}
    assert {one.number for one in others} <= left_out
    assert len(mixed) == len(left_out) + sum(one.satellites for one in found.shells)


@pytest.mark.parametrize("seed", range(4))
def test_a_walker_delta_with_gaps_and_intruders_is_recovered(seed: int) -> None:
    recover(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_a_hundred_walker_deltas_are_recovered(seed: int) -> None:
    recover(seed)


@pytest.mark.parametrize("seed", range(3))
def test_a_walker_star_is_recovered_and_begins_behind_its_seam(seed: int) -> None:
    draw = random.Random(seed)
    elements, made, truth = shell(
        draw, 12, 24, 0, gap_share=0.2, star=True, altitude_m=1200e3, inclination_deg=87.9, slot_jitter=0.15
    )
    (found,) = cluster(elements).shells
    check_recovered(found, made, truth)
    assert found.star and found.even and found.phase is None
    assert abs(math.degrees(found.nodes_rad[0]) - made.node0_deg) < 0.3
    assert found.shell().torus.seam
    check_flown(found)


def check_flown(found: ClusteredShell) -> None:
    """Its orbits are those of SGP4: satellites are off their slots to both sides alike, and on the ground of their
    planes; SGP4's periodic terms are some 10 km.
    """
    there = [(plane, slot, one) for plane, row in enumerate(found.placed) for slot, one in enumerate(row) if one]
    planes, slots = [plane for plane, _, _ in there], [slot for _, slot, _ in there]
    for after_s in (0.0, 20_000.0):
        position, velocity, errors = teme_states([one for _, _, one in there], np.array([found.epoch_unix_s + after_s]))
        ahead = velocity[:, 0] / np.linalg.norm(velocity[:, 0], axis=-1)[:, None]
        apart_m = position[:, 0] - found.shell().positions_m(after_s)[planes, slots]
        along_m = np.einsum("nk,nk->n", apart_m, ahead)
        aside_m = np.linalg.norm(apart_m - along_m[:, None] * ahead, axis=-1)
        assert not errors.any() and abs(along_m.mean()) < 25e3 and np.median(aside_m) < 40e3


def test_an_empty_plane_is_found_by_the_spacing_of_the_others() -> None:
    draw = random.Random(5)
    elements, _, truth = shell(draw, 18, 20, 7, gap_share=0.0)
    rest = [one for one in elements if truth[one.number][0] not in (4, 11)]
    (found,) = cluster(rest).shells
    assert found.planes == 18 and found.gaps == 40 and found.phase == 7
    assert (found.empty_planes[1] - found.empty_planes[0]) % 18 in (7, 11)
    walker = found.shell()
    assert (walker.planes, walker.slots_per_plane, walker.plane_offsets) == (18, 20, found.offsets_slots)
    check_flown(found)
    # An empty plane is where the phasing of the others has it.
    empty = found.empty_planes[0]
    step = found.offsets_slots[empty] - found.offsets_slots[empty - 1] - 7 / 18
    assert abs(step - round(step)) < 0.15


def test_of_two_in_one_slot_the_one_nearer_to_its_middle_has_it() -> None:
    draw = random.Random(6)
    elements, made, truth = shell(draw, 6, 12, 1, gap_share=0.1, slot_jitter=0.05)
    spares = []
    for number, one in enumerate(elements[::9], 900):
        plane, slot = truth[one.number]
        turns = (slot + plane / 6 + 0.3) / 12
        node_rad = math.radians(made.node0_deg + 60 * plane)
        spares.append(element_set(number, node_rad=node_rad, argument_rad=2 * math.pi * turns))
    found = cluster([*spares, *elements])
    check_recovered(found.shells[0], made, truth)
    assert {one.elements.number: one.why for one in found.left_out} == {one.number: "spare" for one in spares}
    assert "shares plane" in found.left_out[0].reason


def test_a_satellite_under_thrust_or_off_its_altitude_has_no_slot() -> None:
    draw = random.Random(7)
    elements, made, truth = shell(draw, 6, 12, 0, gap_share=0.05, slot_jitter=0.05)
    strays = []
    for number, (plane, slot) in enumerate(sorted(made.gaps), 900):
        orbit = {"ndot_rev_day2": 0.02} if number % 2 else {"altitude_m": 552.5e3}
        angles = {"node_rad": math.radians(made.node0_deg + 60 * plane), "argument_rad": 2 * math.pi * slot / 12}
        strays.append(element_set(number, **angles, **orbit))
    assert len(strays) == 4
    found = cluster([*elements, *strays])
    check_recovered(found.shells[0], made, truth)
    whys = {900: "off shell", 901: "moving", 902: "off shell", 903: "moving"}
    assert {one.elements.number: one.why for one in found.left_out} == whys


def test_what_is_no_shell_is_left_out_with_its_reason() -> None:
    together = [
        element_set(number, node_rad=node, argument_rad=1 + number * 0.004)
        for number, node in enumerate([0.1] * 20 + [1.1] * 20, 1)
    ]
    ring = [element_set(number, node_rad=2.0, argument_rad=number * 0.3) for number in range(1, 21)]
    few = [element_set(number, node_rad=number, argument_rad=number) for number in range(1, 6)]
    for elements, why in ((together, "no slots"), (ring, "off plane"), (few, "off shell")):
        found = cluster(elements)
        assert found.shells == () and {one.why for one in found.left_out} == {why}, why
        assert len(found.left_out) == len(elements)
    old = element_set(1, node_rad=1, argument_rad=1, epoch_unix_s=EPOCH_UNIX_S - 4 * 86400)
    assert [one.reason for one in cluster([old, *ring]).left_out if one.why == "stale"] == [
        "its elements are 4.0 days from the file's median"
    ]


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5))
def test_a_gap_belongs_to_the_next_living_satellite_ahead(alive: list[list[bool]]) -> None:
    some = element_set(1, node_rad=0, argument_rad=0)
    rows = tuple(tuple(some if here else None for here in row) for row in alive)
    planes = len(alive)
    gappy = ClusteredShell(planes, 4, 550e3, 53.0, EPOCH_UNIX_S, (0.0,) * planes, (0.0,) * planes, rows)
    for plane in range(planes):
        for slot in range(4):
            asked = SatelliteId(plane, slot)
            if not any(map(any, alive)):
                with pytest.raises(InvalidInput, match="expected a satellite"):
                    gappy.living(asked)
                continue
            holder = gappy.living(asked)
            assert gappy.at(holder) is some and gappy.living(holder) == holder
            if gappy.at(asked) is not None:
                assert holder == asked
            elif any(alive[plane]):
                assert holder.plane == plane
                between = range(1, (holder.slot - slot) % 4)
                assert not any(alive[plane][(slot + step) % 4] for step in between)
            else:
                passed = [(plane + step) % planes for step in range((holder.plane - plane) % planes)]
                assert not any(any(alive[there]) for there in passed) and any(alive[holder.plane])


def test_the_closed_form_stays_with_sgp4_where_there_is_no_drag() -> None:
    draw = random.Random(8)
    elements, _, _ = shell(draw, 12, 12, 5, gap_share=0.1)
    (found,) = cluster(elements).shells
    slot_m = 2 * math.pi * 6_928e3 / 12
    for days in (1, 7):
        gone = drift(found, days * 86400)
        assert gone.p99_slots * slot_m < 10 * days and gone.node_p99_deg < 1e-5
    # Rates of SGP4 itself, from its positions an orbit's many turns apart: the node by the orbit's plane.
    one = elements[0]
    days, rates = 5.0, fit(found)
    normals = []
    for at in (0.0, days):
        _, position, velocity = one.satrec.sgp4(one.satrec.jdsatepoch, one.satrec.jdsatepochF + at)
        normals.append(np.cross(position, velocity))
    nodes = [math.atan2(normal[0], -normal[1]) for normal in normals]
    turned = (nodes[1] - nodes[0] + math.pi) % (2 * math.pi) - math.pi
    assert turned / (days * 86400) == pytest.approx(rates.node_rad_s, rel=0.01)
    with_drag = [
        element_set(
            one.number,
            node_rad=one.satrec.nodeo,
            argument_rad=one.satrec.argpo + one.satrec.mo,
            bstar=2e-4,
            epoch_unix_s=one.epoch_unix_s,
            at_unix_s=one.epoch_unix_s,
        )
        for one in elements
    ]
    pulled = drift(cluster(with_drag).shells[0], 7 * 86400)
    assert pulled.median_slots > 0.01


def test_planes_at_several_altitudes_are_one_shell_that_drifts_apart() -> None:
    """OneWeb's planes fly 4 km above one another."""
    draw = random.Random(9)
    elements = []
    for plane in range(6):
        one, _, _ = shell(
            draw, 1, 20, 0, gap_share=0.1, altitude_m=1180e3 + 4e3 * plane, inclination_deg=87.9,
            first_number=100 * plane, node_jitter_deg=0.05,
        )  # fmt: skip
        turn = math.radians(30 * plane) - one[0].satrec.nodeo
        elements += [
            element_set(
                it.number, node_rad=it.satrec.nodeo + turn, argument_rad=it.satrec.argpo + it.satrec.mo,
                altitude_m=1180e3 + 4e3 * plane, inclination_deg=87.9,
                epoch_unix_s=it.epoch_unix_s, at_unix_s=it.epoch_unix_s,
            )
            for it in one
        ]  # fmt: skip
    (found,) = cluster(elements).shells
    assert (found.planes, found.slots_per_plane, found.star) == (6, 20, True)
    gone = drift(found, 86400)
    assert gone.median_slots > 20 * gone.plane_median_slots and gone.plane_p99_slots < 0.01


@pytest.mark.brief()
def test_the_shells_of_starlink_are_those_that_are_known() -> None:
    """72 × 18 (with four spares a plane the filed 22) at 53.05° and 53.2°, 36 planes at 70°, 6 at 97.6°, 28 at 43°."""
    found = real("starlink-2025-09-22.tle")
    assert sum(one.satellites for one in found.shells) + len(found.left_out) == 8325
    table = [
        (round(one.inclination_deg, 1), round(one.altitude_m / 1000), one.planes, one.slots_per_plane)
        for one in found.shells
    ]
    assert table == [
        (43.0, 485, 99, 51),
        (53.2, 540, 72, 18),
        (53.2, 475, 43, 62),
        (43.0, 561, 28, 60),
        (53.1, 547, 72, 18),
        (70.0, 570, 36, 16),
        (43.0, 358, 26, 12),
        (53.2, 360, 24, 13),
        (97.6, 560, 6, 36),
        (97.6, 546, 4, 24),
    ]
    first = found.shells[1]
    assert (first.satellites, first.phase, first.empty_planes, first.even) == (1212, 45, (), True)
    assert not found.shells[2].even and found.shells[8].empty_planes == (3,)
    assert Counter(one.why for one in found.left_out)["spare"] == 367
    # Without much drag a shell keeps its slots for a week.
    assert drift(first, 7 * 86400).p99_slots < 0.15


def test_oneweb_is_a_star_of_twelve_planes() -> None:
    found = real("oneweb-2025-08-01.tle")
    (shell,) = found.shells
    assert (shell.planes, shell.slots_per_plane, shell.star, shell.even) == (12, 48, True, True)
    assert all(abs(spacing - 15.23) < 0.1 for spacing in shell.spacings_deg[:-1])
    gone = drift(shell, 86400)
    assert gone.median_slots > 1 and gone.plane_p99_slots < 0.02
