"""Hashes of words that are the same on every machine, for strategies that place requests by hashing."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from skymemory.conductor.request import Request

_MASK = (1 << 64) - 1


def hash_words(*words: bytes) -> int:
    """64 bits of several words; each with its length, so that no two lists of words are confused."""
    state = blake2b(digest_size=8)
    for word in words:
        state.update(len(word).to_bytes(8, "little"))
        state.update(word)
    return int.from_bytes(state.digest(), "little")


def scope_of(request: Request) -> tuple[bytes, bytes, bytes]:
    """What separates caches whatever the text: model, adapter, salt."""
    return request.model.encode(), request.adapter.encode(), request.salt.encode()


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each of ``values`` scattered over 64 bits (the finish of splitmix64)."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class NameHashes:
    """Hashes of server names, each computed once."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}

    def of(self, name: str) -> int:
        known = self._of.get(name)
        if known is None:
            if len(self._of) >= 4096:
                self._of.clear()
            known = self._of[name] = hash_words(name.encode())
        return known
