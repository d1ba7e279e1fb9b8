"""The cells of `cluster.py`: what is run for each of its tables."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from skymemory.conductor.request import Slo
from skymemory_lab.reproduce.mooncake.overload import overload_cell
from skymemory_lab.sim.cluster.cells import ClusterCell
from skymemory_lab.sim.cluster.setup import ClusterSetup
from skymemory_lab.sim.workload import ConversationSource

SCHEDULERS = ("random", "load-balance", "cache-aware", "kvcache-centric", "least-ttft")
RATES, QUICK_RATES = (0.5, 0.75, 1.0, 1.25), (1.0,)
GRID_RULES = ("baseline", "early", "predicted", "predicted, long", "goodput")
"""``predicted, long``: no request is taken to end decoding while another prefills (``reproduce.mooncake.overload``)."""
OURS = "goodput"
GRID_RATES, QUICK_GRID_RATES = (1.5, 2.0, 3.0), (2.0,)
GRID_SIZES = ((8, 8), (12, 4), (6, 2))
GRID_SLOS = (Slo(30.0, 0.1), Slo(10.0, 0.05), Slo(5.0, 0.04))
DECODE_FIXED_S, MEMORY_SHARE = 0.01, 0.5
"""Of the admission grid's machines: with all of the memory's speed and nothing fixed, decoding is never short."""
TUNED = 0.7
GRID_BEGINS = 0.5
"""Of the admission grid, where what is reported is run: a fifth of the time fills the caches and the queues."""


def timed(cell: ClusterCell, time: str) -> ClusterCell:
    """Measured are the last 30 % of the time, or only the first 70 % are run."""
    return replace(cell, until_part=TUNED, from_part=0.1) if time == "tune" else replace(cell, from_part=TUNED)


def scheduler_cells(source: ConversationSource, time: str) -> list[tuple[tuple[float, str], ClusterCell]]:
    return [
        ((rate, name), timed(ClusterCell(source, ClusterSetup(rate=rate, seed=source.seed), name), time))
        for rate in (QUICK_RATES if source.quick else RATES)
        for name in SCHEDULERS
    ]


def admission_cells(
    source: ConversationSource, time: str, rates: Sequence[float]
) -> list[tuple[dict[str, Any], ClusterCell]]:
    cost = replace(ClusterSetup().cost, decode_fixed_s=DECODE_FIXED_S, memory_share=MEMORY_SHARE)
    cells = []
    for prefill, decode in GRID_SIZES:
        for rate in rates:
            for slo in GRID_SLOS:
                setup = ClusterSetup(prefill=prefill, decode=decode, rate=rate, slo=slo, cost=cost, seed=source.seed)
                for rule in GRID_RULES:
                    label = {
                        "size": f"{prefill}P+{decode}D",
                        "rate": rate,
                        "slo": f"{slo.ttft_s:g} s, {slo.tbt_s:g} s",
                        "rule": rule,
                    }
                    cell = overload_cell(source, setup, rule)
                    cell = replace(cell, curves=False, begin_part=GRID_BEGINS if time == "report" else 0.0)
                    cells.append((label, timed(cell, time)))
    return cells


_ALONE = """
import sys, time
from pathlib import Path
from skymemory_lab.sim.cluster.outcome import measured
from skymemory_lab.sim.cluster.simulation import run_cluster
from skymemory_lab.sim.cluster.setup import ClusterSetup
from skymemory_lab.sim.workload import ConversationSource
trace, seed, quick, name = sys.argv[1:]
source = ConversationSource(Path(trace) if trace else None, int(seed), quick == "1")
requests, setup = source.requests(), ClusterSetup(seed=int(seed))
began = time.process_time()
run = run_cluster(requests, setup, name)
seconds = time.process_time() - began
peak = int(Path("/proc/self/status").read_text("ascii").split("VmHWM:")[1].split()[0]) / 1024
print(seconds, peak, hash((tuple(map(repr, run.outcomes)), repr(measured(run, setup.slo)))))
"""


def speed(source: ConversationSource) -> list[dict[str, Any]]:
    """Each scheduler alone in a process of its own, twice: processor seconds, memory, equal outcomes."""
    rows = []
    for name in SCHEDULERS[:4]:
        runs = []
        for _ in range(2):
            words = [str(source.trace or ""), str(source.seed), "1" if source.quick else "0", name]
            answer = subprocess.run(
                [sys.executable, "-c", _ALONE, *words],
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )
            runs.append(answer.stdout.split())
        rows.append(
            {
                "scheduler": name,
                "seconds": round(min(float(run[0]) for run in runs), 3),
                "mb": round(max(float(run[1]) for run in runs), 1),
                "same": runs[0][2] == runs[1][2],
            }
        )
    return rows
