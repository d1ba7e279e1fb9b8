r"""Patterns of KEYS and SCAN: ``*``, ``?``, ``[abc]``, ``[^a-z]``, and ``\`` before a literal, as in Redis."""

from __future__ import annotations

import re

MAX_PATTERN_BYTES = 1024
"""Size limit: compiling takes quadratic time, and compiled patterns are cached."""


def pattern_of(glob: bytes) -> re.Pattern[bytes] | None:
    """Compile a pattern for complete names, matched in time linear in the name for each ``*``: skipped text is not
    tried again. None if it is too long.
    """
    if len(glob) > MAX_PATTERN_BYTES:
        return None
    parts: list[bytes] = [b""]
    at = 0
    while at < len(glob):
        byte, at = glob[at : at + 1], at + 1
        if byte == b"*":
            parts.append(b"")
        elif byte == b"?":
            parts[-1] += b"."
        elif byte == b"[":
            character_set, at = _one_of(glob, at)
            parts[-1] += character_set
        else:
            if byte == b"\\" and at < len(glob):
                byte, at = glob[at : at + 1], at + 1
            parts[-1] += re.escape(byte)
    first, *later_parts = parts
    if not later_parts:
        return re.compile(first + rb"\Z", re.DOTALL)
    *between, last = later_parts
    inner = b"".join(b"(?>.*?" + part + b")" for part in between if part)
    return re.compile(first + inner + b".*" + last + rb"\Z", re.DOTALL)


def _one_of(glob: bytes, at: int) -> tuple[bytes, int]:
    excluded = glob[at : at + 1] == b"^"
    at += excluded
    members = b""
    while at < len(glob) and glob[at : at + 1] != b"]":
        if glob[at : at + 1] == b"\\" and at + 1 < len(glob):
            at += 1
        low = high = glob[at]
        if glob[at + 1 : at + 2] == b"-" and at + 2 < len(glob):
            low, high = sorted((glob[at], glob[at + 2]))
            at += 2
        members += rb"\x%02x-\x%02x" % (low, high)
        at += 1
    if not members:
        return (b"." if excluded else b"(?!)"), at + 1
    return (b"[^" if excluded else b"[") + members + b"]", at + 1
