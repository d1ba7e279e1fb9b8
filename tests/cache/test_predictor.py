"""What the predictor learns: daily prompts are found, single ones never, memory stays bounded, midnight is no wall."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skymemory.cache.predictor import DAY_S, Predictor
from skymemory.errors import InvalidInput


def chain(name: str, blocks: int = 4) -> list[bytes]:
    keys, digest = [], name.encode()
    for _ in range(blocks):
        digest = hashlib.sha256(digest).digest()
        keys.append(digest)
    return keys


@settings(max_examples=200, deadline=None)
@given(
    time_s=st.floats(0, DAY_S - 1),
    jitter_s=st.lists(st.floats(-600, 600), min_size=3, max_size=10),
    first_day=st.integers(0, 20_000),
)
def test_a_daily_prompt_is_expected_near_its_time(time_s: float, jitter_s: list[float], first_day: int) -> None:
    """At any time of the day, midnight included, with up to ten minutes this way or that."""
    predictor = Predictor()
    for day, off_s in enumerate(jitter_s, first_day):
        predictor.record_prompt(chain("daily"), day * DAY_S + time_s + off_s)
    next_s = (first_day + len(jitter_s)) * DAY_S + time_s
    found = predictor.expected(next_s - 3600, 7200)
    assert [list(expectation.keys) for expectation in found] == [chain("daily")]
    assert abs(found[0].at_s - next_s) <= 600
    assert predictor.expected(next_s - 8 * 3600, 3600) == []


@settings(max_examples=200, deadline=None)
@given(
    first_s=st.floats(0, 1e9),
    repeats=st.lists(st.floats(0, 7200), max_size=30),
    later_s=st.floats(0, 5 * DAY_S),
    horizon_s=st.floats(0, 3 * DAY_S),
)
def test_what_came_on_one_day_only_is_never_expected(
    first_s: float, repeats: list[float], later_s: float, horizon_s: float
) -> None:
    """However often it came that day: a burst of one afternoon is no habit."""
    predictor = Predictor(tolerance_s=3 * 3600)
    for after_s in [0.0, *sorted(repeats)]:
        predictor.record_prompt(chain("once"), first_s + after_s)
    assert predictor.expected(first_s + later_s, horizon_s) == []


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), capacity=st.integers(1, 60))
def test_memory_stays_bounded_and_consistent(seed: int, capacity: int) -> None:
    dice = random.Random(seed)
    predictor = Predictor(capacity_blocks=capacity)
    now_s = 0.0
    for _ in range(300):
        now_s += dice.expovariate(1 / 7200)
        predictor.record_prompt(chain(f"p{dice.randrange(20)}", dice.randint(1, 12)), now_s)
        assert predictor.blocks <= capacity
        habits = [habit for habits in predictor._by_root.values() for habit in habits]
        assert sum(len(habit.keys) for habit in habits) == predictor.blocks
        assert {*predictor._once, *predictor._recurring} == set(habits)
        assert all(root == habit.keys[0] for root, habits in predictor._by_root.items() for habit in habits)
        for expectation in predictor.expected(now_s, DAY_S):
            assert now_s <= expectation.at_s < now_s + DAY_S and expectation.keys


def test_a_flood_of_single_prompts_does_not_wash_habits_away() -> None:
    predictor = Predictor(capacity_blocks=400)
    for day in range(5):
        predictor.record_prompt(chain("daily"), day * DAY_S + 9 * 3600)
        for number in range(1000 if day >= 2 else 50):
            predictor.record_prompt(chain(f"{day} {number}"), day * DAY_S + 10 * 3600 + number)
    assert [list(found.keys) for found in predictor.expected(5 * DAY_S + 8 * 3600, 7200)] == [chain("daily")]


def test_newcomers_are_learned_although_old_habits_fill_the_memory() -> None:
    predictor = Predictor(capacity_blocks=400)
    for day in range(2):
        for number in range(200):
            predictor.record_prompt(chain(f"old {number}"), day * DAY_S + number)
    for day in range(2, 4):
        predictor.record_prompt(chain("new"), day * DAY_S + 9 * 3600)
    assert [list(found.keys) for found in predictor.expected(4 * DAY_S + 8 * 3600, 7200)] == [chain("new")]


def test_questions_after_a_document_leave_the_document() -> None:
    """The chain that is expected is what the sightings have in common."""
    predictor = Predictor()
    document = chain("document", 6)
    for day in range(3):
        predictor.record_prompt([*document, *chain(f"question {day}", 2)], day * DAY_S + 100)
    assert [list(found.keys) for found in predictor.expected(3 * DAY_S, 3600)] == [document]


def test_documents_behind_one_system_prompt_are_habits_of_their_own() -> None:
    predictor = Predictor()
    system = chain("system", 2)
    morning, evening, also_morning = (system + chain(name, 6) for name in ("mail", "news", "weather"))
    for day in range(3):
        predictor.record_prompt(morning, day * DAY_S + 8 * 3600)
        predictor.record_prompt(also_morning, day * DAY_S + 8 * 3600 + 60)
        predictor.record_prompt(evening, day * DAY_S + 20 * 3600)
    found = predictor.expected(3 * DAY_S, DAY_S)
    assert [list(expectation.keys) for expectation in found] == [morning, also_morning, evening]


def test_a_habit_that_ended_is_expected_a_few_days_and_no_longer() -> None:
    predictor = Predictor()
    for day in range(10):
        predictor.record_prompt(chain("ended"), day * DAY_S + 5000)
    expected_on = [day for day in range(10, 40) if predictor.expected(day * DAY_S, 10_000)]
    assert expected_on == list(range(10, 10 + len(expected_on))) and 1 <= len(expected_on) <= 4


def test_what_came_today_is_not_expected_today_again() -> None:
    predictor = Predictor()
    for day in range(3):
        predictor.record_prompt(chain("daily"), day * DAY_S + 5000)
    assert predictor.expected(2 * DAY_S + 4000, 3600) == []
    assert [found.at_s for found in predictor.expected(2 * DAY_S + 4000, DAY_S + 3600)] == [3 * DAY_S + 5000]


@pytest.mark.parametrize(
    "options", [{"decay": 0.95}, {"decay": 0}, {"tolerance_s": 50_000}, {"tolerance_s": 0}, {"capacity_blocks": 0}]
)
def test_settings_that_would_expect_anything_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        Predictor(**options)  # type: ignore[arg-type]
