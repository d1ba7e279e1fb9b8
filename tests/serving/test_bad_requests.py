"""What cannot be served is told in OpenAI's form, and costs nothing."""

from __future__ import annotations

from typing import Any

import pytest
from tests.serving.door import Door

pytestmark = pytest.mark.engine
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body", "words", "param"),
    [
        (COMPLETIONS, b"{", "not JSON", None),
        (COMPLETIONS, b"\xff\xfe", "not JSON", None),
        (COMPLETIONS, b"[1]", "not as expected", None),
        (COMPLETIONS, {}, "prompt", None),
        (COMPLETIONS, {"prompt": ""}, None, None),
        (COMPLETIONS, {"prompt": []}, "empty", "prompt"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "one prompt", "prompt"),
        (COMPLETIONS, {"prompt": [1, -1]}, "outside", "prompt"),
        (COMPLETIONS, {"prompt": [1, 8192]}, "outside 0 to 8191", "prompt"),
        (COMPLETIONS, {"prompt": [1, True]}, "token ids", "prompt"),
        (COMPLETIONS, {"prompt": [1.5]}, "token ids", "prompt"),
        (COMPLETIONS, b'{"prompt": "\\ud800"}', "not JSON", None),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, ">= 1", "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "8"}, "Expected `int", "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "temperature": 3}, "<= 2", "temperature"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, "> 0", "top_p"),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, "empty", "stop"),
        (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 17}, "at most 16", "stop"),
        (COMPLETIONS, {"prompt": "a", "n": 2}, "not supported", "n"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 1}, "not supported", "logprobs"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, "not supported", "echo"),
        (COMPLETIONS, {"prompt": [5] * 8192}, "8192 tokens", "prompt"),
        (COMPLETIONS, {"prompt": [5] * 8000, "max_tokens": 193}, "8000", "prompt"),
        (CHATS, {"messages": []}, "empty", "messages"),
        (CHATS, {"messages": [{"role": "user"}]}, "'content'", "messages"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text", "messages"),
        (CHATS, {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "not supported", "tools"),
        (CHATS, {"messages": "hello"}, "Expected `array`", "messages"),
    ],
)
def test_is_refused_with_the_reason(door: Door, path: str, body: Any, words: str | None, param: str | None) -> None:
    raw = body if isinstance(body, bytes) else None
    reply = door.ask(path, None if raw is not None else body, raw)
    if words is None:  # an empty text still has the token that begins every text
        assert reply.status == 200
        return
    assert reply.status == 400, reply.body
    error = reply.body["error"]
    assert words in error["message"] and error["type"] == "invalid_request_error" and error["param"] == param


def test_a_prompt_too_long_has_openais_code(door: Door) -> None:
    reply = door.ask(COMPLETIONS, {"prompt": "word " * 9000})
    assert (reply.status, reply.body["error"]["code"]) == (400, "context_length_exceeded")


def test_another_model_and_another_path_are_not_found(door: Door) -> None:
    reply = door.ask(COMPLETIONS, {"prompt": "a", "model": "gpt-4"})
    assert (reply.status, reply.body["error"]["code"]) == (404, "model_not_found")
    assert door.ask("/v1/embeddings", {}).body["error"]["message"].startswith("POST /v1/embeddings")
    assert door.ask("/v1/embeddings", {}).status == 404
    assert door.ask(COMPLETIONS).status == 405


def test_a_body_of_nine_megabytes_is_refused(door: Door) -> None:
    reply = door.ask(COMPLETIONS, {"prompt": "a" * (9 << 20)})
    assert reply.status == 413 and "8388608" in reply.body["error"]["message"]


def test_a_megabyte_of_prompt_is_answered_and_others_meanwhile(door: Door) -> None:
    assert door.ask(COMPLETIONS, {"prompt": "word " * 200_000}).status == 400
    assert door.complete("a", 1)["usage"]["completion_tokens"] == 1
