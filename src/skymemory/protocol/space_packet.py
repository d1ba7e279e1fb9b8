"""CCSDS 133.0-B-2 Space Packet primary header, and the two secondary headers of NASA's cFS.

A command is ``primary 6 | function code 1 | checksum 1`` (8 bytes), a telemetry packet
``primary 6 | time 6 | spare 4`` (16 bytes). Both are what a core Flight System node expects; the mission's own
header (``messages``) follows. The cFS checksum is left 0, which cFS takes as "not used": the header CRC covers it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from skymemory.errors import InvalidInput, MalformedPacket

PRIMARY_BYTES = 6
COMMAND_BYTES = 8
TELEMETRY_BYTES = 16
IDLE_APID = 0x7FF
MAX_APID = IDLE_APID - 1
SKY_APID = 0x0C0
SEQUENCE_COUNT_MODULUS = 1 << 14
UNSEGMENTED = 3
MAX_PACKET_BYTES = 65_507
"""One packet flies in one UDP datagram, whose limit is below the 65,542 bytes a Space Packet could have."""

_PRIMARY = struct.Struct(">HHH")
COMMAND_FORMAT = ">HHHBB"
_COMMAND = struct.Struct(COMMAND_FORMAT)
_TELEMETRY = struct.Struct(">HHHIHI")
_HALF_WRAP_S = float(1 << 31)


@dataclass(frozen=True, slots=True)
class PacketHeader:
    """Primary header plus what the secondary header says. ``total_bytes`` is the length of the whole packet."""

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
    """The first 8 bytes of a command packet of ``total_bytes`` bytes in all."""
    return _COMMAND.pack(*command_fields(function_code, sequence_count, total_bytes, apid))


def command_fields(
    function_code: int, sequence_count: int, total_bytes: int, apid: int = SKY_APID
) -> tuple[int, int, int, int, int]:
    """What ``pack_command`` packs, for those who pack more at once (``COMMAND_FORMAT``)."""
    _check(apid, total_bytes, COMMAND_BYTES)
    count = UNSEGMENTED << 14 | sequence_count % SEQUENCE_COUNT_MODULUS
    return 0x1800 | apid, count, total_bytes - PRIMARY_BYTES - 1, function_code, 0


def pack_telemetry(time_s: float, sequence_count: int, total_bytes: int, apid: int = SKY_APID) -> bytes:
    """The first 16 bytes of a telemetry packet of ``total_bytes`` bytes in all; time in seconds of our epoch."""
    _check(apid, total_bytes, TELEMETRY_BYTES)
    seconds = int(time_s)
    fraction = int((time_s - seconds) * 65536)
    count = UNSEGMENTED << 14 | sequence_count % SEQUENCE_COUNT_MODULUS
    return _TELEMETRY.pack(
        0x0800 | apid, count, total_bytes - PRIMARY_BYTES - 1, seconds & 0xFFFFFFFF, fraction & 0xFFFF, 0
    )


def parse_header(data: bytes | bytearray | memoryview) -> PacketHeader:
    """Read the headers of one packet.

    Raises:
        MalformedPacket: too short, another version, no secondary header, idle packet, segmented, or a length field
            that disagrees with the bytes at hand (a truncated or padded datagram).
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
    """When this telemetry was made by its maker's clock, in seconds of ours: the wire's seconds wrap at 2^32."""
    _, _, _, seconds, fraction, _ = _TELEMETRY.unpack_from(telemetry)
    since_s = (seconds + fraction / 65536 - now_s + _HALF_WRAP_S) % (2 * _HALF_WRAP_S) - _HALF_WRAP_S
    return now_s + float(since_s)
