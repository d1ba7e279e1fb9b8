"""Pictures of the tables of `cluster.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skymemory_lab.view.drawing import new_figure, save

COLOURS = ("#93a1ad", "#f5a94e", "#2e6f95", "#1f8a4c", "#d1495b")


def draw(found: dict[str, Any], folder: Path) -> Iterator[Path]:
    """One for each part that was run."""
    if "schedulers" in found:
        yield _schedulers(found["schedulers"], folder / "cluster-schedulers.png")
    if "admission" in found:
        yield _admission(found["admission"], folder / "cluster-admission.png")


def _schedulers(rows: list[dict[str, Any]], path: Path) -> Path:
    figure = new_figure(10.0, 3.8)
    panels = figure.subplots(1, 3)
    for name, colour in zip(dict.fromkeys(row["scheduler"] for row in rows), COLOURS, strict=False):
        mine = [row for row in rows if row["scheduler"] == name]
        at = [row["rate"] for row in mine]
        wide = 2.2 if name == "kvcache-centric" else 1.2
        for axes, key, scale in zip(panels, ("ttft_mean_s", "ttft_p90_s", "token_hits"), (1, 1, 100), strict=True):
            axes.plot(at, [scale * row[key] for row in mine], "o-", color=colour, lw=wide, markersize=4, label=name)
    for axes, label in zip(panels, ("mean TTFT, s", "p90 of TTFT, s", "tokens that hit, %"), strict=True):
        axes.set_ylabel(label)
        axes.set_xlabel("times the trace's rate")
    for axes in panels[:2]:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return save(figure, path)


def _admission(rows: list[dict[str, Any]], path: Path) -> Path:
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    slos = list(dict.fromkeys(row["slo"] for row in rows))
    figure = new_figure(3.4 * len(slos), 2.6 * len(sizes))
    panels = figure.subplots(len(sizes), len(slos), squeeze=False)
    for line, size in zip(panels, sizes, strict=True):
        for axes, slo in zip(line, slos, strict=True):
            for rule, colour in zip(dict.fromkeys(row["rule"] for row in rows), COLOURS, strict=False):
                mine = [row for row in rows if (row["size"], row["slo"], row["rule"]) == (size, slo, rule)]
                axes.plot([r["rate"] for r in mine], [r["met"] for r in mine], "o-", color=colour, label=rule)
            axes.set_title(f"{size}, {slo}", fontsize=9)
            axes.set_ylim(bottom=0)
    for axes in panels[:, 0]:
        axes.set_ylabel("requests within both SLOs")
    for axes in panels[-1]:
        axes.set_xlabel("times the trace's rate")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return save(figure, path)
