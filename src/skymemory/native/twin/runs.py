"""Runs of packets: the chunks that a satellite stores, the answers that a client awaits, headers of bursts.

A *run* is what receive offload delivers: packets of ``segment_bytes`` each, the last maybe shorter. These calls take
only the plain case, a run whose packets all belong together; for any other they return without effect, and the caller
processes the packets one by one.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from skymemory.native.twin.segments import (
    COMMAND_BYTES,
    CRC_AT,
    DATA,
    REF_BYTES,
    SKY_APID,
    SKY_BYTES,
    TELEMETRY_BYTES,
    UNSEGMENTED,
    VERSION,
    check_header,
    header_crc,
    place_segments,
    segments,
)
from skymemory.native.twin.udp import recv_batch

if TYPE_CHECKING:
    from typing_extensions import Buffer


Run = tuple[memoryview, int]
"""Packets end to end, and the bytes of each (the last maybe shorter)."""
AnswerTerms = tuple[int, int, int, int, int, int]
"""Fields of an answer beside those of the GET and the chunks: slot and plane moves, credit in units of the wire,
seconds and 65,536ths of a second of now, the first sequence count.
"""

_SAME_JOURNEY: Final = 20
_NUMBERS = struct.Struct(">IIIIIIHH")
_NUMBERS_AT, _COMMON_AT = 32, 48
_COUNT_AND_LENGTH = struct.Struct(">HH")
_WORD = struct.Struct(">I")
_SELECTION = struct.Struct(">32sIII")
_TELEMETRY = struct.Struct(">HHHIHI")
_OURS = struct.Struct(">iiHHI")
GET: Final = 0x02
_MOST_BITS = 1 << 16
_HOP_LIMIT = 64


def bulk_headers(prefix: Buffer, refs: Buffer, sequence: int, sky_offset: int) -> bytearray:
    """The sealed headers of a burst: ``prefix`` (up to the end of the SKY header), then one reference, for each of
    ``refs`` (72 bytes each). Sequence counts go up from ``sequence``, lengths follow from the references.
    """
    first, bodies = bytes(prefix), memoryview(refs).cast("B")
    if sky_offset < 6 or len(first) < sky_offset + SKY_BYTES or len(bodies) % REF_BYTES or sequence < 0:
        raise ValueError(
            f"{len(bodies)} bytes of references after a prefix of {len(first)}, SKY header at {sky_offset}, "
            f"sequence {sequence}"
        )
    headers, width = bytearray(), len(first) + REF_BYTES
    for at in range(0, len(bodies), REF_BYTES):
        length = _WORD.unpack_from(bodies, at + 40)[0] + width - 7
        if length > 0xFFFF:
            raise ValueError("a chunk that no packet carries")
        row = bytearray(first + bytes(bodies[at : at + REF_BYTES]))
        _COUNT_AND_LENGTH.pack_into(row, 2, UNSEGMENTED << 14 | (sequence & 0x3FFF), length)
        _WORD.pack_into(row, sky_offset + CRC_AT, header_crc(memoryview(row), sky_offset, width))
        headers += row
        sequence += 1
    return headers


def answer_prefix(op: int, request: memoryview, terms: AnswerTerms) -> bytes:
    """An answer's headers to the end of the SKY header, without sequence count, length and checksum."""
    slot_moves, plane_moves, credit, seconds, fraction, _ = terms
    sky = request[COMMAND_BYTES : COMMAND_BYTES + SKY_BYTES]
    return _TELEMETRY.pack(0x0800 | SKY_APID, 0, 0, seconds, fraction, 0) + b"".join(
        (
            bytes((VERSION, op, 0, 0)),
            sky[8:12],
            sky[4:8],
            sky[12:20],
            bytes((_HOP_LIMIT, 0, 0, 0)),
            sky[24:28],
            _OURS.pack(slot_moves, plane_moves, min(credit, 0xFFFF), 0, 0),
        )
    )


