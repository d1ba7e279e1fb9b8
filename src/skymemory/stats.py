"""Means and percentiles of what was measured: one definition for every figure that is reported."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass

import numpy as np


def percentile(values: Collection[float], percent: float) -> float:
    """Interpolated between the two nearest values (numpy's default, R's type 7); nan of none."""
    return float(np.percentile(list(values), percent)) if values else math.nan


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
    """Of the values that are numbers."""
    found = [value for value in values if not math.isnan(value)]
    if not found:
        return Spread(0, *[math.nan] * 5)
    p50, p90, p99 = (float(each) for each in np.percentile(found, [50, 90, 99]))
    return Spread(len(found), math.fsum(found) / len(found), p50, p90, p99, max(found))
