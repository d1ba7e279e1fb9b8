"""Unix time through a suspend, the pause of a virtual machine, and a wall clock that is set."""

from __future__ import annotations

import pytest

from skymemory.transport.unix_clock import UnixClock


class Computer:
    """Its wall clock, and the clock that counts the time it was asleep."""

    def __init__(self) -> None:
        self.wall_s, self.running_s = 1_000_000.0, 50.0
        self.clock = UnixClock(lambda: self.wall_s, lambda: self.running_s)

    def passes(self, seconds: float) -> None:
        self.wall_s += seconds
        self.running_s += seconds


def test_time_asleep_has_passed():
    computer = Computer()
    computer.passes(45.0)
    assert computer.clock.now_s() == pytest.approx(1_000_045.0)
    assert computer.clock.follow_wall() == 0.0


def test_the_pause_of_a_virtual_machine_is_seen_by_its_wall_clock():
    computer = Computer()
    computer.passes(10.0)
    computer.wall_s += 45.0
    assert computer.clock.now_s() == pytest.approx(1_000_010.0)
    assert computer.clock.follow_wall() == pytest.approx(45.0)
    assert computer.clock.now_s() == pytest.approx(1_000_055.0)
    assert computer.clock.follow_wall() == 0.0


def test_two_threads_that_see_the_pause_at_once_follow_it_once():
    """A client's threads share its clock, which never goes back."""

    class Interrupted(float):
        def __sub__(self, other: float) -> float:
            found = float(self) - other
            if computer.wall_s is not now:  # another thread has its turn between the look and the change
                computer.wall_s = now
                computer.clock.follow_wall()
            return found

    computer = Computer()
    now = computer.wall_s + 45.0
    computer.wall_s = Interrupted(now)
    computer.clock.follow_wall()
    assert computer.clock.now_s() == pytest.approx(1_000_045.0)


@pytest.mark.parametrize("set_by_s", [0.5, -0.5, -3600.0])
def test_a_wall_clock_that_drifts_or_is_set_back_is_not_followed(set_by_s):
    computer = Computer()
    computer.passes(10.0)
    computer.wall_s += set_by_s
    assert computer.clock.follow_wall() == 0.0
    assert computer.clock.now_s() == pytest.approx(1_000_010.0)
