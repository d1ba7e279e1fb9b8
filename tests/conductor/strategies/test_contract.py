"""What every strategy must do, whatever its idea."""

from __future__ import annotations

import numpy as np
import pytest
from tests.conductor.strategies.fleets import a_fleet, a_request, scores, serve

from skymemory.conductor.picker import Picker, ReportedLoad, Scorer
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.strategies.registry import NAMES, STRATEGIES, named

LEARNING = ("least-ttft", "approximate", "radix", "hash-trie", "simhash", "lmetric", "block-cost")
"""Those that believe a server to hold what it was sent."""
PREFIX = (*LEARNING, "precise", "chwbl")

CROWDING = 1e-3
"""Of scores in seconds, what a few blocks in a cache of thousands cost."""


def spread(found: dict[str, float]) -> float:
    return max(found.values()) - min(found.values())


@pytest.fixture(params=NAMES)
def scorer(request: pytest.FixtureRequest) -> Scorer:
    return named(request.param)


@pytest.fixture(params=LEARNING)
def learner(request: pytest.FixtureRequest) -> Scorer:
    return named(request.param)


def test_every_server_is_ranked_and_reasons_are_sentences(scorer: Scorer) -> None:
    fleet = a_fleet(5)
    picker = Picker(fleet, scorer, seed=3)
    for number in range(30):
        decision = serve(picker, a_request((number % 3, 4), (number, 6), session=f"u{number % 4}"), float(number))
        assert {decision.server, *decision.fallbacks} == set(fleet.servers)
        assert all(isinstance(reason, str) and reason for reason in decision.reasons)
        assert 0 <= decision.matched_tokens <= decision.request.prompt.tokens
        assert decision.as_json()["strategy"] == scorer.name


@pytest.mark.brief(every=5)
def test_the_same_seed_gives_the_same_choices(scorer: Scorer) -> None:
    def choices() -> list[str]:
        picker = Picker(a_fleet(6), named(scorer.name), seed=11)
        sent = []
        for number in range(60):
            decision = picker.pick(a_request((number % 5, 8), (number % 20, 4), session=f"u{number % 7}"), number * 0.1)
            picker.routed(decision, number * 0.1)
            sent.append(decision)
            if number % 3 == 2:
                picker.succeeded(sent[-2], number * 0.1)
                picker.on_request_end(sent[-2], number * 0.1)
        return [decision.server for decision in sent]

    assert choices() == choices()


def test_ranking_teaches_nothing(scorer: Scorer) -> None:
    fleet = a_fleet(4)
    picker = Picker(fleet, scorer, seed=1)
    asked, other = a_request((1, 8), (2, 8), session="a"), a_request((1, 8), (3, 8), session="b")
    serve(picker, other)
    before = scores(scorer, asked, fleet, 1.0)
    for _ in range(5):
        scores(scorer, other, fleet, 1.0)
        scores(scorer, a_request((9, 20)), fleet, 1.0)
    assert scores(scorer, asked, fleet, 1.0) == before


def test_what_succeeded_is_found_again(learner: Scorer) -> None:
    fleet = a_fleet(4)
    picker = Picker(fleet, learner, seed=1)
    first = serve(picker, a_request((1, 10), (2, 10)))
    again = {picker.pick(a_request((1, 10), (2, 10), (number, 2)), 1.0).server for number in range(10, 20)}
    assert again == {first.server}


def test_what_failed_is_not_believed(learner: Scorer) -> None:
    fleet = a_fleet(4)
    picker = Picker(fleet, learner, seed=1)
    decision = picker.pick(a_request((1, 10)), 0.0)
    picker.routed(decision, 0.0)
    picker.failed(decision, 0.5)
    assert len(set(scores(learner, a_request((1, 10)), fleet, 1.0).values())) == 1
    assert picker.pick(a_request((1, 10)), 1.0).matched_tokens == 0


def test_a_server_that_left_is_forgotten_and_its_slot_is_clean(learner: Scorer) -> None:
    fleet = a_fleet(3)
    picker = Picker(fleet, learner, seed=1)
    gone = serve(picker, a_request((1, 10))).server
    under_way = picker.pick(a_request((1, 10), (5, 3)), 0.0)
    assert under_way.server == gone
    picker.routed(under_way, 0.0)
    slot = fleet.servers[gone].slot
    picker.remove(gone)
    assert fleet.add("new").slot == slot
    assert len(set(scores(learner, a_request((1, 10)), fleet, 1.0).values())) == 1
    picker.succeeded(under_way, 1.0)  # An answer of the one that left.
    assert len(set(scores(learner, a_request((1, 10)), fleet, 1.0).values())) == 1


def test_a_restarted_server_of_the_same_name_holds_nothing(learner: Scorer) -> None:
    fleet = a_fleet(3)
    picker = Picker(fleet, learner, seed=1)
    restarted = serve(picker, a_request((1, 10))).server
    learner.forget(fleet.servers[restarted])
    assert len(set(scores(learner, a_request((1, 10)), fleet, 1.0).values())) == 1


