"""Keys whose copy in a tier may be outdated: a put of a value that may change, or a delete, did not reach it or was not
heard to.

Such a copy is not read, not counted as present and not written over until it has been deleted, or what was given up
has landed after all. A call that was given up may still land: while one is under way, a deletion would prove nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import islice

from skymemory.kv.block import Place


class Doubts:
    """At most ``limit`` keys, else ``full``: whoever writes must then refuse. May be used from any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._keys: dict[bytes, int] = {}
        """When each came into doubt last, by ``_count``."""
        self._count = 0
        self._deleted: set[bytes] = set()
        """Those of them for which a deletion is outstanding."""
        self._under_way: dict[bytes, int] = {}
        """How many calls about each, in doubt or not, were given up and may still land."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    @property
    def full(self) -> bool:
        return len(self._keys) >= self._limit

    def unsettled(self, key: bytes) -> bool:
        """Whether it is in doubt, or what was given up may still change it."""
        return key in self._keys or key in self._under_way

    def add(self, keys: Iterable[bytes], deleted: bool = False) -> int:
        """In doubt from now on; ``deleted``: a caller's deletion is outstanding. Returns a mark for ``end``."""
        with self._lock:
            self._count += 1
            for key in keys:
                self._keys[key] = self._count
                if deleted:
                    self._deleted.add(key)
            return self._count

    def give_up(self, keys: Iterable[bytes]) -> None:
        """A call that may change these has been given up; it is to be ``landed``."""
        with self._lock:
            for key in keys:
                self._under_way[key] = self._under_way.get(key, 0) + 1

    def landed(self, keys: Iterable[bytes]) -> None:
        """A call that had been given up has ended."""
        with self._lock:
            for key in keys:
                left = self._under_way.pop(key, 0) - 1
                if left > 0:
                    self._under_way[key] = left

    def end(self, keys: Iterable[bytes], mark: int) -> None:
        """What these were in doubt for since ``mark`` has come right, unless something has happened to them since."""
        with self._lock:
            self._end(key for key in keys if self._keys.get(key) == mark)

    def to_delete(self, count: int) -> list[bytes]:
        """Up to ``count`` keys whose deletion would settle them."""
        with self._lock:
            chosen: list[bytes] = []
            for key in self._keys:
                if key not in self._under_way:
                    chosen.append(key)
                if len(chosen) == count:
                    break
            return chosen

    def deleted(self, key: bytes) -> bool:
        """Whether a caller's deletion of it is outstanding."""
        return key in self._deleted

    def settle(self, keys: Iterable[bytes]) -> None:
        """These have been deleted."""
        with self._lock:
            self._end(keys)

    def _end(self, keys: Iterable[bytes]) -> None:
        for key in list(keys):
            if key not in self._under_way:
                self._keys.pop(key, None)
                self._deleted.discard(key)


# Blocks that a tier lacks because it did not answer when they were stored: it gets them when it is back.
#
# Only their keys and places are kept: the values are in another tier.


class Owed:
    """The latest ``limit`` of them, in the order of their storing. May be used from any thread; takes no other lock."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._places: dict[bytes, Place] = {}
        self._lock = threading.Lock()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, places: dict[bytes, Place]) -> None:
        with self._lock:
            for key, place in places.items():
                self._places.setdefault(key, place)
            while len(self._places) > self._limit:
                del self._places[next(iter(self._places))]
                self.dropped += 1

    def first(self, count: int) -> dict[bytes, Place]:
        """The oldest; they stay."""
        with self._lock:
            return dict(islice(self._places.items(), count))

    def discard(self, keys: Iterable[bytes]) -> None:
        """These are there, or cannot be."""
        with self._lock:
            for key in keys:
                self._places.pop(key, None)
