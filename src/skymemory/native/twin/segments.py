"""Python twin of the loops over packets: sealing headers, verifying runs of segments, placing payloads.

The offsets restate ``skymemory.protocol.wire`` (a floor above, so not importable here); a test holds the
two together. A *segment* is one packet inside a run of equally long ones, as segmentation offload delivers
them; the last may be shorter. All bytes are untrusted: whatever stands in them, nothing outside the given
buffers is read or written.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing_extensions import Buffer

OK: Final = 0
MALFORMED: Final = 1
"""Too short, a length field that disagrees, or another version, APID or flags."""
HEADER_CRC: Final = 2
PAYLOAD_CRC: Final = 3

SKY_APID, VERSION, UNSEGMENTED = 0x0C0, 1, 3
COMMAND_BYTES, TELEMETRY_BYTES = 8, 16
SKY_BYTES, REF_BYTES = 44, 72
MUTABLE_AT, MUTABLE_END, CRC_AT = 20, 24, 40
FLAGS_AT, AUTHENTICATED, MAC_BYTES = 2, 0x01, 16
"""A flag of the SKY header, and the MAC that then ends the body."""
SET, MIGRATE, DATA = 0x01, 0x05, 0x42
CARRIERS = frozenset((SET, MIGRATE, DATA))
"""Operations that carry a payload after a chunk reference."""

_PRIMARY = struct.Struct(">HHH")
_CRC = struct.Struct(">I")
_REF = struct.Struct(">32s6I")
_ZEROS = bytes(MUTABLE_END - MUTABLE_AT)
_NATIVE_CRC = struct.Struct("=I")


def header_crc(packet: memoryview, sky: int, end: int) -> int:
    """CRC-32 of ``packet[:end]`` without the CRC itself and with the forwarders' four bytes as zeros."""
    crc = zlib.crc32(packet[: sky + MUTABLE_AT])
    crc = zlib.crc32(_ZEROS, crc)
    crc = zlib.crc32(packet[sky + MUTABLE_END : sky + CRC_AT], crc)
    return zlib.crc32(packet[sky + SKY_BYTES : end], crc)


def seal_headers(headers: Buffer, header_bytes: int, sky_offset: int) -> None:
    """Write the header CRC into every row of ``header_bytes`` (writable ``headers``, a whole number of rows).

    ``sky_offset`` is where the SKY header starts: 8 in a command, 16 in telemetry.
    """
    rows = memoryview(headers).cast("B")
    if rows.readonly:
        raise BufferError("headers: expected a writable buffer")
    if sky_offset < 0 or header_bytes < sky_offset + SKY_BYTES or len(rows) % header_bytes:
        raise ValueError(f"{len(rows)} bytes of headers in rows of {header_bytes}, SKY header at {sky_offset}")
    for at in range(0, len(rows), header_bytes):
        row = rows[at : at + header_bytes]
        _CRC.pack_into(row, sky_offset + CRC_AT, header_crc(row, sky_offset, header_bytes))


def check_header(packet: memoryview) -> tuple[int, int]:
    """As ``check_packet``, of a packet without a MAC: one with it is malformed to whoever asks this."""
    code, ref = check_packet(packet)
    return (MALFORMED, 0) if not code and mac_bytes(packet) else (code, ref)


def mac_bytes(packet: memoryview) -> int:
    """How long the MAC at the end of the body of a sound packet is."""
    sky = COMMAND_BYTES if packet[0] & 0x10 else TELEMETRY_BYTES
    return MAC_BYTES if packet[sky + FLAGS_AT] & AUTHENTICATED else 0


def check_packet(packet: memoryview) -> tuple[int, int]:
    """Reason code, and where the chunk reference stands (0: the operation carries no payload). The MAC of an
    authenticated packet is not looked at.
    """
    size = len(packet)
    if size < COMMAND_BYTES:
        return MALFORMED, 0
    word, count, length = _PRIMARY.unpack_from(packet)
    # version 0, a secondary header, our APID; the type bit alone is free
    if word & 0xEFFF != 0x0800 | SKY_APID or count >> 14 != UNSEGMENTED or length + 7 != size:
        return MALFORMED, 0
    sky = COMMAND_BYTES if word & 0x1000 else TELEMETRY_BYTES
    prefix = sky + SKY_BYTES
    if size < prefix or packet[sky] != VERSION:
        return MALFORMED, 0
    carries = packet[sky + 1] in CARRIERS
    mac = mac_bytes(packet)
    end = prefix + REF_BYTES + mac if carries else size
    if not prefix + mac <= end <= size:
        return MALFORMED, 0
    if header_crc(packet, sky, end) != _CRC.unpack_from(packet, sky + CRC_AT)[0]:
        return HEADER_CRC, 0
    if not carries:
        return OK, 0
    if _CRC.unpack_from(packet, prefix + 40)[0] != size - end:
        return MALFORMED, 0
    return OK, prefix


