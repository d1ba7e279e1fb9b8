"""Links that vary: the same seed the same link, and a beam that follows the constellation's geometry."""

from __future__ import annotations

import math

import pytest

from skymemory.constellation.presets import DEFAULT_HOST, EPOCH_UNIX_S, preset_named
from skymemory.constellation.visibility import GroundHost, elevations_deg, slants_m
from skymemory.errors import InvalidInput
from skymemory_lab.sim.loading import LinkBudget, LinkTrace, leo_trace, random_trace

SHELL = preset_named("starlink-a").shell


def test_the_same_seed_is_the_same_link() -> None:
    assert random_trace(1, 1e9) == random_trace(1, 1e9)
    assert random_trace(1, 1e9) != random_trace(2, 1e9)


def test_random_rates_stay_in_their_range_around_the_mean() -> None:
    trace = random_trace(0, 1e9, spread=0.25, every_s=0.1, duration_s=100.0)
    assert len(trace.bytes_per_s) == 1001
    assert 0.75e9 <= min(trace.bytes_per_s) < 0.8e9 and 1.2e9 < max(trace.bytes_per_s) <= 1.25e9
    assert trace.finish_s(0.0, 100e9) == pytest.approx(100.0, rel=0.01)
    with pytest.raises(InvalidInput, match="random"):
        random_trace(0, 1e9, spread=1.0)


def test_the_link_budget_is_that_of_its_source() -> None:
    """TR 38.821 has 8.5 dB of carrier to noise at 30 degrees from 600 km (1075 km), after 0.8 dB of losses we omit."""
    budget = LinkBudget()
    snr = 2 ** (budget.bytes_per_s(1_075e3) * 8 / budget.channel_hz) - 1
    assert 10 * math.log10(snr) == pytest.approx(8.5 + 0.8, abs=0.2)
    assert budget.bytes_per_s(550e3) > budget.bytes_per_s(1_100e3)
    assert LinkBudget(channels=3).bytes_per_s(550e3) == pytest.approx(3 * budget.bytes_per_s(550e3))


@pytest.fixture(scope="module")
def beam() -> LinkTrace:
    return leo_trace(SHELL, DEFAULT_HOST, 7.0, 120.0)


def test_the_beam_changes_satellite_on_the_quarter_minute_only(beam: LinkTrace) -> None:
    dark = [since for since, rate in zip(beam.since_s, beam.bytes_per_s, strict=True) if rate == 0]
    assert dark, "no handover in two minutes"
    assert all((since + 7.0) % 15 == 0 for since in dark)
    after = [b - a for a, b in zip(beam.since_s, beam.since_s[1:], strict=False) if a in dark]
    assert after == pytest.approx([0.1] * len(dark))


def test_the_beam_is_as_fast_as_its_satellite_is_near(beam: LinkTrace) -> None:
    slants = slants_m(SHELL, DEFAULT_HOST, EPOCH_UNIX_S, 7.0)
    best = elevations_deg(SHELL, DEFAULT_HOST, EPOCH_UNIX_S, 7.0).argmax()
    assert beam.bytes_per_s[0] == pytest.approx(LinkBudget().bytes_per_s(float(slants.ravel()[best])))
    assert beam.latency_s == pytest.approx(2 * float(slants.ravel()[best]) / 299_792_458)
    lit = [rate for rate in beam.bytes_per_s if rate]
    assert LinkBudget().bytes_per_s(1_130e3) < min(lit) <= max(lit) <= LinkBudget().bytes_per_s(550e3)


def test_where_no_satellite_flies_there_is_no_link() -> None:
    with pytest.raises(InvalidInput, match="a last rate > 0"):
        leo_trace(SHELL, GroundHost(89.0, 0.0), 0.0, 20.0)
