"""Replacement policies on an hour of real requests: `python benchmarks/replacement.py [--json FILE]`.

The policies that satellites run, behind one memory that counts in blocks of 512 tokens, called as clients call them: a
found prefix is read and what is missing stored, both from the last block, and the prefix touched. A hit is a block of
the longest prefix that is there. The last block of a prompt counts only if it is full. Beside them Belady's rule,
which knows the future and evicts what is wanted last: nothing does better.

Requests: the conversation trace released with the Mooncake paper, from `../shared/data` or `--trace FILE`.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _bench import print_table, write_json
from skymemory.eviction import REPLACEMENTS, Replacement, replacement_named

TRACE = Path(__file__).parents[2] / "shared/data/traces/conversation_trace.jsonl"
TOKENS = 512
CAPACITIES = (300, 1_000, 3_000, 10_000, 30_000, 60_000)
Prompts = Sequence[Sequence[bytes]]


def read_trace(path: Path, requests: int | None) -> Prompts:
    """Per request the names of its full blocks."""
    prompts = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            full = request["hash_ids"][: request["input_length"] // TOKENS]
            prompts.append([number.to_bytes(8) * 4 for number in full])
            if len(prompts) == requests:
                break
    return prompts


def replay(policy: Replacement, prompts: Prompts, capacity: int) -> int:
    """How many blocks hit."""
    here: set[bytes] = set()
    hits = 0
    for prompt in prompts:
        found = next((at for at, key in enumerate(prompt) if key not in here), len(prompt))
        hits += found
        for key in reversed(prompt[:found]):
            policy.used(key)
        for key in reversed(prompt[found:]):
            if key not in here and len(here) >= capacity:
                victim = policy.victim(key)
                assert victim is not None
                here.discard(victim)
                policy.removed(victim, evicted=True)
            here.add(key)
            policy.touched(key)
        for key in reversed(prompt[:found] if found < len(prompt) else ()):
            if key in here:
                policy.touched(key)
    return hits


def belady(prompts: Prompts, capacity: int) -> int:
    """Hits of who evicts what is wanted last, and of equals the deeper: what is left then is whole prefixes."""
    never = len(prompts)
    next_use: dict[bytes, int] = {}
    wanted: list[list[int]] = [[] for _ in prompts]
    for at in range(len(prompts) - 1, -1, -1):
        wanted[at] = [next_use.get(key, never) for key in prompts[at]]
        next_use.update(dict.fromkeys(prompts[at], at))
    here: dict[bytes, int] = {}
    heap: list[tuple[int, int, bytes]] = []
    hits = 0
    for prompt, when in zip(prompts, wanted, strict=True):
        found = next((at for at, key in enumerate(prompt) if key not in here), len(prompt))
        assert found == sum(key in here for key in prompt), "Belady's rule left a hole"
        hits += found
        for depth, key in enumerate(prompt):
            here[key] = when[depth]
            heapq.heappush(heap, (-when[depth], -depth, key))
        while len(here) > capacity:
            at, _, key = heapq.heappop(heap)
            if here.get(key) == -at:
                del here[key]
    return hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="FILE")
    parser.add_argument("--requests", type=int, metavar="N", help="the first so many only")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not options.trace.is_file():
        print(f"skipped: there is no trace at {options.trace}; name one with --trace", file=sys.stderr)
        return
    prompts = read_trace(options.trace, options.requests)
    blocks = sum(map(len, prompts))
    rows: list[dict[str, Any]] = []
    for capacity in CAPACITIES:
        hits = {name: replay(replacement_named(name), prompts, capacity) / blocks for name in REPLACEMENTS}
        rows.append({"capacity": capacity, **hits, "belady": belady(prompts, capacity) / blocks})
    unique = len({key for prompt in prompts for key in prompt})
    print_table(
        f"{len(prompts):,} prompts of {blocks:,} blocks, {unique:,} of them different: share of blocks that hit",
        ["memory, blocks", *REPLACEMENTS, "Belady"],
        [[f"{row['capacity']:,}", *(f"{row[name]:.1%}" for name in (*REPLACEMENTS, "belady"))] for row in rows],
    )
    write_json(options.json, "replacement", 0, rows)


if __name__ == "__main__":
    main()
