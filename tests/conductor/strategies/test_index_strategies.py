"""Hash trie, radix, the weighted sums: what each does where its original has a known fault."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import numpy as np
import pytest
from tests.conductor.prefix_index.naive_index import NaivePrefixIndex
from tests.conductor.strategies.fleets import a_fleet, a_request, serve

from skymemory.conductor.picker import Picker, ReportedLoad
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.block_cost import BlockCost
from skymemory.conductor.strategies.hash_trie import HashTrie, HashTrieSettings
from skymemory.conductor.strategies.registry import named
from skymemory.conductor.strategies.sglang import LMetric, Radix, RadixSettings
from skymemory.conductor.strategies.weighted import Approximate, Precise
from skymemory.errors import InvalidInput


def test_prompts_with_one_first_chunk_do_not_collapse_on_one_server() -> None:
    """Production-stack's trie: the first server has the first chunk, and no other ever gets it."""
    first_chunk_at: set[int] = set()
    original = Counter(first_chunk_at.add(0) or next(iter(first_chunk_at)) for _ in range(200))
    assert original == {0: 200}
    idle = Picker(a_fleet(4), HashTrie(), seed=1)
    one_by_one = Counter(serve(idle, a_request((1, 2), (10 + number, 38))).server for number in range(200))
    assert max(one_by_one.values()) < 75, "a match of 5 % is not worth it"
    busy = Picker(a_fleet(4), HashTrie(HashTrieSettings(min_match_ratio=0.0)), seed=1)
    for number in range(200):
        busy.routed(busy.pick(a_request((1, 2), (10 + number, 38)), 0.0), 0.0)
    assert max(server.in_flight for server in busy.fleet) <= 1.25 * 50 + 1


def test_a_shorter_match_counts_when_the_longest_one_is_overloaded() -> None:
    fleet = a_fleet(4)
    picker = Picker(fleet, HashTrie(), seed=1)
    serve(picker, a_request((1, 10), (2, 10)), among={"s0"})
    serve(picker, a_request((1, 10)), among={"s1"})
    fleet.servers["s0"].in_flight = 9
    decision = picker.pick(a_request((1, 10), (2, 10)), 0.0)
    assert (decision.server, decision.matched_tokens) == ("s1", 160)
    assert "longest match 320 of 320 tokens, at 1 servers, all over the bound" in decision.reasons[0]


def test_the_servers_of_one_node_are_drawn_evenly() -> None:
    fleet = a_fleet(4)
    picker = Picker(fleet, HashTrie(), seed=1)
    for name in ("s1", "s2"):
        serve(picker, a_request((1, 10)), among={name})
    drawn = Counter(picker.pick(a_request((1, 10), (2, 1)), 0.0).server for _ in range(200))
    assert set(drawn) == {"s1", "s2"} and min(drawn.values()) > 70


def test_the_trie_is_bounded_and_evicts_ends_before_heads() -> None:
    scorer = HashTrie(HashTrieSettings(max_blocks=30))
    picker = Picker(a_fleet(2), scorer, seed=1)
    serve(picker, a_request((1, 20)), among={"s0"})
    serve(picker, a_request((2, 20)), among={"s1"})
    assert len(scorer) == 30
    assert picker.pick(a_request((1, 20)), 0.0, {"s0"}).matched_tokens == 160
    assert picker.pick(a_request((2, 20)), 0.0, {"s1"}).matched_tokens == 320
    serve(picker, a_request((3, 99)))
    assert len(scorer) == 30


def test_what_the_trie_used_again_stays() -> None:
    picker = Picker(a_fleet(1), HashTrie(HashTrieSettings(max_blocks=30)), seed=1)
    for text in (1, 2, 1, 3):
        serve(picker, a_request((text, 12)))
    matched = [picker.pick(a_request((text, 12)), 0.0).matched_tokens for text in (1, 2, 3)]
    assert matched == [192, 6 * 16, 192]


