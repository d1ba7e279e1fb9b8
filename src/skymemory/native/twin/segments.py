"""Loops over packets: sealing headers, verifying runs of segments, placing payloads, MACs.

Offsets repeat those of ``skymemory.protocol.wire``, a higher layer. A *segment* is a packet of a run of equally long
packets. All bytes are untrusted.

A MAC is HMAC-SHA-256, cut to 16 bytes, over the high half of the sender's time in microseconds (4 bytes, not sent), and
the packet up to the MAC, with its CRC and the forwarders' fields as zero. It ends the body, before any payload. Longer
keys also cover the payload of SET and MIGRATE, by its hash (``nh``).
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from skymemory.native.twin.nh import PAYLOAD_KEY_BYTES, payload_hash

if TYPE_CHECKING:
    from typing_extensions import Buffer


OK: Final = 0
MALFORMED: Final = 1
"""Too short, a wrong length field, or another version, APID or flags."""
HEADER_CRC: Final = 2
PAYLOAD_CRC: Final = 3

SKY_APID, VERSION, UNSEGMENTED = 0x0C0, 1, 3
COMMAND_BYTES, TELEMETRY_BYTES = 8, 16
SKY_BYTES, REF_BYTES = 44, 72
MUTABLE_AT, MUTABLE_END, CRC_AT = 20, 24, 40
FLAGS_AT, AUTHENTICATED, MAC_BYTES = 2, 0x01, 16
SET, MIGRATE, DATA = 0x01, 0x05, 0x42
CARRIERS = frozenset((SET, MIGRATE, DATA))

_PRIMARY = struct.Struct(">HHH")
_CRC = struct.Struct(">I")
_KEY_BYTES = 32
_REF, _TAG = struct.Struct(">32s6I"), struct.Struct(">HHB3xii")
_ZEROS = bytes(MUTABLE_END - MUTABLE_AT)
_NATIVE_CRC = struct.Struct("=I")


def header_crc(packet: memoryview, sky: int, end: int) -> int:
    """Return the CRC-32 of ``packet[:end]``, without its own field and with the forwarders' bytes as zeros."""
    crc = zlib.crc32(packet[: sky + MUTABLE_AT])
    crc = zlib.crc32(_ZEROS, crc)
    crc = zlib.crc32(packet[sky + MUTABLE_END : sky + CRC_AT], crc)
    return zlib.crc32(packet[sky + SKY_BYTES : end], crc)


