"""A block read from and written to ten satellites beside Redis: `python benchmarks/data_path.py [--json FILE]`.

480 chunks (2.95 MB, or what ``--value-bytes`` says) over 10 of 95 satellites in 5 processes, beside GET and SET of the
same value in one Redis over loopback TCP. Every path has a client process of its own. The paths take turns: in each
round each of them runs a few times in a row (the first of which only warms what the others have pushed out of the
caches), and the medians are over all rounds. Ratios above 1 mean faster than Redis.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _bench import constellation, print_table, redis_server, write_json
from skymemory.protocol.motion import STRATEGY_CODES
from skymemory.testbed.connect import open_constellation
from skymemory.testbed.plan import ConstellationPlan, make_plan
from skymemory.testbed.wiring import shell_of, sky_of

PURE = "SKYMEMORY_PURE_PYTHON"
WARM_MALLOC = {"MALLOC_TRIM_THRESHOLD_": "1073741824", "MALLOC_MMAP_THRESHOLD_": "1073741824"}
"""What a client frees stays its own: without it redis-py maps, touches and returns 3 MB for every SET, which takes
three times as long as the SET itself, and differs from run to run.
"""
DELAYED_ONE_WAY_S = 0.004


def redis_client(port: int, value: bytes) -> tuple[Any, Any]:
    import redis

    peer = redis.Redis(port=port)
    return lambda: peer.get("block"), lambda: peer.set("block", value)


def sky_client(folder: str, access: str, value: bytes) -> tuple[Any, Any]:
    store = open_constellation(Path(folder), access=access)
    key = hashlib.sha256(b"block").digest()

    def read() -> object:
        ticket = store.prepare_load([key])
        (found,) = store.complete_load(ticket)
        same_bytes = found is not None and len(found) == len(value)
        store.release(ticket)
        if not same_bytes:
            raise SystemExit(f"the block did not come back: {ticket.report}")
        return found

    def write() -> None:
        if store.complete_store(store.prepare_store([(key, value)])) != [True]:
            raise SystemExit(f"the block was not stored: {store.stats()}")

    write()
    ticket = store.prepare_load([key])
    if store.complete_load(ticket)[0] != value:
        raise SystemExit("other bytes came back")
    store.release(ticket)
    return read, write


def client(pipe: Connection, kind: str, where: tuple[Any, ...], value: bytes) -> None:
    """A client process: for every (read or write, repeats) it is sent, the seconds of each."""
    read, write = redis_client(*where, value) if kind == "redis" else sky_client(*where, value)
    write()
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        verb, repeats = order
        run, seconds = (read if verb == "read" else write), []
        for _ in range(repeats):
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
        pipe.send(seconds)


@contextlib.contextmanager
def environment(pure: bool) -> Iterator[None]:
    """What is started within uses the native helper, or is made to do without; freed memory stays warm."""
    before = dict(os.environ)
    os.environ.update(WARM_MALLOC, **{PURE: "1" if pure else "0"})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def path(kind: str, where: tuple[Any, ...], value: bytes, pure: bool = False) -> Iterator[Connection]:
    """A client process, ready, by its pipe; ended afterwards."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=client, args=(theirs, kind, where, value), daemon=True)
    with environment(pure):
        process.start()
    theirs.close()
    try:
        ours.recv()
        yield ours
        ours.send(None)
    except EOFError:
        raise SystemExit(f"the client of path {kind} {where} ended") from None
    finally:
        ours.close()
        process.join(5)
        if process.is_alive():
            process.terminate()


def farthest_round_trip_s(plan: ConstellationPlan) -> float:
    """By geometry, between the ground and the farthest satellite that holds chunks."""
    servers = sky_of(plan).placement(STRATEGY_CODES[plan.strategy], plan.servers).locate_all()  # type: ignore[index]
    offsets = [plan.torus.delta(plan.centre, satellite) for satellite in servers]
    return 2 * plan.delay_scale * max(shell_of(plan).slant_one_way_s(*offset) for offset in offsets)


def measure(paths: dict[str, Connection], rounds: int, turn: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of every timed run, by path and verb."""
    seconds: dict[tuple[str, str], list[float]] = {(name, verb): [] for name in paths for verb in ("read", "write")}
    for _ in range(rounds):
        for verb in ("read", "write"):
            for name, pipe in paths.items():
                pipe.send((verb, turn + 1))
                seconds[name, verb] += pipe.recv()[1:]
    return seconds


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
            paths["Redis TCP"] = stack.enter_context(path("redis", (port,), value))
        if {"los", "gateway"} & set(wanted):
            with environment(pure=False):
                _, folder = stack.enter_context(constellation(delay_scale=0.0))
            for access in ("los", "gateway"):
                if access in wanted:
                    paths[f"sky {access}, native"] = stack.enter_context(path("sky", (str(folder), access), value))
        if "python" in wanted:
            with environment(pure=True):
                _, folder = stack.enter_context(constellation(delay_scale=0.0))
            paths["sky los, Python"] = stack.enter_context(path("sky", (str(folder), "los"), value, pure=True))
        if "delay" in wanted:
            scale = 2 * DELAYED_ONE_WAY_S / farthest_round_trip_s(make_plan())
            with environment(pure=False):
                plan, folder = stack.enter_context(constellation(delay_scale=scale))
            round_trip_s = farthest_round_trip_s(plan)
            paths["sky los, delay"] = stack.enter_context(path("sky", (str(folder), "los"), value))
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
                row["path"], f"{row['read_ms']:.2f}", f"{row['read_MB_s']:.0f}", f"{row.get('read_x', 0):.2f}",
                f"{row['write_ms']:.2f}", f"{row['write_MB_s']:.0f}", f"{row.get('write_x', 0):.2f}",
            )
            for row in rows
        ],
    )  # fmt: skip
    for row in rows:
        if "read_over_least" in row:
            print(
                f"with a round trip of {round_trip_s * 1e3:.2f} ms by geometry: read {row['read_over_least']:.2f} x, "
                f"write {row['write_over_least']:.2f} x (round trip + bytes at the undelayed rate); goal 1.3"
            )
    write_json(options.json, "data_path", options.seed, rows)


if __name__ == "__main__":
    main()
