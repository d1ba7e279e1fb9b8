"""``skymemory demo conductor``: an overloaded cluster under four schedulers, side by side."""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from skymemory.conductor.admission.registry import options_of
from skymemory.conductor.cost_model import LLAMA_70B_8xA800
from skymemory.conductor.request import Slo
from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.files import check_readable
from skymemory.progress import Progress
from skymemory.router.settings import read_cost
from skymemory.text import Table, wrapped, write
from skymemory_lab.demo.estimate import format_estimate, format_took, say_estimate
from skymemory_lab.demo.resources import slowdown, usable_cores
from skymemory_lab.demo.screen import Screen
from skymemory_lab.sim.cluster.cells import ClusterCell, run_of
from skymemory_lab.sim.cluster.outcome import (
    ClusterMetrics,
    ClusterRun,
    RequestOutcome,
    keeps,
    measured,
    write_chrome_trace,
)
from skymemory_lab.sim.cluster.setup import ClusterSetup
from skymemory_lab.sim.sweeps import sweep
from skymemory_lab.sim.workload import ConversationSource
from skymemory_lab.view.drawing import drawing_path

SCHEDULERS = ("random", "load-balance", "cache-aware", "kvcache-centric")
PREFILL, DECODE = 8, 8
PLAYED_S, QUICK_PLAYED_S = 30.0, 10.0
PART, QUICK_PART = 1.0, 0.4
FRAMES_PER_S = 8.0
_SIMULATED_S = 6.0


def run_conductor(args: argparse.Namespace) -> int:
    stream = sys.stderr if args.json else sys.stdout
    if not 0.1 <= args.rate <= 20:
        raise InvalidInput(f"--rate {args.rate:g}: expected 0.1 to 20 times the workload's own")
    settings = args.settings
    if settings.trace is not None:
        check_readable(settings.trace)
    options_of(args.admission)  # refuses an unknown rule or a wrong suffix before the simulation
    charts = [path for path in args.out if path.suffix == ".json"]
    reports = [drawing_path(path) for path in args.out if path not in charts]
    # The same requests for each scheduler, so the rows differ by the scheduler alone.
    source = ConversationSource(settings.trace, settings.seed, quick=True)
    cost = LLAMA_70B_8xA800 if args.cost is None else read_cost(args.cost)
    setup = ClusterSetup(
        prefill=PREFILL,
        decode=DECODE,
        pools=settings.pools,
        cost=cost,
        rate=args.rate,
        seed=settings.seed,
        spans=bool(charts),
    )
    machines = "LLaMA-70B on 8×A800 each" if args.cost is None else f"{cost.shape.name} on {cost.machine.name}"
    part = QUICK_PART if args.quick else PART
    cells = [ClusterCell(source, setup, name, admission=args.admission, until_part=part) for name in SCHEDULERS]
    write(
        f"{PREFILL} machines prefill, {DECODE} decode{' at the start' * (settings.pools == 'elastic')} "
        f"({machines}, modelled); {source.name}, "
        f"at {args.rate:g} times its rate; SLO: {setup.slo.ttft_s:g} s to the first token, "
        f"{setup.slo.tbt_s:g} s between tokens; admission: {args.admission}",
        stream,
    )
    progress = Progress(stream)
    simulated_s = _SIMULATED_S * part * args.rate / 2.0 * slowdown() / min(usable_cores(), len(cells)) * 2
    played_s = 0.0 if args.no_play else QUICK_PLAYED_S if args.quick else PLAYED_S
    estimate_s = simulated_s + played_s + 0.5
    say_estimate(progress, estimate_s)
    started_s = time.monotonic()
    with progress.wait(f"simulating the cluster under {len(cells)} schedulers", simulated_s):
        runs = sweep(run_of, cells)
    changed_s = progress.seconds + played_s
    if abs(changed_s - estimate_s) > 0.2 * estimate_s:
        progress.say(f"estimate corrected: {format_estimate(changed_s)} in all")
    write(
        f"simulated under {len(cells)} schedulers in {time.monotonic() - started_s:.1f} s; "
        "each bar below is a machine: its prefill queue, or its decoding batch",
        stream,
    )
    metrics = [measured(run, setup.slo) for run in runs]
    if not args.no_play:
        _play(runs, setup, stream, played_s)
    write("", stream)
    final(SCHEDULERS, metrics).print(stream)
    if settings.pools == "elastic":
        changes = ", ".join(f"{name} {result.role_changes}" for name, result in zip(SCHEDULERS, metrics, strict=True))
        write(f"changes between prefill and decode: {changes}", stream)
    for report in reports:
        from skymemory_lab.view.cluster_report import write_cluster_report

        title = f"{PREFILL}P+{DECODE}D, {source.name}, {args.rate:g} times its rate, admission {args.admission}"
        written = write_cluster_report(dict(zip(SCHEDULERS, runs, strict=True)), setup.slo, title, report)
        write(f"written: {written}", stream)
    for chart in charts:
        write(f"written: {write_chrome_trace(runs[-1], chart)} ({SCHEDULERS[-1]}; for chrome://tracing)", stream)
    if args.json:
        print(json.dumps(_as_json(args, source, metrics), indent=1, ensure_ascii=False))
    write(format_took(progress.seconds, estimate_s), stream)
    _check(metrics)
    return 0