def test_radix_is_load_first_when_servers_differ_much() -> None:
    fleet = a_fleet(3)
    picker = Picker(fleet, Radix(NaivePrefixIndex(1000)), seed=1)
    serve(picker, a_request((1, 10)), among={"s0"})
    asked = a_request((1, 10), (2, 5))
    for in_flight, other, server in ((64, 0, "s0"), (65, 0, "s1"), (200, 134, "s0"), (205, 136, "s1")):
        fleet.servers["s0"].in_flight, fleet.servers["s1"].in_flight, fleet.servers["s2"].in_flight = (
            in_flight,
            other,
            150,
        )
        if server == "s0":
            fleet.servers["s2"].in_flight = in_flight
        assert picker.pick(asked, 0.0).server == server, (in_flight, other)
    assert "load first: servers have 136 to 205 requests" in picker.pick(asked, 0.0).reasons[0]


def test_radix_wants_more_than_three_tenths_and_the_less_loaded_of_equals() -> None:
    fleet = a_fleet(3)
    picker = Picker(fleet, Radix(NaivePrefixIndex(1000), RadixSettings()), seed=1)
    for name in ("s0", "s1"):
        serve(picker, a_request((1, 3)), among={name})
    fleet.servers["s0"].in_flight = 1
    assert {picker.pick(a_request((1, 3), (2, 6)), 0.0).server for _ in range(20)} == {"s1"}
    at_three_tenths = picker.pick(a_request((1, 3), (2, 7)), 0.0)
    assert at_three_tenths.server in ("s1", "s2") and "48 of 160 tokens" in at_three_tenths.reasons[0]


def test_the_weighted_sum_is_two_two_three_and_the_prefix_is_never_normalised() -> None:
    fleet = a_fleet(3)
    picker = Picker(fleet, Approximate(NaivePrefixIndex(1000)), seed=1)
    serve(picker, a_request((1, 10)), among={"s0"})
    for name, waiting, kv_usage in (("s0", 4, 0.5), ("s1", 2, 0.25), ("s2", 0, 0.0)):
        fleet.servers[name].reported = ReportedLoad(at_s=0.0, waiting=waiting, kv_usage=kv_usage)
    ranking = picker.scorer.rank(a_request((1, 10)), list(fleet), 0.0)
    assert list(ranking.scores) == pytest.approx([0 + 1 + 3, 1 + 1.5, 2 + 2])
    assert ranking.matched_tokens == [160, 0, 0]
    little = picker.scorer.rank(a_request((1, 1), (2, 29)), list(fleet), 0.0)
    assert list(little.scores) == pytest.approx([0 + 1 + 0.1, 1 + 1.5, 2 + 2]), "one block of thirty pulls a thirtieth"


def test_a_server_that_reports_nothing_is_an_average_one() -> None:
    fleet = a_fleet(3)
    fleet.servers["s0"].reported = ReportedLoad(at_s=0.0, kv_usage=0.2)
    fleet.servers["s1"].reported = ReportedLoad(at_s=0.0, kv_usage=0.6)
    ranking = Approximate(NaivePrefixIndex(10)).rank(a_request((1, 1)), list(fleet), 0.0)
    assert list(ranking.scores) == pytest.approx([2 + 1.6, 2 + 0.8, 2 + 1.2])


def test_between_two_reports_what_was_sent_since_counts() -> None:
    """A burst between two scrapes goes to the server that reported the shortest queue, where only reports count."""
    fleet = a_fleet(4)
    picker = Picker(fleet, Approximate(NaivePrefixIndex(1000)), seed=1)
    for server in fleet:
        server.reported = ReportedLoad(at_s=0.0, waiting=0 if server.name == "s0" else 1)
    for number in range(20):
        picker.routed(picker.pick(a_request((number, 5)), 0.1), 0.1)
    assert max(server.in_flight for server in fleet) <= 6


