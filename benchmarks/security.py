"""What MACs and sealing cost: `python benchmarks/security.py [--json FILE]`.

A block of 480 chunks (2.95 MB) read from and written to ten of 95 satellites in 5 processes without delay: plain, with
a MAC on commands, with AES-256-GCM on the payload, with both, and with a MAC on every packet. Each way has a client
process of its own; they take turns: in each round each runs a few times in a row (the first of which only warms up),
and the medians are over all rounds. ``x`` is the throughput against plain.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _bench import constellation, print_table, write_json
from data_path import environment, measure
from skymemory.store.base import Store
from skymemory.testbed.connect import open_constellation, sealed
from skymemory.testbed.key_file import KeyFollower, new_keys

WAYS = {
    "nothing": ("off", False), "MAC on commands": ("on", False), "GCM on payloads": ("off", True),
    "both": ("on", True), "MAC on every packet": ("every", False), "every packet and GCM": ("every", True),
}  # fmt: skip


def client(pipe: Connection, folder: Path, tenant: Path | None, value: bytes) -> None:
    """A client process: for every (read or write, repeats) it is sent, the seconds of each."""
    plain = open_constellation(folder)
    store: Store = sealed(plain, KeyFollower(tenant)) if tenant is not None else plain
    key = hashlib.sha256(b"block" if tenant is None else b"sealed block").digest()

    def write() -> None:
        if store.complete_store(store.prepare_store([(key, value)])) != [True]:
            raise SystemExit(f"the block was not stored: {store.stats()}")

    def read(check: bool = False) -> None:
        ticket = store.prepare_load([key])
        (found,) = store.complete_load(ticket)
        if found is None or len(found) != len(value) or (check and found != value):
            raise SystemExit(f"the block did not come back: {ticket.report}")
        store.release(ticket)

    write()
    read(check=True)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        verb, repeats = order
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            read() if verb == "read" else write()
            seconds.append(time.perf_counter() - began)
        pipe.send(seconds)


@contextmanager
def running(folder: Path, tenant: Path | None, value: bytes) -> Iterator[Connection]:
    """A client process, ready, by its pipe; ended afterwards."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=client, args=(theirs, folder, tenant, value), daemon=True)
    with environment(pure=False):
        process.start()
    theirs.close()
    try:
        ours.recv()
        yield ours
        ours.send(None)
    except EOFError:
        raise SystemExit("a client ended") from None
    finally:
        ours.close()
        process.join(5)
        if process.is_alive():
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="turns of each way (default 40)")
    parser.add_argument("--turn", type=int, default=5, help="timed runs in a turn, after one to warm up (default 5)")
    parser.add_argument("--value-bytes", type=int, default=480 * 6144)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    value = random.Random(options.seed).randbytes(options.value_bytes)
    with ExitStack() as stack:
        folders: dict[str, Path] = {}
        with environment(pure=False):
            for auth in ("off", "on", "every"):
                folders[auth] = stack.enter_context(constellation(delay_scale=0.0, auth=auth))[1]
        tenant = folders["off"] / "tenant"
        new_keys(tenant)
        paths = {
            name: stack.enter_context(running(folders[auth], tenant if seals else None, value))
            for name, (auth, seals) in WAYS.items()
        }
        seconds = measure(paths, options.rounds, options.turn)
    report(seconds, len(value), options)


def report(seconds: dict[tuple[str, str], list[float]], size: int, options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    for name in WAYS:
        row: dict[str, Any] = {"way": name}
        for verb in ("read", "write"):
            median = statistics.median(seconds[name, verb])
            row |= {f"{verb}_ms": median * 1e3, f"{verb}_MB_s": size / median / 1e6}
            row[f"{verb}_x"] = statistics.median(seconds["nothing", verb]) / median
        rows.append(row)
    print_table(
        f"{size} bytes, 10 of 95 satellites in 5 processes, no delay; {options.rounds} rounds of {options.turn} runs",
        ("way", "read ms", "MB/s", "x", "write ms", "MB/s", "x"),
        [
            (
                row["way"], f"{row['read_ms']:.2f}", f"{row['read_MB_s']:.0f}", f"{row['read_x']:.2f}",
                f"{row['write_ms']:.2f}", f"{row['write_MB_s']:.0f}", f"{row['write_x']:.2f}",
            )
            for row in rows
        ],
    )  # fmt: skip
    both = next(row for row in rows if row["way"] == "both")
    print(f"MAC on commands and GCM on payloads cost {1 - both['read_x']:.0%} of the read throughput; goal: under 40 %")
    write_json(options.json, "security", options.seed, rows)


if __name__ == "__main__":
    main()
