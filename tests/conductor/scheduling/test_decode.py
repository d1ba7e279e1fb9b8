"""Decoding by predicted time between tokens: a step takes a second, one more per request and 0.001 s per token."""

from __future__ import annotations

import math

import pytest
from tests.conductor.scheduling.worlds import a_request, fleet_of

from skymemory.conductor.cost_model import LLAMA_70B_8xA800
from skymemory.conductor.picker import Fleet, Picker, ReportedLoad
from skymemory.conductor.request import Decision, Request
from skymemory.conductor.scheduling.decode import LeastTbt, Parts
from skymemory.errors import InvalidInput


class Steps:
    def decode_parts(self, batch: int) -> Parts:
        return 1.0 + batch, 0.0, 0.001, 0.0, 0.0


def a_picker(servers: int = 2, kv_tokens: int | None = None, decode_s: float | None = None) -> tuple[Picker, LeastTbt]:
    fleet = fleet_of(servers)
    scorer = LeastTbt(Steps(), fleet, kv_tokens, decode_s)
    return Picker(fleet, scorer), scorer


def sent(picker: Picker, server: str, now_s: float = 0.0, blocks: int = 10, joins: bool = True) -> Decision:
    decision = picker.pick(a_request(blocks), now_s, {server})
    picker.routed(decision, now_s)
    if joins:
        picker.succeeded(decision, now_s)
    return decision


def estimates(scorer: LeastTbt, fleet: Fleet, request: Request, now_s: float = 0.0) -> list[float]:
    found = scorer.rank(request, list(fleet), now_s).estimated_tbt_s
    assert found is not None
    return [round(one, 9) for one in found]


def test_the_estimate_has_the_request_in_the_batch() -> None:
    picker, scorer = a_picker()
    assert estimates(scorer, picker.fleet, a_request(10)) == [2.1, 2.1]
    sent(picker, "s0", blocks=50)
    assert estimates(scorer, picker.fleet, a_request(10)) == [3.6, 2.1]
    assert picker.pick(a_request(10), 0.0).server == "s1"


def test_the_step_is_the_cost_models() -> None:
    fleet = fleet_of(1)
    scorer = LeastTbt(LLAMA_70B_8xA800, fleet)
    picker = Picker(fleet, scorer)
    for blocks in (100, 3000):
        sent(picker, "s0", blocks=blocks)
    found = scorer.rank(a_request(500), list(fleet), 0.0).estimated_tbt_s
    assert found == [pytest.approx(LLAMA_70B_8xA800.decode_step_s(3, 36_000), rel=1e-12)]


def test_requests_whose_prefill_is_not_done_count() -> None:
    picker, scorer = a_picker()
    decision = sent(picker, "s0", joins=False)
    assert estimates(scorer, picker.fleet, a_request(10)) == [3.2, 2.1]
    picker.failed(decision, 1.0)
    assert estimates(scorer, picker.fleet, a_request(10)) == [2.1, 2.1]


@pytest.mark.parametrize("joins", [False, True])
def test_a_request_that_is_booked_is_not_counted_twice(joins: bool) -> None:
    picker, scorer = a_picker()
    decision = sent(picker, "s0", joins=joins)
    assert estimates(scorer, picker.fleet, decision.request) == [2.1, 2.1]
    assert estimates(scorer, picker.fleet, a_request(10)) == [3.2, 2.1]


def test_contexts_grow_while_they_decode() -> None:
    picker, scorer = a_picker(1)
    sent(picker, "s0")
    # A step with 100 tokens takes 2.1 s: after 210 s there are 100 more.
    assert estimates(scorer, picker.fleet, a_request(10), 210.0) == [3.3]
    assert scorer.tbt_s(210.0, 210.0) == pytest.approx(2.2)


