"""Estimates of a run, and their correction."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory_lab.demo.estimate import Estimate, EstimatedPart, format_estimate, format_took

_PARTS = (
    EstimatedPart("load", 4.0),
    EstimatedPart("first prefill", 10.0, "prefill"),
    EstimatedPart("second prefill", 10.0, "prefill"),
)


def test_a_measured_part_corrects_the_parts_of_its_kind_alone() -> None:
    estimate = Estimate(_PARTS, spent_s=2.0)
    assert estimate.first_s == 26.0 and estimate.remaining_s == 24.0
    estimate.on_part("load", 4.0)
    assert estimate.correction(6.0) == ""
    estimate.on_part("first prefill", 30.0)
    assert estimate.seconds_of("second prefill") == 30.0
    words = estimate.correction(36.0)
    assert "66 s in all" in words and "30 s to go" in words
    assert estimate.correction(36.0) == ""
    assert estimate.first_s == 26.0


def test_a_part_that_does_not_wait_is_an_error() -> None:
    estimate = Estimate(_PARTS)
    with pytest.raises(KeyError):
        estimate.on_part("unknown", 1.0)
    estimate.on_part("load", 1.0)
    with pytest.raises(KeyError):
        estimate.on_part("load", 1.0)


@given(
    seconds=st.lists(st.floats(0.1, 100.0), min_size=1, max_size=8),
    slowdown=st.floats(0.1, 20.0),
)
def test_after_one_measured_part_the_estimate_of_equally_slower_ones_is_right(
    seconds: list[float], slowdown: float
) -> None:
    estimate = Estimate(EstimatedPart(str(at), one, "compute") for at, one in enumerate(seconds))
    estimate.on_part("0", seconds[0] * slowdown)
    assert math.isclose(estimate.remaining_s, slowdown * sum(seconds[1:]), abs_tol=1e-9)


def test_words() -> None:
    assert format_estimate(83.4) == "about 83 s"
    assert format_estimate(600.0) == "about 10 minutes"
    assert format_took(100.2, 90.0) == "took 100 s (estimated 90 s)"
