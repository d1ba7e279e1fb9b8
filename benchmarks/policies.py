"""Eviction policies of the memory tier on an hour of real requests:
`python benchmarks/policies.py [--json FILE] [--plot FILE]`.

The memory store itself, with values of one byte and a budget of so many; called as engines call it: the prefix is
looked for and loaded, what is missing is stored. A hit is a block of the longest prefix that was there. Beside the
policies Belady's rule, which knows the future; of blocks that are wanted equally late it evicts the deeper one, so
that it is prefix-closed itself: there is one bound, not two, and the run checks that.

Requests: as in `replacement.py`. `--quick`: three capacities and the first 3,000 requests.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from _bench import print_table, write_json
from replacement import TRACE, Prompts, belady, read_trace
from skymemory.eviction import DEFAULT_POLICY, POLICIES
from skymemory.store.base import Presence
from skymemory.store.memory import MemoryStore

CAPACITIES = (300, 1_000, 3_000, 6_000, 10_000, 20_000, 30_000, 60_000, 100_000)
QUICK_CAPACITIES, QUICK_REQUESTS = (1_000, 3_000, 10_000), 3_000


def replay(policy: str, prompts: Prompts, capacity: int) -> list[int]:
    """How many blocks of each prompt hit."""
    store = MemoryStore(capacity, policy=policy, pin_fraction=0)
    hits = []
    for prompt in prompts:
        found = store.prefix(prompt)
        hits.append(sum(value is not None for value in store.get_many(prompt[:found])))
        there = store.lookup(prompt)
        store.put_many([(key, b"x") for key, one in zip(prompt, there, strict=True) if one is Presence.MISS])
    store.close()
    return hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="FILE")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture of the curves (needs matplotlib)")
    options = parser.parse_args()
    if not options.trace.is_file():
        print(f"skipped: there is no trace at {options.trace}; name one with --trace", file=sys.stderr)
        return
    prompts = read_trace(options.trace, QUICK_REQUESTS if options.quick else None)
    blocks, late = sum(map(len, prompts)), len(prompts) * 7 // 10
    late_blocks = sum(map(len, prompts[late:]))
    rows: list[dict[str, Any]] = []
    for capacity in QUICK_CAPACITIES if options.quick else CAPACITIES:
        row: dict[str, Any] = {"capacity": capacity, "last 30 %": {}}
        for policy in POLICIES:
            hits = replay(policy, prompts, capacity)
            row[policy] = sum(hits) / blocks
            row["last 30 %"][policy] = sum(hits[late:]) / late_blocks
        row["belady"] = belady(prompts, capacity) / blocks
        rows.append(row)
    names = [*POLICIES, "belady"]
    print_table(
        f"{len(prompts):,} prompts of {blocks:,} blocks: share of blocks that hit",
        ["capacity, blocks", *names, "best"],
        [
            [f"{row['capacity']:,}", *(f"{row[name]:.1%}" for name in names), max(POLICIES, key=lambda n: row[n])]
            for row in rows
        ],
    )
    print_table(
        "the last 30 % of the prompts",
        ["capacity, blocks", *POLICIES],
        [[f"{row['capacity']:,}", *(f"{row['last 30 %'][name]:.1%}" for name in POLICIES)] for row in rows],
    )
    write_json(options.json, "policies", 0, rows)
    if options.plot is not None:
        plot(rows, options.plot)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    capacities = [row["capacity"] for row in rows]
    for policy in POLICIES:
        thick = 2.4 if policy == DEFAULT_POLICY else 1.2
        axes.plot(capacities, [100 * row[policy] for row in rows], marker="o", markersize=3, lw=thick, label=policy)
    axes.plot(capacities, [100 * row["belady"] for row in rows], "k--", lw=1.2, label="Belady (knows the future)")
    axes.set_xscale("log")
    axes.set_xlabel("capacity, blocks of 512 tokens")
    axes.set_ylabel("blocks that hit, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"written: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
