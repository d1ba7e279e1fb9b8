"""MULTI, EXEC and WATCH: commands that wait for EXEC, and keys that must not change before it.

EXEC locks its commands' and all watched keys against this daemon's other writers, not readers. WATCH sees this daemon's
writes, expiry and eviction, so stores with other writers refuse it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from skymemory.store.redis_server.protocol import Framed, Word

MAX_WATCHED = 4096
_REQUEST_BYTES = 256
_WORD_BYTES = 64


@dataclass(slots=True)
class Transaction:
    """Commands between MULTI and EXEC. ``abort``: reason why EXEC will refuse."""

    requests: list[Sequence[Word]] = field(default_factory=list)
    size_bytes: int = 0
    abort: str = ""

    def add(self, words: Sequence[Word]) -> None:
        self.requests.append(words)
        self.size_bytes += _REQUEST_BYTES + sum(map(_size, words))

    def refuse(self, why: str) -> None:
        self.abort = self.abort or why
        self.requests.clear()
        self.size_bytes = 0


def _size(word: Word) -> int:
    return _WORD_BYTES + (len(word.data) if isinstance(word, Framed) else memoryview(word).nbytes)


@dataclass(slots=True, eq=False)
class WatchedKeys:
    keys: dict[bytes, bool] = field(default_factory=dict)
    is_changed: bool = False


class Watches:
    """Watched keys of all clients; a write marks their watches as changed. Thread-safe."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, set[WatchedKeys]] = {}
        self._lock = threading.Lock()

    def add(self, watch: WatchedKeys, keys: Sequence[bytes]) -> bool:
        """Watch ``keys``; False, adding none, beyond ``MAX_WATCHED``."""
        with self._lock:
            new = [key for key in dict.fromkeys(keys) if key not in watch.keys]
            if len(watch.keys) + len(new) > MAX_WATCHED:
                return False
            for key in new:
                watch.keys[key] = False
                self._by_key.setdefault(key, set()).add(watch)
        return True

    def end(self, watch: WatchedKeys) -> None:
        with self._lock:
            for key in watch.keys:
                watches = self._by_key[key]
                watches.discard(watch)
                if not watches:
                    del self._by_key[key]
            watch.keys, watch.is_changed = {}, False

    def on_write(self, keys: Sequence[bytes]) -> None:
        """Mark the watches as changed. The caller holds the keys' locks."""
        if not self._by_key:
            return
        with self._lock:
            for key in keys:
                for watch in self._by_key.get(key, ()):
                    watch.is_changed = True
