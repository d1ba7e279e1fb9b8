"""Maps as text."""

from __future__ import annotations

import pytest

from skymemory.constellation.presets import PRESETS, preset_named
from skymemory.errors import InvalidInput
from skymemory.placement.locate import Placement
from skymemory_lab.view.layout_map import layout_map, paper_map, render

FIGURE_8 = """\
rotation_hop: 9 servers in a box of 3 × 3, on 5 planes of 7 satellites, after 1 rotation

  sat   1    2    3    4    5    6    7   motion →
orb 1   ·    ·    ·    ·    ·    ·    ·
orb 2   ·    6    7    2    ·    ·    ·
orb 3   ·    3   (5)   1    ·    ·    ·
orb 4   ·    8    9    4    ·    ·    ·
orb 5   ·    ·    ·    ·    ·    ·    ·

(n) overhead: sat 3, orb 3   · outside

handed over since they were set: 3 servers
    3:  (5,3) → (2,3)
    6:  (5,2) → (2,2)
    8:  (5,4) → (2,4)"""


def test_figure_8_as_text() -> None:
    assert render(paper_map(8)) == FIGURE_8


def test_a_map_larger_than_a_page_is_cut_to_the_box_and_says_where_it_wraps() -> None:
    shown = layout_map(Placement.for_preset(preset_named("starlink-a", 1), "cost", 81))
    assert len(shown.rows) == 23 + 4 and len(shown.columns) == 7 + 4
    assert shown.rows[-1] < shown.rows[0]
    text = render(shown)
    assert "box of 7 × 23" in text and "□ in the box, no server" in text
    assert all(
        f" {server} " in text.replace("(", " ").replace(")", " ").replace("\n", " \n") for server in range(1, 82)
    )


def test_a_box_as_large_as_the_torus_shows_every_satellite_once() -> None:
    shown = layout_map(Placement.for_preset(PRESETS["kuiper-b"], "rotation", 784), (3, 2))
    assert sorted(shown.rows) == sorted(shown.columns) == list(range(28))


def test_many_handovers_are_counted_and_some_listed() -> None:
    text = render(layout_map(Placement.for_preset(PRESETS["paper-15x15"], "rotation", 81), (2, 0)))
    assert "handed over since they were set: 18 servers" in text and "… and 6 more" in text


def test_colour_marks_the_overhead_satellite_and_the_box_only_when_asked() -> None:
    assert "\x1b" not in render(paper_map(7))
    coloured = render(paper_map(7), colour=True)
    assert coloured.count("\x1b[48;5;114;30m") == 1 and coloured.count("\x1b[48;5;215;30m") == 8


def test_hop_has_no_box_and_stays_behind_the_overhead_satellite() -> None:
    shown = layout_map(Placement.for_preset(PRESETS["testbed-19x5"], "hop", 13), (2, 0))
    text = render(shown)
    assert "box" not in text and "handed over" not in text
    assert shown.centre.slot == 7 and "(13)" in text


def test_figures_without_a_layout_are_refused() -> None:
    with pytest.raises(InvalidInput, match="expected one of 4, 5, 6, 7, 8"):
        paper_map(9)
