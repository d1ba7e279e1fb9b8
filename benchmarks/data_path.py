"""What it costs to read and write a value: `python benchmarks/data_path.py [ways|sizes|threads …] [--json FILE]`.

``ways``     one value of 2.95 MB: Redis over loopback TCP, the sky with each value on as many satellites as its size is
             worth, on ten satellites, through a gateway, by the Python twins, and with delays
``sizes``    4 KB to 64 MB, one client to 64: Redis, memcached, LMCache's server, Mooncake's store over TCP, and the sky
             by size and on ten satellites; the seconds of the processor that a GB takes clients and servers
``threads``  small values with the delays of the orbits: sixteen threads of one process beside one
``busy``     64 KB: Redis and the sky by size, alone and beside twenty programs that compute; each run after a pause
             of 20 ms, and twenty after each other, which then wait for their share of the processor, too

`sizes` takes some ten minutes and ten GB of memory. What is not installed is left out, and that is said.

Satellites: 95 in 5 processes, without delays where none are named. Every client is a process of its own. Paths take
turns; a turn begins with a run that is not timed, which warms what the others have pushed out of the caches. Ratios
above 1 mean faster than Redis: medians over the rounds, with the least and the most.
"""

from __future__ import annotations

import argparse
import getpass
import hashlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from _bench import (
    Verb,
    client_process,
    constellation,
    environment,
    free_port,
    measure,
    print_table,
    redis_server,
    write_json,
)
from _data_path_clients import STORES, check
from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.testbed.connect import open_constellation, shell_of, sky_of
from skymemory.testbed.plan import ConstellationPlan, make_plan
from skymemory.testbed.run_directory import RunDirectory

HERE = Path(__file__).parent
ENGINES = HERE.parent / ".venv-engines"
SECTIONS = ("ways", "sizes", "threads", "busy")
BLOCK_BYTES = 480 * 6144
SIZES = (4 << 10, 64 << 10, 512 << 10, BLOCK_BYTES, 16 << 20, 64 << 20)
CLIENTS = (1, 8, 16, 64)
DELAYED_ONE_WAY_S = 0.004
MEMORY_BYTES = 512 << 20
"""Of a satellite: eight values of 64 MB fit into half of the nearest."""
MOST_IN_FLIGHT_BYTES = 256 << 20
"""Values of all clients of a store, each has its own: servers and clients hold them several times, for each store."""
TURN_S, MOST_RUNS = 0.1, 400
LISTENS_WITHIN_S = 60.0
THREADS, THREAD_READS = 16, 30
BUSY_BYTES, BUSY_PROGRAMS, BUSY_PAUSE_S = 64 << 10, (0, 20), 0.02
Row = dict[str, Any]
VERBS = ("read", "write")
MOONCAKE = "mooncake-transfer-engine-non-cuda"
QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}


@dataclass(frozen=True, slots=True)
class Service:
    """A store that runs: the kind of its clients, what opens them for values of at most some bytes, its processes."""

    kind: str
    arguments: Callable[[int], list[Any]]
    pids: tuple[int, ...]
    python: str = sys.executable
    """What its clients run by."""


def one_value(kind: str, arguments: list[Any], name: str, size_bytes: int) -> tuple[Verb, Verb]:
    """Read and write of one value, which is there and right already."""
    value = value_of(name, size_bytes)
    read, write = STORES[kind][0](*arguments)(name, memoryview(value))
    check(read, write, memoryview(value))
    return read, write


def value_of(name: str, size_bytes: int) -> bytes:
    return random.Random(name).randbytes(size_bytes)


# --- servers ---


class NotThere(Exception):
    """A store cannot be measured, or no longer, and why."""


@contextmanager
def process(port: int, *command: str, log: IO[bytes]) -> Iterator[int]:
    """A server that listens at this port of its own; yields its process's number."""
    running = subprocess.Popen(command, stdout=log, stderr=log)
    ends_s = time.monotonic() + LISTENS_WITHIN_S
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                if running.poll() is not None or time.monotonic() > ends_s:
                    raise NotThere(f"{command[0]} does not listen") from None
                time.sleep(0.05)
        yield running.pid
    finally:
        running.terminate()
        running.wait()


def redis_service(stack: ExitStack, _: argparse.Namespace) -> Service:
    import redis

    if (port := stack.enter_context(redis_server())) is None:
        raise NotThere("redis-server")
    with redis.Redis(port=port) as client:
        pid = client.info("server")["process_id"]
    return Service("redis", lambda most_bytes: [port], (pid,))


