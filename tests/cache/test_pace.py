"""What is known of the speeds: a line for steps, what a step costs at least, and a rate that follows the link."""

from __future__ import annotations

import pytest

from skymemory.cache.cake.pace import SpeedEstimate
from skymemory.cache.cake.scheduler import FetchQueue


def test_nothing_is_known_before_the_first_measurement() -> None:
    pace = SpeedEstimate()
    assert pace.line() is None
    assert pace.step_s(100) is None
    assert pace.bytes_per_s is None


def test_steps_grow_along_the_prompt() -> None:
    pace = SpeedEstimate()
    pace.step_took(100, 2.0)
    assert pace.line() == (2.0, 0.0)
    pace.step_took(300, 3.0)
    assert pace.line() == pytest.approx((1.5, 0.005), rel=0.01)
    assert pace.step_s(500) == pytest.approx(4.0, rel=0.01)


def test_a_falling_line_is_taken_for_noise() -> None:
    pace = SpeedEstimate()
    pace.step_took(100, 3.0)
    pace.step_took(300, 2.0)
    at_zero_s, slope = pace.line() or (0.0, -1.0)
    assert slope == 0.0
    assert at_zero_s == pytest.approx(2.5, rel=0.01)


@pytest.mark.parametrize(("part_s", "part"), [(1.0, 1.0), (0.25, 0.25), (0.5, 0.5)])
def test_learns_what_a_step_costs_that_is_not_full(part_s: float, part: float) -> None:
    """As much as a full one where others fill the batch, its share where none do, or something between."""
    pace = SpeedEstimate()
    pace.step_took(100, 1.0)
    assert pace.part(0.25) == 0.625  # half-way before anything is known
    pace.step_took(100, part_s, filled=0.25)
    assert pace.part(0.25) == pytest.approx(part)
    assert pace.line() == pytest.approx((1.0, 0.0))


@pytest.mark.parametrize(("others_fill", "part"), [(True, 1.0), (False, 0.25)])
def test_what_is_supposed_holds_until_it_is_measured(others_fill: bool, part: float) -> None:
    pace = SpeedEstimate()
    pace.assume_batch(others_fill)
    assert pace.part(0.25) == part
    pace.step_took(100, 1.0)
    pace.step_took(100, 0.5, filled=0.25)
    pace.assume_batch(others_fill)
    assert pace.part(0.25) == pytest.approx(0.5)
    pace.assume_batch(not others_fill)
    assert pace.part(0.25) == 1.25 - part, "measured for each apart"


def test_the_rate_follows_a_link_that_changes() -> None:
    pace = SpeedEstimate()
    for _ in range(100):
        pace.load_took(1000, 1.0)
    assert pace.bytes_per_s == pytest.approx(1000)
    for _ in range(50):
        pace.load_took(1000, 10.0)
    assert pace.bytes_per_s == pytest.approx(100, rel=0.5)


def test_steps_follow_a_machine_that_changes() -> None:
    pace = SpeedEstimate()
    for at in range(100):
        pace.step_took(at % 10, 1.0)
    for at in range(200):
        pace.step_took(at % 10, 2.0)
    assert pace.step_s(5) == pytest.approx(2.0, rel=0.05)


def test_a_load_from_an_idle_link_measures_the_latency() -> None:
    pace = SpeedEstimate()
    pace.load_took(1000, 1.5, from_idle=True)
    assert pace.latency_s == 0.0  # who knows
    assert pace.bytes_per_s == pytest.approx(1000 / 1.5)
    pace.load_took(1000, 1.0)
    assert pace.bytes_per_s == pytest.approx(1000)
    assert pace.latency_s == pytest.approx(0.5)


def test_what_is_late_is_expected_to_be_late_as_long_again() -> None:
    pace = SpeedEstimate()
    pace.load_took(100, 1.0)
    queue = FetchQueue(pace, 1000)
    for index in (1, 2):
        queue.ask(index, 100, 0.0)
    assert queue.idle_after_s(0, 0.5) == pytest.approx(1.5) and queue.here_after_s(1, 0.5) == pytest.approx(0.5)
    assert queue.idle_after_s(0, 3.0) == pytest.approx(3.0), "two seconds for the first, and one for the other"
    assert queue.here_after_s(1, 3.0) == pytest.approx(2.0) and queue.head_s(3.0) == pytest.approx(-2.0)


def test_only_the_load_that_the_link_was_at_costs_its_time_when_it_fails() -> None:
    pace = SpeedEstimate()
    pace.load_took(100, 1.0)
    queue = FetchQueue(pace, 1000)
    for index in (1, 2):
        queue.ask(index, 100, 0.0)
    assert queue.failed(2, 1.0) == 100 and pace.bytes_per_s == pytest.approx(100.0)
    assert queue.failed(1, 4.0) == 100 and pace.bytes_per_s == pytest.approx(20.0)


def test_a_failed_load_took_its_time() -> None:
    pace = SpeedEstimate()
    pace.load_took(1000, 1.0)
    pace.load_took(0, 1.0)
    assert pace.bytes_per_s == pytest.approx(500, rel=0.1)


def test_a_side_that_is_not_tried_is_believed_a_little_faster_with_each_prompt() -> None:
    """One bad measurement does not last: a link believed to be slow is not used, and would never be measured again."""
    pace = SpeedEstimate()
    pace.fade(16)
    pace.step_took(100, 5.0)
    pace.load_took(1000, 2.0)
    pace.fade(16)
    assert pace.step_s(100) == 5.0 and pace.bytes_per_s == 500 and pace.loads_are_recent
    pace.step_took(100, 5.0)
    for _ in range(36):
        pace.fade(16)
    assert pace.step_s(100) == pytest.approx(5.0 * 0.98**35) and pace.step_s(100) < 2.5
    assert pace.bytes_per_s == pytest.approx(500 / 0.98**36) and not pace.loads_are_recent
    pace.step_took(100, 5.0)
    pace.load_took(1000, 2.0)
    assert pace.step_s(100) == pytest.approx(5.0) and pace.bytes_per_s == pytest.approx(500)
