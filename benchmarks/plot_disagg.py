"""Draw the curve of `disagg.py`: `python benchmarks/plot_disagg.py [SOURCE [TARGET]]`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from matplotlib.colors import TwoSlopeNorm

from _disagg_curve import LINKS, SPEEDS, cells, ratio, read
from _disagg_workload import MIXES
from skymemory_lab.view.drawing import new_figure, save

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
TBT_LOAD = 0.6
WIN = 1.005
"""Apart wins: the goodput is higher by more than rounding."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, nargs="?", default=FIGURES / "disagg-speeds.csv")
    parser.add_argument("target", type=Path, nargs="?", default=FIGURES / "disagg-speeds.svg")
    options = parser.parse_args()
    found = cells(read(options.source))
    lines = [(1, link, "goodput") for link in LINKS] + [(2, LINKS[1], "goodput"), (1, LINKS[1], "tbt")]
    figure = new_figure(3.6 * len(MIXES), 3.1 * len(lines))
    panels = figure.subplots(len(lines), len(MIXES), squeeze=False)
    for line, (pairs, link, what) in zip(panels, lines, strict=True):
        for axes, mix in zip(line, MIXES, strict=True):
            ratios = [
                [_ratio(found[mix, pairs, link, prefill, decode], what) for prefill in SPEEDS] for decode in SPEEDS
            ]
            _panel(axes, ratios, higher_is_better=what == "goodput")
            machines = f"{pairs}P+{pairs}D over {2 * pairs} coupled"
            name = "goodput" if what == "goodput" else f"TBT p99 at {TBT_LOAD:.0%} load"
            axes.set_title(f"{mix}: {name}\n{machines}, link {link:,} ×", fontsize=8)
        line[0].set_ylabel("decode speed, ×", fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("prefill speed, ×", fontsize=8)
    save(figure, options.target)


def _ratio(rows: list[dict[str, Any]], what: str) -> float:
    if what == "goodput":
        return ratio(rows)
    (row,) = [row for row in rows if row["load"] == TBT_LOAD]
    return float(row["apart_tbt_p99_s"] / row["coupled_tbt_p99_s"])


def _panel(axes: Any, ratios: list[list[float]], higher_is_better: bool) -> None:
    # Green is always where apart is better.
    colours = "PiYG" if higher_is_better else "PiYG_r"
    axes.imshow(ratios, cmap=colours, norm=TwoSlopeNorm(1.0, 0.0, 2.0), origin="lower", aspect="auto", alpha=0.85)
    for y, line in enumerate(ratios):
        for x, one in enumerate(line):
            wins = one > WIN if higher_is_better else one < 1.0
            weight, colour = "bold" if wins else "normal", "black" if 0.3 < one < 1.7 else "white"
            axes.text(
                x,
                y,
                f"{one:.2f}",
                ha="center",
                va="center",
                fontsize=6.5,
                weight=weight,
                color=colour if one == one else "black",
            )
    ticks = [f"{speed:,}" for speed in SPEEDS]
    axes.set_xticks(range(len(SPEEDS)), ticks, fontsize=7)
    axes.set_yticks(range(len(SPEEDS)), ticks, fontsize=7)
    axes.grid(False)


if __name__ == "__main__":
    main()
