"""What a constellation costs before anything uses it: `python benchmarks/footprint.py`.

Time until all satellites of the preset listen, memory of their processes, and processor time over ten idle seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import psutil

from _bench import constellation, print_table, write_json
from skymemory.testbed.run_directory import RunDirectory

GOALS = {"start_s": 2.0, "memory_MB": 300.0, "idle_percent": 1.0}


def measured(preset: str, hosts: int, idle_s: float) -> dict[str, float]:
    began = time.perf_counter()
    with constellation(preset, hosts) as (plan, folder):
        start_s = time.perf_counter() - began
        records = [RunDirectory(folder).read_record(host.name) for host in plan.hosts]
        processes = [psutil.Process(record.pid) for record in records if record is not None]
        if len(processes) != len(plan.hosts):
            raise SystemExit("a host process is missing")
        resident = sum(process.memory_info().rss for process in processes) / 1e6
        own = sum(process.memory_full_info().uss for process in processes) / 1e6
        before = [process.cpu_times() for process in processes]
        time.sleep(idle_s)
        after = [process.cpu_times() for process in processes]
    busy_s = sum(b.user + b.system - a.user - a.system for a, b in zip(before, after, strict=True))
    return {
        "start_s": start_s,
        "memory_MB": resident,
        "own_memory_MB": own,
        "idle_percent": 100 * max(0.0, busy_s) / idle_s,
        "satellites": float(plan.torus.size),
        "processes": float(len(processes)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="testbed-19x5")
    parser.add_argument("--hosts", type=int, default=5)
    parser.add_argument("--idle-s", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3, help="the median of so many (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="nothing here is drawn; kept beside the figures")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    runs = [measured(options.preset, options.hosts, options.idle_s) for _ in range(options.repeats)]
    row: dict[str, Any] = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    print_table(
        f"{row['satellites']:.0f} satellites in {row['processes']:.0f} processes, median of {options.repeats}",
        ("what", "measured", "goal"),
        [
            ("seconds until all listen", f"{row['start_s']:.2f}", f"< {GOALS['start_s']:.0f}"),
            ("resident memory, MB", f"{row['memory_MB']:.0f}", f"< {GOALS['memory_MB']:.0f}"),
            ("of it not shared, MB", f"{row['own_memory_MB']:.0f}", "-"),
            ("idle, % of a core", f"{row['idle_percent']:.2f}", f"< {GOALS['idle_percent']:.0f}"),
        ],
    )
    write_json(options.json, "footprint", options.seed, [row])


if __name__ == "__main__":
    main()
