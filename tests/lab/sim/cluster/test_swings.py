"""Swings of loads: series whose amplitude, period and phase are known."""

from __future__ import annotations

import math
import random

import pytest

from skymemory.errors import InvalidInput
from skymemory_lab.sim.cluster.cells import swings
from skymemory_lab.sim.cluster.outcome import LoadSample


def waves(phase_degrees: float, period_s: float = 32.0, seconds: int = 1_200, noise: float = 0.0) -> list[LoadSample]:
    dice = random.Random(7)
    samples = []
    for second in range(seconds):
        angle = 2 * math.pi * second / period_s
        prefill = 0.5 + 0.3 * math.cos(angle) + noise * dice.gauss(0, 1)
        decode = 0.6 + 0.2 * math.cos(angle - math.radians(phase_degrees)) + noise * dice.gauss(0, 1)
        samples.append(LoadSample(float(second), prefill, decode))
    return samples


@pytest.mark.parametrize("phase", [-90.0, 0.0, 60.0])
def test_finds_period_and_phase(phase: float) -> None:
    found = swings(waves(phase))
    assert found.period_s == pytest.approx(32.0)
    assert found.phase_degrees == pytest.approx(phase, abs=2)
    assert found.coherence == pytest.approx(1.0, abs=0.01)
    assert found.correlation == pytest.approx(math.cos(math.radians(phase)), abs=0.02)
    assert found.prefill_amplitude == pytest.approx(0.3, abs=0.01)
    assert found.decode_amplitude == pytest.approx(0.2, abs=0.01)
    assert (found.prefill_mean, found.decode_mean) == pytest.approx((0.5, 0.6), abs=0.01)


def test_against_each_other_is_180_degrees() -> None:
    found = swings(waves(180.0, noise=0.05))
    assert found.phase_degrees is not None and abs(found.phase_degrees) > 170
    assert found.correlation < -0.85


def test_noise_alone_has_no_steady_phase() -> None:
    dice = random.Random(1)
    found = swings([LoadSample(float(second), dice.random(), dice.random()) for second in range(3_000)])
    assert found.coherence is not None and found.coherence < 0.5
    assert abs(found.correlation) < 0.1


def test_a_value_holds_until_the_next() -> None:
    found = swings([LoadSample(0.0, 1.0, 0.0), LoadSample(3.0, 0.0, 1.0), LoadSample(5.0, 0.0, 1.0)])
    assert found.prefill_mean == pytest.approx(3 / 6)  # seconds 0, 1, 2 of 0 to 5
    assert found.correlation == pytest.approx(-1.0)
    assert (found.period_s, found.phase_degrees, found.coherence) == (None, None, None)


def test_nothing_moves() -> None:
    found = swings([LoadSample(float(second), 0.5, 0.5) for second in range(600)])
    assert (found.correlation, found.prefill_amplitude, found.period_s) == (0.0, 0.0, None)
    with pytest.raises(InvalidInput, match="at least 2"):
        swings([LoadSample(0.0, 1.0, 1.0)])
    assert swings(waves(0.0), from_s=100.0, until_s=500.0).as_json()["period_s"] == pytest.approx(32.0)
