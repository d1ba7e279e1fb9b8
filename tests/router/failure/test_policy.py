"""Blame, ejection and return in virtual time, under hostile schedules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.router.failure.fleets import HANGS, WELL, VirtualFleet

from skymemory.router.failure.evidence import REST_S, Attempts
from skymemory.router.failure.faults import RULES, Fault, fault_of, retry_after_s
from skymemory.router.failure.policy import FailureLimits, FailurePolicy
from skymemory.router.failure.silence import FIRST_TOKEN

FAULTS = [Fault.ERROR, Fault.BUSY, Fault.UNAVAILABLE, Fault.GATEWAY, Fault.RESET, Fault.REFUSED]


def drive(fleet: VirtualFleet, requests: int, per_s: float = 40.0, clients: int = 1) -> None:
    for number in range(requests):
        fleet.send(f"c{number % clients}")
        fleet.run(1.0 / per_s)


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("are_checked", [True, False])
@pytest.mark.parametrize("clients", [1, 2, 7])
@pytest.mark.parametrize("state", [*FAULTS, HANGS])
def test_a_bad_server_gets_few_requests_and_all_are_answered(
    state: str | Fault, clients: int, are_checked: bool
) -> None:
    fleet = VirtualFleet(4, are_checked=are_checked)
    drive(fleet, 40, clients=clients)
    bad = fleet.servers["s0"]
    bad.state, bad.got = state, 0
    drive(fleet, 200, clients=clients)
    # A good check acquits a server of broken connections, until another server has answered those requests.
    assert bad.got <= (6 if state is Fault.RESET else 3)
    drive(fleet, 60, per_s=2.0, clients=clients)
    # What is tried there once in a while may still hang.
    assert sum(request.answered_s is None for request in fleet.requests[:-20]) == 0


@pytest.mark.parametrize("state", [*FAULTS, HANGS])
def test_a_server_that_is_well_again_has_its_share_within_seconds(state: str | Fault) -> None:
    fleet = VirtualFleet(3)
    drive(fleet, 30)
    bad = fleet.servers["s0"]
    bad.state, bad.is_healthy = state, state not in (HANGS, Fault.REFUSED)
    drive(fleet, 80)
    fleet.recover("s0")
    fleet.run(REST_S[2] + 1.0)
    bad.got = 0
    drive(fleet, 90)
    assert bad.got >= 20


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["kill", "good", "pause"]), st.integers(0, 3)), max_size=120),
    st.integers(2, 5),
)
def test_requests_that_kill_take_no_server_from_other_clients(schedule: list[tuple[str, int]], servers: int) -> None:
    fleet = VirtualFleet(servers)
    drive(fleet, 8, clients=2)
    for what, number in schedule:
        if what == "kill":
            fleet.send("attacker", kills=True)
        elif what == "good":
            fleet.send(f"good{number}")
        fleet.run(0.01 if what != "pause" else 0.3 * number)
        assert fleet.used == set(fleet.servers)
    fleet.run(5.0)
    good = [request for request in fleet.requests if not request.kills]
    assert all(request.answered_s is not None and request.sends == 1 for request in good)
    assert not fleet.ejections and all(request.sends <= 3 for request in fleet.requests)


@pytest.mark.parametrize("have_metrics", [True, False])
def test_long_answers_among_short_ones_are_no_silence(have_metrics: bool) -> None:
    fleet = VirtualFleet(3, have_metrics=have_metrics)
    drive(fleet, 100, per_s=4.0)
    # Two of them are at one server, which gets no short ones meanwhile.
    long_ones = [fleet.send(f"b{number}", service_s=60.0) for number in range(4)]
    drive(fleet, 320, per_s=4.0)
    assert [each.sends for each in long_ones] == [1, 1, 1, 1] and not fleet.ejections
    assert all(each.answered_s is not None for each in long_ones)


def test_two_hostile_clients_alone_take_no_server_from_a_third() -> None:
    fleet = VirtualFleet(3)
    for number in range(200):
        fleet.send(f"attacker{number % 2}", kills=True)
        fleet.run(0.03)
    assert not fleet.ejections
    good = fleet.send("good")
    fleet.run(1.0)
    assert good.answered_s is not None and good.sends == 1


def test_beyond_the_share_all_that_can_be_reached_are_used() -> None:
    policy = FailurePolicy(FailureLimits(failures=1, max_ejected=0.5))
    for name in "abcd":
        policy.add(name)
    for number, name in enumerate("abc"):
        policy.on_check(name, "503", float(number), float(number), is_reached=name != "a")
        assert policy.avoided("client", float(number)) <= {"a", "b"}
    left = [decision.server for decision in policy.take_decisions() if decision.kind in ("leave", "use")]
    assert left == ["a", "b", "b"], "b is used again"


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["sent", "answer", "fault", "drop", "end", "good", "bad", "ill", "refused", "sweep", "avoided"]
            ),
            st.integers(0, 4),
            st.integers(0, 5),
            st.sampled_from(list(Fault)),
            st.floats(0.0, 4.0),
        ),
        max_size=150,
    ),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    st.booleans(),
)
def test_no_history_puts_more_servers_out_than_allowed(
    history: list[tuple[str, int, int, Fault, float]], servers: int, share: float, are_checked: bool
) -> None:
    policy = FailurePolicy(FailureLimits(max_ejected=share), are_checked=are_checked)
    names = [f"s{number}" for number in range(servers)]
    for name in names:
        policy.add(name)
    requests = [Attempts(f"c{number % 3}") for number in range(6)]
    used, now_s, last_refused = set(names), 0.0, set()
    for what, server, request, fault, later_s in history:
        name, attempts = names[server % servers], requests[request]
        now_s += later_s
        if what == "sent":
            policy.on_request(attempts.client, now_s)
            policy.on_sent(attempts, name, now_s, 0.0, FIRST_TOKEN)
        elif what == "answer":
            policy.on_answer(attempts, name, now_s)
            requests[request] = Attempts(attempts.client)
        elif what == "fault":
            policy.on_fault(attempts, name, fault, now_s, later_s)
        elif what == "drop":
            policy.on_dropped(attempts, name, now_s)
        elif what == "end":
            policy.on_end(attempts, now_s)
            requests[request] = Attempts(attempts.client)
        elif what == "sweep":
            policy.sweep(now_s)
        elif what == "avoided":
            assert policy.avoided(attempts.client, now_s) <= set(names)
        elif are_checked:
            is_refused = what == "refused"
            for _ in range(3 if what == "ill" else 1):
                policy.on_check(name, "" if what == "good" else what, now_s, now_s, is_refused=is_refused)
            last_refused.discard(name)
            if is_refused:
                last_refused.add(name)
        for decision in policy.take_decisions():
            if decision.kind in ("use", "leave"):
                (used.add if decision.kind == "use" else used.discard)(decision.server)
        most = 0 if servers < 2 or not share else min(servers - 1, max(1, int(share * servers)))
        out = set(names) - used
        assert len(out - last_refused) <= most, "only what no check can connect to may be out beyond the share"
        assert all(policy.is_ejected(name) for name in out)


def test_one_failed_check_ejects_where_requests_fail_and_three_do_alone() -> None:
    for fails in (False, True):
        policy = FailurePolicy()
        for name in ("a", "b"):
            policy.add(name)
        if fails:
            attempts = Attempts("c")
            policy.on_sent(attempts, "a", 0.0, 0.0, FIRST_TOKEN)
            policy.on_fault(attempts, "a", Fault.RESET, 0.1)
            assert [decision.kind for decision in policy.take_decisions()] == ["check"]
        checks = 0
        while not policy.is_ejected("a"):
            checks += 1
            policy.on_check("a", "503", 0.2, 0.2 + checks)
        assert checks == (1 if fails else 3)
        policy.on_check("a", "", 9.0, 9.0)
        assert policy.is_ejected("a")
        policy.on_check("a", "", 11.0, 11.0)
        assert not policy.is_ejected("a")


def test_a_failure_is_proven_where_another_server_answers_and_taken_back_where_another_fails() -> None:
    policy = FailurePolicy()
    for name in ("a", "b", "c", "d", "e"):
        policy.add(name)
    attempts = Attempts("x")
    policy.on_request("x", 0.0)
    policy.on_sent(attempts, "a", 0.0, 0.0, FIRST_TOKEN)
    policy.on_fault(attempts, "a", Fault.RESET, 0.1)
    assert policy.avoided("x", 0.2) == {"a"} and not policy.is_free_retry("a")
    policy.on_sent(attempts, "b", 0.2, 0.0, FIRST_TOKEN)
    policy.on_fault(attempts, "b", Fault.RESET, 0.3)
    assert policy.avoided("x", 0.4) == set(), "two servers failed: it may be the request"
    policy.on_sent(attempts, "c", 0.4, 0.0, FIRST_TOKEN)
    policy.on_answer(attempts, "c", 0.5)
    assert policy.is_free_retry("a") and policy.is_free_retry("b"), "it was the servers"


def test_a_clients_failures_keep_only_its_own_requests_away_until_another_client_fails_too() -> None:
    policy = FailurePolicy()
    for name in ("a", "b", "c"):
        policy.add(name)
    for client, expected in (("x", set()), ("y", {"a"})):
        for each in ("x", "y"):
            policy.on_request(each, 0.0)
        attempts = Attempts(client)
        policy.on_sent(attempts, "a", 0.0, 0.0, FIRST_TOKEN)
        policy.on_fault(attempts, "a", Fault.ERROR, 0.1)
        assert policy.avoided(client, 0.2) == {"a"} and policy.avoided("z", 0.2) == expected


def test_a_servers_own_time_is_kept_and_a_check_acquits_broken_connections_only() -> None:
    policy = FailurePolicy()
    for name in ("a", "b", "c"):
        policy.add(name)
    busy, broken = Attempts("x"), Attempts("x")
    policy.on_sent(busy, "a", 0.0, 0.0, FIRST_TOKEN)
    policy.on_fault(busy, "a", Fault.BUSY, 0.0, 20.0)
    assert policy.take_decisions() == [], "a full server is not checked"
    policy.on_sent(broken, "b", 0.0, 0.0, FIRST_TOKEN)
    policy.on_fault(broken, "b", Fault.RESET, 0.0)
    policy.on_check("b", "", 0.01, 0.02)
    assert policy.avoided("x", 19.0) == {"a"} and policy.avoided("x", 21.0) == set()
    assert not policy.is_ejected("a")


def test_what_left_its_cache_behind_is_forgotten_only_where_its_process_is_gone() -> None:
    for is_refused, expected in ((True, "gone"), (False, "")):
        policy = FailurePolicy(FailureLimits(failures=1, successes=1))
        for name in ("a", "b"):
            policy.add(name)
        policy.on_check("a", "x", 0.0, 0.0, is_refused=is_refused, is_reached=False)
        policy.on_check("a", "", 1.0, 1.0)
        assert [decision.why for decision in policy.take_decisions() if decision.kind == "return"] == [expected]


def test_statuses_have_their_rules() -> None:
    assert [fault_of(status) for status in (200, 404, 429, 500, 501, 502, 503, 504)] == [
        None,
        None,
        Fault.BUSY,
        Fault.ERROR,
        Fault.ERROR,
        Fault.GATEWAY,
        Fault.UNAVAILABLE,
        Fault.GATEWAY,
    ]
    assert fault_of(503, retry_after=True) is Fault.BUSY and set(RULES) == set(Fault)
    assert [retry_after_s(value) for value in (b"3", b" 7 ", b"99999", b"x", b"", b"1" * 400, b"-1")] == [
        3.0,
        7.0,
        60.0,
        None,
        None,
        None,
        None,
    ]


def test_a_server_that_is_ten_times_slower_than_the_others_is_left_alone_for_a_while() -> None:
    policy = FailurePolicy()
    names = ("s0", "s1", "s2", "s3")
    for name in names:
        policy.add(name)
    # All answer ten times a second, so none is silent; the first takes two seconds for each.
    events = []
    for number in range(100):
        for name in names:
            attempts = Attempts("c")
            sent_s = 0.1 * number
            events.append((sent_s, 0, name, attempts))
            events.append((sent_s + (2.0 if name == "s0" else 0.05), 1, name, attempts))
    for at_s, is_answer, name, attempts in sorted(events, key=lambda event: event[:3]):
        policy.sweep(at_s)
        if is_answer:
            policy.on_answer(attempts, name, at_s)
        else:
            policy.on_sent(attempts, name, at_s, 0.0, FIRST_TOKEN)
    assert policy.avoided("c", 12.1) == {"s0"} and not policy.is_ejected("s0")
    assert policy.avoided("c", 12.1 + REST_S[2]) == set()


def test_a_fleet_that_stands_still_ejects_none() -> None:
    fleet = VirtualFleet(3)
    drive(fleet, 30, clients=2)
    for server in fleet.servers.values():
        server.state = HANGS
    drive(fleet, 60, clients=2)
    fleet.run(30.0)
    assert fleet.used == set(fleet.servers) and not fleet.ejections
    for name in fleet.servers:
        fleet.recover(name)
    fleet.run(5.0)
    assert all(request.answered_s is not None for request in fleet.requests)
    assert all(server.state == WELL for server in fleet.servers.values())


# --- Answers that have begun ---


def begin(policy: FailurePolicy, server: str, client: str, now_s: float) -> Attempts:
    """A stream whose first piece has come."""
    attempts = Attempts(client)
    policy.on_sent(attempts, server, now_s, 0.0, FIRST_TOKEN)
    policy.on_answer(attempts, server, now_s, is_whole=False)
    return attempts


def answer(policy: FailurePolicy, server: str, client: str, now_s: float) -> None:
    attempts = begin(policy, server, client, now_s)
    policy.on_complete(attempts, server, now_s)


def three(**how: bool) -> FailurePolicy:
    policy = FailurePolicy(**how)
    for name in ("a", "b", "c"):
        policy.add(name)
        answer(policy, name, "c0", 0.0)
    return policy


def test_answers_that_break_after_their_first_piece_eject() -> None:
    policy = three()
    for number in range(3):
        attempts = begin(policy, "a", "c0", 1.0 + number)
        policy.on_fault(attempts, "a", Fault.BROKEN, 1.1 + number)
        policy.on_end(attempts, 1.1 + number)
        policy.on_check("a", "", 1.2 + number, 1.2 + number)
        begin(policy, "a", "c0", 1.3 + number)  # a first piece proves nothing
    assert policy.is_ejected("a")
    # As every server's ejection, it ends with its rest, and with an answer that ends well.
    policy.sweep(30.0)
    assert not policy.is_ejected("a")


def test_an_answer_that_ends_well_clears_its_server() -> None:
    policy = three()
    for number in range(20):
        attempts = begin(policy, "a", "c0", 1.0 + number)
        policy.on_fault(attempts, "a", Fault.BROKEN, 1.1 + number)
        policy.on_end(attempts, 1.1 + number)
        answer(policy, "a", "c1", 1.5 + number)
    assert not policy.is_ejected("a")


@pytest.mark.parametrize("works", [True, False])
def test_streams_that_stall_make_a_server_quiet_and_are_moved(works: bool) -> None:
    policy = three()
    stalled = [begin(policy, "a", f"c{number}", 1.0) for number in range(4)]
    moved: list[Attempts] = []
    quiet_s = None
    for tick in range(10, 400):
        now_s = tick / 10
        answer(policy, "b", "other", now_s)
        if works:
            policy.on_metrics("a", now_s, True)
        policy.sweep(now_s)
        if quiet_s is None and "a" in policy.avoided("new", now_s):
            quiet_s = now_s
        for decision in policy.take_decisions():
            moved += decision.attempts
    assert (quiet_s is None) is works and (moved == []) is works
    assert works or (quiet_s is not None and quiet_s < 4.0 and set(moved) == set(stalled))


def test_streams_that_have_just_begun_hide_no_stall() -> None:
    policy = three()
    for tick in range(10, 60):  # each gets its first piece at once, and nothing behind it
        now_s = tick / 10
        answer(policy, "b", "other", now_s)
        if "a" in policy.avoided("new", now_s):
            break
        begin(policy, "a", "new", now_s)
    assert 1.5 < now_s < 4.0


def test_a_server_whose_streams_go_on_is_not_quiet_for_a_few_that_wait() -> None:
    policy = three()
    begin(policy, "a", "waits", 1.0)
    flowing = [begin(policy, "a", f"c{number}", 1.0) for number in range(4)]
    for tick in range(10, 300):
        for each in flowing:
            each.heard_s = tick / 10
        answer(policy, "b", "other", tick / 10)
        assert "a" not in policy.avoided("new", tick / 10)


# --- One client, new servers, and all that fail at once ---


def test_a_new_server_that_hangs_is_tried_by_one_request_at_a_time() -> None:
    fleet = VirtualFleet(4)
    fleet.servers["s0"].state, fleet.servers["s0"].is_healthy = HANGS, True
    drive(fleet, 400, per_s=20.0, clients=5)
    assert fleet.servers["s0"].got <= 6


@pytest.mark.parametrize("others_are_well", [True, False])
def test_a_request_that_waits_alone_moves_on_where_others_are_found_well(others_are_well: bool) -> None:
    policy = three()
    alone = Attempts("c0")
    policy.on_metrics("a", 1.0, False)
    policy.on_sent(alone, "a", 1.0, 0.1, FIRST_TOKEN)
    moved: list[Attempts] = []
    for tick in range(10, 400):
        now_s = tick / 10
        for name in ("b", "c") if others_are_well else ():
            policy.on_check(name, "", now_s, now_s)
        policy.sweep(now_s)
        for decision in policy.take_decisions():
            moved += decision.attempts
    assert moved == ([alone] if others_are_well else [])


def test_a_fleet_that_resets_every_request_has_no_free_retry() -> None:
    policy = three()
    for number in range(20):
        attempts = Attempts(f"c{number % 5}")
        for server in ("a", "b"):
            policy.on_sent(attempts, server, 1.0 + number, 0.0, FIRST_TOKEN)
            policy.on_fault(attempts, server, Fault.RESET, 1.01 + number)
            assert not policy.is_free_retry(server)
        policy.on_end(attempts, 1.1 + number)
