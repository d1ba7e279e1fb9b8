"""A stream whose server dies goes on at another one: its client gets the answer of one that stays up."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.router.http import pairs
from tests.router.running import PATIENCE_S, Loop, Running, until
from tests.router.story_engine import StoryEngine

from skymemory.router.limits.shares import SharedLimit
from skymemory.router.prompts.continuation import (
    DONE,
    MAX_KEPT_BYTES,
    MAX_TEXT_BYTES,
    KeptText,
    Rest,
    StreamContinuation,
)

PROMPT = " once; there; was;\n a;"
LENGTHS = {"max_tokens": 14}


@dataclass
class Received:
    """What a client got of a stream."""

    text: str
    ids: set[tuple[Any, ...]]
    roles: int
    finish: list[str]
    usage: dict[str, Any] | None
    done: bool
    error: str
    is_whole: bool


def stream_from(running: Running, body: dict[str, Any]) -> Received:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    data = json.dumps({"model": "small", "stream": True, **body}).encode()
    came = b""
    with socket.create_connection(("127.0.0.1", running.port), PATIENCE_S) as raw:
        raw.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode())
        raw.sendall(b"Content-Length: %d\r\n\r\n" % len(data) + data)
        while piece := raw.recv(65536):
            came += piece
    head, _, rest = came.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), came
    stream, is_whole = b"", False
    while rest and not is_whole:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        stream, rest, is_whole = stream + rest[:length], rest[length + 2 :], not length
    return read_events(stream, is_whole)


def read_events(stream: bytes, is_whole: bool) -> Received:
    assert stream.endswith(b"\n\n"), "no client gets half an event"
    received = Received("", set(), 0, [], None, False, "", is_whole)
    for event in stream.decode().split("\n\n")[:-1]:
        assert event.startswith("data: ") and not received.done
        if event == "data: [DONE]":
            received.done = True
            continue
        chunk = json.loads(event[6:])
        if "error" in chunk:
            received.error = chunk["error"]["message"]
            continue
        received.ids.add((chunk["id"], chunk["created"], chunk["model"]))
        if chunk.get("usage") is not None:
            received.usage = chunk["usage"]
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            received.roles += "role" in delta
            received.text += (choice["text"] if "text" in choice else delta.get("content")) or ""
            received.finish += [choice["finish_reason"]] if choice["finish_reason"] else []
    return received


@pytest.fixture(scope="module")
def running(loop: Loop) -> Iterator[Running]:
    running = story_router(loop, retries={"most": 4}, health={"failures": 1000, "max_ejected": 0})
    yield running
    running.close()


def story_router(loop: Loop, engines: int = 5, **settings: Any) -> Running:
    running = Running(loop)
    for number in range(engines):
        engine = StoryEngine(f"e{number}", deaths=[])
        loop.run(engine.start())
        running.engines.append(engine)
    running.restart(**settings)
    assert running.server is not None
    known = running.server.backends.known
    until(lambda: all(each.models for each in known.values()))
    return running


@pytest.fixture
def stories(running: Running) -> Iterator[Callable[..., list[tuple[int, str]]]]:
    """``stories(deaths, **more)`` sets the deaths of the next streams, and what is more of the engines."""

    def plan(deaths: list[tuple[int, str]], **more: Any) -> list[tuple[int, str]]:
        left = list(deaths)
        for engine in running.engines:
            assert isinstance(engine, StoryEngine)
            engine.deaths = left
            for name, value in {"trims": True, "ends_apart": False, "reports_usage": False, **more}.items():
                setattr(engine, name, value)
        return left

    yield plan
    plan([])


Plan = Callable[..., list[tuple[int, str]]]


def body_of(kind: str, seed: int, **more: Any) -> dict[str, Any]:
    """A request, of which the answer has a dozen tokens or more."""
    for salt in range(seed * 1000, seed * 1000 + 1000):
        text = f"{PROMPT} x{salt};"
        asked = {"messages": [{"role": "user", "content": text}]} if kind == "chat" else {"prompt": text}
        if len(StoryEngine("").events_of({**asked, "max_tokens": 12})) >= 12:
            return {**asked, **more}
    raise AssertionError("no such prompt")


def assert_same(received: Received, whole: Received) -> None:
    assert (received.text, received.finish, received.roles, received.done) == (
        whole.text,
        whole.finish,
        whole.roles,
        True,
    )
    assert received.is_whole and not received.error and len(received.ids) == 1
    if whole.usage is None:
        assert received.usage is None
        return
    assert received.usage is not None
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert received.usage[name] == whole.usage[name], name


@pytest.mark.brief("2-more1-engine1-says-chat", "3-more2-engine2-in-completion", "1-more0-engine0-before-chat")
@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("where", ["before", "in", "says"])
@pytest.mark.parametrize(
    ("seed", "more", "engine"),
    [
        (1, {"stream_options": {"include_usage": True}}, {}),
        (2, {}, {"ends_apart": True}),
        (3, {"stream_options": {"include_usage": True}}, {"reports_usage": True, "trims": False}),
    ],
)
def test_a_stream_that_breaks_anywhere_is_the_whole_one_to_its_client(
    running: Running, stories: Plan, kind: str, where: str, seed: int, more: dict[str, Any], engine: dict[str, Any]
) -> None:
    body = body_of(kind, seed, **LENGTHS, **more)
    stories([], **engine)
    whole = stream_from(running, body)
    first = running.engines[0]
    assert isinstance(first, StoryEngine)
    events = len(first.events_of(body))
    assert whole.done and events > 8
    for at in range(1, events):  # without a first byte it is a retry
        left = stories([(at, where)], **engine)
        received = stream_from(running, body)
        assert not left
        assert_same(received, whole)


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("handover", ["after", "overlap"])
def test_a_decode_server_that_dies_is_followed_by_one_that_computes_the_prompt_itself(
    run: Callable[..., Running], kind: str, handover: str
) -> None:
    running = pairs.start(run, "pdd", engine_type=StoryEngine, disaggregation={"handover": handover})
    assert running.server is not None
    known = running.server.backends.known
    until(lambda: all(each.models for each in known.values()))
    body = body_of(kind, 1, stream_options={"include_usage": True}, **LENGTHS)
    whole = stream_from(running, body)
    for at in (1, 3, 9):
        deaths = [(at, "in")]
        for engine in running.engines:
            assert isinstance(engine, StoryEngine)
            engine.deaths = deaths
        received = stream_from(running, body)
        assert not deaths
        assert_same(received, whole)
    until(lambda: pairs.books_are_closed(running))
    assert running.metric("alone_total", reason="stream-continued") == 3
    assert running.metric("faults_total", where="request") == 0


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("seed", range(6))
def test_it_may_break_again_and_again(running: Running, stories: Plan, seed: int) -> None:
    dice = random.Random(seed)
    kind = dice.choice(["chat", "completion"])
    body = body_of(kind, seed, max_tokens=30, stream_options={"include_usage": True})
    stories([])
    whole = stream_from(running, body)
    for _ in range(10):
        left = stories([(dice.randint(1, 6), dice.choice(["in", "before", "says"])) for _ in range(dice.randint(2, 4))])
        received = stream_from(running, body)
        assert len(left) < 3
        assert_same(received, whole)


def test_the_books_are_even_afterwards(running: Running, stories: Plan) -> None:
    stories([(3, "in"), (2, "before")])
    assert stream_from(running, body_of("chat", 1)).done
    assert running.server is not None
    fleet, proxy = running.server.picker.fleet, running.server.proxy
    until(lambda: proxy.in_flight == 0 and all((each.in_flight, each.prefilling) == (0, 0) for each in fleet))
    assert running.metric("faults_total", where="request") == running.metric("faults_total", where="account") == 0


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"logprobs": True, "top_logprobs": 1},
        {"echo": True},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json": {}}},
        {"tool_choice": "required", "tools": [{}]},
        {"return_token_ids": True},
        {"kv_transfer_params": {"x": 1}},
    ],
)
def test_what_the_text_does_not_determine_ends_with_an_error(
    running: Running, stories: Plan, more: dict[str, Any]
) -> None:
    stories([(4, "in")])
    received = stream_from(running, body_of("chat", 1, **more))
    assert "went away" in received.error and not received.done and not received.is_whole


def test_an_error_of_the_engine_is_passed_on_where_the_stream_cannot_go_on(running: Running, stories: Plan) -> None:
    stories([(4, "says")])
    received = stream_from(running, body_of("chat", 1, n=2))
    assert received.error == "EngineCore died" and received.done and received.is_whole


def test_token_ids_are_not_continued_without_a_tokenizer(running: Running, stories: Plan) -> None:
    chunk = b'data: {"id": "a", "choices": [{"index": 0, "text": " x;", "finish_reason": null}]}\n\n'
    body = b'{"prompt": [1, 2], "max_tokens": 9, "stream": true}'
    without = StreamContinuation("/v1/completions", body)
    assert without.add(chunk) == chunk and without.prepare_rest() is None
    known = StreamContinuation("/v1/completions", body, lambda text: [7, 8])
    assert known.add(chunk) == chunk
    rest = known.prepare_rest()
    assert rest is not None
    asked = json.loads(rest.body)
    assert (asked["prompt"], asked["max_tokens"]) == ([1, 2, 7, 8], 7)


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "a"}]}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}]},
        {"choices": [{"index": 1, "delta": {"content": "hm"}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"content": "hm"}, "logprobs": {"content": []}, "finish_reason": None}]},
        {"error": {"message": "the engine is dead"}},
    ],
)
def test_a_call_of_a_tool_or_what_is_no_text_is_not_continued(event: dict[str, Any]) -> None:
    stream = StreamContinuation("/v1/chat/completions", json.dumps(body_of("chat", 1, tools=[{}])).encode())
    data = f"data: {json.dumps(event)}\n\n".encode()
    assert stream.add(data) == data and stream.prepare_rest() is None


def chat_event(text: str, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text, **more}, "finish_reason": None}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


@pytest.mark.parametrize("letter", ["a", "好", "🛰"])
def test_the_memory_of_texts_is_bounded(letter: str) -> None:
    """A stream has a megabyte, a holder its share; who has no room is not continued, and gives back what it had."""
    limit = SharedLimit(MAX_KEPT_BYTES)
    body = json.dumps(body_of("chat", 1)).encode()
    kept = KeptText(limit, "a")
    stream = StreamContinuation("/v1/chat/completions", body, None, kept)
    while limit.held or not stream.is_complete:
        before = limit.held
        stream.add(chat_event(letter * 10_000))
        assert limit.held <= MAX_TEXT_BYTES + 50_000
    assert before > MAX_TEXT_BYTES / 2 and stream.prepare_rest() is None
    few = SharedLimit(100_000)
    texts = [KeptText(few, f"client {number}") for number in range(40)]
    had_room = [text.add(letter * 5_000) for text in texts]
    assert not all(had_room) and few.held <= few.most
    for text in texts:
        text.drop()
    assert few.held == 0


def test_a_stream_that_cannot_go_on_keeps_no_text() -> None:
    limit = SharedLimit(MAX_KEPT_BYTES)
    body = json.dumps(body_of("chat", 1, tools=[{}])).encode()
    stream = StreamContinuation("/v1/chat/completions", body, None, KeptText(limit, "a"))
    stream.add(chat_event("text " * 10_000))
    assert limit.held > 50_000
    stream.add(chat_event(" " * 20_000, tool_calls=[{"index": 0, "id": "a"}]))
    assert limit.held == 0


def test_texts_are_given_back_however_a_stream_ends(running: Running, stories: Plan) -> None:
    assert running.server is not None
    limit = running.server.proxy._exchanges.kept_text
    for plan in ([], [(4, "in")], [(4, "says")]):
        stories(plan)
        stream_from(running, body_of("chat", 1))
        until(lambda: limit.held == 0)


def test_after_its_last_event_nothing_remains_of_a_stream() -> None:
    """The client has the end already, even if the connection breaks before the last chunk."""
    event = {"choices": [{"index": 0, "text": "[DONE]", "finish_reason": None}]}
    stream = StreamContinuation("/v1/completions", json.dumps(body_of("completion", 1)).encode())
    data = f"data: {json.dumps(event)}\n\n".encode()
    assert stream.add(data) == data and not stream.is_complete, "its text only looks like the end"
    assert stream.add(DONE) == DONE and stream.is_complete and stream.prepare_rest() == Rest()


def test_an_engine_that_is_not_known_to_continue_a_chat_is_not_asked(loop: Loop) -> None:
    """It would begin the answer again, and the client would get its first words twice."""
    running = story_router(loop, 2)
    try:
        assert running.server is not None
        for engine in running.engines:
            engine.models = [{"id": "small", "owned_by": "me"}]
        known = running.server.backends.known
        until(lambda: all(each.models["small"]["owned_by"] == "me" for each in known.values()))
        for engine in running.engines:
            assert isinstance(engine, StoryEngine)
            engine.deaths = [(4, "in")]
        assert "went away" in stream_from(running, body_of("chat", 1)).error
        assert stream_from(running, body_of("completion", 1)).done, "any engine continues a text"
    finally:
        running.close()


def test_a_server_that_refuses_the_rest_is_passed_over(running: Running, stories: Plan) -> None:
    stories([(4, "in")])
    received = stream_from(running, body_of("chat", 1, refuse_rest=True))
    assert received.error and not received.done
    sent = sum(len(engine.seen) for engine in running.engines)
    stream_from(running, body_of("chat", 1))
    assert sum(len(engine.seen) for engine in running.engines) == sent + 1


@pytest.mark.parametrize("retries", [{"most": 0}, {"continue_streams": False}])
def test_it_can_be_switched_off(loop: Loop, retries: dict[str, Any]) -> None:
    running = story_router(loop, 2, retries=retries)
    try:
        for engine in running.engines:
            assert isinstance(engine, StoryEngine)
            engine.deaths = [(4, "before")]
        received = stream_from(running, body_of("chat", 1))
        assert "went away" in received.error and not received.done
    finally:
        running.close()


def test_each_continuation_counts_as_a_retry(loop: Loop) -> None:
    running = story_router(loop, 5, retries={"most": 2}, health={"failures": 1000})
    try:
        deaths = [(3, "in")] * 4
        for engine in running.engines:
            assert isinstance(engine, StoryEngine)
            engine.deaths = deaths
        received = stream_from(running, body_of("completion", 1, max_tokens=30))
        assert received.error and len(deaths) == 1
        assert sum(len(engine.seen) for engine in running.engines) == 3
    finally:
        running.close()
