"""The bounded log: numbers grow, the oldest changes go."""

from __future__ import annotations

import pytest

from skymemory.conductor.change_log import ChangeLog


@pytest.mark.parametrize("most", [1, 3, 8])
def test_a_log_keeps_the_latest_changes_by_number(most: int) -> None:
    log: ChangeLog[int] = ChangeLog(most)
    for number in range(20):
        kept = list(range(max(0, number - most), number))
        assert (log.start, log.end) == (number - len(kept), number)
        for first in range(number + 2):
            expected = None if first > number or first < log.start else kept[first - log.start :]
            assert log.since(first) == expected
            assert log.since(first, 2) == (None if expected is None else expected[:2])
        log.append(number)
