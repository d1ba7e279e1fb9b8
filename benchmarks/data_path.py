"""A block read from and written to ten satellites beside Redis: `python benchmarks/data_path.py [--json FILE]`.

480 chunks (2.95 MB, or what ``--value-bytes`` says) over 10 of 95 satellites in 5 processes, beside GET and SET of the
same value in one Redis over loopback TCP. Every path has a client process of its own. The paths take turns: in each
round each of them runs a few times in a row (the first of which only warms what the others have pushed out of the
caches), and the medians are over all rounds. Ratios above 1 mean faster than Redis.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import statistics
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _bench import (
    Verb,
    block_verbs,
    client_process,
    constellation,
    environment,
    measure,
    print_table,
    redis_server,
    write_json,
)
from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.testbed.connect import open_constellation, shell_of, sky_of
from skymemory.testbed.plan import ConstellationPlan, make_plan

DELAYED_ONE_WAY_S = 0.004


def redis_client(port: int, value: bytes) -> tuple[Verb, Verb]:
    import redis

    peer = redis.Redis(port=port)
    return lambda: peer.get("block"), lambda: peer.set("block", value)


def sky_client(folder: Path, access: str, value: bytes) -> tuple[Verb, Verb]:
    return block_verbs(open_constellation(folder, access=access), hashlib.sha256(b"block").digest(), value)


def farthest_round_trip_s(plan: ConstellationPlan) -> float:
    """By geometry, between the ground and the farthest satellite that holds chunks."""
    servers = sky_of(plan).placement(STRATEGY_CODES[plan.strategy], plan.servers).locate_all()  # type: ignore[index]
    offsets = [plan.torus.delta(plan.centre, satellite) for satellite in servers]
    return 2 * plan.delay_scale * max(shell_of(plan).slant_one_way_s(*offset) for offset in offsets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each path (default 20)")
    parser.add_argument("--turn", type=int, default=20, help="timed runs in a turn, after one to warm up (default 20)")
    parser.add_argument("--value-bytes", type=int, default=480 * 6144)
    parser.add_argument("--only", action="append", metavar="PATH", help="los, python, gateway, delay (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    value = random.Random(options.seed).randbytes(options.value_bytes)
    wanted = options.only or ["los", "python", "gateway", "delay"]
    round_trip_s = 0.0
    with ExitStack() as stack:
        paths: dict[str, Connection] = {}
        port = stack.enter_context(redis_server())
        if port is not None:
            paths["Redis TCP"] = stack.enter_context(client_process(redis_client, port, value))
        if {"los", "gateway"} & set(wanted):
            with environment(pure=False):
                _, folder = stack.enter_context(constellation(delay_scale=0.0))
            for access in ("los", "gateway"):
                if access in wanted:
                    paths[f"sky {access}, native"] = stack.enter_context(
                        client_process(sky_client, folder, access, value)
                    )
        if "python" in wanted:
            with environment(pure=True):
                _, folder = stack.enter_context(constellation(delay_scale=0.0))
            paths["sky los, Python"] = stack.enter_context(client_process(sky_client, folder, "los", value, pure=True))
        if "delay" in wanted:
            scale = 2 * DELAYED_ONE_WAY_S / farthest_round_trip_s(make_plan())
            with environment(pure=False):
                plan, folder = stack.enter_context(constellation(delay_scale=scale))
            round_trip_s = farthest_round_trip_s(plan)
            paths["sky los, delay"] = stack.enter_context(client_process(sky_client, folder, "los", value))
        seconds = measure(paths, options.rounds, options.turn)
    report(seconds, len(value), round_trip_s, options)


def report(
    seconds: dict[tuple[str, str], list[float]], size: int, round_trip_s: float, options: argparse.Namespace
) -> None:
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(name for name, _ in seconds):
        row: dict[str, Any] = {"path": name}
        for verb in ("read", "write"):
            median = statistics.median(seconds[name, verb])
            row |= {f"{verb}_ms": median * 1e3, f"{verb}_MB_s": size / median / 1e6}
            if ("Redis TCP", verb) in seconds:
                row[f"{verb}_x"] = statistics.median(seconds["Redis TCP", verb]) / median
            if name.endswith("delay") and ("sky los, native", verb) in seconds:
                least_s = round_trip_s + statistics.median(seconds["sky los, native", verb])
                row[f"{verb}_over_least"] = median / least_s
        rows.append(row)
    print_table(
        f"{size} bytes over 10 of 95 satellites in 5 processes; {options.rounds} rounds of {options.turn} runs",
        ("path", "read ms", "MB/s", "x Redis", "write ms", "MB/s", "x Redis"),
        [
            (
                row["path"],
                f"{row['read_ms']:.2f}",
                f"{row['read_MB_s']:.0f}",
                f"{row.get('read_x', 0):.2f}",
                f"{row['write_ms']:.2f}",
                f"{row['write_MB_s']:.0f}",
                f"{row.get('write_x', 0):.2f}",
            )
            for row in rows
        ],
    )
    for row in rows:
        if "read_over_least" in row:
            print(
                f"with a round trip of {round_trip_s * 1e3:.2f} ms by geometry: read {row['read_over_least']:.2f} x, "
                f"write {row['write_over_least']:.2f} x (round trip + bytes at the undelayed rate); goal 1.3"
            )
    write_json(options.json, "data_path", options.seed, rows)


if __name__ == "__main__":
    main()
