"""Prefill and decode at different servers, through real sockets: bodies, order, streams, failures, books."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from tests.router.http.pairs import PROMPT, bodies, books_are_closed, engine, release, sent, start
from tests.router.running import Running, assert_no_cycles, until

from skymemory.cli.main import build_parser
from skymemory.cli.route import _flags
from skymemory.conductor.cost_model import PRESETS
from skymemory.errors import InvalidInput
from skymemory.router.http import two_steps
from skymemory.router.http.proxy_server import ProxyServer
from skymemory.router.queue import RequestQueue
from skymemory.router.settings import Settings, settings_from

Run = Callable[..., Running]
OVERLAP = {"disaggregation": {"handover": "overlap"}}
PARAMS = {"do_remote_prefill": True, "sky_tokens": 32}
MODEL = {"model": "small", "prompt": PROMPT}


def prefills(running: Running, server: str, outcome: str) -> float:
    return running.metric("prefills_total", server=server, outcome=outcome)


def alone(running: Running, reason: str) -> float:
    return running.metric("alone_total", reason=reason)


# -- the steps


@pytest.mark.parametrize("streamed", [False, True])
def test_one_server_prefills_and_another_answers(run: Run, streamed: bool) -> None:
    running = start(run)
    body = {**MODEL, "max_tokens": 40, "min_tokens": 4, "temperature": 0.5, "stop": ["\n", "é"], "logprobs": 2}
    if streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = running.ask("POST", "/v1/completions", body, {"X-Custom": "kept", "Accept-Encoding": "gzip"})
    assert answer.status == 200 and answer.headers["X-Engine"] == "d0"
    assert answer.body.endswith(b"[DONE]\n\n") if streamed else answer.json["choices"]
    step = {key: value for key, value in body.items() if key not in ("min_tokens", "stream_options")}
    step |= {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    assert bodies(running, "p0") == [step]
    assert bodies(running, "d0") == [{**body, "kv_transfer_params": PARAMS}]
    first, second = engine(running, "p0").seen[0], engine(running, "d0").seen[0]
    assert first["path"] == second["path"] == "/v1/completions"
    assert first["headers"]["x-custom"] == second["headers"]["x-custom"] == "kept"
    assert first["headers"]["x-request-id"] == second["headers"]["x-request-id"]
    assert "accept-encoding" not in first["headers"] and second["headers"]["accept-encoding"] == "gzip"
    until(lambda: books_are_closed(running))
    assert prefills(running, "p0", "handed-over") == 1
    until(lambda: running.metric("requests_total", server="d0", outcome="answered") == 1)
    assert running.metric("reported_cached_tokens_total", server="p0") == 8, "what the prefill server had"
    assert running.metric("reported_cached_tokens_total", server="d0") == 0, "not what it then handed over"


def test_a_chat_and_its_own_limit(run: Run) -> None:
    running = start(run)
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_completion_tokens": 9, "n": 1}
    assert running.ask("POST", "/v1/chat/completions", body, {"X-Request-Id": "mine"}).status == 200
    assert bodies(running, "p0") == [
        {**body, "max_completion_tokens": 1, "max_tokens": 1, "stream": False}
        | {"kv_transfer_params": {"do_remote_decode": True}}
    ]
    assert bodies(running, "d0") == [{**body, "kv_transfer_params": PARAMS}]
    assert engine(running, "p0").seen[0]["headers"]["x-request-id"] == "mine"


def test_the_decode_server_is_asked_after_the_prefill(run: Run) -> None:
    running = start(run)
    engine(running, "p0").mock = {"hold": True}
    with sent(running, {**MODEL, "stream": True}) as client:
        until(lambda: engine(running, "p0").held == 1)
        time.sleep(0.05)
        assert not engine(running, "d0").seen
        release(running, "p0")
        until(lambda: len(engine(running, "d0").seen) == 1)
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
    until(lambda: books_are_closed(running))


def test_with_overlap_both_are_asked_at_once(run: Run) -> None:
    running = start(run, **OVERLAP)
    for name in ("p0", "d0"):
        engine(running, name).mock = {"hold": True}
    with sent(running, {**MODEL, "stream": True}) as client:
        until(lambda: engine(running, "p0").held == engine(running, "d0").held == 1)
        assert bodies(running, "d0") == [{**MODEL, "stream": True, "kv_transfer_params": {"do_remote_prefill": True}}]
        release(running, "p0")
        until(lambda: prefills(running, "p0", "handed-over") == 1)
        assert engine(running, "d0").held == 1, "it goes on with what it was sent"
        release(running, "d0")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
    until(lambda: books_are_closed(running))
    assert len(engine(running, "d0").seen) == 1


def test_with_overlap_a_decode_server_may_answer_by_itself(run: Run) -> None:
    running = start(run, **OVERLAP)
    engine(running, "p0").mock = {"hold": True}
    answer = running.complete(stream=True)
    assert answer.status == 200 and answer.body.endswith(b"[DONE]\n\n")
    until(lambda: engine(running, "p0").abandoned == 1)
    until(lambda: books_are_closed(running))
    assert prefills(running, "p0", "dropped") == 1


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/completions", {"n": 2}),
        ("/v1/completions", {"best_of": 3}),
        ("/v1/completions", {"echo": True}),
        ("/v1/completions", {"prompt_logprobs": 1}),
        ("/v1/completions", {"use_beam_search": True}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/completions", {"prompt": [[1, 2], [3]]}),
        ("/v1/completions", {"max_tokens": 0}),
        ("/v1/completions", {"kv_transfer_params": {"do_remote_decode": True}}),
        ("/v1/embeddings", {"input": "x"}),
    ],
)
def test_what_cannot_be_split_goes_to_one_server_as_it_is(run: Run, path: str, more: dict[str, Any]) -> None:
    running = start(run, "pdb")
    body = {**MODEL, **more}
    assert running.ask("POST", path, body).headers["X-Engine"] == "b0"
    assert bodies(running, "b0") == [body] and not engine(running, "p0").seen
    until(lambda: books_are_closed(running))
    assert alone(running, "whole") == (path != "/v1/embeddings")


@pytest.mark.parametrize(
    "more",
    [{"n": 1, "best_of": None, "echo": False}, {"prompt": ["a"]}, {"prompt": [1, 2]}, {"kv_transfer_params": None}],
)
def test_what_only_looks_so_is_split(run: Run, more: dict[str, Any]) -> None:
    running = start(run)
    assert running.complete(**more).status == 200
    assert bodies(running, "d0") == [{**MODEL, **more, "kv_transfer_params": PARAMS}]


def test_without_a_server_of_both_roles_a_decode_server_serves_alone(run: Run) -> None:
    running = start(run)
    assert running.complete(n=2).headers["X-Engine"] == "d0"
    assert bodies(running, "d0") == [{**MODEL, "n": 2}]


def test_a_server_of_both_roles_decodes_too(run: Run) -> None:
    running = start(run, "pb")
    assert running.complete().headers["X-Engine"] == "b0"
    assert len(engine(running, "p0").seen) == 1 and bodies(running, "b0")[0]["kv_transfer_params"] == PARAMS


def test_headers_that_name_a_prefill_server_are_not_passed_on(run: Run) -> None:
    running = start(run)
    running.complete({"x-prefiller-host-port": "10.0.0.1:1", "X-LLM-D-Prefiller-Host-Port": "10.0.0.1:1"})
    for name in ("p0", "d0"):
        assert not any("prefiller" in each for each in engine(running, name).seen[0]["headers"])


def test_what_a_prefill_server_returns_is_passed_on_as_it_is(run: Run) -> None:
    running = start(run)
    params = {"remote_block_ids": [[1, 2], []], "remote_host": "h\u00e9", "nested": {"a": None}, "big": 2**60}
    engine(running, "p0").params = params
    running.complete()
    engine(running, "p0").params = None
    running.complete()
    first, second = engine(running, "d0").seen
    assert json.loads(first["body"])["kv_transfer_params"] == params
    assert json.loads(second["body"]) == MODEL
    assert prefills(running, "p0", "no-params") == 1


# -- failures of the prefill


BROKEN = {
    "dies": {"die": "before"},
    "dies in its answer": {"die": "in-body"},
    "answers 500": {"status": 500},
    "answers 503": {"status": 503},
    "is busy": {"status": 429},
    "answers no JSON": {"garbage": True},
    "answers too much": {"body_bytes": 5 << 20},
    "is slow": {"first_byte_s": 30.0},
}


@pytest.mark.parametrize("mock", BROKEN.values(), ids=BROKEN.keys())
def test_another_prefill_server_is_tried(run: Run, mock: dict[str, Any]) -> None:
    # On a busy computer the one that is well, too, may take a while.
    running = start(run, "ppd", disaggregation={"prefill": "4s" if "first_byte_s" in mock else "60s"})
    engine(running, "p0").mock = mock
    while not engine(running, "p0").seen:  # ties are drawn
        assert running.complete().status == 200
    asked = len(engine(running, "p1").seen)
    assert [each["kv_transfer_params"] for each in bodies(running, "d0")] == [PARAMS] * asked
    assert prefills(running, "p0", "failed") == running.metric("retries_total", server="p0") == 1
    assert alone(running, "prefill-failed") == 0
    until(lambda: books_are_closed(running))


@pytest.mark.parametrize("mock", BROKEN.values(), ids=BROKEN.keys())
def test_a_decode_server_that_waits_for_values_is_asked_again_without_them(run: Run, mock: dict[str, Any]) -> None:
    running = start(run, "ppd", disaggregation={"handover": "overlap", "prefill": "100ms"})
    engine(running, "p0").mock = engine(running, "p1").mock = mock
    engine(running, "d0").mock = {"hold": True}
    body = {**MODEL, "stream": True}
    with sent(running, body) as client:
        until(lambda: body in bodies(running, "d0") and engine(running, "d0").held == 1)
        release(running, "d0")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
    until(lambda: books_are_closed(running))
    assert alone(running, "prefill-failed") == 1
    assert prefills(running, "p0", "failed") == prefills(running, "p1", "failed") == 1


def test_without_any_prefill_server_the_decode_server_does_it_all(run: Run) -> None:
    running = start(run, health={"failures": 10**6, "every": 60.0})
    running.loop.run(engine(running, "p0").die())
    raw = json.dumps({**MODEL, "max_tokens": 7}, indent=3).encode()
    assert running.ask("POST", "/v1/completions", raw).status == 200
    assert alone(running, "prefill-failed") == 1
    assert running.server is not None
    running.server.picker.fleet.servers["p0"].draining = True
    assert running.ask("POST", "/v1/completions", raw).status == 200
    assert alone(running, "no-prefill-server") == 1
    assert [each["body"] for each in engine(running, "d0").seen] == [raw, raw], "byte for byte"
    until(lambda: books_are_closed(running))


def test_the_settings_can_forbid_that(run: Run) -> None:
    running = start(run, disaggregation={"fallback": False}, health={"failures": 1, "every": 60.0})
    engine(running, "p0").mock = {"status": 500}
    answer = running.complete()
    assert answer.status == 502 and "no prefill from server p0: it answered 500" in answer.json["error"]["message"]
    assert running.complete().status == 502, "the only server of its role is never ejected for what it answers"
    assert not engine(running, "d0").seen
    until(lambda: books_are_closed(running))


@pytest.mark.parametrize("handover", ["after", "overlap"])
def test_a_bad_request_is_answered_by_the_prefill_server(run: Run, handover: str) -> None:
    running = start(run, "ppd", disaggregation={"handover": handover})
    for name in ("p0", "p1"):
        engine(running, name).mock = {"status": 422}
    engine(running, "d0").mock = {"hold": True}
    answer = running.complete(stream=True)
    assert answer.status == 422 and answer.json["object"] == "text_completion"
    assert len(engine(running, "p0").seen) + len(engine(running, "p1").seen) == 1, "no other is tried"
    until(lambda: books_are_closed(running) and engine(running, "d0").held == 0)
    until(
        lambda: sum(running.metric("requests_total", server=name, outcome="client-error") for name in ("p0", "p1")) == 1
    )


def test_servers_without_a_connector_do_not_fail_requests(run: Run) -> None:
    """They refuse what the router has added, which the client did not send."""
    running = start(run, "pd", disaggregation={"handover": "overlap"})
    engine(running, "p0").mock = engine(running, "d0").mock = {"refuses_params": True}
    body = {**MODEL, "stream": True}
    answer = running.ask("POST", "/v1/completions", body)
    assert answer.status == 200 and answer.body.endswith(b"[DONE]\n\n")
    assert bodies(running, "d0")[-1] == body
    assert prefills(running, "p0", "failed") == 1 and prefills(running, "p0", "client-error") == 0
    engine(running, "p0").mock = {}
    assert running.ask("POST", "/v1/completions", body).status == 200
    assert alone(running, "params-refused") >= 1
    until(lambda: books_are_closed(running))


# -- failures of the decode server


@pytest.mark.parametrize("handover", ["after", "overlap"])
@pytest.mark.parametrize("die", ["before", "after-headers"])
def test_another_decode_server_gets_the_same(run: Run, handover: str, die: str) -> None:
    running = start(run, "pdd", disaggregation={"handover": handover})
    engine(running, "d0").mock = {"die": die}
    for _ in range(3):
        answer = running.complete(stream=True)
        assert answer.status == 200 and answer.headers["X-Engine"] == "d1" and answer.body.endswith(b"[DONE]\n\n")
    until(lambda: books_are_closed(running))
    assert len(engine(running, "p0").seen) == 3, "the values are there: no second prefill"
    assert running.metric("retries_total", server="d0") >= 1
    params = [each["kv_transfer_params"] for each in (*bodies(running, "d0"), *bodies(running, "d1"))]
    assert all(each == PARAMS if handover == "after" else each["do_remote_prefill"] for each in params)


def test_no_decode_server_is_left(run: Run) -> None:
    running = start(run, "pdd")
    for name in ("d0", "d1"):
        engine(running, name).mock = {"die": "before"}
    answer = running.complete(stream=True)
    assert answer.status == 502 and "no other takes requests" in answer.json["error"]["message"]
    until(lambda: books_are_closed(running))


def test_a_decode_server_that_dies_in_its_answer_cuts_it(run: Run) -> None:
    running = start(run)
    engine(running, "d0").mock = {"die": "between-events"}
    with sent(running, {**MODEL, "stream": True}) as client:
        came = b""
        while piece := client.recv(65536):
            came += piece
    assert b"went away" in came and not came.endswith(b"0\r\n\r\n")
    until(lambda: books_are_closed(running))


# -- the client leaves


@pytest.mark.parametrize("handover", ["after", "overlap"])
@pytest.mark.parametrize("phase", ["prefill", "decode", "stream"])
def test_a_client_that_leaves_ends_both_steps(run: Run, handover: str, phase: str) -> None:
    running = start(run, disaggregation={"handover": handover})
    p, d = engine(running, "p0"), engine(running, "d0")
    holds = {"prefill": (True, True), "decode": (handover == "overlap", True), "stream": (handover == "overlap", False)}
    p.mock, d.mock = ({"hold": held} for held in holds[phase])
    d.mock |= {"events": 600, "gap_s": 0.05}
    client = sent(running, {**MODEL, "stream": True})
    until(lambda: p.held == p.mock["hold"] and len(p.seen) == 1)
    if phase != "prefill":
        until(lambda: len(d.seen) == 1)
    if phase == "stream":
        assert client.recv(100)
    client.close()
    until(lambda: books_are_closed(running))
    until(lambda: p.held == d.held == 0)
    until(lambda: p.abandoned == p.mock["hold"])
    until(lambda: d.abandoned == (phase != "prefill" or handover == "overlap"))
    until(
        lambda: sum(running.metric("requests_total", server=each, outcome="client-gone") for each in ("p0", "d0")) == 1
    )


# -- what the router says of itself


def test_the_decision_names_both_servers_and_metrics_their_roles(run: Run) -> None:
    running = start(run, "pdb", cost="llama-70b-8xa800", strategy="least-ttft")
    decision = json.loads(running.complete({"x-skymemory-decision": "1"}).headers["x-skymemory-decision"])
    assert decision["server"] == "p0" and decision["strategy"] == "least-ttft"
    assert decision["decode"]["server"] in ("d0", "b0") and decision["decode"]["strategy"] == "least-tbt"
    assert decision["decode"]["estimated_tbt_s"] > 0
    for name, role in (("p0", "prefill"), ("d0", "decode"), ("b0", "both")):
        assert running.metric("server_healthy", server=name, role=role) == 1
    until(lambda: books_are_closed(running))


def test_load_reports_reach_the_servers_of_both_fleets(run: Run) -> None:
    running = start(run)
    engine(running, "d0").waiting = 7
    assert running.server is not None and running.server.scheduler.decode is not None
    fleets = running.server.picker.fleet, running.server.scheduler.decode.fleet

    def reported() -> bool:
        each = [server.reported for fleet in fleets for server in fleet]
        return all(each) and each[1] is not None and each[1].waiting == 7

    until(reported)


# -- admission


EARLY = {"cost": "llama-70b-8xa800", "strategy": "least-ttft"}


@pytest.mark.parametrize("rule", ["baseline", "early", "predicted"])
def test_early_rejection_by_the_decode_load_costs_no_prefill(run: Run, rule: str) -> None:
    running = start(run, **EARLY, admission={"rule": rule, "ttft": "100s", "tbt": "1ms"})
    answer = running.complete({"x-skymemory-decision": "1"})
    assert answer.status == 429 and int(answer.headers["Retry-After"]) >= 1
    assert json.loads(answer.headers["x-skymemory-decision"])["refused"] == "tbt"
    assert not engine(running, "p0").seen and not engine(running, "d0").seen
    until(lambda: books_are_closed(running))


@pytest.mark.parametrize("handover", ["after", "overlap"])
@pytest.mark.parametrize("rule", ["baseline", "early", "predicted", "goodput"])
def test_an_overload_wastes_no_prefill(run: Run, rule: str, handover: str) -> None:
    """More at once than the objective between tokens allows in a batch: some are refused, none after its prefill."""
    fits = PRESETS["llama-70b-8xa800"].decode_step_s(4, 4 * len(PROMPT) // 4)
    admission = {"rule": rule, "ttft": "100s", "tbt": f"{fits * 1e6:.0f}us"}
    running = start(run, **EARLY, admission=admission, disaggregation={"handover": handover})
    p, d = engine(running, "p0"), engine(running, "d0")
    p.mock, d.mock = {"first_byte_s": 0.02}, {"hold": True}
    with ExitStack() as stack:
        for number in range(12):
            body = {**MODEL, "prompt": f"{number:03} {PROMPT[4:]}", "stream": True}
            stack.enter_context(sent(running, body))
        until(lambda: running.metric("refusals_total", reason="tbt", tenant="unknown") >= 1)
        until(lambda: len(d.seen) + running.metric("refusals_total", reason="tbt", tenant="unknown") == 12)
        until(lambda: prefills(running, "p0", "handed-over") == len(d.seen) == len(p.seen))
        assert prefills(running, "p0", "wasted") == 0
        release(running, "d0")
    until(lambda: books_are_closed(running))


def test_rules_that_see_the_decode_load_need_a_cost_model() -> None:
    table: dict[str, Any] = {
        "backends": [{"url": "http://a:1", "role": "prefill"}, {"url": "http://b:1", "role": "decode"}],
        "admission": {"rule": "predicted", "ttft": "1s", "tbt": "100ms"},
    }
    with pytest.raises(InvalidInput, match="needs `cost`"):
        ProxyServer(settings_from(table))


def test_the_queue_waits_for_prefills_not_for_answers(run: Run) -> None:
    running = start(run, limits={"max_waiting": 1}, queue={"max_requests": 4}, health={"every": 60.0})
    p, d = engine(running, "p0"), engine(running, "d0")
    p.mock = d.mock = {"hold": True}
    with sent(running, MODEL), sent(running, {**MODEL, "stream": True}):
        until(lambda: p.held == 1)
        time.sleep(0.05)
        assert len(p.seen) == 1, "the second waits in the queue"
        release(running, "p0")
        until(lambda: len(p.seen) == 2 and d.held == 2)
    until(lambda: books_are_closed(running))


def test_the_queue_learns_of_the_work_of_both(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    works: list[float] = []
    monkeypatch.setattr(RequestQueue, "corrected", lambda self, entry, work: works.append(work))
    running = start(run, limits={"max_waiting": 1}, queue={"max_requests": 4}, health={"every": 60.0})
    p, d = engine(running, "p0"), engine(running, "d0")
    p.mock, d.cached_tokens = {"hold": True}, 32
    with sent(running, MODEL), sent(running, MODEL) as second:
        until(lambda: p.held == 1)
        release(running, "p0")
        assert second.recv(65536).startswith(b"HTTP/1.1 200")
    until(lambda: books_are_closed(running))
    assert works == [32 - 8 + 3], "of the one that was in the queue"


def test_a_full_prefill_server_is_said_without_a_queue(run: Run) -> None:
    running = start(run, limits={"max_waiting": 1})
    engine(running, "p0").mock = {"hold": True}
    with sent(running, MODEL):
        until(lambda: engine(running, "p0").held == 1)
        answer = running.complete()
        assert answer.status == 429 and "1 requests waiting" in answer.json["error"]["message"]
    until(lambda: books_are_closed(running))
    assert not engine(running, "d0").seen


# -- membership


def reload(running: Running, **roles: str) -> None:
    backends = [
        {"url": each.url, "name": each.name, "role": roles[each.name]} for each in running.engines if each.name in roles
    ]
    table = {"backends": backends, "health": {"every": 0.1}, "strategy": "least-load"}
    table["disaggregation"] = {"split_from": 0}
    settings: Settings = settings_from(table)

    async def resetting() -> None:
        assert running.server is not None
        running.server.reset(settings)

    running.loop.run(resetting())


def test_servers_join_drain_and_change_their_roles(run: Run) -> None:
    running = start(run, "pdd", health={"every": 0.1})
    names = {"p0": "prefill", "d0": "decode", "d1": "decode"}
    engine(running, "d1").mock = engine(running, "d0").mock = {"events": 12, "gap_s": 0.03}
    with sent(running, {**MODEL, "stream": True}) as client:
        assert client.recv(100)
        busy = next(each.name for each in running.engines if each.name[0] == "d" and each.seen)
        reload(running, **{**names, busy: "prefill"})
        assert running.server is not None and running.server.scheduler.decode is not None
        assert running.server.backends.role_of(busy) == "decode", "it has a request"
        other = running.complete(stream=True)
        assert other.headers["X-Engine"] != busy
        came = b""
        while not came.endswith(b"0\r\n\r\n"):
            came += client.recv(65536)
        assert b"[DONE]" in came
    until(lambda: running.server is not None and running.server.backends.role_of(busy) == "prefill")
    assert busy in running.server.picker.fleet.servers and busy not in running.server.scheduler.decode.fleet.servers
    for each in running.engines:
        each.mock = {}
        each.seen.clear()
    for _ in range(4):
        assert running.complete().headers["X-Engine"] != busy
    assert engine(running, busy).seen, "it prefills now"
    reload(running, p0="prefill", **{other.headers["X-Engine"]: "decode"})
    until(lambda: running.server is not None and busy not in running.server.backends.known)
    assert running.complete().status == 200
    until(lambda: books_are_closed(running))


def test_a_decode_server_that_died_comes_back(run: Run) -> None:
    running = start(run)
    running.loop.run(engine(running, "d0").die())
    assert running.complete().status in (502, 503)
    until(lambda: running.complete().status == 503)
    running.loop.run(engine(running, "d0").start())
    until(lambda: running.complete().status == 200)
    until(lambda: books_are_closed(running))


@pytest.mark.parametrize(
    ("roles", "says"),
    [
        (["decode", "both"], "needs one with role 'prefill'"),
        (["prefill", "prefill"], "need one with role 'decode' or 'both'"),
        (["prefill", "decoder"], "did you mean 'decode'"),
    ],
)
def test_roles_that_make_no_pair_are_refused(roles: list[str], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        settings_from({"backends": [{"url": f"http://{at}:1", "role": role} for at, role in enumerate(roles)]})


def test_flags_name_the_roles() -> None:
    words = [
        "route",
        "--prefill",
        "http://a:1",
        "--decode",
        "http://b:1",
        "--backend",
        "http://c:1",
    ]
    flags = _flags(build_parser(["route"]).parse_args(words))
    settings = settings_from({**flags, "disaggregation": {"handover": "overlap"}})
    assert {each.name: each.role for each in settings.backends} == {"a:1": "prefill", "b:1": "decode", "c:1": "both"}
    assert settings.disaggregation.handover == "overlap" and settings.splits
    with pytest.raises(InvalidInput, match="handover: 'then': expected one of after, overlap"):
        settings_from({"disaggregation": {"handover": "then"}})


# -- all of it at once


PREFILL_FAULTS: list[dict[str, Any]] = [
    *({}, {}, {}, {"die": "before"}, {"die": "in-body"}),
    *({"status": 503}, {"status": 500}, {"garbage": True}, {"status": 422}),
]
DECODE_FAULTS: list[dict[str, Any]] = [
    *({}, {}, {"die": "before"}, {"die": "in-body"}, {"die": "in-event"}, {"status": 503}, {"status": 500}),
]


@pytest.mark.brief()
@pytest.mark.parametrize("handover", ["after", "overlap"])
def test_after_any_sequence_of_faults_nothing_is_in_flight(run: Run, handover: str) -> None:
    dice = random.Random(20)
    settings = {"health": {"failures": 10**6}, "strategy": "least-ttft", "cost": "llama-70b-8xa800"}
    running = start(run, "ppddb", **settings, disaggregation={"handover": handover}, retries={"most": 1})
    for _ in range(60):
        for each in running.engines:
            each.mock = dict(dice.choice(PREFILL_FAULTS if each.name[0] == "p" else DECODE_FAULTS))
        body = {**MODEL, "stream": dice.random() < 0.5, "n": dice.choice([1, 1, 1, 2])}
        with sent(running, body) as client:
            if dice.random() < 0.2:
                time.sleep(dice.random() * 0.004)
                continue  # and leaves
            status = int(client.recv(65536).split(b" ")[1])
        at_fault = [each for each in running.engines if each.mock]
        if not any(each.name[0] != "p" for each in at_fault):
            assert status == 200 or any(each.mock.get("status") == 422 for each in at_fault), "a prefill's fault"
        assert status in (200, 422, 500, 502, 503)
    until(lambda: books_are_closed(running))
    assert running.metric("faults_total", where="request") == running.metric("faults_total", where="account") == 0


def test_the_answer_of_a_prefill_server_is_bounded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_steps, "MAX_ANSWER_BYTES", 1000)
    running = start(run)
    engine(running, "p0").mock = {"body_bytes": 2000}
    assert running.complete().status == 200
    assert alone(running, "prefill-failed") == 1


@pytest.mark.parametrize(
    "more",
    [{}, OVERLAP, {"queue": {"max_requests": 9}, "limits": {"max_waiting": 9}}],
    ids=["after", "overlap", "queue"],
)
def test_no_request_of_two_steps_is_left_to_the_garbage_collector(run: Run, more: dict[str, Any]) -> None:
    running = start(run, **more)

    def ask() -> None:
        for streamed in (False, True):
            assert running.ask("POST", "/v1/completions", {**MODEL, "stream": streamed}).status == 200
        assert running.ask("POST", "/v1/completions", {**MODEL, "mock": {"status": 422}}).status == 422
        assert running.ask("POST", "/v1/completions", b"{" * 200_000).status == 400

    assert_no_cycles(ask)
