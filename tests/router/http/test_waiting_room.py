"""Requests that wait at the router until a server has room: all are served, the urgent first, none waits forever."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.router.running import PATIENCE_S, Answer, Running, until

from skymemory.errors import InvalidInput
from skymemory.router.settings import settings_from

Run = Callable[..., Running]
QUEUE = {"limits": {"max_waiting": 1}, "queue": {"max_requests": 100}}


class Asking:
    """A request that is under way in a thread."""

    def __init__(self, running: Running, prompt: str, headers: dict[str, str] | None = None, **mock: Any) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._answer = self._pool.submit(running.complete, headers, prompt=prompt, mock=mock)

    @property
    def is_answered(self) -> bool:
        return self._answer.done()

    @property
    def answer(self) -> Answer:
        answer = self._answer.result(PATIENCE_S)
        self._pool.shutdown()
        return answer


def prompts(running: Running) -> list[str]:
    return [json.loads(seen["body"])["prompt"] for engine in running.engines for seen in engine.seen]


def waiting(running: Running) -> int:
    text = running.ask("GET", "/metrics").body.decode()
    lines = [line for line in text.splitlines() if line.startswith("skymemory_router_queue_requests{")]
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines)


def occupied(run: Run, **settings: Any) -> tuple[Running, Asking]:
    """A router whose one server is computing, until it is ``freed``."""
    running = run(engines=1, **{**QUEUE, **settings})
    first = Asking(running, "first", hold=True)
    until(lambda: running.engines[0].held == 1)
    return running, first


def freed(running: Running) -> None:
    for engine in running.engines:
        running.loop.loop.call_soon_threadsafe(engine.release.set)


def test_a_burst_waits_where_it_was_refused(run: Run) -> None:
    running = run(engines=2, **QUEUE)
    with ThreadPoolExecutor(12) as pool:
        answers = pool.map(lambda _: running.complete(mock={"hold": True}), range(12))
        until(lambda: waiting(running) == 10)
        freed(running)
        assert [answer.status for answer in answers] == [200] * 12
    assert [len(engine.seen) for engine in running.engines] == [6, 6]
    assert running.metric("queue_served_total", priority="0", tenant="unknown") == 10
    until(lambda: waiting(running) == 0)
    assert running.server is not None and running.server.proxy.in_flight == 0


def test_the_urgent_go_first_and_tenants_in_turn(run: Run) -> None:
    running, first = occupied(run, admission={"tenant_header": "x-tenant", "objectives": {"chat": 2}})
    asked = []
    for prompt, headers in (
        ("a1", {"x-tenant": "a"}),
        ("a2", {"x-tenant": "a"}),
        ("b1", {"x-tenant": "b"}),
        ("urgent", {"x-tenant": "a", "x-skymemory-priority": "3"}),
        ("chat", {"x-gateway-inference-objective": "chat"}),
    ):
        asked.append(Asking(running, prompt, headers))
        until(lambda: waiting(running) == len(asked))
    freed(running)
    assert [each.answer.status for each in (first, *asked)] == [200] * 6
    assert prompts(running) == ["first", "urgent", "chat", "a1", "b1", "a2"]


def test_what_was_promised_too_soon_is_refused_with_a_retry_time(run: Run) -> None:
    running, first = occupied(run)
    late = running.complete({"x-slo-ttft-ms": "200", "x-skymemory-decision": "1"}, prompt="late")
    assert not first.is_answered, "before there is room"
    assert late.status == 429 and int(late.headers["Retry-After"]) >= 1
    assert "promised 0.2 s" in late.json["error"]["message"] and late.json["error"]["code"] == "overloaded"
    assert json.loads(late.headers["x-skymemory-decision"])["refused"] == "ttft"
    freed(running)
    assert first.answer.status == 200 and prompts(running) == ["first"]
    bad = running.complete({"x-slo-ttft-ms": "soon"})
    assert bad.status == 400 and "milliseconds" in bad.json["error"]["message"]


def test_promises_are_counted_one_by_one(run: Run) -> None:
    running = run(engines=1, **QUEUE)
    for promised, first_byte_s in (("5000", 0.0), ("100", 0.3)):
        running.complete({"x-slo-ttft-ms": promised}, mock={"first_byte_s": first_byte_s})
    running.complete()
    until(lambda: running.metric("promises_total", outcome="kept") == 1)
    until(lambda: running.metric("promises_total", outcome="late") == 1)


def test_time_in_the_queue_ends(run: Run) -> None:
    running, first = occupied(run, queue={"max_requests": 100, "max_wait": "150ms"})
    late = running.complete(prompt="late")
    assert late.status == 429 and "waited" in late.json["error"]["message"]
    freed(running)
    assert first.answer.status == 200


def test_of_too_many_the_least_urgent_leaves(run: Run) -> None:
    running, first = occupied(run, queue={"max_requests": 2})
    low = Asking(running, "low", {"x-skymemory-priority": "-1"})
    until(lambda: waiting(running) == 1)
    usual = Asking(running, "usual")
    until(lambda: waiting(running) == 2)
    high = Asking(running, "high", {"x-skymemory-priority": "1"})
    refused = low.answer
    assert refused.status == 429 and "priority 1" in refused.json["error"]["message"]
    freed(running)
    assert [each.answer.status for each in (first, usual, high)] == [200] * 3
    assert prompts(running) == ["first", "high", "usual"]


def test_who_hangs_up_leaves_the_queue(run: Run) -> None:
    running, first = occupied(run)
    body = b'{"prompt": "gone"}'
    with socket.create_connection(("127.0.0.1", running.port), PATIENCE_S) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: waiting(running) == 1)
    until(lambda: waiting(running) == 0)
    freed(running)
    assert first.answer.status == 200 and running.complete(prompt="next").status == 200
    assert prompts(running) == ["first", "next"]
    assert running.metric("queue_cancelled_total", priority="0", tenant="unknown") == 1
    until(lambda: running.metric("requests_total", server="", outcome="client-gone") == 1)


def test_where_no_server_is_up_no_request_queues_and_queued_ones_are_served_when_one_returns(run: Run) -> None:
    running, first = occupied(run, health={"every": 0.1, "failures": 1, "successes": 1})
    waits = Asking(running, "waits")
    until(lambda: waiting(running) == 1)
    freed(running)
    assert first.answer.status == 200 and waits.answer.status == 200
    running.loop.run(running.engines[0].die())
    until(lambda: running.complete(prompt="x").status == 503)


def test_a_stream_makes_room_with_its_first_token(run: Run) -> None:
    running = run(engines=1, **QUEUE)
    response = running.open(
        "POST", "/v1/completions", {"prompt": "long", "stream": True, "mock": {"events": 400, "gap_s": 0.05}}
    )
    assert response.status == 200
    began_s = time.monotonic()
    assert running.complete(prompt="short").status == 200 and time.monotonic() - began_s < 15
    response.close()


def test_draining_serves_who_waits(run: Run) -> None:
    running, first = occupied(run)
    others = [Asking(running, f"{number}", first_byte_s=0.05) for number in range(4)]
    until(lambda: waiting(running) == 4)
    assert running.server is not None
    ended: list[bool] = []
    server = running.server
    thread = threading.Thread(target=lambda: ended.append(running.loop.run(server.drain(10.0))))
    thread.start()
    freed(running)
    assert [each.answer.status for each in (first, *others)] == [200] * 5
    thread.join(PATIENCE_S)
    assert ended == [True]


def test_a_queue_needs_to_know_when_a_server_is_full() -> None:
    with pytest.raises(InvalidInput, match="max_waiting"):
        settings_from({"backends": ["http://127.0.0.1:1"], "queue": {"max_requests": 5}})
