"""Satellites in C beside those in Python: `python benchmarks/flight.py [path|start …] [--json FILE]`.

``path``   one value of 480 chunks of 6,144 bytes on ten of 95 satellites, read and written without delays by one
           client; the satellites, all in one process, are in C, in Python with its native helper, or in Python alone
``start``  1,584 satellites in one process without chunks, with keys and without: how long until they listen, and in how
           much memory

The client is the same everywhere, with the native helper. Paths take turns; ratios are to Python with the helper: of
medians, and of processor time the median of each round's.
`make flight` builds the satellites in C.
"""

from __future__ import annotations

import argparse
import itertools
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _bench import block_verbs, client_process, constellation, environment, measure, print_table, write_json
from data_path import BLOCK_BYTES, processor_s, value_of
from skymemory.testbed.connect import open_constellation
from skymemory.testbed.flight import Choice, daemon_path, share_text
from skymemory.testbed.key_file import new_keys
from skymemory.testbed.plan import local_hosts, make_plan
from skymemory.testbed.run_directory import RunDirectory, free_ports
from skymemory.testbed.supervisor import READY, resident_bytes

SECTIONS = ("path", "start")
KINDS: dict[str, tuple[Choice, bool]] = {
    "C": ("c", False),
    "native helper": ("python", False),
    "pure Python": ("python", True),
}
HELD = 48
"""Values held while the memory beside the store is measured: 142 MB."""
COUNTED_RUNS = 100
"""Values that each kind reads, and writes, in a round of counting processor time: 0.3 GB."""
COUNTED_ROUNDS = 15
SHELL = "starlink-a"
Row = dict[str, Any]


def one_value(folder: str) -> Any:
    """Read and write of one value by a store of its own."""
    store = open_constellation(Path(folder))
    return block_verbs(store, bytes(range(32)), value_of("flight", BLOCK_BYTES))


def path(options: argparse.Namespace) -> Iterator[Row]:
    plan: dict[str, Any] = {"hosts": 1, "servers": 10, "delay_scale": 0.0, "memory_per_satellite_bytes": 64 << 20}
    idle: dict[str, int] = {}
    pids: dict[str, int] = {}
    paths, folders = {}, {}
    with ExitStack() as stack:
        for name, (satellite, pure) in KINDS.items():
            with environment(pure=pure):
                _, folder = stack.enter_context(constellation(satellite=satellite, **plan))
            (record,) = RunDirectory(folder).living().values()
            pids[name], folders[name], idle[name] = record.pid, folder, resident_bytes(record.pid) or 0
            paths[name] = stack.enter_context(client_process(one_value, str(folder)))
        seconds = measure(paths, options.rounds, options.turn)
        spent = _processor_a_gb(paths, pids)
        beside = {name: _beside_the_store(folders[name], pids[name]) for name in KINDS}
    for name in KINDS:
        row: Row = {"section": "path", "satellites": name, "idle_bytes": idle[name], "beside_store_bytes": beside[name]}
        for verb in ("read", "write"):
            median = statistics.median(seconds[name, verb])
            row[f"{verb}_MB_s"] = BLOCK_BYTES / median / 1e6
            row[f"{verb}_x"] = statistics.median(seconds["native helper", verb]) / median
            theirs = spent["native helper", verb]
            row[f"{verb}_s_per_gb"] = statistics.median(spent[name, verb])
            row[f"{verb}_s_per_gb_x"] = statistics.median(
                ours / helper for ours, helper in zip(spent[name, verb], theirs, strict=True)
            )
        yield row


def _processor_a_gb(clients: dict[str, Any], pids: dict[str, int]) -> dict[tuple[str, str], list[float]]:
    """Processor seconds of the satellites' process for each GB, by kind and verb: one figure of each in a round, so
    that what else the computer does in a round weighs on all kinds alike.
    """
    spent: dict[tuple[str, str], list[float]] = {(name, verb): [] for name in clients for verb in ("read", "write")}
    for _ in range(COUNTED_ROUNDS):
        for name, verb in spent:
            before_s = processor_s([pids[name]])
            clients[name].send((verb, COUNTED_RUNS))
            clients[name].recv()
            spent[name, verb].append((processor_s([pids[name]]) - before_s) / (COUNTED_RUNS * BLOCK_BYTES / 1e9))
    return spent


