"""What a tier has missed: keys whose copy there may be outdated, and blocks that it has yet to get.

A put of a value that may change, or a delete, that did not reach a tier (or may not have) makes its key dirty there:
the copy is not read, not counted as present and not overwritten until it has been deleted, or until the late call has
succeeded after all. While a given-up call is still running, a deletion would prove nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import islice

from skymemory.kv.block import Place


class DirtyKeys:
    """At most ``limit`` keys; writers must refuse while it is ``full``. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._keys: dict[bytes, int] = {}
        """Value of ``_count`` when each was last added."""
        self._count = 0
        self._delete_pending: set[bytes] = set()
        self._in_flight: dict[bytes, int] = {}
        """Given-up calls about each key, dirty or not, that have not ended."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    @property
    def full(self) -> bool:
        return len(self._keys) >= self._limit

    def uncertain(self, key: bytes) -> bool:
        """Whether it is dirty, or a given-up call may still change it."""
        return key in self._keys or key in self._in_flight

    def add(self, keys: Iterable[bytes], deleted: bool = False) -> int:
        """Mark as dirty; ``deleted``: a caller's deletion is pending. Returns a mark for ``clear_since``."""
        with self._lock:
            self._count += 1
            for key in keys:
                self._keys[key] = self._count
                if deleted:
                    self._delete_pending.add(key)
            return self._count

    def call_given_up(self, keys: Iterable[bytes]) -> None:
        """A call that may change these was given up; ``call_ended`` must follow."""
        with self._lock:
            for key in keys:
                self._in_flight[key] = self._in_flight.get(key, 0) + 1

    def call_ended(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                left = self._in_flight.pop(key, 0) - 1
                if left > 0:
                    self._in_flight[key] = left

    def clear_since(self, keys: Iterable[bytes], mark: int) -> None:
        """These are no longer dirty, except those added again since ``mark``."""
        with self._lock:
            self._clear(key for key in keys if self._keys.get(key) == mark)

    def to_delete(self, count: int) -> list[bytes]:
        """Up to ``count`` keys whose deletion would make them clean."""
        with self._lock:
            chosen: list[bytes] = []
            for key in self._keys:
                if key not in self._in_flight:
                    chosen.append(key)
                if len(chosen) == count:
                    break
            return chosen

    def delete_pending(self, key: bytes) -> bool:
        """Whether a caller has deleted it and the tier has not."""
        return key in self._delete_pending

    def clear(self, keys: Iterable[bytes]) -> None:
        """These have been deleted in the tier."""
        with self._lock:
            self._clear(keys)

    def _clear(self, keys: Iterable[bytes]) -> None:
        for key in list(keys):
            if key not in self._in_flight:
                self._keys.pop(key, None)
                self._delete_pending.discard(key)


class Backlog:
    """Blocks stored while a tier did not answer, to be copied to it later: the latest ``limit``, oldest first.

    Holds keys and places only: the values are in other tiers. Thread-safe; takes no other lock.
    """

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
        """The oldest ``count``; they stay."""
        with self._lock:
            return dict(islice(self._places.items(), count))

    def discard(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._places.pop(key, None)
