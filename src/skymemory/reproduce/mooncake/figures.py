"""Drawings and CSV files of Mooncake's experiments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.reproduce.mooncake.base import Experiment
from skymemory.view.drawing import INK, new_figure, save, save_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RED, BLUE, GREEN, GREY, AMBER = "#d1495b", "#2e6f95", "#1f8a4c", "#93a1ad", "#f5a94e"
Record = dict[str, Any]


def write_mooncake_csv(experiment: Experiment, folder: Path) -> Path:
    """Writes an experiment's data as CSV."""
    return save_csv(folder / f"mooncake-{experiment.name}.csv", experiment.header, experiment.rows)


def write_mooncake_figure(experiment: Experiment, folder: Path) -> Path | None:
    """Writes the drawing as PNG; None if there is none. Raises ``MissingExtra`` without matplotlib."""
    draw = _DRAWINGS.get(experiment.name)
    if draw is None:
        return None
    figure = draw(experiment)
    for axes in figure.get_axes():
        axes.set_axisbelow(True)
    figure.suptitle(f"{experiment.title}\n({experiment.published_as}; {experiment.source})", color=INK, fontsize=10)
    return save(figure, folder / f"mooncake-{experiment.name}.png")


def _records(experiment: Experiment) -> list[Record]:
    return [dict(zip(experiment.header, row, strict=True)) for row in experiment.rows]


def _popularity(experiment: Experiment) -> Figure:
    figure = new_figure(6.5, 4.0)
    axes = figure.add_subplot()
    ranks, uses = experiment.series["uses"]
    axes.loglog(ranks, uses, color=BLUE)
    axes.set_xlabel("blocks, the most popular first")
    axes.set_ylabel("prompts that have it")
    return figure


def _hits(experiment: Experiment) -> Figure:
    figure = new_figure(6.5, 4.0)
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
    figure = new_figure(6.5, 4.0)
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
    figure = new_figure(8.0, 3.8)
    left, right = figure.subplots(1, 2)
    records = _records(experiment)[:4]
    published = [one.published for one in experiment.values[:4]]
    at = range(len(records))
    left.bar([x - 0.2 for x in at], published, 0.38, color=GREY, label="published")
    left.bar([x + 0.2 for x in at], [r["mean_ttft_s"] for r in records], 0.38, color=GREEN, label="ours")
    right.bar(list(at), [100 * r["token_hits"] for r in records], 0.6, color=BLUE)
    for axes, label in ((left, "mean TTFT, s"), (right, "tokens that hit, %")):
        axes.set_xticks(list(at), [str(r["scheduler"]) for r in records], rotation=15, fontsize=8)
        axes.set_ylabel(label)
    # Logarithmic: random is several times slower than the others, whose order is what counts.
    left.set_yscale("log")
    left.set_ylim(bottom=0.5)
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("")
    left.legend()
    return figure


def _bandwidth(experiment: Experiment) -> Figure:
    figure = new_figure(6.5, 4.0)
    axes = figure.add_subplot()
    records = _records(experiment)
    at = [r["gbit_per_s"] for r in records]
    axes.plot(at, [r["mean_ttft_s"] for r in records], "o-", color=GREEN, label="KVCache-centric, mean")
    axes.plot(at, [r["p90_ttft_s"] for r in records], "o:", color=GREEN, label="KVCache-centric, p90")
    axes.plot(at, [r["cache_aware_mean_ttft_s"] for r in records], "s-", color=GREY, label="cache-aware, mean")
    axes.set_xscale("log")
    axes.set_xticks(at, [str(value) for value in at])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("network of each node, Gbit/s")
    axes.set_ylabel("TTFT, s")
    axes.legend()
    return figure


def _ratio(experiment: Experiment) -> Figure:
    records = _records(experiment)
    kinds = list(dict.fromkeys(r["decoding"] for r in records))
    figure = new_figure(4.0 * len(kinds), 3.8)
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        rates = list(dict.fromkeys(r["rate"] for r in records))
        for rate, colour in zip(rates, (GREEN, BLUE, RED), strict=False):
            mine = [r for r in records if r["decoding"] == kind and r["rate"] == rate]
            names = [f"{r['prefill']}P+{r['decode']}D" for r in mine]
            axes.plot(names, [r["met"] for r in mine], "o-", color=colour, label=f"rate × {rate:g}", markersize=4)
        axes.set_title(f"decoding {kind}", fontsize=9)
        axes.set_ylabel("requests within both SLOs")
        axes.tick_params(axis="x", labelrotation=30, labelsize=8)
        axes.legend(fontsize=8)
    return figure


