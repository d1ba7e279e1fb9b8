"""Eviction policies and replacement on one workload: `python benchmarks/eviction.py [--json FILE]`.

Simulated time, real machines: a tree of prompts (system prompts and conversations by Zipf's law, tails seen once) and
some files, more than the memory holds, while the box moves. The same seed gives the same requests to every policy.

- dead: bytes of blocks that lost a chunk, as a share of the memory in use, averaged over time;
- messages: packets about eviction (notices, questions, proofs, orders to evict, word to the ground), link by link;
- holes: blocks that the index promised and a read found incomplete;
- hits: blocks served of all blocks asked for; "of seen": of those that were asked for before;
- moved: bytes of MIGRATE packets, link by link.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from _bench import print_table, write_json
from skymemory.constellation.presets import preset_named
from skymemory.eviction import REPLACEMENTS
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.satellite.state import EvictionConfig, parse_policies
from skymemory.protocol.wire import CHUNK_REF_BYTES, ChunkRef, Op
from skymemory.store.base import Presence, Store
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore, SkySettings
from skymemory.store.wrappers import AdmittingStore, Sketch
from skymemory.transport.simulated import SimulatedConstellation

CHUNK_BYTES, BLOCK_CHUNKS = 256, 23
BLOCK_BYTES = CHUNK_BYTES * BLOCK_CHUNKS
MEMORY_CHUNKS = 300
"""Of one satellite: a box of ten holds some 130 blocks."""
REQUEST_S, SLOT_MOVE_S, SWEEP_S = 1.0, 40.0, 5.0
ABOUT_EVICTION = (
    Op.NOTICE,
    Op.GONE,
    Op.HAS,
    Op.PRESENCE,
    Op.CHECK,
    Op.CHECKED,
    Op.EVICT,
    Op.EVICTED,
    Op.FORGET,
)

POLICIES = (
    "none",
    "lazy",
    "gossip-plane",
    "gossip",
    "periodic",
    "migration",
    "lazy,gossip",
    "lazy,periodic",
    "lazy,gossip,periodic,migration",
)


class Recorder(SimulatedConstellation):
    """Counts packets and bytes by operation, on every link they pass."""

    def __init__(self, *args: Any, **how: Any) -> None:
        self.packets: Counter[int] = Counter()
        self.op_bytes: Counter[int] = Counter()
        super().__init__(*args, **how)

    def _send(self, batch: Any, sender: Any, receiver: Any) -> None:
        for data in batch.datagrams():
            op = data[9] if data[0] & 0x10 else data[17]
            self.packets[op] += 1
            self.op_bytes[op] += len(data)
        super()._send(batch, sender, receiver)


def zipf(rng: random.Random, count: int, exponent: float = 1.1) -> int:
    weights = list(accumulate(1 / (rank + 1) ** exponent for rank in range(count)))
    return rng.choices(range(count), cum_weights=weights)[0]


def workload(seed: int, requests: int) -> Iterator[list[bytes]]:
    """Chains of keys: a system prompt of 1 to 5 blocks, a conversation of up to 6 more, a tail that comes once."""
    rng = random.Random(seed)

    def key(*path: object) -> bytes:
        return random.Random(repr((seed, path))).randbytes(32)

    for number in range(requests):
        root, talk = zipf(rng, 40), zipf(rng, 30, 0.8)
        turns = rng.randrange(0, 7)
        chain = [key(root, depth) for depth in range(1 + root % 5)]
        chain += [key(root, talk, depth) for depth in range(turns)]
        chain += [key(root, talk, turns, "once", number, depth) for depth in range(rng.randrange(0, 5))]
        yield chain


def value_of(key: bytes, size: int = BLOCK_BYTES) -> bytes:
    return random.Random(key).randbytes(size)


def dead_bytes(sky: SimulatedConstellation) -> tuple[int, int]:
    """Bytes of values that have not all their chunks anywhere, and of all."""
    indices: dict[bytes, set[int]] = {}
    sizes: Counter[bytes] = Counter()
    chunks: dict[bytes, int] = {}
    for machine in sky.satellites.values():
        for key, share in machine.store.shares.items():
            indices.setdefault(key, set()).update(share)
            sizes[key] += sum(len(payload) + CHUNK_REF_BYTES for _, payload in share.values())
            chunks[key] = ChunkRef.unpack(next(iter(share.values()))[0]).chunks
    return sum(sizes[key] for key in indices if len(indices[key]) < chunks[key]), sum(sizes.values())


def run(eviction: str, replacement: str, admission: bool, seed: int, requests: int) -> dict[str, Any]:
    """One run; what it cost and what it served."""
    began = time.perf_counter()
    preset = preset_named("testbed-19x5")
    policies = parse_policies(eviction)
    sky = Recorder(
        SkyMap(preset.torus, preset.centre),
        MEMORY_CHUNKS * (CHUNK_BYTES + CHUNK_REF_BYTES),
        MoveClock(slot_period_s=SLOT_MOVE_S, plane_period_s=4 * SLOT_MOVE_S, time_scale=1.0),
        delay_s=lambda sender, receiver: 0.002,
        replacement=replacement,
        eviction=EvictionConfig.of(policies, SWEEP_S),
    )
    driver = sky.connect(ClientConfig(1, expected_rtt_s=0.004))
    settings = SkySettings(chunk_bytes=CHUNK_BYTES, lazy_eviction="lazy" in policies)
    bare = ConstellationStore(driver, sky.sky, settings, index=SharedIndex())
    store: Store = AdmittingStore(bare, Sketch(1 << 14)) if admission else bare
    files = random.Random(seed + 1)
    asked = hits = holes = seen_before = 0
    dead = total = 0
    seen: set[bytes] = set()
    for number, chain in enumerate(workload(seed, requests), 1):
        found = store.prefix(chain)
        got = store.get_many(chain[:found]) if found else []
        assert all(bytes(value) == value_of(key) for key, value in zip(chain, got, strict=False) if value is not None)
        good = next((at for at, value in enumerate(got) if value is None), found)
        asked, hits, holes = asked + len(chain), hits + good, holes + sum(value is None for value in got)
        seen_before += sum(key in seen for key in chain)
        seen.update(chain)
        there = store.lookup(chain)
        missing = [key for key, present in zip(chain, there, strict=True) if present is Presence.MISS]
        store.put_many([(key, value_of(key)) for key in missing])
        if number % 10 == 0:
            name = files.randbytes(32)
            bare.put_many([(name, value_of(name, files.randrange(1, 15) * CHUNK_BYTES))])
        sky.settle(sky.now_s + REQUEST_S)
        if number % 5 == 0 and sky.now_s % SLOT_MOVE_S >= 5:
            now_dead, now_total = dead_bytes(sky)
            dead, total = dead + now_dead, total + now_total
    return {
        "eviction": eviction,
        "replacement": replacement,
        "admission": "second" if admission else "all",
        "dead": dead / max(1, total),
        "messages": sum(sky.packets[op] for op in ABOUT_EVICTION),
        "holes": holes,
        "hits": hits / asked,
        "hits_of_seen": hits / max(1, seen_before),
        "moved_bytes": sky.op_bytes[Op.MIGRATE],
        "stored_bytes": sum(machine.store.ledger.figures()["bytes_set"] for machine in sky.satellites.values()),
        "requests": requests,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seed", type=int, default=20240601)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = [run(policies, "lru", False, options.seed, options.requests) for policies in POLICIES]
    print_table(
        f"eviction, LRU, {options.requests} prompts",
        ["policies", "dead", "messages", "holes", "hits", "of seen", "moved MB"],
        [
            [
                row["eviction"],
                f"{row['dead']:.1%}",
                f"{row['messages']:,}",
                f"{row['holes']:,}",
                f"{row['hits']:.1%}",
                f"{row['hits_of_seen']:.1%}",
                f"{row['moved_bytes'] / 1e6:.1f}",
            ]
            for row in rows
        ],
    )
    kinds = [(name, admission) for admission in (False, True) for name in REPLACEMENTS]
    replaced = [run("lazy,gossip", name, admission, options.seed, options.requests) for name, admission in kinds]
    print_table(
        f"replacement and admission, lazy,gossip, {options.requests} prompts",
        ["replacement", "stored from sighting", "hits", "of seen", "stored MB"],
        [
            [
                row["replacement"],
                "2nd" if row["admission"] == "second" else "1st",
                f"{row['hits']:.1%}",
                f"{row['hits_of_seen']:.1%}",
                f"{row['stored_bytes'] / 1e6:.1f}",
            ]
            for row in replaced
        ],
    )
    write_json(options.json, "eviction", options.seed, rows + replaced)


if __name__ == "__main__":
    main()
