"""What cannot be served is reported in OpenAI's form, and costs nothing."""

from __future__ import annotations

from typing import Any

import pytest
from tests.lab.door import Door

pytestmark = pytest.mark.engine
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.mark.brief(every=5)
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
        (COMPLETIONS, {"prompt": "a", "n": 0}, ">= 1", "n"),
        (COMPLETIONS, {"prompt": "a", "n": 129}, "<= 128", "n"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "<= 20", "logprobs"),
        (COMPLETIONS, {"prompt": "a", "top_k": -2}, ">= -1", "top_k"),
        (COMPLETIONS, {"prompt": "a", "top_k": 1.5}, "Expected `int", "top_k"),
        (COMPLETIONS, {"prompt": "a", "min_p": 1.5}, "<= 1", "min_p"),
        (COMPLETIONS, {"prompt": "a", "min_tokens": -1}, ">= 0", "min_tokens"),
        (COMPLETIONS, {"prompt": "a", "min_tokens": 9, "max_tokens": 8}, "at most 8", "min_tokens"),
        (COMPLETIONS, {"prompt": "a", "repetition_penalty": 0}, "> 0", "repetition_penalty"),
        (COMPLETIONS, {"prompt": "a", "presence_penalty": 2.5}, "<= 2", "presence_penalty"),
        (COMPLETIONS, {"prompt": "a", "frequency_penalty": -2.5}, ">= -2", "frequency_penalty"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"git": 1}}, "by their ids", "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"8192": 1}}, "outside 0 to 8191", "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [8192]}, "outside", "stop_token_ids"),
        (COMPLETIONS, {"prompt": "a", "allowed_token_ids": []}, "allows nothing", "allowed_token_ids"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}, "not supported", "best_of"),
        (COMPLETIONS, {"prompt": "a", "use_beam_search": True}, "not supported", "use_beam_search"),
        (COMPLETIONS, {"prompt": "a", "bad_words": ["b"]}, "not supported", "bad_words"),
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 0}, "not supported", "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": {}}}, "not supported", "structured_outputs"),
        (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 5}, "not supported", "truncate_prompt_tokens"),
        (COMPLETIONS, {"prompt": "a", "priority": 1}, "not supported", "priority"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "streams", "stream_options"),
        (CHATS, {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "logprobs", "top_logprobs"),
        (CHATS, {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}, "not", "tool_choice"),
        (CHATS, {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "not", "chat_template"),
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
    # By these words litellm raises ContextWindowExceededError, upon which it can go on with another model.
    assert reply.body["error"]["message"].startswith("This model's maximum context length is ")


def test_another_model_and_another_path_are_not_found(door: Door) -> None:
    reply = door.ask(COMPLETIONS, {"prompt": "a", "model": "gpt-4"})
    assert (reply.status, reply.body["error"]["code"]) == (404, "model_not_found")
    assert door.ask("/v1/embeddings", {}).body["error"]["message"].startswith("POST /v1/embeddings")
    unknown, wrong = door.ask("/v1/embeddings", {}), door.ask(COMPLETIONS)
    assert (unknown.status, unknown.body["error"]["code"]) == (404, None)
    assert (wrong.status, wrong.body["error"]["code"]) == (405, "method_not_supported")
    assert {error.body["error"]["type"] for error in (reply, unknown, wrong)} == {"invalid_request_error"}


def test_what_asks_for_nothing_is_taken(door: Door) -> None:
    said = {"n": 1, "best_of": 1, "echo": False, "suffix": "", "priority": 0, "bad_words": [], "top_k": -1, "min_p": 0}
    ignored = {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "length_penalty": 2.0, "not_known": 1}
    plain = door.complete("The file", 8)["choices"]
    assert door.complete("The file", 8, **said, **ignored)["choices"] == plain


def test_a_body_of_nine_megabytes_is_refused(door: Door) -> None:
    reply = door.ask(COMPLETIONS, {"prompt": "a" * (9 << 20)})
    assert reply.status == 413 and "8388608" in reply.body["error"]["message"]


@pytest.mark.brief()
def test_a_megabyte_of_prompt_is_answered_and_others_meanwhile(door: Door) -> None:
    assert door.ask(COMPLETIONS, {"prompt": "word " * 200_000}).status == 400
    assert door.complete("a", 1)["usage"]["completion_tokens"] == 1
