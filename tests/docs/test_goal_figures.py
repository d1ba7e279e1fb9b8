"""What was reached of each goal says which values miss it."""

from __future__ import annotations

import pytest
from tools.goal_figures import GOALS, extent, missed

from tools import goal_figures


def test_runs_of_values_that_miss_their_goals_are_marked() -> None:
    assert missed([(0.58, 0.5), (0.76, 0.5), (0.9, 1.0), (1.16, 1.3)]) == "0.58, 0.76; 0.90, 1.16: **missed**"
    assert missed([(0.79, 1.0), (1.24, 1.2)]) == "0.79: **missed**; 1.24"
    assert missed([(0.127, 0.156), (0.231, 0.156)], 3, at_most=True) == "0.127; 0.231: **missed**"


def test_the_extent_of_values() -> None:
    assert extent([0.5, 0.123, 0.3]) == "0.12 to 0.50"
    assert extent([0.5]) == "0.50"
    assert extent([0.501, 0.499], 1) == "0.5"


def test_words_of_the_page_that_a_run_contradicts_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    redis = {"tier": "redis", "what": "TCP", "ratio": 0.8, "goal": 0.9}
    monkeypatch.setattr(goal_figures, "rows_of", lambda _: [redis])
    with pytest.raises(SystemExit, match="these hits meet their goals: redis"):
        GOALS["goal: disk hits"]()
