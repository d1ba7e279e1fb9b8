"""How long choosing a server takes: every strategy, 64 servers, a million known blocks, prompts of 8,000 tokens.

Of the requests a third goes on with a prompt that some server holds, a third begins like one that all hold, and a
third is new; two hundred are under way. ``pick`` is what stands between a request and its server; ``routed`` and
``succeeded`` come after it. Bytes are what the process grew by while the strategy learned, per block and server.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from _bench import print_table, write_json
from skymemory import native
from skymemory.conductor.picker import Fleet, Picker
from skymemory.conductor.prefix_index.events import BlocksStored
from skymemory.conductor.request import Prompt, Request, seed
from skymemory.conductor.strategies.registry import NAMES, named
from skymemory.conductor.strategies.weighted import Precise

BLOCK_TOKENS = 16
MODEL = "m"
OPTIONS: dict[str, dict[str, object]] = {"hash-trie": {"max_blocks": 1_200_000}}
UNDER_WAY = 200


def a_request(tokens: NDArray[np.uint32], number: int) -> Request:
    data = tokens.tobytes()
    size = BLOCK_TOKENS * tokens.itemsize
    prompt = Prompt(
        native.chain_hashes(data, size, seed(MODEL, "", "")),
        native.piece_hashes(data, size, seed(MODEL, "", "")),
        BLOCK_TOKENS,
        len(tokens),
        data[:1024],
    )
    return Request(prompt, MODEL, session=f"session {number}")


class Traffic:
    """Prompts that servers hold, and prompts to come."""

    def __init__(self, servers: int, blocks: int, tokens: int, picks: int, dice: np.random.Generator) -> None:
        def draw(count: int) -> NDArray[np.uint32]:
            return dice.integers(0, 128_000, count, dtype=np.uint32)

        hot_tokens = tokens * 3 // 5
        self.hot = [draw(hot_tokens) for _ in range(8)]
        per_prompt = tokens // BLOCK_TOKENS
        shared = len(self.hot) * (hot_tokens // BLOCK_TOKENS)
        self.known = [draw(tokens) for _ in range(max(1, (blocks - shared) // per_prompt))]
        self.coming = []
        for number in range(picks):
            kind = number % 3
            held = self.known[int(dice.integers(len(self.known)))]
            beginning = (held[: tokens - 256], self.hot[number % len(self.hot)], draw(0))[kind]
            self.coming.append(a_request(np.concatenate([beginning, draw(tokens - len(beginning))]), number))
        self.pairs = len(self.known) * per_prompt + shared * servers

    def teach(self, picker: Picker) -> None:
        servers = list(picker.fleet)
        scorer = picker.scorer
        if isinstance(scorer, Precise):
            for server in servers:
                scorer.index.follow(server.slot, MODEL)  # type: ignore[attr-defined]
        held = [(tokens, servers[at % len(servers)]) for at, tokens in enumerate(self.known)]
        held += [(tokens, server) for tokens in self.hot for server in servers]
        for at, (tokens, server) in enumerate(held):
            if isinstance(scorer, Precise):
                names = [at << 32 | number for number in range(len(tokens) // BLOCK_TOKENS)]
                event = BlocksStored(names, None, tokens.tolist(), BLOCK_TOKENS)
                scorer.index.take(server.slot, event)  # type: ignore[attr-defined]
            else:
                scorer.succeeded(a_request(tokens, at), server, 0.0, None)


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(name: str, servers: int, traffic: Traffic, clock: Callable[[], float]) -> dict[str, float]:
    fleet = Fleet()
    for number in range(servers):
        fleet.add(f"10.0.0.{number}:8000")
    picker = Picker(fleet, named(name, **OPTIONS.get(name, {})), seed=1)
    gc.collect()
    before = resident_bytes()
    traffic.teach(picker)
    grown = resident_bytes() - before
    times: dict[str, list[float]] = {"pick": [], "routed": [], "succeeded": []}
    under_way: deque = deque()
    gc.collect()
    gc.freeze()
    for number, request in enumerate(traffic.coming):
        now_s = 10.0 + number * 0.02
        began = clock()
        decision = picker.pick(request, now_s)
        picked = clock()
        picker.routed(decision, now_s)
        routed = clock()
        under_way.append(decision)
        if len(under_way) > UNDER_WAY:
            oldest = under_way.popleft()
            began_s = clock()
            picker.succeeded(oldest, now_s)
            times["succeeded"].append(clock() - began_s)
            picker.on_request_end(oldest, now_s)
            times["pick"].append(picked - began)
            times["routed"].append(routed - picked)
    gc.unfreeze()
    found = {}
    for verb, taken in times.items():
        p50, p99 = np.percentile(taken, [50, 99]) * 1e6
        found |= {f"{verb} p50 [us]": round(float(p50), 1), f"{verb} p99 [us]": round(float(p99), 1)}
    return found | {"bytes per block and server": round(grown / traffic.pairs, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--strategies", default=",".join(NAMES))
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="different blocks that servers hold")
    parser.add_argument("--tokens", type=int, default=8_000)
    parser.add_argument("--picks", type=int, default=3_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--cpu", action="store_true", help="processor time: where others use the machine too")
    options = parser.parse_args()
    clock = time.thread_time if options.cpu else time.perf_counter
    dice = np.random.default_rng(options.seed)
    traffic = Traffic(options.servers, options.blocks, options.tokens, options.picks, dice)
    rows = []
    for name in options.strategies.split(","):
        # In a process of its own, so that none takes memory that another left.
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
            rows.append({"strategy": name, **process.submit(measure, name, options.servers, traffic, clock).result()})
    header = list(rows[0])
    title = f"{options.servers} servers, {options.blocks:,} blocks, prompts of {options.tokens:,} tokens"
    title += ", processor time" if options.cpu else ", wall time"
    print_table(title, header, [[str(row[column]) for column in header] for row in rows])
    write_json(options.json, "picking", options.seed, rows)


if __name__ == "__main__":
    main()
