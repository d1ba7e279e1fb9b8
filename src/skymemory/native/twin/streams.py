"""Values from stream sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skymemory.native.twin.udp import borrowed

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["receive_all"]


def receive_all(fd: int, head: Buffer, size_bytes: int) -> bytes:
    """``head`` and the next ``size_bytes`` from the stream socket ``fd``, as one piece of memory.

    Raises:
        ConnectionError: the stream ended before.
        OSError: the socket's own timeout has passed (``SO_RCVTIMEO``), or another fault of it.
    """
    sock = borrowed(fd)
    data = bytearray(len(memoryview(head).cast("B")) + size_bytes)
    data[: len(data) - size_bytes] = memoryview(head).cast("B")
    try:
        view = memoryview(data)[len(data) - size_bytes :]
        while view:
            received = sock.recv_into(view)
            if not received:
                raise ConnectionError(f"the stream ended {len(view)} bytes before the value did")
            view = view[received:]
    finally:
        sock.detach()
    return bytes(data)
