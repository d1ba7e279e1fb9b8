"""Token buckets, byte budgets and back-offs, beside naive twins in exact numbers."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.pacing import Backoff, ByteBudget, TokenBucket, backoff_s

EIGHTHS = st.integers(0, 800).map(lambda count: count / 8)


class NaiveBucket:
    """It adds what each eighth of a second brings."""

    def __init__(self, per_s: float, most: float) -> None:
        self.per_s, self.most, self.level, self.at_s = Fraction(per_s), Fraction(most), Fraction(most), Fraction(0)

    def refill(self, now_s: float) -> None:
        while self.at_s < now_s:
            self.at_s += Fraction(1, 8)
            self.level = min(self.most, self.level + self.per_s / 8)


@given(
    st.sampled_from([0.25, 1.0, 8.0]),
    EIGHTHS,
    st.lists(st.tuples(st.sampled_from(["spend", "give back", "resize"]), EIGHTHS, st.integers(0, 40)), max_size=30),
)
def test_a_bucket_holds_what_each_moment_brings_and_no_more(
    per_s: float, most: float, calls: list[tuple[str, float, int]]
) -> None:
    bucket, naive, now_s = TokenBucket(per_s, most), NaiveBucket(per_s, most), 0.0
    for call, amount, later in calls:
        now_s += later / 8
        naive.refill(now_s)
        assert bucket.refill(now_s) == naive.level <= naive.most
        if call == "spend":
            naive.level -= Fraction(amount)
            assert bucket.spend(amount, now_s) == naive.level
        elif call == "give back":
            naive.level = min(naive.most, naive.level + Fraction(amount))
            bucket.give_back(amount)
        else:
            spent, debt = naive.most - naive.level, min(Fraction(0), naive.level)
            naive.most, naive.per_s = Fraction(amount), 2 * naive.per_s
            naive.level = max(debt, naive.most - spent)
            bucket.resize(2 * bucket.per_s, amount, now_s)
        assert bucket.level == naive.level
        missing = max(0, Fraction(amount) - naive.level)
        assert bucket.wait_s(amount) == missing / naive.per_s


@given(st.integers(0, 100), st.lists(st.tuples(st.booleans(), st.integers(1, 150)), max_size=50))
def test_bytes_in_use_stay_within_the_limit_or_are_of_one_amount(limit: int, calls: list[tuple[bool, int]]) -> None:
    budget, in_use, most = ByteBudget(limit), list[int](), 0
    for takes, size in calls:
        if takes:
            assert budget.has_room(size) == (sum(in_use) + size <= limit or not in_use)
            if budget.has_room(size):
                budget.change(size)
                in_use.append(size)
        elif in_use:
            budget.change(-in_use.pop(size % len(in_use)))
        most = max(most, sum(in_use))
        assert (budget.used_bytes, budget.most_bytes) == (sum(in_use), most)
        assert sum(in_use) <= limit or len(in_use) == 1


@given(st.integers(1, 10_000), st.integers(0, 1000))
def test_a_back_off_doubles_up_to_a_bound_and_is_random_by_its_seed(failures: int, seed: int) -> None:
    bound_s = 0.025
    for _ in range(min(failures, 10) - 1):
        bound_s = min(0.25, 2 * bound_s)
    assert backoff_s(failures, 0.025, 0.25) == bound_s
    wait_s = backoff_s(failures, 0.025, 0.25, Random(seed).random)
    assert bound_s / 2 <= wait_s <= bound_s and wait_s == backoff_s(failures, 0.025, 0.25, Random(seed).random)


def test_tries_that_fail_are_made_at_growing_intervals() -> None:
    again, tried_s = Backoff(0.1, 30.0), []
    for at_s in (tick / 100 for tick in range(20_000)):
        if at_s >= again.due_s:
            tried_s.append(at_s)
            again.on_result(False, at_s)
    waits_s = [after - before for before, after in pairwise(tried_s)]
    assert waits_s == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, *[30.0] * 4], abs=0.02)
    again.on_result(True, 100.0)
    assert again.due_s <= 100.0 and again.next_s() == 0.1
