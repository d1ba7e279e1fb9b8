"""The host tier beside other stores and a plain copy: `python benchmarks/host_tier.py [--json FILE] [--quick]`.

`skymemory store serve host://` owns an arena in shared memory; clients of it, of `redis-server` over a Unix socket
(`redis-py` with `hiredis`), of memcached and of `lmcache_server`, LMCache's store for bytes, over loopback TCP (their
own protocols over one connection, the least that a client can do) run at the same time and take turns, each a process
of its own. A read ends with the value in memory of the client's own; `in place` ends where the value lies, leased.
`copy` copies as many bytes from memory of its own (memcpy). Each client has a value of its own.

Every turn begins with a run that is not timed. A time is one client's; a ratio is the peer's time by ours in the same
round, above 1 we are faster: medians, with the least and the most over the rounds. A rate is all clients' bytes by the
time from the first one's beginning to the last one's end. Processor seconds are those of a path's clients and its
server together, user and system, the first run's included, by all bytes read or written: medians. After writes the
host tier compares values with their checksums: that counts, too.

`plot_host_tier.py` draws the result.
"""

from __future__ import annotations

import argparse
import getpass
import hashlib
import os
import shutil
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from _bench import Client, Verb, client_process, free_port, host_owner, print_table, redis_server, turn, write_json
from _data_path_clients import memcached_store
from data_path import ENGINES, LMCACHE_SERVER, process, processor_s

SIZES = (4 << 10, 64 << 10, 512 << 10, 2_949_120, 16 << 20, 64 << 20)
CLIENTS = (1, 4, 16)
BUDGET = "3GiB"
MOST_IN_FLIGHT_BYTES = 1 << 30
LEAST_RUNS, MOST_RUNS = 4, 2_000
COMPARED_WITHIN_S = 0.2
"""After a turn of writes, until the host tier's owner has compared the last values with their checksums."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Peer:
    """What makes a client's read and write, where its server listens, and that server's process if there is one."""

    make: Callable[[str, str, int], tuple[Verb, Verb]]
    where: str
    pids: tuple[int, ...] = ()


def host(folder: str, name: str, size_bytes: int) -> tuple[Verb, Verb]:
    """Read into memory of its own, and write."""
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


REQUEST, ANSWER = struct.Struct("9i150s"), struct.Struct("9i")
"""`lmcache_server`'s messages: command or code, length, format, type, place (an answer's is the last), shape; key."""
PUT, GET, EXISTS, SUCCESS = 1, 2, 3, 200
BINARY, UINT8 = 4, 6


def lmcache(port: str, name: str, size_bytes: int) -> tuple[Verb, Verb]:
    """A write ends when the server says that it has the value: to a PUT alone it answers nothing."""
    sock = socket.create_connection(("127.0.0.1", int(port)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    value, room = os.urandom(size_bytes), memoryview(bytearray(size_bytes))
    key = f"none@1@0@{hashlib.sha256(name.encode()).hexdigest()[:16]}@uint8".encode().ljust(150)
    put, get, exists = (
        REQUEST.pack(command, size_bytes, BINARY, UINT8, 0, size_bytes, 0, 0, 0, key) for command in (PUT, GET, EXISTS)
    )

    def answer() -> None:
        if ANSWER.unpack(sock.recv(ANSWER.size, socket.MSG_WAITALL))[0] != SUCCESS:
            raise SystemExit("LMCache's server does not have the value")

    def write() -> None:
        if sock.sendmsg([put, value, exists]) != 2 * REQUEST.size + size_bytes:
            raise SystemExit("LMCache's server was not sent the value")
        answer()

    def read() -> None:
        sock.sendall(get)
        answer()
        at = 0
        while at < size_bytes:
            at += sock.recv_into(room[at:])

    write()
    read()
    if room != value:
        raise SystemExit("LMCache's server gave another value back")
    return read, write


def peers(stack: ExitStack, folder: Path, log: IO[bytes], lmcache_python: Path) -> Iterator[tuple[str, Peer]]:
    """Each other store that is installed, started; the columns of the others stay empty."""
    if (port := stack.enter_context(redis_server(folder / "peer.sock"))) is not None:
        import redis as redis_py

        with redis_py.Redis(port=port) as client:
            pid = client.info("server")["process_id"]
        yield "Redis", Peer(redis, f"unix://{folder}/peer.sock", (pid,))
    if shutil.which("memcached") is None:
        print("memcached is not installed: its columns stay empty", file=sys.stderr)
    else:
        port = free_port()
        command = ["memcached", "-u", getpass.getuser(), "-l", "127.0.0.1", "-p", str(port), "-m", "3072", "-I", "128m"]
        yield "memcached", Peer(memcached, str(port), (stack.enter_context(process(port, *command, log=log)),))
    if not lmcache_python.is_file():
        print(f"LMCache is not installed in {lmcache_python}: its columns stay empty", file=sys.stderr)
    else:
        port = free_port()
        command = [str(lmcache_python), "-c", LMCACHE_SERVER, str(port)]
        yield "LMCache", Peer(lmcache, str(port), (stack.enter_context(process(port, *command, log=log)),))


def timed(peer: Peer, clients: list[Client], verb: str, runs: int, size_bytes: int) -> tuple[float, float]:
    """Seconds of a run, and the processor's for a GB, of the clients and their server together."""
    pids = [*peer.pids, *(client.pid for client in clients)]
    before_s = processor_s(pids)
    seconds = turn(clients, verb, runs)
    if peer.make is host and verb == "write":
        time.sleep(COMPARED_WITHIN_S)
    used_s = processor_s(pids) - before_s
    return seconds / runs, used_s / ((runs + 1) * len(clients) * size_bytes / 1e9)


