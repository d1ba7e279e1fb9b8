"""Frames of HTTP/2 by hand, for tests."""

from __future__ import annotations

import struct

from skymemory.router.envoy.grpc import http2 as h

REQUEST = [(":method", "POST"), (":path", "/service/Call"), (":scheme", "http"), ("content-type", "application/grpc")]
Frame = tuple[int, int, int, bytes]
"""Kind, flags, stream, payload."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">LBBL", len(payload), kind, flags, stream)[1:] + payload


def frames(data: bytes) -> list[Frame]:
    found, at = [], 0
    while at < len(data):
        high, low, kind, flags, stream = h.HEAD.unpack_from(data, at)
        end = at + 9 + (high << 8 | low)
        found.append((kind, flags, stream, data[at + 9 : end]))
        at = end
    return found


def word(value: int) -> bytes:
    return h.WORD.pack(value)


def setting(name: int, value: int) -> bytes:
    return h.SETTING.pack(name, value)
