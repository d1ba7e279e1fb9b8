"""The tables of docs/eviction.md say what their JSON says, and the command that made it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/eviction.md").read_text("utf-8")
ROWS = json.loads((ROOT / "docs/benchmarks/eviction.json").read_text("utf-8"))["rows"]


def test_the_tables_are_those_of_the_run() -> None:
    assert f"{ROWS[0]['requests']:,} prompts" in PAGE
    for row in ROWS[:-4]:
        assert (
            f"| {row['eviction']} | {row['dead']:.1%} | {row['messages']:,} | {row['holes']:,} | {row['hits']:.1%} | "
            f"{row['hits_of_seen']:.1%} | {row['moved_bytes'] / 1e6:.1f} |"
        ) in PAGE
    for row in ROWS[-4:]:
        sighting = "2nd" if row["admission"] == "second" else "1st"
        assert (
            f"| {row['replacement']} | {sighting} | {row['hits']:.1%} | {row['hits_of_seen']:.1%} | "
            f"{row['stored_bytes'] / 1e6:.1f} |"
        ) in PAGE


def test_the_benchmark_runs_and_gossip_leaves_less_dead_than_nothing(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks/eviction.py"),
        "--requests",
        "25",
        "--json",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    rows = {row["eviction"]: row for row in json.loads((tmp_path / "out").read_text("utf-8"))["rows"][:-4]}
    assert rows["gossip"]["dead"] <= rows["none"]["dead"] and rows["none"]["messages"] == 0
