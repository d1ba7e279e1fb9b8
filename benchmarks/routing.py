"""Where requests go and what they wait: `python benchmarks/routing.py [--json FILE] [--plot FILE] [--quick]`.

Every strategy of the router, through the real picker, to eight simulated servers: three sizes of prefix cache, at the
trace's rate and at 1.35 times it. Prefill times are those of LLaMA-70B on 8×A800 at half its speed; a strategy that
estimates errs by 10 %, anew for each server and request, in what is computed and in what waits. Each knows what it
would know: what was answered, reports of load every 0.2 s, engines' cache events 0.05 s after.

Requests: the conversation trace released with the Mooncake paper, from `../shared/data` or `--trace FILE`, each arrival
spread over the 3 s between its batches; and `tenants` of the seeded generator (`conversations`, its other workload, has
the trace's statistics). The first 70 % of the time warm the caches, the requests of the last 30 % are measured.
`--part tune` measures the first 70 % instead (from a fifth of the whole on), and sees nothing of the rest: what was
tuned, was tuned there. Figures are means over the seeds of jitter, errors and ties; the share is the worst of all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from _bench import print_table, write_json
from skymemory.conductor.cost_model import LLAMA_70B_8xA800
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.named import DEFAULT, NAMES
from skymemory.sim.routing import RoutingSetup, as_routed, simulate
from skymemory.sim.routing_metrics import measured
from skymemory.sim.routing_strategies import strategy_for
from skymemory.sim.trace import TraceRequest, at_rate, jittered, read_trace, split_at
from skymemory.sim.workload import CONVERSATIONS, TENANTS, generate

TRACE = Path(__file__).parents[2] / "shared/data/traces/conversation_trace.jsonl"
CAPACITIES = (2_000, 5_000, 10_000)
RATES = (1.0, 1.35)
SERVERS = 8
ERROR = 0.1
TUNED, WARM = 0.7, 0.2
HOUR_S, TENANTS_S = 3_537.0, 1_200.0
Cell = tuple[str, Path, str, int, float, int, str]
"""Workload, the trace's file, strategy, blocks per server, rate, seed, part."""


@cache
def arrivals(workload: str, trace: Path, rate: float, seed: int) -> tuple[list[TraceRequest], list[Request]]:
    if workload == "trace":
        requests = jittered(read_trace(trace), seed)
    elif workload == CONVERSATIONS.name:
        requests = jittered(generate(CONVERSATIONS, HOUR_S, seed=100 + seed), seed)
    else:
        requests = generate(TENANTS, TENANTS_S, seed=100 + seed)
    requests = at_rate(requests, rate)
    return requests, [as_routed(request) for request in requests]


def run(cell: Cell) -> dict[str, Any]:
    workload, trace, strategy, blocks, rate, seed, part = cell
    requests, prompts = arrivals(workload, trace, rate, seed)
    from_s = split_at(requests, TUNED)
    if part == "tune":
        early = sum(request.at_s < from_s for request in requests)
        from_s = split_at(requests, WARM)
        requests, prompts = requests[:early], prompts[:early]
    setup = RoutingSetup(servers=SERVERS, cache_blocks=blocks, cost=LLAMA_70B_8xA800, seed=seed)
    scorer, events = strategy_for(strategy, setup, error=ERROR)
    outcomes = simulate(requests, scorer, setup, events, prompts)
    return measured(outcomes, SERVERS, from_s).as_json()


