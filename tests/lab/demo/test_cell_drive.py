"""A drive among base stations: its path keeps off the edge, what follows stays near, what stays does not."""

from __future__ import annotations

import json
import random

import pytest
from tests.settings_file import settings_file

from skymemory.cli.main import main
from skymemory.constellation.ground_track import CellGrid, parse_grid
from skymemory.errors import InvalidInput
from skymemory_lab.demo.cells import Town, run_drive

SMALL = Town(CellGrid(14, 14), servers=9, value_bytes=60_000)


@pytest.mark.brief()
def test_what_follows_stays_near_and_moves_the_least() -> None:
    path = SMALL.drive(3, 2, 40.0)
    value = random.Random(1).randbytes(SMALL.value_bytes)
    log: list[tuple[float, int, int]] = []
    follows = run_drive(SMALL, path, "rotation_hop", value, lambda *said: log.append(said))
    stays = run_drive(SMALL, path, "hop", value)
    assert follows.reads == follows.hits == stays.hits > 20 and follows.wrong == stays.wrong == 0
    assert follows.crossings > 3 and 0 < follows.moved_bytes <= 1.05 * follows.least_bytes
    assert follows.farthest_hops <= 2 < stays.farthest_hops and stays.moved_bytes == 0
    assert follows.worst_ms < stays.worst_ms
    assert [reads for _, reads, _ in log] == list(range(1, follows.reads + 1))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("servers", [1, 4, 9, 16])
def test_no_drive_brings_a_box_to_the_edge(seed: int, servers: int) -> None:
    town = Town(CellGrid(12, 15), servers=servers)
    path = town.drive(seed, 5, 14.0)
    assert len(path) == 6 and town.grid.track(path, town.margin)


@pytest.mark.parametrize("text", ["", "24", "24x", "x24", "-3x4", "24 x 24", "24x24x24", "2000x24", "²x3"])
def test_grids_that_are_none_are_named(text: str) -> None:
    with pytest.raises(InvalidInput, match="a grid of"):
        parse_grid(text)
    assert parse_grid("12x7") == CellGrid(12, 7)


def test_towns_that_are_too_small_say_what_they_need() -> None:
    with pytest.raises(InvalidInput, match="expected 6 x 6 at least"):
        Town(CellGrid(5, 24))
    with pytest.raises(InvalidInput, match="more than 0"):
        Town(CellGrid(24, 24), cell_m=0)
    with pytest.raises(InvalidInput, match="at least one"):
        SMALL.drive(1, 0, 10.0)


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_numbers_that_are_none_are_refused_and_not_driven_by(number: str) -> None:
    """A cell of nan metres was a search without an end, a speed of infinity a drive of no time."""
    with pytest.raises(InvalidInput, match="expected more than 0"):
        Town(CellGrid(24, 24), cell_m=float(number))
    with pytest.raises(InvalidInput, match="expected at least one, and to move"):
        SMALL.drive(1, 1, float(number))


def test_a_value_that_no_computer_has_memory_for_is_refused_before_it_is_drawn(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with settings_file('value = "10GiB"') as words:
        assert main(["demo", "cells", *words]) == 2
    assert "at most 268435456 bytes" in capsys.readouterr().err


@pytest.mark.brief()
def test_the_demo_reports_both_drives(capsys: pytest.CaptureFixture[str]) -> None:
    with settings_file('grid = "12x12"\nvalue = "30KB"\nlegs = 1\nspeed_kmh = 100') as words:
        assert main(["demo", "cells", *words]) == 0
        text = capsys.readouterr().out
        assert "follows the user" in text and "borders crossed" in text and "0 wrong" in text
        assert main(["demo", "cells", *words, "--json"]) == 0
    said = capsys.readouterr()
    facts = json.loads(said.out)
    assert [drive["strategy"] for drive in facts["drives"]] == ["rotation_hop", "hop"]
    assert all(drive["hits"] == drive["reads"] for drive in facts["drives"]) and "base stations" in said.err
    with settings_file('grid = "4x4"') as words:
        assert main(["demo", "cells", *words]) == 2
