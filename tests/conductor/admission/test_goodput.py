"""Ours: the cheapest that fit are let in, estimates and headroom are learnt, and below overload it changes nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.conductor.admission.cases import Believed, case
from tests.conductor.admission.queue_model import Asked, poisson, run
from tests.conductor.scheduling.worlds import fleet_of

from skymemory.conductor.admission.goodput import Batches, Goodput, GoodputSettings, LearntHeadroom, LearntTtft, Price
from skymemory.conductor.admission.registry import admission
from skymemory.conductor.picker import Picker
from skymemory.conductor.request import Slo
from skymemory.conductor.scheduler import Refusal, ScheduledRequest
from skymemory.conductor.scheduling.decode import LeastTbt, Parts
from skymemory.errors import InvalidInput

SLO = Slo(10.0, 0.1)
SERVERS = 4


def mixed(load: float, until_s: float = 300.0, seed: int = 1) -> list[Asked]:
    """Requests of 1 s, exponentially spread."""
    return poisson(random.Random(seed), until_s, SERVERS * load, 1.0)


@pytest.mark.parametrize("load", [2.0, 3.0, 4.0])
def test_as_many_keep_their_promises_and_wait_less(load: float) -> None:
    """The rule that goes by the queue alone lets it grow until only the cheapest are in time: so it finds the same
    price, and all who are served wait as long as is allowed.
    """
    requests = mixed(load=load)
    ours = run(admission("goodput", SLO), SLO, requests, SERVERS)
    theirs = run(admission("predicted", SLO), SLO, requests, SERVERS)
    assert ours.served.total() >= theirs.served.total()
    assert ours.wait_s < theirs.wait_s
    assert {refusal.kind for *_, refusal in ours.refusals} >= {"cost"}


def test_below_overload_it_lets_all_in() -> None:
    outcome = run(admission("goodput", SLO), SLO, mixed(load=0.6), SERVERS)
    assert outcome.refusals == []


def test_the_doomed_are_refused_at_once() -> None:
    refusal = Goodput(SLO).on_arrival(case(10.5), 0.0)
    assert refusal is not None
    assert refusal.kind == "ttft"


def test_first_tokens_that_come_late_teach_it_to_refuse_earlier() -> None:
    rule = Goodput(SLO)
    assert rule.on_arrival(case(8.0), 0.0) is None
    for _ in range(500):
        rule.prefilled(case(8.0, at_s=0.0), 12.0)
    refusal = rule.on_arrival(case(8.0), 0.0)
    assert refusal is not None
    assert refusal.kind == "ttft"
    assert "12 s" in refusal.reason


def test_a_batch_that_would_be_too_slow_is_refused_on_arrival_and_at_its_turn() -> None:
    for asked in (Goodput(SLO).on_arrival, Goodput(SLO).before_decode):
        refusal = asked(case(1.0, tbt_s=0.11), 0.0)
        assert refusal is not None
        assert refusal.kind == "tbt"
        assert asked(case(1.0, tbt_s=0.1), 0.0) is None


def test_the_batch_counts_as_it_will_be_when_the_prefill_is_done() -> None:
    full_until_7 = Believed(lambda at_s: 0.2 if at_s < 7.0 else 0.05)
    assert Goodput(SLO).on_arrival(case(6.0, tbt_s=0.2, forecast=full_until_7), 0.0) is not None
    assert Goodput(SLO).on_arrival(case(6.0, tbt_s=0.2, forecast=full_until_7), 2.0) is None


class PerToken:
    """A step takes its time from the tokens of context: 12,800 of them take the promised 0.1 s."""

    def decode_parts(self, batch: int) -> Parts:
        return 1e-6, 0.0, 0.1 / 12_800, 0.0, 0.0


class Burst:
    """Prompts of 1,000 tokens that take 1 s to prefill, at an idle decode server, where each stays for ``stays_s``."""

    def __init__(self, stays_s: float) -> None:
        fleet = fleet_of(1)
        self.scorer = LeastTbt(PerToken(), fleet, decode_s=stays_s)
        self.picker, self.rule, self.stays_s = Picker(fleet, self.scorer), Goodput(SLO), stays_s
        self.promised: list[tuple[float, ScheduledRequest]] = []
        self.decoding: list[tuple[float, ScheduledRequest]] = []

    def refusal(self, now_s: float) -> Refusal | None:
        """Of the next request, on arrival or later those of others before their decoding."""
        for placement in _due(self.decoding, now_s):
            self.picker.on_request_end(placement.decoder, now_s)
            self.rule.on_request_end(placement, now_s, met=True)
        for placement in _due(self.promised, now_s):
            again = replace(placement, decode=self.picker.pick(placement.request, now_s))
            refusal = self.rule.before_decode(again, now_s)
            if refusal is not None:
                return refusal
            self.picker.succeeded(placement.decoder, now_s)
            self.decoding.append((now_s + self.stays_s, placement))
        placement = case(1.0, at_s=now_s, forecast=self.scorer)
        placement.decode = self.picker.pick(placement.request, now_s)
        refusal = self.rule.on_arrival(placement, now_s)
        if refusal is None:
            self.picker.routed(placement.decode, now_s)
            self.scorer.expected(placement.request, now_s + 1.0)
            self.rule.accepted(placement, now_s)
            self.promised.append((now_s + 1.0, placement))
        return refusal


def _due(waiting: list[tuple[float, ScheduledRequest]], now_s: float) -> list[ScheduledRequest]:
    due = [placement for at_s, placement in waiting if at_s <= now_s]
    waiting[:] = [each for each in waiting if each[0] > now_s]
    return due


def test_none_of_a_burst_is_refused_whose_promises_can_all_be_kept() -> None:
    """Twenty in 2 s: ten are in prefill while ten decode, and 12 may at once; counted together it would be 20."""
    burst = Burst(stays_s=1.05)
    assert [burst.refusal(at * 0.1) for at in range(20)] == [None] * 20


def test_who_would_break_the_promises_of_a_burst_is_refused() -> None:
    """All join together and stay: of 20, halfway through the answers, e^-0.5 are left, 12.1, and 12.8 may be."""
    burst = Burst(stays_s=1000.0)
    assert [burst.refusal(0.0) for _ in range(20)] == [None] * 20
    refusal = burst.refusal(0.0)
    assert refusal is not None
    assert refusal.kind == "tbt"


def test_broken_promises_between_tokens_lower_the_limit() -> None:
    rule = Goodput(SLO)
    near = case(1.0, tbt_s=0.099)
    for _ in range(5):
        rule.accepted(near, 0.0)
        rule.on_request_end(near, 9.0, met=False)
    assert rule.on_arrival(near, 10.0) is not None
    assert rule.on_arrival(case(1.0, tbt_s=0.09), 10.0) is None


def test_a_late_first_token_is_not_held_against_decoding() -> None:
    rule = Goodput(SLO)
    for _ in range(5):
        near = case(1.0, tbt_s=0.099)
        rule.accepted(near, 0.0)
        rule.prefilled(near, 10.5)
        rule.on_request_end(near, 19.0, met=False)
    assert rule.before_decode(case(1.0, tbt_s=0.099), 20.0) is None
    assert not rule._late


def test_large_contexts_are_refused_where_decoding_is_short() -> None:
    """Each of 2 servers gives tokens every 1 µs per token of context; what asks is 100,000 tokens or 2,000."""
    rule = Goodput(SLO)
    dice = random.Random(2)
    open_: list[tuple[float, object]] = []
    refused = {2_000: 0, 100_000: 0}
    for at in range(3000):
        now_s = at * 0.5
        for _, one in [each for each in open_ if each[0] <= now_s]:
            rule.on_request_end(one, now_s, met=True)  # type: ignore[arg-type]
        open_ = [each for each in open_ if each[0] > now_s]
        tokens = dice.choice([2_000, 100_000])
        load = sum(each.request.prompt.tokens for _, each in open_) + tokens  # type: ignore[attr-defined]
        one = case(0.1, tbt_s=load / 2 * 1e-6, compute_s=0.1, servers=8, at_s=now_s, tokens=tokens)
        refusal = rule.on_arrival(one, now_s)
        if refusal is not None:
            refused[tokens] += 1
            rule.refused(one, refusal, now_s)
        else:
            rule.accepted(one, now_s)
            open_.append((now_s + 20.0, one))
    assert refused[2_000] == 0
    assert refused[100_000] > 1000


def test_a_price_is_where_the_knapsack_is_full() -> None:
    price = Price(window_s=10.0)
    assert price.max_cost(1.0, 0.0, 0.0) == float("inf")
    for at in range(11):
        price.record_request(float(at), at * 1.0)  # costs 0 to 10, one a second
    assert price.max_cost(5.5, 0.0, 10.0) == float("inf")
    assert price.max_cost(1.0, 0.0, 10.0) == 4.0, "0+1+2+3+4 fit into 10"
    assert price.max_cost(1.0, 5.0, 10.0) == 5.0
    assert price.max_cost(0.0, -3.0, 10.0) == 0.0
    price.record_request(1.0, 25.0)
    assert price.max_cost(0.01, 0.0, 25.0) == 0.0, "only what asked within the window counts"


def test_a_price_forgets_and_stays_small() -> None:
    price = Price(window_s=10.0)
    for at in range(10_000):
        price.record_request(1.0, at * 0.0001)
    assert len(price._asked) <= 4096


def test_a_line_through_estimates_shows_what_batches_can_hold() -> None:
    batches = Batches()
    assert batches.max_tokens(0.1) == float("inf")
    for _ in range(100):
        batches.entered(1_000, 0.02 + batches.tokens * 1e-6 + 1_000 * 1e-6, now_s=0.0)
    assert batches.max_tokens(0.1) == pytest.approx(80_000, rel=0.01)
    for _ in range(100):
        batches.record_end(1_000, now_s=7.0)
    assert batches.tokens == 0


def test_those_that_stay_count_in_how_long_one_stays() -> None:
    batches = Batches()
    for at in range(100):
        batches.entered(1, 0.01, now_s=at * 1.0)
        if at % 2:
            batches.record_end(1, now_s=at * 1.0)  # half end in 1 s, the others never do
    assert batches.stay_s > 20.0, "by those alone that ended it would be 1 s"
    steady = Batches()
    for at in range(3000):
        steady.entered(1, 0.01, now_s=at * 1.0)
        if at >= 40:
            steady.record_end(1, now_s=at * 1.0)
    assert steady.stay_s == pytest.approx(40.0, rel=0.05)


def test_the_error_of_estimates_is_bounded_and_small_ones_teach_little() -> None:
    learnt = LearntTtft(promised_s=10.0)
    for _ in range(10):
        learnt.record_ttft(0.01, 100.0)
    assert learnt.bias < 1.001
    for _ in range(2000):
        learnt.record_ttft(2.0, 100.0)
    assert learnt.corrected_s(2.0) == pytest.approx(6.0, rel=1e-3)


@pytest.mark.parametrize("broken", [0.02, 0.1])
def test_headroom_settles_where_so_many_break_as_may(broken: float) -> None:
    """A batch breaks its promise the likelier the nearer to it: never at 0.8, always at 1."""
    headroom = LearntHeadroom(least=0.5, broken=broken)
    dice = random.Random(3)
    ends = []
    for _ in range(20_000):
        load = headroom.share
        met = dice.random() > (load - 0.8) / 0.2
        headroom.record_outcome(load, met)
        ends.append(met)
    late = ends[10_000:]
    assert 1 - sum(late) / len(late) == pytest.approx(broken, abs=0.01)


@pytest.mark.parametrize("options", [{"window_s": 0.0}, {"fill": 0.0}, {"use": 1.5}, {"broken": 1.0}])
def test_impossible_settings_are_errors(options: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        GoodputSettings(**options)


def test_asking_changes_nothing() -> None:
    rule = Goodput(SLO)
    for at in range(200):
        given = case(1.0 + at % 9, tbt_s=0.05, compute_s=0.5, servers=2, at_s=at * 0.1)
        first = rule.on_arrival(given, at * 0.1)
        assert rule.on_arrival(given, at * 0.1) == first
        if first is None:
            rule.accepted(given, at * 0.1)
        else:
            rule.refused(given, Refusal("", 1.0), at * 0.1)
