"""Least estimated time to first token: seconds of waiting against seconds of computing."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from tests.conductor.prefix_index.naive_index import NaivePrefixIndex
from tests.conductor.strategies.fleets import a_fleet, a_request, serve

from skymemory.conductor.picker import Picker, ReportedLoad
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.request import Decision
from skymemory.conductor.strategies.estimates import LearnedSpeeds
from skymemory.conductor.strategies.least_ttft import LeastTtft, LeastTtftSettings
from skymemory.conductor.strategies.registry import named
from skymemory.errors import InvalidInput


class MillisecondPerToken:
    def prefill_s(self, tokens: float, cached: float = 0) -> float:
        return max(1.0, tokens - cached) * 1e-3


def a_picker(servers: int, seed: int = 1, **settings: float) -> Picker:
    scorer = LeastTtft(NaivePrefixIndex(10_000), LeastTtftSettings(**settings), MillisecondPerToken())  # type: ignore[arg-type]
    return Picker(a_fleet(servers), scorer, seed=seed)


def send(picker: Picker, decision: Decision, now_s: float) -> Decision:
    picker.routed(decision, now_s)
    return decision


def test_a_cache_is_worth_the_seconds_it_saves_and_no_more() -> None:
    picker = a_picker(2, delay_weight=0.0)
    serve(picker, a_request((1, 50)), among={"s0"})
    asked = a_request((1, 50), (2, 12))  # 992 tokens, of which 800 are cached at s0.
    first = picker.pick(asked, 0.0)
    assert first.server == "s0" and first.matched_tokens == 800
    assert first.estimated_ttft_s == pytest.approx(0.192)
    send(picker, picker.pick(a_request((9, 50)), 0.0, {"s0"}), 0.0)  # 0.8 s of work at s0.
    waiting = picker.pick(asked, 0.0)
    assert waiting.server == "s1" and waiting.estimated_ttft_s == pytest.approx(0.992 + 0.0)
    later = picker.pick(asked, 0.1)
    assert later.server == "s0" and later.estimated_ttft_s == pytest.approx(0.7 + 0.192)
    assert "seconds of waiting 0.7" in later.reasons and "tokens held 800" in later.reasons


def test_a_hot_prefix_is_copied_by_itself_as_soon_as_waiting_costs_more() -> None:
    picker = a_picker(4)
    serve(picker, a_request((1, 60)), among={"s0"})
    for number in range(40):
        send(picker, picker.pick(a_request((1, 60), (10 + number, 5)), 0.0), 0.0)
    counts = Counter({server.name: server.in_flight for server in picker.fleet})
    assert len(counts) == 4 and counts["s0"] > counts["s1"] > 0
    assert max(counts.values()) <= 22


def test_a_prompt_under_way_counts_for_who_queues_behind_it() -> None:
    picker = a_picker(2)
    send(picker, picker.pick(a_request((1, 50)), 0.0, {"s0"}), 0.0)
    assert picker.pick(a_request((1, 50), (2, 2)), 0.6).server == "s0"
    assert picker.pick(a_request((3, 50), (2, 2)), 0.6).server == "s1"


def test_a_prompt_that_failed_under_way_is_taken_back() -> None:
    picker = a_picker(2)
    sent = send(picker, picker.pick(a_request((1, 50)), 0.0, {"s0"}), 0.0)
    assert picker.pick(a_request((1, 50)), 0.1, {"s0"}).matched_tokens == 800
    picker.failed(sent, 0.2)
    decision = picker.pick(a_request((1, 50)), 0.2, {"s0"})
    assert decision.matched_tokens == 0 and decision.estimated_ttft_s == pytest.approx(0.8)


def test_a_retry_elsewhere_and_the_same_request_twice() -> None:
    picker = a_picker(3)
    asked = a_request((1, 50))
    one = send(picker, picker.pick(asked, 0.0, {"s0"}), 0.0)
    picker.failed(one, 0.1)
    two = send(picker, picker.pick(asked, 0.1, {"s1"}), 0.1)
    three = send(picker, picker.pick(asked, 0.1, {"s1"}), 0.1)
    picker.succeeded(two, 1.0)
    assert picker.pick(asked, 1.0, {"s1"}).matched_tokens == 800
    picker.failed(three, 1.0)
    assert picker.pick(asked, 1.0, {"s1"}).estimated_ttft_s == pytest.approx(1e-3)
    assert picker.pick(asked, 1.0, {"s0"}).matched_tokens == 0


def test_a_server_that_hangs_repels() -> None:
    picker = a_picker(2)
    serve(picker, a_request((1, 50)), among={"s0"})
    send(picker, picker.pick(a_request((2, 10)), 0.0, {"s0"}), 0.0)
    asked = a_request((1, 50))
    assert picker.pick(asked, 1.0).server == "s0"
    assert picker.pick(asked, 30.0).server == "s1"


def test_what_others_sent_counts_by_the_servers_report() -> None:
    picker = a_picker(2)
    serve(picker, a_request((1, 50)), among={"s0"})
    picker.fleet.servers["s0"].reported = ReportedLoad(at_s=10.0, waiting=3)
    assert picker.pick(a_request((1, 50)), 10.0).server == "s1"
    assert picker.pick(a_request((1, 50)), 60.0).server == "s0"


@pytest.mark.brief()
def test_a_slow_server_is_found_out_without_being_configured() -> None:
    picker = Picker(a_fleet(3), LeastTtft(NaivePrefixIndex(10_000)), seed=1)
    per_token_s = {"s0": 1e-3, "s1": 1e-4, "s2": 1e-4}
    now_s, sent = 0.0, Counter[str]()
    for number in range(300):
        now_s += 1.0
        decision = send(picker, picker.pick(a_request((number, 20)), now_s), now_s)
        picker.succeeded(decision, now_s + decision.request.prompt.tokens * per_token_s[decision.server])
        picker.on_request_end(decision, now_s + 0.9)
        sent[decision.server] += number >= 100
    assert sent["s0"] <= 4 and min(sent["s1"], sent["s2"]) >= 60
    assert decision.estimated_ttft_s == pytest.approx(0.032, rel=0.05)


@pytest.mark.brief()
def test_in_heavy_traffic_the_delay_of_others_is_weighed_against_ones_own() -> None:
    """Waiting 0.88 s for a cache costs this request more than the 0.832 s of recomputing, but others less."""
    for weight, traffic, expected in ((0.0, 240, "s1"), (0.3, 240, "s0"), (0.3, 0, "s1")):
        picker = a_picker(2, delay_weight=weight)
        serve(picker, a_request((1, 50)), among={"s0"})
        for number in range(traffic):
            serve(picker, a_request((100 + number, 30)), number * 0.25)
        now_s = traffic * 0.25
        send(picker, picker.pick(a_request((9, 55)), now_s, {"s0"}), now_s)
        assert picker.pick(a_request((1, 50), (2, 2)), now_s).server == expected, (weight, traffic)


def hostile(picker: Picker, gaps_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All requests share one long prefix and are answered at once, so that nothing but the guard spreads them."""
    now_s, times_s, slots = 0.0, [], []
    for number, gap_s in enumerate(gaps_s.tolist()):
        now_s += gap_s
        decision = serve(picker, a_request((1, 40), (number % 7, 1)), now_s)
        times_s.append(now_s)
        slots.append(picker.fleet.servers[decision.server].slot)
    return np.array(times_s), np.array(slots)


