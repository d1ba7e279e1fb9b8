"""What a hit costs in each tier, beside the least it could cost: `python benchmarks/tiers.py [--json FILE] [--quick]`.

Blocks of 2.95 MB, as 128 tokens of TinyLlama's shape in 16 bit. Each tier takes turns with its peer, in one process:

- memory: a copy of the same bytes; the hit alone (a view), and the hit copied out as an engine does it;
- disk: plain files of the same bytes read into memory that was touched before; the files in the page cache, and dropped
  from it before each turn (then a turn is one read);
- Redis: `redis-py` with `hiredis` on its own, over TCP and a Unix socket;
- a hierarchy: the same store without it;
- the constellation over loopback, ten satellites in five processes, beside the Redis client over TCP.

What is received into is touched before; what is freed stays warm (`_bench.WARM_MALLOC`). Medians of each turn; a ratio
is the peer's time by ours, median (least to most) over the rounds. Above 1 we are faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from _bench import WARM_MALLOC, constellation, print_table, redis_server, write_json
from skymemory.cache.tiers.store import HierarchySettings, TieredStore
from skymemory.cache.tiers.tier import TierSettings
from skymemory.store.base import Store
from skymemory.store.disk import DiskStore
from skymemory.store.memory import MemoryStore
from skymemory.testbed.connect import open_constellation

BLOCK_BYTES = 2_949_248
MANY = 8
Run = Callable[[], object]


@dataclass
class Pair:
    """``ours`` and ``peer`` move ``blocks`` blocks; ``before`` is called ahead of each turn."""

    tier: str
    what: str
    peer_is: str
    ours: Run
    peer: Run
    blocks: int = 1
    goal: float | None = None
    before: Run | None = None
    turn: int = 10


def key(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8


def blocks(count: int) -> list[bytes]:
    dice = np.random.default_rng(7)
    return [dice.bytes(BLOCK_BYTES) for _ in range(count)]


def reads(store: Store, count: int) -> Run:
    """A load of this many blocks, never read."""
    keys = [key(number) for number in range(count)]

    def read() -> None:
        ticket = store.prepare_load(keys)
        if any(value is None for value in store.complete_load(ticket)):
            raise SystemExit(f"a block was not there: {ticket.report}")
        store.release(ticket)

    return read


def copies_out(store: Store, count: int, room: np.ndarray) -> Run:
    """The same, copied to where an engine wants it."""
    keys = [key(number) for number in range(count)]

    def read() -> None:
        ticket = store.prepare_load(keys)
        for number, value in enumerate(store.complete_load(ticket)):
            room[number] = np.frombuffer(value, dtype=np.uint8)  # type: ignore[arg-type]
        store.release(ticket)

    return read


def memory_pairs(values: list[bytes]) -> Iterator[Pair]:
    store = MemoryStore(1 << 30)
    store.put_many([(key(number), value) for number, value in enumerate(values)])
    arrays = [np.frombuffer(bytes(value), dtype=np.uint8) for value in values]
    room = np.ones((MANY, BLOCK_BYTES), dtype=np.uint8)

    def copy(count: int) -> Run:
        def run() -> None:
            for number in range(count):
                room[number] = arrays[number]

        return run

    yield Pair("memory", "view", "copy", reads(store, 1), copy(1), 1, 0.6)
    yield Pair("memory", "copied out", "copy", copies_out(store, 1, room), copy(1), 1, 0.6)
    yield Pair("memory", "copied out", "copy", copies_out(store, MANY, room), copy(MANY), MANY, 0.6)


def disk_pairs(folder: Path, values: list[bytes]) -> Iterator[Pair]:
    store = DiskStore(folder / "store", 1 << 30)
    store.put_many([(key(number), value) for number, value in enumerate(values)])
    plain = [folder / f"plain{number}" for number in range(len(values))]
    for path, value in zip(plain, values, strict=True):
        path.write_bytes(value)
    room = np.ones((MANY, BLOCK_BYTES), dtype=np.uint8)
    stored = sorted((folder / "store" / "values").iterdir())
    os.sync()

    def read(count: int) -> Run:
        def run() -> None:
            for number in range(count):
                with plain[number].open("rb", buffering=0) as file:
                    if file.readinto(room[number].data) != BLOCK_BYTES:
                        raise SystemExit("a short read")

        return run

    def forget() -> None:
        for path in (*plain, *stored):
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    yield Pair("disk", "page cache", "plain read", reads(store, 1), read(1), 1, 0.7)
    yield Pair("disk", "page cache", "plain read", reads(store, MANY), read(MANY), MANY, 0.7)
    yield Pair("disk", "not in memory", "plain read", reads(store, MANY), read(MANY), MANY, 0.7, before=forget, turn=1)


def redis_pairs(port: int, socket_path: Path, values: list[bytes]) -> Iterator[Pair]:
    import redis

    from skymemory.store.redis import RedisStore

    addresses = {"TCP": f"redis://127.0.0.1:{port}/0", "Unix socket": f"unix://{socket_path}"}
    for over, address in addresses.items():
        store, client = RedisStore(address, timeout_s=10), redis.Redis.from_url(address)
        store.put_many([(key(number), value) for number, value in enumerate(values)])
        for number, value in enumerate(values):
            client.set(f"bare{number}", value)

        def read(client: Any = client) -> None:
            if len(client.get("bare0")) != BLOCK_BYTES:
                raise SystemExit("a short read")

        yield Pair("redis", over, "bare client", reads(store, 1), read, 1, 0.9)


def hierarchy_pairs(folder: Path, values: list[bytes]) -> Iterator[Pair]:
    items = [(key(number), value) for number, value in enumerate(values)]
    settings, local, threads = HierarchySettings(promote="never"), TierSettings(local=True), TierSettings()
    memory, disk = MemoryStore(1 << 30), DiskStore(folder / "bare", 1 << 30)
    over_memory = TieredStore([(MemoryStore(1 << 30), local)], settings)
    over_disk = TieredStore([(DiskStore(folder / "tiered", 1 << 30), threads)], settings)
    below = DiskStore(folder / "below", 1 << 30)
    below.put_many(items)
    both = TieredStore([(MemoryStore(1 << 30), local), (below, threads)], settings)
    for store in (memory, disk, over_memory, over_disk):
        store.put_many(items)
    yield Pair("hierarchy", "over memory", "memory", reads(over_memory, 1), reads(memory, 1))
    yield Pair("hierarchy", "over disk", "disk", reads(over_disk, 1), reads(disk, 1))
    yield Pair("hierarchy", "memory misses, disk hits", "disk", reads(both, 1), reads(disk, 1))
    yield Pair("hierarchy", "memory misses, disk hits", "disk", reads(both, MANY), reads(disk, MANY), MANY)


@contextmanager
def all_pairs(quick: bool) -> Iterator[Iterator[Pair]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skymemory-tiers-")))
        values = blocks(MANY)

        def pairs() -> Iterator[Pair]:
            yield from memory_pairs(values)
            yield from disk_pairs(folder, values)
            yield from hierarchy_pairs(folder, values)
            port = stack.enter_context(redis_server(folder / "redis.sock"))
            peer: Run | None = None
            if port is not None:
                for pair in redis_pairs(port, folder / "redis.sock", values):
                    peer = peer or pair.peer
                    yield pair
            if peer is not None and not quick:
                _, run_dir = stack.enter_context(constellation(delay_scale=0.0))
                sky = open_constellation(run_dir)
                stack.callback(sky.close)
                sky.put_many([(key(0), values[0])])
                yield Pair("constellation", "los, no delays", "bare Redis, TCP", reads(sky, 1), peer)

        yield pairs()


def median_s(pair: Pair, run: Run) -> float:
    if pair.before is not None:
        pair.before()
    seconds = []
    for _ in range(pair.turn):
        began_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def measure(pair: Pair, rounds: int) -> dict[str, Any]:
    pair.peer()
    pair.ours()
    ours_s, peer_s = [], []
    for number in range(rounds):
        turns = [(pair.ours, ours_s), (pair.peer, peer_s)]
        for run, times in turns if number % 2 else turns[::-1]:
            times.append(median_s(pair, run))
    ratios = sorted(peer / ours for peer, ours in zip(peer_s, ours_s, strict=True))
    return {
        "tier": pair.tier,
        "what": pair.what,
        "peer": pair.peer_is,
        "blocks": pair.blocks,
        "bytes": pair.blocks * BLOCK_BYTES,
        "ours_s": statistics.median(ours_s),
        "peer_s": statistics.median(peer_s),
        "ratio": statistics.median(ratios),
        "ratio_least": ratios[0],
        "ratio_most": ratios[-1],
        "goal": pair.goal,
    }


def line_of(row: dict[str, Any]) -> list[str]:
    ours, peer = (f"{row[who] * 1e6:,.0f}" for who in ("ours_s", "peer_s"))
    rate = f"{row['bytes'] / row['ours_s'] / 1e6:,.0f}" if row["what"] != "view" else ""
    ratio = f"{row['ratio']:.2f} ({row['ratio_least']:.2f} to {row['ratio_most']:.2f})"
    goal = "" if row["goal"] is None else f"{row['goal']:.1f}"
    return [f"{row['tier']}, {row['what']}", str(row["blocks"]), ours, rate, row["peer"], peer, ratio, goal]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, metavar="N")
    parser.add_argument("--quick", action="store_true", help="five rounds, and no constellation")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in WARM_MALLOC.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **WARM_MALLOC})  # malloc reads it once
    rounds = 5 if options.quick else options.rounds
    with all_pairs(options.quick) as pairs:
        rows = [measure(pair, rounds) for pair in pairs]
    print_table(
        f"a hit, {BLOCK_BYTES / 1e6:.2f} MB a block; {rounds} rounds",
        ["tier", "blocks", "µs", "MB/s", "peer", "its µs", "peer's time by ours", "goal"],
        [line_of(row) for row in rows],
    )
    write_json(options.json, "tiers", 7, rows)


if __name__ == "__main__":
    main()
