"""Reads while the box turns, beside the same reads while it stands still: `python benchmarks/motion.py [--json FILE]`.

Real processes on this computer: blocks of 480 chunks over 10 of 95 satellites, a read of one of them every few
milliseconds. Still and turning constellations (the last as fast as the budget allows, others
slower) take turns. Before that the same blocks turn with no reader, at
faster and faster clocks: what the host processes then burn, and what crosses the busiest link, is what migration costs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from _bench import constellation, print_table, write_json

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.protocol.satellite import ledgers

from skymemory.metrics import percentile
from skymemory.placement import locate
from skymemory.placement.locate import Moves
from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.protocol.wire import CHUNK_REF_BYTES
from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed.connect import clock_of, open_constellation, sky_of
from skymemory.testbed.control import ping_all
from skymemory.testbed.plan import ConstellationPlan
from skymemory.testbed.run_directory import RunDirectory

CHUNKS = 480
BUDGET = 0.20


def processor_s(folder: Path) -> float:
    """Seconds of processor that the host processes have used."""
    ticks = 0
    for record in RunDirectory(folder).living().values():
        fields = Path(f"/proc/{record.pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def fill(store: ConstellationStore, blocks: int, seed: int) -> dict[bytes, bytes]:
    size = CHUNKS * store.settings.chunk_bytes
    values = {hashlib.sha256(b"%d" % n).digest(): random.Random(seed + n).randbytes(size) for n in range(blocks)}
    for item in values.items():
        if store.complete_store(store.prepare_store([item])) != [True]:
            raise SystemExit(f"a block was not stored: {store.stats()}")
    return values


def steps(plan: ConstellationPlan, from_s: float, to_s: float) -> list[tuple[Moves, Moves]]:
    """The single moves of the clock between two times."""
    clock, found = clock_of(plan), []
    now_s, before = from_s, clock_of(plan).moves(from_s)
    while (next_s := clock.next_move_s(now_s)) is not None and next_s <= to_s:
        after = clock.moves(next_s)
        found.append((before, after))
        now_s, before = next_s, after
    return found


def least_bytes(plan: ConstellationPlan, turns: list[tuple[Moves, Moves]], set_at: list[Moves]) -> int:
    """What the leaving columns and rows weigh, for values set at these moves."""
    placement = sky_of(plan).placement(STRATEGY_CODES[plan.strategy], plan.servers)  # type: ignore[index]
    each = CHUNKS // plan.servers * (plan.chunk_bytes + CHUNK_REF_BYTES)
    return sum(len(locate.server_moves(placement, moves, *turn)) * each for turn in turns for moves in set_at)


def between_moves(plan: ConstellationPlan) -> float:
    """Wait for the middle between two moves, when all is handed over; the time then."""
    clock = clock_of(plan)
    next_s = clock.next_move_s(time.time())
    if next_s is not None:
        time.sleep(max(0.0, next_s - time.time()))
        following_s = clock.next_move_s(time.time()) or 0.0
        time.sleep(max(0.0, (following_s - time.time()) * 0.6))
    return time.time()


def turn(scale: float, blocks: int, seconds: float, every_s: float, delay: float, seed: int) -> dict[str, Any]:
    """One constellation at ``scale`` (0: still), read from (or, ``every_s`` 0, left alone) for this many seconds."""
    with constellation(delay_scale=delay, time_scale=scale, epoch_s=time.time(), servers=10) as (plan, folder):
        store = open_constellation(folder)
        values = fill(store, blocks, seed)
        names = list(values)
        set_at = [info.set_moves for info in store._catalog.find(names).values()]
        dice, reads, hits, wrong = random.Random(seed), list[float](), 0, 0
        began_s, before = between_moves(plan), ping_all(plan)
        used_s, end_s = processor_s(folder), time.time() + seconds
        began_wall_s = time.time()
        due_s = time.monotonic()
        while every_s and time.time() < end_s:
            due_s += every_s
            time.sleep(max(0.0, due_s - time.monotonic()))
            key = dice.choice(names)
            at = time.perf_counter()
            ticket = store.prepare_load([key])
            (found,) = store.complete_load(ticket)
            reads.append(time.perf_counter() - at)
            hits += found is not None
            wrong += found is not None and found != values[key]
            store.release(ticket)
        time.sleep(max(0.0, end_s - time.time()))
        wall_s = time.time() - began_wall_s
        used_s = processor_s(folder) - used_s
        ended_s, after = between_moves(plan), ping_all(plan)
        store.close()
        if ledgers.open_books({here: figures for here, figures in after.items() if figures is not None}):
            raise SystemExit("a satellite's books do not close")
        moved = [after[here]["bytes_migrated_in"] - before[here]["bytes_migrated_in"] for here in after]  # type: ignore[index]
        turns = steps(plan, began_s, ended_s)
        least = least_bytes(plan, turns, set_at)
        return {
            "scale": scale,
            "delay": delay,
            "seconds": wall_s,
            "moves": len(turns),
            "reads": len(reads),
            "read_seconds": reads,
            "hits": hits,
            "wrong": wrong,
            "moved_bytes": sum(moved),
            "least_bytes": least,
            "cpu_share": used_s / wall_s / (os.cpu_count() or 1),
            "link_bytes_s": max(moved) / (ended_s - began_s),
        }


def link_rate(seed: int, blocks: int) -> float:
    """Bytes a second that one satellite takes from a writer who does nothing else: what its link and core can do."""
    with constellation(delay_scale=0.0, servers=1) as (_, folder):
        store = open_constellation(folder)
        size = CHUNKS * store.settings.chunk_bytes
        value, rates = random.Random(seed).randbytes(size), []
        for number in range(20):
            at = time.perf_counter()
            stored = store.complete_store(store.prepare_store([(bytes([number % blocks + 1]) * 32, value)]))
            seconds = time.perf_counter() - at
            if stored == [True]:
                rates.append(size / seconds)
            else:
                time.sleep(1.5)  # until the satellite is no longer under suspicion
        store.close()
    return statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10, help="of 2.95 MB, stored and read (default 10)")
    parser.add_argument("--seconds", type=float, default=14.0, help="of each turn (default 14)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of the still and of the turning one (default 3)")
    parser.add_argument("--every-ms", type=float, default=10.0, help="a read is due so often (default 10)")
    parser.add_argument("--scales", type=float, nargs="*", default=[240, 480, 960, 1920, 2880])
    parser.add_argument("--scale", type=float, help="take this one instead of looking for the largest in budget")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    chosen, rate = options.scale, link_rate(options.seed, 5)
    if chosen is None:
        idle = turn(0, options.blocks, 4.0, 0, 0.0, options.seed)["cpu_share"]
        found = []
        for scale in options.scales:
            row = turn(scale, options.blocks, options.seconds / 2, 0, 0.0, options.seed)
            row |= {"kind": "cost", "cpu_share": row["cpu_share"] - idle, "link_share": row["link_bytes_s"] / rate}
            rows.append(row)
            found.append(scale if max(row["cpu_share"], row["link_share"]) <= BUDGET else 0)
        chosen = max(found) or min(options.scales)
        print_table(
            f"{options.blocks} blocks turning, no reader; budget {BUDGET:.0%}; a link takes {rate / 1e6:.0f} MB/s",
            ("time scale", "moves", "moved MB", "of the least", "cores", "busiest link"),
            [
                (
                    f"x{row['scale']:g}",
                    str(row["moves"]),
                    f"{row['moved_bytes'] / 1e6:.0f}",
                    f"{row['moved_bytes'] / max(1, row['least_bytes']):.3f}",
                    f"{row['cpu_share']:.1%}",
                    f"{row['link_share']:.1%}",
                )
                for row in rows
            ],
        )
    for delay in (0.0, 1.0):
        for scale in [0.0, chosen / 4, chosen / 2, chosen] * options.rounds:
            rows.append(
                turn(scale, options.blocks, options.seconds, options.every_ms / 1e3, delay, options.seed)
                | {"kind": "reads"}
            )
    report(rows, chosen, options)


def report(rows: list[dict[str, Any]], chosen: float, options: argparse.Namespace) -> None:
    table, merged = [], []
    for delay in (0.0, 1.0):
        still_p99 = 0.0
        for scale in (0.0, chosen / 4, chosen / 2, chosen):
            same = [row for row in rows if row["kind"] == "reads" and (row["scale"], row["delay"]) == (scale, delay)]
            reads = [seconds for row in same for seconds in row["read_seconds"]]
            moved, least = (sum(row[name] for row in same) for name in ("moved_bytes", "least_bytes"))
            p50, p99 = percentile(reads, 50), percentile(reads, 99)
            still_p99 = still_p99 or p99
            merged.append(
                {
                    "kind": "merged",
                    "scale": scale,
                    "delay": delay,
                    "reads": len(reads),
                    "p50_ms": p50 * 1e3,
                    "p99_ms": p99 * 1e3,
                    "p99_of_still": p99 / still_p99,
                    "hit_rate": sum(row["hits"] for row in same) / len(reads),
                    "wrong": sum(row["wrong"] for row in same),
                    "moves": sum(row["moves"] for row in same),
                    "moved_of_least": moved / least if least else None,
                }
            )
            row = merged[-1]
            table.append(
                (
                    "real" if delay else "off",
                    f"x{scale:g}" if scale else "still",
                    str(row["moves"]),
                    str(len(reads)),
                    f"{p50 * 1e3:.2f}",
                    f"{p99 * 1e3:.2f}",
                    f"{row['p99_of_still']:.2f}",
                    f"{row['hit_rate']:.3%}",
                    str(row["wrong"]),
                    f"{moved / least:.3f}" if least else "-",
                )
            )
    print_table(
        f"a read of one of {options.blocks} blocks of 2.95 MB every {options.every_ms:g} ms",
        ("delays", "clock", "moves", "reads", "p50 ms", "p99 ms", "x still", "hits", "wrong", "moved of least"),
        table,
    )
    for row in rows:
        row.pop("read_seconds")
    write_json(options.json, "motion", options.seed, [*rows, *merged])


if __name__ == "__main__":
    main()
