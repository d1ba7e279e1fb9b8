"""The tables of docs/benchmarks/eviction.md say what their JSON says, and the command that made it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from skymemory.eviction import DEFAULT_REPLACEMENT, REPLACEMENTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/benchmarks/eviction.md").read_text("utf-8")
REPLACED = 2 * len(REPLACEMENTS)
ROWS = json.loads((ROOT / "docs/benchmarks/eviction.json").read_text("utf-8"))["rows"]


def test_the_tables_are_those_of_the_run() -> None:
    assert f"{ROWS[0]['requests']:,} prompts" in PAGE
    for row in ROWS[:-REPLACED]:
        assert (
            f"| {row['eviction']} | {row['dead']:.1%} | {row['messages']:,} | {row['holes']:,} | {row['hits']:.1%} | "
            f"{row['hits_of_seen']:.1%} | {row['moved_bytes'] / 1e6:.1f} |"
        ) in PAGE
    for row in ROWS[-REPLACED:]:
        sighting = "2nd" if row["admission"] == "second" else "1st"
        assert (
            f"| {row['replacement']} | {sighting} | {row['hits']:.1%} | {row['hits_of_seen']:.1%} | "
            f"{row['stored_bytes'] / 1e6:.1f} |"
        ) in PAGE


@pytest.mark.slow
def test_the_benchmark_runs_and_gossip_leaves_less_dead_than_nothing(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks/eviction.py"),
        "--requests",
        "25",
        "--json",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    rows = {row["eviction"]: row for row in json.loads((tmp_path / "out").read_text("utf-8"))["rows"][:-REPLACED]}
    assert rows["gossip"]["dead"] <= rows["none"]["dead"] and rows["none"]["messages"] == 0


TRACED = json.loads((ROOT / "docs/benchmarks/replacement.json").read_text("utf-8"))["rows"]
TRACE = ROOT.parent / "shared/data/traces/conversation_trace.jsonl"


def test_the_trace_s_table_is_that_of_the_run_and_its_winner_the_default() -> None:
    for row in TRACED:
        shares = " | ".join(f"{row[name]:.1%}" for name in (*REPLACEMENTS, "belady"))
        assert f"| {row['capacity']:,} | {shares} |" in PAGE
        assert row["lru"] <= row[DEFAULT_REPLACEMENT] <= row["belady"]


def replay(tmp_path: Path, *options: str) -> tuple[list[dict[str, float]], str]:
    out = tmp_path / "out"
    command = [sys.executable, str(ROOT / "benchmarks/replacement.py"), "--json", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text("utf-8"))["rows"] if out.exists() else [], done.stderr


def test_the_replay_counts_what_hits(tmp_path: Path) -> None:
    """Twice the same ten blocks, the last not full, and three others in between: nine of 21 hit if all fit."""
    trace = tmp_path / "trace"
    lines = [(list(range(10)), 10 * 512 - 1), ([20, 21, 22], 3 * 512), (list(range(10)), 10 * 512 - 1)]
    trace.write_text("".join(json.dumps({"hash_ids": ids, "input_length": tokens}) + "\n" for ids, tokens in lines))
    rows, _ = replay(tmp_path, "--trace", str(trace))
    assert all(row[name] == 9 / 21 for row in rows for name in (*REPLACEMENTS, "belady"))


@pytest.mark.slow
@pytest.mark.skipif(not TRACE.is_file(), reason=f"the trace is not beside this checkout ({TRACE.name})")
def test_on_the_trace_s_first_requests_lrfu_beats_lru(tmp_path: Path) -> None:
    rows, _ = replay(tmp_path, "--requests", "3000")
    thousand = next(row for row in rows if row["capacity"] == 1000)
    assert thousand["lrfu"] > 1.2 * thousand["lru"] and all(row["lrfu"] <= row["belady"] for row in rows)


def test_without_a_trace_it_says_that_it_was_skipped(tmp_path: Path) -> None:
    rows, said = replay(tmp_path, "--trace", str(tmp_path / "nowhere"))
    assert rows == [] and "skipped: there is no trace" in said
