"""Responses and Messages through `skymemory route`: passed to engines that have them, translated at all others."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.router.chat_engine import CHAT, ChatEngine
from tests.router.running import Answer, Loop, Running, assert_no_cycles, until

from skymemory.router.api_keys import new_key, with_key
from skymemory.router.apis.translation import StreamTranslation, Translation

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
ALL = frozenset((CHAT, RESPONSES, MESSAGES, COUNT))
LOOKS = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
LOOK = {"name": "look", "input_schema": {"type": "object", "properties": {}}}


class Doors(Running):
    """A router in front of scripted engines that have some paths."""

    def __init__(self, loop: Loop, *has: frozenset[str], **settings: Any) -> None:
        super().__init__(loop)
        for number, each in enumerate(has):
            engine = ChatEngine(f"e{number}", has=each)
            loop.run(engine.start())
            self.engines.append(engine)
        self.restart(**settings)

    @property
    def scripted(self) -> list[ChatEngine]:
        return [engine for engine in self.engines if isinstance(engine, ChatEngine)]

    def respond(self, said: Any, **more: Any) -> Answer:
        return self.ask("POST", RESPONSES, {"model": "small", "input": said, **more})

    def message(self, said: Any, **more: Any) -> Answer:
        turn = {"role": "user", "content": said}
        return self.ask("POST", MESSAGES, {"model": "small", "max_tokens": 9, "messages": [turn], **more})


@pytest.fixture
def doors(loop: Loop) -> Iterator[Callable[..., Doors]]:
    made: list[Doors] = []

    def start(*has: frozenset[str], **settings: Any) -> Doors:
        made.append(Doors(loop, *(has or (frozenset((CHAT,)),)), **settings))
        return made[-1]

    yield start
    for each in made:
        each.close()


def events(answer: Answer) -> list[dict[str, Any]]:
    """Of a stream, whose names must be those in their data."""
    found = []
    for block in answer.body.decode().split("\n\n")[:-1]:
        if block.startswith(":"):
            continue  # a comment
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


BOTH = pytest.mark.parametrize("has", [ALL, frozenset((CHAT,))], ids=["passed", "translated"])


@BOTH
def test_an_answer_of_responses(doors: Callable[..., Doors], has: frozenset[str]) -> None:
    door = doors(has)
    answer = door.respond("say hello", instructions="Be short.", store=True, metadata={"a": "b"})
    assert answer.status == 200, answer.body
    response = answer.json
    assert (response["object"], response["status"], response["store"]) == ("response", "completed", False)
    assert response["output"][0]["content"][0]["text"] == "hello" and response["metadata"] == {"a": "b"}
    assert response["usage"]["input_tokens"] > 0 and int(answer.headers["Content-Length"]) == len(answer.body)
    path, asked = door.scripted[0].asked[-1]
    assert (path == CHAT) is (RESPONSES not in has)
    if path == CHAT:
        assert [turn["role"] for turn in asked["messages"]] == ["system", "user"] and "store" not in asked


@BOTH
def test_a_stream_of_responses(doors: Callable[..., Doors], has: frozenset[str]) -> None:
    answer = doors(has).respond("say hello there", stream=True)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    got = events(answer)
    assert [each["sequence_number"] for each in got] == list(range(len(got)))
    kinds = [each["type"] for each in got]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(each["delta"] for each in got if each["type"].endswith("text.delta")) == "hello there"
    assert got[-1]["response"]["output"][0]["content"][0]["text"] == "hello there"
    assert got[-1]["response"]["usage"]["output_tokens"] == 3


@BOTH
def test_calls_of_tools_and_their_results_in_responses(doors: Callable[..., Doors], has: frozenset[str]) -> None:
    door = doors(has)
    said = [{"role": "user", "content": 'call look {"at": 1} and look {"at": 2}'}]
    whole = door.respond(said, tools=[LOOKS]).json["output"]
    streamed = events(door.respond(said, tools=[LOOKS], stream=True))
    assert streamed[-1]["response"]["output"] == whole
    assert [(item["type"], item["name"], item["arguments"]) for item in whole] == [
        ("function_call", "look", '{"at": 1}'),
        ("function_call", "look", '{"at": 2}'),
    ]
    results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "a wall"} for item in whole]
    final = door.respond([*said, *whole, *results], tools=[LOOKS]).json
    assert final["output"][0]["content"][0]["text"] == "heard a wall"


@BOTH
def test_an_answer_of_messages(doors: Callable[..., Doors], has: frozenset[str]) -> None:
    door = doors(has)
    answer = door.message("say hello", system="Be short.", stop_sequences=["x"])
    assert answer.status == 200, answer.body
    message = answer.json
    assert message["content"] == [{"type": "text", "text": "hello"}] and message["stop_reason"] == "end_turn"
    again = door.message("say hello", system="Be short. " * 30).json["usage"]
    last = door.message("say hello", system="Be short. " * 30).json["usage"]
    assert last["cache_read_input_tokens"] > 0
    assert last["input_tokens"] + last["cache_read_input_tokens"] == again["input_tokens"]


@BOTH
def test_a_stream_of_messages(doors: Callable[..., Doors], has: frozenset[str]) -> None:
    got = events(doors(has).message("think well", stream=True))
    kinds = [each["type"] for each in got]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-2:] == ["message_delta", "message_stop"]
    assert [each["content_block"]["type"] for each in got if each["type"] == "content_block_start"] == [
        "thinking",
        "text",
    ]
    assert "".join(each["delta"].get("thinking", "") for each in got if each["type"] == "content_block_delta") == "well"
    assert got[-2]["delta"]["stop_reason"] == "end_turn" and got[-2]["usage"]["output_tokens"] == 3


@BOTH
def test_calls_of_tools_and_their_results_in_messages(doors: Callable[..., Doors], has: frozenset[str]) -> None:
    door = doors(has)
    message = door.message('call look {"at": 1}', tools=[LOOK], tool_choice={"type": "any"}).json
    assert message["content"] == [{"type": "tool_use", "id": "call_0", "name": "look", "input": {"at": 1}}]
    assert message["stop_reason"] == "tool_use"
    got = events(door.message('call look {"at": 1}', tools=[LOOK], stream=True))
    pieces = [each["delta"]["partial_json"] for each in got if each["type"] == "content_block_delta"]
    assert json.loads("".join(pieces)) == {"at": 1} and got[-2]["delta"]["stop_reason"] == "tool_use"
    turns = [
        {"role": "user", "content": "call look"},
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_0", "content": "a wall"}]},
    ]
    assert door.message("", messages=turns, tools=[LOOK]).json["content"][0]["text"] == "heard a wall"


@BOTH
def test_tokens_are_counted_as_a_message_counts_them(doors: Callable[..., Doors], has: frozenset[str]) -> None:
    door = doors(has)
    turn = {"role": "user", "content": "say it " * 40}
    counted = door.ask("POST", COUNT, {"model": "small", "messages": [turn]})
    usage = door.message(turn["content"]).json["usage"]
    assert counted.status == 200 and counted.json == {
        "input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]
    }


def test_an_engine_is_asked_once_for_what_it_has_not(doors: Callable[..., Doors]) -> None:
    door = doors(frozenset((CHAT,)))
    assert [door.respond("x").status for _ in range(4)] == [200] * 4
    assert [door.message("x").status for _ in range(4)] == [200] * 4
    engine = door.scripted[0]
    assert engine.refused == [RESPONSES, MESSAGES] and [path for path, _ in engine.asked] == [CHAT] * 8


@pytest.mark.parametrize("status", [405, 501])
def test_other_ways_to_say_that_it_is_missing(doors: Callable[..., Doors], status: int) -> None:
    door = doors(frozenset((CHAT,)))
    door.scripted[0].missing_status = status
    assert door.respond("say a").json["output"][0]["content"][0]["text"] == "a"


def test_a_missing_model_is_not_taken_for_a_missing_api(doors: Callable[..., Doors]) -> None:
    door = doors(ALL)
    lost = door.respond("x", model="gone")
    assert lost.status == 404 and "no model `gone`" in lost.json["error"]["message"]
    refused = door.message("x", model="gone")
    assert refused.status == 404 and refused.json == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "no model `gone`"},
    }
    door.scripted[0].asked.clear()
    assert door.respond("x").status == 200 and door.scripted[0].asked[0][0] == RESPONSES


def test_a_fleet_of_both_kinds_answers_alike(doors: Callable[..., Doors]) -> None:
    door = doors(ALL, frozenset((CHAT,)), strategy="round-robin")
    answers = [door.respond("say so").json["output"][0]["content"] for _ in range(6)]
    assert answers == [answers[0]] * 6 and all(engine.asked for engine in door.scripted)


def test_limits_of_tokens_are_translated_to_a_status(doors: Callable[..., Doors]) -> None:
    door = doors(frozenset((CHAT,)))
    door.scripted[0].finish = "length"
    response = door.respond("say a").json
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events(door.respond("say a", stream=True))[-1]["type"] == "response.incomplete"
    assert door.message("say a").json["stop_reason"] == "max_tokens"


def test_a_stream_ends_with_its_last_event_and_not_with_the_engines(doors: Callable[..., Doors]) -> None:
    door = doors(frozenset((CHAT,)), timeouts={"idle": 2})
    door.scripted[0].breaks = "lingers"
    assert events(door.respond("say a", stream=True))[-1]["type"] == "response.completed"
    assert events(door.message("say a", stream=True))[-1]["type"] == "message_stop"


def test_an_engine_is_not_asked_to_compress_what_is_translated(doors: Callable[..., Doors]) -> None:
    door = doors(frozenset((CHAT,)))
    body = {"model": "small", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    door.ask("POST", MESSAGES, body, {"Accept-Encoding": "gzip", "Anthropic-Version": "2023-06-01", "X-Other": "1"})
    passed, translated = (each["headers"] for each in door.scripted[0].seen)
    assert passed["accept-encoding"] == "gzip" and passed["anthropic-version"] and translated["x-other"] == "1"
    assert not {"accept-encoding", "anthropic-version"} & set(translated)


@pytest.mark.parametrize("breaks", ["error", "early", "garbage"])
def test_a_stream_that_breaks_ends_with_an_error_event(doors: Callable[..., Doors], breaks: str) -> None:
    door = doors(frozenset((CHAT,)))
    door.scripted[0].breaks = breaks
    last = events(door.respond("say a", stream=True))[-1]
    assert last["type"] == "response.failed" and last["response"]["error"]["message"]
    message = events(door.message("say a", stream=True))[-1]
    assert message["type"] == "error" and message["error"]["type"] == "api_error"


@BOTH
def test_a_stream_whose_engine_dies_ends_with_an_error_event_and_is_not_whole(
    doors: Callable[..., Doors], has: frozenset[str]
) -> None:
    door = doors(has)
    door.scripted[0].breaks = "dies"
    turns = [{"role": "user", "content": "say a"}]
    for path, body in ((RESPONSES, {"input": turns}), (MESSAGES, {"messages": turns, "max_tokens": 9})):
        response = door.open("POST", path, {"model": "small", "stream": True, **body})
        with pytest.raises(http.client.IncompleteRead) as caught:
            response.read()
        last = events(Answer(200, response.headers, caught.value.partial))[-1]
        assert last["type"] == ("error" if path == MESSAGES or path in has else "response.failed")
        response.close()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"input": "x", "conversation": "conv_1"}, "conversation"),
        (RESPONSES, {"input": "x", "background": True}, "background"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        (RESPONSES, {"input": 3}, "input"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"role": "user"}]}, "input[0].content"),
        (RESPONSES, {"input": [{"role": "root", "content": "x"}]}, "input[0].role"),
        (MESSAGES, {"messages": []}, "messages"),
        (MESSAGES, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (MESSAGES, {"messages": [3]}, "messages[0]"),
    ],
)
@BOTH
def test_what_no_engine_could_answer_is_refused(
    doors: Callable[..., Doors], has: frozenset[str], path: str, body: dict[str, Any], param: str
) -> None:
    door = doors(has)
    refused = door.ask("POST", path, {"model": "small", "max_tokens": 1, **body})
    error = refused.json["error"]
    assert refused.status == 400 and f"`{param}`" in error["message"] and error["type"] == "invalid_request_error"
    assert path == MESSAGES or error["param"] == param
    assert not door.scripted[0].asked and not door.scripted[0].refused


def test_tools_that_only_the_engine_may_have_are_passed_or_refused(doors: Callable[..., Doors]) -> None:
    door = doors(frozenset((CHAT,)))
    refused = door.respond("x", tools=[{"type": "web_search"}])
    assert refused.status == 400 and "web_search" in refused.json["error"]["message"]
    refused = door.message("x", tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert refused.status == 400 and refused.json["error"]["type"] == "invalid_request_error"
    assert not door.scripted[0].asked


def test_keys_come_in_either_header_and_reach_no_engine(doors: Callable[..., Doors], tmp_path: Any) -> None:
    file, key = tmp_path / "keys.toml", new_key(bytes(32))
    file.write_text(with_key("[tenants.gold]\n", "gold", key))
    door = doors(frozenset((CHAT,)), door={"api_keys": str(file)})
    body = {"model": "small", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    refused = door.ask("POST", MESSAGES, body, {"x-api-key": "sk-wrong"})
    assert refused.status == 401 and refused.json["error"]["type"] == "authentication_error"
    assert door.ask("POST", MESSAGES, body, {"x-api-key": key}).status == 200
    assert not {"x-api-key", "authorization"} & set(door.scripted[0].seen[-1]["headers"])


def test_an_engines_key_comes_as_it_reads_it(doors: Callable[..., Doors]) -> None:
    door = doors(frozenset((CHAT,)))
    body = {"model": "small", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    assert door.ask("POST", MESSAGES, body, {"x-api-key": "engine's"}).status == 200
    passed, translated = (each["headers"] for each in door.scripted[0].seen)
    assert passed["x-api-key"] == "engine's" and translated["authorization"] == "Bearer engine's"


def test_a_fault_of_the_translation_ends_its_request_and_is_counted(
    doors: Callable[..., Doors], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> bytes:
        raise ZeroDivisionError

    door = doors()
    monkeypatch.setattr(Translation, "answer", fails)
    assert door.respond("hi").status == 500
    monkeypatch.setattr(StreamTranslation, "read", fails)
    assert door.respond("hi", stream=True).status == 500
    assert door.metric("faults_total", where="request") == 2
    monkeypatch.undo()
    assert door.respond("hi").status == 200


def test_answers_that_are_no_chat_completion_are_502(doors: Callable[..., Doors]) -> None:
    door = doors(frozenset((CHAT,)), retries={"most": 0})
    engine = door.scripted[0]
    engine._whole = lambda asked: ["garbage"]  # type: ignore[method-assign, assignment, return-value]
    assert door.respond("x").status == 502
    assert door.message("x").json["error"]["type"] == "api_error"


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/responses"])
def test_websockets_are_refused_with_the_reason(doors: Callable[..., Doors], path: str) -> None:
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "YQ==",
    }
    refused = doors(ALL).ask("GET", path, None, upgrade)
    assert refused.status == 501 and "HTTP" in refused.json["error"]["message"]


def test_unknown_paths_are_refused_or_sent_by_load(doors: Callable[..., Doors]) -> None:
    door = doors(ALL)
    assert door.ask("POST", "/v1/fancy", {}).status == 404 and not door.scripted[0].refused
    door.close_server()
    door.restart(unknown_paths="load")
    assert door.ask("POST", "/v1/fancy", {}).json == {"detail": "Not Found"} and door.scripted[0].refused == [
        "/v1/fancy"
    ]
    for stateful in ("/v1/responses/resp_1", "/v1/files", "/v1/messages/batches", "/v1/load_lora_adapter"):
        assert "detail" not in door.ask("POST", stateful, {}).json
    assert door.ask("GET", "/health").json == {} and door.ask("POST", "/metrics", {}).status == 405


# Routing


def turns_of(seed: int) -> list[tuple[str, str]]:
    """System prompt and question of requests: six system prompts, in random order."""
    draw = random.Random(seed)
    systems = [f"Assistant {number}. " + " ".join(str(draw.random()) for _ in range(60)) for number in range(6)]
    return [(draw.choice(systems), f"Question {draw.randrange(10**6)}") for _ in range(60)]


def hit_rate(door: Doors, ask: Callable[[Doors, str, str], Answer]) -> float:
    for system, question in turns_of(7):
        assert ask(door, system, question).status == 200
    engines = door.scripted
    return sum(each.cached_letters for each in engines) / sum(each.prompt_letters for each in engines)


def by_chat(door: Doors, system: str, question: str) -> Answer:
    turns = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return door.ask("POST", CHAT, {"model": "small", "messages": turns})


WAYS: dict[str, Callable[[Doors, str, str], Answer]] = {
    "instructions": lambda door, system, question: door.respond(question, instructions=system),
    "items": lambda door, system, question: door.respond(
        [
            {"role": "developer", "content": [{"type": "input_text", "text": system}]},
            {"role": "user", "content": [{"type": "input_text", "text": question}]},
        ]
    ),
    "messages": lambda door, system, question: door.message(question, system=system),
    "blocks": lambda door, system, question: door.message(
        [{"type": "text", "text": question}],
        system=[
            {"type": "text", "text": f"x-anthropic-billing-header: cch={hash(question)}"},
            {"type": "text", "text": system, "cache_control": {"type": "ephemeral"}},
        ],
    ),
}


@pytest.mark.brief("passed-instructions", "translated-messages")
@pytest.mark.parametrize("way", WAYS)
@BOTH
def test_the_hit_rate_is_that_of_chat(doors: Callable[..., Doors], has: frozenset[str], way: str) -> None:
    settings = {"strategy": "approximate", "seed": 3}
    chat, other = doors(has, has, has, **settings), doors(has, has, has, **settings)
    expected = hit_rate(chat, by_chat)
    assert expected > 0.7 and hit_rate(other, WAYS[way]) == pytest.approx(expected, abs=0.01)


@pytest.mark.brief("passed-/v1/messages-False", "translated-/v1/responses-False", "translated-/v1/messages-True")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@BOTH
def test_what_engines_report_as_cached_is_counted(
    doors: Callable[..., Doors], has: frozenset[str], path: str, stream: bool
) -> None:
    door = doors(has)
    said = "say " + "words " * 4000
    for _ in range(2):
        assert (door.respond if path == RESPONSES else door.message)(said, stream=stream).status == 200
    engine = door.scripted[0]
    until(lambda: door.metric("reported_cached_tokens_total", server="e0") == engine.cached_letters // 4)
    assert engine.cached_letters and door.metric("reported_prompt_tokens_total", server="e0") > 0


@BOTH
def test_no_request_of_them_is_left_to_the_garbage_collector(doors: Callable[..., Doors], has: frozenset[str]) -> None:
    door = doors(has)

    def ask() -> None:
        for stream in (False, True):
            assert door.message("hello", stream=stream).status == door.respond("hello", stream=stream).status == 200
        assert door.message("hello " * 50_000).status == 200, "translated in a thread"
        assert door.message(7).status == 400
        assert has == ALL or door.respond([{"type": "image_file"}]).status == 400

    assert_no_cycles(ask)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("metadata", '{"a": ' + "9" * 4301 + "}", "`metadata` cannot be read: Integer value out of range"),
        ("temperature", "1e400", "`temperature` cannot be read: Number out of range"),
        ("max_output_tokens", "9" * 309, "`max_output_tokens` is not a whole number of at most 64 bits"),
        ("max_output_tokens", '"many"', "`max_output_tokens` is not a whole number of at most 64 bits"),
        ("input", "true", "`input` is neither: expected a text or a list of items"),
    ],
)
@BOTH
def test_what_cannot_be_read_is_named(
    doors: Callable[..., Doors], has: frozenset[str], field: str, value: str, says: str
) -> None:
    body = f'{{"model": "small", "input": "hello", "{field}": {value}}}'
    if field == "input":
        body = f'{{"model": "small", "input": {value}}}'
    answer = doors(has).ask("POST", RESPONSES, body.encode())
    assert answer.status == 400 and says in answer.json["error"]["message"], answer.body
