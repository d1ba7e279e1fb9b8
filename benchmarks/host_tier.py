"""The host tier beside Redis, memcached and a plain copy: `python benchmarks/host_tier.py [--json FILE] [--quick]`.

`skymemory store serve host://` owns an arena in shared memory; clients of it, of `redis-server` over a Unix socket
(`redis-py` with `hiredis`) and of memcached over loopback TCP (its text protocol over one connection, the least that a
client can do) run at the same time and take turns, each a process of its own. A read ends with the value in memory of
the client's own; `in place` ends where the value lies, leased. `copy` copies as many bytes from memory of its own
(memcpy). Each client has a value of its own.

Every turn begins with a run that is not timed. A time is one client's; a ratio is the peer's time by ours in the same
round, above 1 we are faster: medians, with the least and the most over the rounds. A rate is all clients' bytes by the
time from the first one's beginning to the last one's end.
"""

from __future__ import annotations

import argparse
import getpass
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from _bench import Verb, client_process, free_port, print_table, redis_server, turn, write_json
from _data_path_clients import memcached_store

SIZES = (4 << 10, 64 << 10, 512 << 10, 2_949_248, 16 << 20, 64 << 20)
CLIENTS = (1, 4, 16)
BUDGET = "3GiB"
MOST_IN_FLIGHT_BYTES = 1 << 30
LEAST_RUNS, MOST_RUNS = 4, 2_000
Row = dict[str, Any]


def host(folder: str, name: str, size_bytes: int) -> tuple[Verb, Verb]:
    """Read into memory of its own, and write."""
    import hashlib

    from skymemory.store.host.client import HostStore

    store = HostStore(Path(folder))
    key, value, room = hashlib.sha256(name.encode()).digest(), os.urandom(size_bytes), memoryview(bytearray(size_bytes))

    def write() -> None:
        if store.put_many([(key, value)]) != [True]:
            raise SystemExit(f"the host tier did not store the value: {store.stats()}")

    def read() -> None:
        (found,) = store.get_many([key])
        room[:] = found

    write()
    read()
    if room != value:
        raise SystemExit("the host tier gave another value back")
    time.sleep(0.2)  # its owner has compared the value with its checksum by then
    return read, write


def in_place(folder: str, name: str, size_bytes: int) -> tuple[Verb, Verb]:
    import hashlib

    from skymemory.store.host.client import HostStore

    store, key = HostStore(Path(folder)), hashlib.sha256(name.encode()).digest()
    _, write = host(folder, name, size_bytes)

    def read() -> None:
        if len(store.get_many([key])[0]) != size_bytes:
            raise SystemExit("the host tier gave another value back")

    return read, write


def copy(_: str, __: str, size_bytes: int) -> tuple[Verb, Verb]:
    value, room = memoryview(os.urandom(size_bytes)), memoryview(bytearray(size_bytes))

    def run() -> None:
        room[:] = value

    run()
    return run, run


def redis(address: str, name: str, size_bytes: int) -> tuple[Verb, Verb]:
    import redis as redis_py

    client, value = redis_py.Redis.from_url(address, socket_read_size=256 << 10), os.urandom(size_bytes)

    def write() -> None:
        client.set(name, value)

    def read() -> None:
        if len(client.get(name) or b"") != size_bytes:
            raise SystemExit("Redis did not give the value back")

    write()
    return read, write


def memcached(port: str, name: str, size_bytes: int) -> tuple[Verb, Verb]:
    read, write = memcached_store(int(port))(name, memoryview(os.urandom(size_bytes)))
    write()
    return read, write


