"""Who is chosen, in which order of reasons, and whether the account of what was sent closes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from skymemory.conductor.picker import ADAPTER_QUEUE, Fleet, NoServer, Picker, ReportedLoad, Server
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.strategies.simple import LeastLoad, RandomChoice, RoundRobin
from skymemory.errors import InvalidInput

NONE = np.empty(0, dtype=np.uint64)


def a_request(adapter: str = "", tokens: int = 100) -> Request:
    return Request(Prompt(NONE, NONE, 16, tokens), adapter=adapter)


def a_fleet(servers: int) -> Fleet:
    fleet = Fleet()
    for number in range(servers):
        fleet.add(f"s{number}")
    return fleet


def test_in_turn_goes_round_and_skips_who_is_ill() -> None:
    fleet = a_fleet(3)
    picker = Picker(fleet, RoundRobin(), seed=1)
    order = []
    for _ in range(6):
        decision = picker.pick(a_request(), 0.0)
        picker.routed(decision, 0.0)
        order.append(decision.server)
    assert sorted(order[:3]) == ["s0", "s1", "s2"] and order[3:] == order[:3]
    fleet.servers["s1"].healthy = False
    fleet.servers["s2"].draining = True
    assert {picker.pick(a_request(), 0.0).server for _ in range(20)} == {"s0"}


def test_ties_are_broken_by_the_seed_and_evenly() -> None:
    def drawn(seed: int) -> list[str]:
        picker = Picker(a_fleet(4), RandomChoice(), seed=seed)
        return [picker.pick(a_request(), 0.0).server for _ in range(4000)]

    assert drawn(7) == drawn(7) != drawn(8)
    assert all(900 < count < 1100 for count in Counter(drawn(7)).values())


def test_least_load_counts_what_we_sent_and_what_they_report() -> None:
    fleet = a_fleet(3)
    picker = Picker(fleet, LeastLoad())
    fleet.servers["s0"].reported = ReportedLoad(at_s=10.0, waiting=3, running=2)
    first = picker.pick(a_request(), 10.0)
    picker.routed(first, 10.0)
    second = picker.pick(a_request(), 10.0)
    assert {first.server, second.server} == {"s1", "s2"} and second.fallbacks == (first.server, "s0")
    assert "requests there 0" in second.reasons
    picker.routed(second, 10.0)
    # The report is old by then: nothing is known against s0 any more, and there are none of ours.
    assert picker.pick(a_request(), 30.0).server == "s0"


@pytest.mark.parametrize("after_first_byte", [True, False])
def test_the_account_closes_however_requests_end(after_first_byte: bool) -> None:
    fleet = a_fleet(2)
    picker = Picker(fleet, LeastLoad())
    decisions = [picker.pick(a_request(tokens=50 + i), 0.0) for i in range(9)]
    for decision in decisions:
        picker.routed(decision, 0.0)
    assert sum(server.prefill_tokens for server in fleet) == sum(50 + i for i in range(9))
    for decision in decisions:
        if after_first_byte:
            picker.succeeded(decision, 1.0)
            picker.on_request_end(decision, 2.0)
        else:
            picker.failed(decision, 1.0)
    assert [(s.in_flight, s.prefilling, s.prefill_tokens) for s in fleet] == [(0, 0, 0.0)] * 2


def test_the_strategy_learns_what_the_end_of_an_answer_says() -> None:
    class Recording(LeastLoad):
        def __init__(self) -> None:
            self.heard: list[tuple[str, int]] = []

        def corrected(self, request: Request, server: Server, now_s: float, cached_tokens: int) -> None:
            self.heard.append((server.name, cached_tokens))

    scorer = Recording()
    picker = Picker(a_fleet(1), scorer)
    for cached_tokens in (None, 0, 48):
        decision = picker.pick(a_request(), 0.0)
        picker.routed(decision, 0.0)
        picker.succeeded(decision, 1.0)
        picker.on_request_end(decision, 2.0, cached_tokens)
    assert scorer.heard == [("s0", 0), ("s0", 48)]


def test_adapters_come_before_the_score() -> None:
    fleet = a_fleet(4)
    picker = Picker(fleet, LeastLoad())
    for number, (adapters, most) in enumerate([({"a"}, 2), ({"a", "b"}, 2), (set(), 1), ({"c"}, 1)]):
        report = ReportedLoad(at_s=0.0, waiting=9 - number, adapters=frozenset(adapters), max_adapters=most)
        fleet.servers[f"s{number}"].reported = report
    loaded = picker.pick(a_request("a"), 0.0)
    assert loaded.server == "s1" and loaded.fallbacks == ("s0", "s2", "s3")
    assert loaded.reasons[0] == "adapter 'a' is loaded at 2 of 4"
    roomy = picker.pick(a_request("z"), 0.0)
    assert roomy.server == "s2" and "2 of 4 have room" in roomy.reasons[0]
    assert picker.pick(a_request(""), 0.0).server == "s3"


def test_an_adapter_is_loaded_elsewhere_once_too_many_wait_for_it() -> None:
    fleet = a_fleet(8)
    picker = Picker(fleet, LeastLoad())
    for server in fleet:
        loaded = frozenset({"a"}) if server.name == "s0" else frozenset()
        server.reported = ReportedLoad(at_s=0.0, adapters=loaded, max_adapters=2)
    sent = Counter()
    for _ in range(200):
        decision = picker.pick(a_request("a"), 1.0)
        picker.routed(decision, 1.0)
        sent[decision.server] += 1
        if sent.total() == ADAPTER_QUEUE + 1:
            assert set(sent) == {"s0"}
    assert len(sent) == 8 and max(sent.values()) < 2 * 200 / 8
    assert "others have room for it" in decision.reasons[0]


def test_who_takes_requests_is_known_again_after_every_change() -> None:
    fleet = a_fleet(3)
    assert [server.name for server in fleet.available] == ["s0", "s1", "s2"]
    fleet.servers["s1"].healthy = False
    assert [server.name for server in fleet.available] == ["s0", "s2"]
    fleet.add("s3").draining = True
    assert [server.name for server in fleet.available] == ["s0", "s2"]
    fleet.servers["s1"].healthy, fleet.servers["s3"].draining = True, False
    assert [server.name for server in fleet.available] == ["s0", "s1", "s2", "s3"]
    gone = fleet.remove("s0")
    assert gone is not None and [server.name for server in fleet.available] == ["s1", "s2", "s3"]
    gone.healthy = False
    assert fleet.available is fleet.available, "made again only after a change"


def test_what_a_decision_says_later_is_how_things_were_when_it_was_made() -> None:
    fleet = a_fleet(4)
    for number, server in enumerate(fleet):
        server.in_flight = 3 - number
    picker = Picker(fleet, RandomChoice(), seed=1)
    one, other = picker.pick(a_request(), 0.0), picker.pick(a_request(), 0.0)
    expected = tuple(name for name in ("s3", "s2", "s1", "s0") if name != other.server)
    before = one.fallbacks, one.reasons, one.as_json()
    for server in fleet:
        server.in_flight += server.slot * 10
    picker.remove("s2")
    assert other.fallbacks == expected and other.reasons == ("drawn among 4 of 4 with equal scores",)
    assert (one.fallbacks, one.reasons, one.as_json()) == before
    moved = other.taken_by("s9")
    assert (moved.server, moved.matched_tokens, moved.estimated_ttft_s) == ("s9", 0, None)
    assert moved.fallbacks == other.fallbacks and moved.reasons[-1] == f"{other.server} did not take it; s9 did"


def test_a_subset_is_kept_to_and_no_server_says_why() -> None:
    fleet = a_fleet(3)
    picker = Picker(fleet, RandomChoice())
    assert {picker.pick(a_request(), 0.0, among={"s2", "elsewhere"}).server for _ in range(9)} == {"s2"}
    with pytest.raises(NoServer, match="none of the 3 servers is in the requested subset"):
        picker.pick(a_request(), 0.0, among={"elsewhere"})
    for server in fleet:
        server.healthy = False
    with pytest.raises(NoServer, match="of 3, 3 are unhealthy"):
        picker.pick(a_request(), 0.0)
    with pytest.raises(NoServer, match="add at least one"):
        Picker(Fleet(), RandomChoice()).pick(a_request(), 0.0)


def test_slots_are_given_again_and_names_are_not() -> None:
    fleet = a_fleet(2)
    picker = Picker(fleet, RoundRobin())
    late = picker.pick(a_request(), 0.0, among={"s0"})
    picker.routed(late, 0.0)
    picker.remove("s0")
    picker.failed(late, 1.0)  # of a server that is gone: nothing to account
    new = fleet.add("s9")
    assert new.slot == 0 and new.in_flight == 0
    with pytest.raises(InvalidInput, match="already"):
        fleet.add("s9")
