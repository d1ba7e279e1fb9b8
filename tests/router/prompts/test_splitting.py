"""Bodies of the two steps: what is changed, and that all else is what the client wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.router.prompts.splitting import (
    ASKS_FOR_KV,
    decode_body,
    fields_of,
    prefill_body,
    read_prefilled,
    refuses_params,
    why_whole,
)

COMPLETIONS = "/v1/completions"
OWN = {"max_tokens", "max_completion_tokens", "min_tokens", "stream", "stream_options", "kv_transfer_params"}
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(OWN)) | st.text(), values, max_size=6))
def test_other_fields_stay_as_they_are(body: dict[str, Any]) -> None:
    fields = fields_of(json.dumps(body).encode())
    assert fields is not None
    first, second = json.loads(prefill_body(fields)), json.loads(decode_body(fields, ASKS_FOR_KV))
    assert second == {**body, "kv_transfer_params": {"do_remote_prefill": True}}
    assert {key: value for key, value in first.items() if key not in OWN} == {
        key: value for key, value in body.items() if key not in OWN
    }
    assert first["max_tokens"] == 1 and first["stream"] is False
    assert first["kv_transfer_params"] == {"do_remote_decode": True}
    assert "min_tokens" not in first and "stream_options" not in first
    assert ("max_completion_tokens" in first) == ("max_completion_tokens" in body)
    why_whole(COMPLETIONS, fields)  # judges any value


def test_what_a_client_wrote_is_not_written_differently() -> None:
    raw = rb'{"prompt": "\u00e9\n",  "seed":12345678901234567890123, "temperature": 1e-2, "top_p":1.0}'
    fields = fields_of(raw)
    assert fields is not None
    assert decode_body(fields, ASKS_FOR_KV) == (
        rb'{"prompt":"\u00e9\n","seed":12345678901234567890123,"temperature":1e-2,"top_p":1.0,'
        rb'"kv_transfer_params":{"do_remote_prefill":true}}'
    )


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({}, ""),
        ({"n": 1.0, "logprobs": 3, "tool_choice": "auto"}, ""),
        ({"n": "1"}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0.5}, "max_completion_tokens"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"prompt": [" [1", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [[1, 2]]}, ""),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
    ],
)
def test_what_cannot_be_split_and_why(more: dict[str, Any], why: str) -> None:
    fields = fields_of(json.dumps({"prompt": "x", **more}).encode())
    assert fields is not None and why_whole(COMPLETIONS, fields) == why


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"nul", b'"x"', b"[" * 100_000, b"\xff{}", b'{"a":\xff}'])
def test_what_is_no_object_has_no_fields_and_is_no_answer(body: bytes) -> None:
    assert fields_of(body) is None and read_prefilled(body) is None


@pytest.mark.parametrize("params", [[], "x", 1, True])
def test_params_are_an_object_or_none(params: Any) -> None:
    assert read_prefilled(json.dumps({"kv_transfer_params": params}).encode()) is None
    answer = read_prefilled(b'{"kv_transfer_params":null,"usage":{"prompt_tokens":9}}')
    assert answer is not None and answer.params is None and answer.usage is not None
    assert answer.usage.prompt_tokens == 9


def test_an_error_concerns_the_params_by_its_param_only() -> None:
    assert refuses_params(b'{"error":{"message":"x","param":"kv_transfer_params"}}')
    for error in (
        b'{"error":{"message":"kv_transfer_params","param":"n"}}',
        b'{"error":{"param":null}}',
        b"<x>",
        b"{}",
    ):
        assert not refuses_params(error)
