"""What the benchmarks share: a constellation and a Redis of their own, tables, and results with their versions."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import skymemory
from skymemory import native
from skymemory.constellation.presets import preset_named
from skymemory.store.base import Store
from skymemory.testbed.flight import Choice, kinds_for
from skymemory.testbed.plan import ConstellationPlan, local_hosts, make_plan
from skymemory.testbed.run_directory import RunDirectory
from skymemory.testbed.supervisor import start_on_free_ports, stop

PURE = "SKYMEMORY_PURE_PYTHON"
WARM_MALLOC = {"MALLOC_TRIM_THRESHOLD_": "1073741824", "MALLOC_MMAP_THRESHOLD_": "1073741824"}
"""What a client frees stays its own: without it redis-py maps, touches and returns 3 MB for every SET, which takes
three times as long as the SET itself, and differs from run to run.
"""
Verb = Callable[[], object]


def versions() -> dict[str, str]:
    """What the figures were measured with."""
    found = {"skymemory": skymemory.__version__, "python": platform.python_version(), "kernel": platform.release()}
    for name in ("numpy", "torch", "transformers", "redis", "hiredis", "uvloop", "cryptography"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    found["native helper"] = "yes" if native.NATIVE else "no"
    found["cores"] = str(len(os.sched_getaffinity(0)))
    found["processor"] = processor()
    return found


_LIMITS = {"ONEDNN_MAX_CPU_ISA": "oneDNN", "ATEN_CPU_CAPABILITY": "ATen", "MKL_ENABLE_INSTRUCTIONS": "MKL"}
"""Variables that keep libraries from using all instructions of the processor."""


def processor() -> str:
    """Model name and widest matrix instructions, or the limit that was set: ``an Intel Xeon with AMX``."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = re.sub(r"\((?:R|TM)\)| Processor| CPU.*", "", fields.get("model name", platform.machine())).strip()
    flags = set(fields.get("flags", "").split())
    if any(os.environ.get(limit, "").upper().startswith("AVX2") for limit in _LIMITS):
        kind = "limited to AVX2"
    elif "amx_bf16" in flags:
        kind = "with AMX"
    elif "avx512_bf16" in flags:
        kind = "with AVX-512 and bfloat16"
    elif "avx512f" in flags:
        kind = "with AVX-512"
    else:
        kind = "with AVX2" if "avx2" in flags else ""
    article = "an" if name[:1] in "AEIOU" else "a"
    return f"{article} {name} {kind}".strip()


def write_json(path: Path | None, name: str, seed: int, rows: Sequence[dict[str, Any]]) -> None:
    if path is not None:
        content = {"benchmark": name, "seed": seed, "versions": versions(), "rows": list(rows)}
        path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        print(f"written: {path}", file=sys.stderr)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(str(row[at])) for row in [header, *rows]) for at in range(len(header))]
    print(f"\n{title}")
    for row in [header, ["-" * width for width in widths], *rows]:
        print(
            "  ".join(
                f"{cell:<{width}}" if at == 0 else f"{cell:>{width}}"
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        )


def median_s(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@contextmanager
def constellation(
    preset: str = "testbed-19x5", hosts: int = 5, satellite: Choice = "python", **options: Any
) -> Iterator[tuple[ConstellationPlan, Path]]:
    """A constellation of processes on free ports; stopped and gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="skymemory-bench-"))
    directory = RunDirectory(folder)
    if options.get("auth", "off") != "off":
        options["keys_file"] = str(directory.keys_path)
    try:
        started = start_on_free_ports(
            directory,
            lambda ports: make_plan(preset, hosts=local_hosts(preset, hosts, ports), **options),
            preset_named(preset).torus.size,
            kinds=kinds_for(satellite, make_plan(preset, hosts=local_hosts(preset, hosts, 26_000), **options)),
        )
        yield started.plan, folder
    finally:
        stop(directory)
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def redis_server(socket_path: Path | None = None) -> Iterator[int | None]:
    """A Redis on a free port (and a Unix socket) that keeps nothing; None, and a line, where it is not installed."""
    if shutil.which("redis-server") is None:
        print("redis-server is not installed: the peer's columns stay empty", file=sys.stderr)
        yield None
        return
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    if socket_path is not None:
        command += ["--unixsocket", str(socket_path)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        import redis

        client = redis.Redis(port=port)
        for _ in range(100):
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.05)
        client.close()
        yield port
    finally:
        server.terminate()
        server.wait()


# --- clients that take turns: each a process of its own, instructed by a pipe how often to read or write ---


@contextmanager
def host_owner(folder: Path, size: str) -> Iterator[subprocess.Popen[str]]:
    """An owner of a host arena in ``folder``."""
    command = [sys.executable, "-m", "skymemory", "store", "serve", f"host://{size}?at={folder}"]
    command += ["--listen", f"unix://{folder}/redis.sock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield process
        finally:
            process.terminate()


@contextmanager
def environment(pure: bool) -> Iterator[None]:
    """What is started within uses the native helper, or is made to do without; freed memory stays warm."""
    before = dict(os.environ)
    os.environ.update(WARM_MALLOC, **{PURE: "1" if pure else "0"})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def block_verbs(store: Store, key: bytes, value: bytes) -> tuple[Verb, Verb]:
    """Read and write of one block, which is there and right already. ``SystemExit`` where one of them fails."""

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
    return read, write


def take_turns(pipe: Connection, make: Callable[..., tuple[Verb, Verb]], args: tuple[Any, ...]) -> None:
    """The whole of a client process: for every (read or write, repeats) it is sent, the seconds of each."""
    read, write = make(*args)
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


@dataclass(frozen=True, slots=True)
class Client:
    """A client in a process of its own, and how it is given orders and answers."""

    send: Callable[[Any], None]
    recv: Callable[[], Any]
    pid: int


@contextmanager
def client_process(make: Callable[..., tuple[Verb, Verb]], *args: Any, pure: bool = False) -> Iterator[Client]:
    """A client whose read and write ``make(*args)`` returns there, ready; ended afterwards."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=take_turns, args=(theirs, make, args), daemon=True)
    with environment(pure):
        process.start()
    theirs.close()
    try:
        ours.recv()
        assert process.pid is not None
        yield Client(ours.send, ours.recv, process.pid)
        ours.send(None)
    except EOFError:
        raise SystemExit(f"the client of {make.__name__} ended") from None
    finally:
        ours.close()
        process.join(5)
        if process.is_alive():
            process.terminate()


def turn(clients: Sequence[Client], verb: str, runs: int) -> float:
    """Seconds in which all of these clients do this so often, at the same time, each after a run to warm up."""
    for count in (1, runs):
        began_s = time.perf_counter()
        for client in clients:
            client.send((verb, count))
        for client in clients:
            client.recv()
    return time.perf_counter() - began_s


def measure(paths: dict[str, Client], rounds: int, turn: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of every timed run, by path and verb: in each round every path has a turn, whose first run only warms."""
    seconds: dict[tuple[str, str], list[float]] = {(name, verb): [] for name in paths for verb in ("read", "write")}
    for _ in range(rounds):
        for verb in ("read", "write"):
            for name, client in paths.items():
                client.send((verb, turn + 1))
                seconds[name, verb] += client.recv()[1:]
    return seconds
