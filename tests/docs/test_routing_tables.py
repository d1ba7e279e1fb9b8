"""The tables of where requests go say what their JSON says, and the JSON keeps what is promised of the default."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from skymemory.conductor.strategies.named import DEFAULT, NAMES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/benchmarks.md").read_text("utf-8")
ROWS = json.loads((ROOT / "docs/benchmarks/routing.json").read_text("utf-8"))["rows"]
CELLS: dict[tuple[str, float, int], dict[str, dict[str, Any]]] = defaultdict(dict)
for row in ROWS:
    CELLS[row["workload"], row["rate"], row["blocks"]][row["strategy"]] = row


def test_all_cells_and_strategies_are_there() -> None:
    for workload in ("trace", "tenants"):
        assert {cell[1:] for cell in CELLS if cell[0] == workload} == {
            (rate, blocks) for rate in (1.0, 1.35) for blocks in (2_000, 5_000, 10_000)
        }
    assert all(set(rows) == set(NAMES) for rows in CELLS.values())


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_default_is_the_quickest_in_every_cell_and_keeps_its_bound(cell: tuple[str, float, int]) -> None:
    rows = CELLS[cell]
    ours, others = rows[DEFAULT], [row for name, row in rows.items() if name != DEFAULT]
    assert ours["mean_s"] < min(row["mean_s"] for row in others)
    assert ours["p99_s"] <= 1.02 * min(row["p99_s"] for row in others)
    assert ours["worst_share"] <= 2.2


@pytest.mark.parametrize(
    ("workload", "name", "form"),
    [
        ("trace", "mean_s", ".2f"),
        ("trace", "p99_s", ".2f"),
        ("trace", "block_hits", ".1%"),
        ("tenants", "mean_s", ".3f"),
    ],
)
def test_the_tables_are_those_of_the_run(workload: str, name: str, form: str) -> None:
    cells = sorted(cell for cell in CELLS if cell[0] == workload)
    for strategy in NAMES:
        figures = " | ".join(f"{CELLS[cell][strategy][name]:{form}}" for cell in cells)
        shown = f"**{strategy}**" if strategy == DEFAULT else strategy
        assert f"| {shown} | {figures} |" in PAGE
