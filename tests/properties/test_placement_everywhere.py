"""What every placement must satisfy (specification §3), for every preset, every strategy and every number of servers.

What is exhaustive, and what stands for the rest:

- *Every S* from 1 to the size of the torus, for every preset and strategy: the servers are exactly S distinct
  satellites of the torus, in the box, and the box fits the torus. Checked around the satellite at the corner of
  the index space, where every box crosses both of its edges.
- *Every centre* of every preset, edges and corners too, for a few S: the map is the corner's, shifted. A placement
  reads its centre only as an offset that it wraps, so this carries the first check to all centres.
- *Every residue* of the moves, for every box that occurs for any S: one move in either direction takes every cell
  where the paper's rule says. What a move does depends on the moves before only modulo the box, so by induction
  this holds for any number of moves in any order. Random walks over random tori check the same without the argument.

``SKYMEMORY_EXHAUSTIVE=1`` runs the whole product of presets, strategies, servers and centres instead (hours).
"""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skymemory.constellation.presets import PRESETS, Preset
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.placement.layout import STRATEGIES, Strategy
from skymemory.placement.locate import Moves, Placement, moves

EXHAUSTIVE = os.environ.get("SKYMEMORY_EXHAUSTIVE") == "1"
MIGRATING: tuple[Strategy, ...] = ("rotation", "rotation_hop", "cost")
CORNER = SatelliteId(0, 0)
NOWHERE: Moves = (0, 0)


def placed(preset: Preset, strategy: Strategy, servers: int, centre: SatelliteId) -> Placement:
    shell = preset.shell
    links = shell.isl_one_way_s("slot"), shell.isl_one_way_s("plane")
    return Placement.of(strategy, servers, preset.torus, centre, *links)


def check_map(placement: Placement, satellites: tuple[SatelliteId, ...]) -> None:
    torus, box = placement.torus, placement.box
    assert len(satellites) == placement.servers == len(set(satellites))
    planes, slots = zip(*satellites, strict=True)
    assert min(planes) >= 0 and max(planes) < torus.planes
    assert min(slots) >= 0 and max(slots) < torus.slots_per_plane
    assert box.width <= torus.slots_per_plane and box.height <= torus.planes
    columns, rows = zip(*placement.layout.cells, strict=True)
    assert min(columns) >= -box.west and max(columns) < box.width - box.west
    assert min(rows) >= -box.north and max(rows) < box.height - box.north


LARGE_ONES_SLOWLY = [
    pytest.param(preset, id=name, marks=[pytest.mark.slow] if preset.torus.size > 500 else [])
    for name, preset in PRESETS.items()
]
"""Grids of more than five hundred satellites take a second or more each."""


@pytest.mark.brief(
    "rotation-testbed-19x5", "rotation_hop-paper-15x15", "hop-testbed-19x5", "cost-testbed-19x5", "hop-starlink-b"
)
@pytest.mark.parametrize("preset", LARGE_ONES_SLOWLY)
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "baseline"])
def test_every_number_of_servers_is_so_many_distinct_satellites_of_the_torus(
    preset: Preset, strategy: Strategy
) -> None:
    for servers in range(1, preset.torus.size + 1):
        placement = placed(preset, strategy, servers, CORNER)
        check_map(placement, placement.locate_all())


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_baseline_is_the_map_of_rotation(preset: Preset) -> None:
    for servers in range(1, preset.torus.size + 1, 1 if preset.torus.size < 400 else 37):
        fixed, moving = (placed(preset, name, servers, CORNER) for name in ("baseline", "rotation"))
        assert fixed.layout.cells == moving.layout.cells


@pytest.mark.brief(
    "hop-testbed-19x5",
    "baseline-paper-15x15",
    "rotation_hop-testbed-19x5",
    "cost-testbed-19x5",
    "rotation-testbed-19x5",
    "cost-starlink-b",
)
@pytest.mark.parametrize("preset", LARGE_ONES_SLOWLY)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_moving_the_centre_moves_the_map(preset: Preset, strategy: Strategy) -> None:
    torus = preset.torus
    for servers in (1, 2, 10) if torus.size > 400 else (1, 10, 81, torus.size):
        at_corner = placed(preset, strategy, servers, CORNER).locate_all()
        for centre in torus.satellites():
            shifted = tuple(torus.wrap(plane + centre.plane, slot + centre.slot) for plane, slot in at_corner)
            assert placed(preset, strategy, servers, centre).locate_all() == shifted