def answer_get(
    packet: Buffer, shares: Mapping[bytes, dict[int, tuple[bytes, bytes]]], terms: AnswerTerms
) -> tuple[bytes, bytearray, list[bytes]] | None:
    """The DATA packets that answer a plain GET: its key, their sealed headers, their payloads.

    ``shares`` holds, by key and 0-based index, (packed reference, payload). None, without effect, unless the packet is
    one sound GET and all its chunks are present.
    """
    view = memoryview(packet).cast("B")
    body_at = COMMAND_BYTES + SKY_BYTES
    bitmap_at = body_at + _SELECTION.size
    if len(view) <= bitmap_at or not view[0] & 0x10 or view[COMMAND_BYTES + 1] != GET or view[COMMAND_BYTES + 3]:
        return None
    if check_header(view)[0]:
        return None
    key, first, stride, count = _SELECTION.unpack_from(view, body_at)
    if not (first and stride and 1 <= count <= _MOST_BITS and len(view) - bitmap_at == (count + 7) // 8):
        return None
    bitmap, share = view[bitmap_at:], shares.get(key, {})
    wanted = [first - 1 + stride * step for step in range(count) if bitmap[step >> 3] >> (step & 7) & 1]
    if not wanted or not all(index in share for index in wanted):
        return None
    prefix = answer_prefix(DATA, view, terms)
    chunks = [share[index] for index in wanted]
    headers = bulk_headers(prefix, b"".join(ref for ref, _ in chunks), terms[5], TELEMETRY_BYTES)
    return key, headers, [payload for _, payload in chunks]


def open_runs(runs: list[Run], first: int) -> tuple[list[int], list[tuple[bytes, bytes]], int, int] | None:
    """Verify and parse SET or MIGRATE packets, in the runs from ``first`` on up to the first that does not belong:
    0-based indices, (reference, payload) of each, their bytes, and the number of runs.

    Packets belong together if they are sound, of one request and one value on one server, in ascending order. None
    unless at least those of the first run do.
    """
    if first < 0:
        raise ValueError(f"first run {first}: expected 0 or more")
    indices: list[int] = []
    chunks: list[tuple[bytes, bytes]] = []
    taken, journey = 0, b""
    for data, segment_bytes in runs[first:]:
        if segment_bytes < 1:
            break
        opened = _open(segments(data, segment_bytes), chunks[0][0] if chunks else None, indices[-1:])
        if opened is None or (taken and opened[0] != journey):
            break
        journey = opened[0]
        indices += opened[1]
        chunks += opened[2]
        taken += 1
    return (indices, chunks, sum(len(ref) + len(payload) for ref, payload in chunks), taken) if taken else None


def _open(
    packets: list[memoryview], first_ref: bytes | None, last: list[int]
) -> tuple[bytes, list[int], list[tuple[bytes, bytes]]] | None:
    """Journey, indices and chunks of one run that may follow a chunk with ``first_ref`` and index ``last``."""
    indices: list[int] = []
    chunks: list[tuple[bytes, bytes]] = []
    ref_at, payload_at = COMMAND_BYTES + SKY_BYTES, COMMAND_BYTES + SKY_BYTES + REF_BYTES
    journey = b""
    for packet in packets:
        code, ref_found = check_header(packet)
        if code or ref_found != ref_at or packet[COMMAND_BYTES + 1] == DATA:
            return None
        ref, payload = bytes(packet[ref_at:payload_at]), bytes(packet[payload_at:])
        number, total, length, crc, value_bytes, _, servers, server = _NUMBERS.unpack_from(ref, _NUMBERS_AT)
        its_journey = bytes(packet[COMMAND_BYTES : COMMAND_BYTES + _SAME_JOURNEY])
        journey, first_ref = journey or its_journey, first_ref or ref
        after = (indices or last or [-1])[-1] + 1
        if its_journey != journey or _value(ref) != _value(first_ref):
            return None
        if not after < number <= total <= max(1, value_bytes) or length > value_bytes:
            return None
        if not servers or server != (number - 1) % servers + 1 or zlib.crc32(payload) != crc:
            return None
        indices.append(number - 1)
        chunks.append((ref, payload))
    return (journey, indices, chunks) if indices else None


def _value(ref: bytes) -> tuple[bytes, bytes, bytes]:
    """The fields that references of one value on one server share."""
    return ref[:_NUMBERS_AT], ref[36:40], ref[_COMMON_AT:]


Landing = tuple[bytes, int, int, int, int, memoryview, bytearray, bytearray]
"""The destination of an awaited value: key, chunks, chunk bytes, value bytes, value CRC, out, arrived and crcs, as
``place_segments`` takes them.
"""
Tally = tuple[int, int, int, int, int, int, int]
"""Request id, last echoed timestamp, runs; then chunks placed, duplicates, corrupt and foreign."""

_ANSWER = slice(TELEMETRY_BYTES + 1, TELEMETRY_BYTES + 20)
"""Fields that all packets of one answer share: operation, flags, status, addresses, ground host, request."""
_MOST_SLOTS = 64


def place_runs(runs: list[Run], first: int, awaited: dict[int, Landing]) -> list[Tally]:
    """``place_segments`` for the runs from ``first`` on, up to the first that is not DATA for one awaited request (the
    keys of ``awaited``) in all its segments. One tally per request, in the order of their first answers.
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
    """Receive like ``recv_batch`` (64 slots at most), and place like ``place_runs``.

    Ends when nothing has come for ``patience_us``, when ``calls`` batches have come, when a value is complete, or at a
    run that is not placed: that and all behind it are the second list, views of ``scratch``.

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
