"""Means and percentiles of what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Of ``count`` values; all nan where there are none."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    def as_json(self) -> dict[str, float | None]:
        return {name: round(value, 6) if math.isfinite(value) else None for name, value in asdict(self).items()}


def spread(values: Iterable[float]) -> Spread:
    """Of the values that are numbers. A percentile is the smallest value that so many per cent do not exceed."""
    ordered = sorted(value for value in values if not math.isnan(value))
    if not ordered:
        return Spread(0, *[math.nan] * 5)

    def at(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return Spread(len(ordered), math.fsum(ordered) / len(ordered), at(0.5), at(0.9), at(0.99), ordered[-1])
