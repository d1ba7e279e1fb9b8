"""The two pointers: every chunk comes once, in time, and close to the best split in hindsight."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skymemory.cache.cake.pace import SpeedEstimate
from skymemory.cache.cake.scheduler import BidirectionalLoader, ComputeStep, PromptChunk, cut_prompt
from skymemory.errors import InvalidInput
from skymemory_lab.sim.loading import LinkTrace, best_split_s, simulate_load

TOKEN_BYTES = 1000
ROOM = 10**9


def chunks_of(*tokens: int, loadable: bool = True) -> list[PromptChunk]:
    first, chunks = 0, []
    for count in tokens:
        chunks.append(PromptChunk(first, count, count * TOKEN_BYTES, loadable))
        first += count
    return chunks


def loader_of(chunks: list[PromptChunk], room: int = ROOM, budget: int = 100, **options: object) -> BidirectionalLoader:
    loader = BidirectionalLoader(max_in_flight_bytes=room, budget_tokens=budget, **options)  # type: ignore[arg-type]
    loader.push_seq(chunks, 0.0)
    return loader


def test_computes_from_the_front_and_loads_from_the_back() -> None:
    loader = BidirectionalLoader(max_in_flight_bytes=200_000, budget_tokens=100)
    assert loader.push_seq(chunks_of(100, 100, 100, 40), 0.0) == ((3, 40_000), (2, 100_000), (1, 100_000), (0, 100_000))
    actions = loader.poll(0.0)
    assert actions.compute == ComputeStep(0, 0, 100)
    assert actions.fetch == (3, 2)  # the third would be more than may be in flight
    loader.chunk_loaded(3, 1.0)
    assert loader.is_resident(3)
    assert not loader.is_resident(2)


def test_one_chunk_larger_than_the_bound_may_be_in_flight() -> None:
    assert loader_of(chunks_of(100, 100), room=1).poll(0.0).fetch == (1,)


def test_meets_and_says_where() -> None:
    loader = loader_of(chunks_of(100, 100, 100), room=1)
    loader.poll(0.0)
    loader.chunk_computed(1.0)
    assert loader.poll(1.0).compute == ComputeStep(1, 100, 100)
    loader.chunk_loaded(2, 1.5)
    loader.poll(1.5)
    loader.chunk_computed(2.0)
    assert loader.done
    result = loader.result()
    assert (result.computed_tokens, result.loaded_tokens, result.loaded_bytes) == (200, 100, 100_000)
    assert (result.met_at_token, result.seconds, result.wasted_bytes, result.wasted_tokens) == (100, 2.0, 0, 0)


def test_a_load_expected_sooner_is_waited_for_and_computed_when_it_is_late_by_as_much() -> None:
    pace = SpeedEstimate()
    pace.step_took(50, 10.0)
    pace.load_took(100_000, 1.0)
    loader = loader_of(chunks_of(100), pace=pace)
    actions = loader.poll(0.0)
    assert actions.compute is None
    assert actions.fetch == (0,)
    assert actions.wake_s == pytest.approx(11.0)
    assert loader.poll(5.0).compute is None
    assert loader.poll(11.0).compute == ComputeStep(0, 0, 100)
    loader.chunk_computed(21.0)
    assert loader.done
    assert loader.poll(21.0).cancel == (0,)
    loader.chunk_loaded(0, 22.0)  # too late: changes nothing
    assert loader.result().computed_tokens == 100
    assert loader.result().wasted_bytes == 100_000


def test_what_is_computed_sooner_is_not_asked_for() -> None:
    pace = SpeedEstimate()
    pace.step_took(50, 1.0)
    pace.load_took(100_000, 10.0)
    actions = loader_of(chunks_of(100), pace=pace).poll(0.0)
    assert actions.compute == ComputeStep(0, 0, 100)
    assert actions.fetch == ()


def test_a_step_goes_over_small_chunks_as_far_as_its_budget() -> None:
    loader = loader_of(chunks_of(30, 30, 30, 30, 30), budget=100, room=1, loads=False)
    assert loader.poll(0.0).compute == ComputeStep(0, 0, 100, chunks=4)
    loader.chunk_computed(1.0)
    assert [loader.is_resident(i) for i in range(5)] == [True, True, True, False, False]
    assert loader.poll(1.0).compute == ComputeStep(3, 100, 50, chunks=2)
    loader.chunk_computed(2.0)
    assert loader.done
    assert loader.result().computed_tokens == 150


def test_a_step_stops_before_what_is_there_or_expected_sooner() -> None:
    pace = SpeedEstimate()
    pace.step_took(50, 1.0)
    pace.load_took(20_000, 0.35)
    loader = loader_of(chunks_of(20, 20, 20, 20, 20), pace=pace)
    actions = loader.poll(0.0)
    # Three chunks of the five fill 60 % of a step: 0.8 s, as nothing is known of steps that are not full. Two loads
    # take 0.7 s and three 1.05 s, so the third chunk is computed and the last two are loaded.
    assert actions.compute == ComputeStep(0, 0, 60, chunks=3)
    assert actions.fetch == (4, 3)
    loader.chunk_loaded(4, 0.35)
    loader.chunk_loaded(3, 0.7)
    assert not loader.done
    loader.chunk_computed(0.8)
    assert loader.done
    assert loader.result().wasted_bytes == loader.result().wasted_tokens == 0


def test_a_step_stops_before_a_chunk_that_is_there() -> None:
    chunks = [PromptChunk(0, 20), PromptChunk(20, 20, resident=True), PromptChunk(40, 20)]
    loader = loader_of(chunks, budget=100)
    assert loader.poll(0.0).compute == ComputeStep(0, 0, 20)
    loader.chunk_computed(1.0)
    assert loader.poll(1.0).compute == ComputeStep(2, 40, 20)


@pytest.mark.parametrize(("others_fill", "tokens"), [(True, 80), (None, 80), (False, 60)])
def test_a_step_that_costs_less_when_shorter_stops_before_what_may_come_any_moment(
    others_fill: bool | None, tokens: int
) -> None:
    loader = loader_of(chunks_of(20, 20, 20, 20), budget=100, room=1, others_fill=others_fill)
    actions = loader.poll(0.0)
    assert actions.fetch == (3,)
    assert actions.compute is not None and actions.compute.tokens == tokens


def test_what_comes_while_a_step_goes_over_it_is_counted_once() -> None:
    loader = loader_of(chunks_of(20, 20, 20, 20), budget=100)
    actions = loader.poll(0.0)
    assert (actions.compute, actions.fetch) == (
        ComputeStep(0, 0, 80, chunks=4),
        (3, 2, 1, 0),
    )  # the first chunk is unknown
    loader.chunk_loaded(3, 0.1)
    loader.chunk_loaded(2, 0.2)
    assert loader.poll(0.2).compute is None
    loader.chunk_computed(1.0)
    assert loader.done
    assert loader.poll(1.0).cancel == (0, 1)
    result = loader.result()
    assert (result.computed_tokens, result.loaded_tokens, result.wasted_tokens) == (40, 40, 40)
    assert result.wasted_bytes == 40_000


def test_part_of_a_chunk_computed_and_then_loaded_is_counted_as_wasted() -> None:
    loader = loader_of(chunks_of(80, 80, 80), budget=100, room=1)
    loader.poll(0.0)
    loader.chunk_loaded(2, 0.6)
    assert loader.poll(0.6).fetch == (1,)
    loader.chunk_computed(1.0)
    assert [loader.is_resident(i) for i in range(3)] == [True, False, True]
    assert loader.poll(1.0).compute is None  # 60 tokens are left of chunk 1: 0.8 s, and its load is due in 0.2 s
    loader.chunk_loaded(1, 1.3)
    assert loader.done
    assert loader.result().wasted_tokens == 20


def test_of_a_distant_link_the_first_load_is_given_its_latency() -> None:
    pace = SpeedEstimate()
    pace.step_took(50, 2.0)
    pace.load_took(100_000, 1.0)
    pace.load_took(100_000, 1.5, from_idle=True)
    loader = loader_of(chunks_of(100), pace=pace)
    actions = loader.poll(0.0)
    assert actions.fetch == (0,) and actions.compute is None
    assert actions.wake_s == pytest.approx(3.5)  # expected at 1.5, and as late again as computing takes
    near = loader_of(chunks_of(100, 100), pace=(pace := SpeedEstimate()))
    assert near.poll(0.0).fetch == (1, 0)
    near.chunk_loaded(1, 3.0)
    near.chunk_loaded(0, 3.5)
    assert (pace.bytes_per_s, pace.latency_s) == (200_000, 2.5)


def test_a_failed_chunk_is_computed_and_the_rest_of_the_tail_is_kept() -> None:
    run = simulate_load(
        chunks_of(*[100] * 8),
        lambda first, tokens: 1.0,
        LinkTrace.constant(100_000),
        budget_tokens=100,
        max_in_flight_bytes=1,
        failing={6},
    )
    assert run.origins[6] == "computed"
    assert run.origins[5] == run.origins[7] == "loaded"
    assert run.result.failed_loads == 1


def test_without_budget_computing_pauses_and_loading_goes_on() -> None:
    loader = loader_of(chunks_of(100, 100), budget=0)
    actions = loader.poll(0.0)
    assert (actions.compute, actions.fetch) == (None, (1, 0))
    loader.chunk_loaded(1, 1.0)
    loader.budget_changed(30)
    assert loader.poll(1.0).compute == ComputeStep(0, 0, 30)
    loader.load_failed(0, 1.5)
    assert loader.poll(1.5).compute is None  # one step at a time
    loader.chunk_computed(2.0)
    assert loader.poll(2.0).compute == ComputeStep(0, 30, 30)


def test_resident_prefix_and_holes() -> None:
    chunks = cut_prompt(
        1100, step_tokens=256, block_tokens=128, stored_blocks=[7, 7, None, 7, 7, 7, 7, 7], resident_tokens=128
    )
    assert [(c.first_token, c.tokens, c.size_bytes, c.loadable, c.resident) for c in chunks] == [
        (0, 128, 0, False, True),
        (128, 128, 7, True, False),
        (256, 128, 0, False, False),
        (384, 128, 7, True, False),
        (512, 256, 14, True, False),
        (768, 256, 14, True, False),
        (1024, 76, 0, False, False),
    ]
    run = simulate_load(
        chunks, lambda first, tokens: 1.0, LinkTrace.constant(1000), budget_tokens=256, max_in_flight_bytes=100
    )
    assert run.origins[0] == "resident"
    assert run.origins[2] == run.origins[6] == "computed"
    assert run.origins[4] == run.origins[5] == "loaded"


def test_abort_cancels_everything() -> None:
    loader = loader_of(chunks_of(100, 100, 100))
    assert loader.poll(0.0).fetch == (2, 1, 0)
    loader.abort(1.0)
    actions = loader.poll(1.0)
    assert (actions.fetch, actions.compute, actions.cancel) == ((), None, (2, 1, 0))
    assert not loader.done  # the step cannot be called back
    loader.chunk_computed(2.0)
    assert loader.done
    assert loader.result().aborted
    assert loader.result().wasted_bytes == 300_000


def test_one_pointer_fixed() -> None:
    chunks, trace = chunks_of(100, 100, 60), LinkTrace.constant(50_000)

    def run(**options: bool) -> tuple[float, tuple[str, ...]]:
        load = simulate_load(
            chunks, lambda first, tokens: tokens / 100, trace, budget_tokens=100, max_in_flight_bytes=1, **options
        )
        return load.ttft_s, load.origins

    assert run(loads=False) == (pytest.approx(2.6), ("computed",) * 3)
    assert run(computes=False) == (pytest.approx(5.2), ("loaded",) * 3)


def test_refuses_nonsense() -> None:
    with pytest.raises(InvalidInput, match="one prompt"):
        loader_of([])
    with pytest.raises(InvalidInput, match="follow"):
        loader_of([PromptChunk(0, 5), PromptChunk(6, 5)])
    with pytest.raises(InvalidInput, match="no step"):
        loader_of(chunks_of(5)).chunk_computed(1.0)
    with pytest.raises(InvalidInput, match="whole number"):
        cut_prompt(10, step_tokens=5, block_tokens=2, stored_blocks=[])


@st.composite
def prompts(draw: st.DrawFn) -> list[PromptChunk]:
    chunks, first = [], 0
    for number in range(draw(st.integers(1, 14))):
        tokens = draw(st.integers(1, 64))
        kind = draw(st.sampled_from(["stored", "stored", "stored", "hole", "resident"]))
        resident = kind == "resident" and (not number or chunks[-1].resident)
        chunks.append(PromptChunk(first, tokens, draw(st.integers(0, 9000)), kind == "stored", resident))
        first += tokens
    return chunks


@settings(deadline=None, max_examples=150)
@given(
    chunks=prompts(),
    data=st.data(),
    budget=st.integers(1, 64),
    room=st.integers(1, 30_000),
    rates=st.lists(st.floats(10, 1e6), min_size=1, max_size=5),
    computes=st.booleans(),
    loads=st.booleans(),
)
def test_every_chunk_comes_exactly_once_whatever_happens(
    chunks: list[PromptChunk],
    data: st.DataObject,
    budget: int,
    room: int,
    rates: list[float],
    computes: bool,
    loads: bool,
) -> None:
    failing = data.draw(st.sets(st.integers(0, len(chunks) - 1)))
    budgets = data.draw(st.dictionaries(st.floats(0, 50), st.integers(0, 64), max_size=4))
    run = simulate_load(
        chunks,
        lambda first, tokens: (1 + first / 100) * 0.3,
        LinkTrace(tuple(3.0 * i for i in range(len(rates))), tuple(rates)),
        budget_tokens=budget,
        max_in_flight_bytes=room,
        computes=computes,
        loads=loads,
        failing=failing,
        budgets={**budgets, 60.0: 8},
    )
    for chunk, origin, index in zip(chunks, run.origins, range(len(chunks)), strict=True):
        assert origin == "resident" if chunk.resident else origin in ("computed", "loaded")
        assert origin != "loaded" or (chunk.loadable and loads and index not in failing)
        if not computes and loads and chunk.loadable and index not in failing and not chunk.resident:
            assert origin == "loaded"
    result = run.result
    assert result.resident_tokens + result.computed_tokens + result.loaded_tokens == sum(c.tokens for c in chunks)


@settings(deadline=None, max_examples=100)
@given(
    tokens=st.sampled_from([2048, 5000, 9216, 14336, 16000, 32768]),
    mbit_per_s=st.sampled_from([2000, 5000, 10000, 20000]),
    share=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    first_ms=st.floats(25, 65),
    growth=st.floats(0, 2),
    size=st.sampled_from([128, 512]),
    alone=st.booleans(),
    known=st.booleans(),
)
def test_close_to_the_best_split_in_hindsight(
    tokens: int, mbit_per_s: int, share: float, first_ms: float, growth: float, size: int, alone: bool, known: bool
) -> None:
    """Once the speeds are known within 3 %; before, one step may be begun that the link would have beaten.

    Not knowing whether a step that is not full costs less (alone on the GPU) or not (others fill it), a loader that saw
    none yet takes the middle, and may be wrong by half a step.
    """
    chunks = [
        PromptChunk(at, min(size, tokens - at), min(size, tokens - at) << 19, True) for at in range(0, tokens, size)
    ]

    def step_s(first: int, count: int) -> float:
        full_s = first_ms / 1000 * (1 + growth * (first + count / 2) / 32768)
        return full_s * count / budget if alone else full_s

    trace, budget = LinkTrace.constant(mbit_per_s * 125_000), int(512 * share)
    pace = SpeedEstimate()
    cold, warm = (
        simulate_load(
            chunks,
            step_s,
            trace,
            budget_tokens=budget,
            max_in_flight_bytes=1,
            pace=pace,
            others_fill=not alone if known else None,
        )
        for _ in "12"
    )
    best = best_split_s(chunks, step_s, trace, budget_tokens=budget)
    unsure_s = 0.0 if known else step_s(tokens, budget) / 2
    assert warm.ttft_s <= best * 1.03 + unsure_s, (warm.ttft_s / best, warm.result)
    assert cold.ttft_s <= best * 1.03 + step_s(0, budget), (cold.ttft_s / best, cold.result)


def test_a_step_that_was_not_computed_is_asked_for_again_or_not_needed() -> None:
    loader = loader_of(chunks_of(100, 100), budget=50)
    assert loader.poll(0.0).compute == ComputeStep(0, 0, 50)
    loader.step_dropped()
    assert loader.poll(1.0).compute == ComputeStep(0, 0, 50)
    loader.chunk_computed(2.0)
    assert loader.poll(2.0).compute == ComputeStep(0, 50, 50)
    loader.chunk_loaded(1, 2.5)
    loader.chunk_loaded(0, 3.0)
    loader.step_dropped()
    assert loader.done and loader.result().wasted_tokens == 50
    assert loader.result().loaded_tokens == 200


def test_what_was_measured_long_ago_gives_way_to_what_is_measured_now() -> None:
    pace = SpeedEstimate()
    for at in range(100):
        pace.step_took(at * 100, 1.0 + at)
        pace.load_took(1000, 1.0)
    before = [pace.step_s(position) for position in (0, 500, 9000)]
    pace.fade(4)
    assert [pace.step_s(position) for position in (0, 500, 9000)] == pytest.approx(before)
    assert pace.bytes_per_s == pytest.approx(1000)
    for _ in range(12):
        pace.load_took(1000, 0.1)
    assert pace.bytes_per_s == pytest.approx(16_000 / 5.2)
    few = SpeedEstimate()
    few.step_took(0, 2.0)
    few.fade(4)
    assert few.step_s(0) == 2.0


def test_steps_of_one_place_have_no_slope() -> None:
    pace = SpeedEstimate()
    for seconds in (1.0, 1.1, 0.9, 1.0):
        pace.step_took(64.1, seconds)
    pace.fade(1)
    assert pace.step_s(10_000) == pytest.approx(1.0)