def memcached_service(stack: ExitStack, options: argparse.Namespace) -> Service:
    if shutil.which("memcached") is None:
        raise NotThere("it is not installed")
    port = free_port()
    limits = ("-m", "2048", "-I", "128m")
    command = ("memcached", "-u", getpass.getuser(), "-l", "127.0.0.1", "-p", str(port), *limits)
    pid = stack.enter_context(process(port, *command, log=options.log))
    return Service("memcached", lambda most_bytes: [port], (pid,))


LMCACHE_SERVER = """
import sys
from lmcache.v1.server.__main__ import LMCacheServer
server = LMCacheServer("127.0.0.1", int(sys.argv[1]), "cpu")
server.server_socket.setsockopt(6, 1, 1)
server.run()
"""
"""``lmcache_server``, but its sockets send at once (TCP_NODELAY): else small values take it 40 ms."""


def lmcache_service(stack: ExitStack, options: argparse.Namespace) -> Service:
    if options.lmcache is None:
        options.lmcache = ENGINES / "bin" / "python"
        print("LMCache's environment, if it is not there: three minutes", file=sys.stderr)
        subprocess.run(["make", "-C", str(HERE.parent), f"{ENGINES.name}/.installed"], check=False, stdout=sys.stderr)
    if not options.lmcache.is_file():
        raise NotThere(f"it is not installed in {options.lmcache}")
    port, python = free_port(), str(options.lmcache)
    pid = stack.enter_context(process(port, python, "-c", LMCACHE_SERVER, str(port), log=options.log))
    return Service("lmcache", lambda most_bytes: [port, most_bytes], (pid,), python)


