"""Elastic pools in the cluster simulator: nothing is lost while instances change roles, and they follow the load."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab.sim.cluster.test_conservation import APART, BLOCK_BYTES, check, drawn
from tests.lab.sim.cluster.toy import POOL, TOY

from skymemory.conductor.pools import ElasticSettings
from skymemory.conductor.request import Slo
from skymemory.errors import InvalidInput
from skymemory_lab.reproduce.mooncake.base import COST
from skymemory_lab.sim.cluster.outcome import ClusterRun, measured
from skymemory_lab.sim.cluster.setup import ClusterSetup, InstanceFailure, PoolSettings
from skymemory_lab.sim.cluster.simulation import run_cluster
from skymemory_lab.sim.mixes import SHAPES, MixSource, WorkloadSource
from skymemory_lab.sim.trace import TraceRequest

RESTLESS = ElasticSettings(high=0.01, low=100.0, margin=1e-6, smoothing_s=0.0, settle_s=0.5, drain_weight=0.0)
"""Changes as often as it may."""
NEVER = ElasticSettings(high=1e9)
TOY_ELASTIC = ClusterSetup(prefill=2, decode=2, cost=TOY, pool=POOL, pools="elastic", change_s=0.5, kv_tokens=10_000)


def check_roles(run: ClusterRun, setup: ClusterSetup) -> None:
    """Every instance has one role at any time, each pool an instance, and changes do not overlap."""
    names = {*setup.prefilling(), *setup.decoding()}
    assert {one.instance for one in run.roles} == names
    begins = {one.begin_s for one in run.roles if one.begin_s > min(each.begin_s for each in run.roles)}
    for name in names:
        mine = sorted((one for one in run.roles if one.instance == name), key=lambda one: one.begin_s)
        assert mine[0].role == name.partition("-")[0]
        for before, after in pairwise(mine):
            assert before.end_s == after.begin_s and before.role != after.role
    end_s = max(one.end_s for one in run.roles)  # the last change may be the run's last event
    for at_s in begins - {end_s}:
        now = [one.role for one in run.roles if one.begin_s <= at_s < one.end_s]
        assert len(now) == len(names) and {"prefill", "decode"} == set(now)
    assert len(begins) == len(run.roles) - len(names), "one at a time"


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    name=st.sampled_from(APART),
    refused=st.sampled_from([0.0, 0.3]),
    blocks=st.integers(1, 40),
    kv_tokens=st.sampled_from([7_000, 20_000, 1_000_000]),
    deaths=st.lists(
        st.tuples(st.sampled_from(["prefill-0", "prefill-1", "decode-0", "decode-2"]), st.floats(0, 25)), max_size=4
    ),
    restless=st.booleans(),
)
def test_every_request_ends_once_whatever_changes(
    seed: int, name: str, refused: float, blocks: int, kv_tokens: int, deaths: list[tuple[str, float]], restless: bool
) -> None:
    setup = ClusterSetup(
        prefill=2,
        decode=3,
        pools="elastic",
        elastic=RESTLESS if restless else ElasticSettings(high=0.5, smoothing_s=1.0, settle_s=1.0),
        change_s=0.2,
        sample_s=0.25,
        kv_tokens=kv_tokens,
        most_batch=6,
        pool=PoolSettings(dram_bytes=blocks * BLOCK_BYTES, ssd_bytes=BLOCK_BYTES * (seed % 2) * 20),
        failures=tuple(InstanceFailure(instance, at_s, 3.0) for instance, at_s in deaths),
        slo=Slo(5.0, 0.05),
    )
    run = check(drawn(seed, 40), setup, name, seed, refused)
    check_roles(run, setup)


@pytest.mark.brief()
@pytest.mark.parametrize(
    ("name", "admission"), [("kvcache-centric", "predicted"), ("least-ttft", "all"), ("random", "early")]
)
def test_a_controller_that_never_moves_equals_fixed_pools_exactly(name: str, admission: str) -> None:
    requests = WorkloadSource("conversations", 3, 45.0).requests()
    failures = (InstanceFailure("decode-1", 20.0, 10.0), InstanceFailure("prefill-0", 30.0, 10.0))
    fixed = ClusterSetup(prefill=3, decode=2, failures=failures, error=0.2, seed=4)
    still = replace(fixed, pools="elastic", elastic=NEVER)
    one, other = (run_cluster(requests, setup, name, admission) for setup in (fixed, still))
    assert one.outcomes == other.outcomes
    assert one.loads == other.loads
    assert (one.gap_tokens, one.pool) == (other.gap_tokens, other.pool)
    ours, theirs = measured(one, fixed.slo), measured(other, fixed.slo)
    for name in ("prefill_utilisation", "decode_utilisation"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name))
    assert len(other.roles) == 5 and theirs.role_changes == 0


def test_equal_arguments_give_equal_runs() -> None:
    requests = MixSource("turns", 5, 4.0, 6.0, 30.0, 30.0).requests()
    setup = ClusterSetup(prefill=2, decode=2, pools="elastic", elastic=replace(RESTLESS, settle_s=5.0))
    one, other = (run_cluster(requests, setup, "kvcache-centric") for _ in range(2))
    assert one == other
    assert measured(one, setup.slo).role_changes > 0


@pytest.mark.slow
def test_pools_follow_the_load_and_meet_more_objectives() -> None:
    """Readers, then writers: the split that the first half needs is wrong for the second."""
    requests = MixSource("switch", 2, 2.2, 4.5, 1600.0, 1600.0).requests()
    setup = ClusterSetup(prefill=3, decode=3, cost=COST)
    fixed = [
        run_cluster(requests, replace(setup, prefill=split, decode=6 - split), "kvcache-centric", "goodput")
        for split in range(1, 6)
    ]
    run = run_cluster(requests, replace(setup, pools="elastic"), "kvcache-centric", "goodput")
    ours = measured(run, setup.slo)
    assert ours.met > max(measured(one, setup.slo).met for one in fixed)
    prefilling = {round(one.t_s): one.prefilling for one in run.loads}
    assert prefilling[780] > 3 > prefilling[1580]
    assert 0 < ours.prefill_utilisation <= 1 and 0 < ours.decode_utilisation <= 1


def a_switch(decode_s: int) -> tuple[list[TraceRequest], ClusterSetup]:
    """A long answer decodes on each of two machines; then prompts come, which keep the one that prefills busy and
    wait for a quarter of their objective."""
    answers = [TraceRequest(0.0, 100, decode_s, (number,), number) for number in (1, 2)]
    prompts = [TraceRequest(5.0 + at, 1_000, 1, (10 + 2 * at, 11 + 2 * at), 10 + at) for at in range(40)]
    # With 1 s between tokens as idle, the two answers are no load.
    elastic = ElasticSettings(high=0.5, smoothing_s=0.0, settle_s=4.5, drain_weight=0.0, idle_tbt_s=1.0)
    return [*answers, *prompts], replace(TOY_ELASTIC, prefill=1, slo=Slo(4.0, 10.0), elastic=elastic)


def test_a_drain_waits_for_the_last_answer_and_the_set_up_follows() -> None:
    requests, setup = a_switch(400)
    run = run_cluster(requests, setup, "load-balance")
    changed = next(one for one in run.roles if one.instance.startswith("decode") and one.role == "prefill")
    slot = int(changed.instance.partition("-")[2])
    ends_s = {one.output_tokens: one.end_s or 0.0 for one in run.outcomes if one.decode == slot}
    assert ends_s[400] > 10.0, "its batch was not cut off"
    # Prompts that were sent to it for their answers were waited for, too: until their one token came.
    last_s = max(ends_s[400], *(one.end_s or 0.0 for one in run.outcomes if one.decode == slot and one.at_s < 10.0))
    # The drain is seen at a sample, each second; the set-up takes half of one.
    assert last_s + 0.5 <= changed.begin_s <= last_s + 1.5
    number = setup.prefill + slot
    there = [one.at_s + one.queue_s for one in run.outcomes if one.prefill == number]
    assert there and min(there) >= changed.begin_s, "in its new role it prefills, and not before"


def test_an_instance_keeps_its_memory_and_others_load_from_it() -> None:
    """prefill-1 computes a prompt and changes to decode: the same prompt is loaded from it, not computed."""
    ids = tuple(range(8))
    first = TraceRequest(0.0, 8 * 512, 2, ids, 1)
    busy = [TraceRequest(0.0, 8 * 512, 2, tuple(range(100 * at, 100 * at + 8)), at) for at in (1, 2)]
    answers = [TraceRequest(10.0, 100, 3_000, (1_000 + at,), 1_000 + at) for at in range(12)]
    again = TraceRequest(60.0, 8 * 512, 2, ids, 2)
    elastic = ElasticSettings(high=0.5, low=2.0, smoothing_s=0.0, settle_s=9.0, drain_weight=0.0)
    setup = replace(TOY_ELASTIC, prefill=2, decode=1, slo=Slo(60.0, 0.005), elastic=elastic, kv_tokens=100_000)
    run = run_cluster([first, *busy, *answers, again], setup, "kvcache-centric")
    changed = [one for one in run.roles if one.begin_s > 0]
    assert [one.role for one in changed][:1] == ["decode"]
    (last,) = [one for one in run.outcomes if one.at_s == 60.0]
    assert (last.held_tokens, last.loaded_tokens) == (0, {"node": 8 * 512 - 1})


def test_elastic_pools_need_instances_that_can_change() -> None:
    with pytest.raises(InvalidInput, match="elastic pools: expected coupled of 0 and pipeline of 1"):
        ClusterSetup(prefill=4, decode=4, pipeline=2, pools="elastic")
    with pytest.raises(InvalidInput, match="elastic pools"):
        ClusterSetup(prefill=0, decode=0, coupled=4, pools="elastic")
    with pytest.raises(InvalidInput, match="pools 'both': expected one of fixed, elastic"):
        ClusterSetup(pools="both")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="change_s is -1"):
        ClusterSetup(change_s=-1.0)
    with pytest.raises(InvalidInput, match="below the objective between tokens"):
        run_cluster([], ClusterSetup(pools="elastic", slo=Slo(30.0, 0.001)))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_mix_has_the_rates_of_its_shape(shape: str) -> None:
    """Oracle: the shape's mean over windows of time, within four standard deviations of a Poisson count."""
    source = MixSource(shape, 7, 5.0, 10.0, 800.0, 800.0)
    requests = source.requests()
    assert requests == MixSource(shape, 7, 5.0, 10.0, 800.0, 800.0).requests()
    assert [one.at_s for one in requests] == sorted(one.at_s for one in requests)
    for begin in range(0, 800, 100):
        part = [one for one in requests if begin <= one.at_s < begin + 100]
        share = sum(SHAPES[shape]((begin + at + 0.5) / 800) for at in range(100)) / 100
        expected = 500 * share + 1000 * (1 - share)
        assert abs(len(part) - expected) < 4 * expected**0.5 + 1
        long = sum(one.input_tokens > 4_000 for one in part)
        assert abs(long - 500 * share) < 4 * (500 * share) ** 0.5 + 60
    assert len({block for one in requests for block in one.ids}) == sum(len(one.ids) for one in requests)


def test_a_bad_mix_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no mix 'dya'; did you mean 'day'"):
        MixSource("dya")
    with pytest.raises(InvalidInput, match="expected rates, duration_s and period_s above 0"):
        MixSource("day", readers_per_s=random.Random(0).uniform(-1, 0))
