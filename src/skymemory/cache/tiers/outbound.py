"""Values on their way from one tier to another, in memory, within a byte budget; readable until they have arrived.

``dirty`` values have been acknowledged to a writer and are not yet where they have to be: they are never dropped for
room. Values that an upper tier evicted, or that are to be promoted, are dropped first when there is too little room.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skymemory.kv.block import Place


@dataclass(frozen=True, slots=True, eq=False)
class Moving:
    """One value on its way to the tiers numbered ``to`` (0 is the nearest)."""

    key: bytes
    value: bytes
    to: tuple[int, ...]
    dirty: bool = False
    place: Place | None = None
    """Where it stands in its prompt, if its writer said."""


class Outbound:
    """First in, first out. At most one value for each key. May be used from any thread; takes no other lock."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._movings: dict[bytes, Moving] = {}
        self._changed = threading.Condition()
        self._poked = False
        self.used_bytes = 0
        self.dropped = 0
        """Values dropped for want of room; none of them dirty."""

    def add(self, moving: Moving) -> bool:
        """Take it in; False where there is no room. A dirty value already there is the latest: it stays."""
        with self._changed:
            there = self._movings.get(moving.key)
            if there is not None and there.dirty and not moving.dirty:
                return True
            self._remove([moving.key])
            if moving.dirty:
                self._make_room(len(moving.value))
            if self.used_bytes + len(moving.value) > self._budget_bytes:
                self.dropped += not moving.dirty
                return False
            self._movings[moving.key] = moving
            self.used_bytes += len(moving.value)
            self._changed.notify_all()
            return True

    def get(self, keys: Iterable[bytes]) -> dict[bytes, Moving]:
        with self._changed:
            if not self._movings:
                return {}
            return {key: self._movings[key] for key in keys if key in self._movings}

    def discard(self, keys: Iterable[bytes]) -> set[bytes]:
        """Forget these: they have been changed or deleted. Which of them were there."""
        with self._changed:
            return self._remove(keys)

    def arrived(self, movings: Iterable[Moving]) -> None:
        """These are where they were to go, or cannot go there; what has come in their place since stays."""
        with self._changed:
            self._remove([m.key for m in movings if self._movings.get(m.key) is m])

    def first(self, size_bytes: int) -> list[Moving]:
        """The oldest, of one destination, ``size_bytes`` of them or one; they stay."""
        with self._changed:
            chosen: list[Moving] = []
            for moving in self._movings.values():
                if chosen and (moving.to, moving.dirty) != (chosen[0].to, chosen[0].dirty):
                    continue
                size_bytes -= len(moving.value)
                if chosen and size_bytes < 0:
                    break
                chosen.append(moving)
            return chosen

    def still(self, movings: Sequence[Moving]) -> list[Moving]:
        with self._changed:
            return [moving for moving in movings if self._movings.get(moving.key) is moving]

    def last(self, movings: Iterable[Moving]) -> None:
        """Let others go first: these could not be moved now."""
        with self._changed:
            for moving in movings:
                if self._movings.get(moving.key) is moving:
                    self._movings[moving.key] = self._movings.pop(moving.key)

    def dirty(self) -> list[Moving]:
        with self._changed:
            return [moving for moving in self._movings.values() if moving.dirty]

    def __len__(self) -> int:
        return len(self._movings)

    def wait_filled(self, timeout_s: float) -> bool:
        """Until there is something, or somebody pokes; whether there is."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._movings) or self._poked, timeout_s)
            self._poked = False
            return bool(self._movings)

    def wait_empty(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._movings, timeout_s)

    def poke(self) -> None:
        """Wake who waits for something: there is other work."""
        with self._changed:
            self._poked = True
            self._changed.notify_all()

    def _remove(self, keys: Iterable[bytes]) -> set[bytes]:
        gone = set()
        for key in keys:
            moving = self._movings.pop(key, None)
            if moving is not None:
                gone.add(key)
                self.used_bytes -= len(moving.value)
        if gone:
            self._changed.notify_all()
        return gone

    def _make_room(self, size_bytes: int) -> None:
        excess_bytes = self.used_bytes + size_bytes - self._budget_bytes
        for moving in [moving for moving in self._movings.values() if not moving.dirty]:
            if excess_bytes <= 0:
                return
            excess_bytes -= len(moving.value)
            self._remove([moving.key])
            self.dropped += 1
