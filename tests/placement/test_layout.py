"""The five layouts against the papers' figures and the numbers of the specification."""

from __future__ import annotations

import pytest

from skymemory.constellation.presets import PRESETS, preset_named
from skymemory.constellation.torus import Torus
from skymemory.errors import InvalidInput
from skymemory.placement.layout import STRATEGIES, Box, Layout, Strategy, box_shape, layout, parse_strategy

PAPER = Torus(15, 15)


def grid(made: Layout) -> list[list[int]]:
    """Servers, 1-based, as a figure shows them; 0 where there is none."""
    return [[made.server_of.get((x, y), -1) + 1 for x in made.box.columns] for y in made.box.rows]


def test_rotation_counts_row_by_row_from_the_north_west() -> None:
    assert grid(layout("rotation", 9, PAPER)) == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert grid(layout("baseline", 7, PAPER)) == [[1, 2, 3], [4, 5, 6], [7, 0, 0]]


def test_rotation_hop_is_figure_7() -> None:
    assert grid(layout("rotation_hop", 9, PAPER)) == [[7, 2, 6], [5, 1, 3], [9, 4, 8]]


def test_rotation_hop_of_figure_15_with_25_servers() -> None:
    assert grid(layout("rotation_hop", 25, PAPER)) == [
        [23, 15, 6, 14, 22],
        [17, 8, 2, 7, 16],
        [13, 5, 1, 3, 9],
        [21, 12, 4, 10, 18],
        [25, 20, 11, 19, 24],
    ]


def test_hop_grows_in_circles_of_hops() -> None:
    assert grid(layout("hop", 13, PAPER)) == [
        [0, 0, 6, 0, 0],
        [0, 8, 2, 7, 0],
        [13, 5, 1, 3, 9],
        [0, 12, 4, 10, 0],
        [0, 0, 11, 0, 0],
    ]


def test_even_sides_take_their_extra_column_west_and_their_extra_row_south() -> None:
    made = layout("rotation_hop", 10, PRESETS["testbed-19x5"].torus)
    assert (made.box.width, made.box.height) == (4, 3)
    assert list(made.box.columns) == [-2, -1, 0, 1] and list(made.box.rows) == [-1, 0, 1]
    assert list(Box.centred(2, 2).columns) == [-1, 0] and list(Box.centred(2, 2).rows) == [0, 1]


def test_the_box_of_the_testbed_is_as_wide_as_its_few_planes_demand() -> None:
    torus = PRESETS["testbed-19x5"].torus
    assert [box_shape(servers, torus) for servers in (1, 2, 9, 10, 25, 26, 60, 95)] == [
        (1, 1),
        (2, 1),
        (3, 3),
        (4, 3),
        (5, 5),
        (6, 5),
        (12, 5),
        (19, 5),
    ]


def test_cost_on_starlink_a_drops_the_worst_delay_from_34_to_23_ms() -> None:
    shell = preset_named("starlink-a", 1).shell
    links = shell.isl_one_way_s("slot"), shell.isl_one_way_s("plane")
    square, cheap = (layout(name, 81, shell.torus, *links) for name in ("rotation_hop", "cost"))
    assert square.worst_path_s == pytest.approx(34.3e-3, abs=5e-5)
    assert cheap.worst_path_s == pytest.approx(22.7e-3, abs=5e-5)
    assert list(cheap.box.rows) == list(range(-11, 12))
    assert list(cheap.box.columns) == list(range(-3, 4))


@pytest.mark.parametrize("servers", [1, 5, 9, 13, 25, 40, 81])
def test_cost_with_links_of_one_length_walks_like_hop(servers: int) -> None:
    cheap, walked = (layout(name, servers, PAPER, 7e-3, 7e-3) for name in ("cost", "hop"))
    assert cheap.worst_path_s == walked.worst_path_s
    if servers in (1, 5, 13, 25, 41):
        assert cheap.cells == walked.cells


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("servers", [0, -1, 96, 10**9])
def test_more_servers_than_satellites_are_refused(strategy: Strategy, servers: int) -> None:
    with pytest.raises(InvalidInput, match="expected 1 to 95"):
        layout(strategy, servers, Torus(5, 19))


def test_strategies_are_read_kindly_and_typos_answered() -> None:
    assert parse_strategy("Rotation-Hop") == "rotation_hop"
    with pytest.raises(InvalidInput, match="did you mean 'rotation"):
        parse_strategy("rotaton")
    with pytest.raises(InvalidInput, match="more than 0"):
        layout("cost", 3, PAPER, 0.0, 1.0)


@pytest.mark.parametrize(
    ("servers", "links", "box"),
    [(2, (1, 1), (1, 2, 0, 0)), (4, (2, 3), (2, 3, 1, 1)), (12, (1, 3), (6, 3, 3, 1)), (33, (1, 2), (8, 5, 4, 2))],
)
def test_of_boxes_of_one_size_the_cheapest_is_the_squarest(
    servers: int, links: tuple[int, int], box: tuple[int, int, int, int]
) -> None:
    """Every party has to choose alike: of equally square ones the narrowest."""
    found = layout("cost", servers, Torus(12, 12), *links).box
    assert (found.width, found.height, found.west, found.north) == box
