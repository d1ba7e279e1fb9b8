"""Mapping between the protocol's keys and the store's keys (see ``commands``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from skymemory.errors import InvalidInput
from skymemory.kv.codec.base import RAW
from skymemory.kv.value import ValueHeader
from skymemory.store.base import KEY_BYTES
from skymemory.store.named import named_key
from skymemory.store.redis import NAMESPACE, TRAILER_BYTES

_ODD_NAME = "\0bytes:"
"""Prefix of the name of a key that is not text."""


@dataclass(frozen=True, slots=True)
class Key:
    """Key of the protocol and the store. ``name`` is empty for a block."""

    stored: bytes
    name: str = ""

    @classmethod
    def of(cls, key: bytes) -> Key:
        return _key_of(key)

    @classmethod
    def of_bytes(cls, key: bytes) -> Key:
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
        return ValueHeader(RAW.codec_id, 0, 0, name=self.name).header_bytes if self.name else -TRAILER_BYTES

    def front(self, size_bytes: int) -> bytes:
        return ValueHeader(RAW.codec_id, size_bytes, size_bytes, name=self.name).pack() if self.name else b""


_key_of = lru_cache(256)(Key.of_bytes)
"""Cache of digests: a SET needs its key's twice, a GET after EXISTS again."""


def client_key(name: str) -> bytes:
    odd = name.startswith(_ODD_NAME)
    return name.removeprefix(_ODD_NAME).encode("latin-1") if odd else name.encode()
