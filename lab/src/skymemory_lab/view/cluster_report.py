"""A page that compares runs of a simulated cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.conductor.request import Slo
from skymemory_lab.sim.cluster.outcome import ClusterMetrics, ClusterRun, measured
from skymemory_lab.view.drawing import INK, new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#93a1ad", "#f5a94e", "#2e6f95", "#1f8a4c", "#d1495b", "#7a5195")
_ENDS = (
    ("met", "both SLOs met", "#1f8a4c"),
    ("broken", "an SLO missed", "#f5a94e"),
    ("refused", "refused on arrival", "#93a1ad"),
    ("after", "refused after prefill", "#d1495b"),
    ("failed", "failed", "#22303c"),
)


def draw_cluster_report(runs: Mapping[str, ClusterRun], slo: Slo, title: str) -> Figure:
    """Draw ``runs`` (by name) of the same requests."""
    figure = new_figure(12.0, 7.2)
    (ttft, tbt, waiting), (hits, ends, loads) = figure.subplots(2, 3)
    metrics = {name: measured(run, slo) for name, run in runs.items()}
    for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
        done = [outcome for outcome in run.outcomes if outcome.status == "completed"]
        _distribution(ttft, [outcome.ttft_s for outcome in done if outcome.ttft_s is not None], name, colour)
        _distribution(
            tbt, [1e3 * outcome.tbt_mean_s for outcome in done if outcome.tbt_mean_s is not None], name, colour
        )
        minutes = [sample.t_s / 60 for sample in run.loads]
        waiting.plot(minutes, [sample.waiting for sample in run.loads], color=colour, lw=0.9, label=name)
        loads.plot(
            [sample.prefill for sample in run.loads], [sample.decode for sample in run.loads], ".", color=colour, ms=2
        )
    # Distributions on a logarithmic axis: queues stretch the tail by factors, not by seconds.
    for axes, promised, label in ((ttft, slo.ttft_s, "TTFT, s"), (tbt, 1e3 * slo.tbt_s, "a request's mean TBT, ms")):
        axes.axvline(promised, color=INK, linestyle=":", lw=1)
        axes.set_xscale("log")
        axes.set_xlabel(f"{label} (dotted: SLO)")
        axes.set_ylabel("completed requests, %")
        axes.set_ylim(0, 101)
    waiting.set_xlabel("minutes")
    waiting.set_ylabel("requests that wait for prefill")
    loads.set_xlabel("load of prefill, of its SLO")
    loads.set_ylabel("load of decode, of its SLO")
    _stacked_hits(hits, metrics)
    _stacked_ends(ends, metrics)
    figure.legend(*ttft.get_legend_handles_labels(), loc="outside lower center", ncols=len(runs))
    figure.suptitle(title, color=INK)
    return figure


def write_cluster_report(runs: Mapping[str, ClusterRun], slo: Slo, title: str, path: Path) -> Path:
    """Write a PNG, SVG or PDF file, by suffix.

    Raises:
        InvalidInput: another suffix.
        MissingExtra: matplotlib is not installed.
    """
    return save(draw_cluster_report(runs, slo, title), path)


def _distribution(axes: Any, values: Sequence[float], name: str, colour: str) -> None:
    ordered = sorted(value for value in values if value > 0)
    parts = [100 * (at + 1) / len(ordered) for at in range(len(ordered))]
    axes.plot(ordered, parts, color=colour, lw=1.4, label=name)


def _stacked_hits(axes: Any, metrics: Mapping[str, ClusterMetrics]) -> None:
    sources = sorted(
        {source for result in metrics.values() for source in result.hits.tokens_by_source}, key=_nearest_first
    )
    below = [0.0] * len(metrics)
    for source, colour in zip(sources, ("#1f8a4c", "#2e6f95", "#f5a94e", "#7a5195"), strict=False):
        parts = [100 * result.hits.tokens_by_source.get(source, 0.0) for result in metrics.values()]
        axes.bar(list(metrics), parts, bottom=below, color=colour, label=source)
        below = [low + part for low, part in zip(below, parts, strict=True)]
    axes.set_ylabel("tokens not computed, %, by where they were")
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", labelsize=7, labelrotation=15)
    axes.legend(fontsize=7)


def _stacked_ends(axes: Any, metrics: Mapping[str, ClusterMetrics]) -> None:
    below = [0] * len(metrics)
    for key, label, colour in _ENDS:
        counts = [_count(result, key) for result in metrics.values()]
        if any(counts):
            axes.bar(list(metrics), counts, bottom=below, color=colour, label=label)
            below = [low + count for low, count in zip(below, counts, strict=True)]
    axes.set_ylabel("requests")
    axes.set_ylim(0, 1.3 * max(below))
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", labelsize=7, labelrotation=15)
    axes.legend(fontsize=7, loc="upper right", ncols=2)


def _count(result: ClusterMetrics, key: str) -> int:
    return {
        "met": result.met,
        "broken": result.completed - result.met,
        "refused": result.refused,
        "after": result.refused_after_prefill,
        "failed": result.failed,
    }[key]


# The lowest part of the bars is the source that costs nothing to fetch.
def _nearest_first(source: str) -> tuple[int, str]:
    return (0 if source == "local" else 1, source)
