"""What choosing a server costs: 64 servers, a million known blocks, prompts of 8k tokens.

Each row is a process of its own, so that memory is what the index took. A prompt is 512 blocks of 16 tokens; of the
prompts asked about, a quarter is held whole by one server, half begins with a part that one or all servers hold, and a
quarter is new. Every server has reported its load; requests are in flight. Times are of ``Picker.pick`` (the strategy,
without the reasons, which are made only on request), of the index's ``match`` alone, and of ``learn``
with a full table, where every new block evicts one.

A second table is the whole account of a request with the default strategy: ``pick``, ``routed``, ``succeeded`` and
``on_request_end``, in processor time, with few servers and prompts of several lengths. A quarter of each prompt is
shared by all, a third of the prompts come again, 16 are under way at a time, and every server is scraped once a second.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from _bench import print_table, write_json
from skymemory import native
from skymemory.conductor.picker import Fleet, Picker, ReportedLoad
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.request import Decision, Prompt, Request
from skymemory.conductor.strategies.registry import named
from skymemory.native.twin import backend

BLOCKS, BLOCK_TOKENS = 512, 16
SHARED_BLOCKS = 64
LIMIT = 256
"""Of matched blocks, in one of the rows."""
TABLES: dict[str, Any] = {"native": native.PrefixTable, "python": backend.PrefixTable}
ROWS = [("approximate", "native", LIMIT), ("approximate", "native", 0), ("least-ttft", "native", 0)]
ROWS += [("approximate", "python", LIMIT), ("approximate", "python", 0)]

ACCOUNTS = [(servers, blocks) for servers in (4, 8) for blocks in (8, 64, 512)]


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize()


def percentiles_us(run: Callable[[int], object], count: int) -> dict[str, float]:
    taken = np.empty(count)
    for at in range(count):
        started = time.perf_counter()
        run(at)
        taken[at] = time.perf_counter() - started
    p50, p99, most = np.percentile(taken * 1e6, [50, 99, 100])
    return {"p50_us": round(float(p50), 1), "p99_us": round(float(p99), 1), "max_us": round(float(most), 1)}


def chain(dice: np.random.Generator, head: Any = None) -> Any:
    """A chain of hashes, which look like random numbers."""
    fresh = dice.integers(1, 2**64, BLOCKS if head is None else BLOCKS - len(head), dtype=np.uint64)
    return fresh if head is None else np.concatenate([head, fresh])


def request_of(blocks: Any) -> Request:
    return Request(Prompt(blocks, blocks, BLOCK_TOKENS, BLOCKS * BLOCK_TOKENS), model="m")


def measure(
    strategy: str, table: str, max_match: int, servers: int, known: int, picks: int, seed: int
) -> dict[str, Any]:
    dice = np.random.default_rng(seed)
    fleet = Fleet()
    for number in range(servers):
        server = fleet.add(f"http://10.0.0.{number}:8000")
        server.reported = ReportedLoad(0.0, int(dice.integers(4)), int(dice.integers(30)), float(dice.random()))
        server.in_flight = int(dice.integers(30))
    before = rss_bytes()
    limit = max_match or BLOCKS
    private = limit - SHARED_BLOCKS
    chains = known // private
    capacity = SHARED_BLOCKS + -(-chains // servers) * private
    head = dice.integers(1, 2**64, SHARED_BLOCKS, dtype=np.uint64)
    # Chains are made again from their seeds where they are asked about: kept, they would count as the index's memory.
    index = ApproximatePrefixIndex(capacity, max_match or None, 0xC0FFEE_D15EA5E | 1, TABLES[table])
    for number in range(chains):
        index.learn(number % servers, chain(np.random.default_rng((seed, number)), head))
    pairs = sum(index.blocks_of(slot) for slot in range(servers))
    taken_bytes = rss_bytes() - before

    def asked(at: int) -> Any:
        own = chain(np.random.default_rng((seed, int(dice.integers(chains)))), head)
        if at % 4 == 0:
            return own
        if at % 4 == 1:
            return chain(dice)
        part = SHARED_BLOCKS if at % 4 == 2 else int(dice.integers(SHARED_BLOCKS, BLOCKS))
        return chain(dice, own[:part])

    requests = [request_of(asked(at)) for at in range(min(picks, 2000))]
    slots = [server.slot for server in fleet]
    picker = Picker(fleet, named(strategy, index=index), seed=seed)
    for request in requests[:50]:
        picker.pick(request, 1.0)
    found = [index.match(request.prompt.blocks, slots) for request in requests[:400]]
    turn = len(requests)
    row: dict[str, Any] = {
        "strategy": strategy,
        "table": table,
        "max_match": max_match,
        "servers": servers,
        "distinct_blocks": index.distinct_blocks,
        "pairs": pairs,
        "bytes_per_pair": round(taken_bytes / pairs, 1),
        "mean_best_match": round(float(np.mean([max(depths) for depths in found])), 1),
        "pick": percentiles_us(lambda at: picker.pick(requests[at % turn], 1.0), picks),
        "match": percentiles_us(lambda at: index.match(requests[at % turn].prompt.blocks, slots), picks),
    }
    fresh = [chain(dice, head) for _ in range(min(picks, 500))]
    row["learn"] = percentiles_us(lambda at: index.learn(at % servers, fresh[at]), len(fresh))
    text = dice.bytes(BLOCKS * 64)
    hashes: Any = native if table == "native" else backend
    row["hash"] = percentiles_us(lambda _: hashes.chain_hashes(text, 64, seed), 200)
    return row


def account(servers: int, blocks: int, requests: int, seed: int) -> dict[str, Any]:
    """Microseconds of processor per request: medians over batches of 200."""
    dice = np.random.default_rng(seed)
    fleet = Fleet()
    for number in range(servers):
        fleet.add(f"http://10.0.0.{number}:8000")
    picker = Picker(fleet, named("least-ttft"), seed=seed)
    head = dice.integers(1, 2**64, blocks // 4, dtype=np.uint64)
    prompts = []
    for _ in range(requests * 2 // 3):
        own = np.concatenate([head, dice.integers(1, 2**64, blocks - len(head), dtype=np.uint64)])
        prompts.append(Prompt(own, own, BLOCK_TOKENS, blocks * BLOCK_TOKENS))
    asked = [Request(prompts[int(at)], model="m") for at in dice.integers(len(prompts), size=requests)]
    under_way: deque[Decision] = deque()
    now_s, batches = 0.0, []
    for begin in range(0, requests, 200):
        for server in fleet:
            server.reported = ReportedLoad(now_s, int(dice.integers(3)), int(dice.integers(30)), float(dice.random()))
        started = time.process_time()
        for request in asked[begin : begin + 200]:
            now_s += 0.005
            decision = picker.pick(request, now_s)
            picker.routed(decision, now_s)
            under_way.append(decision)
            if len(under_way) > 16:
                first = under_way.popleft()
                picker.succeeded(first, now_s)
                picker.on_request_end(first, now_s, None, 100)
        batches.append((time.process_time() - started) / 200)
    return {"servers": servers, "blocks": blocks, "account_us": round(float(np.median(batches[1:])) * 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="different blocks that are known (%(default)s)")
    parser.add_argument("--picks", type=int, default=8000, help="of each row (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--account", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.account:
        print(json.dumps(account(*json.loads(options.account), options.seed)))
        return
    if options.row:
        strategy, table, max_match = json.loads(options.row)
        row = measure(strategy, table, max_match, options.servers, options.blocks, options.picks, options.seed)
        print(json.dumps(row))
        return
    shared = [f"--{name}={getattr(options, name)}" for name in ("servers", "blocks", "picks", "seed")]
    rows = []
    for row in ROWS:
        command = [sys.executable, __file__, *shared, "--row", json.dumps(row)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    title = f"{options.servers} servers, {options.blocks:,} known blocks, prompts of {BLOCKS * BLOCK_TOKENS:,} tokens"
    times = [f"{what} {which}" for what in ("pick", "match", "learn") for which in ("p50", "p99")]
    print_table(
        f"{title}; microseconds",
        ["strategy", "table", "matched", *times, "hash p50", "B per pair"],
        [
            [
                row["strategy"],
                row["table"],
                str(row["max_match"] or "all"),
                *(str(row[what][which]) for what in ("pick", "match", "learn") for which in ("p50_us", "p99_us")),
                str(row["hash"]["p50_us"]),
                str(row["bytes_per_pair"]),
            ]
            for row in rows
        ],
    )
    accounts = []
    for servers, blocks in ACCOUNTS:
        command = [sys.executable, __file__, *shared, "--account", json.dumps([servers, blocks, options.picks])]
        accounts.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    print_table(
        "the whole account of a request, least-ttft; microseconds of processor",
        ["servers", "prompt's blocks", "account"],
        [[str(row["servers"]), str(row["blocks"]), str(row["account_us"])] for row in accounts],
    )
    rows += accounts
    write_json(options.json, "picking", options.seed, rows)


if __name__ == "__main__":
    main()
