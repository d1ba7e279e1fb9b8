"""Rules of admission in the cluster simulator: who keeps more promises, who computes for nothing, whose flood it is."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from skymemory.conductor.request import Slo
from skymemory_lab.sim.cluster.outcome import ClusterMetrics, keeps, measured
from skymemory_lab.sim.cluster.schedulers import get_scheduler_view
from skymemory_lab.sim.cluster.setup import ClusterSetup
from skymemory_lab.sim.cluster.simulation import run_cluster
from skymemory_lab.sim.workload import CONVERSATIONS, generate

SETUP = ClusterSetup(
    prefill=6,
    decode=1,
    cost=replace(ClusterSetup().cost, decode_fixed_s=0.01, memory_share=0.5),
    slo=Slo(10.0, 0.05),
)
"""Decoding is short of memory's speed."""


def by(rule: str, setup: ClusterSetup) -> ClusterMetrics:
    return measured(run_cluster(generate(CONVERSATIONS, 200, 5), setup, "kvcache-centric", rule), setup.slo)


@pytest.mark.slow
@pytest.mark.parametrize("error", [0.0, 0.3], ids=["estimates true", "estimates err"])
def test_ours_keeps_more_promises_than_those_published_and_wastes_less(error: float) -> None:
    setup = replace(SETUP, rate=2.0, error=error)
    ours = by("goodput", setup)
    for rule in ("baseline", "early", "predicted"):
        theirs = by(rule, setup)
        assert ours.met > theirs.met, rule
        assert ours.wasted_prefill_s < 0.5 * theirs.wasted_prefill_s, rule


@pytest.mark.slow
def test_early_rejection_computes_less_for_nothing_than_the_baseline() -> None:
    setup = replace(SETUP, rate=2.0)
    assert by("early", setup).wasted_prefill_s < 0.7 * by("baseline", setup).wasted_prefill_s


@pytest.mark.brief()
def test_below_overload_all_rules_let_the_same_in() -> None:
    setup = replace(SETUP, rate=0.2)
    assert len({by(rule, setup).met for rule in ("predicted", "goodput+fair")}) == 1


@pytest.mark.slow
def test_a_flood_of_one_tenant_does_not_cost_another_its_answers() -> None:
    """One request in ten is the small tenant's: all of it is within its share."""
    requests = generate(CONVERSATIONS, 240, 6)
    setup = replace(SETUP, slo=Slo(10.0, 0.1), prefill=1)
    dice = random.Random(7)
    mixed = [
        replace(get_scheduler_view(one, setup, dice), tenant="small" if dice.random() < 0.1 else "flood")
        for one in requests
    ]
    kept: dict[str, Counter[str]] = {}
    busy_s: dict[str, float] = {}
    for rule in ("baseline", "baseline+fair"):
        run = run_cluster(requests, setup, "kvcache-centric", rule, scheduler_views=mixed)
        kept[rule] = Counter(
            said.tenant for said, one in zip(mixed, run.outcomes, strict=True) if keeps(one, setup.slo)
        )
        busy_s[rule] = sum(run.prefill_busy_s)
    small = sum(said.tenant == "small" for said in mixed)
    assert kept["baseline"]["small"] < 0.9 * small
    assert kept["baseline+fair"]["small"] > kept["baseline"]["small"] + 0.5 * (small - kept["baseline"]["small"])
    assert busy_s["baseline+fair"] > 0.9 * busy_s["baseline"], "no server stands still for it"
