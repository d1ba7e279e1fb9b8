"""Counters with a name, a unit and a question they answer; nothing here does I/O.

A name says what is counted and in which unit (``hit_tokens_total``, ``packets_malformed``).
"""

from __future__ import annotations

from collections import defaultdict
from threading import Lock


class Counters:
    """Named monotonic counters, optionally split by one label (``tier``, ``reason``, …)."""

    def __init__(self) -> None:
        self._values: defaultdict[tuple[str, str], int] = defaultdict(int)

    def add(self, name: str, amount: int = 1, label: str = "") -> None:
        self._values[name, label] += amount

    def get(self, name: str, label: str = "") -> int:
        return self._values.get((name, label), 0)

    def forget(self, name: str, label: str) -> None:
        """What the label stands for is gone: its count goes too, lest labels gather."""
        self._values.pop((name, label), None)

    def total(self, name: str) -> int:
        """Sum over all labels of ``name``."""
        return sum(value for (key, _), value in list(self._values.items()) if key == name)

    def as_dict(self) -> dict[str, int]:
        """``{"name": n}`` or ``{"name{label}": n}``, sorted by name."""
        return {f"{name}{{{label}}}" if label else name: value for (name, label), value in sorted(self._values.items())}


class SharedCounters(Counters):
    """Counters that several threads add to: none of what they add is lost."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()

    def add(self, name: str, amount: int = 1, label: str = "") -> None:
        with self._lock:
            super().add(name, amount, label)
