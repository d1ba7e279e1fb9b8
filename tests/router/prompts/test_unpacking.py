"""Compressed bodies."""

from __future__ import annotations

import gzip
import zlib

import pytest

from skymemory.router.api_error import ApiError
from skymemory.router.prompts.unpacking import MAX_MEMBERS, unpacked

BODY = b'{"prompt": "abc"}' * 10


def test_all_members_of_a_gzip_body_are_read() -> None:
    """RFC 1952, section 2.2."""
    assert unpacked(gzip.compress(BODY[:5]) + gzip.compress(b"") + gzip.compress(BODY[5:]), b"gzip", 1000) == BODY
    assert unpacked(gzip.compress(BODY) + b"\0\0\0", b"gzip", 1000) == BODY, "padding"
    assert unpacked(zlib.compress(BODY), b"deflate", 1000) == BODY


@pytest.mark.parametrize(
    ("packed", "status"),
    [
        (gzip.compress(BODY)[:-3], 400),
        (gzip.compress(BODY) + gzip.compress(BODY)[:-9], 400),
        (gzip.compress(BODY) * 6, 413),
        (gzip.compress(b"") * (MAX_MEMBERS + 1), 400),
        (b"", 400),
    ],
    ids=["cut off", "its second member cut off", "too large", "too many members", "empty"],
)
def test_what_is_incomplete_or_too_large_is_refused(packed: bytes, status: int) -> None:
    with pytest.raises(ApiError) as caught:
        unpacked(packed, b"gzip", 1000)
    assert caught.value.status == status