@pytest.mark.brief()
@pytest.mark.parametrize("servers", [4, 8, 16])
def test_no_server_gets_more_than_its_share_when_all_share_one_prefix(servers: int) -> None:
    gaps_s = np.random.default_rng(servers).exponential(0.35, 420)
    gaps_s[210:] *= 0.5
    times_s, slots = hostile(a_picker(servers, guard_limit=2.2), gaps_s)
    judged = 0
    for start in range(len(slots)):
        window = slots[start : int(np.searchsorted(times_s, times_s[start] + 60.0, side="left"))]
        if len(window) >= 80:
            judged += 1
            assert np.bincount(window, minlength=servers).max() <= 2.2 * len(window) / servers
    assert judged > 200
    _, free = hostile(a_picker(servers, guard_limit=float("inf")), gaps_s[:100])
    assert np.bincount(free, minlength=servers).max() == 100, "without a guard one server gets them all"


def test_servers_passed_over_are_reported() -> None:
    picker = a_picker(8, guard_limit=2.2)
    reasons: list[str] = []
    for number in range(40):
        reasons += serve(picker, a_request((1, 40)), number * 0.1).reasons
    assert any("skipped, with 2.2 × the mean of recent requests: s" in reason for reason in reasons)


def test_with_events_only_events_teach() -> None:
    scorer = named("least-ttft", events=True)
    assert isinstance(scorer, LeastTtft) and isinstance(scorer.index, PreciseIndex)
    picker = Picker(a_fleet(2), scorer, seed=1)
    serve(picker, a_request((1, 10)))
    assert picker.pick(a_request((1, 10)), 1.0).matched_tokens == 0


@pytest.mark.parametrize("settings", [{"delay_weight": -1.0}, {"overdue": -0.1}, {"guard_limit": 0.0}])
def test_settings_that_cannot_be_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        LeastTtftSettings(**settings)  # type: ignore[arg-type]


def test_answers_from_before_a_restart_say_nothing_of_speeds() -> None:
    scorer = LeastTtft(NaivePrefixIndex(10_000))
    picker = Picker(a_fleet(1), scorer, seed=1)
    sent = [send(picker, picker.pick(a_request((number, 20)), 0.0), 0.0) for number in range(6)]
    scorer.forget(picker.fleet.servers["s0"])
    for decision in sent:
        picker.succeeded(decision, 50.0)
    assert scorer.speeds.prefills_s([0], 100, [0]) == LearnedSpeeds().prefills_s([0], 100, [0])
