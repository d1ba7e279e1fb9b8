"""The physical latency model: how fast it computes, how far from its lower bound, and the machines beside both.

Starlink A over one orbit of a host at 40 N 75 W, a named grid of settings in all four access modes. Prints JSON.
`points`: latencies (a setting at a time) a second of one process. `ratios`: model over bound. `machines`: reads and
writes of the satellite and client machines in virtual time, with the same rates and without any.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from _bench import write_json

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.lab.sim.sky.machines import compare

from skymemory.constellation.presets import preset_named
from skymemory.protocol.client.gateway import ACCESS_MODES
from skymemory.testbed.plan import Ground, make_plan
from skymemory_lab.sim.sky.bound import lower_bound_s
from skymemory_lab.sim.sky.physical import (
    OPERATIONS,
    LinkRates,
    Order,
    TransferSetting,
    Ways,
    latency_s,
    sight_of,
    ways_of,
)

RATES = {
    "ka band": LinkRates(0.3e9, 1.2e9, 10e9),
    "laser": LinkRates(20e9, 20e9, 100e9),
    "slow between satellites": LinkRates(2e9, 2e9, 1e9),
}
SERVERS = (9, 25, 81)
VALUES_BYTES = (65_536, 2_883_584, 21 * 2**20)
SERVER_S = (0.0, 20e-6, 1e-3)
ORDERS: tuple[Order, ...] = ("in_turn", "farthest")


def settings_of(order: Order) -> list[tuple[LinkRates, str, TransferSetting]]:
    return [
        (rates, name, TransferSetting(value_bytes, server_s=server_s, order=order))
        for (name, rates), value_bytes, server_s in product(RATES.items(), VALUES_BYTES, SERVER_S)
    ]


def ways_by_cell(times: int) -> dict[tuple[str, int], Ways]:
    preset = preset_named("starlink-a")
    sight = sight_of(preset, 25.0, "climbing")
    times_s = np.linspace(0.0, preset.shell.period_s, times, endpoint=False).tolist()
    return {
        (access, servers): ways_of(preset, sight, access, times_s, servers=servers, exact_links=True)
        for access, servers in product(ACCESS_MODES, SERVERS)
    }


def speed(ways: dict[tuple[str, int], Ways], rounds: int) -> list[dict[str, Any]]:
    """Median of the rounds, for each number of servers and over all."""
    rows: list[dict[str, Any]] = []
    for servers in (*SERVERS, None):
        chosen = [one for (_, number), one in ways.items() if servers in (number, None)]
        rates_found = []
        for _ in range(rounds):
            points, began_s = 0, time.perf_counter()
            for one, (rates, _, setting), operation in product(chosen, settings_of("in_turn"), OPERATIONS):
                points += len(latency_s(one, setting, rates, operation))
            rates_found.append(points / (time.perf_counter() - began_s))
        rows.append({"part": "points", "servers": servers or "all", "points_per_s": statistics.median(rates_found)})
    return rows


def ratios(ways: dict[tuple[str, int], Ways]) -> list[dict[str, Any]]:
    """Over all cells of an access mode, an operation and links: model over bound at each time."""
    rows = []
    for access, operation, order, name in product(ACCESS_MODES, OPERATIONS, ORDERS, RATES):
        found = np.concatenate(
            [
                latency_s(ways[access, servers], setting, rates, operation)
                / lower_bound_s(ways[access, servers], setting, rates, operation)
                for servers in SERVERS
                for rates, its, setting in settings_of(order)
                if its == name
            ]
        )
        low, middle, high = (float(each) for each in np.quantile(found, (0.0, 0.5, 1.0)))
        row = {"part": "ratios", "access": access, "operation": operation, "order": order, "links": name}
        rows.append({**row, "least": low, "median": middle, "most": high})
    return rows


def machines() -> list[dict[str, Any]]:
    """A row for each cell of the grid, and one for all."""
    rows = []
    cells = product(ACCESS_MODES, {"none": LinkRates()} | RATES, SERVERS, VALUES_BYTES)
    for access, name, servers, value_bytes in cells:
        plan = make_plan(
            "starlink-a",
            access=access,
            servers=servers,
            ground=Ground(gateway="climbing"),
            memory_per_satellite_bytes=256 << 20,
        )
        for one in compare(plan, value_bytes, RATES.get(name)):
            row = {"part": "machines", "access": access, "links": name, "servers": servers, "value_bytes": value_bytes}
            row |= one._asdict()
            rows.append({**row, "of_bound": one.machines_s / one.bound_s, "of_model": one.machines_s / one.model_s})
    for access, name in product((*ACCESS_MODES, "all"), ("of_bound", "of_model")):
        found = [row[name] for row in rows if access in (row["access"], "all") and name in row and "operation" in row]
        low, middle, high = (float(each) for each in np.quantile(found, (0.0, 0.5, 1.0)))
        rows.append({"part": "machines", "access": access, "ratio": name, "least": low, "median": middle, "most": high})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=240, help="times over the orbit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", default=["points", "ratios", "machines"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = [{"part": "links", "links": name, **asdict(rates)} for name, rates in RATES.items()]
    began_s = time.perf_counter()
    ways = ways_by_cell(args.times)
    rows.append({"part": "ways", "of_a_second": len(ways) * args.times / (time.perf_counter() - began_s)})
    if "points" in args.parts:
        rows += speed(ways, args.rounds)
    if "ratios" in args.parts:
        rows += ratios(ways)
    if "machines" in args.parts:
        rows += machines()
    print(json.dumps(rows, indent=1))
    write_json(args.json, "physical", 0, rows)


if __name__ == "__main__":
    main()
