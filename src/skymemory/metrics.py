"""Metrics: counters, means and percentiles. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from threading import Lock

import numpy as np


class Counters:
    """Monotonic counters, optionally split by a label."""

    def __init__(self) -> None:
        self._values: defaultdict[tuple[str, str], int] = defaultdict(int)

    def add(self, name: str, amount: int = 1, label: str = "") -> None:
        self._values[name, label] += amount

    def get(self, name: str, label: str = "") -> int:
        return self._values.get((name, label), 0)

    def forget(self, name: str, label: str) -> None:
        """Drop a removed object's label."""
        self._values.pop((name, label), None)

    def total(self, name: str) -> int:
        # A copy: another thread may add a name meanwhile.
        return sum(value for (key, _), value in list(self._values.items()) if key == name)

    def as_dict(self) -> dict[str, int]:
        """Return ``{"name": n}`` or ``{"name{label}": n}``, sorted."""
        return {f"{name}{{{label}}}" if label else name: value for (name, label), value in sorted(self._values.items())}


class SharedCounters(Counters):
    """Counters that several threads may add to."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()

    def add(self, name: str, amount: int = 1, label: str = "") -> None:
        # ``+=`` reads, adds and writes: without the lock two threads may write the same sum.
        with self._lock:
            self._values[name, label] += amount


def percentile(values: Collection[float], percent: float) -> float:
    """Return the percentile, interpolated as R's type 7."""
    return float(np.percentile(list(values), percent)) if values else math.nan


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of values; nan if there are none."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    def as_json(self) -> dict[str, float | None]:
        return {name: round(value, 6) if math.isfinite(value) else None for name, value in asdict(self).items()}


def spread(values: Iterable[float]) -> Spread:
    """Return the distribution, without nan."""
    numbers = [value for value in values if not math.isnan(value)]
    if not numbers:
        return Spread(0, *[math.nan] * 5)
    p50, p90, p99 = (float(value_at) for value_at in np.percentile(numbers, [50, 90, 99]))
    return Spread(len(numbers), math.fsum(numbers) / len(numbers), p50, p90, p99, max(numbers))