def joined(cell: Cell, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of what the seeds gave."""
    workload, _, strategy, blocks, rate, _, _ = cell
    row: dict[str, Any] = {"workload": workload, "blocks": blocks, "rate": rate, "strategy": strategy}
    for name in runs[0]:
        row[name] = round(statistics.mean(one[name] for one in runs), 4)
    row["worst_share"] = max(one["worst_share"] for one in runs)
    row["mean_s_of_seeds"] = [round(one["mean_s"], 4) for one in runs]
    row["p99_s_of_seeds"] = [round(one["p99_s"], 4) for one in runs]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="FILE")
    parser.add_argument("--workloads", default=f"trace,{TENANTS.name}", metavar="A,B")
    parser.add_argument("--strategies", default=",".join(NAMES), metavar="A,B")
    parser.add_argument("--part", choices=("report", "tune"), default="report")
    parser.add_argument("--seeds", type=int, default=2, metavar="N")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--quick", action="store_true", help="one capacity, one rate, one seed, the generator only")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture of the table (needs matplotlib)")
    options = parser.parse_args()
    workloads = options.workloads.split(",") if not options.quick else [CONVERSATIONS.name]
    if "trace" in workloads and not options.trace.is_file():
        print(f"skipped: there is no trace at {options.trace} (name one with --trace)", file=sys.stderr)
        print(f"in its place: the generator's {CONVERSATIONS.name}, with the trace's statistics", file=sys.stderr)
        workloads[workloads.index("trace")] = CONVERSATIONS.name
    capacities, rates = ((5_000,), (1.0,)) if options.quick else (CAPACITIES, RATES)
    seeds = range(1, 2 if options.quick else options.seeds + 1)
    cells: list[Cell] = [
        (workload, options.trace, strategy, blocks, rate, seed, options.part)
        for workload in workloads
        for rate in rates
        for blocks in capacities
        for strategy in options.strategies.split(",")
        for seed in seeds
    ]
    with ProcessPoolExecutor(options.jobs) as pool:
        results = list(pool.map(run, cells, chunksize=len(seeds)))
    rows = [joined(cells[at], results[at : at + len(seeds)]) for at in range(0, len(cells), len(seeds))]
    for workload in workloads:
        for rate in rates:
            for blocks in capacities:
                show([row for row in rows if (row["workload"], row["rate"], row["blocks"]) == (workload, rate, blocks)])
    write_json(options.json, "routing", 1, rows)
    if options.plot is not None:
        plot(rows, options.plot)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """One cell: all strategies, the quickest first."""
    first = rows[0]
    print_table(
        f"{first['workload']}: {first['blocks']:,} blocks each, {first['rate']:g}×; {first['requests']:,.0f} requests",
        ["strategy", "mean TTFT, s", "seeds ±", "p50", "p90", "p99", "blocks hit", "tokens hit", "worst share"],
        [
            [
                row["strategy"] + (" *" if row["strategy"] == DEFAULT else ""),
                f"{row['mean_s']:.2f}",
                f"{(max(row['mean_s_of_seeds']) - min(row['mean_s_of_seeds'])) / 2:.2f}",
                f"{row['p50_s']:.2f}",
                f"{row['p90_s']:.2f}",
                f"{row['p99_s']:.2f}",
                f"{row['block_hits']:.1%}",
                f"{row['token_hits']:.1%}",
                f"{row['worst_share']:.2f}",
            ]
            for row in sorted(rows, key=lambda row: row["mean_s"])
        ],
    )


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    figure, axes = pyplot.subplots(len(workloads), 2, figsize=(11, 3.6 * len(workloads)), squeeze=False)
    for line, workload in zip(axes, workloads, strict=True):
        for place, (name, label) in zip(
            line, (("mean_s", "mean TTFT, s"), ("block_hits", "blocks that hit")), strict=True
        ):
            for strategy in dict.fromkeys(row["strategy"] for row in rows):
                of = [row for row in rows if row["workload"] == workload and row["strategy"] == strategy]
                of.sort(key=lambda row: (row["rate"], row["blocks"]))
                bold = 2.6 if strategy == DEFAULT else 1.1
                cells = [f"{row['blocks'] // 1000}k\n{row['rate']:g}×" for row in of]
                place.plot(cells, [row[name] for row in of], marker="o", ms=3, lw=bold, label=strategy)
            if name == "mean_s":
                place.set_yscale("log")
            place.set_title(workload, fontsize=9)
            place.set_ylabel(label)
            place.grid(alpha=0.3)
    axes[0][1].legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"written: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
