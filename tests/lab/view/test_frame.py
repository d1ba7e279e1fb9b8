"""The frame of the moving demo: what stands in each cell, and that frames of one torus cover each other."""

from __future__ import annotations

import re

import pytest

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.placement.locate import Placement
from skymemory_lab.view.layout_map import CELL_WIDTH, LABEL_WIDTH, OrbitFrame, render_frame

TORUS = Torus(5, 7)
PLACEMENT = Placement.of("rotation_hop", 9, TORUS, SatelliteId(2, 3))


def marks(frame: OrbitFrame) -> list[list[str]]:
    return [line.split()[1:] for line in render_frame(frame)[1:]]


def test_the_box_stands_around_the_satellite_overhead() -> None:
    assert marks(OrbitFrame(PLACEMENT, (0, 0), (0, 0))) == [
        ["·"] * 7,
        ["·", "·", "7", "2", "6", "·", "·"],
        ["·", "·", "5", "(1)", "3", "·", "·"],
        ["·", "·", "9", "4", "8", "·", "·"],
        ["·"] * 7,
    ]


def test_after_a_slot_move_the_leaving_column_is_on_the_entering_one() -> None:
    """Figure 8 of the paper: the centre passes to the satellite in the west, everything else stays."""
    assert marks(OrbitFrame(PLACEMENT, (0, 0), (1, 0)))[1:4] == [
        ["·", "6", "7", "2", "·", "·", "·"],
        ["·", "3", "(5)", "1", "·", "·", "·"],
        ["·", "8", "9", "4", "·", "·", "·"],
    ]


def test_the_dead_and_those_that_still_hold_chunks_are_marked() -> None:
    dead = frozenset(SatelliteId(2, slot) for slot in range(7))
    frame = OrbitFrame(PLACEMENT, (0, 0), (0, 0), dead, frozenset({SatelliteId(1, 6), SatelliteId(1, 3)}))
    assert marks(frame)[2] == ["×", "×", "×", "(×)", "×", "×", "×"]
    assert marks(frame)[1] == ["·", "·", "7", "2", "6", "·", "+"]


@pytest.mark.parametrize("moves", [(0, 0), (5, 3), (-2, 7)])
def test_every_frame_is_as_large_as_every_other(moves: tuple[int, int]) -> None:
    frame = OrbitFrame(PLACEMENT, (0, 0), moves, frozenset({SatelliteId(0, 0)}), frozenset({SatelliteId(4, 6)}))
    plain, coloured = render_frame(frame), render_frame(frame, colour=True)
    assert {len(line) for line in plain} == {LABEL_WIDTH + 7 * CELL_WIDTH} and len(plain) == 6
    assert [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in coloured] == plain
    assert "\x1b" not in "".join(plain) and "\x1b" in "".join(coloured)


@pytest.mark.parametrize("overhead", range(7))
def test_a_narrow_frame_shows_the_slots_around_the_satellite_overhead(overhead: int) -> None:
    frame = OrbitFrame(PLACEMENT, (0, 0), (3 - overhead, 0))
    lines = render_frame(frame, width=LABEL_WIDTH + 5 * CELL_WIDTH + 3)
    assert {len(line) for line in lines} == {LABEL_WIDTH + 5 * CELL_WIDTH}
    assert lines[0].split()[2] == str(frame.centre.slot + 1) and "(" in lines[3].split()[3]
