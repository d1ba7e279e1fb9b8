"""A rule that judges by what first tokens came later than estimated, at servers of their own for decoding and not."""

from __future__ import annotations

from tests.conductor.admission.cases import case

from skymemory.conductor.admission.mooncake import Baseline
from skymemory.conductor.request import Slo
from skymemory.conductor.scheduler import Corrected


def rule() -> Corrected:
    return Corrected(Baseline(Slo(1.0, 0.1)))


def test_the_hand_over_counts_until_the_decode_server_answers() -> None:
    judged, first = rule(), case(0.4, tbt_s=0.01)
    judged.accepted(first, 0.0)
    judged.prefilled(first, 0.4)
    judged.joined(first, 0.9)
    assert judged.late_s(1.0) == 0.5
    assert judged.on_arrival(case(0.6, tbt_s=0.01), 1.0) is not None, "0.6 s and half a second on top"
    assert judged.on_arrival(case(0.4, tbt_s=0.01), 1.0) is None


def test_one_that_is_overdue_counts_before_it_ends_and_not_after_it_failed() -> None:
    judged, slow = rule(), case(0.2, tbt_s=0.01)
    judged.accepted(slow, 0.0)
    assert judged.late_s(2.2) == 2.0
    assert judged.on_arrival(case(0.2, tbt_s=0.01), 2.2) is not None
    judged.ended(slow, 2.3, None)
    assert judged.late_s(2.4) == 0.0


def test_first_tokens_that_come_early_admit_no_more() -> None:
    judged, quick = rule(), case(0.8, tbt_s=0.01)
    judged.accepted(quick, 0.0)
    judged.joined(quick, 0.1)
    assert judged.on_arrival(case(1.1, tbt_s=0.01), 0.2) is not None
