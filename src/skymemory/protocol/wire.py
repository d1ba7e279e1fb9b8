"""Packets of protocol version 1; ``docs/reference/wire.md`` describes this file.

Integers are big-endian. Ids are 1-based on the wire, 0-based elsewhere. A packet is ``Space Packet header (8 command |
16 telemetry) | SKY header 44 | body | payload``. The SKY header's CRC-32 ends with the body and counts itself and the
four bytes that forwarders change as zero. The payload has its own CRC-32, in the body: no sender rereads it.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, overload

import numpy as np

from skymemory import native
from skymemory.errors import InvalidInput, MalformedPacket

Buffer = bytes | bytearray | memoryview
LinkEnd = Hashable
"""Neighbour's ``SatelliteId``, or the transport's token for a ground host."""

# --- Space Packets: CCSDS 133.0-B-2 primary header, and the two secondary headers of NASA's core Flight System (cFS)
# ---
#
# A command is ``primary 6 | function code 1 | checksum 1`` (8 bytes), a telemetry packet
# ``primary 6 | time 6 | spare 4`` (16 bytes). Both are what a cFS node expects; the mission's own header (SKY) follows.
# The cFS checksum is left 0, which cFS takes as "not used": the header CRC covers it.

PRIMARY_BYTES = 6
COMMAND_BIT = 0x10
COMMAND_BYTES = 8
TELEMETRY_BYTES = 16
IDLE_APID = 0x7FF
MAX_APID = IDLE_APID - 1
SKY_APID = 0x0C0
SEQUENCE_COUNT_MODULUS = 1 << 14
UNSEGMENTED = 3
MAX_PACKET_BYTES = 65_507

_PRIMARY = struct.Struct(">HHH")
COMMAND_FORMAT = ">HHHBB"
_COMMAND = struct.Struct(COMMAND_FORMAT)
_TELEMETRY = struct.Struct(">HHHIHI")
_HALF_WRAP_S = float(1 << 31)


@dataclass(frozen=True, slots=True)
class PacketHeader:
    """Headers of a Space Packet; ``apid`` is the application's id, the time that of telemetry."""

    telemetry: bool
    apid: int
    sequence_count: int
    total_bytes: int
    function_code: int = 0
    time_s: int = 0
    time_fraction: int = 0

    @property
    def header_bytes(self) -> int:
        return TELEMETRY_BYTES if self.telemetry else COMMAND_BYTES


def pack_command(function_code: int, sequence_count: int, total_bytes: int, apid: int = SKY_APID) -> bytes:
    return _COMMAND.pack(*command_fields(function_code, sequence_count, total_bytes, apid))


def command_fields(
    function_code: int, sequence_count: int, total_bytes: int, apid: int = SKY_APID
) -> tuple[int, int, int, int, int]:
    _check(apid, total_bytes, COMMAND_BYTES)
    count = UNSEGMENTED << 14 | sequence_count % SEQUENCE_COUNT_MODULUS
    return 0x1800 | apid, count, total_bytes - PRIMARY_BYTES - 1, function_code, 0


def pack_telemetry(time_s: float, sequence_count: int, total_bytes: int, apid: int = SKY_APID) -> bytes:
    """Pack the first 16 bytes; ``time_s`` counts from the mission epoch."""
    _check(apid, total_bytes, TELEMETRY_BYTES)
    count = UNSEGMENTED << 14 | sequence_count % SEQUENCE_COUNT_MODULUS
    return _TELEMETRY.pack(0x0800 | apid, count, total_bytes - PRIMARY_BYTES - 1, *telemetry_time(time_s), 0)


def microseconds(time_s: float) -> int:
    return round(time_s * 1e6)


def telemetry_time(time_s: float) -> tuple[int, int]:
    """Return seconds, and a fraction in units of 1/65,536 s."""
    seconds, rest_us = divmod(microseconds(time_s), 1_000_000)
    return seconds & 0xFFFFFFFF, (rest_us << 16) // 1_000_000


