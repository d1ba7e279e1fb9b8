"""The proxy over real sockets: answers pass as they are, headers as they should, refusals explain themselves."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import time
from collections.abc import Callable

import pytest
from tests.router.mock_engine import MockEngine, stream_events
from tests.router.running import PATIENCE_S, Running, until

from skymemory.conductor.picker import PrefillTotals, Server
from skymemory.conductor.request import Request

Run = Callable[..., Running]


@pytest.fixture(scope="module")
def plain(loop):  # type: ignore[no-untyped-def]
    """One router for all tests that change nothing."""
    running = Running(loop).start(3)
    yield running
    running.close()


def test_an_answer_passes_as_it_is(plain: Running) -> None:
    answer = plain.complete(mock={"body_bytes": 300_000})
    assert answer.status == 200 and answer.json["choices"][0]["text"] == "x" * 300_000
    assert int(answer.headers["Content-Length"]) == len(answer.body)
    assert answer.headers.get_all("Set-Cookie") == ["a=1", "b=2"]
    chat = plain.ask(
        "POST", "/v1/chat/completions?n=1", {"model": "small", "messages": [{"role": "user", "content": "x"}]}
    )
    assert chat.status == 200 and chat.headers["X-Engine"] in {"e0", "e1", "e2"}


def test_a_stream_passes_byte_for_byte_and_as_it_comes(plain: Running) -> None:
    response = plain.open(
        "POST", "/v1/completions", {"prompt": "x", "stream": True, "mock": {"events": 4, "gap_s": 0.15}}
    )
    assert response.status == 200 and response.headers["Content-Type"] == "text/event-stream"
    pieces, times = [], []
    while piece := response.read1(65536):
        pieces.append(piece)
        times.append(time.monotonic())
    usage = {
        "prompt_tokens": 32,
        "completion_tokens": 3,
        "total_tokens": 35,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    assert b"".join(pieces) == b"".join(stream_events(4, usage))
    assert len(pieces) == 6 and times[-1] - times[0] > 0.4  # nothing was held back, nothing was joined


def test_packed_answers_stay_packed(plain: Running) -> None:
    answer = plain.complete({"Accept-Encoding": "gzip"}, mock={"packed": True})
    assert answer.headers["Content-Encoding"] == "gzip" and answer.json["object"] == "text_completion"


def test_headers_go_to_the_server_and_those_of_a_connection_do_not(run: Run) -> None:
    running = run(engines=1)
    running.complete(
        {
            "Authorization": "Bearer secret",
            "X-Request-Id": "r1",
            "Connection": "keep-alive, X-Private",
            "X-Private": "mine",
            "Keep-Alive": "timeout=5",
            "TE": "trailers",
            "Proxy-Authorization": "no",
            "X-Forwarded-For": "10.1.1.1",
            "Accept-Encoding": "identity",
        }
    )
    [seen] = running.engines[0].seen
    headers = seen["headers"]
    assert headers["authorization"] == "Bearer secret" and headers["x-request-id"] == "r1"
    assert headers["host"] == f"127.0.0.1:{running.engines[0].port}"
    assert headers["x-forwarded-for"] == "10.1.1.1, 127.0.0.1" and headers["accept-encoding"] == "identity"
    assert not headers.keys() & {"x-private", "te", "proxy-authorization", "keep-alive", "user-agent"}
    assert headers["content-length"] == str(len(seen["body"]))


def test_bodies_arrive_whole_however_they_were_sent(run: Run) -> None:
    running = run(engines=1)
    body = json.dumps({"prompt": "abc " * 5000}).encode()
    assert running.ask("POST", "/v1/completions", gzip.compress(body), {"Content-Encoding": "gzip"}).status == 200
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE_S)
    connection.request("POST", "/v1/completions", iter([body[:10], body[10:5000], body[5000:]]), encode_chunked=True)
    assert connection.getresponse().status == 200
    connection.close()
    with socket.create_connection(("127.0.0.1", running.port), PATIENCE_S) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
            % len(body)
        )
        assert raw.recv(100).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        raw.sendall(body)
        assert raw.recv(100).startswith(b"HTTP/1.1 200")
    assert [seen["body"] for seen in running.engines[0].seen] == [body] * 3
    assert not any(
        seen["headers"].keys() & {"content-encoding", "expect", "transfer-encoding"} for seen in running.engines[0].seen
    )


def test_decisions_are_disclosed_on_request(plain: Running) -> None:
    disclosed = plain.complete({"x-skymemory-decision": "1"})
    decision = json.loads(disclosed.headers["x-skymemory-decision"])
    assert decision["server"] == disclosed.headers["X-Engine"] and decision["strategy"] == "least-load"
    assert decision["prompt_tokens"] == 40 and len(decision["fallbacks"]) == 2 and decision["reasons"]
    assert "x-skymemory-decision" not in plain.complete().headers


def test_prompts_go_where_their_prefix_is(run: Run) -> None:
    running = run(strategy="approximate")
    served: dict[str, set[str]] = {}
    for turn in range(1, 4):
        for talk in "abcdef":
            answer = running.complete(prompt=talk * 2048 * turn)
            served.setdefault(talk, set()).add(answer.headers["X-Engine"])
    assert all(len(engines) == 1 for engines in served.values()), served
    assert len(set.union(*served.values())) > 1
    matched = sum(running.metric("matched_tokens_total", server=engine.name) for engine in running.engines)
    assert matched == 6 * (512 + 1024)


def test_models_are_merged_and_steer(run: Run) -> None:
    running = run()
    running.engines[0].models = [{"id": "large", "object": "model"}]
    running.engines[1].models.append({"id": "poet", "object": "model", "parent": "small"})

    def listed() -> set[str]:
        return {entry["id"] for entry in running.ask("GET", "/v1/models").json["data"]}

    until(lambda: listed() == {"small", "large", "poet"})
    assert {running.complete(model="large").headers["X-Engine"] for _ in range(6)} == {"e0"}
    assert {running.complete(model="small").headers["X-Engine"] for _ in range(9)} == {"e1", "e2"}
    assert {running.complete(model="poet").headers["X-Engine"] for _ in range(6)} == {"e1"}
    assert len({running.complete(model="who knows").headers["X-Engine"] for _ in range(30)}) == 3
    assert running.ask("GET", "/v1/models/poet").json["parent"] == "small"
    missing = running.ask("GET", "/v1/models/none")
    assert missing.status == 404 and missing.json["error"]["code"] == "model_not_found"


def test_a_model_with_a_slash_in_its_name_is_found_as_clients_ask_for_it(run: Run) -> None:
    """OpenAI's clients send `org/model` as `org%2Fmodel`."""
    running = run(engines=1)
    running.engines[0].models = [{"id": "org/model", "object": "model"}]
    until(lambda: running.ask("GET", "/v1/models/org%2Fmodel").status == 200)
    assert running.ask("GET", "/v1/models/org/model").json == {"id": "org/model", "object": "model"}
    assert "'a model?'" in running.ask("GET", "/v1/models/a%20model%3F").json["error"]["message"]


