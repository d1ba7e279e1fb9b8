"""What fields of Responses and Messages become in a chat completion, and which are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skymemory.router.api_error import ApiError
from skymemory.router.apis.translation import MESSAGES, RESPONSES, Translation, error_body, prompt_body

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}


def chat(path: str, **fields: Any) -> dict[str, Any]:
    least = {"input": "x"} if path == RESPONSES else {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    made: dict[str, Any] = json.loads(
        Translation(path, json.dumps({"model": "small", **least, **fields}).encode()).body
    )
    return made


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        (
            {"max_output_tokens": 5, "temperature": 0.5, "top_p": 0.9},
            {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9},
        ),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"store": True, "metadata": {"a": "b"}, "truncation": "auto", "service_tier": "flex"}, {}),
        ({"background": False, "previous_response_id": None, "include": ["reasoning.encrypted_content"]}, {}),
        ({"top_k": 4, "cache_salt": "s", "chat_template_kwargs": {"a": 1}},) * 2,
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        (
            {"text": {"verbosity": "low", "format": {"type": "json_object"}}},
            {"verbosity": "low", "response_format": {"type": "json_object"}},
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
        ),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"parallel_tool_calls": True, "tools": []}, {}),
        (
            {
                "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
                "tool_choice": {"type": "function", "name": "f"},
            },
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
        ),
        (
            {
                "tools": [{"type": "function", "name": name} for name in "fg"],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "g"}],
                },
            },
            {"tools": [{"type": "function", "function": {"name": "g"}}], "tool_choice": "required"},
        ),
    ],
)
def test_fields_of_responses(given: dict[str, Any], becomes: dict[str, Any]) -> None:
    made = chat(RESPONSES, **given)
    assert made.pop("messages") == [{"role": "user", "content": "x"}] and made.pop("model") == "small"
    assert made == becomes


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ({"temperature": 0.5, "top_k": 3, "stop_sequences": ["a"]}, {"temperature": 0.5, "top_k": 3, "stop": ["a"]}),
        ({"metadata": {"user_id": "u"}, "thinking": {"type": "enabled"}, "service_tier": "auto"}, {"user": "u"}),
        (
            {
                "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "cache_control": {}}],
                "tool_choice": {"type": "any"},
            },
            {
                "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
                "tool_choice": "required",
            },
        ),
        (
            {"tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True}},
            {
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "parallel_tool_calls": False,
            },
        ),
        (
            {"output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}}},
            {
                "reasoning_effort": "high",
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
                },
            },
        ),
    ],
)
def test_fields_of_messages(given: dict[str, Any], becomes: dict[str, Any]) -> None:
    made = chat(MESSAGES, **given)
    assert made.pop("messages") == [{"role": "user", "content": "x"}] and made.pop("model") == "small"
    assert made.pop("max_tokens") == 9 and made == becomes


def test_images_are_passed_in_either_form() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}}
    image = {"type": "input_image", "image_url": "data:image/png;base64,QQ=="}
    assert chat(RESPONSES, input=[{"role": "user", "content": [image]}])["messages"][0]["content"] == [part]
    source = {"type": "base64", "media_type": "image/png", "data": "QQ=="}
    block = {"type": "image", "source": source}
    assert chat(MESSAGES, messages=[{"role": "user", "content": [block]}])["messages"][0]["content"] == [part]
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "see"}, block]}
    assert chat(MESSAGES, messages=[{"role": "user", "content": [result]}])["messages"] == [
        {"role": "tool", "tool_call_id": "a", "content": "see"},
        {"role": "user", "content": [part]},
    ]


def test_developers_are_systems_to_templates() -> None:
    said = [{"role": role, "content": role} for role in ("developer", "user", "assistant", "system")]
    turns = chat(RESPONSES, input=said)["messages"]
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "system"]


def test_thoughts_go_back_with_the_turn_that_they_led_to() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    turn = chat(RESPONSES, input=[{"role": "user", "content": "x"}, thought, call])["messages"][1]
    assert turn["reasoning"] == "hm" and turn["tool_calls"][0]["id"] == "a"
    blocks = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "so"}]
    assert chat(MESSAGES, messages=[{"role": "assistant", "content": blocks}])["messages"][0]["reasoning"] == "hm"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (RESPONSES, {"tools": [{"type": "code_interpreter"}]}, "tools[0]"),
        (RESPONSES, {"input": [{"type": "computer_call"}]}, "input[0]"),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[0].content[0]",
        ),
        (RESPONSES, {"text": {"format": {"type": "grammar"}}}, "text.format"),
        (RESPONSES, {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "mcp"}}, "tool_choice"),
        (RESPONSES, {"reasoning": {"effort": "much"}}, "reasoning.effort"),
        (MESSAGES, {"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        (MESSAGES, {"tools": [{"name": "f"}], "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "file"}}]}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_what_a_chat_cannot_say_is_refused_where_it_is_translated_and_routed_all_the_same(
    path: str, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        chat(path, **fields)
    assert caught.value.status == 400 and caught.value.param == param
    least = {"input": "x", "messages": [{"role": "user", "content": "x"}]}
    assert json.loads(prompt_body(path, json.dumps({**least, **fields}).encode()))["messages"]


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (529, "api_error"), (429, "rate_limit_error")]
)
def test_errors_are_in_the_format_of_their_path(status: int, kind: str) -> None:
    error = ApiError(status, "no")
    for path in ("/v1/messages", "/some/prefix/v1/messages", "/v1/messages/count_tokens"):
        assert json.loads(error_body(path, error)) == {"type": "error", "error": {"type": kind, "message": "no"}}
    for path in ("/v1/responses", "/v1/chat/completions", "/"):
        assert error_body(path, error) == error.body()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"m"}}', "m"),
        (b'{"detail":"m"}', "m"),
        (b'{"error":"m"}', "m"),
        (b'{"object":"error","message":"m"}', "m"),
        (b"m", "m"),
        (b"", "the engine answered 500"),
    ],
)
def test_errors_of_engines_keep_their_message(body: bytes, message: str) -> None:
    asked = Translation(MESSAGES, b'{"max_tokens":1,"messages":[{"role":"user","content":"x"}]}')
    assert json.loads(asked.error(500, body))["error"] == {"type": "api_error", "message": message}