def parse_header(data: Buffer) -> PacketHeader:
    """Read the headers of a packet.

    Raises:
        MalformedPacket: idle, or not a single whole packet of version 0 with a secondary header.
    """
    size = len(data)
    if size < COMMAND_BYTES:
        raise MalformedPacket(f"{size} bytes: shorter than a Space Packet with its secondary header (8)")
    word, count, length = _PRIMARY.unpack_from(data)
    if word >> 13 != 0:
        raise MalformedPacket(f"Space Packet version {word >> 13}: expected 0")
    if not word & 0x0800:
        raise MalformedPacket("no secondary header: expected one")
    apid = word & 0x7FF
    if apid == IDLE_APID:
        raise MalformedPacket("idle packet (APID 2047): carries nothing")
    if count >> 14 != UNSEGMENTED:
        raise MalformedPacket(f"sequence flags {count >> 14}: expected 3 (one packet, one datagram)")
    total = length + 1 + PRIMARY_BYTES
    if total != size:
        raise MalformedPacket(f"length field says {total} bytes, the datagram has {size}")
    sequence = count & 0x3FFF
    if word & 0x1000:
        return PacketHeader(False, apid, sequence, total, function_code=data[6])
    if size < TELEMETRY_BYTES:
        raise MalformedPacket(f"{size} bytes: shorter than a telemetry header (16)")
    _, _, _, seconds, fraction, _ = _TELEMETRY.unpack_from(data)
    return PacketHeader(True, apid, sequence, total, time_s=seconds, time_fraction=fraction)


def _check(apid: int, total_bytes: int, least: int) -> None:
    if not 0 <= apid <= MAX_APID:
        raise InvalidInput(f"APID {apid}: expected 0 to {MAX_APID} (2047 is the idle packet)")
    if not least < total_bytes <= MAX_PACKET_BYTES:
        raise InvalidInput(f"a packet of {total_bytes} bytes: expected {least + 1} to {MAX_PACKET_BYTES}")


def made_at_s(telemetry: memoryview, now_s: float) -> float:
    """Return a packet's time; seconds on the wire wrap at 2^32."""
    _, _, _, seconds, fraction, _ = _TELEMETRY.unpack_from(telemetry)
    since_s = (seconds + fraction / 65536 - now_s + _HALF_WRAP_S) % (2 * _HALF_WRAP_S) - _HALF_WRAP_S
    return now_s + float(since_s)


# --- The mission's own header, and the chunk reference ---

VERSION = 1

SKY = struct.Struct(">BBBBIIIIBBHIiiHHI")
SKY_BYTES = SKY.size
MUTABLE_OFFSET, MUTABLE_BYTES = 20, 4
"""Bytes that forwarders change; zero in the CRC."""
HOP_LIMIT = 64
CRC_OFFSET = 40
CREDIT_UNIT_BYTES = 4096
MOST_CREDIT = 0xFFFF

CHUNK_REF = struct.Struct(">32sIIIIIIHHBBHii")
CHUNK_REF_BYTES = CHUNK_REF.size
TAG_OFFSET, TAG_BYTES = 56, 16
REPLICA_OFFSET = 61

COMMAND_PREFIX_BYTES = COMMAND_BYTES + SKY_BYTES
TELEMETRY_PREFIX_BYTES = TELEMETRY_BYTES + SKY_BYTES
MAX_CHUNK_BYTES = MAX_PACKET_BYTES - TELEMETRY_PREFIX_BYTES - CHUNK_REF_BYTES

_SANE_RTT_US = 60_000_000
MAX_MOVES = 1 << 30
_FIRST_ANSWER = 0x40


class Op(IntEnum):
    """Operations: requests below 0x40, answers from there on."""

    SET = 0x01
    GET = 0x02
    HAS = 0x03
    EVICT = 0x04
    MIGRATE = 0x05
    PING = 0x06
    LIST = 0x07
    ADVANCE = 0x08
    NOTICE = 0x09
    LINKS = 0x0A
    RETAIN = 0x0B
    CHECK = 0x0C
    FORGET = 0x0D
    ACK = 0x41
    DATA = 0x42
    MISS = 0x43
    PRESENCE = 0x44
    EVICTED = 0x45
    PONG = 0x46
    LISTED = 0x47
    ADVANCED = 0x48
    BUSY = 0x49
    UNREACHABLE = 0x4A
    RETAINED = 0x4B
    GONE = 0x4C
    CHECKED = 0x4D
    UNSUPPORTED = 0x4E

    @property
    def is_command(self) -> bool:
        return self < _FIRST_ANSWER


