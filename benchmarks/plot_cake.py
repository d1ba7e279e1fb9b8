"""Draw the result of ``cake.py``: `python benchmarks/plot_cake.py`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[1] / "docs"
LINES = (
    ("compute_s", "compute only", "#9aa4b2", "-", ""),
    ("load_s", "load only", "#1f6feb", "-", ""),
    ("cake_s", "both", "#d9730d", "-", "o"),
    ("hindsight_s", "best split in hindsight", "#24292f", "None", "_"),
)
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, nargs="?", default=DOCS / "benchmarks" / "cake.json")
    parser.add_argument("target", type=Path, nargs="?", default=DOCS / "figures" / "cake-cells.png")
    options = parser.parse_args()
    rows = json.loads(options.source.read_text("utf-8"))["rows"]
    lengths, shares = sorted({row["tokens"] for row in rows}), sorted({row["share"] for row in rows})
    figure, panels = plt.subplots(
        len(lengths), len(shares), figsize=(10.5, 7.2), dpi=100, sharex=True, squeeze=False, layout="constrained"
    )
    for length, line in zip(lengths, panels, strict=True):
        for share, axes in zip(shares, line, strict=True):
            cells = [row for row in rows if row["tokens"] == length and row["share"] == share]
            rates = [row["bytes_per_s"] / 1e6 for row in cells]
            times_s = [row[name] for row in cells for name, *_ in LINES]
            least, most = min(times_s) / 1.2, max(times_s) * 1.2
            for name, label, colour, style, marker in LINES:
                axes.plot(
                    rates,
                    [row[name] for row in cells],
                    linestyle=style,
                    marker=marker,
                    color=colour,
                    label=label,
                    markersize=11 if marker == "_" else 4,
                    linewidth=1.4,
                )
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xticks(rates, [f"{rate:.1f}" if rate < 10 else f"{rate:.0f}" for rate in rates], fontsize=8)
            axes.set_yticks([at for at in TICKS if least <= at <= most], minor=False)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
            axes.tick_params(labelsize=8)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(f"{length:,} tokens, {share:.0%} of each step", fontsize=9)
            if share == shares[0]:
                axes.set_ylabel("to first token, s", fontsize=9)
            if length == lengths[-1]:
                axes.set_xlabel("link, MB/s", fontsize=9)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    options.target.parent.mkdir(exist_ok=True)
    figure.savefig(options.target)
    print(options.target)


if __name__ == "__main__":
    main()
