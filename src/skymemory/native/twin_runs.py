"""Python twin of the calls that take whole runs: what a satellite opens, headers by the burst.

A *run* is what receive offload delivers: packets of ``segment_bytes`` each, the last maybe shorter. These calls only
take the plain case, a run whose packets all belong together; for anything else they say so, and the caller looks at
the packets one by one.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from skymemory.native.twin_segments import (
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
    segments,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

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


def answer_get(
    packet: Buffer, shares: Mapping[bytes, dict[int, tuple[bytes, bytes]]], slot_moves: int, plane_moves: int,
    credit: int, seconds: int, fraction: int, sequence: int,
) -> tuple[bytes, bytearray, list[bytes]] | None:  # fmt: skip
    """The DATA packets that answer a plain GET: its key, their sealed headers, their payloads.

    ``shares`` holds, by key and 0-based index, (packed reference, payload). None unless the packet is one sound GET and
    all that it wants is there: then nothing has been done, and the caller looks at it in its own way.
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
    sky = view[COMMAND_BYTES : COMMAND_BYTES + SKY_BYTES]
    prefix = _TELEMETRY.pack(0x0800 | SKY_APID, 0, 0, seconds, fraction, 0) + b"".join(
        (bytes((VERSION, DATA, 0, 0)), sky[8:12], sky[4:8], sky[12:20], bytes((_HOP_LIMIT, 0, 0, 0)), sky[24:28],
         _OURS.pack(slot_moves, plane_moves, min(credit, 0xFFFF), 0, 0))
    )  # fmt: skip
    chunks = [share[index] for index in wanted]
    headers = bulk_headers(prefix, b"".join(ref for ref, _ in chunks), sequence, TELEMETRY_BYTES)
    return key, headers, [payload for _, payload in chunks]


def open_run(data: Buffer, segment_bytes: int) -> tuple[list[int], list[tuple[bytes, bytes]], int] | None:
    """Verify and take apart a run of SET or MIGRATE packets: 0-based indices, (reference, payload) of each, and the
    bytes of all these. None unless all are sound, of one request and one value on one server, in ascending order.
    """
    indices: list[int] = []
    chunks: list[tuple[bytes, bytes]] = []
    size_bytes = 0
    ref_at, payload_at = COMMAND_BYTES + SKY_BYTES, COMMAND_BYTES + SKY_BYTES + REF_BYTES
    journey, value = b"", (b"", 0, b"")
    for packet in segments(data, segment_bytes):
        code, ref_found = check_header(packet)
        if code or ref_found != ref_at or packet[COMMAND_BYTES + 1] == DATA:
            return None
        ref, payload = bytes(packet[ref_at:payload_at]), bytes(packet[payload_at:])
        number, total, length, crc, value_bytes, _, servers, server = _NUMBERS.unpack_from(ref, _NUMBERS_AT)
        its_journey = bytes(packet[COMMAND_BYTES : COMMAND_BYTES + _SAME_JOURNEY])
        its_value = (ref[:_NUMBERS_AT], total, ref[_COMMON_AT:])
        if not indices:
            journey, value = its_journey, its_value
        after = indices[-1] + 1 if indices else 0
        if its_journey != journey or its_value != value or not after < number <= total <= max(1, value_bytes):
            return None
        if length > value_bytes or not servers or server != (number - 1) % servers + 1 or zlib.crc32(payload) != crc:
            return None
        indices.append(number - 1)
        chunks.append((ref, payload))
        size_bytes += REF_BYTES + len(payload)
    return (indices, chunks, size_bytes) if indices else None
