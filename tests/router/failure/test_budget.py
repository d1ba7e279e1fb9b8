"""Sends of a request, retries of all requests; in virtual time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from skymemory.router.failure.budget import WINDOW_S, RetryBudget, Sends


@given(st.integers(0, 5), st.integers(0, 12))
def test_a_request_is_sent_no_more_often_than_allowed(most: int, tries: int) -> None:
    sends = Sends(most)
    assert sum(sends.take() for _ in range(tries)) == min(most, tries) == sends.count
    assert sends.remaining == most - sends.count


@given(
    st.lists(st.tuples(st.sampled_from(["begin", "end", "retry"]), st.floats(0, 3)), max_size=300),
    st.floats(0, 1),
    st.integers(0, 5),
)
def test_retries_are_a_share_of_the_requests_of_the_last_seconds_or_under_way(
    schedule: list[tuple[str, float]], share: float, floor: int
) -> None:
    budget, now_s, under_way = RetryBudget(share, floor), 100.0, 0
    begun: list[float] = []
    retried: list[float] = []
    for what, later_s in schedule:
        now_s += later_s
        if what == "begin":
            budget.on_request(now_s)
            begun.append(now_s)
            under_way += 1
        elif what == "end" and under_way:
            budget.on_request_end()
            under_way -= 1
        elif what == "retry" and budget.take(now_s):
            retried.append(now_s)
            # Seconds are counted whole.
            recent = sum(int(at) > int(now_s) - WINDOW_S for at in retried)
            requests = sum(int(at) > int(now_s) - WINDOW_S for at in begun)
            assert recent <= max(floor, share * max(requests, under_way) + 1e-6)


def test_a_fleet_that_fails_everything_gets_a_fifth_more() -> None:
    budget, sends = RetryBudget(), 0
    for number in range(10_000):
        now_s = number * 0.003
        budget.on_request(now_s)
        sends += 1 + sum(budget.take(now_s) for _ in range(2))
        budget.on_request_end()
    assert 1.19 * 10_000 <= sends <= 1.2 * 10_000


def test_a_quiet_router_may_retry_a_few_times() -> None:
    budget = RetryBudget()
    budget.on_request(0.0)
    assert [budget.take(0.0) for _ in range(5)] == [True, True, True, False, False]
    assert budget.take(WINDOW_S + 1.0)
