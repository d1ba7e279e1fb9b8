"""What it costs to read and write a value: `python benchmarks/data_path.py [ways|sizes|threads …] [--json FILE]`.

``ways``     one value of 2.95 MB: Redis over loopback TCP, the sky with each value on as many satellites as its size is
             worth, on ten satellites, through a gateway, by the Python twins, and with delays
``sizes``    4 KB to 64 MB, one client and eight: Redis, memcached, and the sky by size and on ten satellites
``threads``  small values with the delays of the orbits: sixteen threads of one process beside one

Satellites: 95 in 5 processes, without delays where none are named. Every client is a process of its own. Paths take
turns; a turn begins with a run that is not timed, which warms what the others have pushed out of the caches. Ratios
above 1 mean faster than Redis: medians over the rounds, with the least and the most.
"""

from __future__ import annotations

import argparse
import getpass
import hashlib
import random
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from _bench import (
    Verb,
    client_process,
    constellation,
    environment,
    free_port,
    measure,
    print_table,
    redis_server,
    turn,
    write_json,
)
from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.testbed.connect import open_constellation, shell_of, sky_of
from skymemory.testbed.plan import ConstellationPlan, make_plan

SECTIONS = ("ways", "sizes", "threads")
BLOCK_BYTES = 480 * 6144
SIZES = (4 << 10, 64 << 10, 512 << 10, BLOCK_BYTES, 16 << 20, 64 << 20)
CLIENTS = (1, 8)
DELAYED_ONE_WAY_S = 0.004
MEMORY_BYTES = 512 << 20
"""Of a satellite: eight values of 64 MB fit into half of the nearest."""
TURN_BYTES = 48 << 20
LEAST_RUNS, MOST_RUNS = 3, 400
THREADS, THREAD_READS = 16, 30
Row = dict[str, Any]
Peers = dict[str, tuple[Callable[..., tuple[Verb, Verb]], tuple[Any, ...]]]
"""How each client is made, and with what."""


def redis_client(port: int, name: str, size_bytes: int) -> tuple[Verb, Verb]:
    import redis

    peer, value = redis.Redis(port=port, socket_read_size=256 << 10), value_of(name, size_bytes)
    peer.set(name, value)
    if peer.get(name) != value:
        raise SystemExit("Redis gave another value back")
    return lambda: peer.get(name), lambda: peer.set(name, value)


def memcached_client(port: int, name: str, size_bytes: int) -> tuple[Verb, Verb]:
    """By its text protocol over one connection: the least that a client can do."""
    sock, value = socket.create_connection(("127.0.0.1", port)), value_of(name, size_bytes)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    get, head = f"get {name}\r\n".encode(), f"set {name} 0 0 {size_bytes}\r\n".encode()
    answer_bytes = len(f"VALUE {name} 0 {size_bytes}\r\n") + size_bytes + len("\r\nEND\r\n")
    answer = memoryview(bytearray(answer_bytes))

    def read() -> memoryview:
        sock.sendall(get)
        at = 0
        while at < answer_bytes:
            at += sock.recv_into(answer[at:])
        begin = answer_bytes - size_bytes - len("\r\nEND\r\n")
        return answer[begin : begin + size_bytes]

    def write() -> None:
        sock.sendmsg([head, value, b"\r\n"]) if size_bytes < 65_536 else sock.sendall(head + value + b"\r\n")
        if sock.recv(64) != b"STORED\r\n":
            raise SystemExit("memcached did not store the value")

    write()
    if read() != value:
        raise SystemExit("memcached gave another value back")
    return read, write


def sky_client(folder: Path, access: str, name: str, size_bytes: int) -> tuple[Verb, Verb]:
    store, key = open_constellation(folder, access=access), hashlib.sha256(name.encode()).digest()
    value = value_of(name, size_bytes)

    def write() -> None:
        if store.put_many([(key, value)]) != [True]:
            raise SystemExit(f"the value was not stored: {store.stats()}")

    def read() -> memoryview:
        (found,) = store.get_many([key])
        if found is None or len(found) != size_bytes:
            raise SystemExit(f"the value did not come back: {store.stats()}")
        return found

    write()
    if read() != value:
        raise SystemExit("the constellation gave another value back")
    return read, write


def value_of(name: str, size_bytes: int) -> bytes:
    return random.Random(name).randbytes(size_bytes)


@contextmanager
def memcached_server() -> Iterator[int | None]:
    if shutil.which("memcached") is None:
        print("memcached is not installed: its columns stay empty", file=sys.stderr)
        yield None
        return
    port = free_port()
    server = subprocess.Popen(
        ["memcached", "-u", getpass.getuser(), "-l", "127.0.0.1", "-p", str(port), "-m", "2048", "-I", "128m"]
    )
    try:
        for _ in range(100):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        yield port
    finally:
        server.terminate()
        server.wait()


