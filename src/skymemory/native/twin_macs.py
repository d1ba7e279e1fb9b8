"""Python twin of the loops over MACs: made, checked and taken off, for whole runs of packets.

A MAC is HMAC-SHA-256, cut to 16 bytes, over the high half of the sender's time in microseconds (4 bytes, not sent), and
the packet up to the MAC, its CRC and what forwarders change taken as zero. It ends the body; the payload of SET,
MIGRATE and DATA follows behind it and is not covered. ``protocol.authentication`` says why.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from skymemory.native.twin_segments import (
    AUTHENTICATED,
    CARRIERS,
    COMMAND_BYTES,
    CRC_AT,
    FLAGS_AT,
    MAC_BYTES,
    MUTABLE_AT,
    MUTABLE_END,
    REF_BYTES,
    SKY_BYTES,
    TELEMETRY_BYTES,
    seal_headers,
    segments,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAC_KEY_BYTES: Final = 32
TIMESTAMP_AT, KEY_ID_AT = 24, 38
MOST_SIGNED_CHUNK_BYTES = 65_507 - TELEMETRY_BYTES - SKY_BYTES - REF_BYTES - MAC_BYTES
"""What fits into an answer beside its MAC; a larger chunk is none of ours."""
_LONGEST_PACKET = 65_507
_LEAST_TIME_US, _LAST_TIME_US = -(1 << 63), (1 << 63) - 1
_COMMAND_BIT = 0x10
_BLOCK_BYTES = 64


@lru_cache(maxsize=32)
def _states(key: bytes) -> tuple[hashlib._Hash, hashlib._Hash]:
    """The inner and the outer hash of a key, begun: kept, they halve the time of a MAC."""
    padded = key.ljust(_BLOCK_BYTES, b"\0")
    inner, outer = (hashlib.sha256(bytes(byte ^ pad for byte in padded)) for pad in (0x36, 0x5C))
    return inner, outer


def mac_of(key: bytes, time_high: int, head: Buffer, sky: int) -> bytes:
    """The MAC that follows ``head``, a packet up to there."""
    covered = bytearray(head)
    covered[sky + MUTABLE_AT : sky + MUTABLE_END] = bytes(MUTABLE_END - MUTABLE_AT)
    covered[sky + CRC_AT : sky + SKY_BYTES] = bytes(SKY_BYTES - CRC_AT)
    inner, outer = (state.copy() for state in _states(key))
    inner.update((time_high & 0xFFFFFFFF).to_bytes(4, "big") + covered)
    outer.update(inner.digest())
    return outer.digest()[:MAC_BYTES]


def sign_packets(
    headers: Buffer, header_bytes: int, sky_offset: int, key: bytes, key_id: int, time_us: int
) -> bytearray:  # fmt: skip
    """Rows of ``header_bytes``, each a packet but for its payload, with their MACs: 16 bytes longer each, sealed.

    ``sky_offset`` is 8 for commands, which get ``time_us`` as their time, and 16 for telemetry (``time_us`` 0).

    Raises:
        ValueError: a packet that would be too long, no whole number of rows, another offset or key id.
    """
    rows = memoryview(headers).cast("B")
    _check_offset(sky_offset)
    if (
        header_bytes < sky_offset + SKY_BYTES
        or len(rows) % header_bytes
        or len(key) != MAC_KEY_BYTES
        or not 1 <= key_id <= 0xFFFF
    ):
        raise ValueError(f"{len(rows)} bytes of headers in rows of {header_bytes}, key {key_id} of {len(key)} bytes")
    signed = bytearray()
    for at in range(0, len(rows), header_bytes):
        row = bytearray(rows[at : at + header_bytes])
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
        signed += mac_of(key, time_us >> 32, row, sky_offset)
    seal_headers(signed, header_bytes + MAC_BYTES, sky_offset)
    return signed


def check_macs(
    data: Buffer, segment_bytes: int, sky_offset: int, keys: Mapping[int, bytes], now_us: int, skew_us: int
) -> list[int | None]:  # fmt: skip
    """When each packet of a run was sent, in microseconds (0 for telemetry); None for one that is not authentic.

    Not authentic is what has no MAC, a wrong one, one by a key that is not among ``keys``, or (commands) a time more
    than ``skew_us`` from ``now_us``; and a chunk that no answer could carry with its MAC. No checksum is looked at.
    """
    _check_offset(sky_offset)
    return [_sent_us(packet, sky_offset, keys, now_us, skew_us) for packet in segments(data, segment_bytes)]


def _sent_us(packet: memoryview, sky: int, keys: Mapping[int, bytes], now_us: int, skew_us: int) -> int | None:
    end = _mac_end(packet, sky)
    if not end:
        return None
    sent_us = 0
    if sky == COMMAND_BYTES:
        low = int.from_bytes(packet[sky + TIMESTAMP_AT : sky + TIMESTAMP_AT + 4], "big")
        ahead_us = (low - now_us + (1 << 31)) % (1 << 32) - (1 << 31)
        sent_us = now_us + ahead_us
        if abs(ahead_us) > skew_us or not _LEAST_TIME_US <= sent_us <= _LAST_TIME_US:
            return None
    key = keys.get(int.from_bytes(packet[sky + KEY_ID_AT : sky + KEY_ID_AT + 2], "big"))
    if key is None:
        return None
    expected = mac_of(key, sent_us >> 32, packet[: end - MAC_BYTES], sky)
    return sent_us if hmac.compare_digest(expected, packet[end - MAC_BYTES : end]) else None


def strip_macs(data: Buffer, segment_bytes: int, sky_offset: int, keep: Buffer) -> bytearray:
    """The packets of a run without their MACs, sealed, end to end: of those that ``keep`` (a byte each) is not 0 for.

    Raises:
        ValueError: one to keep has no MAC, or ``keep`` is not as long as the run.
    """
    _check_offset(sky_offset)
    packets, wanted = segments(data, segment_bytes), bytes(keep)
    if len(packets) != len(wanted):
        raise ValueError(f"{len(packets)} packets, {len(wanted)} of which are to be kept or not")
    plain = bytearray()
    for packet, kept in zip(packets, wanted, strict=True):
        if not kept:
            continue
        end = _mac_end(packet, sky_offset)
        if not end:
            raise ValueError("a packet to keep without a MAC")
        head = bytearray(packet[: end - MAC_BYTES])
        head[4:6] = (len(packet) - MAC_BYTES - 7 & 0xFFFF).to_bytes(2, "big")
        head[sky_offset + FLAGS_AT] &= ~AUTHENTICATED & 0xFF
        head[sky_offset + KEY_ID_AT : sky_offset + KEY_ID_AT + 2] = b"\0\0"
        seal_headers(head, len(head), sky_offset)
        plain += head
        plain += packet[end:]
    return plain


def _mac_end(packet: memoryview, sky: int) -> int:
    """Where the MAC of such a packet ends: 0 for one without, or too short, or larger than any of ours."""
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
