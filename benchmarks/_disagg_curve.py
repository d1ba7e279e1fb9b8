"""From which speeds on prefill and decode apart win: the curve of `disagg.py`, in virtual time only.

The fitted model is that of this machine. Faster ones are the same model with its speeds multiplied: of prefills
(arithmetic), of decoding (memory; taking values over too) and of the link (saving and fetching, store included). The
time of client and router stays.

Load is a part of what all machines could do if they shared all work, so that an uneven split counts against it: coupled
machines share it. Both ways get the same requests and the same objectives, five times what a lone request takes where
nothing is handed over.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _disagg_workload import MIXES, busy_s, requests_of, scaled
from skymemory.conductor.cost_model import CostModel
from skymemory.conductor.request import Slo
from skymemory.metrics import spread
from skymemory_lab.sim.cluster.outcome import Quantiles
from skymemory_lab.sim.cluster.setup import ClusterSetup, PromptHandover
from skymemory_lab.sim.cluster.simulation import run_cluster

SPEEDS = (1, 4, 16, 64, 256, 1024)
"""Times this machine's, of prefills and of decoding."""
LINKS = (1, 32, 1024)
LOADS = (0.4, 0.6, 0.8, 1.0)
PAIRS = {1: LINKS, 2: LINKS[1:2]}
"""Numbers of prefill and of decode instances, against twice as many coupled ones, with the links to look at."""
REQUESTS = 200
"""Of a run, about."""
LOOSE = 5.0
Row = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """What the simulator needs to know of one machine and its ways to others."""

    cost: CostModel
    handover: PromptHandover
    request_s: float

    def times(self, prefill: float, decode: float, link: float) -> Machine:
        """One that is that many times as fast."""
        one = self.handover
        faster = PromptHandover(
            one.save_s / link,
            one.save_token_s / link,
            one.fetch_s / link,
            one.fetch_token_s / link,
            one.take_s / decode,
            one.take_token_s / decode,
        )
        return Machine(scaled(self.cost, 1.0 / prefill, 1.0 / decode), faster, self.request_s)

    def slo(self, tokens: int) -> Slo:
        lone_s = self.request_s + self.cost.prefill_s(tokens)
        return Slo(LOOSE * lone_s, LOOSE * self.cost.decode_step_s(1, tokens))


def curve(base: Machine, setup: ClusterSetup, seed: int, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """A row for each mix, speeds, load and number of machines. ``setup``: of 1P+1D, but for speeds and objectives."""
    names = ("chat",) if quick else tuple(MIXES)
    speeds = SPEEDS[::4] if quick else SPEEDS
    rows: list[Row] = []
    plan = [(name, pairs, link) for name in names for pairs, links in PAIRS.items() for link in links]
    for name, pairs, link in plan[:1] if quick else plan:
        say(f"curve, {name}, {pairs}P+{pairs}D, link {link} ×")
        for prefill, decode in itertools.product(speeds, speeds):
            machine = base.times(prefill, decode, link)
            of_cell = {"mix": name, "pairs": pairs, "prefill_x": prefill, "decode_x": decode, "link_x": link}
            rows += [{**of_cell, **row} for row in _cell(name, pairs, machine, setup, seed)]
    return rows


def _cell(name: str, pairs: int, machine: Machine, setup: ClusterSetup, seed: int) -> Iterator[Row]:
    mix = MIXES[name]
    setup = replace(
        setup,
        prefill=pairs,
        decode=pairs,
        cost=machine.cost,
        handover=machine.handover,
        request_s=machine.request_s,
        slo=machine.slo(round(mix.own.median)),
    )
    work_s = sum(busy_s(requests_of(mix, 100.0, 3.0, seed), machine.cost, PromptHandover(take_s=1e-9)))
    for load in LOADS:
        rate_per_s = load * 2 * pairs / work_s
        requests = requests_of(mix, rate_per_s, REQUESTS / rate_per_s, seed)
        row: Row = {"load": load, "requests": len(requests)}
        for way, one, scheduler in (
            ("apart", setup, "cache-aware"),
            ("coupled", setup.with_coupled(), "least-ttft"),
        ):
            run = run_cluster(requests, one, scheduler)
            kept = sum(
                (out.ttft_s or 0.0) <= one.slo.ttft_s and (out.tbt_mean_s or 0.0) <= one.slo.tbt_s
                for out in run.outcomes
                if out.status == "completed"
            )
            row[f"{way}_goodput_per_s"] = kept / (run.end_s - requests[0].at_s)
            row[f"{way}_kept"] = kept
            row[f"{way}_ttft_p99_s"] = spread(out.ttft_s for out in run.outcomes if out.ttft_s is not None).p99
            row[f"{way}_tbt_p99_s"] = Quantiles.of_histogram(run.gap_seconds, run.gap_tokens).p99
        yield row


def write(rows: list[Row], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows[0])
        writer.writerows([f"{one:.4g}" if isinstance(one, float) else one for one in row.values()] for row in rows)


def read(path: Path) -> list[Row]:
    """Numbers are floats."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            {name: value if name == "mix" else float(value) for name, value in row.items()}
            for row in csv.DictReader(file)
        ]


def ratio(rows: Sequence[Row]) -> float:
    """Apart over coupled: the highest goodput over the loads of one cell. nan: no way keeps any objective; inf: only
    apart does."""
    apart, coupled = (float(max(row[f"{way}_goodput_per_s"] for row in rows)) for way in ("apart", "coupled"))
    if not coupled:
        return math.inf if apart else math.nan
    return apart / coupled


def cells(rows: Sequence[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows of all loads by mix, pairs, link, prefill and decode speed."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("mix", "pairs", "link_x", "prefill_x", "decode_x"))
        found.setdefault(key, []).append(row)
    return found
