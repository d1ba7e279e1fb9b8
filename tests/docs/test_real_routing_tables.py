"""The tables of estimates beside real engines are those of the runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/benchmarks/router.md").read_text("utf-8")


def rows_of(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "docs/benchmarks" / name).read_text("utf-8"))["rows"]
    return rows


@pytest.mark.parametrize("name", ["real_routing.json", "real_routing_vllm.json"])
def test_the_tables_are_those_of_the_runs(name: str) -> None:
    for row in rows_of(name):
        engine = "vLLM" if row["engine"] == "vllm" else "ours"
        head = f"| {engine} | {row['door']} | {row['whole']:.0%} |"
        cells = [
            f"{found['median']:.0%}, {found['p90']:.0%}" if found["requests"] else "–"
            for part in ("first third", "last third")
            for kind in ("streams", "whole")
            for found in [row["errors"][part][kind]]
        ]
        cached = f"{row['cached_believed']:.0%}, {row['cached_reported']:.0%}"
        assert f"{head} {' | '.join(cells)} | {cached} |" in PAGE
        for at, of in enumerate(row["per_engine"].values()):
            figures = [of["learned_s"], of["engine_s"], of["processor_s"]]
            shown = " | ".join("–" if each is None else f"{each * 1e3:.3f}" for each in figures)
            assert f"{head} {at} | {of['requests']} | {shown} | {of['ratio']:.2f} |" in PAGE
