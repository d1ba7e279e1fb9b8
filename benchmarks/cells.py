"""A user drives through a grid of base stations and his cache comes along: reads that follow, and reads that do not.

Simulated time, the machines that fly: 24 x 24 cells of 500 m, a straight-line drive between random corners at 50 km/h,
a block of 2.9 MB read every 5 seconds from 9 base stations. `rotation_hop` migrates as the user crosses borders, `hop`
stays around the cell where it was stored, in the middle of the town.

A hop between base stations takes 1 ms (switches and some fibre), the radio 4 ms, one way each; no queues, no limits.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import asdict
from pathlib import Path

from _bench import print_table, write_json
from skymemory.constellation.ground_track import CellGrid
from skymemory.placement.layout import Strategy
from skymemory_lab.demo.cells import Town, run_drive

TOWN = Town(CellGrid(24, 24))
SPEED_M_S = 50 / 3.6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--legs", type=int, default=5, help="straight ways of the drive (default: 5)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = TOWN.drive(args.seed, args.legs, SPEED_M_S)
    value = random.Random(args.seed).randbytes(TOWN.value_bytes)
    strategies: list[Strategy] = ["rotation_hop", "hop"]
    rows = [asdict(run_drive(TOWN, path, strategy, value)) for strategy in strategies]
    minutes = path[-1].time_s / 60
    print_table(
        f"a drive of {minutes:.0f} minutes through {TOWN.grid.rows} x {TOWN.grid.columns} cells, 2.9 MB on "
        f"{TOWN.servers} of them",
        ["strategy", "reads", "hits", "median ms", "p99 ms", "worst ms", "farthest", "crossings", "moved", "to least"],
        [
            [
                row["strategy"],
                str(row["reads"]),
                str(row["hits"]),
                f"{row['median_ms']:.1f}",
                f"{row['p99_ms']:.1f}",
                f"{row['worst_ms']:.1f}",
                f"{row['farthest_hops']} hops",
                str(row["crossings"]),
                f"{row['moved_bytes'] / 1e6:.1f} MB",
                f"{row['moved_bytes'] / row['least_bytes']:.3f}" if row["least_bytes"] else "-",
            ]
            for row in rows
        ],
    )
    write_json(args.json, "cells", args.seed, rows)


if __name__ == "__main__":
    main()