def test_the_endpoint_pickers_faults() -> None:
    index = ApproximatePrefixIndex(40, 256)
    fleet = a_fleet(2)
    picker = Picker(fleet, Approximate(index), seed=1)
    long = a_request((1, 30))
    serve(picker, long, among={"s0"})
    serve(picker, a_request((2, 30)), among={"s0"})
    # Over its capacity of 40 blocks: of the older prompt the head is left, not the tail.
    assert picker.pick(long, 0.0, {"s0"}).matched_tokens == 160
    # What follows a block that is not held counts for nothing.
    tail = a_request((1, 30))
    gap = np.concatenate([np.array([7], dtype=np.uint64), tail.prompt.blocks[1:]])
    assert index.match(gap, [0]) == [0]
    # The cache size that the server reports is taken.
    fleet.servers["s0"].reported = ReportedLoad(at_s=0.0, cache_blocks=5, block_tokens=32)
    serve(picker, a_request((3, 30)), among={"s0"})
    assert index.blocks_of(0) == 10
    # In tokens as prompts are read, where it counts two of its own for each of those.
    fleet.servers["s0"].reported_tokens(100, 200)
    serve(picker, a_request((3, 30)), among={"s0"})
    assert index.blocks_of(0) == 5


@pytest.mark.parametrize(
    ("options", "matched_tokens", "share"),
    [
        ({}, 131_072, 1.0),  # of 8,250 blocks of 16 tokens; what is matched is compared with as much
        ({"max_match_tokens": "0"}, 2_048 * 16, 2_048 / 8_250),
        ({"max_match_tokens": "0", "max_match_blocks": "0"}, 8_250 * 16, 1.0),
        ({"max_match_tokens": "4096", "max_match_blocks": "1"}, 4_096, 1.0),  # tokens go before blocks
    ],
)
def test_the_endpoint_picker_matches_131072_tokens(options: dict[str, str], matched_tokens: int, share: float) -> None:
    scorer = named("approximate", **options)
    picker = Picker(a_fleet(1), scorer, seed=1)
    serve(picker, a_request((1, 8_250)))
    decision = picker.pick(a_request((1, 8_250)), 0.0)
    assert decision.matched_tokens == matched_tokens
    assert decision.score == pytest.approx(2 + 2 + 3 * share)
    with pytest.raises(InvalidInput, match="expected 0 or more, such as 131072"):
        named("approximate", max_match_tokens=-1)


def test_lmetric_breaks_ties_by_requests_then_by_tokens_to_compute() -> None:
    """Products are (prompt − matched) × (requests + 1), here of ten blocks of 16 tokens."""
    fleet = a_fleet(4)
    picker = Picker(fleet, LMetric(NaivePrefixIndex(1000)), seed=1)
    serve(picker, a_request((1, 5)), among={"s1"})
    for name, requests in (("s0", 2), ("s1", 3), ("s2", 2), ("s3", 1)):
        fleet.servers[name].in_flight = requests
    asked = a_request((1, 5), (2, 5))
    # 160 · 3, 80 · 4, 160 · 3, 160 · 2: two products are 320, and one request is fewer than three.
    assert {picker.pick(asked, 0.0).server for _ in range(20)} == {"s3"}
    assert list(picker.scorer.rank(asked, list(fleet), 0.0).scores) == [-2.0, -1.0, -2.0, 0.0]
    # A prompt held whole costs 0 wherever it is, so the requests there decide, however many.
    for name in ("s1", "s2", "s3"):
        serve(picker, a_request((3, 10)), among={name})
    for name, requests in (("s1", 10**9), ("s2", 10**9 - 1), ("s3", 10**9 - 1)):
        fleet.servers[name].in_flight = requests
    assert {picker.pick(a_request((3, 10)), 0.0).server for _ in range(40)} == {"s2", "s3"}, "full ties are drawn"


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_server_that_had_less_than_believed_is_believed_less(at_the_end: bool) -> None:
    """Its cache evicted what the table still has: prompts that share it must not be drawn there any more."""
    fleet = a_fleet(2)
    picker = Picker(fleet, Approximate(NaivePrefixIndex(1000)), seed=1)
    serve(picker, a_request((1, 10), (2, 10)), among={"s0"})
    serve(picker, a_request((3, 10)), among={"s0"})
    third = picker.pick(a_request((1, 10), (4, 10)), 1.0, {"s0"})
    assert third.matched_tokens == 160
    picker.routed(third, 1.0)
    picker.succeeded(third, 2.0, None if at_the_end else 0)
    picker.on_request_end(third, 3.0, 0 if at_the_end else None)
    assert picker.pick(a_request((1, 10), (2, 10)), 4.0, {"s0"}).matched_tokens == 160, "computed again by the third"
    assert picker.pick(a_request((1, 10), (4, 10)), 4.0, {"s0"}).matched_tokens == 320
    assert picker.pick(a_request((3, 10)), 4.0, {"s0"}).matched_tokens == 160, "nothing was said of that"


