"""Instances that prefill and decode: against a twin that goes step by step, and by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.lab.sim.cluster.toy import TOY, scripted

from skymemory.conductor.cost_model import LLAMA_70B_8xA800
from skymemory_lab.sim.cluster.setup import ClusterSetup
from skymemory_lab.sim.cluster.simulation import run_cluster
from skymemory_lab.sim.trace import TraceRequest

ALONE = ClusterSetup(prefill=0, decode=0, coupled=1, cost=TOY, kv_tokens=1_000_000, coupled_cache_tokens=51_200)
HERE = scripted(lambda request: ("coupled-0", None))


def step_by_step(requests: list[TraceRequest], setup: ClusterSetup) -> dict[int, tuple[float, float, float]]:
    """First token, end and longest time between tokens of each: prefill first, one thing after the other."""
    cost, memory = setup.cost, setup.kv_tokens - setup.coupled_cache_tokens
    coming, waiting = list(range(len(requests))), []
    batch: dict[int, list[float]] = {}  # tokens so far, when the first and the last came, longest gap
    over: dict[int, tuple[float, float, float]] = {}
    now_s = 0.0
    while coming or waiting or batch:
        if not waiting and not batch:
            now_s = max(now_s, requests[coming[0]].at_s)
        while coming and requests[coming[0]].at_s <= now_s:
            waiting.append(coming.pop(0))
        kept = sum(requests[one].input_tokens + requests[one].output_tokens for one in batch)
        if waiting and len(batch) < setup.most_batch:
            one = waiting[0]
            if kept + requests[one].input_tokens + requests[one].output_tokens <= memory:
                waiting.pop(0)
                now_s += cost.prefill_s(requests[one].input_tokens)
                batch[one] = [1, now_s, now_s, 0.0]
                if requests[one].output_tokens == 1:
                    over[one] = (batch.pop(one)[1], now_s, 0.0)
                continue
        now_s += cost.decode_step_s(len(batch), sum(requests[one].input_tokens + batch[one][0] for one in batch))
        for one, state in list(batch.items()):
            state[:] = [state[0] + 1, state[1], now_s, max(state[3], now_s - state[2])]
            if state[0] == requests[one].output_tokens:
                over[one] = (state[1], now_s, state[3])
                del batch[one]
    return over


@pytest.mark.parametrize(("kv", "most"), [(3_000_000, 256), (900_000, 256), (3_000_000, 3)], ids=str)
def test_prefill_first_is_the_steps_that_it_is_made_of(kv: int, most: int) -> None:
    for seed in range(3):
        dice = random.Random(seed)
        ats = sorted(dice.uniform(0, 30) for _ in range(40))
        requests = [
            TraceRequest(at_s, dice.choice((10, 900, 12_000, 80_000)), dice.choice((1, 2, 3, 20, 300)), (), number)
            for number, at_s in enumerate(ats)
        ]
        setup = replace(ALONE, cost=LLAMA_70B_8xA800, kv_tokens=kv, most_batch=most, coupled_cache_tokens=650_000)
        run = run_cluster(requests, setup, HERE)
        expected = step_by_step(requests, setup)
        for number, one in enumerate(run.outcomes):
            first_s, end_s, worst_s = expected[number]
            assert one.ttft_s == pytest.approx(first_s - one.at_s, rel=1e-9)
            assert one.end_s == pytest.approx(end_s, rel=1e-9)
            assert (one.tbt_max_s or 0.0) == pytest.approx(worst_s, rel=1e-9)


def test_a_prefill_holds_up_who_decodes() -> None:
    # The first: 1 s, then steps of 201.2 and 201.4 ms. The second comes in the first of them and is prefilled behind
    # it, in 0.5 s; then both decode: 1 + 0.2·(1002 + 501) ms.
    requests = [TraceRequest(0.0, 1000, 3, (1, 2)), TraceRequest(1.1, 500, 2, (3,))]
    first, second = run_cluster(requests, ALONE, HERE).outcomes
    assert first.ttft_s == pytest.approx(1.0)
    assert second.ttft_s == pytest.approx(1.2012 + 0.5 - 1.1)
    assert first.end_s == second.end_s == pytest.approx(1.7012 + 0.3016)
    assert first.tbt_max_s == pytest.approx(0.5 + 0.3016), "its second token waits for the other's prefill"
    assert second.tbt_max_s == pytest.approx(0.3016), "which is before its own first token"


def test_chunks_go_with_decoding() -> None:
    # Steps of 100 tokens. The prompt of 250 alone: chunks of 100, 100 and 50, each longer computed than read. Then it
    # decodes; the second prompt, of 150, goes with it in chunks of 99 and 51 tokens (1 ms each, and 1 ms for the step's
    # own token), and the last step is reading: 1 + 0.2·(253 + 151).
    requests = [TraceRequest(0.0, 250, 4, (1,)), TraceRequest(0.21, 150, 2, (2,))]
    first, second = run_cluster(requests, replace(ALONE, mixed_tokens=100), HERE).outcomes
    assert first.ttft_s == pytest.approx(0.25)
    assert first.tbt_max_s == pytest.approx(0.1)
    assert second.ttft_s == pytest.approx(0.25 + 0.1 + max(0.052, 0.001 + 0.2e-3 * (252 + 99)) - 0.21)
    assert first.end_s == second.end_s == pytest.approx(second.at_s + (second.ttft_s or 0) + 0.001 + 0.2e-3 * 404)


def test_prompts_under_way_have_their_memory_too() -> None:
    # Two come while a step is done. There is memory for one of them at a time, and room for both in the next step.
    three = ((0.0, 10, 1), (0.001, 60, 40), (0.002, 60, 2))
    requests = [TraceRequest(at_s, tokens, output, ()) for at_s, tokens, output in three]
    setup = replace(ALONE, mixed_tokens=1_000, kv_tokens=51_200 + 120)
    _, first, second = run_cluster(requests, setup, HERE).outcomes
    assert second.at_s + second.queue_s == pytest.approx(first.end_s)


def test_a_prompt_seen_before_is_not_computed_again_there() -> None:
    requests = [TraceRequest(0.0, 1024, 1, (1, 2)), TraceRequest(5.0, 1124, 1, (1, 2, 3))]
    _, again = run_cluster(requests, ALONE, HERE).outcomes
    assert (again.held_tokens, again.computed_tokens, again.ttft_s) == (1024, 100, pytest.approx(0.1))


def test_what_no_machine_has_memory_for_fails() -> None:
    for setup in (ALONE, ClusterSetup(prefill=1, decode=1, cost=TOY)):
        small = replace(setup, kv_tokens=60_000)
        (one,) = run_cluster([TraceRequest(0.0, 70_000, 2, ())], small).outcomes
        assert (one.status, one.prefill, one.end_s) == ("failed", None, 0.0)