# One panel for each reading of the TBT and each decode model; bars are systems.
def _capacities(experiment: Experiment) -> Figure:
    records = _records(experiment)
    workloads, kinds, rules, names = (
        list(dict.fromkeys(str(r[key]) for r in records)) for key in ("workload", "decoding", "rule", "system")
    )
    figure = new_figure(4.6 * len(rules), 3.2 * len(kinds))
    panels = figure.subplots(len(kinds), len(rules), sharey="col", squeeze=False)
    for row, kind in zip(panels, kinds, strict=True):
        for axes, rule in zip(row, rules, strict=True):
            panel = [r for r in records if r["decoding"] == kind and r["rule"] == rule]
            for offset, (name, colour) in enumerate(zip(names, (BLUE, GREY, AMBER, GREEN), strict=True)):
                mine = {r["workload"]: r["requests_per_s"] for r in panel if r["system"] == name}
                at = [x + (offset - len(names) / 2) * 0.19 for x in range(len(workloads))]
                axes.bar(at, [mine[one] for one in workloads], 0.18, color=colour, label=name)
            axes.set_xticks(range(len(workloads)), workloads, fontsize=7)
            axes.set_title(f"decoding {kind}; TBT: {rule}", fontsize=9)
            axes.set_ylabel("requests/s within both SLOs", fontsize=8)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(names), fontsize=8)
    return figure


def _real(experiment: Experiment) -> Figure:
    records = _records(experiment)
    kinds = list(dict.fromkeys(r["decoding"] for r in records))
    names = list(dict.fromkeys(r["system"] for r in records))
    figure = new_figure(8.0, 6.0)
    left, *others = figure.subplots(2, (len(kinds) + 2) // 2).flat
    width = 0.8 / len(kinds)
    for offset, (kind, colour) in enumerate(zip(kinds, (GREEN, BLUE, GREY), strict=True)):
        mine = {r["system"]: r["rate"] for r in records if r["decoding"] == kind and r["what"] == "capacity"}
        at = [x + (offset - (len(kinds) - 1) / 2) * width for x in range(len(names))]
        left.bar(at, [mine[name] for name in names], 0.95 * width, color=colour, label=f"decoding {kind}")
    left.set_xticks(range(len(names)), names, rotation=15, fontsize=6)
    left.set_ylabel("rate with both SLOs for 90 %, × the trace", fontsize=8)
    left.legend(fontsize=7)
    for axes, kind in zip(others, kinds, strict=True):
        measured = [r for r in records if r["what"] == "measured" and r["decoding"] == kind]
        for name, colour in zip(dict.fromkeys(r["system"] for r in measured), (GREEN, RED, AMBER), strict=True):
            shown = [r for r in measured if r["system"] == name]
            rates = [r["rate"] for r in shown]
            axes.plot(rates, [100 * r["tbt_met"] for r in shown], "o-", color=colour, label=name)
            axes.plot(rates, [100 * r["longest_tbt_met"] for r in shown], "o:", color=colour)
        axes.set_ylim(0, 102)
        axes.set_ylabel("TBT met, %: mean (line), longest (dotted)", fontsize=8)
        axes.set_xlabel(f"times the trace's rate (decoding {kind})", fontsize=8)
        axes.legend(fontsize=7)
    return figure


def _rejections(experiment: Experiment) -> Figure:
    records = _records(experiment)
    situations = list(dict.fromkeys(str(r["situation"]) for r in records))
    figure = new_figure(9.0, 3.2 * len(situations))
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
            axes.set_title(f"{situation}: {title}", fontsize=9)
            axes.tick_params(axis="x", labelrotation=30, labelsize=7)
    panels[0][0].legend(fontsize=7)
    return figure


def _swings(experiment: Experiment) -> Figure:
    shown = [name for name in experiment.series if name.startswith("decode short, vllm") and not name.endswith(" all")]
    figure = new_figure(9.0, 1.9 * len(shown))
    for axes, name in zip(figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0], shown, strict=True):
        times_s, prefill, decode = experiment.series[name]
        # The first twenty minutes: later swings repeat, and would be too narrow to see.
        inside = [at for at, time_s in enumerate(times_s) if time_s <= 1_200]
        minutes = [times_s[at] / 60 for at in inside]
        axes.plot(minutes, [prefill[at] for at in inside], color=RED, lw=0.9, label="prefill")
        axes.plot(minutes, [decode[at] for at in inside], color=BLUE, lw=0.9, label="decode")
        axes.set_title(name, fontsize=9)
        axes.set_ylabel("load, of the SLO", fontsize=8)
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
