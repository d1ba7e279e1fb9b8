"""Prefills by hand: 1 ms a token, 0.1 ms a token over the network, ten layers (``toy``)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.sim.cluster.toy import POOL, SILENT, TOY, scripted

from skymemory.conductor.cost_model import Medium, loaded_s, pipelined_s
from skymemory.conductor.request import Prompt, PromptPlan, Request
from skymemory_lab.sim.clock import Clock
from skymemory_lab.sim.cluster.job import Job
from skymemory_lab.sim.cluster.pool import ClusterPool
from skymemory_lab.sim.cluster.prefill import Pipeline, PrefillInstance
from skymemory_lab.sim.cluster.setup import ClusterSetup
from skymemory_lab.sim.cluster.simulation import run_cluster
from skymemory_lab.sim.trace import TraceRequest

SETUP = ClusterSetup(prefill=1, decode=1, cost=TOY, kv_tokens=1_000_000, pool=POOL)


class Bench:
    """One instance that prefills, node 0, with another node from which it could load."""

    def __init__(self, machines: int = 1, chunk: int = 4096, network_s: float = 1e-4) -> None:
        self.clock = Clock()
        settings = replace(POOL, network=Medium("network", 200 / network_s))
        self.pool = ClusterPool(["a", "b"], TOY, settings)
        pipeline = Pipeline(TOY, machines, chunk)
        self.ends: dict[int, float] = {}
        self.instance = PrefillInstance(0, self.clock, pipeline, self.pool, replace(SILENT, prefilled=self._done))

    def _done(self, job: Job, now_s: float) -> None:
        self.ends[job.number] = now_s
        self.pool.stored(0, job.ids, now_s)

    def comes(
        self,
        number: int,
        at_s: float,
        tokens: int,
        ids: tuple[int, ...] = (),
        priority: int = 0,
        plan: PromptPlan | None = None,
    ) -> Job:
        blocks = np.array(ids, dtype=np.uint64)
        asked = Request(Prompt(blocks, blocks, 512, tokens), priority=priority)
        job = Job(number, at_s, tokens, 2, ids, asked)

        def arrive(now_s: float) -> None:
            if plan is not None:
                job.loading = self.pool.load(0, job.ids, plan, now_s)
            self.instance.arrive(job, now_s)

        self.clock.at(at_s, arrive)
        return job


def test_one_after_the_other_and_the_more_urgent_first() -> None:
    bench = Bench()
    for number, (at_s, priority) in enumerate([(0.0, 0), (0.1, 0), (0.2, 1)]):
        bench.comes(number, at_s, 1000, priority=priority)
    bench.clock.run()
    assert bench.ends == pytest.approx({0: 1.0, 2: 2.0, 1: 3.0})
    assert bench.instance.busy_s == pytest.approx(3.0)


def test_what_is_cached_is_seen_when_the_service_begins() -> None:
    bench = Bench()
    first, second = bench.comes(0, 0.0, 1024, (1, 2)), bench.comes(1, 0.1, 1100, (1, 2))
    bench.clock.run()
    assert (first.computed_tokens, second.computed_tokens, second.held_tokens) == (1024, 76, 1024)
    assert bench.ends[1] == pytest.approx(1.024 + 0.076)


def test_of_a_prompt_that_is_all_cached_one_token_is_computed() -> None:
    bench = Bench()
    bench.comes(0, 0.0, 1024, (1, 2))
    again = bench.comes(1, 5.0, 1024, (1, 2))
    bench.clock.run()
    assert (again.computed_tokens, again.held_tokens) == (1, 1023)
    assert bench.ends[1] == pytest.approx(5.001)


@pytest.mark.parametrize("network_s", [1e-4, 1e-3, 4e-3])
def test_a_load_is_hidden_behind_computing_and_behind_the_line(network_s: float) -> None:
    for busy_tokens in (0, 400, 5_000):
        bench = Bench(network_s=network_s)
        bench.pool.stored(1, (1, 2), 0.0)
        if busy_tokens:
            bench.comes(0, 0.0, busy_tokens)
        job = bench.comes(1, 0.0, 1524, (1, 2), plan=PromptPlan(0, 0, 1024, "b"))
        bench.clock.run()
        assert (job.computed_tokens, job.held_tokens, job.sources) == (500, 0, {"node": 1024})
        begins_s = busy_tokens * 1e-3
        left_s = max(0.0, 1024 * network_s + 1e-4 - begins_s)
        assert bench.ends[1] == pytest.approx(begins_s + loaded_s(left_s, 0.5, 10), abs=2e-4)


def test_the_front_is_computed_while_the_rest_is_loaded() -> None:
    bench = Bench(network_s=2e-3)
    bench.pool.stored(1, (1, 2, 3, 4), 0.0)
    job = bench.comes(0, 0.0, 2148, (1, 2, 3, 4), plan=PromptPlan(0, 1024, 1024, "b"))
    bench.clock.run()
    # 1,024 tokens computed, while 2.048 s are loaded; what is left of that is hidden behind 100 tokens, layer by layer.
    assert (job.computed_tokens, job.sources) == (1124, {"node": 1024})
    assert bench.ends[0] == pytest.approx(1.024 + loaded_s(1.024, 0.1, 10), abs=3e-4)


def test_what_others_computed_there_since_it_was_loaded_counts_too() -> None:
    bench = Bench(network_s=1e-6)
    bench.pool.stored(1, (1,), 0.0)
    bench.comes(0, 0.0, 2048, (1, 2, 3, 4))
    job = bench.comes(1, 0.1, 2148, (1, 2, 3, 4), plan=PromptPlan(0, 0, 512, "b"))
    bench.clock.run()
    assert (job.computed_tokens, job.held_tokens, job.sources) == (100, 1536, {"node": 512})
    assert bench.ends[1] == pytest.approx(2.048 + 0.1)


def test_what_the_source_has_lost_is_computed() -> None:
    bench = Bench()
    bench.pool.stored(1, (1, 2, 3), 0.0)
    bench.pool.lost(1, 0.0)
    bench.pool.stored(1, (1,), 0.0)
    job = bench.comes(0, 0.0, 1536, (1, 2, 3), plan=PromptPlan(0, 0, 1536, "b"))
    bench.clock.run()
    assert (job.computed_tokens, job.sources) == (1024, {"node": 512})


@given(
    prompts=st.lists(st.tuples(st.floats(0, 3), st.integers(1, 5_000)), min_size=1, max_size=6),
    machines=st.integers(1, 4),
    chunk=st.sampled_from([100, 512, 1_000, 10_000]),
)
def test_a_pipeline_is_a_line_of_machines(prompts: list[tuple[float, int]], machines: int, chunk: int) -> None:
    bench = Bench(machines, chunk)
    for number, (at_s, tokens) in enumerate(prompts):
        bench.comes(number, at_s, tokens)
    bench.clock.run()
    free_s = [0.0] * machines
    entered_s = 0.0
    for number, (at_s, tokens) in sorted(enumerate(prompts), key=lambda entry: (entry[1][0], entry[0])):
        begins_s = max(at_s, entered_s)
        for begin in range(0, tokens, tokens if machines == 1 else chunk):
            there_s = begins_s
            for machine in range(machines):
                size = tokens if machines == 1 else min(chunk, tokens - begin)
                there_s = free_s[machine] = max(there_s, free_s[machine]) + size * 1e-3 / machines
        entered_s = free_s[0]
        assert bench.ends[number] == pytest.approx(free_s[-1], rel=1e-9)


def test_an_empty_pipeline_takes_what_the_formula_says() -> None:
    bench = Bench(machines=3, chunk=500)
    bench.comes(0, 1.0, 1_700)
    bench.clock.run()
    chunks_s = [size * 1e-3 / 3 for size in (500, 500, 500, 200)]
    assert bench.ends[0] == pytest.approx(1.0 + pipelined_s(chunks_s, 3))


def test_a_whole_request_by_hand() -> None:
    # Prefilled in 1 s; its KV, 0.1 s over the network, goes while it is computed: the last of ten layers is left.
    # Steps of two tokens more: 1 + 0.2·1001 ms, then 1 + 0.2·1002.
    (one,) = run_cluster(
        [TraceRequest(2.0, 1000, 3, (1, 2))], SETUP, scripted(lambda request: ("prefill-0", None))
    ).outcomes
    assert one.ttft_s == pytest.approx(1.0)
    joined_s = 3.0 + 0.1 / 10
    assert one.end_s == pytest.approx(joined_s + 0.2012 + 0.2014, abs=2e-4)
    assert one.tbt_mean_s == pytest.approx((0.01 + 0.2012 + 0.2014) / 2, abs=1e-4)
    assert one.tbt_max_s == pytest.approx(0.2112, abs=2e-4)
    assert (one.status, one.prefill, one.decode, one.prefill_s) == ("completed", 0, 0, pytest.approx(1.0))


def test_kv_that_goes_after_the_prefill_comes_later_by_all_of_it() -> None:
    setup = replace(SETUP, layer_wise=False)
    (one,) = run_cluster(
        [TraceRequest(0.0, 1000, 2, (1, 2))], setup, scripted(lambda request: ("prefill-0", None))
    ).outcomes
    assert one.end_s == pytest.approx(1.0 + 0.1 + 0.2012, abs=2e-4)
