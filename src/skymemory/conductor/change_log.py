"""Bounded log of numbered changes."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Generic, TypeVar

Change = TypeVar("Change")


class ChangeLog(Generic[Change]):
    """Log of the latest ``most`` changes. ``end`` is the number of the next change, ``start`` of the oldest kept."""

    __slots__ = ("_changes", "end")

    def __init__(self, most: int) -> None:
        self._changes: deque[Change] = deque(maxlen=most)
        self.end = 0

    @property
    def start(self) -> int:
        return self.end - len(self._changes)

    def append(self, change: Change) -> None:
        self._changes.append(change)
        self.end += 1

    def since(self, number: int, most: int | None = None) -> list[Change] | None:
        """Return up to ``most`` changes from ``number`` on; None if some are no longer kept."""
        if not self.start <= number <= self.end:
            return None
        first = number - self.start
        return list(islice(self._changes, first, None if most is None else first + most))
