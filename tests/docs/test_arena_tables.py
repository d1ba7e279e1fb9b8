"""The page on the arena says what its JSON says, and the JSON keeps what is promised of the default."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tools.arena_tables import PAGE, RESULTS, page

from skymemory.conductor.strategies.registry import NAMES

MADE = json.loads(RESULTS.read_text("utf-8"))
CELLS: list[dict[str, Any]] = MADE["verdicts"]
BELOW = [cell for cell in CELLS if not cell["saturated"]]


def test_the_page_is_the_run_s() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python -m tools.arena_tables"


def test_every_strategy_plays_in_every_cell() -> None:
    """But `random`, and `simhash`, which finds nothing in traces without words."""
    cells: dict[tuple[Any, ...], set[str]] = {}
    for row in MADE["rows"]:
        named = (row[name] for name in ("family", "engine", "rate", "blocks", "whole", "fault"))
        cells.setdefault(tuple(named), set()).add(row["player"])
    assert len(cells) == len(CELLS) >= 50
    assert all(players >= set(NAMES) - {"random", "simhash"} for players in cells.values())
    assert len({frozenset(players) for players in cells.values()}) == 1
    assert {cell["engine"] for cell in CELLS} == {"fifo", "chunk", "shared"}
    assert sum(cell["untuned"] for cell in CELLS if not cell["fault"]) >= 0.25 * len(CELLS)


@pytest.mark.parametrize(
    "cell", BELOW, ids=lambda one: " ".join(str(one[name]) for name in ("family", "engine", "rate", "whole", "fault"))
)
def test_the_default_is_never_far_behind(cell: dict[str, Any]) -> None:
    assert all(cell[metric]["ratio"] <= (1.3 if cell["fault"] else 1.25) for metric in ("token_s", "answer_s"))
    assert cell["mean_s"]["ratio"] <= (1.3 if cell["fault"] else 1.15)


def test_the_default_is_mostly_among_the_best() -> None:
    for metric in ("mean_s", "token_s", "answer_s"):
        assert sum(cell[metric]["ratio"] <= 1.05 for cell in BELOW) >= 0.8 * len(BELOW)


def test_load_uses_all_servers() -> None:
    assert all(cell["servers_used"] >= 7 / 8 for cell in CELLS if not cell["fault"])


def test_whole_answers_cost_little() -> None:
    assert all(cell["over_given"] <= 1.1 for cell in CELLS if cell["whole"] == 1.0 and not cell["fault"])
