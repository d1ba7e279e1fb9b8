"""Values from stream sockets."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from skymemory.native.twin.udp import borrowed

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["receive_all"]


def receive_all(fd: int, head: Buffer, size_bytes: int, timeout_s: float) -> bytes:
    """``head`` and the next ``size_bytes`` from the stream socket ``fd``, as one piece of memory.

    Raises:
        ConnectionError: the stream ended before.
        TimeoutError: they did not come within ``timeout_s``. Noticed when bytes come, or the socket's own timeout
            passes (``SO_RCVTIMEO``).
        OSError: none came for the socket's own timeout, or another fault of it.
    """
    if size_bytes < 0:
        raise ValueError(f"{size_bytes} bytes")
    until_s = time.monotonic() + timeout_s
    start = memoryview(head).cast("B")
    data = bytearray(len(start) + size_bytes)
    data[: len(start)] = start
    sock = borrowed(fd)
    try:
        view = memoryview(data)[len(start) :]
        while view:
            received = sock.recv_into(view, 0, socket.MSG_WAITALL)
            if not received:
                raise ConnectionError(f"the stream ended {len(view)} bytes before the value did")
            view = view[received:]
            if view and time.monotonic() > until_s:
                raise TimeoutError(f"{len(view)} bytes of the value did not come in time")
    finally:
        sock.detach()
    return bytes(data)