def test_requests_are_not_kept_for_words_that_never_come() -> None:
    """Few servers say with the end of an answer what they had cached; prompts may have a megabyte."""
    scorer = Approximate(NaivePrefixIndex(1000))
    picker = Picker(a_fleet(1), scorer, seed=1)
    serve(picker, a_request((1, 10)))
    request = a_request((1, 10))
    blocks = weakref.ref(request.prompt.blocks)
    serve(picker, request)
    del request
    gc.collect()
    assert blocks() is None
    alive = [Request(request.prompt) for request in [a_request((1, 10))] for _ in range(4200)]
    for each in alive:
        scorer.routed(each, picker.fleet.servers["s0"], 1.0)
        scorer.succeeded(each, picker.fleet.servers["s0"], 1.0, None)
    assert len(scorer._answering) == 4096


def test_small_differences_from_what_was_believed_are_no_news() -> None:
    picker = Picker(a_fleet(1), Approximate(NaivePrefixIndex(1000)), seed=1)
    serve(picker, a_request((1, 10), (2, 10)))
    second = picker.pick(a_request((1, 10), (2, 10)), 1.0)
    picker.routed(second, 1.0)
    picker.succeeded(second, 2.0, 240)  # Engines never take the last block from the cache, and count in larger ones.
    assert picker.pick(a_request((1, 10), (2, 10)), 3.0).matched_tokens == 320


def test_precise_learns_from_events_alone() -> None:
    fleet = a_fleet(2)
    picker = Picker(fleet, Precise(PreciseIndex(16)), seed=1)
    serve(picker, a_request((1, 10)))
    decision = picker.pick(a_request((1, 10)), 1.0)
    assert decision.matched_tokens == 0 and "nothing of the prompt's 160 tokens" in decision.reasons[0]


def test_precise_weighs_by_medium() -> None:
    class Two(PreciseIndex):
        def match_weighted(self, blocks: object, slots: object) -> tuple[list[int], list[float]]:
            return [10, 10], [8.0, 10.0]

    fleet = a_fleet(2)
    ranking = Precise(Two(16)).rank(a_request((1, 20)), list(fleet), 0.0)
    assert list(ranking.scores) == pytest.approx([4 + 3 * 0.4, 4 + 3 * 0.5])
    assert ranking.matched_tokens == [160, 160]


def test_block_cost_lets_go_of_each_send_of_a_request_to_the_same_server() -> None:
    fleet = a_fleet(1)
    (server,) = fleet
    scorer, twice = BlockCost(NaivePrefixIndex(100)), a_request((1, 2))
    scorer.routed(twice, server, 0.0)
    scorer.routed(twice, server, 0.0)
    scorer.failed(twice, server, 1.0)
    assert dict(scorer.rank(a_request((3, 1)), [server], 1.0).weights)["blocks of its requests"] == [3.0]
    scorer.succeeded(twice, server, 2.0, None)
    scorer.on_request_end(twice, server, 2.0)
    assert dict(scorer.rank(a_request((3, 1)), [server], 2.0).weights)["blocks of its requests"] == [1.0]
