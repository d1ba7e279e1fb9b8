"""Headers of HTTP: the twin, and what the compiled functions must do."""

from __future__ import annotations

from collections.abc import Sequence, Set

RawHeaders = Sequence[tuple[bytes, bytes]]
"""Names and values, as they came."""


def first_values(headers: RawHeaders) -> dict[bytes, bytes]:
    """Of each name, in small letters, the value that came first; in the order in which the names came."""
    first: dict[bytes, bytes] = {}
    for name, value in headers:
        first.setdefault(name.lower(), value)
    return first


def header_lines(headers: RawHeaders, left_out: Set[bytes]) -> bytes:
    """As lines, each with its end, but for those whose names, in small letters, are ``left_out``."""
    lines: list[bytes] = []
    for name, value in headers:
        if name.lower() not in left_out:
            lines += (name, b": ", value, b"\r\n")
    return b"".join(lines)