def _play(runs: Sequence[ClusterRun], setup: ClusterSetup, stream: TextIO, played_s: float) -> None:
    both = PREFILL + DECODE if setup.pools == "elastic" else 0
    players = [Playback(run, both or PREFILL, both or DECODE, setup.slo) for run in runs]
    # Until the last arrival, not the last answer: afterwards the queues only drain.
    last_s = max(outcome.at_s for outcome in runs[0].outcomes)
    speed = last_s / played_s
    started_s = time.monotonic()
    screen = Screen(stream, started_s)

    def show(now_s: float) -> None:
        moments = [player.at(now_s) for player in players]
        screen.show(
            lambda width: frame(SCHEDULERS, moments, now_s, speed, width),
            () if screen.live else line(SCHEDULERS, moments, now_s),
        )

    try:
        while (now_s := (time.monotonic() - started_s) * speed) < last_s:
            show(now_s)
            time.sleep(1 / FRAMES_PER_S)
        if screen.live:
            show(last_s)
    finally:
        screen.close()


def _as_json(
    args: argparse.Namespace, source: ConversationSource, metrics: Sequence[ClusterMetrics]
) -> dict[str, object]:
    return {
        "requests": source.name,
        "rate": args.rate,
        "admission": args.admission,
        "pools": args.settings.pools,
        "seed": args.settings.seed,
        "schedulers": {name: result.as_json() for name, result in zip(SCHEDULERS, metrics, strict=True)},
    }


def _check(metrics: Sequence[ClusterMetrics]) -> None:
    for name, result in zip(SCHEDULERS, metrics, strict=True):
        ended_requests = result.completed + result.refused + result.refused_after_prefill + result.failed
        if ended_requests != result.requests or result.requests != metrics[0].requests:
            raise SkyMemoryError(f"{name}: {ended_requests} of {result.requests} requests ended")


LATELY = 100
_BARS = " ▁▂▃▄▅▆▇█"
_LINE_STEP, _BATCH_STEP = 2, 1


# Padded for the largest numbers, so that columns do not shift during the playback.
_HEAD = ("scheduler", "in line", "waiting", "batches", "  done", "within", "refused", "TTFT now", "hits", "moved")
_FRAME_WORDS = (0, 1, 3)


def frame(names: Sequence[str], moments: Sequence[Moment], now_s: float, speed: float, width: int) -> list[str]:
    title = f"{now_s / 60:5.1f} min, {speed:.0f} times as fast as it would be; {moments[0].arrived:,} requests arrived"
    rows = [_row(name, moment) for name, moment in zip(names, moments, strict=True)]
    return [*wrapped(title, width), *Table(_HEAD, rows, _FRAME_WORDS).lines(width)]


def line(names: Sequence[str], moments: Sequence[Moment], now_s: float) -> list[str]:
    parts = [f"{now_s:.0f} s: {moments[0].arrived} arrived"]
    for name, moment in zip(names, moments, strict=True):
        refused = moment.refused + moment.refused_after_prefill
        parts.append(
            f"{name} {sum(moment.waiting)} waiting, {moment.completed} done, {refused} refused, "
            f"TTFT {_seconds(_lately_s(moment))}, hits {moment.hits:.0%}"
        )
    return parts


RESULTS = ("scheduler", "done", "refused", "within both", "goodput") + (
    "TTFT mean",
    "TTFT p90",
    "TTFT p99",
    "TBT p90",
    "hits",
    "from where",
)


def final(names: Sequence[str], metrics: Sequence[ClusterMetrics]) -> Table:
    rows = []
    for name, result in zip(names, metrics, strict=True):
        sources = ", ".join(f"{source} {part:.0%}" for source, part in result.hits.tokens_by_source.items() if part)
        rows.append(
            [
                name,
                f"{result.completed:,}",
                f"{result.refused + result.refused_after_prefill:,}",
                f"{result.attainment:.1%}",
                f"{result.goodput_per_s:.2f}/s",
                *(_seconds(value) for value in (result.ttft_s.mean, result.ttft_s.p90, result.ttft_s.p99)),
                _milliseconds(result.tbt_request_s.p90),
                f"{result.hits.tokens:.0%}",
                sources,
            ]
        )
    return Table(RESULTS, rows, left=(0, 10))


