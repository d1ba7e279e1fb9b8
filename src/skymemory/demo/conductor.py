"""``skymemory demo conductor``: one overloaded cluster four times, each time under another scheduler, side by side."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from skymemory.cli._demo_conductor_table import WIDTH, final, frame, line
from skymemory.cli._demo_motion_screen import Screen
from skymemory.conductor.cost_model import LLAMA_70B_8xA800
from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.router.cost_file import read_cost
from skymemory.sim.cluster.cells import ClusterCell, run_of
from skymemory.sim.cluster.chrome_trace import write_chrome_trace
from skymemory.sim.cluster.metrics import ClusterMetrics, measured
from skymemory.sim.cluster.moments import Playback
from skymemory.sim.cluster.outcome import ClusterRun
from skymemory.sim.cluster.setup import ClusterSetup
from skymemory.sim.sources import Source
from skymemory.sim.sweeps import sweep

SCHEDULERS = ("random", "load-balance", "cache-aware", "kvcache-centric")
PREFILL, DECODE = 8, 8
PLAYED_S, QUICK_PLAYED_S = 30.0, 10.0
"""Of real time, from the first arrival to the last."""
PART, QUICK_PART = 1.0, 0.4
"""Of the ten minutes of requests."""
FRAMES_PER_S = 8.0


def run_conductor(args: argparse.Namespace) -> int:
    stream = sys.stderr if args.json else sys.stdout
    if not 0.1 <= args.rate <= 20:
        raise InvalidInput(f"--rate {args.rate:g}: expected 0.1 to 20 times the workload's own")
    if args.trace is not None and not args.trace.is_file():
        raise InvalidInput(f"--trace {args.trace}: there is no such file")
    source = Source(args.trace, args.seed, quick=True)
    spans = args.chart is not None
    cost = LLAMA_70B_8xA800 if args.cost is None else read_cost(args.cost)
    setup = ClusterSetup(prefill=PREFILL, decode=DECODE, cost=cost, rate=args.rate, seed=args.seed, spans=spans)
    machines = "LLaMA-70B on 8×A800 each" if args.cost is None else f"{cost.shape.name} on {cost.machine.name}"
    part = QUICK_PART if args.quick else PART
    cells = [ClusterCell(source, setup, name, admission=args.admission, until_part=part) for name in SCHEDULERS]
    _say(stream, f"{PREFILL} machines prefill, {DECODE} decode ({machines}, modelled); {source.name}, "
         f"at {args.rate:g} times its rate; promised: {setup.slo.ttft_s:g} s to the first token, "
         f"{setup.slo.tbt_s:g} s a token; admission: {args.admission}")  # fmt: skip
    began_s = time.monotonic()
    runs = sweep(run_of, cells)
    _say(stream, f"simulated under {len(cells)} schedulers in {time.monotonic() - began_s:.1f} s; in what follows "
         "a bar is a machine: its line before the prefill, its batch that decodes")  # fmt: skip
    metrics = [measured(run, setup.slo) for run in runs]
    if not args.no_play:
        _play(runs, setup, stream, QUICK_PLAYED_S if args.quick else PLAYED_S)
    for text in final(SCHEDULERS, metrics):
        _say(stream, text)
    if args.report is not None:
        from skymemory.view.cluster_report import write_cluster_report

        title = f"{PREFILL}P+{DECODE}D, {source.name}, {args.rate:g} times its rate, admission {args.admission}"
        written = write_cluster_report(dict(zip(SCHEDULERS, runs, strict=True)), setup.slo, title, args.report)
        _say(stream, f"written: {written}")
    if args.chart is not None:
        _say(stream, f"written: {write_chrome_trace(runs[-1], args.chart)} ({SCHEDULERS[-1]}; for chrome://tracing)")
    if args.json:
        print(json.dumps(_as_json(args, source, metrics), indent=1, ensure_ascii=False))
    _check(metrics)
    return 0


def _play(runs: Sequence[ClusterRun], setup: ClusterSetup, stream: TextIO, played_s: float) -> None:
    """All runs at the same moment, a moment after the other, until the last request has come."""
    players = [Playback(run, PREFILL, DECODE, setup.slo) for run in runs]
    last_s = max(one.at_s for one in runs[0].outcomes)
    speed = last_s / played_s
    began_s = time.monotonic()
    screen = Screen(stream, WIDTH, began_s)
    try:
        while (now_s := (time.monotonic() - began_s) * speed) < last_s:
            moments = [player.at(now_s) for player in players]
            screen.show(
                frame(SCHEDULERS, moments, now_s, speed), [] if screen.live else line(SCHEDULERS, moments, now_s)
            )
            time.sleep(1 / FRAMES_PER_S)
        moments = [player.at(last_s) for player in players]
        if screen.live:
            screen.show(frame(SCHEDULERS, moments, last_s, speed), [])
    finally:
        screen.close()


def _as_json(args: argparse.Namespace, source: Source, metrics: Sequence[ClusterMetrics]) -> dict[str, object]:
    return {
        "requests": source.name,
        "rate": args.rate,
        "admission": args.admission,
        "seed": args.seed,
        "schedulers": {name: one.as_json() for name, one in zip(SCHEDULERS, metrics, strict=True)},
    }


def _check(metrics: Sequence[ClusterMetrics]) -> None:
    """The same requests came each time, and each ended once."""
    for name, one in zip(SCHEDULERS, metrics, strict=True):
        ended = one.completed + one.refused + one.refused_after_prefill + one.failed
        if ended != one.requests or one.requests != metrics[0].requests:
            raise SkyMemoryError(f"{name}: {ended} of {one.requests} requests ended")


def _say(stream: TextIO, words: str) -> None:
    print(words, file=stream, flush=True)
