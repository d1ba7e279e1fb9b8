"""Session affinity, CHWBL and SimHash: where hashing puts requests, and what load makes of it."""

from __future__ import annotations

import math
from collections import Counter
from hashlib import blake2b

import numpy as np
import pytest
from tests.conductor.strategies.fleets import a_fleet, a_request, scores, serve

from skymemory.conductor.picker import Picker
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.strategies.hashing import (
    BoundedRing,
    ChwblSettings,
    NearestSignature,
    SimHashSettings,
    distances,
    signature_of,
    similarity,
)
from skymemory.conductor.strategies.simple import SessionAffinity
from skymemory.errors import InvalidInput

NONE = np.empty(0, dtype=np.uint64)


def with_head(head: str, **named: str) -> Request:
    return Request(Prompt(NONE, NONE, 16, 1000, head.encode()), **named)  # type: ignore[arg-type]


def best(scorer: SessionAffinity | BoundedRing, request: Request, fleet: object) -> str:
    found = scores(scorer, request, fleet)  # type: ignore[arg-type]
    return max(found, key=found.__getitem__)


def test_a_session_stays_and_few_move_when_a_server_leaves() -> None:
    fleet, scorer = a_fleet(8), SessionAffinity()
    sessions = [a_request((number, 2), session=f"user {number}") for number in range(400)]
    before = [best(scorer, request, fleet) for request in sessions]
    assert before == [best(scorer, request, fleet) for request in sessions]
    assert all(30 < count < 72 for count in Counter(before).values())
    Picker(fleet, scorer).remove("s3")
    after = [best(scorer, request, fleet) for request in sessions]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != "s3")
    assert len({new for old, new in zip(before, after, strict=True) if old == "s3"}) == 7


def test_an_overloaded_server_loses_its_sessions_until_it_is_not() -> None:
    fleet, scorer = a_fleet(4), SessionAffinity()
    picker = Picker(fleet, scorer, seed=1)
    own = picker.pick(a_request((1, 2), session="user"), 0.0)
    assert own.reasons[0] == "by its session"
    sent = []
    for _ in range(12):
        sent.append(picker.pick(a_request((1, 2), session="user"), 0.0))
        picker.routed(sent[-1], 0.0)
    others = [decision for decision in sent if decision.server != own.server]
    assert others and "away from its session's server" in others[0].reasons[0]
    assert len({decision.server for decision in others}) == 1, "all sessions' requests go to the same second choice"
    for decision in sent:
        picker.failed(decision, 1.0)
    assert picker.pick(a_request((1, 2), session="user"), 1.0).server == own.server


def test_the_ring_spreads_keys_and_moves_few() -> None:
    fleet, scorer = a_fleet(8), BoundedRing()
    prompts = [with_head(f"document {number}: what does it say") for number in range(400)]
    before = [best(scorer, request, fleet) for request in prompts]
    assert all(25 < count < 85 for count in Counter(before).values())
    Picker(fleet, scorer).remove("s3")
    after = [best(scorer, request, fleet) for request in prompts]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != "s3")
    # One that is only not asked about is walked past in the same way.
    whole = a_fleet(8)
    whole.servers["s3"].draining = True
    picker = Picker(whole, BoundedRing())
    assert [picker.pick(request, 0.0).server for request in prompts] == after


def test_only_the_beginning_and_what_separates_caches_are_hashed() -> None:
    fleet, scorer = a_fleet(64), BoundedRing()
    common = "x" * 100
    assert best(scorer, with_head(common + "one"), fleet) == best(scorer, with_head(common + "two"), fleet)
    places = {
        best(scorer, with_head(common, **named), fleet)
        for named in ({}, {"adapter": "a"}, {"adapter": "b"}, {"salt": "a"}, {"model": "a"})  # type: ignore[arg-type]
    }
    assert len(places) >= 4
    short = BoundedRing(ChwblSettings(prefix_characters=10))
    assert len({best(short, with_head("x" * 10 + str(rest)), fleet) for rest in range(20)}) == 1


@pytest.mark.parametrize("servers", [2, 3, 8])
def test_no_server_goes_over_the_bound_of_its_load(servers: int) -> None:
    fleet = a_fleet(servers)
    picker = Picker(fleet, BoundedRing(), seed=1)
    under_way = []
    for number in range(300):
        decision = picker.pick(with_head("all the same"), 0.0)
        picker.routed(decision, 0.0)
        under_way.append(decision)
        total = sum(server.in_flight for server in fleet)
        assert max(server.in_flight for server in fleet) <= math.ceil(1.25 * total / servers)
        if number % 3 == 0:
            done = under_way.pop(number % len(under_way))
            picker.succeeded(done, 0.0)
            picker.on_request_end(done, 0.0)


