"""Roles that follow the load: what is sampled, and servers that die, drain and leave while their role changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.router.http.pairs import PROMPT, books_are_closed, engine, sent, start
from tests.router.running import Running, until

from skymemory.conductor.picker import Fleet, NoServer, Picker, ReportedLoad
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.scheduler import Refusal, Scheduler
from skymemory.conductor.strategies.registry import named
from skymemory.errors import InvalidInput
from skymemory.router.backends import Backends
from skymemory.router.decoding import alone_schedulers
from skymemory.router.http.elastic import ElasticRoles
from skymemory.router.request_account import PairAccount, RequestAccount, Usage
from skymemory.router.settings import DECODE, PREFILL, Backend, Settings, settings_from

Run = Callable[..., Running]
NONE = np.empty(0, dtype=np.uint64)
SLO = {"ttft": 0.5, "tbt": 0.05}
QUICK = {"smoothing": 2, "settle": 2, "most_drain": 30}
MODEL = {"model": "small", "prompt": PROMPT}
BATCH = 10
"""Tokens that a slow stream brings between two looks."""


def read(backends: list[dict[str, Any]], **more: Any) -> Settings:
    return settings_from({"backends": backends, "admission": SLO, "elastic": QUICK, **more})


def backend(name: str, role: str, **more: Any) -> dict[str, Any]:
    return {"url": f"http://{name}:1", "name": name, "role": role, "models": ["m"], "elastic": True, **more}


def refuses(router: Router, name: str) -> None:
    """Two checks in a row find no process there."""
    for _ in range(2):
        now_s = router.now_s
        router.backends.on_check(name, "refused", now_s, now_s, is_refused=True, is_reached=False)


def is_well(router: Router, name: str) -> None:
    for _ in range(router.backends.health.successes):
        router.backends.on_check(name, "", router.now_s, router.now_s)


class Router:
    """What decides on roles in a router, without sockets: two fleets, the books, the servers."""

    def __init__(self, backends: list[dict[str, Any]], **more: Any) -> None:
        self.settings = read(backends, health={"failures": 1, "successes": 1}, **more)
        prefill, decode = Picker(Fleet(), named("least-ttft")), Picker(Fleet(), named("least-load"))
        self.scheduler = Scheduler(prefill, decode)
        self.alone = alone_schedulers(self.scheduler, 0)[1]
        self.backends = Backends(prefill, self.settings.health, decode=decode)
        self.roles = ElasticRoles(self.settings, self.backends, prefill.scorer)
        self.backends.set(self.settings.backends)
        self.now_s = 0.0

    def tick(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            self.roles.observe(self.now_s)

    def role(self, name: str) -> tuple[str, str]:
        return self.backends.known[name].backend.role, self.backends.known[name].state

    def changes(self) -> dict[tuple[str, str], float]:
        (family,) = [each for each in self.roles.collect() if each.name == "skymemory_router_role_changes"]
        return {(each.labels["role"], each.labels["outcome"]): each.value for each in family.samples}


class Served:
    """One request: prefill, wait for the decode server, stream; or alone at one server."""

    def __init__(self, router: Router, tokens: int) -> None:
        self.router = router
        self.request = Request(Prompt(NONE, NONE, 16, tokens), model="m", streams=True)
        self.account: RequestAccount | None = None
        self.state = "ended"
        scheduler, among = router.scheduler, router.backends.able(self.request, (), 0)
        apart = router.backends.has_prefill(among)
        if not apart:
            assert router.alone is not None
            scheduler, among = router.alone, router.backends.alone(self.request, ())
        try:
            placed = scheduler.place(self.request, router.now_s, among)
        except NoServer:
            return
        assert not isinstance(placed, Refusal)
        self.account = (PairAccount if apart else RequestAccount)(scheduler, placed, router.now_s)
        self.state = "prefill" if apart else "waits"

    @property
    def pair(self) -> PairAccount | None:
        return self.account if isinstance(self.account, PairAccount) else None

    def step(self) -> None:
        now_s, account = self.router.now_s, self.account
        assert account is not None
        if self.state == "prefill" and isinstance(account, PairAccount):
            assert account.prefilled(now_s, Usage(10, 0, 1)) is None
            self.state = "waits"
        elif self.state == "waits":
            account.first_byte(now_s)
            self.state = "streams"
        elif self.state == "streams":
            account.on_request_end(now_s, Usage(10, 0, 5))
            self.state = "ended"

    def lost(self, name: str) -> None:
        """A server has died: another takes its part, if there is one."""
        now_s, account = self.router.now_s, self.account
        if account is None or self.state == "ended":
            return
        pair = self.pair
        if pair is not None and self.state == "prefill" and pair.prefill.server == name:
            try:
                pair.prefill_again(now_s, self.router.backends.able(self.request, {name}, 0))
            except NoServer:
                pair.prefill_lost(now_s)
                self.state = "waits"
        if account.decision.server != name:
            return
        if pair is not None and self.state != "streams":
            try:
                pair.decode_again(now_s, self.router.backends.able(self.request, {name}, 0))
            except NoServer:
                pass
            else:
                return
        account.close(now_s)
        self.state = "ended"

    def is_at(self) -> list[tuple[str, str]]:
        """Servers and the roles in which they have it."""
        if self.account is None or self.state == "ended":
            return []
        at = [(self.account.decision.server, DECODE)]
        if self.pair is not None and self.state == "prefill":
            at.append((self.pair.prefill.server, PREFILL))
        return at


class World:
    """Requests, failures and an operator, one event after the other; ``check`` holds after each."""

    def __init__(self, prefill: int, decode: int, fixed: bool) -> None:
        self.config = {f"p{at}": backend(f"p{at}", PREFILL) for at in range(prefill)}
        self.config |= {f"d{at}": backend(f"d{at}", DECODE) for at in range(decode)}
        if fixed:
            self.config |= {"f": backend("f", DECODE, elastic=False)}
        self.names = list(self.config)
        self.router = Router(list(self.config.values()))
        self.open: list[Served] = []
        self.gone: dict[str, dict[str, Any]] = {}

    def apply(self, what: str, number: int) -> None:
        name, known = self.names[number % len(self.names)], self.router.backends.known
        if what == "arrive":
            self.open += [Served(self.router, 2000 + 500 * number) for _ in range(1 + number % 4)]
        elif what == "step" and self.open:
            self.open[number % len(self.open)].step()
        elif what == "tick":
            before = self.served_roles()
            self.router.tick(1 + number % 3)
            for role in (PREFILL, DECODE):
                assert self.served_roles()[role] or before[role] != 1 or self.drained_by_hand(), "a pool keeps one"
        elif what == "slow" and name in known:
            self.router.roles.record_tokens(name, BATCH, 2.0 * number)
        elif what == "die" and name in known and known[name].server.healthy:
            refuses(self.router, name)
            for each in self.open:
                each.lost(name)
        elif what == "return" and name in known:
            is_well(self.router, name)
        elif what in ("drain", "remove") and name in self.config:
            one = self.config.pop(name)
            if what == "remove":
                self.gone[name] = one
            else:
                self.config[name] = {**one, "drain": not one.get("drain", False)}
            self.reload()
        elif what == "add" and self.gone:
            name = next(iter(self.gone))
            self.config[name] = self.gone.pop(name)
            self.reload()
        self.open = [each for each in self.open if each.state != "ended"]
        self.check()

    def reload(self) -> None:
        self.router.backends.set([settings_backend(each) for each in self.config.values()])

    def served_roles(self) -> dict[str, int]:
        found = {PREFILL: 0, DECODE: 0}
        for known in self.router.backends.known.values():
            found[known.backend.role] += known.state == "serving"
        return found

    def drained_by_hand(self) -> bool:
        return any(each.get("drain") for each in self.config.values()) or bool(self.gone)

    def check(self) -> None:
        backends, scheduler = self.router.backends, self.router.scheduler
        assert scheduler.decode is not None
        fleets = {PREFILL: scheduler.prefill.fleet.servers, DECODE: scheduler.decode.fleet.servers}
        counted: dict[tuple[str, str], int] = {}
        for each in self.open:
            for at in each.is_at():
                counted[at] = counted.get(at, 0) + 1
        for name, known in backends.known.items():
            role = known.backend.role
            assert fleets[role].get(name) is known.server and name not in fleets[DECODE if role == PREFILL else PREFILL]
            assert known.server.in_flight == counted.pop((name, role), 0)
            if name == "f":
                assert role == DECODE
        assert not counted, "each request is in the books of a server that has this role"

    def end(self) -> None:
        for _ in range(3):
            for each in self.open:
                each.step()
        assert all(each.state == "ended" for each in self.open)
        self.open = []
        self.router.tick(40)
        self.check()
        able = [
            known.backend.elastic
            for name, known in self.router.backends.known.items()
            if known.server.healthy and not known.backend.drain
        ]
        if sum(able) >= 2:
            assert all(self.served_roles().values()), "two living elastic servers serve both roles"
        ends = self.router.changes()
        assert all(outcome in ("done", "called-off", "gone") for _, outcome in ends)


def settings_backend(table: dict[str, Any]) -> Backend:
    return Backend(**{**table, "models": tuple(table["models"])})


OPS = ("arrive", "arrive", "step", "step", "tick", "tick", "tick", "slow", "slow", "die", "return", "drain", "remove")


@settings(max_examples=60)
@given(
    prefill=st.integers(1, 3),
    decode=st.integers(1, 3),
    fixed=st.booleans(),
    events=st.lists(st.tuples(st.sampled_from((*OPS, "add")), st.integers(0, 11)), max_size=60),
)
@example(  # a decode server is needed, the one that drains for it dies, and returns
    prefill=2,
    decode=1,
    fixed=False,
    events=[("arrive", 3), ("slow", 2), ("tick", 2), ("slow", 2), ("tick", 2), ("die", 1), ("tick", 2), ("return", 1)],
)
def test_every_request_ends_and_each_role_is_served_whatever_happens(
    prefill: int, decode: int, fixed: bool, events: list[tuple[str, int]]
) -> None:
    world = World(prefill, decode, fixed)
    for what, number in events:
        world.apply(what, number)
    world.end()


def overloaded_decode() -> tuple[Router, Served]:
    """p1 drains to decode, with one request."""
    calm = {"smoothing": 10, "settle": 5, "most_drain": 30}
    router = Router([backend("p0", PREFILL), backend("p1", PREFILL), backend("d0", DECODE)], elastic=calm)
    served: list[Served] = []
    for second in range(6):
        if second == 5:
            served = [Served(router, 100), Served(router, 100)]
            for each in served:
                assert each.pair is not None
                each.pair.first_byte(router.now_s)  # as with the handover `overlap`
        router.backends.known["d0"].server.in_flight += second == 0
        router.roles.record_tokens("d0", BATCH, 2.0)
        router.tick()
    router.backends.known["d0"].server.in_flight -= 1
    assert router.role("p0") == (PREFILL, "serving") and router.role("p1") == (PREFILL, "draining")
    return router, next(each for each in served if each.pair is not None and each.pair.prefill.server == "p1")


def test_a_role_changes_once_the_server_has_ended_its_requests() -> None:
    router, served = overloaded_decode()
    router.tick(5)
    assert router.role("p1") == (PREFILL, "draining") and router.changes() == {}
    served.step()
    router.tick()
    assert router.role("p1") == (DECODE, "serving")
    router.tick()
    assert router.changes() == {(DECODE, "done"): 1}


def test_one_that_dies_while_it_drains_has_its_new_role_when_it_returns() -> None:
    router, served = overloaded_decode()
    refuses(router, "p1")
    served.lost("p1")
    assert served.pair is not None and served.pair.prefill.server == "p0"
    router.tick(2)
    assert router.role("p1") == (DECODE, "down") and not router.backends.known["p1"].leaving
    is_well(router, "p1")
    assert router.role("p1") == (DECODE, "serving")


def test_a_drain_is_called_off_where_the_others_of_its_role_die() -> None:
    router, _ = overloaded_decode()
    refuses(router, "p0")
    router.tick()
    assert router.role("p1") == (PREFILL, "serving") and router.changes() == {(DECODE, "called-off"): 1}


def test_an_operator_s_reload_keeps_roles_and_his_changes_come_first() -> None:
    router, served = overloaded_decode()
    tables = [backend("p0", PREFILL), backend("p1", PREFILL), backend("d0", DECODE)]

    def reload(**of_p1: Any) -> None:
        router.backends.set([settings_backend({**each, **(of_p1 if each["name"] == "p1" else {})}) for each in tables])

    reload()
    assert router.role("p1") == (PREFILL, "draining")
    served.step()
    router.tick()
    assert router.role("p1") == (DECODE, "serving")
    reload(adapters=("a",))
    assert router.role("p1") == (DECODE, "serving") and router.backends.known["p1"].backend.adapters == ("a",)
    reload(drain=True)
    assert router.role("p1") == (DECODE, "draining")
    reload(elastic=False)
    router.tick()
    assert router.role("p1") == (PREFILL, "serving"), "fixed: the role of the settings"
    router.tick(30)
    assert router.role("p1") == (PREFILL, "serving")
    router.backends.set([settings_backend(each) for each in tables if each["name"] != "p1"])
    router.tick()
    assert "p1" not in router.backends.known


def test_a_server_that_is_removed_while_it_drains_does_not_come_back() -> None:
    router, served = overloaded_decode()
    router.backends.set([settings_backend(each) for each in (backend("p0", PREFILL), backend("d0", DECODE))])
    refuses(router, "p0")  # a drain would be called off
    router.tick()
    assert router.role("p1") == (PREFILL, "draining")
    served.step()
    router.tick(2)
    assert "p1" not in router.backends.known and router.changes() == {(DECODE, "called-off"): 1}


def test_servers_of_other_models_are_other_pools() -> None:
    other = [backend("q0", PREFILL, models=["n"]), backend("q1", PREFILL, models=["n"])]
    router = Router([backend("p0", PREFILL), backend("d0", DECODE), backend("e0", DECODE, models=["n"]), *other])
    router.backends.known["d0"].server.in_flight = 3
    for _ in range(20):
        router.roles.record_tokens("d0", BATCH, 2.0)
        router.tick()
    assert router.changes() == {} and router.role("q1") == (PREFILL, "serving"), "its own has but one prefill server"


def test_a_server_that_is_not_elastic_keeps_its_role() -> None:
    fixed = backend("p1", PREFILL, elastic=False)
    router = Router([backend("p0", PREFILL), fixed, backend("d0", DECODE)])
    router.backends.known["d0"].server.in_flight = 3
    for _ in range(10):
        router.roles.record_tokens("d0", BATCH, 2.0)
        router.tick()
    assert router.role("p0") == (DECODE, "serving") and router.role("p1") == (PREFILL, "serving")


def test_waiting_requests_of_an_engine_count_beside_those_that_run() -> None:
    for handover, load in (("after", 3.0), ("overlap", 0.5)):
        router = Router([backend("p0", PREFILL), backend("d0", DECODE)], disaggregation={"handover": handover})
        server = router.backends.known["d0"].server
        for waiting in (8, 8, 8):
            router.tick()
            server.reported = ReportedLoad(router.now_s, waiting=waiting, running=4, kv_usage=0.5)
        for _ in range(4):
            router.roles.observe(router.now_s)
        (loads,) = [each for each in router.roles.collect() if each.name == "skymemory_router_role_load"]
        found = {each.labels["role"]: each.value for each in loads.samples}
        assert found[DECODE] == pytest.approx(load, rel=0.5) and found[PREFILL] == 0


def test_a_decode_load_is_measured_against_a_request_that_is_alone() -> None:
    router = Router([backend("p0", PREFILL), backend("d0", DECODE)], elastic={**QUICK, "smoothing": 0})
    server = router.backends.known["d0"].server

    def load(decoding: int, tbt_s: float, tokens: int = BATCH) -> float:
        server.in_flight = decoding
        router.roles.record_tokens("d0", tokens, tokens * tbt_s)
        router.tick()
        (loads,) = [each for each in router.roles.collect() if each.name == "skymemory_router_role_load"]
        return next(each.value for each in loads.samples if each.labels["role"] == DECODE)

    assert load(4, 0.04) == pytest.approx(0.8), "nothing is known of one that is alone"
    assert load(1, 0.001, tokens=4) == pytest.approx(0.02), "too few tokens"
    assert load(1, 0.025) == pytest.approx(0.0)
    assert load(4, 0.04) == pytest.approx((1 - 0.025 / 0.04) / (1 - 0.025 / 0.05))
    assert load(0, 0.04) == 0, "nothing decodes now"
    server.in_flight = 2
    router.tick()
    assert router.roles._paces["d0"].tbt_s == 0.04, "no token came: the last known time"


def test_what_a_batch_shares_is_learnt_from_periods_with_as_many_streams_at_both_ends() -> None:
    router = Router([backend("p0", PREFILL), backend("d0", DECODE)])
    server, pool = router.backends.known["d0"].server, lambda: router.roles._pools["m"]

    def look(decoding: int, tbt_s: float) -> float:
        server.in_flight = decoding
        router.roles.record_tokens("d0", 50, 50 * tbt_s)
        router.tick()
        return pool().shared_tbt_s()

    assert math.isinf(look(1, 0.010))
    assert math.isinf(look(3, 0.012)), "there were fewer before"
    assert look(3, 0.016) == pytest.approx(0.007), "each of two more took 3 ms"
    assert look(3, 0.030) == pytest.approx(0.007), "the least counts"
    assert pool().controller.shared_tbt_s == pytest.approx(0.007)
    look(5, 0.030)
    assert look(5, 0.030) == pytest.approx(0.006), "the median of 3 and 5 ms"


@pytest.mark.parametrize("drains", [False, True])
def test_a_router_that_stood_still_learns_nothing_from_what_piled_up(drains: bool) -> None:
    """As after SIGSTOP and SIGCONT: a look with what was there, then one with what has come in the meantime."""
    router = Router([backend("p0", PREFILL), backend("p1", PREFILL), backend("d0", DECODE)])
    if drains:
        router, _ = overloaded_decode()
    server = router.backends.known["d0"].server
    server.in_flight = 4
    for _ in range(10 * (not drains)):
        router.roles.record_tokens("d0", 100, 0.5)
        router.tick()
    router.now_s += 300.0  # more than `most_drain`
    router.roles.observe(router.now_s)
    router.roles.record_tokens("d0", 4, 4 * 300.0)
    router.tick()
    for _ in range(5):
        router.roles.record_tokens("d0", 100, 0.5)
        router.tick()
    assert router.role("p1") == (PREFILL, "draining" if drains else "serving") and router.changes() == {}
    if not drains:
        assert router.roles._pools["m"].controller.need("decode") < 0.2


def test_servers_that_report_nothing_are_judged_by_what_passes_through() -> None:
    """No metrics: busy prefill servers get none, late streams get one."""
    router = Router([backend("p0", PREFILL), backend("p1", PREFILL), backend("d0", DECODE)])
    router.backends.known["d0"].server.in_flight = 2
    for tbt_s, moved in ((0.02, False), (0.2, True)):
        for _ in range(20):
            router.roles.record_tokens("d0", 50, 50 * tbt_s)
            router.tick()
        assert (router.role("p1") == (DECODE, "serving")) == moved


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"admission": {"ttft": 1}}, "elastic: set the objectives, .* admission: ttft"),
        ({"backends": [backend("b", "both")]}, "b: elastic: set the role that it begins with, 'prefill' or 'decode'"),
        ({"replicas": {"redis": "redis://h:1/0"}}, "elastic: one router decides"),
        ({"elastic": {"every": 0}}, "every and most_drain: expected a time above 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(changed: dict[str, Any], says: str) -> None:
    pair = [backend("p", PREFILL), backend("d", DECODE)]
    with pytest.raises(InvalidInput, match=says):
        settings_from({"backends": pair, "admission": SLO, **changed})


def test_a_strategy_must_estimate_prefills() -> None:
    pair = read([backend("p", PREFILL), backend("d", DECODE)], strategy="least-load")
    backends = Backends(Picker(Fleet(), named("least-load")), decode=Picker(Fleet(), named("least-load")))
    with pytest.raises(InvalidInput, match=r"strategy 'least-load' does not estimate .* expected 'least-ttft'"):
        ElasticRoles(pair, backends, named("least-load"))


def test_a_prefill_server_is_moved_to_slow_streams_through_real_sockets(run: Run) -> None:
    pools = {"every": 0.05, "smoothing": 0.1, "settle": 0.1}
    backends = {"strategy": "least-ttft", "admission": {"ttft": 5, "tbt": 0.01}, "elastic": pools}
    running = start(run, "ppd", may_change=True, **backends)
    slow = {**MODEL, "prompt": PROMPT, "stream": True, "mock": {"events": 40, "gap_s": 0.02}}
    clients = [sent(running, {**slow, "seed": number}) for number in range(2)]
    until(lambda: running.metric("role_changes_total", role="decode", outcome="done") == 1)
    servers = running.ask("GET", "/ready").json["servers"]
    assert sorted((each["role"], each["state"]) for each in servers) == [
        ("decode", "serving"),
        ("decode", "serving"),
        ("prefill", "serving"),
    ]
    assert running.metric("role_servers", role="decode", state="serving") == 2
    moved = next(each["name"] for each in servers if each["role"] == "decode" and each["name"] != "d0")
    for client in clients:
        with client:
            data = b""
            while b"[DONE]" not in data:
                data += client.recv(1 << 16)
            assert data.startswith(b"HTTP/1.1 200")
    answers = [running.ask("POST", "/v1/completions", {**MODEL, "prompt": f"{at} {PROMPT}"}) for at in range(4)]
    assert {each.status for each in answers} == {200} and moved in {each.headers["X-Engine"] for each in answers}
    until(lambda: books_are_closed(running))
    assert engine(running, moved).models and math.isfinite(running.metric("role_load", model="small", role="decode"))
