"""The tables of the benchmark pages about tiers and policies say what their JSON says, and the commands run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from skymemory.eviction import DEFAULT_POLICY, POLICIES

ROOT = Path(__file__).parents[2]
PAGE = "\n".join((ROOT / "docs/benchmarks" / name).read_text("utf-8") for name in ("eviction.md", "data-path.md"))
POLICY_ROWS, OTHER_POLICY_ROWS = (
    json.loads((ROOT / "docs/benchmarks" / name).read_text("utf-8"))["rows"]
    for name in ("policies.json", "policies_synthetic.json")
)
TIER_ROWS = json.loads((ROOT / "docs/benchmarks/tiers.json").read_text("utf-8"))["rows"]


def run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)


def test_the_policies_tables_are_those_of_the_runs_and_the_default_is_where_they_say() -> None:
    plain = PAGE.replace("**", "")
    for row in POLICY_ROWS + OTHER_POLICY_ROWS:
        shares = " | ".join(f"{100 * row[name]:.1f}" for name in (*POLICIES, "belady"))
        assert f"| {row['capacity']:,} | {shares} |" in plain
        behind = 0.0 if row in POLICY_ROWS else 0.0085
        assert all(row[policy] - behind <= row[DEFAULT_POLICY] <= row["belady"] for policy in POLICIES)


def test_the_tiers_table_is_that_of_the_run() -> None:
    plain = PAGE.replace("**", "")
    for row in TIER_ROWS:
        ratio = f"| {row['ratio']:.2f} ({row['ratio_least']:.2f} to {row['ratio_most']:.2f}) | {row['goal'] or ''} |"
        assert any(
            line.startswith(f"| {row['tier']}, {row['what']} | {row['blocks']} |") and line.endswith(ratio)
            for line in plain.splitlines()
        ), row


@pytest.mark.brief()
def test_hit_ratios_of_a_trace_of_one_s_own(tmp_path: Path) -> None:
    """Forty conversations that come back, among documents that do not: no rule beats one that knows the future."""
    trace = tmp_path / "trace.jsonl"
    prompts = [[turn % 40 * 10 + depth for depth in range(4)] for turn in range(120)]
    documents = [[10_000 + 20 * turn + depth for depth in range(8)] for turn in range(120)]
    lines = [
        json.dumps({"input_length": 512 * len(blocks), "hash_ids": blocks})
        for pair in zip(prompts, documents, strict=True)
        for blocks in pair
    ]
    trace.write_text("\n".join(lines) + "\n", "utf-8")
    run("policies.py", "--quick", "--trace", str(trace), "--json", str(tmp_path / "out"))
    rows = json.loads((tmp_path / "out").read_text("utf-8"))["rows"]
    everything = 80 * 4 / (120 * 12)
    assert [row["belady"] for row in rows] == [pytest.approx(everything)] * len(rows)
    assert all(row[policy] <= row["belady"] for row in rows for policy in POLICIES)
    assert rows[-1]["lru"] == pytest.approx(everything), "all fits"


@pytest.mark.brief()
def test_without_a_trace_it_says_so(tmp_path: Path) -> None:
    assert "skipped: there is no trace" in run("policies.py", "--trace", str(tmp_path / "none")).stderr


@pytest.mark.slow
def test_the_tiers_are_measured(tmp_path: Path) -> None:
    run("tiers.py", "--quick", "--json", str(tmp_path / "out"))
    rows = json.loads((tmp_path / "out").read_text("utf-8"))["rows"]
    assert {row["tier"] for row in rows} >= {"memory", "disk", "hierarchy"}
    assert all(row["ours_s"] > 0 and row["peer_s"] > 0 for row in rows)


def test_the_table_of_tiers_that_hang() -> None:
    page = (ROOT / "docs/guide/tiers.md").read_text("utf-8")
    rows = json.loads((ROOT / "docs/benchmarks/hung_tiers.json").read_text("utf-8"))["rows"]
    assert len(rows) == 6
    for row in rows:
        first = f"| {row['tier']} | {'known' if row['known'] else 'never asked'} | {row['computing_ms']:.0f} | "
        last = f" | {row['may_cost_ms']:.0f} | {row['first_ms']:.0f} | {row['next_ms']:.1f} | "
        assert any(line.startswith(first) and last in f"{line} " for line in page.splitlines()), row
        assert row["first_ms"] < row["may_cost_ms"] + 40 and row["next_ms"] < 20, "once, and little beyond"