@pytest.mark.brief()
@pytest.mark.parametrize("preset", LARGE_ONES_SLOWLY)
def test_from_any_residue_one_move_takes_every_cell_where_the_paper_says(preset: Preset) -> None:
    boxes = {}
    for strategy in MIGRATING:
        for servers in range(1, preset.torus.size + 1):
            placement = placed(preset, strategy, servers, CORNER)
            boxes.setdefault(placement.box, placement)
    for box, placement in boxes.items():
        west, east, north, south = box.columns[0], box.columns[-1], box.rows[0], box.rows[-1]
        for x in box.columns:
            for r in range(box.width):
                now, there = placement.cell_at((x, north), NOWHERE, (r, 0))
                assert there == north
                # Overhead moves west, so a satellite is one column further east, or handed the leaving column west.
                expected = west if now == east else now + 1
                assert placement.cell_at((x, north), NOWHERE, (r + 1, 0)) == (expected, north)
                assert placement.cell_at((expected, north), (r + 1, 0), (r, 0)) == (now, north)
        for y in box.rows:
            for p in range(box.height):
                there, now = placement.cell_at((west, y), NOWHERE, (0, p))
                assert there == west
                expected = south if now == north else now - 1
                assert placement.cell_at((west, y), NOWHERE, (0, p + 1)) == (west, expected)
                assert placement.cell_at((west, expected), (0, p + 1), (0, p)) == (west, now)


@st.composite
def walks(draw: st.DrawFn) -> tuple[Placement, list[Moves]]:
    """Any placement that migrates, and a walk of single moves along either axis in either direction."""
    torus = Torus(draw(st.integers(1, 14)), draw(st.integers(1, 14)))
    centre = torus.wrap(draw(st.integers(0, 13)), draw(st.integers(0, 13)))
    links = draw(st.sampled_from([(1.0, 1.0), (6.5, 2.0), (2.0, 6.5)]))
    servers = draw(st.integers(1, torus.size))
    placement = Placement.of(draw(st.sampled_from(MIGRATING)), servers, torus, centre, *links)
    steps = draw(st.lists(st.sampled_from([(1, 0), (-1, 0), (0, 1), (0, -1)]), max_size=40))
    start = draw(st.integers(-30, 30)), draw(st.integers(-30, 30))
    way = [start]
    for along_slots, along_planes in steps:
        way.append((way[-1][0] + along_slots, way[-1][1] + along_planes))
    return placement, way


@settings(max_examples=300)
@given(walk=walks())
def test_migrating_step_by_step_then_locating_finds_every_chunk(walk: tuple[Placement, list[Moves]]) -> None:
    placement, way = walk
    held = {satellite: server for server, satellite in enumerate(placement.locate_all(way[0], way[0]))}
    for before, after in itertools.pairwise(way):
        handed = {target: held.pop(source) for _, source, target in moves(placement, before, after) if source in held}
        assert not held.keys() & handed.keys(), "a satellite was handed chunks of a second server"
        held |= handed
        assert held == {sat: server for server, sat in enumerate(placement.locate_all(way[0], after))}
        for satellite in placement.box_satellites(after):
            assert placement.server_at(satellite, way[0], after) == held.get(satellite)


@given(walk=walks(), there=st.tuples(st.integers(-99, 99), st.integers(-99, 99)), slots_first=st.booleans())
def test_there_and_back_is_the_identity_in_any_order_of_the_axes(
    walk: tuple[Placement, list[Moves]], there: Moves, slots_first: bool
) -> None:
    placement, (start, *_) = walk
    for cell in placement.box.cells:
        away = placement.cell_at(cell, start, there)
        corner = (there[0], start[1]) if slots_first else (start[0], there[1])
        assert placement.cell_at(placement.cell_at(cell, start, corner), corner, there) == away
        assert placement.cell_at(away, there, start) == cell


@given(walk=walks(), now=st.tuples(st.integers(-9999, 9999), st.integers(-9999, 9999)))
def test_locating_and_asking_who_one_is_are_inverse(walk: tuple[Placement, list[Moves]], now: Moves) -> None:
    placement, (set_moves, *_) = walk
    everyone = placement.locate_all(set_moves, now)
    check_map(placement, everyone)
    assert everyone == tuple(placement.locate(server, set_moves, now) for server in range(placement.servers))
    servers = {satellite: server for server, satellite in enumerate(everyone)}
    for satellite in placement.torus.satellites():
        assert placement.server_at(satellite, set_moves, now) == servers.get(satellite)


@pytest.mark.skipif(not EXHAUSTIVE, reason="hours: set SKYMEMORY_EXHAUSTIVE=1")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_whole_product(preset: Preset, strategy: Strategy) -> None:
    for servers in range(1, preset.torus.size + 1):
        for centre in preset.torus.satellites():
            placement = placed(preset, strategy, servers, centre)
            check_map(placement, placement.locate_all())
            away = placement.locate_all((0, 0), (servers, centre.slot))
            check_map(placement, away)
