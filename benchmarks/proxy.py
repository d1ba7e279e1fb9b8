"""What a router adds to a request, beside others: `python benchmarks/proxy.py [--json FILE] [--quick] [--peers DIR]`.

Four engines that answer at once and one load generator share a core; the router that is asked has the other (`taskset`,
where there is one; `--cores all`: all have all). Bodies of 8 KB at 1, 8 and 64 connections, of 64 KB at 8, of 1 KB at
256, and streams of 40 events at 64, in turns: directly, through `skymemory route`, and through its peers. The clock
starts when all are connected: a router that accepts slowly would else be measured with fewer connections. *Added* is
the difference of the percentiles to asking directly in the same run; *processor* is what the router's process used,
user and system, for a request. `--against PYTHON` measures another version's default beside ours (the Python of an
environment that has it), and prints the ratios of the pairs; both are started again for each turn, as one process
differs from the next of the same program by up to a tenth (where its objects lie in memory).

Peers: sglang-router and vllm-router (their wheels in an environment of their own, `--peers DIR`, made if it is not
there), policy cache_aware; Envoy and nginx, which know no prompts, round robin. What cannot be had is left out, and the
table says so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
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
from typing import Any, NamedTuple

from _bench import print_table, write_json
from skymemory.engine.inputs import small_model_folder

HERE = Path(__file__).parent
ENGINES = 4
SEED = 7
TOKENIZER = small_model_folder()
PEERS = {"sglang-router": "sglang_router.launch_router", "vllm-router": "vllm_router"}
PINNED = shutil.which("taskset") is not None and (os.cpu_count() or 1) > 1
ROUTER_CORE, REST_CORE = "0", "1"
_TYPES = "type.googleapis.com/envoy.extensions.filters"


@contextmanager
def process(*command: str, core: str, says: bool = True) -> Iterator[tuple[int, str]]:
    """One process on one core; yields its number, and its first line if it says one."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "RUST_LOG": "error"}
    pinned = ("taskset", "-c", core, *command) if PINNED else command
    running = subprocess.Popen(
        pinned,
        stdout=subprocess.PIPE if says else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        process_group=0,
    )
    try:
        yield running.pid, running.stdout.readline().strip() if running.stdout is not None else ""
    finally:
        os.killpg(running.pid, signal.SIGTERM)
        try:
            running.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        if running.stdout is not None:
            running.stdout.close()


def processor_s(pid: int) -> float:
    """Used by a process and its threads so far. (nginx' worker is a child: it runs without a master here.)"""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Case(NamedTuple):
    connections: int
    body_bytes: int
    streams: bool = False

    def __str__(self) -> str:
        what = "streams of 40 events" if self.streams else "answers"
        return f"bodies of {self.body_bytes >> 10} KB, {self.connections} connections, {what}"


CASES = {Case(1, 8192): 1, Case(8, 8192): 2, Case(64, 8192): 2, Case(8, 65_536): 1}
"""How many times the usual number of requests each is asked."""
CASES |= {Case(256, 1024): 2, Case(64, 1024, streams=True): 1}
WARM = Case(8, 8192)


def load(port: int, case: Case, requests: int, way: str) -> dict[str, float]:
    asked = map(str, (port, case.connections, requests, case.body_bytes, SEED))
    command = [sys.executable, str(HERE / "_proxy_load.py"), *asked, *(["stream"] if case.streams else [])]
    pinned = ["taskset", "-c", REST_CORE, *command] if PINNED else command
    done = subprocess.run(pinned, capture_output=True, text=True, timeout=660, check=False)
    if done.returncode:
        raise SystemExit(f"the load generator failed at {way}, port {port}, {case}: {done.stderr[-2000:]}")
    took: dict[str, float] = json.loads(done.stdout)
    return took


@contextmanager
def our_router(engines: list[int], *more: str, python: str = sys.executable) -> Iterator[tuple[int, int]]:
    backends = [word for port in engines for word in ("--backend", f"http://127.0.0.1:{port}")]
    command = (python, "-m", "skymemory", "route", "--listen", "127.0.0.1:0", *backends, *more)
    with process(*command, core=ROUTER_CORE) as (pid, line):
        yield pid, int(line.split("127.0.0.1:")[1].split(":")[0])


