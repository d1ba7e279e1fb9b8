"""What a router adds to a request: `python benchmarks/proxy.py [--json FILE] [--quick] [--peer DIR]`.

Four engines that answer at once (one process each), bodies of 8 KB, and one load generator (a process) that asks
directly, through `skymemory route`, and through sglang-router (policy cache_aware), in turns. Times at one connection,
requests per second at eight. *Added* is the difference of the percentiles to asking directly in the same run.

sglang-router is installed from its wheel into a virtual environment of its own (`--peer DIR`, made if it is not there);
where that does not work it is left out, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import skymemory
from _bench import print_table, write_json

HERE = Path(__file__).parent
ENGINES = 4
BODY_BYTES = 8192
SEED = 7
TOKENIZER = Path(skymemory.__file__).parent / "engine" / "trained" / "small"
PEER = "sglang-router"


@contextmanager
def process(*command: str, says: str | None = "") -> Iterator[str]:
    """One process; yields its first line if it says one (None: nobody listens)."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "RUST_LOG": "error"}
    out = subprocess.PIPE if says is not None else subprocess.DEVNULL
    running = subprocess.Popen(
        command, stdout=out, stderr=subprocess.DEVNULL, text=True, env=environment, process_group=0
    )
    try:
        yield running.stdout.readline().strip() if running.stdout is not None else ""
    finally:
        os.killpg(running.pid, signal.SIGTERM)
        try:
            running.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        if running.stdout is not None:
            running.stdout.close()


def load(port: int, connections: int, requests: int) -> dict[str, float]:
    command = [sys.executable, str(HERE / "_proxy_load.py"), *map(str, (port, connections, requests, BODY_BYTES, SEED))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    if done.returncode:
        raise SystemExit(f"the load generator failed at port {port}: {done.stderr[-2000:]}")
    took: dict[str, float] = json.loads(done.stdout)
    return took


@contextmanager
def our_router(engines: list[int], *more: str) -> Iterator[int]:
    backends = [word for port in engines for word in ("--backend", f"http://127.0.0.1:{port}")]
    with process(sys.executable, "-m", "skymemory", "route", "--listen", "127.0.0.1:0", *backends, *more) as line:
        yield int(line.split("127.0.0.1:")[1].split(":")[0])


def free_ports(number: int) -> list[int]:
    """For whoever cannot be asked which port it took."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def peer_router(python: Path, engines: list[int]) -> Iterator[int]:
    port, metrics_port = free_ports(2)
    urls = [f"http://127.0.0.1:{each}" for each in engines]
    command = [str(python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "cache_aware", "--prometheus-port", str(metrics_port), "--worker-urls", *urls]
    with process(*command, says=None):
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                    break
            except OSError:
                time.sleep(0.1)
        yield port


def peer_python(folder: Path) -> Path | None:
    """A Python with sglang-router, installed if need be; None, with the reason said, where that fails."""
    python = folder / "bin" / "python"
    check = [str(python), "-c", "import sglang_router.launch_router"]
    if python.exists() and subprocess.run(check, capture_output=True, check=False).returncode == 0:
        return python
    print(f"installing {PEER} into {folder}", file=sys.stderr)
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "-qq", "--no-input", "--disable-pip-version-check", PEER],
        check,
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            print(f"{PEER} is LEFT OUT: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            return None
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="fewer requests; the figures are rough")
    parser.add_argument("--peer", type=Path, metavar="DIR", help="where sglang-router is, or shall be")
    parser.add_argument("--no-peer", action="store_true", help="leave sglang-router out")
    args = parser.parse_args()
    rounds, requests = (2, 500) if args.quick else (5, 2000)
    with ExitStack() as stack:
        folder = args.peer or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sglang-router-")))
        python = None if args.no_peer else peer_python(folder)
        engines = [
            int(stack.enter_context(process(sys.executable, str(HERE / "_proxy_engine.py")))) for _ in range(ENGINES)
        ]
        ways = {
            "an engine, directly": engines[0],
            "skymemory route (least-ttft, the default)": stack.enter_context(our_router(engines)),
            "skymemory route --strategy approximate": stack.enter_context(
                our_router(engines, "--strategy", "approximate")
            ),
            "skymemory route --strategy round-robin": stack.enter_context(
                our_router(engines, "--strategy", "round-robin")
            ),
            "skymemory route --tokenizer": stack.enter_context(our_router(engines, "--tokenizer", str(TOKENIZER))),
        }
        if python is not None:
            ways[f"{PEER}, cache_aware"] = stack.enter_context(peer_router(python, engines))
        for port in ways.values():
            load(port, 1, 300)
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        busy: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, port in ways.items():
                measured[name].append(load(port, 1, requests))
                busy[name].append(load(port, 8, 2 * requests)["per_s"])
    report(measured, busy, args.json)


def report(measured: dict[str, list[dict[str, float]]], busy: dict[str, list[float]], file: Path | None) -> None:
    """Medians over the rounds. What is added is told beside the peer's, where the peer ran."""
    rows: list[dict[str, Any]] = []
    first = next(iter(measured))
    for name in measured:
        figures = {key: statistics.median(each[key] for each in measured[name]) for key in ("p50", "p90", "p99")}
        row: dict[str, Any] = {"way": name, **{f"{key}_ms": 1e3 * value for key, value in figures.items()}}
        row["per_s_at_8"] = statistics.median(busy[name])
        if name != first:
            row |= {f"added_{key}_ms": row[f"{key}_ms"] - rows[0][f"{key}_ms"] for key in ("p50", "p90", "p99")}
        rows.append(row)
    peer = next((row for row in rows if row["way"].startswith(PEER)), None)
    for row in rows[1:]:
        if peer is not None and row is not peer:
            row["added_p50_over_peer"] = row["added_p50_ms"] / peer["added_p50_ms"]
            row["per_s_over_peer"] = row["per_s_at_8"] / peer["per_s_at_8"]

    def cell(row: dict[str, Any], key: str, pattern: str) -> str:
        return pattern.format(row[key]) if key in row else "-"

    columns = [("p50_ms", "{:.3f}"), ("p99_ms", "{:.3f}"), ("added_p50_ms", "{:.3f}"), ("added_p99_ms", "{:.3f}"),
               ("added_p50_over_peer", "{:.1f}"), ("per_s_at_8", "{:,.0f}"), ("per_s_over_peer", "{:.2f}")]  # fmt: skip
    print_table(
        "Requests of 8 KB, four engines that answer at once",
        ["way", "p50 ms", "p99 ms", "added p50", "added p99", "of the peer's", "per s at 8", "of the peer's"],
        [[row["way"], *(cell(row, *column) for column in columns)] for row in rows],
    )
    if peer is None:
        print(f"{PEER} did not run: LEFT OUT")
    write_json(file, "proxy", SEED, rows)


if __name__ == "__main__":
    main()
