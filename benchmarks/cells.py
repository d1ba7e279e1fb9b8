"""A user drives through a grid of base stations and his cache comes along: reads that follow, and reads that do not.

Simulated time, the machines that fly: 24 x 24 cells of 500 m, a straight-line drive between random corners at 50 km/h,
a block of 2.9 MB read every 5 seconds from 9 base stations. `rotation_hop` migrates as the user crosses borders, `hop`
stays around the cell where it was stored, in the middle of the town.

A hop between base stations takes 1 ms (switches and some fibre), the radio 4 ms, one way each; no queues, no limits.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from typing import Any

from _bench import print_table, write_json
from skymemory.constellation.cells import CellGrid, Stop
from skymemory.constellation.torus import SatelliteId
from skymemory.placement.layout import Strategy
from skymemory.placement.migration import server_moves
from skymemory.protocol.client import ClientConfig
from skymemory.protocol.motion import STRATEGY_CODES, MoveClock, SkyMap
from skymemory.store.constellation import ConstellationStore
from skymemory.store.shared_index import SharedIndex
from skymemory.store.sky_settings import SkySettings
from skymemory.transport.simulated import Node, SimulatedConstellation

GRID = CellGrid(24, 24)
CELL_M, SPEED_M_S = 500.0, 50 / 3.6
SERVERS, MARGIN = 9, 2
VALUE_BYTES, CHUNK_BYTES = 2_883_584, 6144
READ_EVERY_S = 5.0
HOP_S, RADIO_S = 0.001, 0.004


def drive(seed: int, legs: int) -> list[Stop]:
    """From the middle of the town to one corner after another."""
    draw = random.Random(seed)
    stops = [Stop(0.0, 12.0, 12.0)]
    while len(stops) <= legs:
        here = stops[-1]
        row, column = draw.uniform(2, 21), draw.uniform(2, 21)
        metres = CELL_M * ((row - here.row) ** 2 + (column - here.column) ** 2) ** 0.5
        if metres > 1000:
            stops.append(Stop(here.time_s + metres / SPEED_M_S, row, column))
    return stops


def delay_s(sender: Node, receiver: Node) -> float:
    return HOP_S if isinstance(sender, SatelliteId) and isinstance(receiver, SatelliteId) else RADIO_S


def run(strategy: Strategy, path: list[Stop], value: bytes) -> dict[str, Any]:
    """One drive: how long reads took, what was missed, what was moved."""
    clock = MoveClock(time_scale=1.0, track=GRID.track(path, MARGIN))
    sky = SkyMap(GRID.torus, GRID.centre(path, MARGIN))
    constellation = SimulatedConstellation(sky, 64 << 20, clock, delay_s)
    driver = constellation.connect(ClientConfig(1, "gateway", expected_rtt_s=2 * (RADIO_S + 4 * HOP_S)))
    settings = SkySettings(strategy, SERVERS, CHUNK_BYTES)
    store = ConstellationStore(driver, sky, settings, index=SharedIndex())
    key = bytes(32)
    assert store.put_many([(key, value)]) == [True]
    set_moves = clock.moves(constellation.now_s)
    placement = sky.placement(STRATEGY_CODES[strategy], SERVERS)
    times_s, hits, farthest, expected_chunks, before = [], 0, 0, 0, set_moves
    chunks_on = [len(range(server, -(-len(value) // CHUNK_BYTES), SERVERS)) for server in range(SERVERS)]
    crossings = 0
    while constellation.now_s < path[-1].time_s:
        began_s = constellation.now_s
        found = store.get_many([key])[0]
        times_s.append(constellation.now_s - began_s)
        hits += found is not None and bytes(found) == value
        now = clock.moves(constellation.now_s)
        here = sky.centre_at(now)
        farthest = max(farthest, *(GRID.torus.hops(here, there) for there in placement.locate_all(set_moves, now)))
        until_s = READ_EVERY_S * len(times_s)
        while (at_s := clock.next_move_s(began_s)) is not None and at_s < until_s:
            after = clock.moves(at_s)
            expected_chunks += sum(chunks_on[line.server] for line in server_moves(placement, set_moves, before, after))
            crossings += 1
            before, began_s = after, at_s
        constellation.settle(until_s)
    moved = sum(satellite.counters.get("chunks_migrated_in") for satellite in constellation.satellites.values())
    ordered = sorted(times_s)
    return {
        "strategy": strategy, "reads": len(times_s), "hits": hits, "median_ms": statistics.median(times_s) * 1e3,
        "p99_ms": ordered[len(ordered) * 99 // 100] * 1e3, "worst_ms": ordered[-1] * 1e3, "farthest_hops": farthest,
        "crossings": crossings, "moved_bytes": moved * CHUNK_BYTES, "least_bytes": expected_chunks * CHUNK_BYTES,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--legs", type=int, default=5, help="straight ways of the drive (default: 5)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = drive(args.seed, args.legs)
    value = random.Random(args.seed).randbytes(VALUE_BYTES)
    strategies: list[Strategy] = ["rotation_hop", "hop"]
    rows = [run(strategy, path, value) for strategy in strategies]
    minutes = path[-1].time_s / 60
    print_table(
        f"a drive of {minutes:.0f} minutes through {GRID.rows} x {GRID.columns} cells, 2.9 MB on {SERVERS} of them",
        ["strategy", "reads", "hits", "median ms", "p99 ms", "worst ms", "farthest", "crossings", "moved", "to least"],
        [
            [
                row["strategy"], str(row["reads"]), str(row["hits"]), f"{row['median_ms']:.1f}", f"{row['p99_ms']:.1f}",
                f"{row['worst_ms']:.1f}", f"{row['farthest_hops']} hops", str(row["crossings"]),
                f"{row['moved_bytes'] / 1e6:.1f} MB",
                f"{row['moved_bytes'] / row['least_bytes']:.3f}" if row["least_bytes"] else "-",
            ]
            for row in rows
        ],
    )  # fmt: skip
    write_json(args.json, "cells", args.seed, rows)


if __name__ == "__main__":
    main()
