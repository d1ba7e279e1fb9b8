"""Decompression of bodies (Content-Encoding), within a limit."""

from __future__ import annotations

import zlib

from skymemory.router.api_error import ApiError

_NONE = (b"", b"identity")
_GZIP = b"\x1f\x8b"
MAX_MEMBERS = 256
"""Limit of members of a gzip body (RFC 1952, section 2.2): each is decompressed from a copy of the rest."""


def is_packed(content_encoding: bytes) -> bool:
    return content_encoding.strip().lower() not in _NONE


def unpacked(body: bytes, content_encoding: bytes, most_bytes: int) -> bytes:
    """Decompress a body, at most ``most_bytes``.

    Raises:
        ApiError: 415 (encoding), 400 (invalid data) or 413 (too large).
    """
    packed = content_encoding.strip().lower()
    if packed in _NONE:
        return body
    if packed not in (b"gzip", b"x-gzip", b"deflate"):
        name = packed[:40].decode("latin-1")
        raise ApiError(415, f"Content-Encoding {name!r} is not supported; gzip and deflate are")
    parts: list[bytes] = []
    remaining_bytes = most_bytes + 1
    for _ in range(MAX_MEMBERS):
        unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)  # detects gzip or zlib
        try:
            parts.append(unpacker.decompress(body, remaining_bytes))
        except zlib.error as error:
            raise ApiError(400, f"the body cannot be decompressed: {error}") from error
        remaining_bytes -= len(parts[-1])
        if remaining_bytes <= 0:
            raise ApiError(413, f"the body is too large; at most {most_bytes} bytes are allowed")
        if not unpacker.eof:
            raise ApiError(400, "the body cannot be decompressed: it ends too early")
        body = unpacker.unused_data
        if not body.startswith(_GZIP):
            return b"".join(parts) if len(parts) > 1 else parts[0]
    raise ApiError(400, f"the body has more than {MAX_MEMBERS} gzip members")
