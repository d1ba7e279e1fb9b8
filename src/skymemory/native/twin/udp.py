"""Python twin of the batched UDP calls: many datagrams a call, with segmentation offload where the kernel
has it.

``UDP_SEGMENT`` lets one send carry a run of equally long datagrams (the last may be shorter); ``UDP_GRO``
delivers such a run in one receive and names the segment length. Sources: udp(7), Linux ``net/ipv4/udp.c``.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

SLOT_BYTES = 65_536
"""Room for one receive: a whole run of segments is at most 65,535 bytes."""
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
    """The socket ``fd`` as an object, to be detached, not closed."""
    if fd < 0:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 0, fileno=fd)


def recv_batch(fd: int, scratch: Buffer, slots: int) -> list[Arrival]:
    """All that waits at socket ``fd``, at most ``slots`` runs, run ``i`` at ``i * 65,536`` of writable
    ``scratch``.

    Never waits: an empty list when nothing is there.

    Raises:
        OSError: the socket's pending error (an ICMP answer, say); the next call reads on.
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
                size, ancillary, _flags, (host, port) = sock.recvmsg_into(
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
            arrivals.append((at, size, max(1, segment), host, port))
    finally:
        sock.detach()
    return arrivals


def runs(sizes: Sequence[int], offload: bool) -> Iterator[tuple[int, int]]:
    """Cut segments of these sizes into ``(first, end)`` runs that one offloaded send can carry."""
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
    """Send segments ``headers[i·header_bytes:][:header_bytes] + payloads[i]``; the number the kernel took.

    With ``payloads`` None, ``headers`` is a run of whole segments of ``header_bytes``, the last maybe
    shorter. Stops where the kernel's buffers are full; the caller sends the rest later. A device that
    refuses segmentation offload gets one datagram per segment. ``host`` is a dotted IPv4 address.

    Raises:
        OSError: nothing was sent, and for another reason than full buffers.
    """
    view = memoryview(headers).cast("B")
    if header_bytes < 1:
        raise ValueError(f"headers of {header_bytes} bytes: expected 1 or more")
    try:
        socket.inet_aton(host)
    except OSError as error:
        raise ValueError(f"host {host!r}: expected a dotted IPv4 address") from error
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
    fd: int, host: str, port: int, headers: Buffer, header_bytes: int, value: Buffer, chunk_bytes: int, first: int,
    step: int,
) -> int:  # fmt: skip
    """``send_batch`` of payloads that are chunks ``first``, ``first + step``, … of ``value``, one for every header."""
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
    sent, offload = 0, True
    while sent < len(parts):
        first, end = next(runs(sizes[sent : sent + MAX_RUN_SEGMENTS], offload))
        ancillary = [(SOL_UDP, UDP_SEGMENT, _GSO.pack(sizes[sent]))] if end - first > 1 else []
        buffers = [buffer for part in parts[sent : sent + end] for buffer in part]
        try:
            sock.sendmsg(buffers, ancillary, socket.MSG_DONTWAIT, address)
        except OSError as error:
            if ancillary and error.errno in _NO_OFFLOAD:
                offload = False
                continue
            if error.errno in TRY_LATER or sent:
                break
            raise
        sent += end
    return sent
