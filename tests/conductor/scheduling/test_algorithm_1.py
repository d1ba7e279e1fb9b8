"""Algorithm 1 by hand: 100 tokens in 10 blocks, a second per token computed."""

from __future__ import annotations

import pytest
from tests.conductor.scheduling.worlds import a_request, centric, fleet_of

from skymemory.conductor.cost_model import Medium
from skymemory.conductor.picker import Picker
from skymemory.conductor.request import PromptPlan
from skymemory.errors import InvalidInput

NETWORK = Medium("network", 2.0)
"""Half a second per token: loading is twice as fast as computing."""
SLOW = Medium("network", 0.5)


@pytest.mark.parametrize("variant", ["arxiv", "fast25"])
def test_below_the_threshold_a_server_computes_and_above_it_it_loads(variant: str) -> None:
    servers = list(fleet_of(4))
    scorer = centric({0: 8, 1: 5, 2: 2}, network=NETWORK, variant=variant, balancing_threshold=2.0)
    ranking = scorer.rank(a_request(10), servers, 0.0)
    # s0 has 80 of 100; s1 has 50, and 80/50 < 2: computes 50; s2 loads 60 and computes 20; s3 loads 80, computes 20.
    assert ranking.estimated_ttft_s == [20.0, 50.0, 30.0 + 20.0, 40.0 + 20.0]
    assert ranking.plan_at is not None
    assert [ranking.plan_at(at) for at in range(4)] == [
        PromptPlan(80, 80, 0, "", 0.0, 0.0, 20.0),
        PromptPlan(50, 50, 0, "", 0.0, 0.0, 50.0),
        PromptPlan(20, 20, 60, "s0", 0.0, 30.0, 20.0),
        PromptPlan(0, 0, 80, "s0", 0.0, 40.0, 20.0),
    ]


@pytest.mark.parametrize(("variant", "ttft_s", "loaded"), [("arxiv", 20.0 + 20.0, 40), ("fast25", 60.0, 0)])
def test_where_the_ratio_is_the_threshold_the_versions_differ(variant: str, ttft_s: float, loaded: int) -> None:
    scorer = centric({0: 8, 1: 4}, network=NETWORK, variant=variant, balancing_threshold=2.0)
    ranking = scorer.rank(a_request(10), list(fleet_of(2)), 0.0)
    assert ranking.estimated_ttft_s is not None and ranking.plan_at is not None
    assert ranking.estimated_ttft_s[1] == ttft_s
    assert ranking.plan_at(1).loaded_tokens == loaded


@pytest.mark.parametrize("variant", ["arxiv", "fast25"])
def test_published_rules_load_though_it_takes_longer_and_the_cheaper_does_not(variant: str) -> None:
    for rule, ttft_s in ((variant, 160.0 + 20.0), ("cheaper", 100.0)):
        scorer = centric({0: 8}, network=SLOW, variant=rule, cake=False)
        ranking = scorer.rank(a_request(10), list(fleet_of(2)), 0.0)
        assert ranking.estimated_ttft_s == [20.0, ttft_s]


@pytest.mark.parametrize("variant", ["arxiv", "fast25", "cheaper"])
def test_no_server_holds_anything(variant: str) -> None:
    ranking = centric({}, network=NETWORK, variant=variant).rank(a_request(10), list(fleet_of(2)), 0.0)
    assert ranking.estimated_ttft_s == [100.0, 100.0]


@pytest.mark.parametrize("variant", ["arxiv", "fast25", "cheaper"])
def test_a_prompt_that_is_cached_wholly_computes_one_token(variant: str) -> None:
    ranking = centric({0: 10}, network=NETWORK, variant=variant).rank(a_request(10), list(fleet_of(1)), 0.0)
    assert ranking.estimated_ttft_s == [1.0]


@pytest.mark.parametrize("variant", ["arxiv", "fast25", "cheaper"])
def test_what_is_loaded_comes_while_the_request_waits(variant: str) -> None:
    for before_s in (30, 50):
        fleet = fleet_of(2)
        scorer = centric({0: 8}, network=NETWORK, variant=variant, cake=False)
        scorer._queues.add(1, float(before_s), 0.0)
        ranking = scorer.rank(a_request(10), list(fleet), 0.0)
        assert ranking.plan_at is not None and ranking.estimated_ttft_s is not None
        assert ranking.plan_at(1).load_s == 40.0
        assert ranking.estimated_ttft_s[1] == max(before_s, 40.0) + 20.0


