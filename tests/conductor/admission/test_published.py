"""Mooncake's three rules: when each looks at what, and what its refusals say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.conductor.admission.cases import Believed, case

from skymemory.conductor.admission.mooncake import Baseline, Early, Predicted
from skymemory.conductor.admission.registry import admission
from skymemory.conductor.request import Slo
from skymemory.conductor.scheduler import Admission

SLO = Slo(ttft_s=10.0, tbt_s=0.1)
RULES: list[Callable[[Slo], Admission]] = [Baseline, Early, Predicted]


@pytest.mark.parametrize("rule", RULES)
def test_a_first_token_that_would_come_too_late_is_refused_on_arrival_by_all(rule: Callable[[Slo], Admission]) -> None:
    refusal = rule(SLO).on_arrival(case(12.5), 0.0)
    assert refusal is not None
    assert (refusal.kind, refusal.retry_after_s, refusal.computed) == ("ttft", 2.5, False)
    assert "12.5 s" in refusal.reason
    assert "10 s" in refusal.reason
    assert rule(SLO).on_arrival(case(10.0), 0.0) is None


@pytest.mark.parametrize("rule", RULES)
def test_a_batch_that_is_too_slow_is_refused_when_the_prefill_is_done_by_all(rule: Callable[[Slo], Admission]) -> None:
    refusal = rule(SLO).before_decode(case(1.0, tbt_s=0.125), 5.0)
    assert refusal is not None
    assert refusal.kind == "tbt"
    assert "125 ms" in refusal.reason
    assert rule(SLO).before_decode(case(1.0, tbt_s=0.1), 5.0) is None
    assert rule(SLO).before_decode(case(1.0), 5.0) is None


def test_the_baseline_does_not_look_at_decoding_on_arrival() -> None:
    assert Baseline(SLO).on_arrival(case(1.0, tbt_s=0.2, forecast=Believed(lambda at_s: 0.2)), 0.0) is None


def test_early_goes_by_the_load_of_now() -> None:
    later_full = Believed(lambda at_s: 0.2 if at_s > 0 else 0.05)
    assert Early(SLO).on_arrival(case(1.0, tbt_s=0.3, forecast=later_full), 0.0) is None, "promised ones are not there"
    refusal = Early(SLO).on_arrival(case(1.0, tbt_s=0.05, forecast=Believed(lambda at_s: 0.2)), 0.0)
    assert refusal is not None
    assert refusal.kind == "tbt"


def test_early_may_count_the_promised_too() -> None:
    rule = admission("early", SLO, promised=True)
    assert rule.on_arrival(case(1.0, tbt_s=0.3, forecast=Believed(lambda at_s: 0.05)), 0.0) is not None
    assert rule.on_arrival(case(1.0, tbt_s=0.05, forecast=Believed(lambda at_s: 0.3)), 0.0) is None


def test_predicted_goes_by_the_load_at_the_end_of_the_prefill() -> None:
    full_at_7 = Believed(lambda at_s: 0.2 if at_s == 7.0 else 0.05)
    assert Predicted(SLO).on_arrival(case(4.0, tbt_s=0.3, forecast=full_at_7), 2.0) is None, "full now, not then"
    assert full_at_7.asked == [(6.0, 2.0)]
    assert Predicted(SLO).on_arrival(case(5.0, tbt_s=0.05, forecast=full_at_7), 2.0) is not None


def test_predicted_without_an_outlook_is_early() -> None:
    assert Predicted(SLO).on_arrival(case(1.0, tbt_s=0.2), 0.0) is not None
    assert Predicted(SLO).on_arrival(case(1.0, tbt_s=0.05), 0.0) is None


def test_a_refusal_says_when_there_will_be_room() -> None:
    empties_at_30 = Believed(lambda at_s: 0.2 if at_s < 30 else 0.05)
    refusal = Early(SLO).on_arrival(case(1.0, tbt_s=0.2, forecast=empties_at_30), 0.0)
    assert refusal is not None
    assert refusal.retry_after_s == 32.0


def test_what_is_not_estimated_is_not_refused() -> None:
    assert admission("early", SLO).on_arrival(case(None), 0.0) is None


@pytest.mark.parametrize("name", ["baseline", "early", "early+fair", "goodput"])
def test_at_once_what_is_promised_counts_before_the_prefill_and_nothing_after_it(name: str) -> None:
    rule, idle = admission(name, SLO, True), Believed(lambda at_s: 0.05)
    refusal = rule.on_arrival(case(1.0, tbt_s=0.125, forecast=idle), 0.0)
    assert refusal is not None and (refusal.kind, refusal.computed) == ("tbt", False)
    assert rule.on_arrival(case(1.0, tbt_s=0.1, forecast=idle), 0.0) is None
    assert rule.before_decode(case(1.0, tbt_s=0.125, forecast=idle), 1.0) is None


def test_at_once_a_rule_that_looks_ahead_goes_by_its_forecast() -> None:
    rule = admission("predicted", SLO, True)
    assert rule.on_arrival(case(1.0, tbt_s=0.3, forecast=Believed(lambda at_s: 0.05)), 0.0) is None
    assert rule.before_decode(case(1.0, tbt_s=0.3, forecast=Believed(lambda at_s: 0.3)), 1.0) is None
