"""Decoding in runs of steps against decoding step by step, and both against what is computed by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.sim.cluster.toy import SILENT, TOY

from skymemory.conductor.cost_model import LLAMA_70B, CostModel, LLAMA_70B_8xA800, Machine
from skymemory_lab.sim.clock import Clock
from skymemory_lab.sim.cluster.decode import DecodeInstance
from skymemory_lab.sim.cluster.job import DecodeBatch, DecodeStream, Gaps, Steps
from skymemory_lab.sim.cluster.setup import ClusterSetup


@dataclass(slots=True)
class Answer:
    """One that comes to be decoded at ``at_s``, ``late_s`` after its first token."""

    at_s: float
    prompt: int
    output: int
    priority: int = 0
    late_s: float = 0.0


def in_runs(answers: list[Answer], cost: CostModel, kv: int, most: int) -> tuple[dict[int, tuple[float, float]], Gaps]:
    """End and longest gap of each, by number; and all gaps."""
    clock, gaps, ends = Clock(), Gaps(), {}
    instance = DecodeInstance(
        clock,
        ClusterSetup(kv_tokens=kv, most_batch=most),
        DecodeBatch(Steps(cost), gaps),
        replace(SILENT, answered=lambda one, now_s: ends.update({one.number: (now_s, one.worst_s)})),
    )
    for number, one in enumerate(answers):
        stream = DecodeStream(number, one.prompt, one.output, one.at_s - one.late_s, one.priority)
        clock.at(one.at_s, lambda now_s, stream=stream: instance.arrive(stream, now_s))
    clock.run()
    return ends, gaps


def step_by_step(
    answers: list[Answer], cost: CostModel, kv: int, most: int
) -> tuple[dict[int, tuple[float, float]], list[float]]:
    """The same, the obvious way."""
    coming = sorted(range(len(answers)), key=lambda number: answers[number].at_s)
    waiting: list[int] = []
    batch: dict[int, list[float]] = {}  # tokens so far, when the last came, longest gap
    ends: dict[int, tuple[float, float]] = {}
    gaps: list[float] = []
    now_s = 0.0
    while coming or waiting or batch:
        if not waiting and not batch:
            now_s = max(now_s, answers[coming[0]].at_s)
        while coming and answers[coming[0]].at_s <= now_s:
            waiting.append(coming.pop(0))
        waiting.sort(key=lambda number: -answers[number].priority)
        while waiting and len(batch) < most:
            size = answers[waiting[0]].prompt + answers[waiting[0]].output
            if size + sum(answers[one].prompt + answers[one].output for one in batch) > kv:
                break
            one = waiting.pop(0)
            batch[one] = [1, answers[one].at_s - answers[one].late_s, 0.0]
        now_s += cost.decode_step_s(len(batch), sum(answers[one].prompt + state[0] for one, state in batch.items()))
        for one, state in list(batch.items()):
            gaps.append(now_s - state[1])
            state[:] = [state[0] + 1, now_s, max(state[2], now_s - state[1])]
            if state[0] == answers[one].output:
                ends[one] = (now_s, state[2])
                del batch[one]
    return ends, gaps


def drawn(seed: int, count: int = 60) -> list[Answer]:
    dice = random.Random(seed)
    return [
        Answer(
            dice.uniform(0, 20),
            dice.choice((10, 900, 12_000, 120_000)),
            dice.choice((2, 3, 20, 300, 1_000)),
            dice.choice((0, 0, 1)),
            dice.uniform(0, 0.5),
        )
        for _ in range(count)
    ]


def agree(answers: list[Answer], cost: CostModel, kv: int, most: int) -> None:
    ends, gaps = in_runs(answers, cost, kv, most)
    slow_ends, slow_gaps = step_by_step(answers, cost, kv, most)
    assert set(ends) == set(slow_ends) == set(range(len(answers)))
    for number, figures in ends.items():
        assert figures == pytest.approx(slow_ends[number], rel=1e-9)
    seconds, counts = gaps.classes()
    assert sum(counts) == len(slow_gaps)
    assert sum(s * c for s, c in zip(seconds, counts, strict=True)) == pytest.approx(sum(slow_gaps), rel=1e-9)
    expected = Gaps()
    for gap_s in slow_gaps:
        expected.add(gap_s)
    assert seconds == pytest.approx(expected.classes()[0], rel=1e-9)
    assert counts == expected.classes()[1]


BOUND_BY_BOTH = replace(LLAMA_70B_8xA800, mfu=0.002, decode_fixed_s=0.003, decode_request_s=0.0001)
"""Computing is slow enough that a run can begin bound by reading and end bound by computing, or the other way."""


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("cost", [LLAMA_70B_8xA800, BOUND_BY_BOTH], ids=["read", "both"])
@pytest.mark.parametrize(("kv", "most"), [(10_000_000, 256), (300_000, 256), (10_000_000, 4)], ids=str)
def test_runs_are_the_steps_that_they_are_made_of(cost: CostModel, kv: int, most: int) -> None:
    for seed in range(3):
        agree(drawn(seed), cost, kv, most)


def test_a_run_that_begins_bound_by_reading_and_ends_bound_by_computing() -> None:
    cost = LLAMA_70B_8xA800.at(0.02)
    fixed_s, read_s, read_per_s, flops_s, flops_per_s = cost.decode_parts(1)
    crossing = int((read_s - flops_s) / (flops_per_s - read_per_s))
    assert fixed_s + read_s + read_per_s * (crossing + 100) < cost.decode_step_s(1, crossing + 100)
    agree([Answer(1.0, crossing - 400, 900)], cost, 10_000_000, 8)
    agree([Answer(1.0, crossing - 400, 900), Answer(10.0, 10, 2)], cost, 10_000_000, 8)


def test_by_hand() -> None:
    # Alone, contexts of 11 and 12 tokens: 1 + 2.2 and 1 + 2.4 ms. Who comes at 4 ms joins when that step ends, at 6.6:
    # 1 + 0.2·(13 + 101) = 23.8 ms for both, then alone 1 + 0.2·102.
    ends, gaps = in_runs([Answer(0.0, 10, 4), Answer(0.004, 100, 3, late_s=0.001)], TOY, 1_000, 8)
    assert ends[0] == pytest.approx((0.0304, 0.0238))
    assert ends[1] == pytest.approx((0.0518, 0.0274))
    assert sum(gaps.classes()[1]) == 5


def test_memory_is_kept_for_all_of_an_answer_and_the_line_is_not_overtaken() -> None:
    answers = [Answer(0.0, 50, 11), Answer(0.001, 50, 2), Answer(0.002, 10, 2)]
    ends, _ = in_runs(answers, TOY, 100, 8)
    assert ends[0][0] < ends[1][0]
    assert ends[0][0] < ends[2][0], "there was room for it, but not for the one before it"
    ends, _ = in_runs([answers[0], answers[1], replace(answers[2], priority=1)], TOY, 100, 8)
    assert ends[2][0] < ends[0][0]


@given(
    batch=st.integers(1, 300),
    kv=st.integers(1, 3_000_000),
    most=st.integers(1, 3_000),
    share=st.floats(0, 1.2),
    mfu=st.sampled_from([0.0005, 0.002, 0.01, 0.5]),
)
def test_the_fewest_steps_that_take_so_long(batch: int, kv: int, most: int, share: float, mfu: float) -> None:
    cost = replace(LLAMA_70B_8xA800, mfu=mfu)
    steps = Steps(cost)
    seconds = share * steps.run_s(batch, kv, most)
    found = steps.steps_until(batch, kv, seconds, most)
    assert 1 <= found <= most
    assert found == most or steps.run_s(batch, kv, found) >= seconds
    assert found == 1 or steps.run_s(batch, kv, found - 1) < seconds


@pytest.mark.parametrize("batch", [1, 7, 90, 200, 512])
@pytest.mark.parametrize("kv_tokens", [0, 900, 70_000, 900_000])
@pytest.mark.parametrize("flops_per_s", [8 * 312e12, 60e12])
def test_a_run_of_steps_is_their_sum(batch: int, kv_tokens: int, flops_per_s: float) -> None:
    machine = Machine("m", flops_per_s, 16e12, 1e11)
    cost = CostModel(LLAMA_70B, machine, mfu=0.5, decode_fixed_s=0.003, decode_request_s=1e-5)
    for steps in (0, 1, 2, 50, 700):
        one_by_one = sum(cost.decode_step_s(batch, kv_tokens + step * batch) for step in range(steps))
        assert Steps(cost).run_s(batch, kv_tokens, steps) == pytest.approx(one_by_one, rel=1e-12)
