"""Who may change what is stored under a key, now: a value on its way between tiers must not undo a put or a delete.

Putting and deleting wait for their keys; moving (promotion, demotion, write-back) takes those that are free. A load
notes the versions of its keys, so that what it read is promoted only if nobody has changed the key since.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

_STRIPES = 4096
"""Versions are kept by stripe, not by key: two keys of one stripe cost a promotion now and then, nothing else."""


class KeyGuard:
    """May be used from any thread; not reentrant."""

    def __init__(self) -> None:
        self._freed = threading.Condition()
        self._busy: set[bytes] = set()
        self._versions = [0] * _STRIPES

    def versions(self, keys: Iterable[bytes]) -> dict[bytes, int]:
        with self._freed:
            return {key: self._versions[_stripe(key)] for key in keys}

    @contextmanager
    def changing(self, keys: Sequence[bytes], patience_s: float = math.inf) -> Iterator[bool]:
        """Hold all of ``keys``, once nobody else does, to put or delete; gives False, and holds none of them, where
        that is not so within ``patience_s``.
        """
        mine = set(keys)
        with self._freed:
            timeout_s = patience_s if patience_s < math.inf else None
            free = self._freed.wait_for(lambda: not self._busy & mine, timeout_s)
            if free:
                self._busy |= mine
        if not free:
            yield False
            return
        try:
            yield True
        finally:
            with self._freed:
                for key in mine:
                    self._versions[_stripe(key)] += 1
                self._busy -= mine
                self._freed.notify_all()

    @contextmanager
    def moving(self, keys: Iterable[bytes], versions: dict[bytes, int] | None = None) -> Iterator[set[bytes]]:
        """Hold those of ``keys`` that nobody holds, and that have still the given ``versions``; gives which."""
        with self._freed:
            mine = {
                key for key in keys
                if key not in self._busy and (versions is None or versions.get(key) == self._versions[_stripe(key)])
            }  # fmt: skip
            self._busy |= mine
        try:
            yield mine
        finally:
            with self._freed:
                self._busy -= mine
                self._freed.notify_all()


def _stripe(key: bytes) -> int:
    return int.from_bytes(key[:2], "big") % _STRIPES
