"""Python twin of the calls for small packets: made of one prefix, sent each to its own address, and
the acknowledgement read at once."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from skymemory.native.twin_segments import (
    COMMAND_BYTES,
    SKY_BYTES,
    TELEMETRY_BYTES,
    UNSEGMENTED,
    check_header,
    seal_headers,
)
from skymemory.native.twin_udp import MAX_RUN_BYTES, TRY_LATER, borrowed

if TYPE_CHECKING:
    from typing_extensions import Buffer

_COUNT_AND_LENGTH = struct.Struct(">HH")
_ROUTE = struct.Struct(">II")
_WORD = struct.Struct(">I")
_SELECTION = struct.Struct(">32sIII")
_ANSWER = struct.Struct(">IIIIiiH")
_PACKETS_A_CALL = 64
ACK: Final = 0x41
_MOST_BITS = 1 << 16
_MOST_MOVES = 1 << 30

Ack = tuple[int, int, int, int, int, int, bytes, int, int, int]
"""Request id, ground host, echoed timestamp, slot moves, plane moves, credit; key, first index, stride, count."""


def command_packets(prefix: Buffer, sequence: int, rows: list[tuple[int, int, int, bytes]]) -> list[bytes]:
    """Sealed command packets that differ only in what each row says: destination, source, request id, body.

    ``prefix`` is the 52 bytes of both headers; sequence counts go up from ``sequence``.
    """
    first = bytes(prefix)
    if len(first) != COMMAND_BYTES + SKY_BYTES or sequence < 0:
        raise ValueError(
            f"a prefix of {len(first)} bytes, sequence {sequence}: expected {COMMAND_BYTES + SKY_BYTES}, and 0 or more"
        )
    packets = []
    for count, (destination, source, request, body) in enumerate(rows, sequence):
        packet = bytearray(first + body)
        if len(packet) > MAX_RUN_BYTES:
            raise ValueError(f"a body of {len(body)} bytes: no packet carries it")
        _COUNT_AND_LENGTH.pack_into(packet, 2, UNSEGMENTED << 14 | (count & 0x3FFF), len(packet) - 7)
        _ROUTE.pack_into(packet, COMMAND_BYTES + 4, destination & 0xFFFFFFFF, source & 0xFFFFFFFF)
        _WORD.pack_into(packet, COMMAND_BYTES + 16, request & 0xFFFFFFFF)
        seal_headers(packet, len(packet), COMMAND_BYTES)
        packets.append(bytes(packet))
    return packets


def open_ack(packet: Buffer) -> Ack | None:
    """What a plain acknowledgement says; None unless it is a sound ACK of status 0, every bit of its selection set."""
    view = memoryview(packet).cast("B")
    bitmap_at = TELEMETRY_BYTES + SKY_BYTES + _SELECTION.size
    if len(view) <= bitmap_at or view[0] & 0x10 or view[TELEMETRY_BYTES + 1] != ACK or view[TELEMETRY_BYTES + 3]:
        return None
    if check_header(view)[0]:
        return None
    ground, request, _, timestamp, slot_moves, plane_moves, credit = _ANSWER.unpack_from(view, TELEMETRY_BYTES + 12)
    key, first, stride, count = _SELECTION.unpack_from(view, TELEMETRY_BYTES + SKY_BYTES)
    if max(abs(slot_moves), abs(plane_moves)) > _MOST_MOVES or not (first and stride and 1 <= count <= _MOST_BITS):
        return None
    bitmap = bytes(view[bitmap_at:])
    if len(bitmap) != (count + 7) // 8 or first + stride * (count - 1) > 0xFFFFFFFF:
        return None
    if int.from_bytes(bitmap, "little") + 1 != 1 << count:
        return None
    return request, ground, timestamp, slot_moves, plane_moves, credit, key, first - 1, stride, count


def send_each(fd: int, packets: Sequence[tuple[Buffer, str, int]], first: int) -> int:
    """Send each of ``packets`` from ``first`` on, 64 at most, to its own host and port; the number the kernel took.

    Stops where the kernel's buffers are full, or at one that the network refuses.

    Raises:
        OSError: the very first was refused, for another reason than full buffers.
    """
    if first < 0:
        raise ValueError(f"first packet {first}: expected 0 or more")
    chosen = packets[first : first + _PACKETS_A_CALL]
    for packet, host, port in chosen:
        try:
            socket.inet_aton(host)
        except OSError as error:
            raise ValueError(f"host {host!r}: expected a dotted IPv4 address") from error
        if not 0 <= port <= 0xFFFF:
            raise OverflowError(f"port {port}: expected 0 to 65535")
        if memoryview(packet).nbytes > MAX_RUN_BYTES:
            raise ValueError(f"a segment of {memoryview(packet).nbytes} bytes: a datagram has at most {MAX_RUN_BYTES}")
    sock = borrowed(fd)
    try:
        for sent, (packet, host, port) in enumerate(chosen):
            try:
                sock.sendto(packet, socket.MSG_DONTWAIT, (host, port))
            except OSError as error:
                if sent or error.errno in TRY_LATER:
                    return sent
                raise
    finally:
        sock.detach()
    return len(chosen)
