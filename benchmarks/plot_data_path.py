"""Draw the result of `data_path.py sizes`: `python benchmarks/plot_data_path.py [SOURCE [TARGET]]`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.ticker import LogLocator, NullFormatter

from skymemory_lab.view.drawing import new_figure, save

DOCS = Path(__file__).parents[1] / "docs"
COLOURS = {
    "Redis": "#d1495b",
    "memcached": "#93a1ad",
    "LMCache": "#8a6fb0",
    "Mooncake": "#f5a94e",
    "by size": "#1f8a4c",
    "on ten": "#2e6f95",
}
Row = dict[str, Any]
PANELS: tuple[tuple[str, str, Callable[[Row], bool]], ...] = (
    ("one client", "size_bytes", lambda row: row["clients"] == 1),
    ("8 clients", "size_bytes", lambda row: row["clients"] == 8),
    ("values of 66 KB", "clients", lambda row: row["size_bytes"] == 64 << 10),
    ("values of 2.9 MB", "clients", lambda row: row["size_bytes"] == 480 * 6144),
)
"""Title, what runs along, which rows."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, nargs="?", default=DOCS / "benchmarks" / "data_path.json")
    parser.add_argument("target", type=Path, nargs="?", default=DOCS / "figures" / "data-path.svg")
    options = parser.parse_args()
    rows = [row for row in json.loads(options.source.read_text("utf-8"))["rows"] if row["section"] == "sizes"]
    wanted = [panel for panel in PANELS if any(panel[2](row) for row in rows)]
    figure = new_figure(3.0 * len(wanted), 5.6)
    panels = figure.subplots(2, len(wanted), squeeze=False)
    drawn = {row["path"] for row in rows}
    for verb, line in zip(("read", "write"), panels, strict=True):
        for axes, (title, along, shown) in zip(line, wanted, strict=True):
            for path, colour in COLOURS.items():
                if path not in drawn:
                    continue
                mine = [row for row in rows if (row["path"], row["verb"]) == (path, verb) and shown(row)]
                wide = 2.2 if path == "by size" else 1.2
                rates = [row["mb_per_s"] for row in mine]
                axes.plot([row[along] for row in mine], rates, "o-", color=colour, lw=wide, markersize=3.5, label=path)
            axes.set_title(f"{verb}, {title}")
            axes.set_xscale("log", base=2)
            ticks = sorted({row[along] for row in rows if shown(row)})
            axes.set_xticks(
                ticks, [str(tick) if along == "clients" else f"{tick / 1e6:.2g}" for tick in ticks], minor=False
            )
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        line[0].set_ylabel("MB/s")
    for axes, (_, along, _) in zip(panels[-1], wanted, strict=True):
        axes.set_xlabel("clients" if along == "clients" else "value, MB")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS))
    save(figure, options.target)


if __name__ == "__main__":
    main()
