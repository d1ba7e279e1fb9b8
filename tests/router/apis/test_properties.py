"""Whatever an engine answers, stream and whole are the same; whatever a client sends is translated or refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.router.apis.chats import answer, calls, events_in, message_of, messages, response_of, stream_of, words

from skymemory.router.api_error import ApiError
from skymemory.router.apis.chat import EventLines, PartReader, UnreadableAnswer
from skymemory.router.apis.translation import API_PATHS, COUNT_TOKENS, MESSAGES, RESPONSES, Translation, prompt_body
from skymemory.router.prompts.reader import CHAT_COMPLETIONS, PromptReader
from skymemory.router.settings import Prompts, Settings

ASKED = {
    RESPONSES: b'{"model":"small","input":"x","stream":true}',
    MESSAGES: b'{"model":"small","max_tokens":9,"messages":[{"role":"user","content":"x"}],"stream":true}',
}
sizes = st.lists(st.integers(1, 40), min_size=1)


def in_pieces(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = [], 0
    while at < len(data):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[at : at + size])
        at += size
    return pieces


@pytest.mark.parametrize("path", ASKED)
@given(messages(), st.sampled_from(["stop", "length", "tool_calls"]), sizes, st.sampled_from(["\n", "\r\n"]))
def test_a_stream_is_the_same_in_whatever_pieces_it_comes(
    path: str, message: dict[str, Any], finish: str, sizes: list[int], end: str
) -> None:
    stream = stream_of(answer(message, finish)).replace(b"\n", end.encode())
    once, pieces = Translation(path, ASKED[path]).stream(), Translation(path, ASKED[path]).stream()
    made = b"".join(pieces.read(piece) for piece in in_pieces(stream, sizes))
    assert made == once.read(stream) and pieces.end() == b"" and pieces.has_ended


@given(messages(), st.sampled_from(["stop", "length", "tool_calls"]))
def test_a_stream_of_responses_is_the_whole_answer(message: dict[str, Any], finish: str) -> None:
    translation = Translation(RESPONSES, ASKED[RESPONSES])
    whole = translation.answer_object(answer(message, finish))
    events = events_in(translation.stream().read(stream_of(answer(message, finish))))
    assert events[-1]["response"] == whole
    items = response_of(events)
    assert [item["done"] for item in items] == whole["output"]
    for item in items:
        done = item["done"]
        assert item["said"] == (done["arguments"] if done["type"] == "function_call" else done["content"][0]["text"])
    assert whole["status"] == ("incomplete" if finish == "length" else "completed")


@given(messages(), st.sampled_from(["stop", "length", "tool_calls"]))
def test_a_stream_of_messages_is_the_whole_answer(message: dict[str, Any], finish: str) -> None:
    translation = Translation(MESSAGES, ASKED[MESSAGES])
    whole = translation.answer_object(answer(message, finish))
    assert message_of(events_in(translation.stream().read(stream_of(answer(message, finish))))) == whole
    assert whole["usage"] == {
        "input_tokens": 36,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 64,
        "output_tokens": 7,
    }


@given(calls.filter(lambda made: len(made) > 1), st.randoms())
def test_calls_whose_pieces_come_mixed_are_put_in_order(made: list[dict[str, Any]], dice: Any) -> None:
    lines = [
        [(at, {**call, "function": {"name": call["function"]["name"], "arguments": ""}})]
        + [(at, {"function": {"arguments": letter}}) for letter in call["function"]["arguments"]]
        for at, call in enumerate(made)
    ]
    mixed = []
    while any(lines):
        line = dice.choice([each for each in lines if each])
        mixed.append(line.pop(0))
    reader = PartReader()
    for at, call in mixed:
        delta = {"tool_calls": [{**call, "index": at}]}
        list(reader.read({"choices": [{"delta": delta, "finish_reason": None}]}))
    list(reader.end())
    said = {(part.call_id, part.name, part.text) for part in reader.parts}
    assert said == {(each["id"], each["function"]["name"], each["function"]["arguments"]) for each in made}


# Requests


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Turns that chat completions, Responses and Messages can say alike."""
    turns: list[dict[str, Any]] = [{"role": "system", "content": draw(words)}]
    for _ in range(draw(st.integers(1, 3))):
        turns.append({"role": "user", "content": draw(words)})
        said: dict[str, Any] = {"role": "assistant", "content": draw(st.one_of(st.none(), words))}
        if made := draw(calls):
            said["tool_calls"] = made
        if said["content"] is None and not made:
            said["content"] = "ok"
        turns.append(said)
        turns += [{"role": "tool", "tool_call_id": call["id"], "content": draw(words)} for call in made]
    return turns


