"""Draw the result of `host_tier.py`, one client: `python benchmarks/plot_host_tier.py [SOURCE [TARGET]]`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib.ticker import LogLocator, NullFormatter

from skymemory_lab.view.drawing import new_figure, save

DOCS = Path(__file__).parents[1] / "docs"
LINES = {
    "host_us": ("host tier", "#1f8a4c", "-"),
    "in_place_us": ("host tier, in place", "#1f8a4c", "--"),
    "copy_us": ("copy", "#22303c", ":"),
    "Redis_us": ("Redis", "#d1495b", "-"),
    "memcached_us": ("memcached", "#93a1ad", "-"),
    "LMCache_us": ("LMCache", "#8a6fb0", "-"),
}
"""By the field of a row: label, colour, style."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, nargs="?", default=DOCS / "benchmarks" / "host_tier.json")
    parser.add_argument("target", type=Path, nargs="?", default=DOCS / "figures" / "host-tier.svg")
    options = parser.parse_args()
    rows = [row for row in json.loads(options.source.read_text("utf-8"))["rows"] if row["clients"] == 1]
    rows.sort(key=lambda row: int(row["size_bytes"]))
    figure = new_figure(7.0, 3.4)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, verb in zip(panels, ("read", "write"), strict=True):
        for field, (label, colour, style) in LINES.items():
            points = [(row["size_bytes"], row[field]) for row in rows if row["verb"] == verb and row.get(field)]
            if points:
                wide = 2.2 if field == "host_us" else 1.2
                axes.plot(*zip(*points, strict=True), "o", ls=style, color=colour, lw=wide, markersize=3.5, label=label)
        axes.set_title(verb)
        axes.set_xscale("log", base=2)
        ticks = sorted({row["size_bytes"] for row in rows})
        axes.set_xticks(ticks, [f"{tick / 1e6:.2g}" for tick in ticks], minor=False)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator())
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("value, MB")
    panels[0].set_ylabel("µs")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(LINES))
    save(figure, options.target)


if __name__ == "__main__":
    main()
