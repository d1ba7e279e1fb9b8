"""Reads and writes over links with rates: simulated against UDP, with the same plan, values and order.

The simulator and the host processes run the same machines over the same queues (``constellation.links``). What is left
between them is this computer's own time: its event loops, its scheduler, its copies. Rates are low enough for two
cores. `python benchmarks/links.py --json out.json`; exits with 1 beyond 15 % at the median or 30 % at the 99th
percentile.

`--speed`: packet events per second of a core instead, with rates and without, in virtual time.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from pathlib import Path
from typing import Any

from _bench import constellation, print_table, write_json

sys.path.insert(0, str(Path(__file__).parents[1]))
from skymemory.constellation.links import Links
from skymemory.metrics import percentile
from skymemory.protocol.client.transfer import Striping
from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed.connect import store_of
from skymemory.testbed.plan import make_plan
from skymemory.testbed.virtual import VirtualConstellation

RATES = {"up": "20Mbit", "down": "40Mbit", "isl": "80Mbit"}
FAST = {"up": "1.2Gbit", "down": "1.2Gbit", "isl": "10Gbit"}
"""A channel of 400 MHz in Ka band, and a laser."""
SIZES = (50_000, 200_000, 600_000)
MOST_MEDIAN, MOST_P99 = 0.15, 0.30


def operate(store: ConstellationStore, now_s: Any, rounds: int, seed: int) -> dict[str, list[float]]:
    """Seconds of each set and get, one after the other."""
    dice, times_s = random.Random(seed), {"set": [], "get": []}
    for number in range(rounds):
        value = dice.randbytes(SIZES[number % len(SIZES)])
        key = hashlib.sha256(b"%d/%d" % (seed, number)).digest()
        began_s = now_s()
        assert store.put_many([(key, value)]) == [True]
        stored_s = now_s()
        found = store.get_many([key])[0]
        assert found is not None and bytes(found) == value
        times_s["set"].append(stored_s - began_s)
        times_s["get"].append(now_s() - stored_s)
    return times_s


def compare(preset: str, access: str, rounds: int, seed: int, hosts: int) -> list[dict[str, Any]]:
    """A row for each verb: the same operations simulated, and over sockets with the satellites as processes here."""
    options: dict[str, Any] = {"access": access, "servers": 9, "links": Links.read(RATES, "rates")}
    with constellation(preset, hosts, **options) as (plan, _):
        simulated = VirtualConstellation(plan)
        model = operate(simulated.store(), lambda: simulated.simulated.now_s, rounds, seed)
        store = store_of(plan)
        try:
            store.get_many([bytes(32)])  # the first request opens what it needs
            real = operate(store, time.monotonic, rounds, seed)
        finally:
            store.close()
    rows = []
    for verb in ("set", "get"):
        row: dict[str, Any] = {"preset": preset, "access": access, "verb": verb, "operations": rounds}
        for percent in (50, 99):
            a, b = percentile(model[verb], percent), percentile(real[verb], percent)
            row |= {f"simulated_p{percent}_ms": a * 1e3, f"udp_p{percent}_ms": b * 1e3, f"off_p{percent}": b / a - 1}
        row["within"] = abs(row["off_p50"]) <= MOST_MEDIAN and abs(row["off_p99"]) <= MOST_P99
        rows.append(row)
    return rows


def speed(access: str, rates: dict[str, str] | None, seed: int, times: int = 3) -> dict[str, Any]:
    """Datagrams per second of processor, each counted once per link: the best of several runs."""
    links = None if rates is None else Links.read(rates, "rates")
    plan = make_plan(access=access, links=links, memory_per_satellite_bytes=256 << 20)
    value, best, events = random.Random(seed).randbytes(21 << 20), 0.0, 0
    for _ in range(times):
        sky = VirtualConstellation(plan)
        client = sky.connect()
        began_s, before = time.process_time(), sky.simulated.datagrams_sent
        for number in range(2):
            stored = client.write(bytes([number]) * 32, value, Striping(plan.chunk_bytes, 3, 10))
            assert stored.info is not None
            assert client.read(stored.info, memoryview(bytearray(len(value)))).ok
        events = sky.simulated.datagrams_sent - before
        best = max(best, events / (time.process_time() - began_s))
    return {"access": access, "rates": "none" if rates is None else rates["down"], "events": events, "per_s": best}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="testbed-19x5")
    parser.add_argument("--access", nargs="*", default=["ideal", "gateway"])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--hosts", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.speed:
        rows = [speed(access, rates, args.seed) for access in args.access for rates in (None, RATES, FAST)]
        table = [[row["access"], row["rates"], str(row["events"]), f"{row['per_s']:,.0f}"] for row in rows]
        print_table("Packet events per second of a core", ["access", "beam", "events", "per second"], table)
    else:
        rows = [
            row for access in args.access for row in compare(args.preset, access, args.rounds, args.seed, args.hosts)
        ]
        table = [
            [row["access"], row["verb"]]
            + [f"{row[f'{way}_p{percent}_ms']:.1f}" for percent in (50, 99) for way in ("simulated", "udp")]
            + [f"{row['off_p50']:+.1%}", f"{row['off_p99']:+.1%}"]
            for row in rows
        ]
        header = ["access", "verb", "sim p50 ms", "udp p50 ms", "sim p99 ms", "udp p99 ms", "off p50", "off p99"]
        print_table(f"Simulated against UDP, {args.preset}, {RATES}", header, table)
    write_json(args.json, "links_speed" if args.speed else "links", args.seed, rows)
    return 0 if args.speed or all(row["within"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