def as_responses(turns: list[dict[str, Any]]) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for turn in turns[1:]:
        if turn["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": turn["tool_call_id"], "output": turn["content"]})
            continue
        kind = "output_text" if turn["role"] == "assistant" else "input_text"
        if turn["content"] is not None:
            items.append({"role": turn["role"], "content": [{"type": kind, "text": turn["content"]}]})
        for call in turn.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return {"model": "small", "instructions": turns[0]["content"], "input": items}


def as_messages(turns: list[dict[str, Any]]) -> dict[str, Any]:
    said: list[dict[str, Any]] = []
    for turn in turns[1:]:
        if turn["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": turn["tool_call_id"], "content": turn["content"]}
            if said[-1]["role"] == "user":
                said[-1]["content"].append(result)
            else:
                said.append({"role": "user", "content": [result]})
            continue
        blocks = [] if turn["content"] is None else [{"type": "text", "text": turn["content"]}]
        for call in turn.get("tool_calls", ()):
            function = call["function"]
            use = {"id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
            blocks.append({"type": "tool_use", **use})
        if turn["role"] == "user" and said and said[-1]["role"] == "user":
            said[-1]["content"] += blocks
        else:
            said.append({"role": turn["role"], "content": blocks})
    return {"model": "small", "max_tokens": 9, "system": turns[0]["content"], "messages": said}


def packed(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With arguments as Messages make them of an object."""
    for turn in turns:
        for call in turn.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"), ensure_ascii=False)
    return turns


@given(chats())
def test_the_turns_that_an_engine_gets_are_those_of_the_chat(turns: list[dict[str, Any]]) -> None:
    made = json.loads(Translation(RESPONSES, json.dumps(as_responses(turns)).encode()).body)
    assert made["messages"] == turns


@given(chats().map(packed))
def test_the_prompt_that_is_routed_is_that_of_the_chat(turns: list[dict[str, Any]]) -> None:
    reader = PromptReader(Settings(prompts=Prompts(block_bytes=8)))
    bodies = {
        CHAT_COMPLETIONS: {"model": "small", "messages": turns},
        RESPONSES: as_responses(turns),
        MESSAGES: as_messages(turns),
    }
    read = {
        path: reader.read(path, {}, json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()).prompt
        for path, body in bodies.items()
    }
    expected = read[CHAT_COMPLETIONS]
    for prompt in read.values():
        assert prompt.head == expected.head and prompt.blocks.tolist() == expected.blocks.tolist()


values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.text(max_size=9), st.just("message")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "role",
                    "content",
                    "text",
                    "input",
                    "output",
                    "call_id",
                    "name",
                    "arguments",
                    "id",
                    "tool_use_id",
                    "source",
                    "data",
                    "function",
                    "format",
                    "schema",
                    "effort",
                    "user_id",
                    "image_url",
                    "summary",
                    "tools",
                    "mode",
                    "delta",
                    "choices",
                    "tool_calls",
                    "index",
                    "usage",
                ]
            ),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=12,
)
FIELDS = [
    "model",
    "input",
    "instructions",
    "max_output_tokens",
    "tools",
    "tool_choice",
    "text",
    "reasoning",
    "include",
    "top_logprobs",
    "stream",
    "store",
    "messages",
    "system",
    "max_tokens",
    "stop_sequences",
    "metadata",
    "output_config",
    "thinking",
    "temperature",
    "parallel_tool_calls",
]


def check_is_translated_or_refused(path: str, fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    for read in (Translation, prompt_body):
        try:
            read(path, body)
        except ApiError as error:
            assert error.status == 400 and error.message


@pytest.mark.brief()
@pytest.mark.parametrize("path", sorted(API_PATHS))
@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=8))
def test_any_body_is_translated_or_refused(path: str, fields: dict[str, Any]) -> None:
    check_is_translated_or_refused(path, fields)


@pytest.mark.parametrize("path", ASKED)
@given(st.lists(st.one_of(values, st.builds(lambda said: {"choices": [{"delta": said}]}, values)), max_size=5))
def test_any_stream_ends_with_an_event_of_its_end(path: str, chunks: list[Any]) -> None:
    stream = Translation(path, ASKED[path]).stream()
    made = b"".join(stream.read(b"data: %s\n\n" % json.dumps(chunk).encode()) for chunk in chunks) + stream.end()
    last = events_in(made)[-1]["type"]
    assert last in ("response.failed", "response.completed", "response.incomplete", "error", "message_stop")


@pytest.mark.parametrize("path", ASKED)
@given(st.one_of(values, st.builds(lambda said: {"choices": [{"message": said, "finish_reason": "stop"}]}, values)))
def test_any_answer_is_translated_or_unreadable(path: str, found: Any) -> None:
    try:
        json.loads(Translation(path, ASKED[path]).answer(json.dumps(found).encode()))
    except UnreadableAnswer as error:
        assert str(error)


ODD: list[Any] = [None, True, 0, 5, -1, 1.5, "", "x", [], [None], ["x"], [5], [[]], {}, {"a": 1}, [{}], [{"type": 5}]]
SOUND: dict[str, dict[str, Any]] = {
    RESPONSES: {
        "model": "m",
        "instructions": "be brief",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "4"}]},
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:x", "detail": "low"}]},
        ],
        "tools": [{"type": "function", "name": "f", "description": "d", "parameters": {}, "strict": True}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "max_output_tokens": 9,
        "stream": True,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
    },
    MESSAGES: {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "be brief"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "so", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "4"}]},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}},
                ],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {}}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "output_config": {"format": {"type": "json_schema", "schema": {}}, "effort": "low"},
        "metadata": {"user_id": "u"},
        "stop_sequences": ["x"],
    },
}
ANSWERED: dict[str, Any] = {
    "id": "i",
    "model": "m",
    "created": 5,
    "choices": [
        {
            "index": 0,
            "message": {
                "content": "hi",
                "reasoning": "so",
                "refusal": "no",
                "tool_calls": [
                    {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            "logprobs": {
                "content": [
                    {
                        "token": "hi",
                        "logprob": -1.0,
                        "bytes": [104, 105],
                        "top_logprobs": [{"token": "hi", "logprob": -1.0, "bytes": [104, 105]}],
                    }
                ]
            },
            "finish_reason": "stop",
            "stop_reason": "x",
        }
    ],
    "usage": {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 1},
    },
}


def with_one_odd(sound: Any) -> Iterator[Any]:
    """Copies in which one value, at any depth, is an odd one."""
    if isinstance(sound, dict | list):
        for key in list(sound) if isinstance(sound, dict) else range(len(sound)):
            for odd in (*ODD, *with_one_odd(sound[key])):
                copied = copy.copy(sound)
                copied[key] = odd
                yield copied


@pytest.mark.parametrize("path", [*SOUND, COUNT_TOKENS])
def test_a_field_of_any_type_is_translated_or_refused(path: str) -> None:
    sound = SOUND[MESSAGES if path == COUNT_TOKENS else path]
    Translation(path, json.dumps(sound).encode())
    for fields in with_one_odd(sound):
        check_is_translated_or_refused(path, fields)


@pytest.mark.brief()
@pytest.mark.parametrize("path", ASKED)
def test_an_answer_with_a_field_of_any_type_is_translated_or_unreadable(path: str) -> None:
    asked = Translation(path, ASKED[path])
    asked.answer(json.dumps(ANSWERED).encode())
    for odd in with_one_odd(ANSWERED):
        body = json.dumps(odd).encode()
        try:
            json.loads(asked.answer(body))
        except UnreadableAnswer as error:
            assert str(error)
        stream = asked.stream()
        last = events_in(stream.read(b"data: %s\n\n" % body) + stream.end())[-1]["type"]
        assert last in ("response.failed", "response.completed", "response.incomplete", "error", "message_stop")


lines = st.lists(st.sampled_from([b"data: a", b"data:b", b"\r", b"\n", b"\r\n", b": c", b"event: x", b"data"]))


@given(st.one_of(st.binary(max_size=300), lines.map(b"".join)), sizes)
@example(b"data: a\r\ndata: b\r\n\r\n", [len(b"data: a\r")])
def test_lines_of_a_stream_are_those_of_the_whole(data: bytes, sizes: list[int]) -> None:
    lines = EventLines()
    whole, parts = list(EventLines().read(data + b"\n\n")), []
    for piece in in_pieces(data + b"\n\n", sizes):
        parts += lines.read(piece)
    assert parts == whole
