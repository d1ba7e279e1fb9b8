"""The table of when the sky helps says what its JSON says, and so do the sentences around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/benchmarks/cluster.md").read_text("utf-8")
ROWS: list[dict[str, Any]] = json.loads((ROOT / "docs/benchmarks/cluster_sky.json").read_text("utf-8"))["rows"]
BEHIND = list(dict.fromkeys(row["behind"] for row in ROWS))


def mean_s(behind: str, dram_tb: float) -> float:
    (row,) = [row for row in ROWS if (row["behind"], row["dram_tb"]) == (behind, dram_tb)]
    return float(row["ttft_mean_s"])


@pytest.mark.parametrize("behind", BEHIND)
def test_the_table_is_that_of_the_run(behind: str) -> None:
    rows = [row for row in ROWS if row["behind"] == behind]
    assert [row["dram_tb"] for row in rows] == [0.1, 0.25, 1.0]
    cells = [f"{row['ttft_mean_s']:.2f} s, {row['ttft_p90_s']:.2f} s, {row['hit_tokens']:.1%}" for row in rows]
    assert f"| {behind} | {' | '.join(cells)} |" in PAGE


def test_what_is_said_of_when_it_helps() -> None:
    for dram_tb, most in ((0.1, 0.65), (0.25, 0.9)):
        assert mean_s("100 Gbit/s", dram_tb) < most * mean_s("nothing", dram_tb)
    assert mean_s("100 Gbit/s", 0.1) < 1.05 * mean_s("nothing", 1.0)
    assert mean_s("100 Gbit/s", 0.1) < mean_s("SSD of 2 TB", 0.1) < 0.75 * mean_s("nothing", 0.1)
    assert mean_s("100 Gbit/s", 1.0) == pytest.approx(mean_s("nothing", 1.0), rel=0.03)
    for dram_tb in (0.1, 0.25, 1.0):
        assert mean_s("1 Gbit/s", dram_tb) == pytest.approx(mean_s("nothing", dram_tb), rel=0.05)
    assert all(row["completed"] == ROWS[0]["completed"] for row in ROWS)


def test_what_the_pool_costs_is_what_was_measured() -> None:
    rows = json.loads((ROOT / "docs/benchmarks/cluster_pool.json").read_text("utf-8"))["rows"]
    seconds = [f"{row['processor_s']:.2f}" for row in rows]
    hits = [f"{row['hit_blocks']:.1%}" for row in rows]
    assert f"| processor time, s | {' | '.join(seconds)} |" in PAGE
    assert f"| blocks that hit | {' | '.join(hits)} |" in PAGE
    assert all(row["processor_s"] < 2 for row in rows if "LRU" in row["pool"])
