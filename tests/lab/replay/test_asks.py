"""What a replay sends and when; and what one endless cache would hit of it."""

from __future__ import annotations

import pytest

from skymemory.errors import InvalidInput
from skymemory_lab.replay.prompts import plan_requests, reusable_share
from skymemory_lab.sim.trace import TraceRequest

TRACE = [
    TraceRequest(10.0, 1024, 100, (0, 1)),
    TraceRequest(13.0, 1500, 1, (0, 1, 2)),
    TraceRequest(11.0, 600, 3000, (0, 3)),
    TraceRequest(40.0, 9000, 10, (0, 4)),
]


def test_the_first_is_due_at_once_and_the_rest_in_the_order_of_their_times() -> None:
    asks = plan_requests(TRACE).requests
    assert [(ask.number, ask.due_s) for ask in asks] == [(0, 0.0), (2, 1.0), (1, 3.0), (3, 30.0)]
    assert [(ask.prompt_tokens, ask.output_tokens) for ask in asks][:2] == [(1024, 100), (600, 3000)]


def test_lengths_are_scaled_and_answers_cut() -> None:
    asks = plan_requests(TRACE, scale=0.1, most_output=50).requests
    assert [(ask.prompt_tokens, ask.output_tokens) for ask in asks] == [(102, 10), (60, 50), (150, 1), (900, 1)]


def test_what_does_not_fit_is_left_out_and_counted() -> None:
    found = plan_requests(TRACE, context_tokens=2000)
    assert [ask.number for ask in found.requests] == [0, 1] and found.too_long == 2
    with pytest.raises(InvalidInput, match="4 exceed 100 tokens"):
        plan_requests(TRACE, context_tokens=100)


def test_so_many_or_so_long_and_no_more() -> None:
    assert [ask.number for ask in plan_requests(TRACE, most=2).requests] == [0, 2]
    assert [ask.number for ask in plan_requests(TRACE, span_s=3.0).requests] == [0, 2, 1]


@pytest.mark.parametrize("wrong", [{"scale": 0.0}, {"scale": -1.0}, {"most_output": 0}, {"most": 0}, {"span_s": 0.0}])
def test_refuses_what_would_send_nothing(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        plan_requests(TRACE, **wrong)  # type: ignore[arg-type]


def test_what_an_endless_cache_would_hit() -> None:
    """Of 1024 + 600 + 1500 + 9000 tokens: 512 of the second, 1024 of the third, 512 of the fourth."""
    assert reusable_share(plan_requests(TRACE).requests, 512) == pytest.approx((512 + 1024 + 512) / 12_124)
    assert reusable_share([], 512) == 0.0
