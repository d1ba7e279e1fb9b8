"""Limits of what a body holds: each is named, honest bodies are far below, and little of a long prompt is decoded."""

from __future__ import annotations

import json

import pytest

from skymemory.router.api_error import ApiError
from skymemory.router.prompts import reader as reading
from skymemory.router.prompts.item_limits import is_read_in_loop
from skymemory.router.prompts.reader import CHAT_COMPLETIONS, COMPLETIONS, LONG_PROMPTS_BYTES, PromptReader

READER = PromptReader()
CHAT = [{"role": "user", "content": "hi"}]
PART = {"type": "image_url", "image_url": {"url": "data:x"}}


@pytest.mark.brief(every=5)
@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (COMPLETIONS, {"prompt": [[1]] * 40_000}, "40,002 lists and objects; at most 32,768"),
        (COMPLETIONS, {"prompt": ["a"] * 70_000}, "texts and names; at most 65,536"),
        (COMPLETIONS, b'{"prompt": [' + b"1," * (5 << 20) + b"1]}", "values; at most 4,194,304"),
        (CHAT_COMPLETIONS, {"messages": CHAT * 40_000}, "lists and objects"),
        (CHAT_COMPLETIONS, {"messages": [{"role": "user", "content": [PART] * 20_000}]}, "lists and objects"),
        (CHAT_COMPLETIONS, {"messages": CHAT, "tools": [{}] * 40_000}, "lists and objects"),
        (CHAT_COMPLETIONS, {"messages": CHAT, "unknown": [1] * 200_000}, "values; at most 131,072"),
        (CHAT_COMPLETIONS, {"messages": CHAT, **{f"field{at}": at for at in range(2000)}}, "fields; at most 1,024"),
        ("/v1/messages", {"messages": CHAT * 40_000}, "lists and objects"),
        ("/v1/messages/count_tokens", {"messages": CHAT * 40_000}, "lists and objects"),
        ("/v1/responses", {"input": CHAT * 40_000}, "lists and objects"),
    ],
)
def test_a_body_of_too_many_items_is_refused_and_the_limit_named(path: str, body: object, says: str) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        READER.read(path, {}, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert caught.value.status == 400


def test_what_honest_clients_send_is_read() -> None:
    """A conversation of 4,000 turns with parts, 200 tools; a prompt of a million tokens; 2,000 prompts."""
    turn = {"role": "user", "content": [{"type": "text", "text": "word " * 20}]}
    names = {f"p{at}": {"type": "string", "description": "of it"} for at in range(10)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": names}}}
    body = json.dumps({"messages": [turn] * 4000, "tools": [tool] * 200}).encode()
    assert READER.read(CHAT_COMPLETIONS, {}, body).prompt.tokens > 100_000
    tokens = json.dumps({"prompt": list(range(1_000_000))}).encode()
    assert READER.read(COMPLETIONS, {}, tokens).prompt.tokens == 1_000_000
    assert READER.read(COMPLETIONS, {}, json.dumps({"prompt": ["a few words"] * 2000}).encode())


@pytest.mark.parametrize(
    "prompt",
    [
        ["first prompt " * 300, *["another one, " * 40] * 400],
        [list(range(1000)), *[list(range(90))] * 600],
        ['quotes " and \\ and , ] and é ' * 99, *["x" * 99] * 3000],
    ],
    ids=["texts", "tokens", "escapes"],
)
@pytest.mark.parametrize("spaced", [True, False])
def test_of_many_prompts_the_first_decides_as_before(prompt: list[object], spaced: bool) -> None:
    many = json.dumps({"prompt": prompt}, separators=None if spaced else (",", ":"), ensure_ascii=False).encode()
    assert len(many) > LONG_PROMPTS_BYTES
    first = READER.read(COMPLETIONS, {}, json.dumps({"prompt": prompt[0]}).encode())
    read = READER.read(COMPLETIONS, {}, many)
    assert list(read.prompt.blocks) == list(first.prompt.blocks)
    whole = sum(len(each) if isinstance(each, list) else -(-len(str(each).encode()) // 4) for each in prompt)
    assert abs(read.prompt.tokens - whole) < 0.08 * whole


def test_a_long_list_that_is_no_prompt_is_refused() -> None:
    for wrong in ('["a", 1' + ', "aaaaaaaa"' * 20_000 + "]", '[{"a": 1}' + ', "aaaaaaaa"' * 20_000 + "]"):
        with pytest.raises(ApiError) as caught:
            READER.read(COMPLETIONS, {}, b'{"prompt": ' + wrong.encode() + b"}")
        assert caught.value.status == 400


@pytest.mark.parametrize("letter", ["a", "é", "你", "\N{GRINNING FACE}", "\\", '\\"', "\n", "\x01", "a\\\\"])
@pytest.mark.parametrize("escaped", [True, False])
def test_of_a_long_text_the_beginning_decides_wherever_it_is_cut(
    letter: str, escaped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shift in range(13):
        text = "x" * shift + letter * 3000
        raw = json.dumps(text, ensure_ascii=escaped).encode()
        begin, undecoded_bytes = reading._text_begin(raw, 500)
        assert text.encode().startswith(begin) and len(begin) >= 490
        assert 0 <= undecoded_bytes < len(raw) and (undecoded_bytes > 0) == (len(raw) > 3000)


def test_a_long_chat_has_the_hashes_of_a_short_one() -> None:
    """Its first blocks, which both have."""
    turns = [{"role": "user", "content": "begin " * 3000}, {"role": "assistant", "content": ["text", PART]}]
    short = READER.read(CHAT_COMPLETIONS, {}, json.dumps({"messages": turns}).encode()).prompt
    long = READER.read(
        CHAT_COMPLETIONS, {}, json.dumps({"messages": [*turns, {"role": "user", "content": "z" * 2_000_000}]}).encode()
    ).prompt
    assert list(long.blocks[: len(short.blocks)]) == list(short.blocks)
    assert abs(long.tokens - short.tokens - 500_000) < 10


def test_long_bodies_and_those_of_many_items_are_read_in_a_thread() -> None:
    assert is_read_in_loop(b"[" * 8000) and is_read_in_loop(b'"' + b"a" * 100_000 + b'"')
    assert not is_read_in_loop(b"[" * 9000) and not is_read_in_loop(b"1," * 20_000)
    assert not is_read_in_loop(b'"' + b"a" * 200_000 + b'"')
