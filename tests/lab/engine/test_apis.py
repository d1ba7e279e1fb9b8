"""Responses and Messages at `skymemory serve`: chat's tokens in their forms; every error in its API's format."""

from __future__ import annotations

import gzip
import json
import logging
import socket
import zlib
from typing import Any

import pytest
from tests.lab.door import PATIENCE_S, Door

pytestmark = pytest.mark.engine
CHATS, RESPONSES, MESSAGES, COUNT = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
SYSTEM = "You explain commands of Debian. " * 8
TURNS = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is git?"}]
GREEDY = {"model": "small", "temperature": 0}
SAID: dict[str, dict[str, Any]] = {
    RESPONSES: {**GREEDY, "instructions": SYSTEM, "input": "What is git?", "max_output_tokens": 8},
    MESSAGES: {**GREEDY, "system": SYSTEM, "messages": TURNS[1:], "max_tokens": 8},
}


def text_of(path: str, answer: dict[str, Any]) -> str:
    if path == RESPONSES:
        return str(answer["output"][0]["content"][0]["text"])
    return str(answer["content"][0]["text"])


def streamed(door: Door, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    connection, answer = door.open_stream(path, body)
    assert answer.status == 200 and answer.getheader("Content-Type").startswith("text/event-stream")
    blocks = answer.read().decode().split("\n\n")[:-1]
    connection.close()
    return [json.loads(block.split("\ndata: ")[1]) for block in blocks]


@pytest.mark.brief("/v1/messages")
@pytest.mark.parametrize("path", SAID)
def test_the_text_and_the_tokens_are_those_of_a_chat(door: Door, path: str) -> None:
    chat = door.ask(CHATS, {**GREEDY, "messages": TURNS, "max_tokens": 8}).body
    expected = chat["choices"][0]["message"]["content"]
    whole = door.ask(path, SAID[path]).body
    events = streamed(door, path, SAID[path])
    assert text_of(path, whole) == expected
    if path == RESPONSES:
        assert text_of(path, events[-1]["response"]) == expected and whole["status"] == "incomplete"
        cached, prompt = whole["usage"]["input_tokens_details"]["cached_tokens"], whole["usage"]["input_tokens"]
        assert events[-1]["type"] == "response.incomplete" and events[-1]["response"]["usage"] == whole["usage"]
    else:
        assert "".join(each.get("delta", {}).get("text", "") for each in events) == expected
        cached = whole["usage"]["cache_read_input_tokens"]
        prompt = whole["usage"]["input_tokens"] + cached
        assert events[-2]["usage"] == whole["usage"] and whole["stop_reason"] == "max_tokens"
        counted = {name: value for name, value in SAID[path].items() if name != "max_tokens"}
        assert door.ask(COUNT, counted).body == {"input_tokens": prompt}
    assert prompt == chat["usage"]["prompt_tokens"] and cached > prompt / 2, "the chat before it had cached its prompt"


def test_a_stop_sequence_is_named(door: Door) -> None:
    whole = door.ask(CHATS, {**GREEDY, "messages": TURNS, "max_tokens": 8}).body["choices"][0]["message"]["content"]
    stop = whole[3:6]
    message = door.ask(MESSAGES, {**SAID[MESSAGES], "stop_sequences": ["never said", stop]}).body
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert streamed(door, MESSAGES, {**SAID[MESSAGES], "stop_sequences": [stop]})[-2]["delta"] == {
        "stop_reason": "stop_sequence",
        "stop_sequence": stop,
    }


@pytest.mark.parametrize(
    ("path", "changed", "status", "kind", "words"),
    [
        (RESPONSES, {"previous_response_id": "resp_1"}, 400, "invalid_request_error", "nothing is stored"),
        (RESPONSES, {"temperature": 9}, 400, "invalid_request_error", "<= 2"),
        (RESPONSES, {"model": "gpt-5"}, 404, "invalid_request_error", "does not exist"),
        (RESPONSES, {"tools": [{"type": "function", "name": "x"}]}, 400, "invalid_request_error", "tools"),
        (MESSAGES, {"model": "claude"}, 404, "not_found_error", "does not exist"),
        (MESSAGES, {"max_tokens": 0}, 400, "invalid_request_error", ">= 1"),
        (MESSAGES, {"system": "x " * 9000}, 400, "invalid_request_error", "context length"),
        (MESSAGES, {"messages": []}, 400, "invalid_request_error", "no turn"),
    ],
)
def test_what_is_refused_is_so_in_the_apis_format(
    door: Door, path: str, changed: dict[str, Any], status: int, kind: str, words: str
) -> None:
    reply = door.ask(path, {**SAID[path], **changed})
    error = reply.body["error"]
    assert reply.status == status and error["type"] == kind and words in error["message"], reply.body
    assert (reply.body.get("type") == "error") is (path == MESSAGES)


def raw(door: Door, data: bytes) -> tuple[int, dict[str, str], bytes]:
    with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as connection:
        connection.sendall(data)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split(" ")[1]), headers, body


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nBad Header\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 20_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_is_answered_in_json_and_not_logged(
    door: Door, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        status, headers, body = raw(door, data)
    error = json.loads(body)["error"]
    assert 400 <= status < 500 and headers["content-type"].startswith("application/json")
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 500 and not caplog.records


@pytest.mark.parametrize(
    ("coding", "body", "status"),
    [
        ("gzip", gzip.compress, 200),
        ("deflate", zlib.compress, 200),
        ("identity", bytes, 200),
        ("br", bytes, 415),
        ("zstd", bytes, 415),
        ("nonsense", bytes, 415),
        ("gzip", bytes, 400),
        ("gzip", lambda body: gzip.compress(body)[:-4], 400),
        ("gzip", lambda body: gzip.compress(bytes(9 << 20)), 413),
    ],
)
def test_codings_of_bodies_are_taken_or_refused_in_json(
    door: Door, coding: str, body: Any, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    data = body(json.dumps({"prompt": "git", "max_tokens": 1}).encode())
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Encoding: {coding}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with caplog.at_level(logging.WARNING):
        found, _, answer = raw(door, head.encode() + data)
    assert found == status and ("error" in json.loads(answer)) is (status != 200), answer
    assert not caplog.records


def test_paths_that_are_not_there_are_refused_in_the_apis_format(door: Door) -> None:
    assert door.ask("/v1/messages/batches", {}).body["error"]["type"] == "invalid_request_error"
    assert door.ask("/v1/realtime").status == 404 and door.ask("/v1/responses").status == 405
