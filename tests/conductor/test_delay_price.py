"""The price of delaying others: by hand, after traffic of known rate, and when it has ended."""

from __future__ import annotations

import math

import pytest

from skymemory.conductor.strategies.estimates import DelayPrice
from skymemory.errors import InvalidInput
from skymemory.native.twin.ttft import CROWDED


def steady(price: DelayPrice, every_s: float, work_s: float, until_s: float) -> float:
    now_s = 0.0
    while now_s < until_s:
        price.sent(work_s, now_s)
        now_s += every_s
    return now_s


def test_steady_traffic_costs_what_the_formula_says() -> None:
    price = DelayPrice(weight=1.0, window_s=50.0)
    now_s = steady(price, every_s=0.25, work_s=0.8, until_s=1000.0)
    # Four requests a second to eight servers: each gets half a one, and is busy for 0.4 of the time.
    assert price.rate(8, now_s) == pytest.approx(0.5 / (1 - 0.4), rel=0.01)
    # To four servers: each gets one a second, and is busy for 0.8.
    assert price.rate(4, now_s) == pytest.approx(1.0 / (1 - 0.8), rel=0.03)


def test_overload_counts_as_most_busy() -> None:
    price = DelayPrice(weight=0.5, window_s=50.0, most_busy=0.75)
    now_s = steady(price, every_s=1.0, work_s=30.0, until_s=1000.0)
    assert price.rate(1, now_s) == pytest.approx(0.5 * 1.0 / 0.25, rel=0.02)


def test_without_traffic_there_is_no_one_to_delay() -> None:
    price = DelayPrice(weight=1.0, window_s=50.0)
    assert price.rate(3, 0.0) == 0.0
    now_s = steady(price, every_s=1.0, work_s=0.0, until_s=1000.0)
    at_once = price.rate(1, now_s)
    assert price.rate(1, now_s + 50.0) == pytest.approx(at_once / math.e)
    assert price.rate(1, now_s) == at_once, "asking changes nothing"
    price.sent(0.0, now_s - 500.0)
    assert price.rate(1, now_s) == pytest.approx(at_once + 1 / 50, rel=0.05), "a clock that stepped back adds no more"


def test_where_a_server_is_free_its_own_queue_counts() -> None:
    price = DelayPrice(weight=1.0, window_s=50.0)
    now_s = steady(price, every_s=0.25, work_s=0.8, until_s=1000.0)
    rate = price.rate(2, now_s)
    assert price.delays_s([0.0, 6.0], [2.0, 0.5], 0.8, now_s) == pytest.approx([2 * rate, 0.5 * 6.25 * rate])


def test_where_all_wait_long_the_shortest_queue_counts_for_all() -> None:
    price = DelayPrice(weight=1.0, window_s=50.0)
    now_s = steady(price, every_s=0.25, work_s=0.8, until_s=1000.0)
    rate = price.rate(2, now_s)
    halfway = price.delays_s([0.8, 1.2], [2.0, 2.0], 0.8, now_s)
    assert halfway == pytest.approx([(1 + CROWDED / 2) * rate * 2 * at for at in (0.8 + 1, 1.0 + 1)])
    long = price.delays_s([1e9, 3e9], [2.0, 2.0], 0.8, now_s)
    assert long == pytest.approx([(1 + CROWDED) * rate * 2 * 1e9] * 2, rel=1e-3)


@pytest.mark.parametrize("wrong", [{"weight": -0.1}, {"window_s": 0.0}, {"most_busy": 1.0}])
def test_refuses_what_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        DelayPrice(**wrong)
