"""Chats and answers drawn by hypothesis, and how their streams are read by a client."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
names = st.text("abcdefg_", min_size=1, max_size=8)
arguments = st.dictionaries(names, st.one_of(words, st.integers(-5, 5)), max_size=3).map(json.dumps)
calls = st.lists(
    st.builds(
        lambda number, name, said: {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": name, "arguments": said},
        },
        st.uuids().map(str),
        names,
        arguments,
    ),
    max_size=3,
)


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    """What an engine answers: reasoning, text and calls, each of them perhaps."""
    message: dict[str, Any] = {"role": "assistant", "content": draw(st.one_of(st.none(), words))}
    if draw(st.booleans()):
        message["reasoning"] = draw(words)
    if made := draw(calls):
        message["tool_calls"] = made
    return message


def answer(message: dict[str, Any], finish: str = "stop") -> dict[str, Any]:
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 64},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    return {
        "id": "chatcmpl-abc",
        "created": 1_700_000_000,
        "model": "small",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": usage,
    }


def stream_of(whole: dict[str, Any], size: int = 4) -> bytes:
    """The same as a stream, with pieces of this many letters."""
    choice = whole["choices"][0]
    message, base = choice["message"], {name: whole[name] for name in ("id", "created", "model")}

    def pieces(text: str | None) -> list[str]:
        return [(text or "")[at : at + size] for at in range(0, len(text or ""), size)]

    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": each} for each in pieces(message.get("reasoning"))]
    deltas += [{"content": each} for each in pieces(message.get("content"))]
    for at, call in enumerate(message.get("tool_calls", ())):
        first = {**call, "index": at, "function": {"name": call["function"]["name"], "arguments": ""}}
        deltas.append({"tool_calls": [first]})
        for each in pieces(call["function"]["arguments"]):
            deltas.append({"tool_calls": [{"index": at, "function": {"arguments": each}}]})
    chunks = [{**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({**base, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    chunks.append({**base, "choices": [], "usage": whole["usage"]})
    return b"".join(b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"


def events_in(stream: bytes) -> list[dict[str, Any]]:
    found = []
    for block in stream.split(b"\n\n")[:-1]:
        name, data = block.split(b"\n")
        found.append(json.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + found[-1]["type"].encode()
    return found


def response_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a client puts together of a stream of Responses by deltas alone, each with its text."""
    items: list[dict[str, Any]] = []
    for at, event in enumerate(events):
        assert event["sequence_number"] == at
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append({**event["item"], "said": ""})
        elif kind.endswith(".delta"):
            item = items[event["output_index"]]
            assert item["id"] == event["item_id"]
            item["said"] += event["delta"]
        elif kind == "output_item.done":
            assert event["item"]["id"] == items[event["output_index"]]["id"]
            items[event["output_index"]]["done"] = event["item"]
    return items


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together of a stream of Messages."""
    assert [event["type"] for event in events[:1] + events[-2:]] == ["message_start", "message_delta", "message_stop"]
    message, open_index = events[0]["message"], None
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert open_index is None and event["index"] == len(message["content"])
            open_index = event["index"]
            message["content"].append({**event["content_block"], "json": ""})
            continue
        assert event["index"] == open_index, "one block at a time"
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            open_index = None
            said = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(said or "{}")
            continue
        delta = event["delta"]
        name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}.get(delta["type"])
        if name is not None:
            block[name] += delta[{"json": "partial_json"}.get(name, name)]
    return {**message, **events[-2]["delta"], "usage": {**message["usage"], **events[-2]["usage"]}}