# --- ways ---


def farthest_round_trip_s(plan: ConstellationPlan) -> float:
    """By geometry, between the ground and the farthest satellite that holds chunks."""
    servers = sky_of(plan).placement(STRATEGY_CODES[plan.strategy], plan.servers).locate_all()  # type: ignore[index]
    offsets = [plan.torus.delta(plan.centre, satellite) for satellite in servers]
    return 2 * plan.delay_scale * max(shell_of(plan).slant_one_way_s(*offset) for offset in offsets)


def ways(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each path."""
    size, round_trip_s = BLOCK_BYTES, 0.0
    value = "block", size
    with ExitStack() as stack:
        paths = {}
        port = stack.enter_context(redis_server())
        if port is not None:
            paths["Redis TCP"] = stack.enter_context(client_process(redis_client, port, *value))
        wanted = options.only or ["size", "los", "python", "gateway", "delay"]

        def sky(access: str, *, pure: bool = False, **plan: Any) -> Any:
            with environment(pure=pure):
                _, folder = stack.enter_context(constellation(memory_per_satellite_bytes=MEMORY_BYTES, **plan))
            return stack.enter_context(client_process(sky_client, folder, access, *value, pure=pure))

        if "size" in wanted:
            paths["by size"] = sky("los", delay_scale=0.0)
        if "los" in wanted:
            paths["on ten"] = sky("los", delay_scale=0.0, servers=10)
        if "gateway" in wanted:
            paths["on ten, by a gateway"] = sky("gateway", delay_scale=0.0, servers=10)
        if "python" in wanted:
            paths["on ten, Python"] = sky("los", pure=True, delay_scale=0.0, servers=10)
        if "delay" in wanted:
            scale = 2 * DELAYED_ONE_WAY_S / farthest_round_trip_s(make_plan(servers=10))
            round_trip_s = scale * farthest_round_trip_s(make_plan(servers=10))
            paths["on ten, delay"] = sky("los", delay_scale=scale, servers=10)
        seconds = measure(paths, options.rounds, options.turn)
    for name in paths:
        row: Row = {"section": "ways", "path": name}
        for verb in ("read", "write"):
            median = statistics.median(seconds[name, verb])
            row |= {f"{verb}_ms": median * 1e3, f"{verb}_MB_s": size / median / 1e6}
            if ("Redis TCP", verb) in seconds:
                row[f"{verb}_x"] = statistics.median(seconds["Redis TCP", verb]) / median
            if name.endswith("delay") and ("on ten", verb) in seconds:
                least_s = round_trip_s + statistics.median(seconds["on ten", verb])
                row[f"{verb}_over_least"] = median / least_s
        yield row


def print_ways(rows: list[Row]) -> None:
    cells = [
        [row["path"]]
        + [
            f"{row.get(f'{verb}_{what}', 0):{form}}"
            for verb in ("read", "write")
            for what, form in (("ms", ".2f"), ("MB_s", ".0f"), ("x", ".2f"))
        ]
        for row in rows
    ]
    header = ("path", "read ms", "MB/s", "x Redis", "write ms", "MB/s", "x Redis")
    print_table(f"{BLOCK_BYTES} bytes", header, cells)
    for row in rows:
        if "read_over_least" in row:
            print(
                f"{row['path']}: read {row['read_over_least']:.2f} x, write {row['write_over_least']:.2f} x "
                "(round trip + bytes at the undelayed rate)"
            )


# --- sizes ---


def sizes(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each size, number of clients, path and verb."""
    memory = {"memory_per_satellite_bytes": MEMORY_BYTES, "delay_scale": 0.0}
    with ExitStack() as stack:
        peers: Peers = {}
        if (redis_port := stack.enter_context(redis_server())) is not None:
            peers["Redis"] = redis_client, (redis_port,)
        if (memcached_port := stack.enter_context(memcached_server())) is not None:
            peers["memcached"] = memcached_client, (memcached_port,)
        with environment(pure=False):
            peers["by size"] = sky_client, (stack.enter_context(constellation(**memory))[1], "los")
            peers["on ten"] = sky_client, (stack.enter_context(constellation(servers=10, **memory))[1], "los")
        for size_bytes in options.sizes:
            for clients in options.clients:
                yield from _sizes_of(peers, size_bytes, clients, options.size_rounds)


def _sizes_of(
    peers: dict[str, tuple[Callable[..., tuple[Verb, Verb]], tuple[Any, ...]]],
    size_bytes: int,
    clients: int,
    rounds: int,
) -> Iterator[Row]:
    runs = max(LEAST_RUNS, min(MOST_RUNS, TURN_BYTES // (size_bytes * clients)))
    seconds: dict[tuple[str, str], list[float]] = {(name, verb): [] for name in peers for verb in ("read", "write")}
    with ExitStack() as stack:
        pipes = {
            name: [
                stack.enter_context(client_process(make, *args, f"v{size_bytes}-{at}", size_bytes))
                for at in range(clients)
            ]
            for name, (make, args) in peers.items()
        }
        for number in range(rounds):
            order = list(pipes) if number % 2 else list(pipes)[::-1]
            for verb in ("read", "write"):
                for name in order:
                    seconds[name, verb].append(turn(pipes[name], verb, runs) / runs)
    for verb in ("read", "write"):
        for name in peers:
            its = seconds[name, verb]
            row: Row = {"section": "sizes", "size_bytes": size_bytes, "clients": clients, "verb": verb, "path": name}
            row |= {"us": statistics.median(its) * 1e6, "mb_per_s": clients * size_bytes / statistics.median(its) / 1e6}
            if "Redis" in peers:
                ratios = [theirs / ours for theirs, ours in zip(seconds["Redis", verb], its, strict=True)]
                row |= {"x": statistics.median(ratios), "x_least": min(ratios), "x_most": max(ratios)}
            print(_size_cells(row), file=sys.stderr)
            yield row


def _size_cells(row: Row) -> list[str]:
    ratio = f"{row['x']:.2f} ({row['x_least']:.2f}–{row['x_most']:.2f})" if "x" in row else ""
    size = f"{row['size_bytes'] / 1000:,.0f} KB"
    return [size, str(row["clients"]), row["verb"], row["path"], f"{row['us']:,.0f}", f"{row['mb_per_s']:,.0f}", ratio]


# --- threads ---


def threads(options: argparse.Namespace) -> Iterator[Row]:
    """Reads of 4 KB a second with the delays of the orbits, by one thread and by sixteen."""
    with environment(pure=False), constellation() as (_, folder), open_constellation(folder) as store:
        keys = [hashlib.sha256(f"thread {number}".encode()).digest() for number in range(THREADS)]
        assert all(store.put_many([(key, value_of(key.hex(), 4096)) for key in keys]))

        def read(number: int) -> None:
            for _ in range(THREAD_READS):
                (found,) = store.get_many([keys[number]])
                assert found is not None

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(read, range(THREADS)))
            rates: dict[int, list[float]] = {1: [], THREADS: []}
            for _ in range(options.size_rounds):
                for count, its in rates.items():
                    began_s = time.perf_counter()
                    list(pool.map(read, range(count)))
                    its.append(count * THREAD_READS / (time.perf_counter() - began_s))
    ratios = [many / one for one, many in zip(rates[1], rates[THREADS], strict=True)]
    yield {
        "section": "threads",
        "threads": THREADS,
        "one_per_s": statistics.median(rates[1]),
        "many_per_s": statistics.median(rates[THREADS]),
        "x": statistics.median(ratios),
        "x_least": min(ratios),
        "x_most": max(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=20, help="of `ways`: turns of each path (default 20)")
    parser.add_argument("--turn", type=int, default=20, help="of `ways`: timed runs in a turn (default 20)")
    parser.add_argument("--only", action="append", metavar="PATH", help="of `ways`: size, los, python, gateway, delay")
    parser.add_argument("--size-rounds", type=int, default=9, help="of the other sections (default 9)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected {', '.join(SECTIONS)}")
    rows: list[Row] = []
    for name, section in (("ways", ways), ("sizes", sizes), ("threads", threads)):
        if name in (options.sections or SECTIONS):
            rows += section(options)
    if any(row["section"] == "ways" for row in rows):
        print_ways([row for row in rows if row["section"] == "ways"])
    if found := [row for row in rows if row["section"] == "sizes"]:
        header = ("value", "clients", "", "path", "µs", "MB/s", "× Redis")
        print_table("Values of many sizes", header, [_size_cells(row) for row in found])
    for row in rows:
        if row["section"] == "threads":
            ratio = f"{row['x']:.1f} x ({row['x_least']:.1f}–{row['x_most']:.1f})"
            print(
                f"\n4 KB with the delays of the orbits: {row['one_per_s']:.0f} reads a second by one thread, "
                f"{row['many_per_s']:.0f} by {row['threads']}: {ratio}"
            )
    write_json(options.json, "data_path", 1, rows)


if __name__ == "__main__":
    main()