class UnknownOperation(MalformedPacket):
    """Command that this release does not know."""


class Status(IntEnum):
    OK = 0
    FULL = 1
    """The memory cannot take the chunk even after evicting all it may."""
    HOP_LIMIT = 2
    NO_ROUTE = 3
    REFUSED = 4


_OPS: dict[int, Op] = {op.value: op for op in Op}
_STATUSES: dict[int, Status] = {status.value: status for status in Status}

FLAG_SETTLED = 0x02
"""Flag of MISS and CHECKED: nothing of the key is being handed over or written here; the header's moves are current."""

GROUND_SHELL = 0xFF
"""Shell of ground hosts' addresses; plane and slot name the gateway."""


class Address(NamedTuple):
    """Address of a satellite, or of a ground host at the gateway ``(plane, slot)``."""

    plane: int
    slot: int
    shell: int = 0

    def pack(self) -> int:
        if not (0 <= self.plane < 4096 and 0 <= self.slot < 4096 and 0 <= self.shell < 256):
            raise InvalidInput(f"{self}: expected plane and slot below 4096 and shell below 256")
        return self.shell << 24 | self.plane << 12 | self.slot

    @classmethod
    def unpack(cls, word: int) -> Address:
        return cls(word >> 12 & 0xFFF, word & 0xFFF, word >> 24)


@dataclass(frozen=True, slots=True)
class PlacementTag:
    """Placement of a chunk when it was set. With the box's moves until now it determines the chunk's satellite."""

    strategy: int  # wire code of the layout of servers in the box
    servers: int  # number of servers among which the value's chunks are divided
    server: int  # 0-based: the chunk's index modulo ``servers``
    # Moves of the box when the chunk was set. The box is a rectangle of satellites around the satellite overhead.
    slot_moves: int
    plane_moves: int
    replica: int = 0  # number of the copy


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """Identity of a chunk of a value; ``value_crc`` separates values of two writers under the same key."""

    key: bytes
    index: int
    chunks: int
    length_bytes: int
    crc: int
    value_bytes: int
    value_crc: int
    tag: PlacementTag

    def pack(self) -> bytes:
        tag = self.tag
        value = self.chunks, self.length_bytes, self.crc, self.value_bytes, self.value_crc
        placement = tag.servers, tag.server + 1, tag.strategy, tag.replica, 0, tag.slot_moves, tag.plane_moves
        return CHUNK_REF.pack(self.key, self.index + 1, *value, *placement)

    @classmethod
    def unpack(cls, body: Buffer) -> ChunkRef:
        if len(body) < CHUNK_REF_BYTES:
            raise MalformedPacket(f"chunk reference of {len(body)} bytes: expected {CHUNK_REF_BYTES}")
        (
            key,
            number,
            chunks,
            length,
            crc,
            value_bytes,
            value_crc,
            servers,
            server,
            strategy,
            replica,
            _spare,
            slot_moves,
            plane_moves,
        ) = CHUNK_REF.unpack_from(body)
        if not 1 <= number <= chunks or not servers or server != (number - 1) % servers + 1:
            raise MalformedPacket(f"chunk {number} of {chunks} on server {server} of {servers}: out of range")
        if length > value_bytes or length > MAX_CHUNK_BYTES or chunks > max(1, value_bytes):
            raise MalformedPacket(f"chunk of {length} bytes, one of {chunks}, in a value of {value_bytes}")
        tag = PlacementTag(strategy, servers, server - 1, slot_moves, plane_moves, replica)
        return cls(key, number - 1, chunks, length, crc, value_bytes, value_crc, tag)


