"""Batched UDP calls, with segmentation offload if available; small packets; stream sockets' values and requests.

``UDP_SEGMENT`` sends a run of equally long datagrams; ``UDP_GRO`` delivers such a run in a single receive. Sources:
udp(7), Linux ``net/ipv4/udp.c``.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from skymemory.native.twin.segments import (
    COMMAND_BYTES,
    SKY_BYTES,
    TELEMETRY_BYTES,
    UNSEGMENTED,
    check_header,
    seal_headers,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer


SLOT_BYTES = 65_536
MAX_RUN_BYTES = 65_507
MAX_RUN_SEGMENTS = 64
SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104

_INT = struct.Struct("=i")
_GSO = struct.Struct("=H")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_INT.size)
TRY_LATER = frozenset((errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS, errno.EINTR))
_NO_OFFLOAD = frozenset((errno.EINVAL, errno.EIO, errno.EOPNOTSUPP, errno.EMSGSIZE, errno.ENOPROTOOPT))

Arrival = tuple[int, int, int, str, int]
"""Offset in the scratch buffer, bytes, bytes of a segment (at least 1), host, port."""


def borrowed(fd: int) -> socket.socket:
    if fd < 0:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return socket.socket(type=socket.SOCK_DGRAM, proto=0, fileno=fd)


def check_endpoint(host: str, port: int) -> None:
    """Raise ``ValueError`` unless the host is an IP address, ``OverflowError`` for an invalid port."""
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    except OSError as error:
        raise ValueError(f"host {host!r}: expected an IPv4 or IPv6 address") from error
    if not 0 <= port <= 0xFFFF:
        raise OverflowError(f"port {port}: expected 0 to 65535")


def recv_batch(fd: int, scratch: Buffer, slots: int) -> list[Arrival]:
    """Receive pending runs, at most ``slots``; run ``i`` at ``i * 65,536`` of writable ``scratch``. Never blocks.

    Raises:
        OSError: the socket's pending error; the next call continues.
    """
    view = memoryview(scratch).cast("B")
    if view.readonly:
        raise BufferError("scratch: expected a writable buffer")
    if slots < 1 or len(view) < slots * SLOT_BYTES:
        raise ValueError(f"{len(view)} bytes of scratch for {slots} slots: expected {SLOT_BYTES} for each of 1 or more")
    arrivals: list[Arrival] = []
    sock = borrowed(fd)
    try:
        for slot in range(slots):
            at = slot * SLOT_BYTES
            try:
                size, ancillary, _flags, source = sock.recvmsg_into(
                    [view[at : at + SLOT_BYTES]], _ANCILLARY_BYTES, socket.MSG_DONTWAIT
                )
            except OSError as error:
                if error.errno in TRY_LATER or arrivals:
                    break
                raise
            segment = size
            for level, kind, value in ancillary:
                if (level, kind) == (SOL_UDP, UDP_GRO) and len(value) >= _INT.size:
                    segment = _INT.unpack_from(value)[0]
            arrivals.append((at, size, max(1, segment), *source[:2]))
    finally:
        sock.detach()
    return arrivals


def runs(sizes: Sequence[int], offload: bool) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of datagrams that segmentation offload can send together: of equal size, the last maybe
    shorter.
    """
    first = 0
    while first < len(sizes):
        end, total = first + 1, sizes[first]
        while (
            offload
            and 0 < sizes[end - 1] == sizes[first]
            and end < len(sizes)
            and 0 < sizes[end] <= sizes[first]
            and end - first < MAX_RUN_SEGMENTS
            and total + sizes[end] <= MAX_RUN_BYTES
        ):
            total += sizes[end]
            end += 1
        yield first, end
        first = end


def send_batch(
    fd: int, host: str, port: int, headers: Buffer, header_bytes: int, payloads: Sequence[Buffer] | None
) -> int:
    """Send segments ``headers[i·header_bytes:][:header_bytes] + payloads[i]``; return the number accepted, fewer at
    full buffers. Without ``payloads``, ``headers`` is a run of segments.

    Raises:
        OSError: nothing was sent, for another reason than full buffers.
    """
    view = memoryview(headers).cast("B")
    if header_bytes < 1:
        raise ValueError(f"headers of {header_bytes} bytes: expected 1 or more")
    check_endpoint(host, port)
    parts = [[view[at : at + header_bytes]] for at in range(0, len(view), header_bytes)]
    if payloads is not None:
        if len(payloads) * header_bytes != len(view):
            raise ValueError(f"{len(view)} bytes of headers of {header_bytes} for {len(payloads)} payloads")
        for part, payload in zip(parts, payloads, strict=True):
            part.append(memoryview(payload).cast("B"))
    sizes = [sum(map(len, part)) for part in parts]
    if max(sizes, default=0) > MAX_RUN_BYTES:
        raise ValueError(f"a segment of {max(sizes)} bytes: a datagram has at most {MAX_RUN_BYTES}")
    sock = borrowed(fd)
    try:
        return _send_runs(sock, (host, port), parts, sizes)
    finally:
        sock.detach()


