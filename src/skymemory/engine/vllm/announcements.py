"""Store events: which of vLLM's blocks the store has, for routers that follow vLLM's KV events (``take_events``).

A block is announced by its name in vLLM (its hash), without its tokens: vLLM has announced it with them when it came
into the GPU's memory, as before its offloading connector's events. It is announced once all ranks have stored it, or
once it was loaded, and taken back when a lookup finds that the store has lost it. The store is shared, and evicts for
itself: that a block is gone is known to the engine that looks it up, not to the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

_KEPT = 1 << 16
"""Values; who is announced longest is taken back."""


class Announced(NamedTuple):
    """One event."""

    stored: bool
    """Else taken back."""
    names: list[bytes]
    """vLLM's block hashes."""


class Announcements:
    """Of one engine's first part of layers. Not thread-safe: vLLM's scheduler is one thread."""

    def __init__(self, ranks: int, kept: int = _KEPT) -> None:
        self._ranks, self._kept = ranks, kept
        self._saving: OrderedDict[bytes, tuple[Sequence[bytes], int]] = OrderedDict()
        """Of those that the workers were given: the names of a value's blocks, and how many ranks have saved it."""
        self._stored: OrderedDict[bytes, Sequence[bytes]] = OrderedDict()
        self._events: list[Announced] = []

    def saving(self, key: bytes, names: Sequence[bytes]) -> None:
        """The workers were given a value to save."""
        self._saving[key] = names, 0
        self._saving.move_to_end(key)
        if len(self._saving) > self._kept:
            self._saving.popitem(last=False)

    def saved(self, keys: Sequence[bytes]) -> None:
        """The store has them; once for each rank."""
        for key in keys:
            names, ranks = self._saving.get(key, ((), 0))
            if names and ranks + 1 < self._ranks:
                self._saving[key] = names, ranks + 1
            elif names:
                del self._saving[key]
                self.stored(key, names)

    def unsaved(self, keys: Sequence[bytes]) -> None:
        """A rank could not save them."""
        for key in keys:
            self._saving.pop(key, None)

    def loaded(self, key: bytes, names: Sequence[bytes]) -> None:
        """The store has it. It is said again: vLLM may have said that all is gone, and meant its own cache."""
        self._stored.pop(key, None)
        self.stored(key, names)

    def stored(self, key: bytes, names: Sequence[bytes]) -> None:
        """The store has it."""
        if key not in self._stored:
            self._say(True, names)
        self._stored[key] = names
        self._stored.move_to_end(key)
        if len(self._stored) > self._kept:
            self._say(False, self._stored.popitem(last=False)[1])

    def lost(self, keys: Sequence[bytes]) -> None:
        """The store has them no more."""
        for key in keys:
            if (names := self._stored.pop(key, None)) is not None:
                self._say(False, names)

    def clear(self) -> None:
        """The cache was reset: what is stored is of other weights."""
        self._saving.clear()
        self.lost(list(self._stored))

    def take(self) -> list[Announced]:
        """Since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _say(self, stored: bool, names: Sequence[bytes]) -> None:
        if not self._events or self._events[-1].stored is not stored:
            self._events.append(Announced(stored, []))
        self._events[-1].names.extend(names)
