"""Queue in memory of values moving between tiers, within a byte budget.

``dirty`` values (write-back) are acknowledged but not yet in their tiers: never dropped. Others are, for lack of room.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skymemory.kv.block import Place


@dataclass(frozen=True, slots=True, eq=False)
class Moving:
    """Value to be copied to the tiers numbered ``to`` (0 is the nearest)."""

    key: bytes
    value: bytes
    to: tuple[int, ...]
    dirty: bool = False  # acknowledged to the writer, but not in these tiers yet
    place: Place | None = None


class Outbound:
    """FIFO queue with at most one value per key. Thread-safe; takes no other lock."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._movings: dict[bytes, Moving] = {}
        self._changed = threading.Condition()
        self._woken = False
        self.used_bytes = 0
        self.dropped = 0

    def add(self, moving: Moving) -> bool:
        """Queue the value; False without room. A dirty value queued under its key is newer and stays."""
        with self._changed:
            queued = self._movings.get(moving.key)
            if queued is not None and queued.dirty and not moving.dirty:
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
        with self._changed:
            return self._remove(keys)

    def done(self, movings: Iterable[Moving]) -> None:
        """Remove values; a newer value of the same key stays."""
        with self._changed:
            self._remove([m.key for m in movings if self._movings.get(m.key) is m])

    def next_batch(self, size_bytes: int) -> list[Moving]:
        """Return the oldest values of a destination, up to ``size_bytes`` or a single value; they stay queued."""
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

    def still_queued(self, movings: Sequence[Moving]) -> list[Moving]:
        with self._changed:
            return [moving for moving in movings if self._movings.get(moving.key) is moving]

    def requeue(self, movings: Iterable[Moving]) -> None:
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
        with self._changed:
            self._changed.wait_for(lambda: bool(self._movings) or self._woken, timeout_s)
            self._woken = False
            return bool(self._movings)

    def wait_empty(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._movings, timeout_s)

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def _remove(self, keys: Iterable[bytes]) -> set[bytes]:
        removed = set()
        for key in keys:
            moving = self._movings.pop(key, None)
            if moving is not None:
                removed.add(key)
                self.used_bytes -= len(moving.value)
        if removed:
            self._changed.notify_all()
        return removed

    def _make_room(self, size_bytes: int) -> None:
        """Drop values that are stored elsewhere, for a dirty value."""
        excess_bytes = self.used_bytes + size_bytes - self._budget_bytes
        for moving in [moving for moving in self._movings.values() if not moving.dirty]:
            if excess_bytes <= 0:
                return
            excess_bytes -= len(moving.value)
            self._remove([moving.key])
            self.dropped += 1
