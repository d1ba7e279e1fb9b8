"""The tables of "Where requests go" in docs/benchmarks.md, from the results: ``python -m tools.routing_tables``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skymemory.conductor.strategies.named import DEFAULT

DOCS = Path(__file__).parents[1] / "docs"
PAGE, RESULTS = DOCS / "benchmarks.md", DOCS / "benchmarks" / "routing.json"
SHOWN: Mapping[str, Callable[[str], Callable[[float], str]]] = {
    "mean_s": lambda workload: "{:.3f}".format if workload == "tenants" else "{:.2f}".format,
    "p99_s": lambda workload: "{:.2f}".format,
    "block_hits": lambda workload: "{:.1%}".format,
}
_TABLES = re.compile(r"<!-- routing: (\w+) (\w+) -->\n.*?<!-- end -->", re.DOTALL)
Row = Mapping[str, Any]
Cell = tuple[float, int]
"""Times the rate, blocks per server."""


def page() -> str:
    """The page as it should be."""
    rows = json.loads(RESULTS.read_text("utf-8"))["rows"]
    return _TABLES.sub(
        lambda found: f"{found[0].partition(chr(10))[0]}\n\n{_part(rows, found[1], found[2])}\n\n<!-- end -->",
        PAGE.read_text("utf-8"),
    )


def _part(rows: Sequence[Row], workload: str, what: str) -> str:
    mine = [row for row in rows if row["workload"] == workload]
    return _verdict(mine) if what == "verdict" else _table(mine, what, SHOWN[what](workload))


def _table(rows: Sequence[Row], what: str, shown: Callable[[float], str]) -> str:
    """One line for each strategy, the quickest first; one column for each cell."""
    cells, found = _cells(rows, what)
    means = _cells(rows, "mean_s")[1]
    names = sorted(found, key=lambda name: sum(means[name].values()))
    head = " | ".join(f"{blocks:,}, {rate:g}×" for rate, blocks in cells)
    lines = [f"| strategy | {head} |", "| --- |" + " ---: |" * len(cells)]
    for name in names:
        figures = " | ".join(shown(found[name][cell]) for cell in cells)
        lines.append(f"| {f'**{name}**' if name == DEFAULT else name} | {figures} |")
    return "\n".join(lines)


def _verdict(rows: Sequence[Row]) -> str:
    """What the goals ask, in one sentence."""
    ratios = {what: _ratios(rows, what) for what in ("mean_s", "p99_s")}
    told = [f"{name} {min(ratios[what]):.2f} to {max(ratios[what]):.2f}" for what, name in _SAID.items()]
    share = max(row["worst_share"] for row in rows if row["strategy"] == DEFAULT)
    off = max(
        abs(one / row["mean_s"] - 1) for row in rows if row["strategy"] == DEFAULT for one in row["mean_s_of_seeds"]
    )
    return (
        f"`{DEFAULT}` over its best rival, cell by cell: {', '.join(told)}. Its seeds lie within {off:.0%} of their "
        f"means. The greatest share of a server: {share:.2f} × the mean."
    )


_SAID = {"mean_s": "mean", "p99_s": "99th percentile"}


def _ratios(rows: Sequence[Row], what: str) -> list[float]:
    cells, found = _cells(rows, what)
    return [found[DEFAULT][cell] / min(of[cell] for name, of in found.items() if name != DEFAULT) for cell in cells]


def _cells(rows: Sequence[Row], what: str) -> tuple[list[Cell], dict[str, dict[Cell, float]]]:
    found: dict[str, dict[Cell, float]] = {}
    for row in rows:
        found.setdefault(row["strategy"], {})[row["rate"], row["blocks"]] = row[what]
    return sorted({cell for of in found.values() for cell in of}), found


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
