"""The simulated link and GPU under the loader, and the split in hindsight."""

from __future__ import annotations

import pytest

from skymemory.cache.cake.pace import SpeedEstimate
from skymemory.cache.cake.scheduler import PromptChunk
from skymemory.errors import InvalidInput
from skymemory_lab.sim.loading import LinkTrace, best_split_s, simulate_load

CHUNKS = [PromptChunk(at, 10, 100, True) for at in range(0, 40, 10)]


def test_a_link_that_changes_and_fails_for_a_while() -> None:
    trace = LinkTrace((0.0, 2.0, 5.0), (100.0, 0.0, 50.0))
    assert trace.finish_s(0.0, 150) == 1.5
    assert trace.finish_s(1.0, 100) == 2.0
    assert trace.finish_s(1.0, 150) == 6.0
    assert trace.finish_s(3.0, 50) == 6.0
    assert trace.finish_s(7.0, 50) == 8.0


@pytest.mark.parametrize(
    ("since_s", "rates"), [((), ()), ((1.0,), (1.0,)), ((0.0, 0.0), (1.0, 1.0)), ((0.0,), (0.0,)), ((0.0,), (1.0, 2.0))]
)
def test_refuses_traces_that_make_no_sense(since_s: tuple[float, ...], rates: tuple[float, ...]) -> None:
    with pytest.raises(InvalidInput, match="trace"):
        LinkTrace(since_s, rates)


def test_latency_is_waited_for_once_by_loads_behind_one_another() -> None:
    trace = LinkTrace.constant(50, latency_s=1.0)

    def load_s(room: int) -> float:
        return simulate_load(CHUNKS, lambda at, n: 1.0, trace, budget_tokens=0, max_in_flight_bytes=room).ttft_s

    assert load_s(400) == 9.0
    assert load_s(1) == 12.0
    assert best_split_s(CHUNKS, lambda at, n: 100.0, trace, budget_tokens=10) == 9.0
    with pytest.raises(InvalidInput, match="trace"):
        LinkTrace.constant(50, latency_s=-1.0)


def test_the_best_split_is_the_best_of_all() -> None:
    # Computing costs 1, 2, 3, 4 s; loading 2 s each: two and two end after 4 s, three and one after 6 s.
    assert best_split_s(CHUNKS, lambda at, n: 1 + at / 10, LinkTrace.constant(50), budget_tokens=10) == 4.0
    with pytest.raises(InvalidInput, match="all be loaded"):
        best_split_s([PromptChunk(0, 10)], lambda at, n: 1.0, LinkTrace.constant(50), budget_tokens=10)


def test_the_loader_finds_it() -> None:
    pace = SpeedEstimate()
    cold, warm = (
        simulate_load(
            CHUNKS,
            lambda at, n: 1 + at / 10,
            LinkTrace.constant(50),
            budget_tokens=10,
            max_in_flight_bytes=1,
            pace=pace,
        )
        for _ in "12"
    )
    assert cold.origins == warm.origins == ("computed", "computed", "loaded", "loaded")
    assert cold.ttft_s == 5.0  # after one step it is not yet known that they become dearer
    assert warm.ttft_s == 4.0


def test_an_outage_in_mid_load_is_computed_around() -> None:
    run = simulate_load(
        CHUNKS,
        lambda at, n: 1.0,
        LinkTrace((0.0, 1.1, 1000.0), (100.0, 0.0, 100.0)),
        budget_tokens=10,
        max_in_flight_bytes=1,
    )
    assert run.ttft_s == pytest.approx(4.0)  # due at 2, and waited for as long as computing takes
    assert run.result.wasted_bytes == 100


def test_says_when_nothing_can_go_on() -> None:
    with pytest.raises(InvalidInput, match="budget of 0"):
        simulate_load(
            CHUNKS, lambda at, n: 1.0, LinkTrace.constant(1), budget_tokens=0, max_in_flight_bytes=1, loads=False
        )
