"""What the pool of a simulated cluster costs by itself: `python benchmarks/cluster_pool.py [--json FILE]`.

Every request of the conversation trace in turn on one of eight nodes: all are asked what they hold of it, and the sky;
what is missing is loaded from who has most; its KV goes to a decoding node, and is cached. Seconds of processor time of
the best of three runs, and the share of whole blocks that hit, which no scheduler has a part in. Without the trace,
the seeded generator's hour.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from _bench import print_table, write_json
from skymemory.conductor.cost_model import LLAMA_70B_8xA800
from skymemory.conductor.request import PromptPlan
from skymemory_lab.sim.cluster.setup import PoolSettings, SkySetup
from skymemory_lab.sim.cluster.simulation import new_pool
from skymemory_lab.sim.trace import BLOCK_TOKENS, TraceRequest, read_trace
from skymemory_lab.sim.workload import CONVERSATIONS, generate

TRACE = Path(__file__).parents[2] / "shared/data/traces/conversation_trace.jsonl"
NODES = 8
POOLS = {
    "1 TB, LRU": PoolSettings(),
    "0.1 TB, LRU": PoolSettings(1e11),
    "0.1 TB, LRU, SSD of 1 TB": PoolSettings(1e11, ssd_bytes=1e12),
    "0.1 TB, LRU, sky of 100 Gbit/s": PoolSettings(1e11, sky=SkySetup()),
    "0.1 TB, LFU": PoolSettings(1e11, policy="lfu"),
    "0.1 TB, length-aware": PoolSettings(1e11, policy="length"),
    "0.1 TB, LRFU": PoolSettings(1e11, policy="lrfu"),
}


def replay(settings: PoolSettings, requests: list[TraceRequest]) -> tuple[float, float]:
    """Processor seconds, and the share of blocks that hit."""
    names = [f"{kind}-{number}" for kind in ("prefill", "decode") for number in range(NODES)]
    prompts = [(one.at_s, one.blocks(), np.array(one.blocks(), dtype=np.uint64)) for one in requests]
    pool, hits = new_pool(names, LLAMA_70B_8xA800, settings), 0
    began_s = time.process_time()
    for number, (now_s, ids, blocks) in enumerate(prompts):
        node = number % NODES
        pool.at(now_s)
        held = pool.match(blocks, range(NODES))
        best = max(range(NODES), key=held.__getitem__)
        sources = [(held[best], names[best]), *((far.blocks, far.tier) for far in pool.far(blocks))]
        most, source = max(sources)
        missing = (most - held[node]) * BLOCK_TOKENS
        plan = (
            PromptPlan(held[node] * BLOCK_TOKENS, held[node] * BLOCK_TOKENS, missing, source) if missing > 0 else None
        )
        hits += pool.load(node, ids, plan, now_s).cached_tokens // BLOCK_TOKENS
        pool.stream(node, NODES + node, len(ids) * BLOCK_TOKENS, now_s, 1.0, 80)
        pool.stored(node, ids, now_s)
    return time.process_time() - began_s, hits / sum(len(ids) for _, ids, _ in prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="FILE")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.trace.is_file():
        requests = read_trace(options.trace)
    else:
        print(f"there is no trace at {options.trace}: the generator's requests instead", file=sys.stderr)
        requests = generate(CONVERSATIONS, 3537.0, seed=1)
    rows: list[dict[str, Any]] = []
    for name, settings in POOLS.items():
        runs = [replay(settings, requests) for _ in range(options.runs)]
        rows.append({"pool": name, "processor_s": min(seconds for seconds, _ in runs), "hit_blocks": runs[0][1]})
    print_table(
        f"{len(requests):,} requests, {sum(len(one.blocks()) for one in requests):,} whole blocks, {NODES} nodes",
        ["each node", "processor s", "blocks hit"],
        [[row["pool"], f"{row['processor_s']:.2f}", f"{row['hit_blocks']:.1%}"] for row in rows],
    )
    write_json(options.json, "cluster_pool", 0, rows)


if __name__ == "__main__":
    main()