def mooncake_service(stack: ExitStack, options: argparse.Namespace) -> Service:
    """A master and one process that stores."""
    folder = options.mooncake or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-")))
    python = folder / "bin" / "python"
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "-qq", "--no-input", "--disable-pip-version-check", MOONCAKE],
        [str(python), "-c", "import mooncake.store"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotThere(f"{done.stderr.strip().splitlines()[-1]} (Debian has libibverbs1)")
    port, stores = free_port(), free_port()
    master, ports = f"127.0.0.1:{port}", ("--rpc_port", str(port), "--metrics_port", str(free_port()))
    command = [str(folder / "bin" / "mooncake_master"), "--rpc_address", "127.0.0.1", *ports]
    pids = [stack.enter_context(process(port, *command, log=options.log))]
    command = [str(folder / "bin" / "mooncake_client"), "--host", "127.0.0.1", "--port", str(stores)]
    command += ["--global_segment_size", "3 GB", "--master_server_address", master, "--protocol", "tcp"]
    command += ["--metadata_server", "P2PHANDSHAKE"]
    pids.append(stack.enter_context(process(stores, *command, log=options.log)))
    return Service("mooncake", lambda most_bytes: [master], tuple(pids), str(python))


def sky_service(stack: ExitStack, **plan: Any) -> Service:
    with environment(pure=False):
        _, folder = stack.enter_context(constellation(memory_per_satellite_bytes=MEMORY_BYTES, delay_scale=0.0, **plan))
    pids = tuple(record.pid for record in RunDirectory(folder).living().values())
    return Service("sky", lambda most_bytes: [str(folder), "los"], pids)


def processor_s(pids: Iterable[int]) -> float:
    """What these processes have used, user and system: Linux has a clock for each."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


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
            paths["Redis TCP"] = stack.enter_context(client_process(one_value, "redis", [port], *value))
        wanted = options.only or ["size", "los", "python", "gateway", "delay"]

        def sky(access: str, *, pure: bool = False, **plan: Any) -> Any:
            with environment(pure=pure):
                _, folder = stack.enter_context(constellation(memory_per_satellite_bytes=MEMORY_BYTES, **plan))
            return stack.enter_context(client_process(one_value, "sky", [str(folder), access], *value, pure=pure))

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


PATHS: dict[str, Callable[[ExitStack, argparse.Namespace], Service | None]] = {
    "Redis": redis_service,
    "memcached": memcached_service,
    "LMCache": lmcache_service,
    "Mooncake": mooncake_service,
    "by size": lambda stack, _: sky_service(stack),
    "on ten": lambda stack, _: sky_service(stack, servers=10),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """Of one run by all clients: its seconds, those of the processor, and the share of reads or writes that failed."""

    seconds: float
    clients_s: float
    servers_s: float
    failed: float


class Clients:
    """The clients of one store, in processes of their own (`_data_path_clients.py`)."""

    def __init__(self, stack: ExitStack, service: Service, options: argparse.Namespace) -> None:
        self._service, self._log, self._most_bytes = service, options.log, max(options.sizes)
        command = [service.python, str(HERE / "_data_path_clients.py"), service.kind]
        with environment(pure=False):
            self._process = subprocess.Popen(
                [*command, str(self._most_bytes), str(max(options.clients))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
            )
        stack.callback(self._end)

    def start(self, count: int) -> None:
        self._count = count
        self._do(clients=count, arguments=self._service.arguments(min(self._most_bytes, MOST_IN_FLIGHT_BYTES // count)))

    def open_values(self, size_bytes: int) -> dict[str, int]:
        """How often a turn reads and writes so that it takes about ``TURN_S``."""
        self._do(size_bytes=size_bytes)
        once_s = {verb: [self._do(verb=verb, runs=1)["seconds"] for _ in range(2)][1] for verb in VERBS}
        return {verb: max(1, min(MOST_RUNS, int(TURN_S / once_s[verb]))) for verb in VERBS}

    def turn(self, verb: str, runs: int) -> Turn:
        """After a run to warm up."""
        before_s = processor_s(self._service.pids)
        warm, timed = self._do(verb=verb, runs=1), self._do(verb=verb, runs=runs)
        servers_s = processor_s(self._service.pids) - before_s
        return Turn(
            timed["seconds"] / runs,
            (warm["processor_s"] + timed["processor_s"]) / (runs + 1),
            servers_s / (runs + 1),
            (warm["failed"] + timed["failed"]) / (runs + 1) / self._count,
        )

    def _do(self, **order: Any) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").splitlines()
            said = [line for line in lines if not line.startswith("  ")][-10:]  # of tracebacks only what was wrong
            raise NotThere("\n".join([f"its clients ended at {order}", *said]))
        found: dict[str, float] = json.loads(answer)
        return found

    def _end(self) -> None:
        self._process.communicate(timeout=60)


def sizes(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each number of clients, size, verb and path."""
    with ExitStack() as stack:
        options.log = stack.enter_context(tempfile.TemporaryFile())
        os.environ.update(QUIET)
        paths: dict[str, Clients] = {}
        for name in PATHS:
            if options.only is None or name in options.only:
                with left_out_if_not_there(name, paths):
                    paths[name] = Clients(stack, PATHS[name](stack, options), options)
        for count in options.clients:
            for name, clients in list(paths.items()):
                with left_out_if_not_there(name, paths):
                    clients.start(count)
            for size_bytes in options.sizes:
                if size_bytes * count <= MOST_IN_FLIGHT_BYTES:
                    yield from _cell(paths, size_bytes, count, options.size_rounds)
                else:
                    print(f"LEFT OUT: {count} values of {size_bytes / 1e6:,.0f} MB at a time", file=sys.stderr)


@contextmanager
def left_out_if_not_there(name: str, paths: dict[str, Clients]) -> Iterator[None]:
    try:
        yield
    except NotThere as reason:
        paths.pop(name, None)
        print(f"LEFT OUT: {name}: {reason}", file=sys.stderr)


def _cell(paths: dict[str, Clients], size_bytes: int, count: int, rounds: int) -> Iterator[Row]:
    runs = {}
    for name, clients in list(paths.items()):
        with left_out_if_not_there(name, paths):
            runs[name] = clients.open_values(size_bytes)
    turns: dict[tuple[str, str], list[Turn]] = {(verb, name): [] for verb in VERBS for name in paths}
    for number in range(rounds):
        for verb in VERBS:
            for name in list(paths) if number % 2 else list(paths)[::-1]:
                turns[verb, name].append(paths[name].turn(verb, runs[name][verb]))
    gb = count * size_bytes / 1e9
    for (verb, name), its in turns.items():
        seconds, failed = statistics.median(turn.seconds for turn in its), statistics.mean(turn.failed for turn in its)
        row: Row = {"section": "sizes", "size_bytes": size_bytes, "clients": count, "verb": verb, "path": name}
        row |= {"us": seconds * 1e6, "mb_per_s": gb * 1e3 * (1 - failed) / seconds, "failed": failed}
        row["clients_s_per_gb"] = statistics.mean(turn.clients_s for turn in its) / gb
        row["servers_s_per_gb"] = statistics.mean(turn.servers_s for turn in its) / gb
        if "Redis" in paths:
            peer = turns[verb, "Redis"]
            ratios = [theirs.seconds / ours.seconds for theirs, ours in zip(peer, its, strict=True)]
            row |= {"x": statistics.median(ratios), "x_least": min(ratios), "x_most": max(ratios)}
        print(*_size_cells(row), sep="  ", file=sys.stderr)
        yield row


def _size_cells(row: Row) -> list[str]:
    ratio = f"{row['x']:.2f} ({row['x_least']:.2f}–{row['x_most']:.2f})" if "x" in row else ""
    size = f"{row['size_bytes'] / 1000:,.0f} KB"
    spent = [f"{row[f'{who}_s_per_gb']:.2f}" for who in ("clients", "servers")]
    times = [f"{row['us']:,.0f}", f"{row['mb_per_s']:,.0f}"]
    return [size, str(row["clients"]), row["verb"], row["path"], *times, ratio, *spent, f"{row['failed']:.1%}"]


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


# --- busy ---


@contextmanager
def computing(programs: int) -> Iterator[None]:
    """So many processes that only compute."""
    command = (sys.executable, "-c", "while True: pass")
    running = [subprocess.Popen(command) for _ in range(programs)]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


def busy(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each load, way to ask, verb and path: the medians of runs in turns."""
    with ExitStack() as stack:
        options.log = stack.enter_context(tempfile.TemporaryFile())
        paths = {}
        for name in ("Redis", "by size"):
            with left_out_if_not_there(name, {}):
                service = PATHS[name](stack, options)
                value = f"busy {name}", BUSY_BYTES
                paths[name] = stack.enter_context(client_process(one_value, service.kind, service.arguments(0), *value))
        for programs in BUSY_PROGRAMS:
            for pause_s in (BUSY_PAUSE_S, 0.0):
                with computing(programs):
                    if pause_s:
                        seconds = after_pauses(paths, 10 * options.rounds, pause_s)
                    else:
                        seconds = measure(paths, options.rounds, options.turn)
                for (name, verb), its in seconds.items():
                    row: Row = {"section": "busy", "programs": programs, "pause_s": pause_s, "verb": verb, "path": name}
                    row |= {"size_bytes": BUSY_BYTES, "us": statistics.median(its) * 1e6}
                    row["us_p99"] = statistics.quantiles(its, n=100)[98] * 1e6
                    if "Redis" in paths:
                        row["x"] = row["us"] / (statistics.median(seconds["Redis", verb]) * 1e6)
                    yield row


def after_pauses(paths: dict[str, Any], rounds: int, pause_s: float) -> dict[tuple[str, str], list[float]]:
    """Seconds of runs, of which each comes after a pause."""
    seconds: dict[tuple[str, str], list[float]] = {(name, verb): [] for name in paths for verb in VERBS}
    for _ in range(rounds):
        for (name, verb), its in seconds.items():
            time.sleep(pause_s)
            paths[name].send((verb, 1))
            its += paths[name].recv()
    return seconds


def print_busy(rows: list[Row]) -> None:
    header = ("programs", "pause", "", "path", "µs", "p99", "of Redis's")
    cells = [
        [
            str(row["programs"]),
            f"{row['pause_s'] * 1e3:.0f} ms",
            row["verb"],
            row["path"],
            f"{row['us']:,.0f}",
            f"{row['us_p99']:,.0f}",
        ]
        + [f"{row['x']:.2f} x" if "x" in row else ""]
        for row in rows
    ]
    print_table(f"{BUSY_BYTES} bytes beside programs that compute", header, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=20, help="of `ways`: turns of each path (default 20)")
    parser.add_argument("--turn", type=int, default=20, help="of `ways`: timed runs in a turn (default 20)")
    names = ", ".join(PATHS)
    parser.add_argument(
        "--only",
        action="append",
        metavar="PATH",
        help=f"of `ways`: size, los, python, gateway, delay; of `sizes`: {names}",
    )
    parser.add_argument("--size-rounds", type=int, default=5, help="of the other sections (default 5)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, metavar="N")
    what = f"of `sizes`: one with LMCache (default: {ENGINES.name}, which make installs)"
    parser.add_argument("--lmcache", type=Path, metavar="PYTHON", help=what)
    what = "of `sizes`: where Mooncake's wheel is, or shall be (default: installed for this run)"
    parser.add_argument("--mooncake", type=Path, metavar="DIR", help=what)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected {', '.join(SECTIONS)}")
    rows: list[Row] = []
    for name, section in (("ways", ways), ("sizes", sizes), ("threads", threads), ("busy", busy)):
        if name in (options.sections or SECTIONS):
            rows += section(options)
    if any(row["section"] == "ways" for row in rows):
        print_ways([row for row in rows if row["section"] == "ways"])
    if found := [row for row in rows if row["section"] == "sizes"]:
        header = ("value", "clients", "", "path", "µs", "MB/s", "× Redis", "s/GB of clients", "of servers", "failed")
        print_table("Values of many sizes", header, [_size_cells(row) for row in found])
    for row in rows:
        if row["section"] == "threads":
            ratio = f"{row['x']:.1f} x ({row['x_least']:.1f}–{row['x_most']:.1f})"
            print(
                f"\n4 KB with the delays of the orbits: {row['one_per_s']:.0f} reads a second by one thread, "
                f"{row['many_per_s']:.0f} by {row['threads']}: {ratio}"
            )
    if found := [row for row in rows if row["section"] == "busy"]:
        print_busy(found)
    write_json(options.json, "data_path", 1, rows)


if __name__ == "__main__":
    main()