def test_the_best_is_where_least_is_waited_and_loaded_and_computed() -> None:
    fleet = fleet_of(2)
    scorer = centric({0: 8}, network=NETWORK)
    picker = Picker(fleet, scorer)
    first = picker.pick(a_request(10), 0.0)
    assert first.server == "s0" and first.plan == PromptPlan(80, 80, 0, "", 0.0, 0.0, 20.0)
    for _ in range(3):
        picker.routed(picker.pick(a_request(10), 0.0, {"s0"}), 0.0)
    # s0 will have all of it when it comes to the fourth; but it is busy for 22 s, and the other loads in less.
    other = picker.pick(a_request(10), 0.0)
    assert other.server == "s0" and other.estimated_ttft_s == 20.0 + 1.0 + 1.0 + 1.0
    picker.routed(picker.pick(a_request(99, seed=9), 0.0, {"s0"}), 0.0)
    moved = picker.pick(a_request(10), 0.0)
    assert moved.server == "s1" and moved.plan is not None and moved.plan.source == "s0"


def test_a_server_that_loaded_a_prefix_has_it_for_those_behind() -> None:
    fleet = fleet_of(2)
    picker = Picker(fleet, centric({0: 8}, network=NETWORK, cake=False, fleet=fleet))
    picker.routed(picker.pick(a_request(10), 0.0, {"s1"}), 0.0)
    behind = picker.pick(a_request(10), 0.0, {"s1"})
    assert behind.plan == PromptPlan(100, 100, 0, "", 60.0, 0.0, 1.0)


def test_ways_carry_one_load_after_the_other() -> None:
    fleet = fleet_of(3)
    picker = Picker(fleet, centric({0: 8}, network=NETWORK, cake=False, fleet=fleet))
    picker.routed(picker.pick(a_request(10), 0.0, {"s1"}), 0.0)
    second = picker.pick(a_request(10), 10.0, {"s2"})
    assert second.plan is not None and second.plan.load_s == 30.0 + 40.0
    assert second.estimated_ttft_s == 70.0 + 20.0


def test_a_server_that_takes_no_requests_is_loaded_from() -> None:
    fleet = fleet_of(2)
    fleet.servers["s0"].draining = True
    picker = Picker(fleet, centric({0: 8}, network=NETWORK, cake=False, fleet=fleet))
    decision = picker.pick(a_request(10), 0.0)
    assert decision.server == "s1" and decision.plan == PromptPlan(0, 0, 80, "s0", 0.0, 40.0, 20.0)
    fleet.servers["s0"].healthy = False
    assert picker.pick(a_request(10), 0.0).plan == PromptPlan(0, 0, 0, "", 0.0, 0.0, 100.0)


@pytest.mark.parametrize("variant", ["arxiv", "fast25", "cheaper"])
def test_far_tiers_are_loaded_from_as_servers_are(variant: str) -> None:
    far = [("sky", 9, Medium("sky", 4.0, latency_s=5.0)), ("ssd", 6, Medium("ssd", 100.0))]
    scorer = centric({0: 2}, network=NETWORK, far=far, variant=variant, cake=False)
    ranking = scorer.rank(a_request(10), list(fleet_of(1)), 0.0)
    assert ranking.plan_at is not None
    assert ranking.plan_at(0) == PromptPlan(20, 20, 70, "sky", 0.0, 5.0 + 70 / 4, 10.0)


def test_of_two_tiers_the_one_that_is_sooner() -> None:
    far = [("sky", 9, Medium("sky", 4.0, latency_s=60.0)), ("ssd", 6, Medium("ssd", 100.0))]
    ranking = centric({}, far=far, cake=False).rank(a_request(10), list(fleet_of(1)), 0.0)
    assert ranking.plan_at is not None
    assert ranking.plan_at(0) == PromptPlan(0, 0, 60, "ssd", 0.0, 0.6, 40.0)


def test_options_that_cannot_be() -> None:
    with pytest.raises(InvalidInput, match="no variant 'osdi' of kvcache-centric; there are cheaper, arxiv, fast25"):
        centric({}, variant="osdi")
    with pytest.raises(InvalidInput, match="balancing_threshold is 0; expected a ratio above 0"):
        centric({}, balancing_threshold=0.0)


def test_an_empty_prompt_is_placed() -> None:
    decision = Picker(fleet_of(2), centric({0: 3}, network=NETWORK)).pick(a_request(0), 0.0)
    assert decision.estimated_ttft_s == 0.0


@pytest.mark.parametrize(
    ("variant", "delay_weight", "chosen"), [("cheaper", 0.3, "s0"), ("cheaper", 0.0, "s1"), ("arxiv", 0.3, "s1")]
)
def test_work_costs_those_behind_too_unless_a_published_rule_is_asked(
    variant: str, delay_weight: float, chosen: str
) -> None:
    """100 s of computing on an idle server, or 20 s of it behind 81 s: a second's gain for 80 s of work."""
    fleet = fleet_of(2)
    scorer = centric({0: 8}, variant=variant, delay_weight=delay_weight)
    picker = Picker(fleet, scorer)
    for number in range(40):
        sent = picker.pick(a_request(20, seed=number), 0.0)
        picker.routed(sent, 0.0)
        picker.failed(sent, 0.0)
    scorer._queues.add(0, 81.0, 0.0)
    assert picker.pick(a_request(10), 0.0).server == chosen
