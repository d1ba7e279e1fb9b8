"""What this machine's data path can reach at most, with no machines in between, beside Redis in the same run.

Ten sockets in five processes hold one value of 480 chunks. READ: the client asks each socket with one small datagram,
each answers with its 48 sealed DATA segments, the client checks and places them. WRITE: the client sends 48 sealed SET
segments to each, each verifies them and answers once. Whatever the protocol adds must fit between this and the floor.
Runs alternate with Redis GET and SET of the same value over loopback TCP (redis-py with hiredis); buffers are warm.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import select
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from _bench import print_table, redis_server, write_json
from skymemory import native
from skymemory.native.twin import backend
from skymemory.protocol.wire import Address, Buffer, Op, SegmentBatch, SkyHeader, bulk_batch
from skymemory.transport.udp_socket import BatchSocket

CHUNK_BYTES, CHUNKS, SERVERS, PROCESSES = 6144, 480, 10, 5
VALUE_BYTES = CHUNKS * CHUNK_BYTES
KEY = bytes(range(32))
DATA_BYTES, SET_BYTES = 16 + 44 + 72 + CHUNK_BYTES, 8 + 44 + 72 + CHUNK_BYTES
PATIENCE_MS = 2000


def refs_of(value: Buffer) -> np.ndarray:
    """The references of all chunks, a row each."""
    packed, _ = native.value_refs(value, KEY, CHUNK_BYTES, SERVERS, 1, (0, 0))
    return np.frombuffer(packed, dtype=np.uint8).reshape(CHUNKS, -1)


def batch_of(op: Op, value: memoryview, refs: np.ndarray, server: int) -> SegmentBatch:
    """The sealed packets of every chunk of one server."""
    payloads = [value[index * CHUNK_BYTES :][:CHUNK_BYTES] for index in range(server, CHUNKS, SERVERS)]
    return bulk_batch(SkyHeader(op, Address(1, 2), Address(3, 4), 7, 9), refs[server::SERVERS], payloads, 0, 0.0)


def serve(sockets: list[BatchSocket], batches: list[SegmentBatch]) -> None:
    """Answer a short datagram with the batch, and 48 sound segments with one short datagram; endlessly."""
    poll = select.poll()
    by_fd = {sock.fileno(): (sock, batch) for sock, batch in zip(sockets, batches, strict=True)}
    taken = dict.fromkeys(by_fd, 0)
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            sock, batch = by_fd[fd]
            for run, segment_bytes, endpoint in sock.receive():
                if len(run) < 64:
                    sock.send(batch, endpoint)
                    continue
                codes = native.verify_segments(run, segment_bytes)
                taken[fd] += codes.count(0)
                if taken[fd] >= CHUNKS // SERVERS:
                    taken[fd] = 0
                    sock.send(SegmentBatch(b"stored", 6), endpoint)


class Client:
    """One socket, one warm buffer."""

    def __init__(self, endpoints: list[tuple[str, int]], value: bytes, value_crc: int) -> None:
        self.sock = BatchSocket()
        self.endpoints = endpoints
        self.value, self.value_crc = value, value_crc
        self.out = bytearray(VALUE_BYTES)
        self.poll = select.poll()
        self.poll.register(self.sock.fileno(), select.POLLIN)

    def read(self) -> None:
        arrived, crcs = bytearray(CHUNKS), np.zeros(CHUNKS, dtype=np.uint32)
        landing = KEY, CHUNKS, CHUNK_BYTES, VALUE_BYTES, self.value_crc, self.out, arrived, crcs
        for endpoint in self.endpoints:
            self.sock.send(SegmentBatch(b"get", 3), endpoint)
        placed = 0
        while placed < CHUNKS:
            if not self.poll.poll(PATIENCE_MS):
                raise SystemExit(f"{CHUNKS - placed} segments lost, {self.sock.dropped()} at the full buffer")
            for run, segment_bytes, _ in self.sock.receive():
                placed += native.place_segments(run, segment_bytes, landing)[0]
        if native.crc32_join(crcs, CHUNK_BYTES, VALUE_BYTES) != self.value_crc:
            raise SystemExit("the value that arrived is not the one that was sent")

    def write(self) -> None:
        refs = refs_of(self.value)
        view = memoryview(self.value)
        for server, endpoint in enumerate(self.endpoints):
            self.sock.send(batch_of(Op.SET, view, refs, server), endpoint)
        stored = 0
        while stored < SERVERS:
            if not self.poll.poll(PATIENCE_MS):
                raise SystemExit(f"{SERVERS - stored} of {SERVERS} servers did not get all their segments")
            stored += sum(-(-len(run) // segment_bytes) for run, segment_bytes, _ in self.sock.receive())


def alternate(paths: dict[str, Callable[[], object]], runs: int) -> dict[str, list[float]]:
    """Seconds of every run; the paths take turns, so that what else the machine does hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in paths}
    for number in range(runs + 5):
        for name, path in paths.items():
            began = time.perf_counter()
            path()
            if number >= 5:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def data_paths(value: bytes, runs: int) -> list[dict[str, Any]]:
    crcs = native.crc32_chunks(value, CHUNK_BYTES)
    value_crc = native.crc32_join(crcs, CHUNK_BYTES, VALUE_BYTES)
    sockets, refs = [BatchSocket() for _ in range(SERVERS)], refs_of(value)
    batches = [batch_of(Op.DATA, memoryview(value), refs, server) for server in range(SERVERS)]
    share = SERVERS // PROCESSES
    workers = [
        multiprocessing.get_context("fork").Process(
            target=serve, args=(sockets[at : at + share], batches[at : at + share]), daemon=True
        )
        for at in range(0, SERVERS, share)
    ]
    for worker in workers:
        worker.start()
    client = Client([sock.address for sock in sockets], value, value_crc)
    paths: dict[str, Callable[[], object]] = {"udp read": client.read, "udp write": client.write}
    try:
        with redis_server() as port:
            if port is not None:
                import redis

                peer = redis.Redis(port=port)
                peer.set("value", value)
                paths |= {"redis read": lambda: peer.get("value"), "redis write": lambda: peer.set("value", value)}
            seconds = alternate(paths, runs)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
    rows = []
    for name, times in seconds.items():
        median = statistics.median(times)
        kind = name.split()[1]
        beside = statistics.median(seconds[f"redis {kind}"]) / median if f"redis {kind}" in seconds else None
        best = VALUE_BYTES / min(times) / 1e6
        rows.append({"path": name, "ms": median * 1e3, "MB/s": VALUE_BYTES / median / 1e6, "best": best, "x": beside})
    return rows


