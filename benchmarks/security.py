"""What MACs and sealing cost: `python benchmarks/security.py [--json FILE]`.

A block of 480 chunks (2.95 MB) read from and written to ten of 95 satellites in 5 processes without delay: plain, with
a MAC on commands, with AES-256-GCM on the payload, with both, and with a MAC on every packet. Each way has a client
process of its own; they take turns: in each round each runs a few times in a row (the first of which only warms up),
and the medians are over all rounds. ``x`` is the throughput against plain. Then, in one process, what a satellite
spends on each packet of a flood by a host without the key.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _bench import Verb, block_verbs, client_process, constellation, environment, measure, print_table, write_json
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.keys import first_ring
from skymemory.native import crc32
from skymemory.protocol import messages
from skymemory.protocol.auth import Authority
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.satellite.machine import SatelliteConfig, SatelliteMachine
from skymemory.protocol.wire import Address, ChunkRef, Op, PlacementTag, SkyHeader, build_packet, bulk_batch, single
from skymemory.store.base import Store
from skymemory.testbed.connect import open_constellation, sealed
from skymemory.testbed.key_file import KeyFollower, new_keys
from skymemory.testbed.plan import AUTH_MODES

HERE, FLOOD_S = SatelliteId(2, 9), 1_700_000_000.25
WAYS = {
    "nothing": ("off", False),
    "MAC on commands": ("on", False),
    "GCM on payloads": ("off", True),
    "both": ("on", True),
    "MAC on commands and answers": ("answers", False),
    "commands, answers and GCM": ("answers", True),
    "MAC on every packet": ("every", False),
    "every packet and GCM": ("every", True),
}


def client(folder: Path, tenant: Path | None, value: bytes) -> tuple[Verb, Verb]:
    plain = open_constellation(folder)
    store: Store = sealed(plain, KeyFollower(tenant)) if tenant is not None else plain
    return block_verbs(store, hashlib.sha256(b"block" if tenant is None else b"sealed block").digest(), value)


def forged_packets() -> dict[str, tuple[bytes, int]]:
    """What a host without the key may send, a run of it and the bytes of a packet, by name."""
    there, by = Address(*HERE), Authority(first_ring(bytes(32)))
    asked = SkyHeader(Op.EVICT, there, Address(there.plane, there.slot, 0xFF), 7, 1)
    evict = build_packet(asked, messages.pack_keys([bytes(32)]), 0, FLOOD_S)
    answer = build_packet(asked._replace(op=Op.ACK), bytes(60), 0, FLOOD_S)
    payloads = [bytes(6144)] * 8
    tag = PlacementTag(10, 1, 0, 0, 0)
    refs = [ChunkRef(bytes(32), n, 8, 6144, crc32(payload), 8 * 6144, 0, tag) for n, payload in enumerate(payloads)]
    chunks = bulk_batch(asked._replace(op=Op.SET), b"".join(ref.pack() for ref in refs), payloads, 0, FLOOD_S)
    signed = by.sign(chunks, FLOOD_S).datagrams()
    wrong = bytes(by.sign(single(evict), FLOOD_S).headers)
    return {
        "EVICT without a MAC": (evict, len(evict)),
        "EVICT, wrong key": (wrong, len(wrong)),
        "EVICT, damaged": (wrong[:-1] + b"x", len(wrong)),
        "an answer": (answer, len(answer)),
        "SET of 6 KiB, wrong key": (signed[0], len(signed[0])),
        "SETs of 6 KiB in runs of 8": (b"".join(signed), len(signed[0])),
        "60 bytes of nothing": (bytes(60), 60),
        "the same in runs of 60": (bytes(3600), 60),
    }


def flood(packets: int) -> list[dict[str, Any]]:
    """What a satellite spends on each packet that it refuses, of its own time, without the socket's."""
    rows: list[dict[str, Any]] = []
    sky = SkyMap(Torus(5, 19), HERE)
    for name, (run, packet_bytes) in forged_packets().items():
        config = SatelliteConfig(HERE, 1 << 20, authority=Authority(first_ring(bytes(range(32)))))
        machine, count = SatelliteMachine(config, sky, MoveClock(), FLOOD_S), -(-len(run) // packet_bytes)
        began = time.process_time()
        for _ in range(packets // count):
            machine.receive_batch(run, packet_bytes, ("stranger", 1), FLOOD_S)
            machine.datagrams_to_send(FLOOD_S)
        spent_s = time.process_time() - began
        turned_away = machine.counters.get("packets_refused") + machine.counters.get("packets_malformed")
        if turned_away != packets // count * count:
            raise SystemExit(f"{name}: {turned_away} of {packets} turned away")
        rows.append({"packet": name, "bytes": packet_bytes, "us": spent_s / turned_away * 1e6})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="turns of each way (default 40)")
    parser.add_argument("--turn", type=int, default=5, help="timed runs in a turn, after one to warm up (default 5)")
    parser.add_argument("--value-bytes", type=int, default=480 * 6144)
    parser.add_argument("--forged", type=int, default=20_000, help="forged packets of each kind (default 20000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    value = random.Random(options.seed).randbytes(options.value_bytes)
    with ExitStack() as stack:
        folders: dict[str, Path] = {}
        with environment(pure=False):
            for auth in AUTH_MODES:
                folders[auth] = stack.enter_context(constellation(delay_scale=0.0, auth=auth, servers=10))[1]
        tenant = folders["off"] / "tenant"
        new_keys(tenant)
        paths = {
            name: stack.enter_context(client_process(client, folders[auth], tenant if seals else None, value))
            for name, (auth, seals) in WAYS.items()
        }
        seconds = measure(paths, options.rounds, options.turn)
    forged = flood(options.forged)
    report(seconds, len(value), forged, options)


def report(
    seconds: dict[tuple[str, str], list[float]], size: int, forged: list[dict[str, Any]], options: argparse.Namespace
) -> None:
    rows: list[dict[str, Any]] = []
    for name in WAYS:
        row: dict[str, Any] = {"way": name}
        for verb in ("read", "write"):
            median = statistics.median(seconds[name, verb])
            row |= {f"{verb}_ms": median * 1e3, f"{verb}_MB_s": size / median / 1e6}
            row[f"{verb}_x"] = statistics.median(seconds["nothing", verb]) / median
        rows.append(row)
    print_table(
        f"{size} bytes, 10 of 95 satellites in 5 processes, no delay; {options.rounds} rounds of {options.turn} runs",
        ("way", "read ms", "MB/s", "x", "write ms", "MB/s", "x"),
        [
            (
                row["way"],
                f"{row['read_ms']:.2f}",
                f"{row['read_MB_s']:.0f}",
                f"{row['read_x']:.2f}",
                f"{row['write_ms']:.2f}",
                f"{row['write_MB_s']:.0f}",
                f"{row['write_x']:.2f}",
            )
            for row in rows
        ],
    )
    both = next(row for row in rows if row["way"] == "both")
    print(f"MAC on commands and GCM on payloads cost {1 - both['read_x']:.0%} of the read throughput; goal: under 40 %")
    print_table(
        "A packet that a satellite with MACs turns away: of its time, in microseconds",
        ("packet", "bytes", "us"),
        [(row["packet"], str(row["bytes"]), f"{row['us']:.1f}") for row in forged],
    )
    write_json(options.json, "security", options.seed, [*rows, *forged])


if __name__ == "__main__":
    main()
