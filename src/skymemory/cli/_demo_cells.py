"""``skymemory demo cells``: a cache that follows its user among base stations, beside one that stays."""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import asdict

from skymemory.placement.layout import Strategy
from skymemory.testbed.cell_drive import DriveReport, Town, run_drive
from skymemory.units import format_size

SCHEMES: tuple[tuple[Strategy, str], ...] = (("rotation_hop", "follows the user"), ("hop", "stays where it was stored"))
SAY_EVERY_S = 300.0


def run_cells(args: argparse.Namespace) -> int:
    town = Town(args.grid, args.cell_m, args.servers, args.value)
    path = town.drive(args.seed, args.legs, args.speed_kmh / 3.6)
    value = random.Random(args.seed).randbytes(town.value_bytes)
    out = sys.stderr if args.json else sys.stdout
    minutes, kilometres = path[-1].time_s / 60, path[-1].time_s * args.speed_kmh / 3600
    print(
        f"{town.grid.rows} x {town.grid.columns} base stations {town.cell_m:g} m apart, 1 ms from one to the next and "
        f"4 ms to the user; {format_size(town.value_bytes)} on {town.servers} of them, read every 5 s\n"
        f"a drive of {kilometres:.1f} km in {minutes:.0f} minutes of virtual time",
        file=out,
    )
    reports = []
    for strategy, words in SCHEMES:
        said_s = 0.0

        def passed(time_s: float, reads: int, hits: int, words: str = words) -> None:
            nonlocal said_s
            if time_s >= said_s + SAY_EVERY_S:
                said_s = time_s
                print(f"[{time_s / 60:4.0f} min] the cache {words}: {hits} of {reads} reads hit", file=out, flush=True)

        reports.append(run_drive(town, path, strategy, value, passed))
    if args.json:
        facts = {
            "rows": town.grid.rows, "columns": town.grid.columns, "cell_m": town.cell_m, "servers": town.servers,
            "value_bytes": town.value_bytes, "seconds": path[-1].time_s, "stops": [stop._asdict() for stop in path],
            "drives": [asdict(report) for report in reports],
        }  # fmt: skip
        print(json.dumps(facts))
    else:
        print("\n".join(_table(reports)))
    return int(any(report.wrong or report.hits < report.reads for report in reports))


def _table(reports: list[DriveReport]) -> list[str]:
    lines = ["", f"{'the cache':<26}{'hits':>12}{'median':>10}{'p99':>10}{'worst':>10}{'farthest':>10}{'moved':>12}"]
    for (_, words), report in zip(SCHEMES, reports, strict=True):
        lines.append(
            f"{words:<26}{f'{report.hits} of {report.reads}':>12}{f'{report.median_ms:.1f} ms':>10}"
            f"{f'{report.p99_ms:.1f} ms':>10}{f'{report.worst_ms:.1f} ms':>10}{f'{report.farthest_hops} hops':>10}"
            f"{format_size(report.moved_bytes):>12}"
        )
    first = reports[0]
    share = f", {first.moved_bytes / first.least_bytes:.3f} of the least possible" if first.least_bytes else ""
    lines += ["", f"{first.crossings} borders crossed, {format_size(first.moved_bytes)} handed over{share}; "]
    lines[-1] += f"{sum(report.wrong for report in reports)} wrong"
    return lines