def test_cached_tokens_are_read_from_answers(run: Run) -> None:
    running = run(engines=1)
    running.complete()
    running.complete(stream=True)
    running.engines[0].cached_tokens = None
    running.complete()
    until(lambda: running.metric("reported_prompt_tokens_total", server="e0") == 64)
    assert running.metric("reported_cached_tokens_total", server="e0") == 16
    assert running.metric("prompt_tokens_total", server="e0") == 120
    until(lambda: running.metric("requests_total", server="e0", outcome="answered") == 3)
    assert running.metric("ttft_seconds_count", server="e0") == 3


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("POST", "/v1/completions", b"{", 400, "not JSON"),
        ("POST", "/v1/completions", b"{}", 400, "no `prompt`"),
        ("GET", "/v1/completions", None, 405, "takes POST"),
        ("POST", "/v1/models", b"{}", 405, "takes GET"),
        ("POST", "/v1/responses", b"{}", 400, "`input` is missing"),
        ("GET", "/v1/responses/resp_1", None, 404, "stores no responses"),
        ("POST", "/v1/load_lora_adapter", b"{}", 404, "at each server"),
        ("DELETE", "/v1/files/7", None, 404, "keeps no files"),
        ("GET", "/", None, 404, "it serves /v1/completions"),
        ("POST", "/v1/completions", b"x" * 2000, 413, "at most 1000"),
    ],
)
def test_refusals_explain_as_openai_does(
    refusing: Running, method: str, path: str, body: bytes | None, status: int, says: str
) -> None:
    answer = refusing.ask(method, path, body)
    error = answer.json["error"]
    assert (
        answer.status == status
        and says in error["message"]
        and answer.headers["Content-Type"].startswith("application/json")
    )


