"""Holds: in order, never early, as late as said; over virtual time and over the real timer."""

from __future__ import annotations

import select
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.transport.delay_line import RECENT_S, DelayLine, TimerFd


class Clock:
    """Virtual time."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


pushes = st.lists(st.tuples(st.floats(0, 0.1), st.floats(0, 0.05)), max_size=25)


@given(pushes)
def test_everything_is_released_once_in_order_and_never_early(items: list[tuple[float, float]]) -> None:
    clock = Clock()
    line: DelayLine[int] = DelayLine(clock)
    due: dict[int, float] = {}
    released: list[int] = []

    def release() -> None:
        for number in line.pop_due():
            assert due[number] <= clock.now_s
            released.append(number)

    for number, (delay_s, pause_s) in enumerate(items):
        due[number] = line.push(delay_s, number)
        assert due[number] == pytest.approx(clock.now_s + delay_s, abs=1e-9)
        clock.now_s += pause_s
        release()
    while waiting := due.keys() - set(released):
        clock.now_s = max(clock.now_s, min(due[number] for number in waiting))
        release()
    assert sorted(released) == list(range(len(items))) and len(line) == 0
    report = line.report()
    assert report["hold_count"] == len(items)
    assert 0 <= report["hold_error_p50_s"] <= report["hold_error_p99_s"] <= report["hold_error_max_s"]


def test_equal_dues_leave_in_the_order_they_came() -> None:
    clock = Clock()
    line: DelayLine[object] = DelayLine(clock_s=clock)
    items = [object() for _ in range(20)]
    for item in items:
        line.push(0.5, item)
    clock.now_s += 0.5
    assert list(line.pop_due()) == items


def test_what_becomes_due_during_release_is_released_too() -> None:
    clock = Clock()
    line: DelayLine[str] = DelayLine(clock_s=clock)
    line.push(0.0, "first")
    found = []
    for item in line.pop_due():
        found.append(item)
        if item == "first":
            line.push(0.001, "second")
            clock.now_s += 0.001
    assert found == ["first", "second"]


def test_the_errors_are_the_lateness() -> None:
    clock = Clock()
    line: DelayLine[int] = DelayLine(clock_s=clock)
    for number in range(100):
        line.push(0.001, number)
        clock.now_s += 0.001 + number * 1e-5
        assert list(line.pop_due()) == [number]
    report = line.report()
    assert report["hold_error_p50_s"] == pytest.approx(49.5e-5)
    assert report["hold_error_p99_s"] == pytest.approx(98.01e-5)
    assert report["hold_error_max_s"] == pytest.approx(99e-5)


def test_an_empty_line_reports_zeros_and_has_no_timer_of_its_own_time() -> None:
    line: DelayLine[int] = DelayLine(clock_s=Clock())
    assert set(line.report().values()) == {0.0}
    assert list(line.pop_due()) == [] and not len(line)
    with pytest.raises(ValueError, match="no timer"):
        line.fileno()


def test_the_real_timer_is_never_early() -> None:
    line: DelayLine[float] = DelayLine()
    try:
        poll = select.poll()
        poll.register(line.fileno(), select.POLLIN)
        assert poll.poll(0) == []
        released = 0
        for round_s in (0.001, 0.0005, 0.002, 0.0):
            for extra in range(20):
                hold_s = round_s + extra * 1e-4
                line.push(hold_s, time.monotonic() + hold_s)
            while len(line):
                assert poll.poll(2000), "the alarm did not go off"
                for promised_s in line.pop_due():
                    assert time.monotonic() >= promised_s
                    released += 1
            assert poll.poll(0) == [], "nothing is held: the alarm is off"
        assert released == 80 == line.report()["hold_count"]
    finally:
        line.close()


def test_an_earlier_packet_moves_the_alarm_forward() -> None:
    line: DelayLine[str] = DelayLine()
    try:
        poll = select.poll()
        poll.register(line.fileno(), select.POLLIN)
        line.push(60.0, "late")
        line.push(0.001, "soon")
        assert poll.poll(5000)
        assert list(line.pop_due()) == ["soon"]
        assert poll.poll(0) == [] and len(line) == 1
    finally:
        line.close()


def test_a_loop_that_breaks_off_is_called_again() -> None:
    line: DelayLine[int] = DelayLine()
    try:
        for number in range(3):
            line.push(0.0, number)
        releases = line.pop_due()
        assert next(releases) == 0
        releases.close()
        poll = select.poll()
        poll.register(line.fileno(), select.POLLIN)
        assert poll.poll(2000), "the rest is due: the alarm must say so"
        assert list(line.pop_due()) == [1, 2]
    finally:
        line.close()


def test_a_closed_timer_stays_closed() -> None:
    timer = TimerFd()
    timer.close()
    timer.close()
    with pytest.raises(OSError):
        timer.arm(1)


def test_a_late_packet_of_long_ago_is_in_the_maximum_alone() -> None:
    clock = Clock()
    line: DelayLine[int] = DelayLine(clock_s=clock)
    line.push(0.001, 0)
    clock.now_s += 1.23
    assert list(line.pop_due()) == [0] and line.report()["hold_error_p99_s"] == pytest.approx(1.229)
    clock.now_s += RECENT_S
    line.push(0.001, 1)
    clock.now_s += 0.0011
    assert list(line.pop_due()) == [1]
    assert line.report()["hold_error_p99_s"] == pytest.approx(1e-4)
    assert line.report()["hold_error_max_s"] == pytest.approx(1.229)
