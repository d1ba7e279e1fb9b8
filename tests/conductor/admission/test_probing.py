"""A rule that would refuse every request forever lets one in now and then."""

from __future__ import annotations

from tests.conductor.admission.cases import case

from skymemory.conductor.admission.mooncake import Early
from skymemory.conductor.request import Slo
from skymemory.conductor.scheduler import Probing


def test_one_is_let_in_when_none_was_for_a_while() -> None:
    rule = Probing(Early(Slo(1.0, 0.1)), every_s=10.0)
    late = case(5.0)
    assert rule.on_arrival(late, 0.0) is None, "none ever was"
    rule.accepted(late, 0.0)
    assert rule.on_arrival(late, 9.0) is not None
    assert rule.on_arrival(case(0.5), 9.0) is None
    assert rule.on_arrival(late, 10.0) is None
    rule.accepted(case(0.5), 10.0)
    assert rule.on_arrival(late, 19.0) is not None


def test_a_probe_that_would_be_refused_after_its_prefill_is_not_let_in() -> None:
    rule = Probing(Early(Slo(1.0, 0.1)), every_s=10.0)
    slow = rule.on_arrival(case(5.0, tbt_s=0.2), 0.0)
    assert slow is None, "its first token comes too late, by an estimate that may be wrong"
    refusal = rule.on_arrival(case(0.5, tbt_s=0.2), 0.0)
    assert refusal is not None and refusal.kind == "tbt"
