"""Drawings and CSV files of Mooncake's experiments."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.errors import InvalidInput
from skymemory_lab.reproduce.cake_figures import log_seconds
from skymemory_lab.reproduce.mooncake.base import CAPTIONS, Experiment
from skymemory_lab.reproduce.mooncake.clusters import PUBLISHED_TTFT_S
from skymemory_lab.view.drawing import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    INK,
    RED,
    WIDE_IN,
    Exhibit,
    Numbers,
    new_figure,
    save_csv,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = dict[str, Any]
KEPT_RUN = "those of the full run kept in the repository, seed 1"
"""Source of drawings: ``skymemory reproduce mooncake --trace … --seed 1``."""
_SERIES_SECONDS = 1_200  # drawn part of the swings; later swings repeat


def write_mooncake_csv(experiment: Experiment, folder: Path) -> list[Path]:
    written = [save_csv(folder / f"mooncake-{experiment.name}.csv", experiment.header, experiment.rows)]
    if experiment.series:
        rows = (
            (name, *point) for name, columns in drawn_series(experiment).items() for point in zip(*columns, strict=True)
        )
        width = len(next(iter(experiment.series.values())))
        header = ("curve", *(f"column_{number}" for number in range(1, width + 1)))
        written.append(save_csv(folder / f"mooncake-{experiment.name}-series.csv", header, rows))
    return written


def drawn_series(experiment: Experiment) -> dict[str, tuple[tuple[float, ...], ...]]:
    """Return the curves to draw: the first 20 minutes of some swings, and only the corners of a staircase."""
    drawn: dict[str, tuple[tuple[float, ...], ...]] = {}
    for name, columns in experiment.series.items():
        if experiment.name == "swings":
            if not name.startswith("decode short, vllm") or name.endswith(" all"):
                continue
            points = [
                tuple(float(f"{value:.5g}") for value in point)  # finer than any line
                for point in zip(*columns, strict=True)
                if point[0] <= _SERIES_SECONDS
            ]
        else:
            every, last = list(zip(*columns, strict=True)), len(columns[0]) - 1
            points = [
                point
                for at, point in enumerate(every)
                if at in (0, last) or not every[at - 1][1] == point[1] == every[at + 1][1]
            ]
        drawn[name] = tuple(zip(*points, strict=True))
    return drawn


def read_experiment(name: str, folder: Path) -> Experiment:
    """Return the experiment whose CSV is in ``folder``."""
    path = folder / f"mooncake-{name}.csv"
    if not path.is_file():
        raise InvalidInput(
            f"{path}: not there; Mooncake's figures are drawn from a run's CSV, which only a checkout of the repository"
            f" has. `skymemory reproduce mooncake --fig {name} --out DIR` computes and draws it (minutes)"
        )
    with path.open(encoding="utf-8", newline="") as stream:
        header, *rows = csv.reader(stream)
    series: dict[str, list[tuple[float, ...]]] = {}
    curves = folder / f"mooncake-{name}-series.csv"
    if curves.is_file():
        with curves.open(encoding="utf-8", newline="") as stream:
            for curve, *point in list(csv.reader(stream))[1:]:
                series.setdefault(curve, []).append(tuple(map(float, point)))
    return Experiment(
        name=name,
        source=KEPT_RUN,
        assumed=(),
        header=tuple(header),
        rows=tuple(tuple(map(_value, row)) for row in rows),
        values=(),
        series={curve: tuple(zip(*points, strict=True)) for curve, points in series.items()},
    )


def _value(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text or None


def draw(experiment: Experiment) -> Figure:
    figure = _DRAWINGS[experiment.name](experiment)
    heading = f"Mooncake, {experiment.published_as}. {experiment.title}"
    width = round(14 * figure.get_size_inches()[0])  # letters of this size per line
    lines = [*textwrap.wrap(heading, width), *textwrap.wrap(f"Requests: {experiment.source}", width)]
    figure.suptitle("\n".join(lines), color=INK, fontsize=8.5)
    return figure


def exhibit_of(experiment: Experiment) -> Exhibit:
    return Exhibit(
        f"mooncake-{experiment.name}",
        _title(experiment.name),
        partial(draw, experiment),
        lambda: Numbers(experiment.header, experiment.rows),
    )


def _title(name: str) -> str:
    published_as, title = CAPTIONS[name]
    return f"{published_as}. {title}"


def kept_exhibits(folder: Path) -> dict[str, Exhibit]:
    """Return exhibits of all experiments, which read the CSV in ``folder`` when drawn."""

    def make_exhibit(name: str) -> Exhibit:
        def numbers() -> Numbers:
            experiment = read_experiment(name, folder)
            return Numbers(experiment.header, experiment.rows)

        return Exhibit(f"mooncake-{name}", _title(name), lambda: draw(read_experiment(name, folder)), numbers)

    return {name: make_exhibit(name) for name in CAPTIONS}


def _records(experiment: Experiment) -> list[Record]:
    return [dict(zip(experiment.header, row, strict=True)) for row in experiment.rows]


def _popularity(experiment: Experiment) -> Figure:
    figure = new_figure(5.2, 3.3)
    axes = figure.add_subplot()
    ranks, uses = drawn_series(experiment)["uses"]
    axes.loglog(ranks, uses, color=BLUE)
    axes.set_xlabel("blocks, the most popular first")
    axes.set_ylabel("prompts that have it")
    return figure


def _hits(experiment: Experiment) -> Figure:
    figure = new_figure(5.2, 3.3)
    axes = figure.add_subplot()
    sizes = [int(name.split()[0].replace(",", "")) for name in experiment.header[2:]]
    for row, colour in zip(experiment.rows, (RED, BLUE, GREEN, GREY), strict=False):
        parts = [100 * float(str(value)) / float(str(row[1])) for value in row[2:]]
        axes.plot(sizes, parts, "o-", color=colour, label=str(row[0]), markersize=4)
    axes.set_xscale("log")
    axes.set_ylim(0, 102)
    axes.set_xlabel("blocks of 512 tokens")
    axes.set_ylabel("hits, % of the most there is to hit")
    axes.legend()
    return figure


def _layer_wise(experiment: Experiment) -> Figure:
    figure = new_figure(5.2, 3.3)
    axes = figure.add_subplot()
    records = _records(experiment)
    at = range(len(records))
    axes.bar([x - 0.2 for x in at], [r["serial_ms"] for r in records], 0.38, color=RED, label="after the prefill")
    axes.bar([x + 0.2 for x in at], [r["layer_wise_ms"] for r in records], 0.38, color=GREEN, label="layer by layer")
    axes.set_xticks(list(at), [f"{r['thousand_tokens']}k" for r in records])
    axes.set_yscale("log")
    axes.set_xlabel("tokens")
    axes.set_ylabel("latency of storing KV, ms")
    axes.legend()
    return figure


def _scheduling(experiment: Experiment) -> Figure:
    figure = new_figure(WIDE_IN, 3.3)
    ttft_axes, hits_axes = figure.subplots(1, 2)
    records = _records(experiment)[:4]
    published = [PUBLISHED_TTFT_S[r["scheduler"]] for r in records]
    at = range(len(records))
    ttft_axes.bar([x - 0.2 for x in at], published, 0.38, color=GREY, label="published")
    ttft_axes.bar([x + 0.2 for x in at], [r["mean_ttft_s"] for r in records], 0.38, color=GREEN, label="ours")
    hits_axes.bar(list(at), [100 * r["token_hits"] for r in records], 0.6, color=BLUE)
    for axes, label in ((ttft_axes, "mean TTFT, s"), (hits_axes, "tokens that hit, %")):
        axes.set_xticks(list(at), [str(r["scheduler"]).replace("-", "-\n") for r in records], fontsize=7)
        axes.set_ylabel(label)
    # Logarithmic: random is several times slower than the other schedulers, whose order matters.
    log_seconds(ttft_axes)
    ttft_axes.set_ylim(bottom=0.5)
    ttft_axes.legend()
    return figure


def _bandwidth(experiment: Experiment) -> Figure:
    figure = new_figure(5.2, 3.3)
    axes = figure.add_subplot()
    records = _records(experiment)
    at = [r["gbit_per_s"] for r in records]
    axes.plot(at, [r["mean_ttft_s"] for r in records], "o-", color=GREEN, label="KVCache-centric, mean")
    axes.plot(at, [r["p90_ttft_s"] for r in records], "o:", color=GREEN, label="KVCache-centric, p90")
    axes.plot(at, [r["cache_aware_mean_ttft_s"] for r in records], "s-", color=GREY, label="cache-aware, mean")
    axes.set_xscale("log")
    axes.set_xticks(at, [str(value) for value in at])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("network of each node, Gbit/s")
    axes.set_ylabel("TTFT, s")
    axes.legend()
    return figure


def _ratio(experiment: Experiment) -> Figure:
    records = _records(experiment)
    kinds = list(dict.fromkeys(r["decoding"] for r in records))
    figure = new_figure(WIDE_IN, 3.3)
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        rates = list(dict.fromkeys(r["rate"] for r in records))
        for rate, colour in zip(rates, (GREEN, BLUE, RED), strict=False):
            mine = [r for r in records if r["decoding"] == kind and r["rate"] == rate]
            axes.plot(range(len(mine)), [r["met"] for r in mine], "o-", color=colour, label=f"rate × {rate:g}")
            axes.set_xticks(range(len(mine)), [f"{r['prefill']}P\n{r['decode']}D" for r in mine])
        axes.set_title(f"decoding {kind}")
        axes.set_ylabel("requests within both SLOs")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


# A panel per reading of the TBT and decode model; bars are systems.
def _capacities(experiment: Experiment) -> Figure:
    records = _records(experiment)
    workloads, kinds, rules, names = (
        list(dict.fromkeys(str(r[key]) for r in records)) for key in ("workload", "decoding", "rule", "system")
    )
    figure = new_figure(WIDE_IN, 2.3 * len(kinds) + 0.7)
    panels = figure.subplots(len(kinds), len(rules), sharey="col", squeeze=False)
    for row, kind in zip(panels, kinds, strict=True):
        for axes, rule in zip(row, rules, strict=True):
            panel = [r for r in records if r["decoding"] == kind and r["rule"] == rule]
            for offset, (name, colour) in enumerate(zip(names, (BLUE, GREY, AMBER, GREEN), strict=True)):
                mine = {r["workload"]: r["requests_per_s"] for r in panel if r["system"] == name}
                at = [x + (offset - len(names) / 2) * 0.19 for x in range(len(workloads))]
                axes.bar(at, [mine[workload] for workload in workloads], 0.18, color=colour, label=name)
            axes.set_xticks(range(len(workloads)), [workload.removeprefix("simulated-") for workload in workloads])
            axes.set_title(f"decoding {kind}; TBT: {rule}")
            axes.set_ylabel("requests/s within SLOs")
            # From 16k to 128k tokens the rates fall by a factor of thirty; no bar: none within both SLOs.
            if len(workloads) > 2:
                log_seconds(axes)
                axes.set_ylim(0.01, 5)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
    return figure


def _real(experiment: Experiment) -> Figure:
    records = _records(experiment)
    kinds = list(dict.fromkeys(r["decoding"] for r in records))
    names = list(dict.fromkeys(r["system"] for r in records))
    figure = new_figure(WIDE_IN, 5.6)
    capacity_axes, *met_axes = figure.subplots(2, (len(kinds) + 2) // 2).flat
    width = 0.8 / len(kinds)
    for offset, (kind, colour) in enumerate(zip(kinds, (GREEN, BLUE, GREY), strict=True)):
        mine = {r["system"]: r["rate"] for r in records if r["decoding"] == kind and r["what"] == "capacity"}
        at = [x + (offset - (len(kinds) - 1) / 2) * width for x in range(len(names))]
        capacity_axes.bar(at, [mine[name] for name in names], 0.95 * width, color=colour, label=kind)
    capacity_axes.set_xticks(
        range(len(names)), [name.replace(", ", ",\n").replace("20 c", "20\nc") for name in names], fontsize=7
    )
    capacity_axes.set_ylabel("× the trace's rate")
    capacity_axes.set_title("both SLOs for 90 %, by decoding")
    capacity_axes.set_ylim(0, capacity_axes.get_ylim()[1] * 1.35)
    capacity_axes.legend(ncols=2, loc="upper left", fontsize=7)
    for axes, kind in zip(met_axes, kinds, strict=True):
        measured = [r for r in records if r["what"] == "measured" and r["decoding"] == kind]
        for name, colour in zip(dict.fromkeys(r["system"] for r in measured), (GREEN, RED, AMBER), strict=True):
            points = [r for r in measured if r["system"] == name]
            rates = [r["rate"] for r in points]
            axes.plot(rates, [100 * r["tbt_met"] for r in points], "o-", color=colour, label=name)
            axes.plot(rates, [100 * r["longest_tbt_met"] for r in points], "o:", color=colour)
        axes.set_ylim(0, 102)
        axes.set_ylabel("TBT met, %")
        axes.set_xlabel("× the trace's rate")
        axes.set_title(f"decoding {kind}; dotted: longest TBT")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _rejections(experiment: Experiment) -> Figure:
    records = _records(experiment)
    situations = list(dict.fromkeys(str(r["situation"]) for r in records))
    figure = new_figure(WIDE_IN, 2.5 * len(situations) + 0.3)
    panels = figure.subplots(len(situations), 3, squeeze=False)
    for row, situation in zip(panels, situations, strict=True):
        mine = [r for r in records if r["situation"] == situation]
        names = [str(r["rule"]) for r in mine]
        row[0].bar(names, [r["refused"] for r in mine], color=GREY, label="on arrival")
        row[0].bar(
            names,
            [r["refused_after_prefill"] for r in mine],
            bottom=[r["refused"] for r in mine],
            color=RED,
            label="after prefill",
        )
        row[1].bar(names, [r["goodput_per_s"] for r in mine], color=GREEN)
        row[2].bar(names, [r["wasted_prefill_s"] for r in mine], color=AMBER)
        for axes, title in zip(row, ("rejected", "goodput, requests/s", "wasted prefill, s"), strict=True):
            axes.set_title(title)
            axes.tick_params(axis="x", labelrotation=90, labelsize=7)
        row[0].set_ylabel(situation)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _swings(experiment: Experiment) -> Figure:
    curves = drawn_series(experiment)
    figure = new_figure(WIDE_IN, 1.35 * len(curves) + 0.8)
    for axes, (name, (times_s, prefill, decode)) in zip(
        figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0], curves.items(), strict=True
    ):
        minutes = [time_s / 60 for time_s in times_s]
        axes.plot(minutes, prefill, color=RED, lw=0.9, label="prefill")
        axes.plot(minutes, decode, color=BLUE, lw=0.9, label="decode")
        axes.set_title(name)
        axes.set_ylabel("load, of SLO")
    axes.set_xlabel("minutes")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


_DRAWINGS: dict[str, Callable[[Experiment], Figure]] = {
    "popularity": _popularity,
    "hits": _hits,
    "layer-wise": _layer_wise,
    "scheduling": _scheduling,
    "bandwidth": _bandwidth,
    "ratio": _ratio,
    "datasets": _capacities,
    "simulated": _capacities,
    "real": _real,
    "rejections": _rejections,
    "swings": _swings,
}