def send_slices(
    fd: int,
    host: str,
    port: int,
    headers: Buffer,
    header_bytes: int,
    slices: tuple[Buffer, int, int, int],
) -> int:
    """Run ``send_batch`` with ``slices`` as payloads: of a value, by chunk size, chunks from a first on, by a step."""
    value, chunk_bytes, first, step = slices
    view, size = memoryview(value).cast("B"), memoryview(headers).nbytes
    if header_bytes < 1 or size % header_bytes:
        raise ValueError(f"{size} bytes of headers of {header_bytes}: expected a whole number of them")
    count = size // header_bytes
    last = len(view) // chunk_bytes if chunk_bytes > 0 else -1
    if first < 0 or step < 1 or first > last or first + (count - 1) * step > last:
        raise ValueError(f"chunks of {chunk_bytes} bytes from {first} by {step}: beyond a value of {len(view)}")
    if chunk_bytes > MAX_RUN_BYTES - header_bytes:
        raise ValueError(f"a segment of {header_bytes} and {chunk_bytes} bytes: a datagram has at most {MAX_RUN_BYTES}")
    starts = range(first * chunk_bytes, (first + count * step) * chunk_bytes, step * chunk_bytes)
    return send_batch(fd, host, port, headers, header_bytes, [view[at : at + chunk_bytes] for at in starts])


def _send_runs(sock: socket.socket, address: tuple[str, int], parts: list[list[memoryview]], sizes: list[int]) -> int:
    """Send datagrams in runs, or singly if the device has no offload. Return how many were accepted."""
    sent, offload = 0, True
    while sent < len(parts):
        first, end = next(runs(sizes[sent : sent + MAX_RUN_SEGMENTS], offload))
        ancillary = [(SOL_UDP, UDP_SEGMENT, _GSO.pack(sizes[sent]))] if end - first > 1 else []
        buffers = [buffer for part in parts[sent : sent + end] for buffer in part]
        try:
            sock.sendmsg(buffers, ancillary, socket.MSG_DONTWAIT, address)
        except OSError as error:
            # A device without offload: one datagram per segment from now on.
            if ancillary and error.errno in _NO_OFFLOAD:
                offload = False
                continue
            if error.errno in TRY_LATER or sent:
                break
            raise
        sent += end
    return sent


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
    """Return sealed command packets from rows: destination, source, request id, body. ``prefix``: the 52 bytes of both
    headers.
    """
    first = bytes(prefix)
    if len(first) != COMMAND_BYTES + SKY_BYTES or sequence < 0:
        raise ValueError(
            f"a prefix of {len(first)} bytes, sequence {sequence}: expected {COMMAND_BYTES + SKY_BYTES}, and 0 or more"
        )
    packets = []
    for count, (destination, source, request, body) in enumerate(tuple(rows), sequence):
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
    """Parse a plain acknowledgement; None unless valid, of status 0, with a full selection."""
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
    if int.from_bytes(bitmap, "little") + 1 != 1 << count:  # a gap: the general parser reads those
        return None
    return request, ground, timestamp, slot_moves, plane_moves, credit, key, first - 1, stride, count


def send_each(fd: int, packets: Sequence[tuple[Buffer, str, int]], first: int) -> int:
    """Send ``packets`` from ``first`` on, at most 64, each to its host and port; return the number accepted. Raises
    OSError as ``send_batch``.
    """
    if first < 0:
        raise ValueError(f"first packet {first}: expected 0 or more")
    chosen = packets[first : first + _PACKETS_A_CALL]
    for packet, host, port in chosen:
        check_endpoint(host, port)
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


_ARRAY, _BULK = re.compile(rb"\*([0-9]{1,12})\r\n"), re.compile(rb"\$([0-9]{1,12})\r\n")


def request_words(
    data: bytes | bytearray, at: int, missing: int, most_words: int, most_bytes: int, room_bytes: int
) -> tuple[list[bytes], int, int]:
    """Return complete words in ``data`` from ``at`` on, their end, and the number of missing words. ``missing``: words
    missing so far; 0: the request begins here.

    Stops before a word that is incomplete, too large, or not written as clients do; ``store.redis_server.protocol``
    finds the reason.
    """
    if min(at, missing, most_words, most_bytes, room_bytes) < 0:
        raise ValueError("request_words: a number is below 0")
    words: list[bytes] = []
    if not missing:
        array = _ARRAY.match(data, at)
        if array is None or not 0 < int(array[1]) <= most_words:
            return words, at, 0
        missing, at = int(array[1]), array.end()
    while missing and (bulk := _BULK.match(data, at)) is not None:
        begin, size_bytes = bulk.end(), int(bulk[1])
        end = begin + size_bytes
        if size_bytes > min(most_bytes, room_bytes) or data[end : end + 2] != b"\r\n":
            break
        words.append(bytes(data[begin:end]))
        at, missing, room_bytes = end + 2, missing - 1, room_bytes - size_bytes
    return words, at, missing


def receive_all(fd: int, head: Buffer, size_bytes: int, timeout_s: float, tail: bytearray | memoryview) -> bytes:
    """Receive ``size_bytes`` after ``head`` from a stream socket; later bytes fill ``tail``.

    Raises:
        ConnectionError: the stream ended too early.
        TimeoutError: too late, noticed when bytes arrive.
        OSError: the socket's own timeout, or another error.
    """
    if size_bytes < 0:
        raise ValueError(f"{size_bytes} bytes")
    until_s = time.monotonic() + timeout_s
    start = memoryview(head).cast("B")
    data = bytearray(len(start) + size_bytes)
    data[: len(start)] = start
    sock = borrowed(fd)
    try:
        parts = [memoryview(data)[len(start) :], memoryview(tail)]
        missing_bytes = size_bytes + len(tail)
        while missing_bytes:
            received, *_ = sock.recvmsg_into([part for part in parts if part], 0, socket.MSG_WAITALL)
            if not received:
                raise ConnectionError(f"the stream ended {missing_bytes} bytes before the value did")
            missing_bytes -= received
            first_bytes = min(received, len(parts[0]))
            parts = [parts[0][first_bytes:], parts[1][received - first_bytes :]]
            if missing_bytes and time.monotonic() > until_s:
                raise TimeoutError(f"{missing_bytes} bytes of the value did not come in time")
    finally:
        sock.detach()
    return bytes(data)
