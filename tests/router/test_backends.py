"""Ejection and return, who serves what, and who is leaving; no sockets."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from skymemory.conductor.picker import Fleet, Picker, ReportedLoad, Server
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.strategies.simple import LeastLoad
from skymemory.router.backends import Backends
from skymemory.router.failure.evidence import REST_S, Attempts
from skymemory.router.failure.faults import Fault
from skymemory.router.failure.silence import FIRST_TOKEN, WHOLE
from skymemory.router.settings import BOTH, DECODE, PREFILL, Backend, Health

NONE = np.empty(0, dtype=np.uint64)


class Remembering(LeastLoad):
    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def forget(self, server: Server) -> None:
        self.forgotten.append(server.name)


def some(*names: str, failures: int = 3, are_checked: bool = True) -> tuple[Backends, Picker, Remembering]:
    scorer = Remembering()
    picker = Picker(Fleet(), scorer)
    backends = Backends(picker, Health(failures=failures, successes=2), are_checked=are_checked)
    backends.set([Backend(f"http://{name}:1", name) for name in names])
    return backends, picker, scorer


def asked(model: str = "", adapter: str = "") -> Request:
    return Request(Prompt(NONE, NONE, 16, 10), model=model, adapter=adapter)


def check(backends: Backends, name: str, why: str = "", *, times: int = 1, is_refused: bool = False) -> None:
    for _ in range(times):
        backends.on_check(name, why, 0.0, 0.0, is_refused=is_refused)


def test_three_failed_checks_in_a_row_eject_and_two_good_ones_bring_back() -> None:
    backends, picker, scorer = some("a", "b")
    server = picker.fleet.servers["a"]
    for _ in range(5):
        check(backends, "a", "x", times=2)
        check(backends, "a")
    assert server.healthy
    check(backends, "a", "x", times=3)
    assert not server.healthy and backends.known["a"].why == "x"
    check(backends, "a")
    assert not server.healthy
    check(backends, "a", "x")
    check(backends, "a")
    assert not server.healthy
    check(backends, "a")
    assert server.healthy and scorer.forgotten == [] and not backends.known["a"].why


def test_a_server_that_refused_connections_has_lost_what_it_had() -> None:
    backends, picker, scorer = some("a", "b", failures=1)
    check(backends, "a", "connection refused", is_refused=True)
    assert not picker.fleet.servers["a"].healthy
    check(backends, "a", times=2)
    assert picker.fleet.servers["a"].healthy and scorer.forgotten == ["a"]


def test_where_too_many_are_ejected_all_are_used_that_can_be_reached() -> None:
    backends, picker, _ = some("a", "b", "c")
    check(backends, "a", "503", times=3)
    assert [server.healthy for server in picker.fleet] == [False, True, True]
    check(backends, "b", "503", times=3)
    assert [server.healthy for server in picker.fleet] == [True, True, True]
    check(backends, "c", "connection refused", times=3, is_refused=True)
    assert [server.healthy for server in picker.fleet] == [True, True, False]
    check(backends, "b", times=2)
    assert [server.healthy for server in picker.fleet] == [True, True, False], "two of three are still ejected"
    check(backends, "a", times=2)
    assert [server.healthy for server in picker.fleet] == [True, True, False]


def test_a_failed_request_asks_for_a_check_and_moves_none() -> None:
    backends, picker, _ = some("a", "b")
    wanted: list[str] = []
    backends.on_check_wanted = wanted.append
    attempts = Attempts("client")
    backends.policy.on_sent(attempts, "a", 0.0, 0.0, FIRST_TOKEN)
    backends.on_fault(attempts, "a", Fault.RESET, 1.0)
    assert wanted == ["a"] and all(server.healthy for server in picker.fleet)


def test_requests_at_an_ejected_server_are_moved() -> None:
    class Moved(Attempts):
        by: ClassVar[list[tuple[str, str]]] = []

        def move_on(self, server: str, why: str) -> None:
            self.by.append((server, why))

    backends, _, _ = some("a", "b", failures=1)
    backends.policy.on_sent(Moved("client"), "a", 0.0, 0.0, FIRST_TOKEN)
    backends.policy.on_sent(Moved("client"), "b", 0.0, 0.0, FIRST_TOKEN)
    check(backends, "a", "no answer within 2 s")
    assert Moved.by == [("a", "no answer within 2 s")]


@pytest.mark.parametrize("works", [True, False])
def test_a_server_whose_metrics_change_is_not_silent(works: bool) -> None:
    backends, picker, _ = some("a", "b")
    ejected: list[str] = []
    backends.on_ejected = ejected.append
    for number in range(4):
        backends.policy.on_sent(Attempts(f"long {number}"), "a", 0.0, 0.1, WHOLE)
    for second in range(1, 61):
        attempts = Attempts("short")
        backends.policy.on_sent(attempts, "b", second - 0.1, 0.1, WHOLE)
        backends.on_answer(attempts, "b", float(second))
        tokens = 100.0 * second if works else 100.0
        picker.fleet.servers["a"].reported = ReportedLoad(at_s=float(second), running=4, tokens=tokens)
        backends.reported("a")
        backends.review(second + 0.01)
    assert ejected == ([] if works else ["a"])


def test_servers_to_avoid_are_left_out_where_others_are_up() -> None:
    backends, picker, _ = some("a", "b", "c")
    assert backends.able(asked(), (), 0, {"a"}) == {"b", "c"}
    assert backends.able(asked(), {"b", "c"}, 0, {"a"}) == {"a"}
    picker.fleet.servers["b"].healthy = picker.fleet.servers["c"].healthy = False
    assert backends.able(asked(), (), 0, {"a"}) == {"a", "b", "c"}
    assert backends.without({"a", "absent"}, {"b"}) == {"a"}


def test_who_cannot_probe_the_silent_server_avoids_those_that_fail_and_no_more() -> None:
    backends, _, _ = some("a", "b1", "b2")
    policy, probe, good, refused = backends.policy, Attempts("x"), Attempts("y"), Attempts("y")
    for client in ("x", "y"):
        policy.on_request(client, 0.0)
    policy.on_sent(probe, "a", 0.0, 0.0, FIRST_TOKEN)
    policy.on_sent(good, "b2", 28.9, 0.0, FIRST_TOKEN)
    policy.on_answer(good, "b2", 29.0)
    policy.sweep(30.0)
    policy.on_sent(refused, "b1", 31.5, 0.0, FIRST_TOKEN)
    policy.on_fault(refused, "b1", Fault.REFUSED, 31.5)
    avoid = backends.avoided("y", 31.6)
    assert avoid == {"b1", "b2"} and backends.without({"a", "b1", "b2"}, avoid) == {"a"}, "it probes the silent one"
    assert backends.without({"b1", "b2"}, avoid) == {"b2"}, "a model that the silent one does not serve"


def test_servers_that_refuse_are_out_when_the_rests_of_others_are_counted() -> None:
    backends, _, _ = some("a", "b", "c", "d")
    for name, fault in (("a", Fault.BUSY), ("b", Fault.BUSY), ("c", Fault.REFUSED), ("d", Fault.REFUSED)):
        attempts = Attempts("x")
        backends.policy.on_sent(attempts, name, 0.0, 0.0, FIRST_TOKEN)
        backends.policy.on_fault(attempts, name, fault, 0.0, *([20.0] if fault is Fault.BUSY else []))
    assert backends.avoided("x", 0.1) == {"c", "d"}, "all four would leave none"


def test_models_and_adapters_narrow_who_is_asked() -> None:
    backends, picker, _ = some("a", "b", "c")
    assert backends.able(asked("small"), (), 0) is None
    backends.lists("a", {"small": {"id": "small"}, "poet": {"id": "poet", "parent": "small"}})
    backends.lists("b", {"small": {"id": "small"}})
    assert backends.able(asked("small"), (), 0) is None  # any server: what c serves is unknown
    backends.lists("c", {"large": {"id": "large"}})
    assert backends.able(asked("small"), (), 0) == {"a", "b"}
    assert backends.able(asked("small"), {"a"}, 0) == {"b"}
    assert backends.able(asked("small", "poet"), (), 0) == {"a"}
    assert backends.able(asked("never heard"), (), 0) is None
    assert backends.adapters == {"poet": "small"}
    picker.fleet.servers["a"].healthy = False
    assert backends.able(asked("small", "poet"), (), 0) == {"a", "b"}


def test_adapters_are_learnt_from_reports() -> None:
    backends, picker, _ = some("a")
    backends.lists("a", {"small": {"id": "small"}})
    picker.fleet.servers["a"].reported = ReportedLoad(at_s=0.0, adapters=frozenset({"bard"}))
    backends.reported("a")
    assert backends.adapters == {"bard": "small"}


def test_servers_with_enough_waiting_are_passed_by() -> None:
    backends, picker, _ = some("a", "b")
    picker.fleet.servers["a"].prefilling = 2
    assert backends.able(asked(), (), 2) == {"b"} and not backends.full(asked(), 2)
    picker.fleet.servers["b"].prefilling = 3
    assert backends.able(asked(), (), 2) == set() and backends.full(asked(), 2)


def test_who_leaves_finishes_what_it_has() -> None:
    backends, picker, scorer = some("a", "b")
    decision = picker.pick(asked(), 0.0, {"a"})
    picker.routed(decision, 0.0)
    backends.set([Backend("http://b:1", "b")])
    assert picker.fleet.servers["a"].draining and list(picker.fleet.servers) == ["a", "b"]
    picker.failed(decision, 1.0)
    backends.remove_drained()
    assert list(picker.fleet.servers) == ["b"] and scorer.forgotten == ["a"]


def test_who_returns_before_it_left_stays_and_a_new_address_is_a_new_server() -> None:
    backends, picker, scorer = some("a")
    picker.routed(picker.pick(asked(), 0.0), 0.0)
    backends.set([])
    backends.set([Backend("http://a:1", "a")])
    assert not picker.fleet.servers["a"].draining and scorer.forgotten == []
    backends.set([Backend("http://a:2", "a", drain=True)])
    assert scorer.forgotten == ["a"] and picker.fleet.servers["a"].draining


def test_without_checks_failures_eject_and_a_server_is_tried_again_after_its_rest() -> None:
    backends, picker, scorer = some("a", "b", are_checked=False)
    ejected: list[str] = []
    backends.on_ejected = ejected.append
    a, b = picker.fleet
    for number in range(3):
        for name in ("a", "absent"):
            attempts = Attempts("client")
            backends.policy.on_sent(attempts, name, 0.0, 0.0, FIRST_TOKEN)
            backends.on_fault(attempts, name, Fault.UNCONNECTED, float(number))
            backends.on_end(attempts, float(number))
    assert not a.healthy and b.healthy and ejected == ["a"]
    backends.review(2.0 + REST_S[2] - 0.1)
    assert not a.healthy
    backends.review(2.0 + REST_S[2])
    assert a.healthy
    again = Attempts("client")
    backends.policy.on_sent(again, "a", 12.0, 0.0, FIRST_TOKEN)
    assert backends.avoided("client", 12.0) == {"a"}, "one request at a time tries it"
    backends.on_answer(again, "a", 12.1)
    assert backends.avoided("client", 12.2) == set() and scorer.forgotten == []


def test_arrivals_and_departures_are_reported_and_servers_that_stay_keep_their_state() -> None:
    backends, picker, scorer = some()
    left: list[str] = []
    backends.on_removed = left.append
    assert backends.set([Backend("http://a:1", "a"), Backend("http://b:1", "b")]) == (["a", "b"], [])
    picker.fleet.servers["b"].in_flight = 4
    assert backends.set([Backend("http://b:1", "b", drain=True), Backend("http://c:1", "c")]) == (["c"], ["a"])
    assert picker.fleet.servers["b"].draining and list(backends.known) == ["b", "c"] and left == ["a"]
    backends.set([Backend("http://b:1", "b"), Backend("http://c:1", "c")])
    assert not picker.fleet.servers["b"].draining and scorer.forgotten == ["a"]
    assert {server.name: server.in_flight for server in picker.fleet} == {"b": 4, "c": 0}


def test_who_says_nothing_of_models_may_be_asked_for_any() -> None:
    backends, _, _ = some()
    backends.set(
        [
            Backend("http://a:1", "a", models=("m",), adapters=("french",)),
            Backend("http://b:1", "b", models=("other",)),
            Backend("http://c:1", "c", adapters=("german",)),
        ]
    )
    assert backends.serving(asked("m")) == {"a", "c"} and backends.serving(asked("other")) == {"b", "c"}
    assert backends.serving(asked("m", "french")) == {"a", "c"} and backends.serving(asked("unknown")) is None
    assert backends.adapters == {"french": "m", "german": ""}


def roles(**of: str) -> tuple[Backends, Picker, Picker]:
    prefill, decode = Picker(Fleet(), LeastLoad()), Picker(Fleet(), LeastLoad())
    backends = Backends(prefill, Health(failures=1), decode=decode)
    backends.set([Backend(f"http://{name}:1", name, role=role) for name, role in of.items()])
    return backends, prefill, decode


def test_servers_stand_in_the_fleet_of_their_role() -> None:
    backends, prefill, decode = roles(p=PREFILL, d=DECODE, b=BOTH)
    assert list(prefill.fleet.servers) == ["p"] and list(decode.fleet.servers) == ["d", "b"]
    assert backends.alone(asked(), ()) == {"b"} and backends.alone(asked(), {"b"}) == {"d"}
    check(backends, "b", "x", is_refused=True)
    assert backends.alone(asked(), ()) == {"b", "d"} and not decode.fleet.servers["b"].healthy
    assert backends.has_prefill(None) and not backends.has_prefill({"d", "b"})
    check(backends, "p", "x", is_refused=True)
    assert not backends.has_prefill(None)


def test_what_waits_at_a_decode_server_makes_none_full() -> None:
    backends, prefill, decode = roles(p=PREFILL, d=DECODE)
    decode.routed(decode.pick(asked(), 0.0), 0.0)
    assert backends.able(asked(), (), 1) == {"p", "d"} and not backends.full(asked(), 1)
    prefill.routed(prefill.pick(asked(), 0.0), 0.0)
    assert backends.able(asked(), (), 1) == {"d"} and backends.full(asked(), 1)


def test_a_role_changes_when_the_server_has_no_request() -> None:
    backends, prefill, decode = roles(p=PREFILL, d=DECODE, e=DECODE)
    removed: list[str] = []
    backends.on_removed = removed.append
    decision = decode.pick(asked(), 0.0, {"d"})
    decode.routed(decision, 0.0)
    wanted = [Backend("http://p:1", "p", role=PREFILL), Backend("http://e:1", "e", role=DECODE)]
    backends.set([*wanted, Backend("http://d:1", "d", role=PREFILL)])
    assert decode.fleet.servers["d"].draining and not backends.remove_drained()
    decode.failed(decision, 1.0)
    assert backends.remove_drained()
    assert prefill.fleet.servers["d"].takes_requests and "d" not in decode.fleet.servers and removed == []
    backends.set([*wanted, Backend("http://d:1", "d", role=DECODE)])
    assert "d" in decode.fleet.servers, "it had no request"


def test_a_role_change_ends_where_the_server_leaves_or_keeps_its_role() -> None:
    backends, prefill, decode = roles(p=PREFILL, d=DECODE, e=DECODE)
    decision = decode.pick(asked(), 0.0, {"d"})
    decode.routed(decision, 0.0)
    wanted = [Backend("http://p:1", "p", role=PREFILL), Backend("http://e:1", "e", role=DECODE)]
    backends.set([*wanted, Backend("http://d:1", "d", role=PREFILL)])
    backends.set([*wanted, Backend("http://d:1", "d", role=DECODE)])
    assert decode.fleet.servers["d"].takes_requests
    backends.set([*wanted, Backend("http://d:1", "d", role=PREFILL)])
    backends.set(wanted)
    decode.failed(decision, 1.0)
    assert backends.remove_drained() and "d" not in backends.known and "d" not in prefill.fleet.servers
