"""The table of schedulers on a cluster is that of the run, and what is said of it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/benchmarks/cluster.md").read_text("utf-8")
SAID = " ".join(PAGE.split())
"""Sentences, wherever their lines break."""
FOUND: list[dict[str, Any]] = json.loads((ROOT / "docs/benchmarks/cluster.json").read_text("utf-8"))["rows"]
ROWS = [row for row in FOUND if row["part"] == "schedulers"]
ORDER = ("random", "load-balance", "cache-aware", "kvcache-centric")
PAPERS_BEST = 3.07 / 19.65


def of(rate: float, scheduler: str) -> dict[str, Any]:
    (row,) = [row for row in ROWS if (row["rate"], row["scheduler"]) == (rate, scheduler)]
    return row


@pytest.mark.parametrize("scheduler", [*ORDER, "least-ttft"])
def test_the_table_is_that_of_the_run(scheduler: str) -> None:
    rows = [row for row in ROWS if row["scheduler"] == scheduler]
    assert [row["rate"] for row in rows] == [0.5, 0.75, 1.0, 1.25]
    cells = [
        f"{row['ttft_mean_s']:.2f} s; {row['ttft_p90_s']:.2f} s; {row['token_hits']:.1%}".replace("%", " %")
        for row in rows
    ]
    assert f"| {scheduler} | {' | '.join(cells)} |" in PAGE


@pytest.mark.parametrize("rate", [0.5, 0.75, 1.0, 1.25])
def test_the_order_holds_and_the_goal_where_machines_are_busy(rate: float) -> None:
    means = [of(rate, name)["ttft_mean_s"] for name in ORDER]
    assert means == sorted(means, reverse=True)
    over_random = means[-1] / means[0]
    assert f"{over_random:.3f}" in PAGE
    assert (over_random <= PAPERS_BEST) == (rate > 0.5)


def test_the_whole_trace_is_quick_and_repeatable() -> None:
    runs = [row for row in FOUND if row["part"] == "speed"]
    assert [row["scheduler"] for row in runs] == list(ORDER)
    assert all(row["same"] and row["seconds"] < 6 and row["mb"] < 500 for row in runs)
    low, high = min(row["seconds"] for row in runs), max(row["seconds"] for row in runs)
    assert f"takes {low:.1f} to {high:.1f} s of a processor and {runs[0]['mb']:.0f} MB" in SAID
