"""MACs of packets: made, checked, taken off again. What is signed is a plain packet; what is opened is one again.

An authenticated packet is the plain one with flag 0x01 and the key's id in its SKY header, and 16 bytes more at the end
of its body: HMAC-SHA-256, cut to 16 bytes, over the high half of the sender's time in microseconds (4 bytes, not sent:
the receiver knows it within 35 minutes) and the packet up to there, its CRC and what forwarders change taken as zero.
The payload of SET, MIGRATE and DATA follows behind and is not covered, as the header CRC does not cover it: the chunk
reference is, and with it key, number, length and CRC-32. Nobody who forwards or stores rereads a payload; that it is
what its writer wrote is for the writer's tenant to know (``store.sealed``), who shares no key with satellites.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from skymemory import native
from skymemory.errors import ValueTooLarge
from skymemory.keys import KeyRing
from skymemory.protocol.segments import SegmentBatch
from skymemory.protocol.space_packet import COMMAND_BYTES, MAX_PACKET_BYTES, TELEMETRY_BYTES
from skymemory.protocol.wire import (
    CHUNK_REF_BYTES,
    CRC_OFFSET,
    MAX_CHUNK_BYTES,
    MUTABLE_OFFSET,
    SKY_BYTES,
    Op,
)

FLAG_AUTHENTICATED = 0x01
MAC_BYTES = 16
FLAGS_OFFSET, KEY_ID_OFFSET, TIMESTAMP_OFFSET = 2, 38, 24
"""Within the SKY header."""
MAX_SIGNED_CHUNK_BYTES = MAX_CHUNK_BYTES - MAC_BYTES
"""The largest chunk where packets carry a MAC (65,359 bytes)."""
CARRIERS = (Op.SET, Op.MIGRATE, Op.DATA)
"""Operations with a payload behind the body."""

_PURPOSE = b"skymemory packets 1"
_ZEROS = bytes(4)
_COMMAND_BIT = 0x10


class Mac:
    """HMAC-SHA-256 under one key; the two hash states that depend on the key alone are kept, which halves its time."""

    def __init__(self, key: bytes) -> None:
        padded = key.ljust(64, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))

    def of(self, time_high: int, covered: bytes | bytearray) -> bytes:
        inner = self._inner.copy()
        inner.update((time_high & 0xFFFFFFFF).to_bytes(4, "big") + covered)
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer.digest()[:MAC_BYTES]


@dataclass(slots=True)
class Authority:
    """Who may command: a ring that may be replaced at any time. ``every_packet``: answers carry a MAC too."""

    ring: KeyRing
    every_packet: bool = False
    _macs: tuple[KeyRing, dict[int, Mac]] | None = None

    def mac(self, key_id: int) -> Mac | None:
        """None for a key that is not (or no longer) accepted."""
        if self._macs is None or self._macs[0] is not self.ring:
            self._macs = (self.ring, {key.key_id: Mac(key.derive(_PURPOSE)) for key in self.ring.keys})
        return self._macs[1].get(key_id)

    def sign(self, batch: SegmentBatch, now_s: float) -> SegmentBatch:
        """The packets of a batch (plain and sealed, each row one packet) with MACs. Commands get ``now_s`` as time.

        Raises:
            ValueTooLarge: a chunk so large that its packet has no room for a MAC.
        """
        key_id = self.ring.active(now_s).key_id
        mac = self.mac(key_id)
        command = bool(batch.headers[0] & _COMMAND_BIT)
        if mac is None or not (command or self.every_packet):
            return batch
        sky = COMMAND_BYTES if command else TELEMETRY_BYTES
        time_us = int(now_s * 1e6) if command else 0
        width, count = batch.header_bytes, batch.count
        mark = key_id.to_bytes(2, "big")
        low = (time_us & 0xFFFFFFFF).to_bytes(4, "big")
        signed = bytearray()
        for at in range(0, width * count, width):
            row = bytearray(batch.headers[at : at + width])
            total = int.from_bytes(row[4:6], "big") + MAC_BYTES
            if total + 7 > MAX_PACKET_BYTES:
                raise ValueTooLarge(
                    f"a packet of {total + 7} bytes with its MAC: at most {MAX_PACKET_BYTES}; use chunks of "
                    f"{MAX_SIGNED_CHUNK_BYTES} bytes at most"
                )
            row[4:6] = total.to_bytes(2, "big")
            row[sky + FLAGS_OFFSET] |= FLAG_AUTHENTICATED
            row[sky + KEY_ID_OFFSET : sky + KEY_ID_OFFSET + 2] = mark
            if command:
                row[sky + TIMESTAMP_OFFSET : sky + TIMESTAMP_OFFSET + 4] = low
            hops = row[sky + MUTABLE_OFFSET : sky + MUTABLE_OFFSET + 4]
            tag = mac.of(time_us >> 32, _without_changes(row, sky))
            row[sky + MUTABLE_OFFSET : sky + MUTABLE_OFFSET + 4] = hops
            signed += row
            signed += tag
        native.seal_headers(signed, width + MAC_BYTES, sky)
        return SegmentBatch(signed, width + MAC_BYTES, batch.payloads)


def _without_changes(row: bytearray, sky: int) -> bytearray:
    """What a MAC covers: the CRC, and what forwarders change, as zeros."""
    row[sky + MUTABLE_OFFSET : sky + MUTABLE_OFFSET + 4] = _ZEROS
    row[sky + CRC_OFFSET : sky + CRC_OFFSET + 4] = _ZEROS
    return row


def claims_mac(packet: memoryview, sky: int) -> bool:
    """Whether the packet, which has a whole SKY header, says that it carries a MAC."""
    return bool(packet[sky + FLAGS_OFFSET] & FLAG_AUTHENTICATED)


def opened(authority: Authority, packet: memoryview, sky: int, time_high: int) -> bytearray | None:
    """Headers and body of an authenticated packet as they were before it was signed, but for what no MAC covers
    (zeros) and the length field, if the MAC is right; else None.
    """
    carries = packet[sky + 1] in CARRIERS
    end = sky + SKY_BYTES + CHUNK_REF_BYTES + MAC_BYTES if carries else len(packet)
    if not sky + SKY_BYTES + MAC_BYTES <= end <= len(packet):
        return None
    mac = authority.mac(int.from_bytes(packet[sky + KEY_ID_OFFSET : sky + KEY_ID_OFFSET + 2], "big"))
    head = _without_changes(bytearray(packet[: end - MAC_BYTES]), sky)
    if mac is None or not hmac.compare_digest(mac.of(time_high, head), packet[end - MAC_BYTES : end]):
        return None
    head[sky + FLAGS_OFFSET] &= ~FLAG_AUTHENTICATED & 0xFF
    head[sky + KEY_ID_OFFSET : sky + KEY_ID_OFFSET + 2] = b"\0\0"
    return head


def without_mac(head: bytearray, sky: int) -> bytearray:
    """The plain packet, sealed, of one without a payload, from what ``opened`` returned of it."""
    head[4:6] = (len(head) - 7).to_bytes(2, "big")
    native.seal_headers(head, len(head), sky)
    return head


def without_macs(packets: list[tuple[memoryview, bytearray]], sky: int) -> memoryview:
    """Plain packets, sealed, end to end, of authenticated ones each with what ``opened`` returned of it. All but the
    last are equally long.
    """
    rows, plain = b"".join(head for _, head in packets), bytearray()
    width = len(packets[0][1])
    heads = bytearray(rows)
    for at, (packet, _) in zip(range(0, len(heads), width), packets, strict=True):
        heads[at + 4 : at + 6] = (len(packet) - MAC_BYTES - 7).to_bytes(2, "big")
    native.seal_headers(heads, width, sky)
    for at, (packet, _) in zip(range(0, len(heads), width), packets, strict=True):
        plain += heads[at : at + width]
        plain += packet[width + MAC_BYTES :]
    return memoryview(plain)