class SkyHeader(NamedTuple):
    """Mission header. ``credit`` counts ``CREDIT_UNIT_BYTES``."""

    op: Op
    destination: Address
    source: Address
    ground: int
    request_id: int
    status: Status = Status.OK
    hop_limit: int = HOP_LIMIT
    hop_count: int = 0
    congestion: int = 0
    timestamp_us: int = 0
    slot_moves: int = 0
    plane_moves: int = 0
    credit: int = 0
    key_id: int = 0
    flags: int = 0

    def pack(self, crc: int = 0) -> bytes:
        return SKY.pack(
            VERSION,
            self.op,
            self.flags,
            self.status,
            self.destination.pack(),
            self.source.pack(),
            self.ground,
            self.request_id,
            self.hop_limit,
            self.hop_count,
            self.congestion,
            self.timestamp_us & 0xFFFFFFFF,
            self.slot_moves,
            self.plane_moves,
            min(self.credit, MOST_CREDIT),
            self.key_id,
            crc,
        )

    @classmethod
    def unpack(cls, data: Buffer, offset: int = 0) -> SkyHeader:
        """Read a header.

        Raises:
            MalformedPacket: another version, unknown status or answer, or too few bytes.
            UnknownOperation: an unknown command.
        """
        if len(data) < offset + SKY_BYTES:
            raise MalformedPacket(f"{len(data)} bytes: too short for a SKY header at {offset}")
        (
            version,
            op,
            flags,
            status,
            destination,
            source,
            ground,
            request_id,
            hop_limit,
            hop_count,
            congestion,
            timestamp_us,
            slot_moves,
            plane_moves,
            credit,
            key_id,
            _crc,
        ) = SKY.unpack_from(data, offset)
        if version != VERSION:
            raise MalformedPacket(f"protocol version {version}: expected {VERSION}")
        known_op, known_status = _OPS.get(op), _STATUSES.get(status)
        if not (-MAX_MOVES <= slot_moves <= MAX_MOVES and -MAX_MOVES <= plane_moves <= MAX_MOVES):
            raise MalformedPacket(f"{slot_moves} and {plane_moves} moves: expected {MAX_MOVES} at most")
        if known_op is None and op < _FIRST_ANSWER and known_status is not None:
            raise UnknownOperation(f"operation {op:#x}: not known to this release")
        if known_op is None or known_status is None:
            raise MalformedPacket(f"operation {op:#x}, status {status}: not known to version {VERSION}")
        return cls(
            known_op,
            Address.unpack(destination),
            Address.unpack(source),
            ground,
            request_id,
            known_status,
            hop_limit,
            hop_count,
            congestion,
            timestamp_us,
            slot_moves,
            plane_moves,
            credit,
            key_id,
            flags,
        )


def since_s(echo_us: int, now_s: float) -> float | None:
    elapsed_us = (microseconds(now_s) - echo_us) & 0xFFFFFFFF
    return elapsed_us * 1e-6 if elapsed_us < _SANE_RTT_US else None


# --- Whole packets ---


@dataclass(frozen=True, slots=True)
class Packet:
    header: SkyHeader
    body: memoryview


def build_packet(header: SkyHeader, body: bytes, sequence_count: int, now_s: float) -> bytes:
    packet = _prefix(header, len(body), sequence_count, now_s) + body
    return sealed(packet, COMMAND_BYTES if header.op.is_command else TELEMETRY_BYTES)


def sealed(packet: bytes, sky_offset: int) -> bytes:
    writable = bytearray(packet)
    native.seal_headers(writable, len(writable), sky_offset)
    return bytes(writable)


def parse_packet(data: Buffer) -> Packet:
    """Read a control packet whose CRC ``native.verify_segments`` has accepted.

    Raises:
        MalformedPacket: the packet contradicts itself.
        UnknownOperation: an otherwise sound command.
    """
    outer = parse_header(data)
    if outer.apid != SKY_APID:
        raise MalformedPacket(f"APID {outer.apid:#x}: expected {SKY_APID:#x}")
    try:
        header = SkyHeader.unpack(data, outer.header_bytes)
    except UnknownOperation as error:
        if outer.telemetry:
            raise MalformedPacket(f"{error}, in a telemetry packet") from None
        raise
    if header.op.is_command == outer.telemetry:
        raise MalformedPacket(f"{header.op.name} in a {'telemetry' if outer.telemetry else 'command'} packet")
    return Packet(header, memoryview(data)[outer.header_bytes + SKY_BYTES :])


