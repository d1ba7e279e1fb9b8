"""What the benchmarks share: a constellation and a Redis of their own, tables, and results with their versions."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import skymemory
from skymemory import native
from skymemory.constellation.presets import preset_named
from skymemory.testbed.plan import ConstellationPlan, local_hosts, make_plan
from skymemory.testbed.run_directory import RunDirectory
from skymemory.testbed.supervisor import start_on_free_ports, stop


def versions() -> dict[str, str]:
    """What the figures were measured with."""
    found = {"skymemory": skymemory.__version__, "python": platform.python_version(), "kernel": platform.release()}
    for name in ("numpy", "torch", "transformers", "redis", "hiredis", "uvloop", "cryptography"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    found["native helper"] = "yes" if native.NATIVE else "no"
    found["cores"] = str(os.cpu_count())
    return found


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
    preset: str = "testbed-19x5", hosts: int = 5, **options: Any
) -> Iterator[tuple[ConstellationPlan, Path]]:
    """A constellation of processes on free ports; stopped and gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="skymemory-bench-"))
    directory = RunDirectory(folder)
    if options.get("auth", "off") != "off":
        options["keys_file"] = str(directory.keys_path)
    try:
        started = start_on_free_ports(
            directory,
            lambda base_port: make_plan(preset, hosts=local_hosts(preset, hosts, base_port), **options),
            preset_named(preset).torus.size,
        )
        yield started.plan, folder
    finally:
        stop(directory)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def redis_server() -> Iterator[int | None]:
    """A Redis on a free port without persistence; None where it is not installed (said, so that it shows)."""
    if shutil.which("redis-server") is None:
        print("redis-server is not installed: the peer's columns stay empty", file=sys.stderr)
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
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
