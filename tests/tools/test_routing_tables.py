"""What the page on benchmarks says of routing is what was measured, and meets its goals."""

from __future__ import annotations

import json

from tools.routing_tables import PAGE, RESULTS, page

from skymemory.conductor.strategies.named import DEFAULT, NAMES


def test_the_page_has_what_was_measured() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python -m tools.routing_tables"


def test_the_default_is_quickest_in_every_cell_and_its_tail_no_longer_than_any() -> None:
    rows = json.loads(RESULTS.read_text("utf-8"))["rows"]
    cells = {(row["workload"], row["rate"], row["blocks"]) for row in rows}
    assert len(cells) == 12
    for cell in cells:
        found = {row["strategy"]: row for row in rows if (row["workload"], row["rate"], row["blocks"]) == cell}
        assert set(found) == set(NAMES)
        own, others = found.pop(DEFAULT), found.values()
        assert own["mean_s"] < min(row["mean_s"] for row in others), cell
        assert own["p99_s"] <= 1.02 * min(row["p99_s"] for row in others), cell
        assert own["worst_share"] <= 2.2, cell