def bulk_prefix(header: SkyHeader, now_s: float) -> bytes:
    return _prefix(header, 1, 0, now_s)


def _prefix(header: SkyHeader, body_bytes: int, sequence_count: int, now_s: float) -> bytes:
    if header.op.is_command:
        outer = pack_command(header.op, sequence_count, COMMAND_BYTES + SKY_BYTES + body_bytes)
    else:
        outer = pack_telemetry(now_s, sequence_count, TELEMETRY_BYTES + SKY_BYTES + body_bytes)
    return outer + header.pack()


def header_start(view: memoryview) -> int:
    return COMMAND_BYTES if len(view) and view[0] & COMMAND_BIT else TELEMETRY_BYTES


def destination_of(packet: Buffer) -> Address:
    at = header_start(memoryview(packet)) + 4
    return Address.unpack(int.from_bytes(packet[at : at + 4], "big"))


# --- Batches: ``n`` packets for one destination, headers as rows of one array, payloads left where they are ---
#
# A machine hands a ``SegmentBatch`` to its transport. The UDP transport gathers headers and payloads into sends with
# segmentation offload, without a copy; the simulated transport joins them.


class Slices(Sequence[memoryview]):
    """Chunks ``indices`` of a value, as views without a copy."""

    __slots__ = ("chunk_bytes", "indices", "value")

    def __init__(self, value: memoryview, chunk_bytes: int, indices: range) -> None:
        self.value = value
        self.chunk_bytes = chunk_bytes
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, at: int) -> memoryview: ...
    @overload
    def __getitem__(self, at: slice) -> Slices: ...
    def __getitem__(self, at: int | slice) -> memoryview | Slices:
        if isinstance(at, slice):
            return Slices(self.value, self.chunk_bytes, self.indices[at])
        start = self.indices[at] * self.chunk_bytes
        return self.value[start : start + self.chunk_bytes]


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """Batch of packets to a single destination: ``headers[i·header_bytes : (i+1)·header_bytes] + payloads[i]``.

    With ``payloads`` None, ``headers`` is a run of whole packets.
    """

    headers: bytes | bytearray
    header_bytes: int
    payloads: Sequence[Buffer] | None = None

    @property
    def count(self) -> int:
        return -(-len(self.headers) // self.header_bytes)

    @property
    def is_one_packet(self) -> bool:
        return self.payloads is None and len(self.headers) <= self.header_bytes

    @property
    def total_bytes(self) -> int:
        return len(self.headers) + (sum(map(len, self.payloads)) if self.payloads is not None else 0)

    def datagrams(self) -> list[bytes]:
        step = self.header_bytes
        rows = [bytes(self.headers[at : at + step]) for at in range(0, len(self.headers), step)]
        if self.payloads is None:
            return rows
        return [row + payload for row, payload in zip(rows, self.payloads, strict=True)]


def single(packet: bytes) -> SegmentBatch:
    return SegmentBatch(packet, len(packet))


def bulk_batch(
    header: SkyHeader, refs: bytes | np.ndarray, payloads: Sequence[Buffer], sequence_count: int, now_s: float
) -> SegmentBatch:
    """Return a sealed packet for each packed reference and payload."""
    bodies = refs if isinstance(refs, bytes) else refs.tobytes()
    return prefixed_batch(bulk_prefix(header, now_s), bodies, payloads, sequence_count)


def prefixed_batch(prefix: bytes, refs: Buffer, payloads: Sequence[Buffer], sequence_count: int) -> SegmentBatch:
    headers = native.bulk_headers(prefix, refs, sequence_count, len(prefix) - SKY_BYTES)
    return SegmentBatch(headers, len(prefix) + CHUNK_REF_BYTES, payloads)
