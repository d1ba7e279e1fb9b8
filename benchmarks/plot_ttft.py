"""Draw the result of ``ttft.py``: `python benchmarks/plot_ttft.py`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, nargs="?", default=DOCS / "benchmarks" / "ttft.json")
    parser.add_argument("target", type=Path, nargs="?", default=DOCS / "figures" / "ttft.png")
    options = parser.parse_args()
    rows = [row for row in json.loads(options.source.read_text("utf-8"))["rows"] if row["delay"] == "real"]
    figure, axes = plt.subplots(figsize=(7.2, 3.4), dpi=110)
    places = range(len(rows))
    axes.barh([at + 0.2 for at in places], [row["without_s"] for row in rows], 0.38, color="#9aa4b2", label="computed")
    axes.barh([at - 0.2 for at in places], [row["with_s"] for row in rows], 0.38, color="#1f6feb", label="from the sky")
    for at, row in enumerate(rows):
        axes.text(row["without_s"] * 1.06, at + 0.2, f"{row['without_s']:.1f} s", va="center", fontsize=9)
        words = f"{row['with_s'] * 1e3:.0f} ms  ({row['share']:.1%})"
        axes.text(row["with_s"] * 1.06, at - 0.2, words, va="center", fontsize=9, color="#1f6feb")
    axes.set_yticks(list(places), [f"{row['tokens']:,} + 16 tokens" for row in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(0.05, max(row["without_s"] for row in rows) * 3)
    axes.set_xlabel("time to first token, seconds (log)")
    axes.set_title("TinyLlama-1.1B's shape on 2 cores; 95 satellites, real delays", fontsize=10)
    axes.legend(loc="upper right", frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(options.target)


if __name__ == "__main__":
    main()