@pytest.fixture(scope="module")
def refusing(loop):  # type: ignore[no-untyped-def]
    running = Running(loop).start(1, limits={"max_body": 1000})
    yield running
    running.close()


def test_what_has_no_prompt_goes_to_the_least_load(plain: Running) -> None:
    for path in ("/v1/embeddings", "/tokenize", "/v1/rerank"):
        assert plain.ask("POST", path, {"model": "small", "input": "x"}).status == 200


@pytest.mark.parametrize(
    "smuggled",
    [
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost : x\r\nContent-Length : 3\r\n\r\nabc",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(plain: Running, smuggled: bytes) -> None:
    before = [len(engine.seen) for engine in plain.engines]
    with socket.create_connection(("127.0.0.1", plain.port), PATIENCE_S) as raw:
        raw.sendall(smuggled)
        answer = b""
        while piece := raw.recv(65536):
            answer += piece
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")) and answer.count(b"HTTP/1.") == 1
    assert [len(engine.seen) for engine in plain.engines] == before


def test_health_readiness_and_metrics(run: Run) -> None:
    running = run(engines=2)
    running.complete()
    assert running.ask("GET", "/health").status == 200
    assert running.ask("GET", "/ready").json == {"ready": True, "reasons": []}
    text = running.ask("GET", "/metrics").body.decode()
    assert 'skymemory_router_requests_total{outcome="answered"' in text
    assert 'skymemory_router_server_healthy{server="e0"} 1.0' in text and "skymemory_router_in_flight 1.0" not in text
    for engine in running.engines:
        engine.healthy = False
    until(lambda: len(running.ask("GET", "/ready").json["reasons"]) == 2)
    ready = running.ask("GET", "/ready")
    assert ready.status == 200 and "server e0 is ejected: /health answered 503" in ready.json["reasons"]
    assert running.complete().status == 200, "more than half are ejected: all are used"
    for engine in running.engines:
        running.loop.run(engine.die())
    until(lambda: running.ask("GET", "/ready").status == 503)
    refused = running.complete()
    assert (
        refused.status == 503
        and refused.headers["Retry-After"] == "1"
        and "refused" in refused.json["error"]["message"]
    )


def test_load_reports_of_engines_weigh(run: Run) -> None:
    running = run(engines=2)
    running.engines[0].waiting = 5
    server = running.server
    assert server is not None
    until(lambda: (report := server.picker.fleet.servers["e0"].reported) is not None and report.waiting == 5)
    assert {running.complete().headers["X-Engine"] for _ in range(8)} == {"e1"}


def test_backends_come_and_go_without_a_request_dropped(run: Run) -> None:
    running = run(engines=2)
    server = running.server
    assert server is not None
    response = running.open(
        "POST", "/v1/completions", {"prompt": "x", "stream": True, "mock": {"events": 8, "gap_s": 0.1}}
    )
    first = response.read1()
    served_by = response.headers["X-Engine"]
    kept = next(engine for engine in running.engines if engine.name != served_by)

    async def keep_only(engines: list[MockEngine]) -> None:
        from dataclasses import replace

        from skymemory.router.settings import Backend

        server.reset(replace(server.settings, backends=tuple(Backend(engine.url, engine.name) for engine in engines)))

    running.loop.run(keep_only([kept]))
    assert {running.complete().headers["X-Engine"] for _ in range(5)} == {kept.name}
    assert (first + response.read()).endswith(b"data: [DONE]\n\n")
    until(lambda: served_by not in server.backends.known)
    assert list(server.picker.fleet.servers) == [kept.name]
    assert f'server="{served_by}"' not in running.ask("GET", "/metrics").body.decode()


def test_an_answer_that_comes_whole_is_no_evidence_of_a_prefill(run: Run) -> None:
    """Its first byte is its last. Streams say when a prefill has ended, and they alone are believed."""
    running = run(engines=1, strategy="least-ttft")

    def estimated_s(number: int, **fields: object) -> float:
        asked = {"prompt": f"{number:05} " * 700, **fields}
        answer = running.ask("POST", "/v1/completions", {"model": "small", **asked}, {"x-skymemory-decision": "1"})
        assert answer.status == 200
        return float(json.loads(answer.headers["x-skymemory-decision"])["estimated_ttft_s"])

    before_s = estimated_s(0, mock={"first_byte_s": 0.15})
    for number in range(1, 10):
        after_s = estimated_s(number, mock={"first_byte_s": 0.15})
    assert after_s == pytest.approx(before_s, rel=0.05), "nothing was learnt"
    for number in range(10, 20):
        streamed_s = estimated_s(number, stream=True, mock={"first_byte_s": 0.03, "events": 1})
    assert streamed_s > 0.02 and streamed_s != pytest.approx(before_s, rel=0.05), "a stream is believed"


def test_an_engine_that_counts_other_tokens_than_we_do_is_understood(run: Run) -> None:
    """Without its tokenizer four bytes count as a token. Here it has three where we see one, and says what they took:
    what is learnt is for tokens as prompts are read, not for as many of its own.
    """
    running = run(engines=1, strategy="least-ttft")
    assert running.server is not None
    (engine,), (server,) = running.engines, running.server.picker.fleet
    engine.prompt_tokens, engine.cached_tokens = 3000, 0
    for number in range(8):
        prompt = f"{number:05} " + "abcd" * 998 + "ab"  # a thousand of our tokens
        answer = running.ask(
            "POST", "/v1/completions", {"model": "small", "prompt": prompt}, {"x-skymemory-decision": "1"}
        )
        disclosed = json.loads(answer.headers["x-skymemory-decision"])
        assert (disclosed["prompt_tokens"], disclosed["matched_tokens"]) == (1000, 0)
        totals = PrefillTotals(number + 1, 3000 * (number + 1), 3000 * (number + 1), 0.6 * (number + 1))
        engine.prefills = totals
        until(lambda disclosed=totals: server.reported is not None and server.reported.prefills == disclosed)
    assert disclosed["estimated_compute_s"] == pytest.approx(0.6, rel=0.02)


@pytest.mark.parametrize("body_bytes", [5, 300_000])
def test_what_was_cached_of_a_whole_answer_is_known_when_it_is_learnt_from(
    run: Run, monkeypatch: pytest.MonkeyPatch, body_bytes: int
) -> None:
    running = run(engines=1, strategy="least-ttft")
    assert running.server is not None
    scorer, disclosed = running.server.picker.scorer, list[object]()
    succeeded = scorer.succeeded

    def listening(request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        disclosed.append(cached_tokens)
        succeeded(request, server, now_s, cached_tokens)

    monkeypatch.setattr(scorer, "succeeded", listening)
    running.complete(mock={"body_bytes": body_bytes})
    until(lambda: bool(disclosed))
    assert disclosed == [10], "8 of the engine's 32 tokens, of the 40 that we count"