def _row(name: str, moment: Moment) -> list[str]:
    return [
        name,
        f"{_bars(moment.waiting, _LINE_STEP)}",
        f"{sum(moment.waiting)}",
        f"{_bars(moment.decoding, _BATCH_STEP)}",
        f"{moment.completed:,}",
        _share(moment),
        f"{moment.refused + moment.refused_after_prefill:,}",
        _seconds(_lately_s(moment)),
        f"{moment.hits:.0%}",
        f"{moment.loaded:.0%}",
    ]


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
    return "".join(_BARS[min(8, -(-count // step))] for count in counts)


@dataclass(slots=True)
class Moment:
    """Requests at each instance, and totals, at a time of the playback."""

    waiting: list[int]
    prefilling: list[int]
    decoding: list[int]
    arrived: int = 0
    completed: int = 0
    met: int = 0
    refused: int = 0
    refused_after_prefill: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    held_tokens: int = 0
    loaded_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    """TTFTs in order of their time."""

    @property
    def hits(self) -> float:
        return (self.held_tokens + self.loaded_tokens) / max(1, self.prompt_tokens)

    @property
    def loaded(self) -> float:
        return self.loaded_tokens / max(1, self.prompt_tokens)


# A run is a list of outcomes with times, not a log of events. ``_steps`` turns each outcome into at most four events
# (arrives, begins, first token, ends), and a heap merges them. ``at`` applies all events up to a time to a single
# ``Moment``, so the cost of a frame depends on the events since the last frame, not on the whole run.
class Playback:
    """Playback; its time only increases."""

    def __init__(self, run: ClusterRun, prefills: int, decodes: int, slo: Slo) -> None:
        self.moment = Moment([0] * prefills, [0] * prefills, [0] * decodes)
        self._slo = slo
        self._events = [
            (at_s, number, step) for number, outcome in enumerate(run.outcomes) for at_s, step in _steps(outcome)
        ]
        heapq.heapify(self._events)
        self._outcomes = run.outcomes
        self.end_s = run.end_s

    def at(self, now_s: float) -> Moment:
        while self._events and self._events[0][0] <= now_s:
            _, number, step = heapq.heappop(self._events)
            self._happens(self._outcomes[number], step)
        return self.moment

    def _happens(self, outcome: RequestOutcome, step: int) -> None:
        moment = self.moment
        if step == _ARRIVES:
            moment.arrived += 1
            if outcome.prefill is not None:
                moment.waiting[outcome.prefill] += 1
        elif step == _BEGINS and outcome.prefill is not None:
            moment.waiting[outcome.prefill] -= 1
            moment.prefilling[outcome.prefill] += 1
            moment.prompt_tokens += outcome.prompt_tokens
            moment.held_tokens += outcome.held_tokens
            moment.loaded_tokens += sum(outcome.loaded_tokens.values())
        elif step == _FIRST_TOKEN and outcome.prefill is not None and outcome.ttft_s is not None:
            moment.prefilling[outcome.prefill] -= 1
            moment.ttft_s.append(outcome.ttft_s)
            if outcome.decode is not None:
                moment.decoding[outcome.decode] += 1
        elif step == _ENDS:
            self._ends(outcome)

    def _ends(self, outcome: RequestOutcome) -> None:
        moment = self.moment
        if outcome.prefill is not None and outcome.ttft_s is None:
            moment.prefilling[outcome.prefill] -= 1
        elif outcome.ttft_s is not None and outcome.decode is not None:
            moment.decoding[outcome.decode] -= 1
        moment.completed += outcome.status == "completed"
        moment.met += keeps(outcome, self._slo)
        moment.refused += outcome.status == "refused"
        moment.refused_after_prefill += outcome.status == "refused_after_prefill"
        moment.failed += outcome.status == "failed"


_ARRIVES, _BEGINS, _FIRST_TOKEN, _ENDS = range(4)


def _steps(outcome: RequestOutcome) -> Iterator[tuple[float, int]]:
    yield outcome.at_s, _ARRIVES
    if outcome.prefill is not None:
        yield outcome.at_s + outcome.queue_s, _BEGINS
        if outcome.ttft_s is not None:
            yield outcome.at_s + outcome.ttft_s, _FIRST_TOKEN
    yield outcome.at_s if outcome.end_s is None else outcome.end_s, _ENDS
