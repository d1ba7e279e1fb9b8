"""Frames of HTTP/2 (RFC 9113), the limits that we keep to, and headers as literals (RFC 7541)."""

from __future__ import annotations

import struct
from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME_BYTES = 64 << 10
"""That we take; Envoy sends 16 KiB, whatever it is told."""
WINDOW_BYTES = 1 << 20
"""That a stream may have sent and we not yet dealt with; the connection has sixteen times as much."""
CONNECTION_WINDOW_BYTES = 16 << 20
MAX_HEADER_BYTES = 64 << 10
MAX_PENDING_BYTES = 1 << 20
"""While more than this waits for the peer's window of a stream, the peer gets no more of ours for it."""
MAX_SETTINGS = 1_000
"""Times that a peer may change its mind; each costs a look at every stream."""

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = range(4)
FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR = range(6, 10)
ENHANCE_YOUR_CALM = 11
SET_MAX_STREAMS, SET_INITIAL_WINDOW, SET_MAX_FRAME, SET_MAX_HEADER_LIST = 3, 4, 5, 6
LARGEST_WINDOW = (1 << 31) - 1
FIRST_WINDOW, FIRST_FRAME_BYTES, LARGEST_FRAME_BYTES = 65_535, 16_384, (1 << 24) - 1
"""Of a peer that has said nothing else."""
HEAD = struct.Struct(">HBBBL")
WORD = struct.Struct(">L")
SETTING = struct.Struct(">HL")


class Fault(Exception):
    """The peer broke a rule of the connection; ``code`` is RFC 9113's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def unpadded(flags: int, payload: bytes) -> bytes:
    """
    Raises:
        Fault: there is less than the padding.
    """
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise Fault(PROTOCOL_ERROR, "more padding than there is")
    return payload[1 : len(payload) - payload[0]]


def literals(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A block of headers that says them as they are: it means the same whatever went before."""
    return b"".join(b"\x00" + _length(len(name)) + name + _length(len(value)) + value for name, value in headers)


def _length(count: int) -> bytes:
    """RFC 7541, 5.1, with a prefix of 7 bits."""
    if count < 127:
        return bytes((count,))
    count -= 127
    coded = bytearray((127,))
    while count >= 128:
        coded.append(count & 127 | 128)
        count >>= 7
    coded.append(count)
    return bytes(coded)
