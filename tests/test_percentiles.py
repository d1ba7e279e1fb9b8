"""One definition of a percentile, against numpy's own."""

from __future__ import annotations

import math

import pytest

from skymemory.metrics import percentile, spread


def test_percentiles_are_interpolated() -> None:
    """Of 1 to 100 the ninetieth lies a tenth of the way from 90 to 91."""
    values = [float(one) for one in range(100, 0, -1)]
    found = spread([*values, math.nan])
    assert (found.count, found.mean, found.p50, found.most) == (100, 50.5, 50.5, 100)
    assert found.p90 == percentile(values, 90) == pytest.approx(90.1)
    assert found.p99 == percentile(values, 99) == pytest.approx(99.01)
    assert spread([7.0]).p99 == percentile([7.0], 99) == 7.0


def test_of_nothing_there_is_none() -> None:
    assert spread([math.nan]).count == 0 and math.isnan(spread([]).mean) and math.isnan(percentile([], 50))
    assert spread([]).as_json() == {"count": 0, "mean": None, "p50": None, "p90": None, "p99": None, "most": None}