@contextmanager
def owner(folder: Path, budget: str = BUDGET) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "skymemory", "store", "serve", f"host://{budget}?at={folder}"]
    command += ["--listen", f"unix://{folder}/redis.sock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield process
        finally:
            process.terminate()


@contextmanager
def memcached_server() -> Iterator[int | None]:
    if shutil.which("memcached") is None:
        print("memcached is not installed: its columns stay empty", file=sys.stderr)
        yield None
        return
    port = free_port()
    command = ["memcached", "-u", getpass.getuser(), "-l", "127.0.0.1", "-p", str(port), "-m", "3072", "-I", "128m"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            time.sleep(0.5)
            yield port
        finally:
            process.terminate()


def compare(
    paths: dict[str, tuple[Any, str]], size_bytes: int, clients: int, rounds: int, turn_bytes: int
) -> Iterator[Row]:
    runs = max(LEAST_RUNS, min(MOST_RUNS, turn_bytes // (size_bytes * clients)))
    seconds: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        pipes = {
            who: [stack.enter_context(client_process(make, where, f"v{at}", size_bytes)) for at in range(clients)]
            for who, (make, where) in paths.items()
        }
        for number in range(rounds):
            for verb in ("read", "write"):
                for who in list(paths)[:: 1 if number % 2 else -1]:
                    seconds.setdefault((who, verb), []).append(turn(pipes[who], verb, runs) / runs)
    for verb in ("read", "write"):
        ours = seconds["host", verb]
        row: Row = {"size_bytes": size_bytes, "clients": clients, "verb": verb, "runs": runs, "rounds": rounds}
        row["in_place_us"] = 1e6 * statistics.median(seconds["in place", "read"]) if verb == "read" else None
        for who in paths:
            if who == "in place":
                continue
            theirs = seconds[who, verb]
            row[f"{who}_us"] = 1e6 * statistics.median(theirs)
            row[f"{who}_gb_per_s"] = clients * size_bytes / statistics.median(theirs) / 1e9
            if who != "host":
                ratios = sorted(other / mine for mine, other in zip(ours, theirs, strict=True))
                row[f"{who}_ratio"] = statistics.median(ratios)
                row[f"{who}_ratio_least"], row[f"{who}_ratio_most"] = ratios[0], ratios[-1]
        yield row


def shown(row: Row) -> list[str]:
    def ratio(who: str) -> str:
        if row.get(f"{who}_ratio") is None:
            return ""
        return f"{row[f'{who}_ratio']:.2f} ({row[f'{who}_ratio_least']:.2f}–{row[f'{who}_ratio_most']:.2f})"

    in_place_us = "" if row["in_place_us"] is None else f"{row['in_place_us']:,.1f}"
    size = f"{row['size_bytes'] / 1000:,.0f} KB"
    first = [size, str(row["clients"]), str(row["verb"]), f"{row['host_us']:,.1f}", in_place_us]
    return [*first, f"{row['host_gb_per_s']:.1f}", ratio("copy"), ratio("Redis"), ratio("memcached")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, metavar="BYTES")
    parser.add_argument("--clients", type=int, nargs="*", default=CLIENTS, metavar="N")
    parser.add_argument("--quick", action="store_true", help="three short rounds of one client")
    args = parser.parse_args()
    rounds, turn_bytes = (3, 64 << 20) if args.quick else (args.rounds, 256 << 20)
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skymemory-", dir="/dev/shm")))
        stack.enter_context(owner(folder))
        paths: dict[str, tuple[Any, str]] = {
            "host": (host, str(folder)),
            "in place": (in_place, str(folder)),
            "copy": (copy, ""),
        }
        if stack.enter_context(redis_server(folder / "peer.sock")) is not None:
            paths["Redis"] = (redis, f"unix://{folder}/peer.sock")
        if (port := stack.enter_context(memcached_server())) is not None:
            paths["memcached"] = (memcached, str(port))
        for clients in (1,) if args.quick else args.clients:
            for size_bytes in args.sizes:
                if clients * size_bytes > MOST_IN_FLIGHT_BYTES // 4:
                    continue
                for row in compare(paths, size_bytes, clients, rounds, turn_bytes):
                    rows.append(row)
                    print("  ".join(shown(row)), file=sys.stderr)
    header = ["value", "clients", "verb", "host µs", "in place µs", "host GB/s"]
    header += ["× copy", "× Redis (Unix socket)", "× memcached (TCP)"]
    print_table("Host tier, beside a copy and other stores", header, [shown(row) for row in rows])
    write_json(args.json, "host_tier", 0, rows)


if __name__ == "__main__":
    main()