def segments(data: Buffer, segment_bytes: int) -> list[memoryview]:
    """The packets of a run."""
    if segment_bytes < 1:
        raise ValueError(f"segments of {segment_bytes} bytes: expected 1 or more")
    view = memoryview(data).cast("B")
    return [view[at : at + segment_bytes] for at in range(0, len(view), segment_bytes)]


def verify_segments(data: Buffer, segment_bytes: int) -> bytes:
    """One reason code per segment: 0 sound, 1 malformed, 2 wrong header CRC, 3 wrong payload CRC.

    For SET, MIGRATE and DATA the header CRC ends with the chunk reference, whose length and CRC the payload
    must meet; for every other operation it covers the packet to its end.
    """
    codes = bytearray()
    for packet in segments(data, segment_bytes):
        code, ref = check_packet(packet)
        if ref and zlib.crc32(packet[ref + REF_BYTES + mac_bytes(packet) :]) != _CRC.unpack_from(packet, ref + 44)[0]:
            code = PAYLOAD_CRC
        codes.append(code)
    return bytes(codes)


def place_segments(
    data: Buffer, segment_bytes: int, key: bytes, chunks: int, chunk_bytes: int, value_bytes: int,
    value_crc: int, out: Buffer, arrived: Buffer, crcs: Buffer,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Copy the payloads of a value's sound DATA segments to their places: ``(placed, duplicates, corrupt,
    foreign)``.

    ``out`` (writable, at least ``value_bytes``) receives chunk ``i`` at ``i * chunk_bytes``, ``arrived``
    (writable, ``chunks`` bytes) a 1, ``crcs`` (writable, ``chunks`` uint32) the chunk's CRC. In this order:
    a malformed segment or a wrong header CRC or a chunk number out of range is corrupt; another operation,
    key, version or geometry is foreign; a chunk that has arrived is a duplicate (its payload is not read);
    a wrong payload CRC is corrupt.
    """
    target, flags, sums = (memoryview(buffer).cast("B") for buffer in (out, arrived, crcs))
    if target.readonly or flags.readonly or sums.readonly:
        raise BufferError("out, arrived, crcs: expected writable buffers")
    if chunk_bytes < 1 or value_bytes < 0 or chunks != max(1, -(-value_bytes // chunk_bytes)) or len(key) != 32:
        raise ValueError(f"{chunks} chunks of {chunk_bytes} bytes for {value_bytes}, key of {len(key)}: no geometry")
    if len(target) < value_bytes or len(flags) < chunks or len(sums) < 4 * chunks:
        raise ValueError("out, arrived or crcs: too small for the value")
    placed = duplicates = corrupt = foreign = 0
    for packet in segments(data, segment_bytes):
        code, ref = check_header(packet)
        if code:
            corrupt += 1
            continue
        sky = COMMAND_BYTES if packet[0] & 0x10 else TELEMETRY_BYTES
        if packet[sky + 1] != DATA:
            foreign += 1
            continue
        its_key, number, total, length, crc, its_bytes, its_crc = _REF.unpack_from(packet, ref)
        if its_key != key or (total, its_bytes, its_crc) != (chunks, value_bytes, value_crc):
            foreign += 1
            continue
        if not 1 <= number <= chunks:
            corrupt += 1
            continue
        start = (number - 1) * chunk_bytes
        if length != min(chunk_bytes, value_bytes - start):
            foreign += 1
            continue
        if flags[number - 1]:
            duplicates += 1
            continue
        payload = packet[ref + REF_BYTES :]
        if zlib.crc32(payload) != crc:
            corrupt += 1
            continue
        target[start : start + length] = payload
        flags[number - 1] = 1
        _NATIVE_CRC.pack_into(sums, 4 * (number - 1), crc)
        placed += 1
    return placed, duplicates, corrupt, foreign
