"""Draw the results of ``ttft.py``, a panel for each machine: `python benchmarks/plot_ttft.py`.

The picture holds the digest of its runs (key ``Source``), by which a test notices a picture older than its figures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
RUNS = [DOCS / "benchmarks" / f"{name}.json" for name in ("ttft", "ttft_xeon")]
TARGET = DOCS / "figures" / "ttft.png"


def source_digest() -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in RUNS if path.exists())).hexdigest()


def _draw(axes: Any, run: dict[str, Any]) -> None:
    rows = [row for row in run["rows"] if row["delay"] == "real"]
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
    axes.set_xlim(0.05, max(row["without_s"] for row in rows) * 6)
    versions = run["versions"]
    machine = f"{versions['cores']} cores of {versions.get('processor', 'a processor')}"
    axes.set_title(f"{machine}, {rows[0].get('dtype', 'bfloat16')}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=TARGET)
    options = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = [json.loads(path.read_text("utf-8")) for path in RUNS if path.exists()]
    figure, panels = plt.subplots(len(runs), figsize=(7.2, 2.5 * len(runs) + 0.7), dpi=110, squeeze=False)
    for axes, run in zip(panels[:, 0], runs, strict=True):
        _draw(axes, run)
    panels[0, 0].legend(loc="upper right", frameon=False, fontsize=9)
    panels[-1, 0].set_xlabel("time to first token, seconds (log)")
    figure.suptitle("TinyLlama-1.1B's shape; 95 satellites, real delays", fontsize=11)
    figure.tight_layout()
    figure.savefig(options.target, metadata={"Source": source_digest()})


if __name__ == "__main__":
    main()