def compare(paths: dict[str, Peer], size_bytes: int, clients: int, rounds: int, turn_bytes: int) -> Iterator[Row]:
    runs = max(LEAST_RUNS, min(MOST_RUNS, turn_bytes // (size_bytes * clients)))
    seconds: dict[tuple[str, str], list[float]] = {}
    used_s: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        opened = {
            who: [
                stack.enter_context(client_process(peer.make, peer.where, f"v{at}", size_bytes))
                for at in range(clients)
            ]
            for who, peer in paths.items()
        }
        for number in range(rounds):
            for verb in ("read", "write"):
                for who in list(paths)[:: 1 if number % 2 else -1]:
                    if (who, verb) == ("in place", "write"):
                        continue  # the same as the host tier's
                    run_s, gb_s = timed(paths[who], opened[who], verb, runs, size_bytes)
                    seconds.setdefault((who, verb), []).append(run_s)
                    used_s.setdefault((who, verb), []).append(gb_s)
    for verb in ("read", "write"):
        ours = seconds["host", verb]
        row: Row = {"size_bytes": size_bytes, "clients": clients, "verb": verb, "runs": runs, "rounds": rounds}
        row["in_place_us"] = 1e6 * statistics.median(seconds["in place", "read"]) if verb == "read" else None
        row["in_place_cpu_s_per_gb"] = statistics.median(used_s["in place", "read"]) if verb == "read" else None
        for who in paths:
            if who == "in place":
                continue
            theirs = seconds[who, verb]
            row[f"{who}_us"] = 1e6 * statistics.median(theirs)
            row[f"{who}_cpu_s_per_gb"] = statistics.median(used_s[who, verb])
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

    def cpu(who: str) -> str:
        return f"{row[f'{who}_cpu_s_per_gb']:.2f}" if f"{who}_cpu_s_per_gb" in row else ""

    in_place_us = "" if row["in_place_us"] is None else f"{row['in_place_us']:,.1f}"
    size = f"{row['size_bytes'] / 1000:,.0f} KB"
    first = [size, str(row["clients"]), str(row["verb"]), f"{row['host_us']:,.1f}", in_place_us]
    ratios = [ratio(who) for who in ("copy", "Redis", "memcached", "LMCache")]
    return [*first, f"{row['host_gb_per_s']:.1f}", *ratios, cpu("host"), cpu("Redis")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, metavar="BYTES")
    parser.add_argument("--clients", type=int, nargs="*", default=CLIENTS, metavar="N")
    parser.add_argument("--quick", action="store_true", help="three short rounds of one client")
    parser.add_argument(
        "--lmcache", type=Path, default=ENGINES / "bin/python", metavar="PYTHON", help="that has LMCache"
    )
    args = parser.parse_args()
    rounds, turn_bytes = (3, 64 << 20) if args.quick else (args.rounds, 256 << 20)
    rows: list[Row] = []
    with ExitStack() as stack, Path(os.devnull).open("wb") as log:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skymemory-", dir="/dev/shm")))
        owner = (stack.enter_context(host_owner(folder, BUDGET)).pid,)
        paths = {
            "host": Peer(host, str(folder), owner),
            "in place": Peer(in_place, str(folder), owner),
            "copy": Peer(copy, ""),
            **dict(peers(stack, folder, log, args.lmcache)),
        }
        for clients in (1,) if args.quick else args.clients:
            for size_bytes in args.sizes:
                if clients * size_bytes > MOST_IN_FLIGHT_BYTES // 4:
                    continue
                for row in compare(paths, size_bytes, clients, rounds, turn_bytes):
                    rows.append(row)
                    print("  ".join(shown(row)), file=sys.stderr)
    header = ["value", "clients", "verb", "host µs", "in place µs", "host GB/s"]
    header += ["× copy", "× Redis (Unix socket)", "× memcached (TCP)", "× LMCache (TCP)", "CPU s/GB", "Redis"]
    print_table("Host tier, beside a copy and other stores", header, [shown(row) for row in rows])
    write_json(args.json, "host_tier", 0, rows)


if __name__ == "__main__":
    main()
