"""Python twin of a client's receiving: what it awaits is put in its place as it comes.

A *run* is what receive offload delivers: packets of one length, the last maybe shorter. Only the plain case is placed,
a run whose packets all answer one awaited request; the caller looks at any other packet by packet.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING

from skymemory.native.twin_runs import Run
from skymemory.native.twin_segments import DATA, SKY_BYTES, TELEMETRY_BYTES, place_segments, segments
from skymemory.native.twin_udp import recv_batch

if TYPE_CHECKING:
    from typing_extensions import Buffer

Landing = tuple[bytes, int, int, int, int, memoryview, bytearray, bytearray]
"""Where a value is awaited: key, chunks, chunk bytes, value bytes, value CRC, out, arrived and crcs, as
``place_segments`` takes them.
"""
Tally = tuple[int, int, int, int, int, int, int]
"""Request id, last echoed timestamp, runs; then chunks placed, duplicates, corrupt and foreign."""

_ANSWER = slice(TELEMETRY_BYTES + 1, TELEMETRY_BYTES + 20)
"""What all packets of one answer have in common: operation, flags, status, addresses, ground host, request."""
_WORD = struct.Struct(">I")
_MOST_SLOTS = 64


def place_runs(runs: list[Run], first: int, awaited: dict[int, Landing]) -> list[Tally]:
    """``place_segments`` for the runs from ``first`` on, up to the first that is not DATA for one awaited request (the
    keys of ``awaited``) in all its segments. One tally a request, in the order in which they were first heard of.
    """
    if first < 0:
        raise ValueError(f"first run {first}: expected 0 or more")
    tallies: dict[int, Tally] = {}
    for data, segment_bytes in runs[first:]:
        if not _land(data, segment_bytes, awaited, tallies):
            break
    return list(tallies.values())


def recv_runs(
    fd: int, scratch: memoryview, slots: int, calls: int, patience_us: int, awaited: dict[int, Landing]
) -> tuple[list[Tally], list[Run]]:
    """Receive as ``recv_batch`` does (64 slots at most), and place what comes as ``place_runs`` does.

    Goes on until nothing has come for ``patience_us``, something has come ``calls`` times, a value is complete, or a
    run has come that is not placed: that one and all behind it are the second list, views of ``scratch``.

    Raises:
        OSError: the socket's pending error, before anything was placed.
    """
    if calls < 1:
        raise ValueError(f"{calls} calls: expected 1 or more")
    tallies: dict[int, Tally] = {}
    others: list[Run] = []
    for _ in range(calls):
        until_s = time.monotonic() + patience_us * 1e-6
        while True:
            try:
                arrivals = recv_batch(fd, scratch, min(slots, _MOST_SLOTS))
            except OSError:
                if tallies:
                    return list(tallies.values()), others
                raise
            if arrivals or time.monotonic() >= until_s:
                break
        for at, size, segment_bytes, _, _ in arrivals:
            run = scratch[at : at + size], segment_bytes
            if others or not _land(*run, awaited, tallies):
                others.append(run)
        if not arrivals or others or _any_complete(tallies, awaited):
            break
    return list(tallies.values()), others


def _land(data: Buffer, segment_bytes: int, awaited: dict[int, Landing], tallies: dict[int, Tally]) -> bool:
    """Place a run that is DATA for one awaited request; False for any other."""
    view = memoryview(data).cast("B")
    if min(len(view), segment_bytes) < TELEMETRY_BYTES + SKY_BYTES or view[_ANSWER.start] != DATA:
        return False
    packets = segments(view, segment_bytes)
    answer = bytes(packets[0][_ANSWER])
    request, echo = (int(_WORD.unpack_from(packets[0], TELEMETRY_BYTES + at)[0]) for at in (16, 24))
    landing = awaited.get(request)
    if landing is None or any(packet[_ANSWER] != answer for packet in packets):
        return False
    counts = place_segments(data, segment_bytes, *landing)
    _, _, runs, *before = tallies.get(request, (request, echo, 0, 0, 0, 0, 0))
    placed, duplicates, corrupt, foreign = (was + now for was, now in zip(before, counts, strict=True))
    tallies[request] = (request, echo, runs + 1, placed, duplicates, corrupt, foreign)
    return True


def _any_complete(tallies: dict[int, Tally], awaited: dict[int, Landing]) -> bool:
    return any(tally[3] and 0 not in memoryview(awaited[request][6]) for request, tally in tallies.items())