def loops(value: bytes, runs: int) -> list[dict[str, Any]]:
    """GB/s of payload through each loop, by the implementation in use and by the twin."""
    crcs = backend.crc32_chunks(value, CHUNK_BYTES)
    value_crc = backend.crc32_join(crcs, CHUNK_BYTES, VALUE_BYTES)
    refs = refs_of(value)
    batches = [batch_of(Op.DATA, memoryview(value), refs, server) for server in range(SERVERS)]
    run = b"".join(b"".join(batch.datagrams()) for batch in batches)
    headers = bytearray(b"".join(bytes(batch.headers) for batch in batches))
    out, sums = bytearray(VALUE_BYTES), np.zeros(CHUNKS, dtype=np.uint32)

    def place(module: Any) -> None:
        landing = KEY, CHUNKS, CHUNK_BYTES, VALUE_BYTES, value_crc, out, bytearray(CHUNKS), sums
        module.place_segments(run, DATA_BYTES, landing)

    calls: dict[str, Callable[[Any], object]] = {
        "CRC-32 of the value": lambda module: module.crc32(value),
        "CRC-32 of each chunk": lambda module: module.crc32_chunks(value, CHUNK_BYTES),
        "join 480 CRCs": lambda module: module.crc32_join(crcs, CHUNK_BYTES, VALUE_BYTES),
        "seal 480 headers": lambda module: module.seal_headers(headers, 132, 16),
        "verify 480 segments": lambda module: module.verify_segments(run, DATA_BYTES),
        "place 480 segments": place,
    }
    rows = []
    for name, call in calls.items():
        paths = {"used": lambda call=call: call(native), "twin": lambda call=call: call(backend)}
        seconds = {kind: statistics.median(times) for kind, times in alternate(paths, runs).items()}
        rows.append({"loop": name} | {f"{kind}_us": taken * 1e6 for kind, taken in seconds.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="of each path (default 200)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    value = random.Random(options.seed).randbytes(VALUE_BYTES)
    paths = data_paths(value, options.runs)
    print_table(
        f"{CHUNKS} chunks of {CHUNK_BYTES} B, {SERVERS} sockets in {PROCESSES} processes, native: {native.NATIVE}",
        ("path", "median ms", "MB/s", "best MB/s", "x Redis"),
        [
            (r["path"], f"{r['ms']:.2f}", f"{r['MB/s']:.0f}", f"{r['best']:.0f}", f"{r['x']:.2f}" if r["x"] else "-")
            for r in paths
        ],
    )
    figures = loops(value, min(options.runs, 50))
    gigabytes = VALUE_BYTES / 1e3
    print_table(
        "the loops alone, microseconds (and GB/s of payload)",
        ("loop", "in use", "GB/s", "twin", "GB/s"),
        [
            (
                r["loop"],
                f"{r['used_us']:.1f}",
                f"{gigabytes / r['used_us']:.1f}",
                f"{r['twin_us']:.1f}",
                f"{gigabytes / r['twin_us']:.1f}",
            )
            for r in figures
        ],
    )
    write_json(options.json, "data_path_limits", options.seed, [*paths, *figures])


if __name__ == "__main__":
    main()
