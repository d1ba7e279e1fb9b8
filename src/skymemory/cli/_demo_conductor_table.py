"""What the conductor's demo shows: a line for each scheduler as it runs, and the table when all is over."""

from __future__ import annotations

import math
from collections.abc import Sequence

from skymemory.sim.cluster.metrics import ClusterMetrics
from skymemory.sim.cluster.moments import Moment

WIDTH = 118
LATELY = 100
"""First tokens over whose times the mean of the moment is taken."""
_BARS = " ▁▂▃▄▅▆▇█"
_LINE_STEP, _BATCH_STEP = 2, 1
"""Requests of one step of a bar."""


def frame(names: Sequence[str], moments: Sequence[Moment], now_s: float, speed: float) -> list[str]:
    """The moment: lines before the machines that prefill, batches of those that decode, and counts up to now."""
    head = (
        f"{'scheduler':<16} {'in line':<9} {'waiting':>7}  {'batches':<9} {'done':>6} {'within':>7} {'refused':>8}"
        f" {'TTFT now':>9} {'hits':>6} {'moved':>6}"
    )
    return [
        f"{now_s / 60:5.1f} min, {speed:.0f} times as fast as it would be; {moments[0].arrived:,} requests have come",
        head,
        *(_row(name, moment) for name, moment in zip(names, moments, strict=True)),
    ]


def line(names: Sequence[str], moments: Sequence[Moment], now_s: float) -> list[str]:
    """The moment in words, for a log."""
    parts = [f"{now_s:.0f} s: {moments[0].arrived} came"]
    for name, moment in zip(names, moments, strict=True):
        refused = moment.refused + moment.refused_after_prefill
        parts.append(
            f"{name} {sum(moment.waiting)} waiting, {moment.completed} done, {refused} refused, "
            f"TTFT {_seconds(_lately_s(moment))}, hits {moment.hits:.0%}"
        )
    return parts


def final(names: Sequence[str], metrics: Sequence[ClusterMetrics]) -> list[str]:
    lines = [
        "",
        f"{'scheduler':<16} {'done':>6} {'refused':>8} {'within both':>12} {'goodput':>9} {'TTFT mean':>10} {'p90':>8}"
        f" {'p99':>8} {'TBT p90':>8} {'hits':>6}  from where",
    ]
    for name, one in zip(names, metrics, strict=True):
        sources = ", ".join(f"{source} {part:.0%}" for source, part in one.hits.tokens_by_source.items() if part)
        lines.append(
            f"{name:<16} {one.completed:>6,} {one.refused + one.refused_after_prefill:>8,} {one.attainment:>12.1%}"
            f" {one.goodput_per_s:>7.2f}/s {_seconds(one.ttft_s.mean):>10} {_seconds(one.ttft_s.p90):>8}"
            f" {_seconds(one.ttft_s.p99):>8} {_milliseconds(one.tbt_request_s.p90):>8} {one.hits.tokens:>6.0%}"
            f"  {sources}"
        )
    return lines


def _row(name: str, moment: Moment) -> str:
    refused = moment.refused + moment.refused_after_prefill
    here = f"{_bars(moment.waiting, _LINE_STEP)} {sum(moment.waiting):>8}  {_bars(moment.decoding, _BATCH_STEP)}"
    counts = f"{moment.completed:>7,} {_share(moment):>7} {refused:>8,} {_seconds(_lately_s(moment)):>9}"
    return f"{name:<16} {here} {counts} {moment.hits:>6.0%} {moment.loaded:>6.0%}"


def _share(moment: Moment) -> str:
    over = moment.completed + moment.refused + moment.refused_after_prefill + moment.failed
    return f"{moment.met / over:.0%}" if over else "-"


def _lately_s(moment: Moment) -> float:
    late = moment.ttft_s[-LATELY:]
    return sum(late) / len(late) if late else math.nan


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def _milliseconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value * 1e3:.0f} ms"


def _bars(counts: Sequence[int], step: int) -> str:
    """A bar for each machine; nothing where nobody is, eight steps at most."""
    return "".join(_BARS[min(8, -(-count // step))] for count in counts)
