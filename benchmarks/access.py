"""Reads in each access mode, over hours of Starlink A's flight past a host at 40 N 75 W.

Simulated time, the machines that fly, light along links and beams as the geometry has them at every moment; no rate
limits and no processing time, so a read takes as long as light needs to its farthest chunk and back. One block of
2.9 MB is read once a minute while the box migrates as it does in flight.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from _bench import print_table, write_json

sys.path.insert(0, str(Path(__file__).parents[1]))
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.testbed.plan import Ground, make_plan
from skymemory.testbed.virtual import VirtualConstellation

MODES = [
    ("ideal", "nearest"),
    ("hybrid", "nearest"),
    ("hybrid", "climbing"),
    ("gateway", "nearest"),
    ("gateway", "climbing"),
    ("onboard", "nearest"),
]
READ_EVERY_S = 60.0


def run(access: str, rule: str, servers: int, hours: float, value: bytes, mask_deg: float) -> dict[str, Any]:
    """One host's hours."""
    ground = Ground(mask_deg=mask_deg, gateway=rule)
    sky = VirtualConstellation(make_plan("starlink-a", access=access, servers=servers, time_scale=1.0, ground=ground))
    store = sky.store(index=SharedIndex())
    key = bytes(32)
    assert store.put_many([(key, value)]) == [True]
    times_s, hits = [], 0
    while sky.simulated.now_s < hours * 3600:
        began_s = sky.simulated.now_s
        found = store.get_many([key])[0]
        times_s.append(sky.simulated.now_s - began_s)
        hits += found is not None and bytes(found) == value
        sky.simulated.settle(READ_EVERY_S * len(times_s))
    ordered, stats = sorted(times_s), store.stats()
    return {
        "access": access,
        "gateway": rule if access in ("gateway", "hybrid") else "-",
        "servers": servers,
        "reads": len(times_s),
        "hits": hits,
        "median_ms": statistics.median(times_s) * 1e3,
        "p99_ms": ordered[len(ordered) * 99 // 100] * 1e3,
        "worst_ms": ordered[-1] * 1e3,
        "handovers": int(stats.get("client_gateway_handovers", 0)),
        "out_of_sight": int(stats.get("client_gateway_out_of_sight", 0)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=3.0)
    parser.add_argument("--servers", type=int, nargs="+", default=[10, 81])
    parser.add_argument("--mask", type=float, default=25.0, help="lowest elevation of a beam, in degrees")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    value = random.Random(args.seed).randbytes(2_883_584)
    rows = [
        run(access, rule, servers, args.hours, value, args.mask) for servers in args.servers for access, rule in MODES
    ]
    print_table(
        f"reads of 2.9 MB, once a minute for {args.hours:g} hours of Starlink A's flight, mask {args.mask:g} degrees",
        ["access", "gateway", "servers", "hits", "median ms", "p99 ms", "worst ms", "handovers", "none seen"],
        [
            [
                row["access"],
                row["gateway"],
                str(row["servers"]),
                f"{row['hits']}/{row['reads']}",
                f"{row['median_ms']:.1f}",
                f"{row['p99_ms']:.1f}",
                f"{row['worst_ms']:.1f}",
                str(row["handovers"]),
                str(row["out_of_sight"]),
            ]
            for row in rows
        ],
    )
    write_json(args.json, "access", args.seed, rows)


if __name__ == "__main__":
    main()
