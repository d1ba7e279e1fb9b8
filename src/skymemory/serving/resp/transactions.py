"""MULTI, EXEC and WATCH: commands that wait for EXEC, and keys that must not change before it.

EXEC holds all keys of its commands, and those watched, against other writers through this daemon (``KeyLocks``): none
of them writes between two of its commands. Readers do not take these locks: who asks for two keys meanwhile may see one
of before and one of after. WATCH sees what this daemon's clients write, and what ends or is evicted; so it is refused
for stores to which others write, too.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from skymemory.serving.resp.protocol import Framed, Word

MAX_WATCHED = 4096
"""Of one client."""
_REQUEST_BYTES = 256
"""Memory of a request that waits, beside its words'."""
_WORD_BYTES = 64


@dataclass(slots=True)
class Transaction:
    """Commands between MULTI and EXEC. ``abort`` is why EXEC will refuse them; empty: it will not."""

    requests: list[Sequence[Word]] = field(default_factory=list)
    size_bytes: int = 0
    abort: str = ""

    def add(self, words: Sequence[Word]) -> None:
        self.requests.append(words)
        self.size_bytes += _REQUEST_BYTES + sum(map(_size, words))

    def refuse(self, why: str) -> None:
        """Nothing of it will be executed."""
        self.abort = self.abort or why
        self.requests.clear()
        self.size_bytes = 0


def _size(word: Word) -> int:
    return _WORD_BYTES + (len(word.data) if isinstance(word, Framed) else memoryview(word).nbytes)


@dataclass(slots=True, eq=False)
class Watch:
    """The keys that one client watches: by stored key, whether a value was there."""

    keys: dict[bytes, bool] = field(default_factory=dict)
    is_changed: bool = False


class Watches:
    """Those of all clients. Thread-safe."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, set[Watch]] = {}
        self._lock = threading.Lock()

    def add(self, watch: Watch, keys: Sequence[bytes]) -> bool:
        """From here on ``on_write`` reaches it. False: more than ``MAX_WATCHED`` keys, none is added."""
        with self._lock:
            new = [key for key in dict.fromkeys(keys) if key not in watch.keys]
            if len(watch.keys) + len(new) > MAX_WATCHED:
                return False
            for key in new:
                watch.keys[key] = False
                self._by_key.setdefault(key, set()).add(watch)
        return True

    def end(self, watch: Watch) -> None:
        with self._lock:
            for key in watch.keys:
                watches = self._by_key[key]
                watches.discard(watch)
                if not watches:
                    del self._by_key[key]
            watch.keys, watch.is_changed = {}, False

    def on_write(self, keys: Sequence[bytes]) -> None:
        """To be called while the keys are held against other writers."""
        if not self._by_key:
            return
        with self._lock:
            for key in keys:
                for watch in self._by_key.get(key, ()):
                    watch.is_changed = True
