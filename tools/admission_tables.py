"""The tables of docs/benchmarks/admission.md, from the runs of ``benchmarks/cluster.py``.

``python -m tools.admission_tables``
"""

from __future__ import annotations

import json
from typing import Any

from tools.arena_tables import FOLDER, fill, table

PAGE = FOLDER / "admission.md"
FAMILIES = {
    "conversation (trace)": "cluster.json",
    "synthetic (trace)": "cluster_synthetic.json",
    "generator": "cluster_generated.json",
}
OURS = "goodput"
Cells = dict[tuple[str, float, str], dict[str, dict[str, Any]]]
"""By machines, rate and promises: what each rule did."""


def cells(family: str) -> Cells:
    found: Cells = {}
    for row in json.loads((FOLDER / FAMILIES[family]).read_text("utf-8"))["rows"]:
        if row["part"] == "admission":
            found.setdefault((row["size"], row["rate"], row["slo"]), {})[row["rule"]] = row
    return found


def best_rival(there: dict[str, dict[str, Any]]) -> str:
    return max((rule for rule in there if rule != OURS), key=lambda rule: there[rule]["met"])


def page() -> str:
    """The page as it should be."""
    grids = {family: cells(family) for family in FAMILIES}
    rules = list(next(iter(next(iter(grids.values())).values())))
    sums = [["requests", "cells", *(f"`{rule}`" for rule in rules), "level or ahead", "worst cell"]]
    lost = [["requests", "machines", "rate", "promises", "best rule", "it keeps", "ours", "of it"]]
    for family, grid in grids.items():
        ratios = []
        for (size, rate, slo), there in grid.items():
            rival = best_rival(there)
            ratios.append(there[OURS]["met"] / there[rival]["met"])
            if ratios[-1] < 1:
                lost.append(
                    [
                        family,
                        size,
                        f"{rate:g}×",
                        slo,
                        f"`{rival}`",
                        f"{there[rival]['met']:,}",
                        f"{there[OURS]['met']:,}",
                        f"{ratios[-1]:.3f}",
                    ]
                )
        kept = {rule: sum(there[rule]["met"] for there in grid.values()) for rule in rules}
        wasted_s = {rule: sum(there[rule]["wasted_prefill_s"] for there in grid.values()) for rule in rules}
        shown = [
            _bold(f"{kept[rule]:,}", kept[rule] == max(kept.values())) + f" ({wasted_s[rule]:,.0f})" for rule in rules
        ]
        sums.append([family, str(len(grid)), *shown, f"{sum(ratio >= 1 for ratio in ratios)}", f"{min(ratios):.3f}"])
    parts = {"sums": table(sums), "lost": table(lost)}
    for family, grid in grids.items():
        body = []
        for (size, rate, slo), there in grid.items():
            met = {rule: there[rule]["met"] for rule in rules}
            most = max(met.values()) if len(set(met.values())) > 1 else -1
            shown = [
                _bold(f"{met[rule]:,}", met[rule] == most) + f" ({there[rule]['wasted_prefill_s']:.0f})"
                for rule in rules
            ]
            body.append([size, f"{rate:g}×", slo, *shown])
        parts[family] = table([["machines", "rate", "promises", *(f"`{rule}`" for rule in rules)], *body])
    return fill(PAGE, "admission", parts)


def _bold(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
