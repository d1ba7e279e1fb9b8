"""Handovers: who, to whom, and only those."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.constellation.presets import PRESETS
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.placement.layout import Strategy
from skymemory.placement.locate import Moves, Placement, moves, server_moves

MOVE = st.tuples(st.integers(-40, 40), st.integers(-40, 40))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    torus = Torus(draw(st.integers(1, 12)), draw(st.integers(1, 12)))
    strategy: Strategy = draw(st.sampled_from(["rotation", "rotation_hop", "cost"]))
    centre = torus.wrap(draw(st.integers(0, 11)), draw(st.integers(0, 11)))
    links = draw(st.sampled_from([(1e-3, 1e-3), (6.5e-3, 2e-3), (1e-3, 9e-3)]))
    return Placement.of(strategy, draw(st.integers(1, torus.size)), torus, centre, *links)


def handover_target(
    placement: Placement, satellite: SatelliteId, from_moves: Moves, to_moves: Moves
) -> SatelliteId | None:
    """The satellite that gets everything ``satellite`` holds for this box; None if it keeps it or is not in the box."""
    if not placement.migrates:
        return None
    cell = placement.cell_of(satellite, placement.centre_at(from_moves))
    if cell is None:
        return None
    x, y = placement.cell_at(cell, from_moves, to_moves)
    after = placement.centre_at(to_moves)
    target = placement.torus.wrap(after.plane + y, after.slot + x)
    return None if target == satellite else target


def test_figure_8_as_handovers() -> None:
    placement = Placement.of("rotation_hop", 9, Torus(5, 7), SatelliteId(2, 3))
    assert [(cell, source.slot, target.slot) for cell, source, target in moves(placement, (0, 0), (1, 0))] == [
        ((1, -1), 4, 1),
        ((1, 0), 4, 1),
        ((1, 1), 4, 1),
    ]
    assert [server + 1 for server, _, _ in server_moves(placement, (0, 0), (0, 0), (1, 0))] == [3, 6, 8]


@given(placement=placements(), start=MOVE, forward=st.booleans(), along_slots=st.booleans())
def test_one_move_hands_over_one_edge_of_the_box_within_planes_or_slots(
    placement: Placement, start: Moves, forward: bool, along_slots: bool
) -> None:
    step = 1 if forward else -1
    end = (start[0] + step, start[1]) if along_slots else (start[0], start[1] + step)
    handovers = moves(placement, start, end)
    box, torus = placement.box, placement.torus
    if along_slots:
        leaving = box.columns[-1] if forward else box.columns[0]
        assert {cell[0] for cell, _, _ in handovers} <= {leaving}
        assert all(source.plane == target.plane for _, source, target in handovers)
        assert len(handovers) == (0 if box.width == torus.slots_per_plane else box.height)
    else:
        leaving = box.rows[0] if forward else box.rows[-1]
        assert {cell[1] for cell, _, _ in handovers} <= {leaving}
        assert all(source.slot == target.slot for _, source, target in handovers)
        assert len(handovers) == (0 if box.height == torus.planes else box.width)
    # Receivers were outside the box and are inside now; none receives twice, none gives twice.
    before, after = set(placement.box_satellites(start)), set(placement.box_satellites(end))
    assert {target for _, _, target in handovers} == after - before
    assert {source for _, source, _ in handovers} == before - after


@given(placement=placements(), start=MOVE, end=MOVE)
def test_a_satellite_computes_its_own_line_of_the_list(placement: Placement, start: Moves, end: Moves) -> None:
    listed = {source: target for _, source, target in moves(placement, start, end)}
    for satellite in placement.torus.satellites():
        assert handover_target(placement, satellite, start, end) == listed.get(satellite)


@given(placement=placements(), set_moves=MOVE, start=MOVE, end=MOVE)
def test_servers_move_with_the_cells_they_are_in(
    placement: Placement, set_moves: Moves, start: Moves, end: Moves
) -> None:
    cells = {(source, target) for _, source, target in moves(placement, start, end)}
    servers = server_moves(placement, set_moves, start, end)
    assert {(source, target) for _, source, target in servers} <= cells
    moved = {server for server, _, _ in servers}
    for server in range(placement.servers):
        stays = placement.locate(server, set_moves, start) == placement.locate(server, set_moves, end)
        assert stays == (server not in moved)


@pytest.mark.parametrize("strategy", ["hop", "baseline"])
def test_what_does_not_migrate_hands_nothing_over(strategy: Strategy) -> None:
    placement = Placement.for_preset(PRESETS["starlink-a"], strategy, 81)
    assert moves(placement, (0, 0), (3, 2)) == []
    assert server_moves(placement, (1, 1), (0, 0), (3, 2)) == []
    assert handover_target(placement, placement.centre, (0, 0), (3, 2)) is None
