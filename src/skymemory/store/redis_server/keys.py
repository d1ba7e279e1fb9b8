r"""Mapping between the protocol's keys and the store's keys (see ``commands``).

Patterns of KEYS and SCAN: ``*``, ``?``, ``[abc]``, ``[^a-z]``, and ``\`` before a literal, as in Redis.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from skymemory.errors import InvalidInput
from skymemory.kv.codec.codec_base import RAW
from skymemory.kv.value import ValueHeader
from skymemory.store.base import KEY_BYTES
from skymemory.store.named_values import named_key
from skymemory.store.redis import NAMESPACE, TRAILER_BYTES

_ODD_NAME = "\0bytes:"  # prefix of the name of a key that is not text


@dataclass(frozen=True, slots=True)
class Key:
    """Client's key: the store's key, and the name (empty: a block)."""

    stored: bytes
    name: str = ""

    @classmethod
    def of(cls, key: bytes) -> Key:
        return _key_of(key)

    @classmethod
    def of_bytes(cls, key: bytes) -> Key:
        """Return the key that a client sent: a block's, or a name. Bytes that are no text get a prefix."""
        if key.startswith(NAMESPACE) and len(key) == len(NAMESPACE) + KEY_BYTES:
            return cls(key[len(NAMESPACE) :])
        try:
            name = key.decode()
        except UnicodeDecodeError:
            return cls(named_key(odd := _ODD_NAME + key.decode("latin-1")), odd)
        if name.startswith(_ODD_NAME):
            raise InvalidInput("a key that begins with \\0bytes: is the name of another key here: use another")
        return cls(named_key(name), name)

    def overhead(self) -> int:
        """Return how much longer the stored value is than the client's."""
        return ValueHeader(RAW.codec_id, 0, 0, name=self.name).header_bytes if self.name else -TRAILER_BYTES

    def front(self, size_bytes: int) -> bytes:
        """Return the header stored before a value."""
        return ValueHeader(RAW.codec_id, size_bytes, size_bytes, name=self.name).pack() if self.name else b""


_key_of = lru_cache(256)(Key.of_bytes)  # cache of digests: a SET needs its key's twice, a GET after EXISTS again


def client_key(name: str) -> bytes:
    odd = name.startswith(_ODD_NAME)
    return name.removeprefix(_ODD_NAME).encode("latin-1") if odd else name.encode()


MAX_PATTERN_BYTES = 1024
"""Size limit: compiling takes quadratic time."""


def pattern_of(glob: bytes) -> re.Pattern[bytes] | None:
    """Compile a pattern for complete names, matched in linear time for each ``*``. None if too long."""
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
    """Translate the characters in ``[…]``; return them, and the position after."""
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
