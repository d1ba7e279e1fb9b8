"""Prices beside the prefill: what decoding costs all, what evicting costs later, and who is not to be believed."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conductor.strategies.fleets import a_fleet, a_request, scores

from skymemory import native
from skymemory.conductor.picker import DecodeTotals, Fleet, Picker, ReportedLoad
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.beliefs import AnswersDue, HitTrust
from skymemory.conductor.strategies.decode_costs import DecodeCosts, Step, fit_steps
from skymemory.conductor.strategies.estimates import BusyIntervals, LearnedSpeeds
from skymemory.conductor.strategies.eviction_price import EvictionPrice, chances_of_use
from skymemory.conductor.strategies.least_ttft import LeastTtft, LeastTtftSettings
from skymemory.conductor.strategies.server_prices import GOALS
from skymemory.errors import InvalidInput

# --- what decoding costs ---


def test_steps_are_found_in_noise() -> None:
    dice, true = random.Random(3), Step(0.02, 0.002, 0.7)
    seen = []
    for _ in range(128):
        answers, prefilled_s = dice.uniform(1, 30), dice.choice([0.0, dice.uniform(0, 0.05)])
        seen.append((answers, prefilled_s, true.token_s(answers, prefilled_s) * dice.gauss(1, 0.05)))
    found = fit_steps(seen)
    assert found == pytest.approx(true, rel=0.15)


def test_what_does_not_vary_costs_nothing() -> None:
    assert fit_steps([(8.0, 0.01, 0.04)] * 20) == pytest.approx(Step(0.04, 0.0, 0.0))
    # Tokens that come sooner beside more answers are chance: nothing is negative.
    assert fit_steps([(answers, 0.0, 0.05 - 0.001 * answers) for answers in range(1, 20)]).each_s == 0.0


def a_step_server(costs: DecodeCosts, slot: int, step: Step, factor: float = 1.0, dice: int = 0) -> None:
    """Answers of 50 tokens on a server, in waves of 1 to 12 at a time, each token as long as ``step`` says."""
    drawn, now_s = random.Random(dice), 0.0
    for _ in range(30):
        count = drawn.randint(1, 12)
        marks = [costs.began(slot, now_s) for _ in range(count)]
        now_s += 49 * step.token_s(count, 0.0) * factor
        for mark in marks:
            costs.ended(slot, mark, 50, now_s)
        now_s += 1.0


def test_a_server_teaches_what_one_more_answer_costs() -> None:
    costs = DecodeCosts()
    for slot in (0, 1):
        a_step_server(costs, slot, Step(0.02, 0.003), dice=slot)
    own_s, others_s = costs.token_s(0, 10, 1e9)
    assert own_s == pytest.approx(0.02 + 0.003 * 11, rel=0.05) and others_s == pytest.approx(0.03, rel=0.1)
    assert costs.token_s(0, 10, 1e9) == costs.token_s(1, 10, 1e9) == costs.token_s(77, 10, 1e9)
    assert costs.usual_tokens == pytest.approx(50)


def test_a_slow_server_has_its_own_price() -> None:
    costs = DecodeCosts()
    for turn in range(3):
        for slot, factor in ((0, 1.0), (1, 1.0), (2, 1.0), (3, 3.0)):
            a_step_server(costs, slot, Step(0.02), factor, dice=turn)
    fast_s, slow_s = costs.token_s(0, 0, 1e9)[0], costs.token_s(3, 0, 1e9)[0]
    assert slow_s > 2 * fast_s and costs.token_s(1, 0, 1e9)[0] == fast_s


def test_prefills_stretch_the_answers_beside_them() -> None:
    """Chunked prefill: each answer waits for the seconds of all prefills meanwhile."""
    costs, now_s, dice = DecodeCosts(), 0.0, random.Random(1)
    for _ in range(60):
        mark, prefill_s = costs.began(0, now_s), dice.choice([0.0, 0.5, 1.5])
        costs.prefilled(0, prefill_s, now_s)
        now_s += 49 * 0.02 + prefill_s
        costs.ended(0, mark, 50, now_s)
    assert costs.step.stall == pytest.approx(1.0, rel=0.1) and costs.step.base_s == pytest.approx(0.02, rel=0.1)
    busy_s, later_s = costs.token_s(0, 0, now_s)[0], costs.token_s(0, 0, now_s + 600.0)[0]
    assert busy_s > 1.3 * later_s and later_s == pytest.approx(0.02, rel=0.1)


def test_an_engine_s_metrics_count_until_a_stream_does() -> None:
    costs, (server,) = DecodeCosts(), list(a_fleet(1))
    for number in range(1, 9):
        running, tokens = number % 4 + 1, 100.0 * number
        server.reported = ReportedLoad(number, running=running, decodes=DecodeTotals(tokens, 0.05 * tokens))
        costs.read_report(server)
    assert costs.step.base_s == pytest.approx(0.05)
    mark = costs.began(0, 10.0)
    costs.ended(0, mark, 11, 10.2)
    assert costs.step.base_s == pytest.approx(0.02)
    for number in range(1, 40):
        server.reported = replace(server.reported, decodes=DecodeTotals(1000.0 * number, 900.0 * number))
        costs.read_report(server)
    costs.ended(0, costs.began(0, 20.0), 11, 20.2)
    assert costs.step.base_s == pytest.approx(0.02)


def test_whole_answers_teach_by_what_is_estimated_before_them() -> None:
    costs = DecodeCosts()
    for number in range(20):
        mark = costs.began(0, 10.0 * number)
        costs.ended(0, mark, 101, 10.0 * number + 1.0 + 3.0, unseen_s=1.0)
    assert costs.step.base_s == pytest.approx(0.03)


# --- what evicting costs ---


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_chances_fall_with_age_and_stay_between_0_and_1(counts: list[tuple[int, int]]) -> None:
    chances = chances_of_use(*zip(*counts, strict=True))
    assert all(0.0 <= later <= sooner <= 1.0 for sooner, later in pairwise([1.0, *chances, 0.0]))


def test_without_eviction_the_chance_is_the_share_that_is_used_again() -> None:
    """Blocks of three ages, of which none was evicted before the last: the estimate is the plain share."""
    assert chances_of_use((4, 3, 1), (0, 0, 2)) == pytest.approx((0.8, 4 / 6, 1 / 3))


def a_table(capacity: int = 8) -> native.PrefixTable:
    return native.PrefixTable(capacity)


def test_room_costs_nothing_and_what_comes_again_its_computation() -> None:
    table = a_table()
    price = EvictionPrice(table)
    for _ in range(40):  # slot 0: eight blocks in turn, again and again; slot 1 has room
        for number in range(8):
            table.learn(0, a_request((number, 1)).prompt.blocks)
    table.learn(1, a_request((1, 1)).prompt.blocks)
    assert price.lost_share(1) == 0.0 and price.lost_share(0) == pytest.approx(1.0)
    for number in range(100, 600):  # prompts that never come again
        table.learn(0, a_request((number, 1)).prompt.blocks)
    assert price.lost_share(0) < 0.5


def test_a_cache_is_crowded_by_what_will_be_used() -> None:
    table = a_table()
    price = EvictionPrice(table)
    assert price.crowding(0) == 0.0 and price.future_uses == 12
    price.sent(1_000_000_000, 800_000_000)
    assert price.future_uses == pytest.approx(4.0, rel=0.01)
    for number in range(4):
        table.learn(0, a_request((number, 1)).prompt.blocks)
    assert price.crowding(0) == pytest.approx(4.0, rel=0.01) and price.crowding(1) == 0.0


# --- who is believed ---


def test_three_denials_in_a_row_end_trust_and_truth_brings_it_back() -> None:
    trust = HitTrust()
    assert not any(trust.reported(0, 100, 0) for _ in range(2)) and trust.of(0) == 1.0
    trust.reported(0, 100, 90)
    assert not any(trust.reported(0, 100, 0) for _ in range(2))
    assert trust.reported(0, 100, 10) and trust.of(0) == pytest.approx(0.1)
    before = trust.of(0)
    for _ in range(20):
        trust.reported(0, 100, 100)
        assert trust.of(0) >= before
        before = trust.of(0)
    assert trust.of(0) == 1.0 and trust.of(1) == 1.0
    assert not trust.reported(0, 0, 0)  # nothing was believed


def test_what_was_due_is_late_until_it_comes() -> None:
    due = AnswersDue()
    first, second = due.add(0, 5.0), due.add(0, 3.0)
    assert due.first_s(0) == 3.0 and due.first_s(1) == math.inf
    due.drop(0, second)
    due.drop(0, second)
    assert due.first_s(0) == 5.0
    due.drop(0, first)
    assert due.first_s(0) == math.inf


# --- what prefills take ---


def test_prefills_that_share_a_server_take_their_sum() -> None:
    """Four of 2 s that end together after 8 s: 2 s each, and not 8, 0, 0 and 0."""
    intervals = BusyIntervals()
    for _ in range(4):
        intervals.sent(0, 0.0, is_seen=True)
    found = [intervals.ended(0, 1000, 0, 0.0, 8.0, 99, is_seen=True) for _ in range(4)]
    assert found == [None, None, None, (1000.0, 0.0, 2.0)]


def test_one_by_one_each_is_seen() -> None:
    intervals = BusyIntervals()
    for at_s in (0.0, 10.0):
        intervals.sent(0, at_s, is_seen=True)
        assert intervals.ended(0, 50, 20, 0.5, at_s + 2.0, 99, is_seen=True) == (50.0, 20.0, 1.5)


def test_an_interval_with_a_prefill_that_nothing_shows_says_nothing() -> None:
    intervals = BusyIntervals()
    intervals.sent(0, 0.0, is_seen=True)
    intervals.sent(0, 0.0, is_seen=False)
    assert intervals.ended(0, 50, 0, 0.0, 2.0, 99, is_seen=True) is None
    assert intervals.ended(0, 50, 0, 0.0, 4.0, 99, is_seen=False) is None
    intervals.sent(0, 5.0, is_seen=True)
    intervals.failed(0, is_seen=True)
    assert intervals.ended(0, 1, 0, 0.0, 6.0, 99, is_seen=True) is None


# --- the strategy ---


def a_picker(fleet: Fleet, **options: object) -> Picker:
    return Picker(fleet, LeastTtft(ApproximatePrefixIndex(64), LeastTtftSettings(**options)))  # type: ignore[arg-type]


def answer(picker: Picker, server: str, request: Request, at_s: float, ttft_s: float, whole_s: float) -> None:
    decision = picker.pick(request, at_s, {server})
    picker.routed(decision, at_s)
    picker.succeeded(decision, at_s + ttft_s)
    picker.on_request_end(decision, at_s + whole_s, output_tokens=101)


def taught(goal: str) -> tuple[Picker, Fleet]:
    """Two servers; a token takes 20 ms, and 10 ms more for each answer beside it. Ten answers run at the first."""
    fleet = a_fleet(2)
    picker, now_s = a_picker(fleet, goal=goal, delay_weight=0.0), 0.0
    scorer = picker.scorer
    assert isinstance(scorer, LeastTtft)
    for number in range(40):
        answer(picker, f"s{number % 2}", a_request((1000 + number, 10)), now_s, 0.1, 0.1 + 100 * 0.03)
        now_s += 100.0
    a_step_server(scorer._prices.decoding, 9, Step(0.02, 0.01))
    for _ in range(10):
        decision = picker.pick(a_request((7, 8)), now_s, {"s0"})
        picker.routed(decision, now_s)
        picker.succeeded(decision, now_s + 0.1)
    return picker, fleet


def test_the_goal_weighs_decoding_against_a_held_prefix() -> None:
    """The first server holds the prompt, which saves 80 ms, and ten answers slow each token there by 0.1 s, and
    each other one by 10 ms.
    """
    chosen = {}
    for goal in GOALS:
        picker, _ = taught(goal)
        at_s = 4_001.0
        # A hundred tokens of answer and a prompt that is held but for its last block.
        chosen[goal] = picker.pick(replace(a_request((7, 8), (8, 1)), output_tokens=100), at_s).server
    assert chosen["e2e"] == chosen["tpot"] == "s1"
    gaps = {}
    for goal in GOALS:
        picker, fleet = taught(goal)
        found = scores(picker.scorer, replace(a_request((7, 8), (8, 1)), output_tokens=100), fleet, 4_001.0)
        gaps[goal] = found["s1"] - found["s0"]
    assert gaps["ttft"] < gaps["balanced"] < gaps["tpot"] < gaps["e2e"]


def test_a_goal_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidInput, match="balanced, ttft, tpot, e2e"):
        LeastTtftSettings(goal="fast")


def test_a_hung_server_gets_few_whole_answers() -> None:
    """Of 200 requests whose answers come whole, one a second; one server of four never answers."""
    picker, now_s, sent = a_picker(a_fleet(4)), 0.0, {f"s{at}": 0 for at in range(4)}
    open_now = []
    for number in range(200):
        now_s = float(number)
        while open_now and open_now[0][0] <= now_s:
            done_s, decision = open_now.pop(0)
            picker.succeeded(decision, done_s)
            picker.on_request_end(decision, done_s, output_tokens=50)
        request = replace(a_request((number, 20)), streams=False, output_tokens=50)
        decision = picker.pick(request, now_s)
        picker.routed(decision, now_s)
        sent[decision.server] += 1
        if decision.server != "s0":
            open_now.append((now_s + 1.5, decision))
    assert sent["s0"] <= 5, sent


@pytest.mark.parametrize("streams", [True, False])
def test_after_an_emptied_cache_at_most_three_prompts_are_believed(streams: bool) -> None:
    picker = a_picker(a_fleet(1))
    prompts = [replace(a_request((number, 3)), streams=streams) for number in range(20)]
    wrong = 0
    for turn, cached in ((0, 0), (1, 48), (2, 0)):  # first asked; held; after the cache was emptied
        for number, request in enumerate(prompts):
            at_s = 1000.0 * turn + 10.0 * number
            decision = picker.pick(replace(request), at_s)
            wrong += turn == 2 and decision.matched_tokens > 0
            picker.routed(decision, at_s)
            picker.succeeded(decision, at_s + 0.5, cached if streams else None)
            picker.on_request_end(decision, at_s + 1.0, cached, 20)
    assert wrong <= 3


def test_a_server_that_never_caches_is_not_believed_again() -> None:
    """It says so each time; others hold what they computed."""
    picker, believed = a_picker(a_fleet(1)), []
    for number in range(60):
        request = a_request((number % 5, 8))
        decision = picker.pick(request, 10.0 * number)
        believed.append(decision.matched_tokens)
        picker.routed(decision, 10.0 * number)
        picker.succeeded(decision, 10.0 * number + 0.5, 0)
        picker.on_request_end(decision, 10.0 * number + 1.0, 0, 20)
    assert sum(tokens > 0 for tokens in believed) <= 3


def seen_at(speeds: LearnedSpeeds, slot: int, per_token_s: float, count: int) -> None:
    for number in range(count):
        speeds.observe_first(slot, 1_000 + 100 * (number % 5), 0, per_token_s * (1_000 + 100 * (number % 5)))


def test_servers_that_look_alike_share_a_curve() -> None:
    speeds = LearnedSpeeds()
    for turn in range(40):
        for slot in range(4):
            seen_at(speeds, slot, (1e-4, 1.05e-4, 0.96e-4, 3e-4)[slot], 1 + turn % 2)
    alike_s = speeds.prefills_s([0, 1, 2, 3], 1_200, [0] * 4)
    assert alike_s[0] == alike_s[1] == alike_s[2] and alike_s[3] > 2 * alike_s[0]


def test_a_server_that_seemed_slow_is_tried_again() -> None:
    speeds = LearnedSpeeds()
    seen_at(speeds, 3, 1e-2, 8)
    for _ in range(100):
        for slot in range(3):
            seen_at(speeds, slot, 1e-4, 4)
    others_s, slow_s = speeds.prefills_s([0, 3], 1_200, [0, 0])
    assert slow_s == others_s
