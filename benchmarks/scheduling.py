"""Schedulers of prefills against each other: `python benchmarks/scheduling.py [--picks] [--json FILE]`.

The conversation trace (arrivals spread over 3 s) through 8 machines that prefill and 8 that decode, LLaMA-70B on
8×A800, each with 1 TB for KV: mean TTFT by rule, for networks from 25 to 800 Gbit/s. What reaches decoding machines
passes the same links. ``--picks``: instead, microseconds of processor time of one pick. Without the trace, the seeded
generator's hour.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from _bench import print_table, write_json
from skymemory.conductor.cost_model import LLAMA_70B_8xA800, Medium
from skymemory.conductor.picker import Fleet, Picker
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.scheduling.registry import prefill_scorer
from skymemory_lab.sim.cluster.schedulers import scheduler_named
from skymemory_lab.sim.cluster.setup import ClusterSetup, PoolSettings
from skymemory_lab.sim.cluster.simulation import run_cluster
from skymemory_lab.sim.trace import TraceRequest, read_trace
from skymemory_lab.sim.workload import CONVERSATIONS, generate

TRACE = Path(__file__).parents[2] / "shared/data/traces/conversation_trace.jsonl"
GBIT = (25, 100, 800)
RULES: dict[str, tuple[str, dict[str, object]]] = {
    "random": ("random", {}),
    "load-balance": ("load-balance", {}),
    "cache-aware": ("cache-aware", {}),
    "kvcache-centric, arxiv, threshold 2": ("kvcache-centric", {"variant": "arxiv"}),
    "kvcache-centric, fast25, threshold 1.3": ("kvcache-centric", {"variant": "fast25", "balancing_threshold": 1.3}),
    "kvcache-centric, cheaper, no split, no price": ("kvcache-centric", {"cake": False, "delay_weight": 0}),
    "kvcache-centric, cheaper, no price": ("kvcache-centric", {"delay_weight": 0}),
    "kvcache-centric": ("kvcache-centric", {}),
    "kvcache-centric, price 1.5": ("kvcache-centric", {"delay_weight": 1.5}),
}


def simulated(requests: list[TraceRequest], mfu: float, seed: int) -> list[dict[str, Any]]:
    rows = []
    for label, (name, options) in RULES.items():
        row: dict[str, Any] = {"rule": label}
        for gbit in GBIT:
            pool = PoolSettings(network=Medium("network", gbit / 8 * 1e9, 1e-4))
            setup = ClusterSetup(cost=LLAMA_70B_8xA800.at(mfu), jitter_s=3.0, seed=seed, pool=pool)
            run = run_cluster(requests, setup, partial(scheduler_named, name, **options))
            ttfts = [one.ttft_s for one in run.outcomes if one.ttft_s is not None]
            computed = sum(one.computed_tokens for one in run.outcomes)
            row[f"{gbit} Gbit/s"] = float(np.mean(ttfts))
            row[f"computed at {gbit}"] = computed / sum(one.prompt_tokens for one in run.outcomes)
        rows.append(row)
    return rows


def picks(name: str, servers: int, blocks: int, count: int = 400) -> float:
    """Median microseconds of a pick, where half of the servers hold something and all are four fifths busy."""
    dice, fleet = np.random.default_rng(1), Fleet()
    for number in range(servers):
        fleet.add(f"prefill-{number}")
    index = ApproximatePrefixIndex(100_000)
    scorer = prefill_scorer(name, cost=LLAMA_70B_8xA800, holdings=index)
    picker, now_s, taken = Picker(fleet, scorer), 0.0, []
    chain = dice.integers(1, 2**63, blocks).astype(np.uint64)
    for server in list(fleet)[::2]:
        index.learn(server.slot, chain[: int(dice.integers(1, blocks))])
    open_: list[tuple[float, Any]] = []
    for _ in range(count):
        now_s += 0.8 * LLAMA_70B_8xA800.prefill_s(blocks * 512) / servers
        fresh = np.concatenate([chain[: blocks // 2], dice.integers(1, 2**63, blocks - blocks // 2).astype(np.uint64)])
        request = Request(Prompt(fresh, fresh, 512, blocks * 512))
        began_s = time.thread_time()
        decision = picker.pick(request, now_s)
        taken.append(time.thread_time() - began_s)
        picker.routed(decision, now_s)
        open_.append((now_s + (decision.estimated_ttft_s or 0.0), decision))
        open_.sort(key=lambda one: one[0])
        while open_ and open_[0][0] <= now_s:
            picker.failed(open_.pop(0)[1], now_s)
    return float(np.median(taken)) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="FILE")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first so many")
    parser.add_argument("--mfu", type=float, default=0.4, help="part of the machines' speed that prefills reach")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picks", action="store_true", help="what a pick takes")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.picks:
        sizes = [(servers, blocks) for servers in (8, 64) for blocks in (25, 250)]
        names = ("random", "load-balance", "cache-aware", "kvcache-centric")
        rows = [{"name": name, **{f"{s}×{b}": picks(name, s, b) for s, b in sizes}} for name in names]
        heads = [f"{servers} servers, {blocks} blocks" for servers, blocks in sizes]
        print_table(
            "A pick, µs", ["", *heads], [[r["name"], *(f"{r[f'{s}×{b}']:.0f}" for s, b in sizes)] for r in rows]
        )
        write_json(options.json, "scheduling_picks", options.seed, rows)
        return
    if options.trace.is_file():
        requests = read_trace(options.trace, options.requests)
    else:
        print(f"there is no trace at {options.trace}: the generator's requests instead", file=sys.stderr)
        requests = generate(CONVERSATIONS, 3537.0, seed=1)[: options.requests]
    rows = simulated(requests, options.mfu, options.seed)
    print_table(
        f"{len(requests):,} requests, MFU {options.mfu:g}: mean TTFT in seconds (part of the tokens that is computed)",
        ["rule", *(f"{gbit} Gbit/s" for gbit in GBIT)],
        [[r["rule"], *(f"{r[f'{g} Gbit/s']:.2f} ({r[f'computed at {g}']:.3f})" for g in GBIT)] for r in rows],
    )
    write_json(options.json, "scheduling", options.seed, rows)


if __name__ == "__main__":
    main()