def _beside_the_store(folder: Path, pid: int) -> int:
    """Resident memory of the process less the chunks that its satellites hold, with their references."""
    from skymemory.testbed.control import ping_all

    with open_constellation(folder) as store:
        for number in range(HELD):
            key = number.to_bytes(32, "big")
            if store.complete_store(store.prepare_store([(key, value_of(f"held {number}", BLOCK_BYTES))])) != [True]:
                raise SystemExit("a value was not stored")
    answers = ping_all(RunDirectory(folder).read_plan()).values()
    held = sum(answer["memory_used_bytes"] for answer in answers if answer)
    return (resident_bytes(pid) or 0) - held


def start(options: argparse.Namespace) -> Iterator[Row]:
    """The daemon alone, as the supervisor starts it, with its configuration written before."""
    with tempfile.TemporaryDirectory() as folder:
        config, keys = Path(folder) / "share", Path(folder) / "keys"
        new_keys(keys)
        for auth, _ in itertools.product(("off", "on"), range(options.starts)):
            hosts = local_hosts(SHELL, 1, free_ports(1584))
            plan = make_plan(
                SHELL, hosts=hosts, delay_scale=0.0, auth=auth, keys_file="" if auth == "off" else str(keys)
            )
            config.write_text(share_text(plan, plan.hosts[0]))
            ours, theirs = socket.socketpair()
            words = [str(daemon_path()), "satellite", "--config", str(config), "--supervisor-fd", str(theirs.fileno())]
            began_s = time.perf_counter()
            process = subprocess.Popen(words, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL)
            theirs.close()
            assert ours.recv(len(READY)) == READY
            ready_s = time.perf_counter() - began_s
            time.sleep(2.0)  # they have greeted their neighbours
            row = {"section": "start", "satellites": 1584, "keys": auth == "on", "ready_s": ready_s}
            row["resident_bytes"] = resident_bytes(process.pid) or 0
            row["processor_s"] = processor_s([process.pid])
            ours.close()
            process.wait(30)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each path (default 10)")
    parser.add_argument("--turn", type=int, default=20, help="timed runs in a turn (default 20)")
    parser.add_argument("--starts", type=int, default=3, help="how often 1,584 satellites are started (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected {', '.join(SECTIONS)}")
    chosen = options.sections or SECTIONS
    rows = [*(path(options) if "path" in chosen else ()), *(start(options) if "start" in chosen else ())]
    if its := [row for row in rows if row["section"] == "path"]:
        header = (
            "satellites",
            "read MB/s",
            "x",
            "write MB/s",
            "x",
            "s/GB read",
            "s/GB write",
            "MB idle",
            "beside store",
        )
        cells = [
            [
                row["satellites"],
                f"{row['read_MB_s']:,.0f}",
                f"{row['read_x']:.2f}",
                f"{row['write_MB_s']:,.0f}",
                f"{row['write_x']:.2f}",
                f"{row['read_s_per_gb']:.2f}",
                f"{row['write_s_per_gb']:.2f}",
                f"{row['idle_bytes'] / 1e6:.1f}",
                f"{row['beside_store_bytes'] / 1e6:.1f}",
            ]
            for row in its
        ]
        print_table(f"{BLOCK_BYTES} bytes on ten of 95 satellites of one process", header, cells)
    if its := [row for row in rows if row["section"] == "start"]:
        cells = [
            [
                "with keys" if row["keys"] else "C",
                f"{row['ready_s']:.2f}",
                f"{row['processor_s']:.2f}",
                f"{row['resident_bytes'] / 1e6:.1f}",
            ]
            for row in its
        ]
        print_table("1,584 satellites of one process", ("satellites", "s until ready", "processor s", "MB"), cells)
    write_json(options.json, "flight", 0, rows)


if __name__ == "__main__":
    sys.exit(main())
