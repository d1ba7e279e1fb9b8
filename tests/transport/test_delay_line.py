"""Holds: in order, never early, as late as said; over virtual time and over the real timer."""

from __future__ import annotations

import select
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.transport.delay_line import DelayLine, TimerFd


class Clock:
    """Virtual time."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


pushes = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 9000), st.floats(0, 0.1), st.floats(0, 0.05)), max_size=25
)


@given(pushes, st.sampled_from([0.0, 1e6, 1e9]))
def test_everything_is_released_once_in_order_and_never_early(
    items: list[tuple[str, int, float, float]], rate_bit_s: float
) -> None:
    clock = Clock()
    line: DelayLine[int] = DelayLine(rate_bit_s, clock)
    due: dict[int, float] = {}
    free_s: dict[str, float] = {}
    released: list[int] = []

    def release() -> None:
        for number in line.pop_due():
            assert due[number] <= clock.now_s
            released.append(number)

    for number, (link, size, propagation_s, pause_s) in enumerate(items):
        serialization_s = size * 8 / rate_bit_s if rate_bit_s else 0.0
        free_s[link] = max(clock.now_s, free_s.get(link, 0.0)) + serialization_s
        due[number] = line.push(link, size, propagation_s, number)
        assert due[number] == pytest.approx(free_s[link] + propagation_s, abs=1e-9)
        clock.now_s += pause_s
        release()
    while (next_s := line.next_due_s()) is not None:
        clock.now_s = max(clock.now_s, next_s)
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
        line.push("link", 1, 0.5, item)
    clock.now_s += 0.5
    assert list(line.pop_due()) == items


def test_a_busy_link_spaces_its_packets_and_leaves_the_others_alone() -> None:
    line: DelayLine[str] = DelayLine(8e6, Clock())
    dues = [line.push("busy", 1000, 0.010, "x") for _ in range(4)]
    assert [b - a for a, b in pairwise(dues)] == pytest.approx([0.001] * 3)
    assert dues[0] == pytest.approx(100.0 + 0.001 + 0.010)
    assert line.push("other", 1000, 0.010, "y") == pytest.approx(dues[0])


def test_what_becomes_due_during_release_is_released_too() -> None:
    clock = Clock()
    line: DelayLine[str] = DelayLine(clock_s=clock)
    line.push("link", 1, 0.0, "first")
    found = []
    for item in line.pop_due():
        found.append(item)
        if item == "first":
            line.push("link", 1, 0.001, "second")
            clock.now_s += 0.001
    assert found == ["first", "second"]


def test_the_errors_are_the_lateness() -> None:
    clock = Clock()
    line: DelayLine[int] = DelayLine(clock_s=clock)
    for number in range(100):
        line.push("link", 1, 0.001, number)
        clock.now_s += 0.001 + number * 1e-5
        assert list(line.pop_due()) == [number]
    report = line.report()
    assert report["hold_error_p50_s"] == pytest.approx(49.5e-5)
    assert report["hold_error_p99_s"] == pytest.approx(98.01e-5)
    assert report["hold_error_max_s"] == pytest.approx(99e-5)


def test_an_empty_line_reports_zeros_and_has_no_timer_of_its_own_time() -> None:
    line: DelayLine[int] = DelayLine(clock_s=Clock())
    assert set(line.report().values()) == {0.0}
    assert list(line.pop_due()) == [] and line.next_due_s() is None
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
                line.push("link", 100, hold_s, time.monotonic() + hold_s)
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
        line.push("far", 1, 60.0, "late")
        line.push("near", 1, 0.001, "soon")
        assert poll.poll(5000)
        assert list(line.pop_due()) == ["soon"]
        assert poll.poll(0) == [] and len(line) == 1
    finally:
        line.close()


def test_a_loop_that_breaks_off_is_called_again() -> None:
    line: DelayLine[int] = DelayLine()
    try:
        for number in range(3):
            line.push("link", 1, 0.0, number)
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
