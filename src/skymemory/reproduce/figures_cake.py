"""Drawings of the Cake paper's figures 2, 3 and 5 to 8 with our data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.reproduce.cake import Reproduction
from skymemory.view.drawing import INK, new_figure, save, save_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KINDS = (
    ("compute_s", "compute alone", "#d1495b"),
    ("load_s", "I/O alone", "#2e6f95"),
    ("cake_s", "Cake", "#1f8a4c"),
)
_GRAINS = {"512": ("#1f8a4c", "o"), "128": ("#2e6f95", "s"), "none": ("#93a1ad", "")}
Record = dict[str, Any]


def _records(result: Reproduction) -> list[Record]:
    return [dict(zip(result.header, row, strict=True)) for row in result.rows]


def _bars(axes: Any, groups: Iterable[tuple[str, Record]]) -> None:
    """Three bars per group: computing, loading, both."""
    listed = list(groups)
    for offset, (key, label, colour) in enumerate(_KINDS):
        at = [number + (offset - 1) * 0.27 for number in range(len(listed))]
        axes.bar(at, [record[key] for _, record in listed], 0.25, color=colour, label=label)
    axes.set_xticks(range(len(listed)), [name for name, _ in listed])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_axisbelow(True)
    axes.set_ylabel("time to first token, s")
    axes.grid(axis="x", visible=False)


def _equivalent_bandwidth(result: Reproduction) -> Figure:
    figure = new_figure(7.0, 4.0)
    axes = figure.add_subplot()
    records = list(reversed(_records(result)))
    names = [r["source"] if r["model"] == "any" else f"{r['model']} on {r['source']}" for r in records]
    colours = ["#2e6f95" if r["model"] == "any" else "#d1495b" for r in records]
    axes.barh(names, [r["gb_per_s"] for r in records], color=colours)
    axes.set_axisbelow(True)
    axes.set_xlabel("GB/s of KV cache, computed (red) or loaded (blue)")
    axes.grid(axis="y", visible=False)
    return figure


def _steps(result: Reproduction) -> Figure:
    figure = new_figure(7.0, 4.0)
    axes = figure.add_subplot()
    records = _records(result)
    at = [r["chunk"] for r in records]
    axes.plot(at, [r["a100_ms"] for r in records], color="#d1495b", label="A100")
    axes.plot(at, [r["h100_ms"] for r in records], color="#2e6f95", label="H100")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("chunk of 512 tokens")
    axes.set_ylabel("step, ms")
    memory: Any = axes.twinx()
    memory.plot(at, [r["kv_gb"] for r in records], color="#93a1ad", linestyle=":", label="KV cache")
    memory.set_ylabel("KV cache, GB")
    memory.grid(False)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _whole_gpu(result: Reproduction) -> Figure:
    figure = new_figure(10.0, 6.6)
    top, bottom = figure.subplots(2, 2)
    records = _records(result)
    for axes, gpu in zip(top, ("A100", "H100"), strict=True):
        mine = [r for r in records if r["panel"] == "a" and r["gpu"] == gpu]
        _bars(axes, [(f"{r['mbit_per_s']:,} Mbit/s", r) for r in mine])
        axes.set_title(f"(a) {gpu}, 32k tokens")
    for grain, (colour, marker) in _GRAINS.items():
        line = [r for r in records if r["panel"] == "b" and r["chunk_tokens"] == grain]
        at, name = [r["tokens"] / 1024 for r in line], "no chunks" if grain == "none" else f"chunks of {grain}"
        style: Record = {"color": colour, "marker": marker, "markersize": 4, "label": name}
        bottom[0].plot(at, [r["computed_share"] * 100 for r in line], **style)
        bottom[1].plot(at, [r["cake_s"] / r["compute_s"] * 100 for r in line], **style)
    for axes, title in zip(bottom, ("(b) tokens computed, %", "(b) TTFT, % of computing alone"), strict=True):
        axes.set_title(title)
        axes.set_xlabel("thousand tokens, at 10,000 Mbit/s")
        axes.set_ylim(60, 102)
        axes.legend()
    figure.legend(*top[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _part_of_gpu(result: Reproduction) -> Figure:
    records = _records(result)
    lengths = sorted({r["tokens"] for r in records})
    shares = sorted({r["share"] for r in records}, key=float)
    figure = new_figure(11.0, 3.4 * len(lengths) + 0.5)
    panels = figure.subplots(len(lengths), len(shares), squeeze=False)
    for row, tokens in zip(panels, lengths, strict=True):
        for axes, share in zip(row, shares, strict=True):
            mine = [r for r in records if r["tokens"] == tokens and r["share"] == share]
            groups = [(f"{r['mbit_per_s'] // 1000}k\n{r['codec'].replace('CacheGen', 'CG')}", r) for r in mine]
            _bars(axes, groups)
            axes.tick_params(axis="x", labelsize=7)
            axes.set_title(f"{tokens:,} tokens, {float(share):.0%} of an A100".replace("%", " %"))
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _overhead(result: Reproduction) -> Figure:
    figure = new_figure(8.0, 3.8)
    records = _records(result)
    for axes, gpu in zip(figure.subplots(1, 2), ("A100", "H100"), strict=True):
        mine = [r for r in records if r["gpu"] == gpu]
        at = [r["chunk"] for r in mine]
        axes.plot(at, [r["without_ms"] for r in mine], color="#d1495b", label="without Cake")
        axes.plot(at, [r["with_ms"] for r in mine], "x", color=INK, markersize=4, label="with Cake")
        axes.set_title(gpu)
        axes.set_xlabel("chunk of 512 tokens")
        axes.set_ylabel("step, ms")
        axes.set_ylim(bottom=0)
        axes.legend()
    return figure


_DRAWINGS: dict[int, Callable[[Reproduction], Figure]] = {
    2: _equivalent_bandwidth,
    3: _steps,
    5: _whole_gpu,
    6: _part_of_gpu,
    7: _overhead,
    8: _part_of_gpu,
}


def write_cake_csv(result: Reproduction, folder: Path) -> Path:
    """Writes a figure's data as CSV."""
    return save_csv(folder / f"cake-{result.figure:02d}.csv", result.header, result.rows)


def write_cake_figure(result: Reproduction, folder: Path) -> Path:
    """Writes the figure as PNG. Raises ``MissingExtra`` without matplotlib."""
    figure = _DRAWINGS[result.figure](result)
    figure.suptitle(f"Cake, figure {result.figure}. {result.title}", color=INK)
    return save(figure, folder / f"cake-{result.figure:02d}.png")
