"""The arena's own rivals, by examples of their source's rules and tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.conductor.prefix_index.naive_index import NaivePrefixIndex
from tests.conductor.strategies.fleets import a_fleet, a_request, scores, serve

from skymemory.conductor.picker import Fleet, Picker, ReportedLoad
from skymemory_lab.sim.routing import RoutingSetup, simulate
from skymemory_lab.sim.workload import CONVERSATIONS, generate

ROOT = Path(__file__).parents[3]


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import _arena

    return _arena


@pytest.fixture
def rivals(arena: ModuleType) -> ModuleType:
    import _rivals

    return _rivals


def test_every_original_plays_with_each_of_its_settings(arena: ModuleType) -> None:
    requests = generate(CONVERSATIONS, 20.0, seed=5)
    for one in arena.ORIGINALS:
        tried = [arena.swept(one, value) for value in one.values]
        for player in [arena.Player(one.strategy, one.strategy, tuple(one.published.items())), *tried]:
            setup = RoutingSetup(cache_blocks=2_000)
            scorer, events = arena.scorer_of(player, setup)
            assert len(simulate(requests, scorer, setup, events)) == len(requests), player.name
            assert player.strategy == scorer.name
        assert bool(one.values) == bool(one.setting) and one.swept in (None, *one.values)


# llm-d: token-load-scorer, prefix-cache-affinity-filter, no-hit-lru-scorer.


def test_token_load_is_what_is_left_to_compute(rivals: ModuleType) -> None:
    fleet = a_fleet(3)
    scorer, events = rivals.rival("token-load")
    picker = Picker(fleet, scorer, seed=1)
    assert events is None
    serve(picker, a_request((1, 10)), among={"s0"})
    asked = a_request((1, 10), (2, 10))  # 320 tokens, half of which s0 holds
    for name, tokens in (("s0", 1_000), ("s1", 850), ("s2", 2_097_152 - 320)):
        fleet.servers[name].prefill_tokens = tokens
    found = scores(scorer, asked, fleet)
    assert found == pytest.approx({"s0": 1 - 1_160 / 4_194_304, "s1": 1 - 1_170 / 4_194_304, "s2": 0.5})
    assert picker.pick(asked, 0.0).server == "s0"
    # Sent, a prompt counts without what was held, until its first byte.
    decision = picker.pick(asked, 0.0)
    picker.routed(decision, 0.0)
    assert fleet.servers["s0"].prefill_tokens == 1_160
    picker.succeeded(decision, 1.0)
    assert fleet.servers["s0"].prefill_tokens == 0
    for name, tokens in (("s1", 5_000_000), ("s2", 6_000_000)):
        fleet.servers[name].prefill_tokens = tokens
    assert scores(scorer, asked, fleet)["s1"] == scores(scorer, asked, fleet)["s2"] == 0.0


def test_affinity_keeps_to_servers_with_four_fifths_of_the_prompt(rivals: ModuleType) -> None:
    fleet = a_fleet(3)
    scorer, _ = rivals.rival("affinity")
    picker = Picker(fleet, scorer, seed=1)
    serve(picker, a_request((1, 8)), among={"s0"})
    serve(picker, a_request((1, 7)), among={"s1"})
    asked = a_request((1, 8), (2, 2))
    fleet.servers["s0"].prefill_tokens = 100_000
    assert picker.pick(asked, 0.0).server == "s0", "8 of 10 blocks; 7 are too few"
    assert {picker.pick(a_request((1, 8), (2, 3)), 0.0).server for _ in range(20)} == {"s1"}, "of 11 no server has 0.8"
    serve(picker, a_request((1, 8)), among={"s2"})
    assert picker.pick(asked, 0.0).server == "s2", "among those that hold it, the fewest tokens"


@pytest.mark.parametrize(("more", "server"), [(0, "s0"), (1, "s1")])
def test_affinity_gives_way_above_eighteen_seconds(rivals: ModuleType, more: int, server: str) -> None:
    """At 15,928 tokens a second, 286,704 tokens more than at the least loaded of the others."""
    fleet = a_fleet(3)
    scorer, _ = rivals.rival("affinity")
    picker = Picker(fleet, scorer, seed=1)
    serve(picker, a_request((1, 10)), among={"s0"})
    for name, tokens in (("s0", 286_704 + 500 + more), ("s1", 500), ("s2", 900)):
        fleet.servers[name].prefill_tokens = tokens
    assert {picker.pick(a_request((1, 10)), 0.0).server for _ in range(20)} == {server}
    slower, _ = rivals.rival("affinity", prefill_tokens_per_s=1_000.0)
    always, _ = rivals.rival("affinity", penalty_s=0.0)
    for other, chosen in ((slower, "s1"), (always, "s0")):
        other.routed(a_request((1, 10)), fleet.servers["s0"], 0.0)
        fleet.servers["s0"].prefill_tokens = 18_501
        assert Picker(fleet, other, seed=1).pick(a_request((1, 10)), 0.0).server == chosen


def test_precise_affinity_believes_what_was_sent_for_two_seconds(rivals: ModuleType) -> None:
    fleet = a_fleet(3)
    scorer, events = rivals.rival("precise-affinity")
    picker = Picker(fleet, scorer, seed=1)
    assert events is not None
    first = picker.pick(a_request((1, 10)), 0.0)
    picker.routed(first, 0.0)
    picker.succeeded(first, 0.5)
    fleet.servers[first.server].prefill_tokens = 1_000
    asked = a_request((1, 10))
    assert {picker.pick(asked, 1.9).server for _ in range(20)} == {first.server}
    assert first.server not in {picker.pick(asked, 2.0).server for _ in range(20)}, "no event has come"


def test_no_hit_lru_spreads_prompts_that_no_server_holds(rivals: ModuleType) -> None:
    fleet = a_fleet(3)
    scorer, _ = rivals.rival("no-hit-lru")
    picker = Picker(fleet, scorer, seed=1)
    weighted = 2.0 + 2.0  # a short queue and a free cache, alike everywhere
    cold = scores(scorer, a_request((1, 5)), fleet)
    assert cold == pytest.approx({"s0": weighted + 2, "s1": weighted + 1, "s2": weighted})
    assert [serve(picker, a_request((text, 5))).server for text in (1, 2, 3, 4)] == ["s0", "s1", "s2", "s0"]
    cold = scores(scorer, a_request((9, 5)), fleet)
    assert cold == pytest.approx({"s1": weighted + 2, "s2": weighted + 1, "s0": weighted})
    # A server holds its beginning: all count a half, and it is not remembered.
    warm = scores(scorer, a_request((2, 5)), fleet)
    assert warm == pytest.approx({"s0": weighted + 1, "s1": weighted + 1 + 3, "s2": weighted + 1})
    assert serve(picker, a_request((2, 5))).server == "s1"
    assert scores(scorer, a_request((9, 5)), fleet) == pytest.approx(cold)
    picker.remove("s1")
    fleet.add("new")
    assert scores(scorer, a_request((9, 5)), fleet)["new"] == pytest.approx(weighted + 2), "it never had one"


# vLLM: sticky_least_loaded of its router, loadaware of production-stack.


def sent(picker: Picker, session: str, now_s: float = 0.0) -> str:
    return serve(picker, a_request((1, 2), session=session), now_s).server


def test_sessions_stay_and_new_ones_go_where_the_fewest_are(rivals: ModuleType) -> None:
    fleet = a_fleet(3)
    picker = Picker(fleet, rivals.rival("sticky-least-loaded")[0], seed=1)
    servers = [sent(picker, f"session {number}") for number in range(9)]
    assert all(len(set(servers[at : at + 3])) == 3 for at in (0, 3, 6))
    fleet.servers[servers[4]].in_flight = 1_000  # sessions are counted, not requests
    assert [sent(picker, f"session {number}") for number in range(9)] == servers
    # Without a session one prompt goes to one server, and is not counted.
    alone = {serve(picker, a_request((7, 3))).server for _ in range(10)}
    assert len(alone) == 1 and Counter(sent(picker, f"later {number}") for number in range(3)).most_common()[0][1] == 1
    gone = servers[0]
    picker.remove(gone)
    assert sent(picker, "session 0") != gone


def test_ties_of_sessions_are_broken_by_their_hash(rivals: ModuleType) -> None:
    first = []
    for seed in (1, 2):
        chosen = []
        for number in range(20):
            picker = Picker(a_fleet(4), rivals.rival("sticky-least-loaded")[0], seed)
            chosen.append(sent(picker, f"session {number}"))
        first.append(chosen)
    assert first[0] == first[1] and len(set(first[0])) == 4


def test_an_idle_session_is_given_again(rivals: ModuleType) -> None:
    fleet = a_fleet(2)
    scorer, _ = rivals.rival("sticky-least-loaded", expires_s=100.0)
    picker = Picker(fleet, scorer, seed=1)
    home = sent(picker, "a", 0.0)
    away = "s1" if home == "s0" else "s0"
    assert sent(picker, "a", 99.0) == home and scorer._counts == {0 if home == "s0" else 1: 1}
    # Swept a minute after the last sweep, and not before.
    others = [sent(picker, name, 130.0) for name in "bcd"]
    assert others.count(away) == 2
    assert sent(picker, "e", 250.0) in ("s0", "s1") and sum(scorer._counts.values()) == 1
    # The next request finds its own session over before a sweep does.
    assert sent(picker, "b", 260.0) is not None
    never, _ = rivals.rival("sticky-least-loaded")
    picker = Picker(a_fleet(2), never, seed=1)
    assert len({sent(picker, "a", now_s) for now_s in (0.0, 7_199.0, 14_398.0)}) == 1


def load_aware(rivals: ModuleType, held: dict[str, int], loads: dict[str, int], **options: float) -> tuple[Any, Fleet]:
    fleet = Fleet()
    for name, load in loads.items():
        fleet.add(name).in_flight = load
    scorer, _ = rivals.rival("load-aware", **options)
    scorer.held = lambda request, servers, now_s: ([held.get(server.name, 0) for server in servers], [])
    return scorer, fleet


def test_a_held_prompt_weighs_as_much_as_twice_the_mean_load(rivals: ModuleType) -> None:
    asked = a_request((1, 128))  # 2,048 tokens

    def chosen(held: dict[str, int], loads: dict[str, int], **options: float) -> str:
        scorer, fleet = load_aware(rivals, held, loads, **options)
        (server,) = {Picker(fleet, scorer, seed=1).pick(asked, 0.0).server for _ in range(20)}
        return server

    assert chosen({"a": 2_048}, {"a": 12, "b": 0}) == "b", "1 − (+1) is less than 0 − (−1)"
    assert chosen({"a": 2_048}, {"a": 12, "b": 0}, beta=0.01) == "a"
    assert chosen({"a": 2_048}, {"a": 100, "b": 0}, beta=0.0) == "a"
    assert chosen({"a": 512, "b": 2_048}, {"a": 0, "b": 0}) == "b"
    assert chosen({"a": 2_048}, {"a": 1, "b": 0}) == "a", "of a mean below 1 request, 1 is the measure"
    assert chosen({"b": 1_024, "a": 1_024}, {"b": 0, "a": 0}) == "a", "ties go by name"
    for loads in ({"a": 4, "b": 1}, {"a": 400, "b": 100}):
        assert chosen({"a": 2_048}, loads, beta=0.5) == "a", "the same at a hundred times the load"


def test_loads_are_relative_to_the_whole_fleet(rivals: ModuleType) -> None:
    scorer, fleet = load_aware(rivals, {"b": 1}, {"a": 12, "b": 0, "c": 0, "d": 0})
    ranking = scorer.rank(a_request((1, 128)), list(fleet), 0.0)
    assert dict(ranking.weights)["benefit less load"] == pytest.approx([-3.0, 1.0 + 1 / 2_048, 1.0, 1.0])


def test_where_no_server_holds_anything_the_session_or_the_rate_decides(rivals: ModuleType) -> None:
    fleet = a_fleet(3)
    scorer, events = rivals.rival("load-aware")
    picker = Picker(fleet, scorer, seed=1)
    assert events is not None
    at = {serve(picker, a_request((number, 2), session="one")).server for number in range(10)}
    assert len(at) == 1
    (busy,) = at
    left = [name for name in ("s0", "s1", "s2") if name != busy]
    assert [serve(picker, a_request((number, 2)), 1.0).server for number in range(20, 24)] == [*left, *left]
    # Ten requests within the last minute count; once that is over, no more.
    assert serve(picker, a_request((30, 2)), 60.5).server == busy


def test_lmetric_as_published_takes_the_first_of_equals(rivals: ModuleType) -> None:
    fleet = a_fleet(4)
    picker = Picker(fleet, rivals.rival("lmetric")[0], seed=1)
    assert {picker.pick(a_request((1, 10)), 0.0).server for _ in range(20)} == {"s0"}
    fleet.servers["s0"].in_flight = 1
    assert {picker.pick(a_request((1, 10)), 0.0).server for _ in range(20)} == {"s1"}


# llm-d: predicted latency.


@pytest.fixture
def predicted(arena: ModuleType) -> ModuleType:
    import _predicted_latency

    return _predicted_latency


def test_times_to_first_and_between_tokens_weigh_four_to_one(predicted: ModuleType) -> None:
    assert predicted._blended([(1.0, 0.05), (2.0, 0.01), (1.5, 0.05)]) == [81, 20, 41]
    assert predicted._blended([(1.0, 0.04), (2.0, 0.04)]) == [101, 1], "what is equal everywhere counts nothing"
    assert predicted._blended([(1.0, 0.04), (1.0, 0.05)]) == [101, 1]
    assert predicted._blended([(1.0, 0.04), (1.0, 0.04)]) == [51, 51]


def test_the_affinity_filters_never_explore(predicted: ModuleType) -> None:
    fleet = a_fleet(2)
    scorer = predicted.PredictedLatency(NaivePrefixIndex(1_000), 1)
    picker = Picker(fleet, scorer, seed=1)
    serve(picker, a_request((1, 10)), among={"s0"})
    scorer.predicted = lambda rows: [(5.9, 0.04), (1.0, 0.04)]
    assert {picker.pick(a_request((1, 10)), 0.0).server for _ in range(2_000)} == {"s0"}
    scorer.predicted = lambda rows: [(6.1, 0.04), (1.0, 0.04)]
    found = Counter(picker.pick(a_request((1, 10)), 0.0).server for _ in range(500))
    assert found["s1"] > 450, "more than five seconds slower: all may take it"


def test_its_features_are_those_before_the_request_is_sent(predicted: ModuleType) -> None:
    fleet = a_fleet(1)
    (server,) = fleet
    server.reported = ReportedLoad(at_s=0.0, waiting=2, running=9, kv_usage=0.25)
    scorer = predicted.PredictedLatency(NaivePrefixIndex(1_000), 1)
    picker = Picker(fleet, scorer, seed=1)
    serve(picker, a_request((1, 3)))
    scorer.ttft, scorer.tpot = predicted.Learner(), predicted.Learner()
    under_way = picker.pick(a_request((5, 2)), 0.0)
    picker.routed(under_way, 0.0)
    decision = picker.pick(a_request((1, 3), (2, 1)), 0.0)
    picker.routed(decision, 0.0)
    picker.succeeded(decision, 2.0)
    picker.on_request_end(decision, 4.0, output_tokens=11)
    ((ttft,),) = scorer.ttft._samples.values()
    assert ttft == ((1, 0.25, 64, 2, 1, 32.0, 0.75, 16.0, 3), 2.0), "our one request, not the engine's nine"
    ((tpot,),) = scorer.tpot._samples.values()
    assert tpot == ((1, 0.25, 64, 2, 1, 32.0), pytest.approx(0.2))


def test_whole_answers_teach_only_where_none_stream(predicted: ModuleType) -> None:
    for streams, learnt in ((True, 0), (False, 1)):
        scorer = predicted.PredictedLatency(NaivePrefixIndex(1_000), 1, streams=streams)
        picker = Picker(a_fleet(1), scorer, seed=1)
        decision = picker.pick(replace(a_request((1, 3)), streams=False), 0.0)
        picker.routed(decision, 0.0)
        picker.succeeded(decision, 9.0)
        picker.on_request_end(decision, 9.0, output_tokens=9)
        assert len(scorer.ttft._samples) == learnt and not scorer.tpot._samples
    assert scorer.predicted([]) is None


def test_before_it_has_learnt_it_draws_by_use_queue_and_prefix(predicted: ModuleType) -> None:
    fleet = a_fleet(2)
    for name, waiting, kv_usage in (("s0", 4, 0.5), ("s1", 0, 0.2)):
        fleet.servers[name].reported = ReportedLoad(at_s=0.0, waiting=waiting, kv_usage=kv_usage)
    best = predicted.PredictedLatency(NaivePrefixIndex(1_000), 1, picks_best=True)
    assert scores(best, a_request((1, 5)), fleet) == {"s0": 17, "s1": 60}
    drawn = Picker(fleet, predicted.PredictedLatency(NaivePrefixIndex(1_000), 1), seed=1)
    found = Counter(drawn.pick(a_request((1, 5)), 0.0).server for _ in range(770))
    assert 120 < found["s0"] < 220


def test_a_failed_request_is_no_longer_open(predicted: ModuleType) -> None:
    fleet = a_fleet(2)
    scorer = predicted.PredictedLatency(NaivePrefixIndex(1_000), 1)
    picker = Picker(fleet, scorer, seed=1)
    decision = picker.pick(a_request((1, 3)), 0.0, {"s0"})
    picker.routed(decision, 0.0)
    scorer.predicted = lambda rows: [(1.0, 0.04), (9.0, 0.04)]
    assert picker.pick(a_request((2, 3)), 0.0).server == "s1", "idle servers go first"
    picker.failed(decision, 1.0)
    found = Counter(picker.pick(a_request((2, 3)), 1.0).server for _ in range(300))
    assert found["s0"] > 250
