"""A whole shell in virtual time, with motion: blocks written and read by one host, over all its satellites' machines.

`python benchmarks/whole_shell.py` flies Starlink A's 1,584 satellites, with links between planes and beams by geometry,
the clock running; half of the operations are sets, each read once. Prints JSON: seconds to set up and resident memory
of the constellation; for each size of block the seconds, packet events a second (a datagram counts once a link) and the
virtual time that passed, with the moves of the box in it; the same over links with rates with `--rates`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

from _bench import write_json

sys.path.insert(0, str(Path(__file__).parents[1]))
from skymemory.constellation.links import Links
from skymemory.metrics import percentile
from skymemory.protocol.client.transfer import Striping
from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.testbed.plan import ConstellationPlan, Ground, make_plan
from skymemory.testbed.virtual import VirtualConstellation

SIZES_BYTES = (98_304, 2_883_584)
KA_BAND = {"up": "300Mbit", "down": "1.2Gbit", "isl": "10Gbit", "buffer": "64MiB"}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()


def fly(plan: ConstellationPlan, size_bytes: int, operations: int, kept: int, pause_s: float, seed: int) -> Any:
    """Sets and gets in turn; a get reads one of the ``kept`` blocks stored last. A pause between any two."""
    dice = random.Random(seed)
    before_bytes, began_s = resident_bytes(), time.perf_counter()
    sky = VirtualConstellation(plan)
    client = sky.connect()
    set_up_s, set_up_bytes = time.perf_counter() - began_s, resident_bytes() - before_bytes
    simulated, stored, took_s = sky.simulated, [], {"set": [], "get": []}
    buffer = memoryview(bytearray(size_bytes))
    code = STRATEGY_CODES[plan.strategy]  # type: ignore[index]
    began_s, hits = time.process_time(), 0
    for number in range(operations // 2):
        value = dice.randbytes(size_bytes)
        key = hashlib.sha256(b"%d/%d" % (seed, number)).digest()
        ended = client.write(key, value, Striping(plan.chunk_bytes, code, plan.servers))
        assert ended.ok and ended.info is not None, ended.report
        took_s["set"].append(ended.report.seconds)
        stored = [*stored[1 - kept :], (ended.info, value)]
        simulated.settle(simulated.now_s + pause_s)
        info, expected = dice.choice(stored)
        ended = client.read(info, buffer)
        hits += ended.ok
        assert not ended.ok or buffer == expected
        took_s["get"].append(ended.report.seconds)
        simulated.settle(simulated.now_s + pause_s)
    seconds = time.process_time() - began_s
    row: dict[str, Any] = {
        "preset": plan.preset,
        "satellites": len(simulated.satellites),
        "access": plan.access,
        "links": plan.links is not None,
        "size_bytes": size_bytes,
        "operations": operations,
        "gets_hit": hits,
        "set_up_s": set_up_s,
        "set_up_bytes": set_up_bytes,
        "seconds": seconds,
        "events": simulated.datagrams_sent,
        "events_per_s": simulated.datagrams_sent / seconds,
        "virtual_s": simulated.now_s,
        "moves": sky.clock.moves(simulated.now_s),
        "resident_bytes": resident_bytes(),
    }
    for verb, times_s in took_s.items():
        row |= {f"{verb}_p{percent}_ms": 1e3 * percentile(times_s, percent) for percent in (50, 99)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="starlink-a")
    parser.add_argument("--access", default="gateway")
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES_BYTES))
    parser.add_argument("--kept", type=int, default=20, help="blocks that gets choose from")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds of virtual time between two operations")
    parser.add_argument("--memory", type=int, default=32, help="MiB of a satellite")
    parser.add_argument("--rates", action="store_true", help="links of a Ka band channel and lasers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    links = Links.read(KA_BAND, "rates") if args.rates else None
    plan = make_plan(
        args.preset,
        access=args.access,
        ground=Ground(gateway="climbing"),
        links=links,
        time_scale=1.0,
        memory_per_satellite_bytes=args.memory << 20,
    )
    rows = [fly(plan, size, args.operations, args.kept, args.pause, args.seed) for size in args.sizes]
    print(json.dumps(rows, indent=1))
    write_json(args.json, "whole_shell", args.seed, rows)


if __name__ == "__main__":
    main()