def test_the_second_request_need_not_crowd_on_the_first_server() -> None:
    """With the bound rounded down none of eight could take a second request: KubeAI's then goes where all do."""
    picker = Picker(a_fleet(8), BoundedRing(), seed=1)
    placed = []
    for _ in range(8):
        decision = picker.pick(with_head("all the same"), 0.0)
        picker.routed(decision, 0.0)
        placed.append(decision.server)
    assert Counter(placed).most_common(1)[0][1] <= 2
    assert any("servers skipped for load" in reason for reason in decision.reasons)


def test_a_signature_is_the_majority_of_bits() -> None:
    pieces = np.array([0b1011, 0b1001, 0b0010], dtype=np.uint64)
    assert signature_of(pieces) == 0b1011
    assert signature_of(pieces[:1]) == 0b1011
    high = np.array([1 << 63, 1 << 63 | 1, 0], dtype=np.uint64)
    assert signature_of(high) == 1 << 63
    assert similarity(0) == 1.0 and similarity(32) < 1e-9 and similarity(64) == 0.0


@pytest.mark.parametrize("counted_by_numpy", [True, False])
def test_distances_are_differing_bits(counted_by_numpy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not counted_by_numpy:
        monkeypatch.delattr(np, "bitwise_count", raising=False)
    others = np.array([[0b1011, 0, 2**64 - 1], [1 << 63, 0b1010, 0b1011]], dtype=np.uint64)
    assert distances(0b1011, others).tolist() == [[0, 3, 61], [4, 1, 0]]


def test_similar_prompts_meet_where_the_original_scatters_them() -> None:
    """Forty blocks of which one differs: near. Hashing the signature again, as production-stack does, ends that."""
    together = original = 0
    for text in range(40):
        picker = Picker(a_fleet(8), NearestSignature(), seed=text)
        one, other = a_request((text, 40)), a_request((text, 19), (1000 + text, 1), (text, 40))
        first = serve(picker, one).server
        decision = picker.pick(other, 1.0)
        together += decision.server == first
        places = [
            int.from_bytes(blake2b(signature_of(request.prompt.pieces).to_bytes(8, "little")).digest()[:8], "little")
            % 8
            for request in (one, other)
        ]
        original += places[0] == places[1]
    assert together >= 38 and original <= 20
    assert "nearest prompt differs in" in decision.reasons[0]


def test_strangers_are_not_near_and_go_to_least_load() -> None:
    fleet = a_fleet(4)
    picker = Picker(fleet, NearestSignature(), seed=1)
    for text in range(60):
        serve(picker, a_request((text, 30)))
    fleet.servers["s2"].in_flight = -1
    decision = picker.pick(a_request((999, 30)), 1.0)
    assert decision.server == "s2" and "no prompt within 12 bits" in decision.reasons[0]


def test_only_the_latest_signatures_are_kept() -> None:
    scorer = NearestSignature(SimHashSettings(remembered=4))
    fleet = a_fleet(1)
    server = fleet.servers["s0"]
    for text in range(6):
        for _ in range(3):
            scorer.succeeded(a_request((text, 9)), server, 0.0, None)
    found = [scorer.rank(a_request((text, 9)), [server], 0.0).weights[0][0] == "bits away" for text in range(6)]
    assert found == [False, False, True, True, True, True]


def test_places_that_hold_no_signature_yet_are_near_to_nothing() -> None:
    scorer = NearestSignature()
    servers = list(a_fleet(2))
    scorer.succeeded(a_request((1, 9)), servers[0], 0.0, None)
    scorer.succeeded(a_request((2, 9)), servers[1], 0.0, None)
    zero = Request(Prompt(np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.uint64), 16, 16))
    assert "no prompt within" in scorer.rank(zero, servers, 0.0).reasons[0]
    scorer.forget(servers[0])
    assert scorer.rank(a_request((1, 9)), servers, 0.0).weights[0][0] == "requests there"


@pytest.mark.parametrize(
    "settings",
    [
        lambda: ChwblSettings(load_factor=0.9),
        lambda: ChwblSettings(prefix_characters=0),
        lambda: ChwblSettings(virtual_nodes=0),
        lambda: ChwblSettings(min_match_ratio=1.0),
        lambda: SimHashSettings(near_bits=32),
        lambda: SimHashSettings(remembered=0),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: object) -> None:
    with pytest.raises(InvalidInput):
        BoundedRing(settings()) if settings else None  # type: ignore[operator]