def free_ports(number: int) -> list[int]:
    """For programs that do not report the port they took."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def silent_router(port: int, path: str, *command: str) -> Iterator[tuple[int, int]]:
    """One that does not say when it listens."""
    with process(*command, core=ROUTER_CORE, says=False) as (pid, _):
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=1):
                    break
            except OSError:
                time.sleep(0.1)
        yield pid, port


def peer_commands(python: Path | None, engines: list[int], folder: Path) -> dict[str, tuple[int, str, list[str]]]:
    """Port, a page that it has, and command of each peer that is there."""
    urls = [f"http://127.0.0.1:{port}" for port in engines]
    found: dict[str, tuple[int, str, list[str]]] = {}
    for name, module in PEERS.items() if python is not None else ():
        if subprocess.run([str(python), "-c", f"import {module.split('.')[0]}"], check=False).returncode:
            continue
        port, metrics_port = free_ports(2)
        launch = ["-m", module] if "." in module else [str(Path(str(python)).parent / name)]
        first = [str(python), *launch] if launch[0] == "-m" else launch
        more = ["--policy", "cache_aware", "--prometheus-port", str(metrics_port), "--worker-urls", *urls]
        found[f"{name}, cache_aware"] = port, "/health", [*first, "--host", "127.0.0.1", "--port", str(port), *more]
    if nginx := shutil.which("nginx"):
        (port,) = free_ports(1)
        servers = "".join(f"server 127.0.0.1:{each};" for each in engines)
        (folder / "nginx.conf").write_text(
            f"daemon off; master_process off; pid {folder}/nginx.pid; error_log /dev/null;"
            "events { worker_connections 4096; }"
            "http { access_log off; client_max_body_size 64m; client_body_buffer_size 256k;"
            f"upstream engines {{ {servers} keepalive 64; }}"
            f"server {{ listen 127.0.0.1:{port}; keepalive_requests 1000000; location / {{"
            'proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; } } }'
        )
        found["nginx, round robin"] = port, "/health", [nginx, "-c", str(folder / "nginx.conf")]
    envoy = Path(sys.executable).parent / "envoy"
    if envoy.exists():
        (port,) = free_ports(1)
        (folder / "envoy.json").write_text(json.dumps(envoy_settings(port, engines)))
        command = [str(envoy), "-c", str(folder / "envoy.json"), "--concurrency", "1", "--log-level", "off"]
        found["Envoy, round robin"] = port, "/health", [*command, "--use-dynamic-base-id"]
    return found


def envoy_settings(port: int, engines: list[int]) -> dict[str, Any]:
    def address(of: int) -> dict[str, Any]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": of}}

    manager = {
        "@type": f"{_TYPES}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "all",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "engines"}}],
                }
            ]
        },
        "http_filters": [
            {
                "name": "router",
                "typed_config": {"@type": f"{_TYPES}.http.router.v3.Router"},
            }
        ],
    }
    filters = [{"name": "http", "typed_config": manager}]
    endpoints = [{"endpoint": {"address": address(each)}} for each in engines]
    cluster = {
        "name": "engines",
        "type": "STATIC",
        "load_assignment": {"cluster_name": "engines", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    listener = {"address": address(port), "filter_chains": [{"filters": filters}]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def peers_python(folder: Path) -> Path | None:
    """A Python with the peers, installed if need be; None, with the reason said, where that fails."""
    python = folder / "bin" / "python"
    check = [str(python), "-c", "import sglang_router.launch_router"]
    if python.exists() and subprocess.run(check, capture_output=True, check=False).returncode == 0:
        return python
    print(f"installing {', '.join(PEERS)} into {folder}", file=sys.stderr)
    install = [str(python), "-m", "pip", "install", "-qq", "--no-input", "--disable-pip-version-check"]
    for command, needed in (
        ([sys.executable, "-m", "venv", str(folder)], True),
        ([*install, "sglang-router"], True),
        ([*install, "vllm-router"], False),
        (check, True),
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode and needed:
            print(f"LEFT OUT: {' '.join(command[1:])}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            return None
    return python


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what it started is stopped
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="fewer requests; the figures are rough")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="where peers' wheels are, or shall be")
    parser.add_argument("--no-peers", action="store_true", help="leave sglang-router and vllm-router out")
    parser.add_argument("--cores", choices=("own", "all"), default="own", help="one for the router; or all for all")
    parser.add_argument("--against", metavar="PYTHON", help="of an environment with another version")
    parser.add_argument("--rounds", type=int, metavar="N", help="turns (5; with --quick 2)")
    args = parser.parse_args()
    global PINNED
    PINNED = PINNED and args.cores == "own"
    rounds, requests = (2, 1000) if args.quick else (5, 4000)
    rounds = args.rounds or rounds
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="proxy-peers-")))
        python = None if args.no_peers else peers_python(args.peers or folder / "python")
        command = (sys.executable, str(HERE / "_proxy_engine.py"))
        engines = [int(stack.enter_context(process(*command, core=REST_CORE))[1]) for _ in range(ENGINES)]
        ways: dict[str, tuple[int | None, int]] = {"an engine, directly": (None, engines[0])}
        pair = ((OURS, sys.executable), (BEFORE, args.against)) if args.against else ((OURS, sys.executable),)
        turn = stack.enter_context(ExitStack())

        def start_pair() -> None:
            turn.close()
            for name, python in pair:
                ways[name] = turn.enter_context(our_router(engines, python=python))

        start_pair()
        if not args.against:
            for name, more in (
                ("skymemory route --strategy approximate", ("--strategy", "approximate")),
                ("skymemory route --strategy round-robin", ("--strategy", "round-robin")),
                ("skymemory route --tokenizer", ("--tokenizer", str(TOKENIZER))),
            ):
                ways[name] = stack.enter_context(our_router(engines, *more))
        for name, (port, page, command_) in peer_commands(python, engines, folder).items():
            ways[name] = stack.enter_context(silent_router(port, page, *command_))
        for name, (_, port) in ways.items():
            load(port, WARM, 1000, name)
        measured: Measured = {name: {case: [] for case in CASES} for name in ways}
        for number in range(rounds):
            if args.against:
                start_pair()
                for name, _ in pair:
                    load(ways[name][1], WARM, 1000, name)
                for case in CASES:  # their connections to engines open, too
                    for name, _ in pair:
                        load(ways[name][1], case, 4 * case.connections, name)
            for case, times in CASES.items():
                # Every second turn the other way round: what comes first meets another machine than what comes last.
                for name, (pid, port) in list(ways.items())[:: -1 if number % 2 else 1]:
                    before_s = 0.0 if pid is None else processor_s(pid)
                    took = load(port, case, times * requests, name)
                    used_s = 0.0 if pid is None else processor_s(pid) - before_s
                    measured[name][case].append({**took, "processor": used_s / took["requests"]})
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
    report(measured, args.cores, args.json)


OURS = "skymemory route (least-ttft, the default)"
BEFORE = "skymemory route, the other version"
Measured = dict[str, dict[Case, list[dict[str, float]]]]
"""By way and case, the figures of each turn."""


def report(measured: Measured, cores: str, file: Path | None) -> None:
    """Medians over the rounds, and each beside sglang-router, where that ran."""
    rows: list[dict[str, Any]] = []
    direct = next(iter(measured))
    for name, cases in measured.items():
        for case, runs in cases.items():
            keys = ("p50", "p99", "per_s", "processor")
            row: dict[str, Any] = {"way": name, **case._asdict(), "cores": cores}
            row |= {key: statistics.median(run[key] for run in runs) for key in keys}
            rows.append(row)
    of = {(row["way"], case_of(row)): row for row in rows}
    peer = next((name for name in measured if name.startswith("sglang-router")), None)
    for row in rows:
        row["added_p50"] = row["p50"] - of[direct, case_of(row)]["p50"]
    for row in rows:
        case = case_of(row)
        if peer is not None and row["way"] not in (direct, peer):
            row["per_s_over_peer"] = row["per_s"] / of[peer, case]["per_s"]
            row["p99_over_peer"] = row["p99"] / of[peer, case]["p99"]
            row["added_p50_over_peer"] = row["added_p50"] / of[peer, case]["added_p50"]
    for case in next(iter(measured.values())):
        print_table(
            f"{case}, four engines that answer at once".capitalize(),
            [
                "way",
                "per s",
                "p50 ms",
                "p99 ms",
                "added p50",
                "processor us",
                "per s / peer",
                "p99 / peer",
                "added / peer",
            ],
            [
                [
                    row["way"],
                    f"{row['per_s']:,.0f}",
                    f"{1e3 * row['p50']:.3f}",
                    f"{1e3 * row['p99']:.3f}",
                    f"{1e3 * row['added_p50']:.3f}" if row["way"] != direct else "-",
                    f"{1e6 * row['processor']:.0f}" if row["way"] != direct else "-",
                    *(
                        f"{row[key]:.2f}" if key in row else "-"
                        for key in ("per_s_over_peer", "p99_over_peer", "added_p50_over_peer")
                    ),
                ]
                for row in rows
                if case_of(row) == case
            ],
        )
    if BEFORE in measured:
        print_pairs(measured)
    if peer is None:
        print("sglang-router did not run: LEFT OUT")
    write_json(file, "proxy", SEED, rows)


def case_of(row: dict[str, Any]) -> Case:
    return Case(row["connections"], row["body_bytes"], row["streams"])


def print_pairs(measured: Measured) -> None:
    """This version over the other one, turn by turn: the geometric mean and its 95 % interval. One process of the same
    program differs from the next by a tenth and more, so a median of few turns says little.
    """
    table = []
    for case, ours in measured[OURS].items():
        line = [str(case)]
        for key in ("per_s", "p99", "processor"):
            logs = [math.log(a[key] / b[key]) for a, b in zip(ours, measured[BEFORE][case], strict=True)]
            middle, half = statistics.mean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
            line.append(f"{math.exp(middle):.3f} ({math.exp(middle - half):.3f} to {math.exp(middle + half):.3f})")
        table.append(line)
    print_table("This version over the other", ["case", "per s", "p99", "processor"], table)


if __name__ == "__main__":
    main()
