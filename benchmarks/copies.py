"""What copies do for a read: the same reads with one and with two, with loss, the slow and the dead.

    python benchmarks/copies.py --json docs/benchmarks/copies.json

A block of 480 chunks of 6 KiB on 10 satellites, 4 ms a link, read by beams to each satellite, in virtual time.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path

from _bench import print_table, write_json
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.metrics import percentile
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.client.transfer import Striping
from skymemory.protocol.clock import STRATEGY_CODES, SkyMap
from skymemory.transport.faults import FaultInjector
from skymemory.transport.simulated import SimulatedConstellation

_LINK_S, _SLOW_S = 0.004, 0.060
_READS, _CHUNKS, _CHUNK_BYTES = 200, 480, 6144
_CASES = ("all well", "1 % lost", "one satellite 15 times as far", "one satellite dead", "a plane dead")


def measure(case: str, replicas: int) -> tuple[float, float, int, float]:
    """Median and p99 in ms, hits of 200, and bytes on the links per read over the value's."""
    slow = SatelliteId(2, 9)

    def delay_s(sender: object, receiver: object) -> float:
        return _SLOW_S if "far" in case and slow in (sender, receiver) and armed else _LINK_S

    armed = False
    sky = SkyMap(Torus(5, 19), slow)
    faults = FaultInjector(seed=1)
    sim = SimulatedConstellation(sky, 64 << 20, None, delay_s, faults)
    host = sim.connect(ClientConfig(7, "los", expected_rtt_s=2 * _LINK_S))
    value = random.Random(1).randbytes(_CHUNKS * _CHUNK_BYTES)
    number, info = host.machine.put(
        bytes(32), value, Striping(_CHUNK_BYTES, STRATEGY_CODES["rotation_hop"], 10, replicas), sim.now_s
    )
    assert host.run([number])[number].ok
    armed = True
    if "lost" in case:
        sim._faults = FaultInjector(loss=0.01, seed=2)
    if "satellite dead" in case:
        sim.kill(slow)
    if "plane" in case:
        sim.kill_plane(1)
    seconds, hits, before = [], 0, sim.bytes_sent
    for _ in range(_READS):
        out = bytearray(info.value_bytes)
        number = host.machine.get(info, memoryview(out), sim.now_s, replicas)
        finished = host.run([number])[number]
        assert not finished.ok or out == value
        hits += finished.ok
        seconds.append(finished.report.seconds)
        sim.settle(sim.now_s + 0.2)
    per_read = (sim.bytes_sent - before) / _READS / len(value)
    return 1e3 * statistics.median(seconds), 1e3 * percentile(seconds, 99), hits, per_read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for case in _CASES:
        for replicas in (1, 2):
            median_ms, p99_ms, hits, sent = measure(case, replicas)
            rows.append(
                {
                    "case": case,
                    "copies": replicas,
                    "median_ms": median_ms,
                    "p99_ms": p99_ms,
                    "hits": hits,
                    "reads": _READS,
                    "sent_over_value": sent,
                }
            )
    print_table(
        "Reads with copies",
        ["case", "copies", "median ms", "p99 ms", f"hits of {_READS}", "bytes sent / value"],
        [
            [
                str(row["case"]),
                str(row["copies"]),
                f"{row['median_ms']:.1f}",
                f"{row['p99_ms']:.1f}",
                str(row["hits"]),
                f"{row['sent_over_value']:.2f}",
            ]
            for row in rows
        ],
    )
    write_json(args.json, "copies", 1, rows)


if __name__ == "__main__":
    main()
