"""The table of what the picker adds through Envoy is that of the run, and its goal is met there."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_is_that_of_the_run() -> None:
    page = (ROOT / "docs/benchmarks/router.md").read_text("utf-8")
    rows = json.loads((ROOT / "docs/benchmarks/envoy_picker.json").read_text("utf-8"))["rows"]
    for row in rows[:2]:  # behind them: what the picker used of its processor
        assert f"| {row['way']} | {row['p50_ms']:.2f} | {row['p99_ms']:.2f} | {row['ratio_p50']:.1f} |" in page
    assert rows[1]["p50_ms"] < 2.0 and f"{rows[1]['requests_per_s']:,.0f} with" in page
