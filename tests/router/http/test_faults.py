"""What breaks: servers that hang up, hang or are gone; clients that hang; too much of everything."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.router.running import PATIENCE_S, Answer, Running, assert_no_cycles, until

from skymemory.router.http import exchange
from skymemory.router.request_account import UsageReader

Run = Callable[..., Running]


def account_is_closed(running: Running) -> bool:
    assert running.server is not None
    fleet = running.server.picker.fleet
    return all((each.in_flight, each.prefilling, each.prefill_tokens) == (0, 0, 0.0) for each in fleet)


def raw_stream(running: Running, mock: dict[str, Any]) -> bytes:
    """Everything that comes back on a connection for one streamed request."""
    body = json.dumps({"prompt": "x", "stream": True, "mock": mock}).encode()
    with socket.create_connection(("127.0.0.1", running.port), PATIENCE_S) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        came = b""
        while piece := raw.recv(65536):
            came += piece
    return came


def test_a_stream_that_breaks_between_events_ends_with_an_error_event(run: Run) -> None:
    running = run(engines=1)
    came = raw_stream(running, {"events": 4, "die": "between-events"})
    assert b'"w0 \\u00fc"' in came and b"[DONE]" not in came
    assert not came.endswith(b"0\r\n\r\n")  # what ends so is complete, and this is not
    event = came[came.rindex(b"data: ") + 6 :].split(b"\n\n")[0]
    assert "went away" in json.loads(event)["error"]["message"]
    until(lambda: running.metric("requests_total", server="e0", outcome="broken") == 1)
    until(lambda: account_is_closed(running))


@pytest.mark.parametrize("mock", [{"die": "in-event"}, {"die": "in-event", "events": 40}])
def test_a_stream_that_breaks_within_an_event_loses_that_event(run: Run, mock: dict[str, Any]) -> None:
    """No client gets half an event, so the error is an event of its own."""
    running = run(engines=1)
    came = raw_stream(running, mock)
    assert came.startswith(b"HTTP/1.1 200") and not came.endswith(b"0\r\n\r\n") and b"[DONE]" not in came
    event = came[came.rindex(b"data: ") + 6 :].split(b"\n\n")[0]
    assert "went away" in json.loads(event)["error"]["message"]


@pytest.mark.parametrize("mock", [{"die": "in-event"}, {"die": "in-event", "events": 40}])
def test_a_stream_that_is_not_continued_is_passed_on_as_it_comes(run: Run, mock: dict[str, Any]) -> None:
    running = run(engines=1, retries={"continue_streams": False})
    came = raw_stream(running, mock)
    assert came.startswith(b"HTTP/1.1 200") and not came.endswith(b"0\r\n\r\n")
    assert b"error" not in came and b"[DONE]" not in came


def test_an_answer_that_breaks_is_not_taken_for_whole(run: Run) -> None:
    running = run(engines=1)
    with pytest.raises(http.client.IncompleteRead):
        running.complete(mock={"die": "in-body"})
    until(lambda: running.metric("requests_total", server="e0", outcome="broken") == 1)


@pytest.mark.parametrize("die", ["before", "after-headers"])
def test_until_the_first_byte_another_server_is_tried(run: Run, die: str) -> None:
    running = run(engines=3)
    for engine in running.engines[:2]:
        engine.mock = {"die": die}
    for _ in range(10):
        answer = running.complete(stream=True)
        assert answer.status == 200 and answer.headers["X-Engine"] == "e2" and answer.body.endswith(b"[DONE]\n\n")
    assert running.metric("retries_total", server="e0") > 0
    until(lambda: account_is_closed(running))


def test_busy_answers_are_tried_elsewhere_and_the_last_is_passed_on(run: Run) -> None:
    running = run(engines=3)
    for engine in running.engines[:2]:
        engine.mock = {"status": 503}
    assert {running.complete().headers["X-Engine"] for _ in range(6)} == {"e2"}
    running.engines[2].mock = {"status": 503}
    last = running.complete()
    assert last.status == 503 and last.json["object"] == "text_completion"
    running.engines[2].mock = {"status": 400}
    assert running.complete().status in (400, 503)
    until(lambda: account_is_closed(running))


def test_all_dead_is_said_and_they_come_back(run: Run) -> None:
    running = run(engines=2)
    for engine in running.engines:
        running.loop.run(engine.die())
    first = running.complete()
    assert first.status in (502, 503) and first.json["error"]["message"]
    until(lambda: all(running.metric("ejections_total", server=name) == 1 for name in ("e0", "e1")))
    refused = running.complete()
    assert refused.status == 503 and refused.headers["Retry-After"] == "1"
    running.loop.run(running.engines[0].start())
    until(lambda: running.complete().status == 200)
    assert running.complete().headers["X-Engine"] == "e0"


def test_a_server_that_takes_no_new_connections_is_ejected_though_old_ones_are_served(run: Run) -> None:
    running = run(engines=2)
    for _ in range(4):
        assert running.complete().status == 200
    running.engines[0].refuse_connections()
    until(lambda: running.metric("ejections_total", server="e0") == 1)
    assert {running.complete().headers["X-Engine"] for _ in range(4)} == {"e1"}


def test_who_came_back_is_not_believed_to_hold_what_it_held(run: Run) -> None:
    running = run(engines=2, strategy="approximate")
    prompt = "abcdefgh" * 512

    def matched() -> int:
        call = running.complete({"x-skymemory-decision": "1"}, prompt=prompt)
        return int(json.loads(call.headers["x-skymemory-decision"])["matched_tokens"])

    assert matched() == 0 and matched() == 1024
    for engine in running.engines:
        running.loop.run(engine.die())
    until(lambda: running.ask("GET", "/ready").status == 503)
    for engine in running.engines:
        running.loop.run(engine.start())
    until(lambda: running.ask("GET", "/ready").json == {"ready": True, "reasons": []})
    assert matched() == 0


def test_no_request_is_left_to_the_garbage_collector(run: Run) -> None:
    running = run(engines=2)

    def ask() -> None:
        assert running.complete().status == 200
        assert running.complete(stream=True).status == 200
        assert running.complete(mock={"status": 400}).status == 400
        assert running.ask("POST", "/v1/completions", b"{").status == 400
        for size_bytes in (200_000, 2_000_000):  # read in a thread; in its turn
            assert running.ask("POST", "/v1/completions", b"{" * size_bytes).status == 400
        assert running.ask("POST", "/v1/completions", packed, {"Content-Encoding": "gzip"}).status == 400
        assert running.complete(prompt="long " * 400_000).status == 200
        assert running.complete(mock={"die": "before"}).status == 502

    packed = gzip.compress(b'{"prompt": [' + b"[1]," * 500_000 + b"[1]]}")

    assert_no_cycles(ask)


@pytest.mark.parametrize("state", [exchange.READING, exchange.ASKING], ids=lambda state: state.name)
def test_a_transition_outside_the_table_ends_its_request_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch, state: exchange.ExchangeState
) -> None:
    running = run(engines=1)
    with monkeypatch.context() as patch:
        patch.setattr(state, "allowed", (exchange.ENDED,))
        assert running.complete().status == 500
    assert running.complete().status == 200
    assert running.metric("faults_total", where="request") == 1
    until(lambda: account_is_closed(running))


def test_no_first_byte_in_time_is_said_and_not_tried_again(run: Run) -> None:
    running = run(engines=2, timeouts={"first_byte": "200ms"})
    answer = running.complete(mock={"first_byte_s": 1.0})
    assert answer.status == 504 and "no first byte in 0.2 s" in answer.json["error"]["message"]
    # On a busy computer the time may be up before the engine, which has the same loop, has read the request.
    assert sum(len(engine.seen) for engine in running.engines) <= 1
    assert not any(running.metric("retries_total", server=engine.name) for engine in running.engines)
    until(lambda: account_is_closed(running))


def test_a_stream_that_stops_is_cut_and_says_so(run: Run) -> None:
    running = run(engines=1, timeouts={"idle": "200ms"})
    came = raw_stream(running, {"events": 3, "gap_s": 1.0})
    assert b"sent nothing for 0.2 s" in came and not came.endswith(b"0\r\n\r\n")
    until(lambda: running.metric("requests_total", server="e0", outcome="timeout") == 1)
    until(lambda: running.engines[0].abandoned == 1)


@pytest.mark.parametrize("mock", [{"events": 600, "gap_s": 0.05}, {"first_byte_s": 30.0}])
def test_a_client_that_hangs_up_ends_the_work_at_once(run: Run, mock: dict[str, Any]) -> None:
    running = run(engines=1)
    body = json.dumps({"prompt": "x", "stream": True, "mock": mock}).encode()
    raw = socket.create_connection(("127.0.0.1", running.port), PATIENCE_S)
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    until(lambda: len(running.engines[0].seen) == 1)
    if "gap_s" in mock:
        raw.recv(100)
    began_s = time.monotonic()
    raw.close()
    until(lambda: running.metric("requests_total", server="e0", outcome="client-gone") == 1)
    assert time.monotonic() - began_s < 15
    until(lambda: account_is_closed(running))
    if "gap_s" in mock:
        until(lambda: running.engines[0].abandoned == 1)


def test_a_client_that_reads_nothing_is_cut_off(run: Run) -> None:
    running = run(engines=1, timeouts={"client": "300ms"})
    body = json.dumps({"prompt": "x", "mock": {"body_bytes": 30_000_000}}).encode()
    with socket.create_connection(("127.0.0.1", running.port), PATIENCE_S) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: running.metric("requests_total", server="e0", outcome="client-gone") == 1)
    until(lambda: account_is_closed(running))
    assert running.complete().status == 200


def test_clients_that_send_slowly_are_warned_or_cut_off(run: Run) -> None:
    running = run(engines=1, timeouts={"client": "300ms", "keep_alive": "500ms"})
    with socket.create_connection(("127.0.0.1", running.port), PATIENCE_S) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert raw.recv(4096).startswith(b"HTTP/1.1 408")
    for begun, said in ((b"", b""), (b"POST /v1/comp", b"HTTP/1.1 408")):
        with socket.create_connection(("127.0.0.1", running.port), PATIENCE_S) as raw:
            raw.sendall(begun)
            assert raw.recv(4096)[:12] == said  # within PATIENCE_S, so it was closed
    assert running.complete().status == 200


def eight_at_once(running: Running) -> list[Answer]:
    """The engines answer once four were refused."""
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(running.complete, mock={"hold": True}) for _ in range(8)]
        try:
            until(lambda: sum(one.done() for one in asked) >= 4)
        finally:
            for engine in running.engines:
                running.loop.loop.call_soon_threadsafe(engine.release.set)
        return [one.result() for one in asked]


def test_too_much_at_once_is_refused_with_a_time(run: Run) -> None:
    running = run(engines=1, limits={"max_in_flight": 4})
    answers = eight_at_once(running)
    statuses = sorted(answer.status for answer in answers)
    assert statuses == [200] * 4 + [429] * 4
    refused = next(answer for answer in answers if answer.status == 429)
    assert refused.headers["Retry-After"] == "1" and refused.json["error"]["type"] == "requests"
    assert running.complete().status == 200


def test_servers_that_have_enough_waiting_get_no_more(run: Run) -> None:
    running = run(engines=2, limits={"max_waiting": 2})
    answers = eight_at_once(running)
    assert sorted(answer.status for answer in answers) == [200] * 4 + [429] * 4
    assert [len(engine.seen) for engine in running.engines] == [2, 2]


def test_a_slow_page_of_metrics_delays_no_request(run: Run) -> None:
    running = run(engines=2, strategy="approximate")
    running.engines[0].metrics_delay_s = 30.0
    began_s = time.monotonic()
    served = [running.complete(prompt=f"{number} " * 200).headers["X-Engine"] for number in range(20)]
    assert time.monotonic() - began_s < 20 and set(served) == {"e0", "e1"}


def test_a_megabyte_of_prompt_passes(run: Run) -> None:
    running = run(engines=2, strategy="approximate")
    for _ in range(2):
        answer = running.complete({"x-skymemory-decision": "1"}, prompt="abcdefgh" * 131_072)
        assert answer.status == 200
    decision = json.loads(answer.headers["x-skymemory-decision"])
    assert decision["prompt_tokens"] == 262_144 and decision["matched_tokens"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_adapters_do_not_grow_the_metrics(run: Run) -> None:
    running = run(engines=2, strategy="approximate")
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE_S)
    lines = []
    for number in range(10_000):
        body = json.dumps({"prompt": "x" * 256, "lora_adapter": f"a{number}"})
        connection.request("POST", "/v1/completions", body)
        assert connection.getresponse().read()
        if number in (100, 9_999):
            lines.append(running.ask("GET", "/metrics").body.count(b"\n"))
    connection.close()
    assert lines[0] == lines[1]


@pytest.mark.slow
@pytest.mark.seeded
def test_a_few_bytes_that_hold_gigabytes_delay_no_request(run: Callable[..., Running]) -> None:
    running = run(engines=1)
    bomb = gzip.compress(bytes(200 << 20), 9)
    assert len(bomb) < 1 << 18
    began_s = time.monotonic()
    assert len(gzip.decompress(bomb)) == 200 << 20
    unpacking_s = time.monotonic() - began_s

    def thrown() -> bytes:
        with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE_S) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: {len(bomb)}"
            client.sendall(head.encode() + b"\r\n\r\n" + bomb)
            return client.recv(12)

    with ThreadPoolExecutor(1) as one:
        throwing = [one.submit(thrown) for _ in range(2)]
        waits_s = []
        while not all(each.done() for each in throwing):
            began_s = time.monotonic()
            assert running.ask("GET", "/health").status == 200
            waits_s.append(time.monotonic() - began_s)
        assert {each.result() for each in throwing} == {b"HTTP/1.1 413"}
    assert statistics.median(waits_s) < max(1.0, unpacking_s), "no request waits until all of it is unpacked, twice"


def twice(running: Running, body: dict[str, Any]) -> bytes:
    """What comes back for one request sent twice at once, until nothing more does."""
    data = json.dumps({"model": "small", "prompt": "abc", **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    came = b""
    with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE_S) as client:
        client.sendall(head.encode() + b"\r\n" + data + head.encode() + b"Connection: close\r\n\r\n" + data)
        try:
            while piece := client.recv(65536):
                came += piece
        except ConnectionResetError:
            pass
    return came


@pytest.mark.parametrize("body", [{}, {"stream": True, "mock": {"events": 3, "gap_s": 0.05}}])
def test_an_error_of_ours_after_the_answer_began_sends_no_second_one(
    run: Callable[..., Running], body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = run(engines=1)
    passed = UsageReader.add

    def fails(reader: UsageReader, piece: bytes) -> None:
        passed(reader, piece)
        raise KeyError("a bug")

    monkeypatch.setattr(UsageReader, "add", fails)
    came = twice(running, body)
    assert came.count(b"HTTP/1.1 ") == 1 and b"the router failed" not in came and not came.endswith(b"0\r\n\r\n")
    until(lambda: running.metric("requests_total", server="e0", outcome="failed") == 1)
    until(lambda: account_is_closed(running))


@pytest.mark.parametrize(
    ("call", "body"),
    [
        ("succeeded", {}),
        ("on_request_end", {}),
        ("on_request_end", {"stream": True, "mock": {"events": 3, "gap_s": 0.05}}),
    ],
)
def test_an_error_in_the_account_spoils_no_answer(
    run: Callable[..., Running], call: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = run(engines=1)
    assert running.server is not None

    def fails(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(running.server.picker, call, fails)
    came = twice(running, body)
    assert came.count(b"HTTP/1.1 200 ") == 2
    assert came.count(b"[DONE]") == (2 if body else 0) and came.count(b'"usage"') == 2
    until(lambda: running.metric("requests_total", server="e0", outcome="failed") == 2)
    until(lambda: running.metric("faults_total", where="account") >= 2)