def test_a_server_without_room_comes_last() -> None:
    picker, scorer = a_picker(2, kv_tokens=250)
    sent(picker, "s0", blocks=20)
    sent(picker, "s1", blocks=1)
    sent(picker, "s1", blocks=1)
    assert picker.pick(a_request(10), 0.0).server == "s1"
    assert estimates(scorer, picker.fleet, a_request(10))[1] > estimates(scorer, picker.fleet, a_request(10))[0]
    sent(picker, "s1", blocks=20)
    full = picker.pick(a_request(10), 0.0)
    assert full.server == "s0" and full.reasons[0] == "no room for its KV cache at 2 of 2"


def test_room_is_what_a_server_reports() -> None:
    picker, _ = a_picker()
    picker.fleet.servers["s0"].reported = ReportedLoad(0.0, cache_blocks=5, block_tokens=10)
    assert picker.pick(a_request(10), 0.0).server == "s1"
    assert picker.pick(a_request(5), 0.0, {"s0"}).reasons[0] != "no room for its KV at 1 of 1"


def test_the_usual_time_of_decoding_is_learnt() -> None:
    picker, scorer = a_picker()
    assert scorer.decode_s == math.inf
    for seconds in (10.0, 20.0):
        picker.on_request_end(sent(picker, "s0"), seconds)
    assert scorer.decode_s == 15.0
    assert a_picker(decode_s=7.0)[1].decode_s == 7.0


def test_what_will_be_by_mooncakes_rule() -> None:
    picker, scorer = a_picker(2, decode_s=100.0)
    idle, batch_of_one = 1.0, 2.1
    sent(picker, "s0", now_s=0.0)
    assert scorer.tbt_s(0.0, 0.0) == pytest.approx((batch_of_one + idle) / 2)
    coming = sent(picker, "s1", now_s=0.0, joins=False)
    scorer.expected(coming.request, 50.0)
    assert scorer.tbt_s(0.0, 0.0) == pytest.approx((batch_of_one + idle) / 2), "it has not come"
    grown = 0.001 * 49.0 / batch_of_one
    assert scorer.tbt_s(49.0, 0.0) == pytest.approx((batch_of_one + grown + idle) / 2)
    assert scorer.tbt_s(60.0, 0.0) > 2.1, "it has come"
    assert scorer.tbt_s(101.0, 0.0) == pytest.approx((idle + batch_of_one + 0.051 / batch_of_one) / 2), "one has gone"
    assert scorer.tbt_s(151.0, 0.0) == idle


def test_servers_that_died_are_no_part_of_the_outlook() -> None:
    picker, scorer = a_picker(2)
    sent(picker, "s0")
    picker.fleet.servers["s1"].healthy = False
    assert scorer.tbt_s(0.0, 0.0) == pytest.approx(2.1)
    picker.remove("s0")
    assert scorer.tbt_s(0.0, 0.0) == 0.0


def test_the_same_request_may_be_sent_again_after_its_server_died() -> None:
    picker, scorer = a_picker(2)
    first = sent(picker, "s0")
    picker.on_request_end(first, 1.0)
    again = picker.pick(first.request, 1.0, {"s0"})
    picker.routed(again, 1.0)
    picker.succeeded(again, 2.0)
    picker.on_request_end(again, 3.0)
    assert not scorer._open and not scorer._expected and not scorer._batches[0].booked


def test_impossible_settings_are_refused() -> None:
    for kv_tokens, decode_s in ((0, None), (None, 0.0)):
        with pytest.raises(InvalidInput, match="kv_tokens must be ≥ 1, decode_s > 0"):
            LeastTbt(Steps(), fleet_of(1), kv_tokens, decode_s)


def test_sums_restart_with_an_empty_batch() -> None:
    """0.1 + 0.2 + 0.3 - 0.1 - 0.2 - 0.3 is not 0."""
    picker, scorer = a_picker(1)
    for decision in [sent(picker, "s0", now_s) for now_s in (0.1, 0.2, 0.3)]:
        picker.on_request_end(decision, 1.0)
    assert scorer._batches[0].joined_at_s == 0.0
