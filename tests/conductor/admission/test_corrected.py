"""A rule that judges by what first tokens came later than estimated, at servers of their own for decoding and not."""

from __future__ import annotations

import pytest
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
    assert judged.late_s(1.0) == pytest.approx(0.0), "it is the hand-over that takes so long"
    assert judged.on_arrival(case(0.6, tbt_s=0.01), 1.0) is not None, "0.6 s and half a second on top"
    assert judged.on_arrival(case(0.4, tbt_s=0.01), 1.0) is None


def test_one_that_is_overdue_counts_before_it_ends_and_not_after_it_failed() -> None:
    judged, slow = rule(), case(0.2, tbt_s=0.01)
    judged.accepted(slow, 0.0)
    assert judged.late_s(2.2) == 2.0
    assert judged.on_arrival(case(0.2, tbt_s=0.01), 2.2) is not None
    judged.on_request_end(slow, 2.3, None)
    assert judged.late_s(2.4) == 0.0


def test_first_tokens_that_come_early_admit_no_more() -> None:
    judged, quick = rule(), case(0.8, tbt_s=0.01)
    judged.accepted(quick, 0.0)
    judged.joined(quick, 0.1)
    assert judged.on_arrival(case(1.1, tbt_s=0.01), 0.2) is not None


def test_first_tokens_are_taken_to_come_one_behind_the_other_until_they_were_seen_to_overlap() -> None:
    judged = Corrected(Baseline(Slo(2.0, 0.1)))

    def play(arrivals_s: list[float], tokens_s: list[float]) -> None:
        placed = [case(0.2, tbt_s=0.01, at_s=at_s) for at_s in arrivals_s]
        for one in placed:
            judged.accepted(one, one.prefill.at_s)
        for one, at_s in zip(placed, tokens_s, strict=True):
            judged.joined(one, at_s)
            judged.on_request_end(one, at_s, True)

    def burst(at_s: float) -> int:
        """How many of those that come at once are admitted."""
        placed, admitted = [case(0.2 * (1 + n), 0.01, 0.2, at_s=at_s) for n in range(16)], []
        for one in placed:
            if judged.on_arrival(one, at_s) is None:
                judged.accepted(one, at_s)
                admitted.append(one)
        for one in admitted:
            judged.on_request_end(one, at_s, None)
        return len(admitted)

    for number in range(Corrected.KEPT):
        play([10.0 * number], [10.0 * number + 0.5])
    assert burst(400.0) == 4, "half a second each, of which 0.2 s is the prefill"
    for number in range(Corrected.KEPT):
        start_s = 1000.0 + 10 * number
        play([start_s, start_s, start_s], [start_s + 0.5, start_s + 0.75, start_s + 1.0])
    assert 5 <= burst(2000.0) <= 6, "behind each other one takes a quarter of a second"


def test_a_prefill_server_does_not_wait_for_the_requests_of_another() -> None:
    judged = rule()
    for number in range(4):
        first = case(0.2, tbt_s=0.01, at_s=float(number))
        judged.accepted(first, float(number))
        judged.joined(first, number + 0.6)
    there, elsewhere = case(0.2, tbt_s=0.01, at_s=9.0), case(0.2, tbt_s=0.01, at_s=9.0)
    elsewhere.prefill.server = "p1"
    judged.accepted(case(0.2, tbt_s=0.01, at_s=9.0), 9.0)
    assert judged.estimated_s(elsewhere, 9.0) == pytest.approx(0.6)
    assert judged.estimated_s(there, 9.0) == pytest.approx(1.2)


def test_what_is_kept_of_requests_and_servers_that_are_gone_is_bounded() -> None:
    judged = rule()
    for number in range(3 * Corrected.SERVERS):
        one = case(0.2, tbt_s=0.01)
        one.prefill.server = f"pod-{number}"
        judged.accepted(one, 0.0)
        if number % 2:
            judged.joined(one, 0.3)
        judged.on_request_end(one, 0.4, True)
    assert len(judged._last) <= Corrected.SERVERS + 1
    assert not judged._due
    assert {key for key, _ in judged._last.values()} == {0}, "the id of one that has ended may be another's"
