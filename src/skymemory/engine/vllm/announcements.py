"""Store events: which of vLLM's blocks the store has, for routers that follow vLLM's KV events (``take_events``)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

_KEPT = 1 << 16  # limit of announced values; the oldest is withdrawn


class Announced(NamedTuple):
    stored: bool
    """False: withdrawn."""
    names: list[bytes]


class Announcements:
    """Announcements of stored values, by vLLM's hashes of their blocks. Not thread-safe.

    A value is announced when all ranks have stored it or it was loaded, and withdrawn when a lookup misses it.
    """

    def __init__(self, ranks: int, limit: int = _KEPT) -> None:
        self._ranks, self._kept = ranks, limit
        self._saving: OrderedDict[bytes, tuple[Sequence[bytes], int]] = OrderedDict()
        self._stored: OrderedDict[bytes, Sequence[bytes]] = OrderedDict()
        self._events: list[Announced] = []

    def saving(self, key: bytes, names: Sequence[bytes]) -> None:
        self._saving[key] = names, 0
        self._saving.move_to_end(key)
        if len(self._saving) > self._kept:
            self._saving.popitem(last=False)

    def saved(self, keys: Sequence[bytes]) -> None:
        """Count a rank that has stored these values; announce those that all ranks have."""
        for key in keys:
            names, ranks = self._saving.get(key, ((), 0))
            if names and ranks + 1 < self._ranks:
                self._saving[key] = names, ranks + 1
            elif names:
                del self._saving[key]
                self.stored(key, names)

    def unsaved(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._saving.pop(key, None)

    def loaded(self, key: bytes, names: Sequence[bytes]) -> None:
        """Announce a value again: vLLM may have withdrawn all blocks, and meant only its own cache."""
        self._stored.pop(key, None)
        self.stored(key, names)

    def stored(self, key: bytes, names: Sequence[bytes]) -> None:
        if key not in self._stored:
            self._say(True, names)
        self._stored[key] = names
        self._stored.move_to_end(key)
        if len(self._stored) > self._kept:
            self._say(False, self._stored.popitem(last=False)[1])

    def lost(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if (names := self._stored.pop(key, None)) is not None:
                self._say(False, names)

    def clear(self) -> None:
        """Withdraw all values after a reset: they belong to other weights."""
        self._saving.clear()
        self.lost(list(self._stored))

    def take(self) -> list[Announced]:
        events, self._events = self._events, []
        return events

    def _say(self, stored: bool, names: Sequence[bytes]) -> None:
        if not self._events or self._events[-1].stored is not stored:
            self._events.append(Announced(stored, []))
        self._events[-1].names.extend(names)