def value_refs(
    value: Buffer, key: Buffer, chunk_bytes: int, servers: int, strategy: int, moves: tuple[int, int]
) -> tuple[bytearray, int]:
    """Return the references of all chunks, and the value's CRC-32. ValueError for a number that does not fit."""
    view = memoryview(value).cast("B")
    fits = chunk_bytes > 0 and 0 < servers < 1 << 16 and 0 <= strategy < 256 and len(view) < 1 << 32
    if not fits or memoryview(key).nbytes != _KEY_BYTES:
        raise ValueError(
            f"{len(view)} bytes in chunks of {chunk_bytes} under a key of {memoryview(key).nbytes}, on {servers} "
            f"servers by strategy {strategy}: a reference has no room for it"
        )
    chunks = max(1, -(-len(view) // chunk_bytes))
    value_crc, refs = zlib.crc32(view), bytearray()
    for index in range(chunks):
        chunk = view[index * chunk_bytes : (index + 1) * chunk_bytes]
        numbers = index + 1, chunks, len(chunk), zlib.crc32(chunk), len(view), value_crc
        refs += _REF.pack(bytes(key), *numbers)
        refs += _TAG.pack(servers, index % servers + 1, strategy, *moves)
    return refs, value_crc


def seal_headers(headers: Buffer, header_bytes: int, sky_offset: int) -> None:
    """Write the header CRC into every row of ``header_bytes``. ``sky_offset``: 8 in a command, 16 in telemetry."""
    rows = memoryview(headers).cast("B")
    if rows.readonly:
        raise BufferError("headers: expected a writable buffer")
    if sky_offset < 0 or header_bytes < sky_offset + SKY_BYTES or len(rows) % header_bytes:
        raise ValueError(f"{len(rows)} bytes of headers in rows of {header_bytes}, SKY header at {sky_offset}")
    for at in range(0, len(rows), header_bytes):
        row = rows[at : at + header_bytes]
        _CRC.pack_into(row, sky_offset + CRC_AT, header_crc(row, sky_offset, header_bytes))


def check_header(packet: memoryview) -> tuple[int, int]:
    code, ref = check_packet(packet)
    return (MALFORMED, 0) if not code and mac_bytes(packet) else (code, ref)


def mac_bytes(packet: memoryview) -> int:
    sky = COMMAND_BYTES if packet[0] & 0x10 else TELEMETRY_BYTES
    return MAC_BYTES if packet[sky + FLAGS_AT] & AUTHENTICATED else 0


def check_packet(packet: memoryview) -> tuple[int, int]:
    """Return the error code, and the offset of the chunk reference (0: no payload)."""
    size = len(packet)
    if size < COMMAND_BYTES:
        return MALFORMED, 0
    word, count, length = _PRIMARY.unpack_from(packet)
    # version 0, a secondary header, our APID; only the type bit is free
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
    if segment_bytes < 1:
        raise ValueError(f"segments of {segment_bytes} bytes: expected 1 or more")
    view = memoryview(data).cast("B")
    return [view[at : at + segment_bytes] for at in range(0, len(view), segment_bytes)]


def verify_segments(data: Buffer, segment_bytes: int) -> bytes:
    """Return a code per segment: 0 valid, 1 malformed, 2 wrong header CRC, 3 wrong payload CRC.

    The header CRC of SET, MIGRATE and DATA ends with the chunk reference, which has the payload's length and CRC.
    """
    codes = bytearray()
    for packet in segments(data, segment_bytes):
        code, ref = check_packet(packet)
        if ref and zlib.crc32(packet[ref + REF_BYTES + mac_bytes(packet) :]) != _CRC.unpack_from(packet, ref + 44)[0]:
            code = PAYLOAD_CRC
        codes.append(code)
    return bytes(codes)


class Rows(NamedTuple):
    """Destination of a value in pieces: ``head``, then ``row_count`` rows of ``row_bytes`` in ``room``, from ``first``
    on, every ``stride`` bytes.
    """

    head: memoryview
    room: memoryview
    first: int
    row_count: int
    row_bytes: int
    stride: int

    @property
    def size_bytes(self) -> int:
        return len(self.head) + self.row_count * self.row_bytes


def out_fits(out: Buffer | Rows, value_bytes: int) -> bool:
    """Return True if a value fits; rows must have exactly its size, without overlap."""
    if not isinstance(out, tuple):
        return memoryview(out).nbytes >= value_bytes
    head, room, first, count, row_bytes, stride = out
    is_regular = first >= 0 and count > 0 and stride >= row_bytes > 0
    return (
        is_regular
        and value_bytes == len(head) + count * row_bytes
        and first + (count - 1) * stride + row_bytes <= len(room)
    )


def _places(
    out: Buffer | Rows, targets: Sequence[memoryview], start: int, payload: memoryview
) -> Iterator[tuple[memoryview, int, memoryview]]:
    """Yield the buffer, offset and bytes for each part of a payload that begins at byte ``start`` of the value."""
    if not isinstance(out, tuple):
        yield targets[0], start, payload
        return
    (head, room), (_, _, first, _, row_bytes, stride) = targets, out
    if start < len(head):
        part = payload[: len(head) - start]
        yield head, start, part
        start, payload = start + len(part), payload[len(part) :]
    while len(payload):
        row, at = divmod(start - len(head), row_bytes)
        part = payload[: row_bytes - at]
        yield room, first + row * stride + at, part
        start, payload = start + len(part), payload[len(part) :]


Landing = tuple[bytes, int, int, int, int, memoryview | Rows, bytearray, bytearray]
"""Destination of an awaited value: key, chunks, chunk bytes, value bytes, value CRC, out, arrived and crcs
(``place_segments``).
"""


def place_segments(data: Buffer, segment_bytes: int, landing: Landing) -> tuple[int, int, int, int]:
    """Copy the payloads of a value's valid DATA segments to their places; return ``(placed, duplicates, corrupt,
    foreign)``.

    ``out`` (writable, at least ``value_bytes``, or rows of exactly the value) gets chunk ``i`` from byte ``i *
    chunk_bytes`` on, ``arrived`` (``chunks`` bytes) a 1, ``crcs`` (``chunks`` uint32) its CRC. In order: malformed, a
    wrong header CRC or chunk number is corrupt; another operation, key, version or geometry is foreign; an arrived
    chunk is a duplicate, unread; a wrong payload CRC is corrupt.
    """
    if not isinstance(landing, tuple) or len(landing) != 8:
        raise TypeError("landing: expected a tuple of 8")
    key, chunks, chunk_bytes, value_bytes, value_crc, out, arrived, crcs = landing
    targets = [memoryview(buffer).cast("B") for buffer in (out[:2] if isinstance(out, tuple) else (out,))]
    flags, sums = (memoryview(buffer).cast("B") for buffer in (arrived, crcs))
    if flags.readonly or sums.readonly or any(target.readonly for target in targets):
        raise BufferError("out, arrived, crcs: expected writable buffers")
    if chunk_bytes < 1 or value_bytes < 0 or chunks != max(1, -(-value_bytes // chunk_bytes)) or len(key) != 32:
        raise ValueError(f"{chunks} chunks of {chunk_bytes} bytes for {value_bytes}, key of {len(key)}: no geometry")
    fits = out_fits(out, value_bytes)
    if not fits or len(flags) < chunks or len(sums) < 4 * chunks:
        raise ValueError("out, arrived or crcs: too small for the value, or rows that are not its")
    placed = duplicates = corrupt = foreign = 0
    for packet in segments(data, segment_bytes):
        # The cheap checks first, the payload's CRC last: a duplicate or foreign packet costs no pass over its
        # payload.
        code, ref = check_header(packet)
        if code:
            corrupt += 1
            continue
        sky = COMMAND_BYTES if packet[0] & 0x10 else TELEMETRY_BYTES
        if packet[sky + 1] != DATA:
            foreign += 1
            continue
        segment_key, number, total, length, crc, segment_value_bytes, segment_value_crc = _REF.unpack_from(packet, ref)
        if segment_key != key or (total, segment_value_bytes, segment_value_crc) != (chunks, value_bytes, value_crc):
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
        for target, at, part in _places(out, targets, start, payload):
            target[at : at + len(part)] = part
        flags[number - 1] = 1
        _NATIVE_CRC.pack_into(sums, 4 * (number - 1), crc)
        placed += 1
    return placed, duplicates, corrupt, foreign


MAC_KEY_BYTES: Final = 32
TIMESTAMP_AT, KEY_ID_AT = 24, 38
MOST_SIGNED_CHUNK_BYTES = 65_507 - TELEMETRY_BYTES - SKY_BYTES - REF_BYTES - MAC_BYTES
_LONGEST_PACKET = 65_507
_LEAST_TIME_US, _LAST_TIME_US = -(1 << 63), (1 << 63) - 1
_COMMAND_BIT = 0x10
_BLOCK_BYTES = 64


@lru_cache(maxsize=32)
def _states(key: bytes) -> tuple[hashlib._Hash, hashlib._Hash]:
    """Return a key's inner and outer hash states, cached to halve a MAC's time."""
    padded = key.ljust(_BLOCK_BYTES, b"\0")
    inner, outer = (hashlib.sha256(bytes(byte ^ pad for byte in padded)) for pad in (0x36, 0x5C))
    return inner, outer


def mac_of(key: bytes, time_high: int, head: Buffer, sky: int, payload: Buffer) -> bytes:
    """Return the MAC of a packet that begins with ``head``."""
    mac_key, payload_key = key[:MAC_KEY_BYTES], key[MAC_KEY_BYTES:]
    covered = bytearray(head)
    covered[sky + MUTABLE_AT : sky + MUTABLE_END] = bytes(MUTABLE_END - MUTABLE_AT)
    covered[sky + CRC_AT : sky + SKY_BYTES] = bytes(SKY_BYTES - CRC_AT)
    inner, outer = (state.copy() for state in _states(mac_key))
    inner.update((time_high & 0xFFFFFFFF).to_bytes(4, "big") + covered)
    if _covers_payload(key, covered, sky):
        inner.update(payload_hash(payload_key, payload))
    outer.update(inner.digest())
    return outer.digest()[:MAC_BYTES]


def _covers_payload(key: bytes, packet: Buffer, sky: int) -> bool:
    return len(key) > MAC_KEY_BYTES and sky == COMMAND_BYTES and memoryview(packet)[sky + 1] in CARRIERS


def sign_packets(
    headers: Buffer,
    header_bytes: int,
    sky_offset: int,
    key: bytes,
    key_id: int,
    time_us: int,
    payloads: Sequence[Buffer] | None = None,
) -> bytearray:
    """Add MACs to rows of ``header_bytes``, packets without payload; return them 16 bytes longer, sealed.

    ``sky_offset`` is 8 for commands, which get ``time_us``, and 16 for telemetry. A key of ``PAYLOAD_KEY_BYTES`` more
    than ``MAC_KEY_BYTES`` covers payloads of SETs and MIGRATEs too. Raises ValueError, also for a packet that would be
    too long.
    """
    rows = memoryview(headers).cast("B")
    _check_offset(sky_offset)
    if (
        header_bytes < sky_offset + SKY_BYTES
        or len(rows) % header_bytes
        or len(key) not in (MAC_KEY_BYTES, MAC_KEY_BYTES + PAYLOAD_KEY_BYTES)
        or not 1 <= key_id <= 0xFFFF
    ):
        raise ValueError(f"{len(rows)} bytes of headers in rows of {header_bytes}, key {key_id} of {len(key)} bytes")
    payload_list = None if payloads is None else tuple(payloads)
    if payload_list is not None and len(payload_list) != len(rows) // header_bytes:
        raise ValueError(f"{len(payload_list)} payloads for {len(rows) // header_bytes} rows")
    signed = bytearray()
    for number in range(len(rows) // header_bytes):
        row = bytearray(rows[number * header_bytes : (number + 1) * header_bytes])
        payload: Buffer = b""
        if _covers_payload(key, row, sky_offset):
            if payload_list is None:
                raise ValueError("the MAC covers payloads: expected them")
            payload = memoryview(payload_list[number])
            if payload.nbytes >= _LONGEST_PACKET:
                raise ValueError("a packet with no room for a MAC")
        length = int.from_bytes(row[4:6], "big") + MAC_BYTES
        if length + 7 > _LONGEST_PACKET:
            raise ValueError("a packet with no room for a MAC")
        row[4:6] = length.to_bytes(2, "big")
        row[sky_offset + FLAGS_AT] |= AUTHENTICATED
        row[sky_offset + KEY_ID_AT : sky_offset + KEY_ID_AT + 2] = key_id.to_bytes(2, "big")
        if sky_offset == COMMAND_BYTES:
            low = (time_us & 0xFFFFFFFF).to_bytes(4, "big")
            row[sky_offset + TIMESTAMP_AT : sky_offset + TIMESTAMP_AT + 4] = low
        signed += row
        signed += mac_of(key, time_us >> 32, row, sky_offset, payload)
    seal_headers(signed, header_bytes + MAC_BYTES, sky_offset)
    return signed


def check_macs(
    data: Buffer, segment_bytes: int, sky_offset: int, keys: Mapping[int, bytes], now_us: int, skew_us: int
) -> list[int | None]:
    """Return each packet's time of sending in microseconds (0 for telemetry); None if not authentic: no or a wrong MAC,
    a key not in ``keys``, a command's time over ``skew_us`` from ``now_us``, a chunk too large for an answer with a
    MAC, invalid headers. Payloads are checked if the key covers them.
    """
    _check_offset(sky_offset)
    return [_sent_us(packet, sky_offset, keys, now_us, skew_us) for packet in segments(data, segment_bytes)]


def _sent_us(packet: memoryview, sky: int, keys: Mapping[int, bytes], now_us: int, skew_us: int) -> int | None:
    """Check a packet as ``check_macs``."""
    end = _mac_end(packet, sky)
    if not end or check_packet(packet)[0] != OK:
        return None
    sent_us = 0
    if sky == COMMAND_BYTES:
        # The packet has the low 32 bits of the time, which wrap every 71.6 minutes: the nearest time to ours is
        # meant.
        low = int.from_bytes(packet[sky + TIMESTAMP_AT : sky + TIMESTAMP_AT + 4], "big")
        ahead_us = (low - now_us + (1 << 31)) % (1 << 32) - (1 << 31)
        sent_us = now_us + ahead_us
        if abs(ahead_us) > skew_us or not _LEAST_TIME_US <= sent_us <= _LAST_TIME_US:
            return None
    key = keys.get(int.from_bytes(packet[sky + KEY_ID_AT : sky + KEY_ID_AT + 2], "big"))
    if key is None:
        return None
    if len(key) not in (MAC_KEY_BYTES, MAC_KEY_BYTES + PAYLOAD_KEY_BYTES):
        raise TypeError(f"keys: expected {MAC_KEY_BYTES} or {MAC_KEY_BYTES + PAYLOAD_KEY_BYTES} bytes by number")
    expected = mac_of(key, sent_us >> 32, packet[: end - MAC_BYTES], sky, packet[end:])
    return sent_us if hmac.compare_digest(expected, packet[end - MAC_BYTES : end]) else None


def strip_macs(data: Buffer, segment_bytes: int, sky_offset: int, keep: Buffer) -> bytearray:
    """Remove the MACs of a run; return, sealed, the packets whose byte in ``keep`` is not 0. ValueError if such a
    packet has none.
    """
    _check_offset(sky_offset)
    packets, wanted = segments(data, segment_bytes), bytes(keep)
    if len(packets) != len(wanted):
        raise ValueError(f"{len(packets)} packets, {len(wanted)} of which are to be kept or not")
    stripped = bytearray()
    for packet, is_wanted in zip(packets, wanted, strict=True):
        if not is_wanted:
            continue
        end = _mac_end(packet, sky_offset)
        if not end:
            raise ValueError("a packet to keep without a MAC")
        head = bytearray(packet[: end - MAC_BYTES])
        head[4:6] = (len(packet) - MAC_BYTES - 7 & 0xFFFF).to_bytes(2, "big")
        head[sky_offset + FLAGS_AT] &= ~AUTHENTICATED & 0xFF
        head[sky_offset + KEY_ID_AT : sky_offset + KEY_ID_AT + 2] = b"\0\0"
        seal_headers(head, len(head), sky_offset)
        stripped += head
        stripped += packet[end:]
    return stripped


def _mac_end(packet: memoryview, sky: int) -> int:
    """Return the offset after the MAC; 0 if there is none, or the chunk is too large."""
    if len(packet) < sky + SKY_BYTES + MAC_BYTES or bool(packet[0] & _COMMAND_BIT) != (sky == COMMAND_BYTES):
        return 0
    if not packet[sky + FLAGS_AT] & AUTHENTICATED:
        return 0
    if packet[sky + 1] not in CARRIERS:
        return len(packet)
    end = sky + SKY_BYTES + REF_BYTES + MAC_BYTES
    return end if end <= len(packet) <= end + MOST_SIGNED_CHUNK_BYTES else 0


def _check_offset(sky_offset: int) -> None:
    if sky_offset not in (COMMAND_BYTES, TELEMETRY_BYTES):
        raise ValueError(f"SKY header at {sky_offset}: expected {COMMAND_BYTES} or {TELEMETRY_BYTES}")