def test_a_shorter_and_a_longer_prompt(learner: Scorer) -> None:
    fleet = a_fleet(4)
    picker = Picker(fleet, learner, seed=1)
    server = serve(picker, a_request((1, 20))).server
    for blocks in (17, 18, 19):
        assert picker.pick(a_request((1, blocks)), 1.0).server == server
    assert picker.pick(a_request((1, 20), (2, 2)), 1.0).server == server


def test_prompts_of_another_adapter_or_salt_share_nothing(learner: Scorer) -> None:
    fleet = a_fleet(4)
    serve(Picker(fleet, learner, seed=1), a_request((1, 10), seed=1))
    assert spread(scores(learner, a_request((1, 10), seed=2), fleet, 1.0)) < CROWDING


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("tokens", [0, 5])
def test_prompts_without_a_block(scorer: Scorer, servers: int, tokens: int) -> None:
    none = np.empty(0, dtype=np.uint64)
    picker = Picker(a_fleet(servers), scorer, seed=1)
    for _ in range(4):
        assert serve(picker, Request(Prompt(none, none, 16, tokens))).matched_tokens == 0


def test_one_server_gets_everything(scorer: Scorer) -> None:
    picker = Picker(a_fleet(1), scorer, seed=1)
    assert {serve(picker, a_request((1, 5), (number, 3)), float(number)).server for number in range(50)} == {"s0"}


def test_a_server_that_takes_nothing_gets_nothing(scorer: Scorer) -> None:
    fleet = a_fleet(3)
    picker = Picker(fleet, scorer, seed=1)
    favourite = serve(picker, a_request((1, 10), session="u")).server
    fleet.servers[favourite].healthy = False
    assert favourite not in {serve(picker, a_request((1, 10), session="u"), 1.0).server for _ in range(6)}


@pytest.mark.parametrize("name", PREFIX)
def test_misses_go_to_least_load_and_spread(name: str) -> None:
    """SGLang's issue 32983: on a miss everything went to one replica."""
    fleet = a_fleet(4)
    picker = Picker(fleet, named(name), seed=1)
    for number in range(40):
        decision = picker.pick(a_request((100 + number, 10)), 0.0)
        picker.routed(decision, 0.0)
    assert max(server.in_flight for server in fleet) <= 14, "1.25 × the mean at most, and one more for rounding up"


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("random", "round-robin", "session")])
def test_load_weighs_more_than_a_small_match_in_the_end(name: str) -> None:
    """Requests that are never answered pile up: a server that holds the prefix may not get them all."""
    fleet = a_fleet(4)
    picker = Picker(fleet, named(name), seed=1)
    serve(picker, a_request((1, 8), (2, 2)))
    for number in range(200):
        decision = picker.pick(a_request((1, 8), (100 + number, 2)), 0.0)
        picker.routed(decision, 0.0)
        for server in fleet:
            there = server.in_flight
            server.reported = ReportedLoad(0.0, max(0, there - 8), min(8, there), min(1.0, there / 100))
    assert max(server.in_flight for server in fleet) < 160


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("random", "round-robin", "session", "block-cost")]
)
def test_a_stale_report_says_nothing(name: str) -> None:
    fleet = a_fleet(2)
    scorer = named(name)
    fleet.servers["s0"].reported = ReportedLoad(at_s=0.0, waiting=50, running=8, kv_usage=0.95)
    serve(Picker(fleet, scorer, seed=1), a_request((50, 3)), 0.0, {"s1"})  # So that a usual prefill is known.
    prompt = a_request((1, 4))
    fresh, stale = scores(scorer, prompt, fleet, 1.0), scores(scorer, prompt, fleet, 100.0)
    assert fresh["s0"] < fresh["s1"]
    if name != "chwbl":  # By its hash, either may come first.
        assert spread(stale) < CROWDING


@pytest.mark.parametrize(
    "name", [name for name in PREFIX if "min_match_tokens" in STRATEGIES.options_of(name) and name != "precise"]
)
def test_a_gain_under_the_threshold_leaves_it_to_load_and_says_so(name: str) -> None:
    for option, value in (("min_match_tokens", 400), ("min_match_ratio", 0.97)):
        fleet = a_fleet(3)
        picker = Picker(fleet, named(name, **{option: value}), seed=1)
        held = serve(picker, a_request((1, 10), (2, 1))).server
        for number in (7, 8):
            asked = a_request((1, 10), (number, 1))
            assert spread(scores(picker.scorer, asked, fleet, 1.0)) < CROWDING, f"{held} holds 160 of 176 tokens"
            assert any("load only" in reason for reason in picker.pick(asked, 1.0).reasons)


@pytest.mark.parametrize("name", [name for name in PREFIX if name not in ("simhash", "chwbl")])
def test_reasons_state_the_figures(name: str) -> None:
    picker = Picker(a_fleet(3), named(name), seed=1)
    serve(picker, a_request((1, 10)))
    text = " ".join(picker.pick(a_request((1, 10), (2, 1)), 1.0).reasons)
    assert any(figure in text for figure in ("160", "0.9091", "nothing of the prompt's 176"))
