"""Drawings of the Cake paper's figures."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from skymemory_lab.reproduce.cake import CODECS, FIGURES, Reproduction
from skymemory_lab.view.drawing import (
    BLUE,
    GREEN,
    GREY,
    INK,
    PAPER,
    RED,
    ROW_IN,
    WIDE_IN,
    Exhibit,
    Numbers,
    fill_table,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS = (("compute_s", "compute alone", RED), ("load_s", "I/O alone", BLUE), ("cake_s", "Cake", GREEN))
_GRAINS = {"512": (GREEN, "o"), "128": (BLUE, "s"), "none": (GREY, "")}
Record = dict[str, Any]


def _records(result: Reproduction) -> list[Record]:
    return [dict(zip(result.header, row, strict=True)) for row in result.rows]


def log_seconds(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())


def _bars(axes: Axes, places: list[float], records: list[Record]) -> None:
    for offset, (key, label, colour) in enumerate(_KINDS):
        at = [place + (offset - 1) * 0.28 for place in places]
        axes.bar(at, [record[key] for record in records], 0.27, color=colour, label=label)
    # Logarithmic: at a tenth of the GPU and 2000 Mbit/s the bars differ by more than a factor of ten.
    log_seconds(axes)
    axes.grid(axis="x", visible=False)


def _workflow(result: Reproduction) -> Figure:
    from matplotlib.patches import FancyArrowPatch, Rectangle

    figure = new_figure(WIDE_IN, ROW_IN * (len(result.rows) + 2.2) + 2.0)
    flow, under = figure.subplots(2, 1, height_ratios=(1.15, 1.0 + 0.12 * len(result.rows)))
    phases = (
        ("request", "a prompt's\ntokens", PAPER),
        ("lookup", "longest prefix\nwith KV in store", PAPER),
        ("load KV", "Cake: load the end,\ncompute the front", "#d6e6f0"),
        ("prefill", "tokens behind\nthe prefix", PAPER),
        ("decode", "token by\ntoken", PAPER),
    )
    for at, (name, words, colour) in enumerate(phases):
        x = at * 2.5
        flow.add_patch(Rectangle((x, 0), 2.0, 1.5, facecolor=colour, edgecolor=INK, linewidth=0.8))
        flow.text(x + 1.0, 1.15, name, ha="center", va="center", fontweight="bold", fontsize=8)
        flow.text(x + 1.0, 0.52, words, ha="center", va="center", fontsize=7, linespacing=1.3)
        if at:
            flow.add_patch(FancyArrowPatch((x - 0.5, 0.75), (x, 0.75), arrowstyle="-|>", mutation_scale=8, color=INK))
    flow.set_xlim(-0.05, 12.05)
    flow.set_ylim(-0.1, 1.6)
    flow.axis("off")
    flow.set_title("(a) phases of a request; the KV cache is found on a disk, or over the network")
    heads = ("KV cache on", "GB/s", "load alone, s", "compute alone, s", "Cake, s", "computed, %")
    rows = [
        (r["device"], r["gb_per_s"], r["load_s"], r["compute_s"], r["cake_s"], 100 * r["computed_share"])
        for r in _records(result)
    ]
    fill_table(under, heads, [(row[0], row[1], *(float(f"{value:.3g}") for value in row[2:])) for row in rows])
    under.set_title("(b) the phase in blue, 32k tokens of LongAlpaca-7B on an A100, by our loader")
    return figure


def _equivalent_bandwidth(result: Reproduction) -> Figure:
    figure = new_figure(WIDE_IN, 3.2)
    axes = figure.add_subplot()
    records = list(reversed(_records(result)))
    names = [r["source"] if r["model"] == "any" else f"{r['model']} on {r['source']}" for r in records]
    colours = [BLUE if r["model"] == "any" else RED for r in records]
    axes.barh(names, [r["gb_per_s"] for r in records], color=colours)
    axes.set_xlabel("GB/s of KV cache, computed (red) or loaded (blue)")
    axes.grid(axis="y", visible=False)
    return figure


def _steps(result: Reproduction) -> Figure:
    figure = new_figure(5.2, 3.2)
    axes = figure.add_subplot()
    records = _records(result)
    at = [r["chunk"] for r in records]
    axes.plot(at, [r["a100_ms"] for r in records], color=RED, label="A100")
    axes.plot(at, [r["h100_ms"] for r in records], color=BLUE, label="H100")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("chunk of 512 tokens")
    axes.set_ylabel("step, ms")
    # A second axis: the cache grows linearly, so late steps favour loading and early steps computing.
    memory: Any = axes.twinx()
    memory.plot(at, [r["kv_gb"] for r in records], color=GREY, linestyle=":", label="KV cache (right)")
    memory.set_ylabel("KV cache, GB")
    memory.set_ylim(bottom=0)
    memory.grid(visible=False)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


_STAGES = 8


def _meeting(result: Reproduction) -> Figure:
    from matplotlib.patches import Rectangle

    records = _records(result)
    end_s = max(r["ready_s"] for r in records)
    figure = new_figure(WIDE_IN, 3.0)
    axes = figure.add_subplot()
    for stage in range(_STAGES):
        by_s = end_s * stage / (_STAGES - 1)
        for r in records:
            ready = r["ready_s"] <= by_s * (1 + 1e-9)
            colour = PAPER if not ready else RED if r["origin"] == "computed" else BLUE
            axes.add_patch(Rectangle((r["chunk"], stage), 0.86, 0.62, facecolor=colour, edgecolor=GREY, linewidth=0.5))
    for colour, words in ((RED, "computed"), (BLUE, "loaded"), (PAPER, "not there yet")):
        axes.add_patch(Rectangle((0, 0), 0, 0, facecolor=colour, edgecolor=GREY, linewidth=0.5, label=words))
    axes.set_xlim(-0.3, len(records) + 0.2)
    axes.set_ylim(_STAGES - 0.2, -0.2)
    axes.set_yticks(
        [stage + 0.31 for stage in range(_STAGES)],
        [f"{end_s * stage / (_STAGES - 1) * 1e3:,.0f} ms" for stage in range(_STAGES)],
    )
    labelled = range(0, len(records), 4)
    axes.set_xticks([chunk + 0.43 for chunk in labelled], [str(chunk + 1) for chunk in labelled])
    axes.tick_params(length=0)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel("chunk of 512 tokens; 16k tokens on an A100, 10,000 Mbit/s")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _whole_gpu(result: Reproduction) -> Figure:
    figure = new_figure(WIDE_IN, 5.4)
    top, bottom = figure.subplots(2, 2)
    records = _records(result)
    for axes, gpu in zip(top, ("A100", "H100"), strict=True):
        mine = [r for r in records if r["panel"] == "a" and r["gpu"] == gpu]
        _bars(axes, [float(at) for at in range(len(mine))], mine)
        axes.set_xticks(range(len(mine)), [f"{r['mbit_per_s']:,}\nMbit/s" for r in mine])
        axes.set_ylabel("time to first token, s")
        axes.set_title(f"(a) {gpu}, 32k tokens")
    for grain, (colour, marker) in _GRAINS.items():
        line = [r for r in records if r["panel"] == "b" and r["chunk_tokens"] == grain]
        at, name = [r["tokens"] / 1024 for r in line], "no chunks" if grain == "none" else f"chunks of {grain}"
        style: Record = {"color": colour, "marker": marker, "label": name}
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
    rates = sorted({r["mbit_per_s"] for r in records})
    figure = new_figure(WIDE_IN, 2.9 * len(lengths) + 0.5)
    panels = figure.subplots(len(lengths), len(shares), squeeze=False, sharey="row")
    for row, tokens in zip(panels, lengths, strict=True):
        for axes, share in zip(row, shares, strict=True):
            mine = {(r["mbit_per_s"], r["codec"]): r for r in records if r["tokens"] == tokens and r["share"] == share}
            places = {
                (rate, codec): at * (len(CODECS) + 0.8) + inner
                for at, rate in enumerate(rates)
                for inner, codec in enumerate(CODECS)
            }
            _bars(axes, list(places.values()), [mine[key] for key in places])
            axes.set_xticks(list(places.values()), [codec for _, codec in places], rotation=90, fontsize=7)
            axes.tick_params(axis="x", length=0)
            for rate in rates:
                middle = places[rate, "8 bit"]
                words = f"{rate // 1000} Gbit/s"
                axes.annotate(
                    words,
                    (middle, 0),
                    (0, -44),
                    xycoords=("data", "axes fraction"),
                    textcoords="offset points",
                    ha="center",
                    va="top",
                    fontsize=7,
                )
            axes.set_title(f"{tokens // 1024}k tokens, {float(share):.0%} of an A100".replace("%", " %"))
        row[0].set_ylabel("time to first token, s")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _overhead(result: Reproduction) -> Figure:
    figure = new_figure(WIDE_IN, 3.0)
    records = _records(result)
    for axes, gpu in zip(figure.subplots(1, 2), ("A100", "H100"), strict=True):
        mine = [r for r in records if r["gpu"] == gpu]
        at = [r["chunk"] for r in mine]
        axes.plot(at, [r["without_ms"] for r in mine], color=RED, label="without Cake")
        axes.plot(at, [r["with_ms"] for r in mine], "x", color=INK, label="with Cake")
        axes.set_title(gpu)
        axes.set_xlabel("chunk of 512 tokens")
        axes.set_ylabel("step, ms")
        axes.set_ylim(bottom=0)
        axes.legend()
    return figure


_DRAWINGS: dict[int, Callable[[Reproduction], Figure]] = {
    1: _workflow,
    2: _equivalent_bandwidth,
    3: _steps,
    4: _meeting,
    5: _whole_gpu,
    6: _part_of_gpu,
    7: _overhead,
    8: _part_of_gpu,
}
TITLES: dict[int, str] = {
    1: "Workflow with a prefix cache",
    2: "Equivalent bandwidth of computing",
    3: "Time of a prefill step",
    4: "Computed from the front, loaded from the back",
    5: "Whole GPUs",
    6: "14k tokens on a part of an A100",
    7: "Overhead, measured on this computer",
    8: "9k and 14k tokens on a part of an A100",
}


def exhibit_of(result: Reproduction) -> Exhibit:

    def draw() -> Figure:
        figure = _DRAWINGS[result.figure](result)
        figure.suptitle(f"Cake, figure {result.figure}. {result.title}", color=INK)
        return figure

    title = f"Figure {result.figure}. {TITLES[result.figure]}"
    return Exhibit(f"cake-{result.figure:02d}", title, draw, lambda: Numbers(result.header, result.rows))


@cache
def _computed(number: int) -> Exhibit:
    return exhibit_of(FIGURES[number]())


def _later(number: int) -> Exhibit:
    """Return an exhibit computed when drawn."""
    return Exhibit(
        f"cake-{number:02d}",
        f"Figure {number}. {TITLES[number]}",
        lambda: _computed(number).draw(),
        lambda: _computed(number).numbers(),
    )


CAKE: dict[int, Exhibit] = {number: _later(number) for number in FIGURES}
