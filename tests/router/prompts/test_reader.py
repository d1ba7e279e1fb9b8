"""Bodies of OpenAI requests become what a router goes by, and what is none is refused with a reason."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from skymemory import native
from skymemory.conductor.request import Request, seed
from skymemory.router.api_error import ApiError
from skymemory.router.prompts.reader import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    MAX_OUTPUT_TOKENS,
    PromptReader,
    prompts_of,
    read_body,
)
from skymemory.router.settings import Limits, Settings

READER = PromptReader(Settings(strategy="simhash"), {"poet": "small", "orphan": ""})


def read(path: str = COMPLETIONS, headers: dict[str, str] | None = None, **body: Any) -> Request:
    return READER.read(path, headers or {}, json.dumps(body).encode(), client="10.0.0.9")


def chat(*turns: tuple[str, Any], **more: Any) -> Request:
    return read(CHAT_COMPLETIONS, messages=[{"role": role, "content": content} for role, content in turns], **more)


def begins_with(longer: Request, shorter: Request) -> bool:
    blocks = shorter.prompt.blocks
    return len(longer.prompt.blocks) > len(blocks) > 0 and bool(
        np.array_equal(longer.prompt.blocks[: len(blocks)], blocks)
    )


def test_a_text_becomes_chained_blocks_of_its_bytes() -> None:
    text = "Grüße aus dem All. " * 20
    data = text.encode()
    request = read(model="small", prompt=text, max_tokens=7, cache_salt="s")
    assert np.array_equal(request.prompt.blocks, native.chain_hashes(data, 64, seed("small", "", "s")))
    assert np.array_equal(request.prompt.pieces, native.piece_hashes(data, 64, seed("small", "", "s")))
    assert len(request.prompt.blocks) == len(data) // 64
    assert (request.prompt.tokens, request.prompt.block_tokens) == (-(-len(data) // 4), 16)
    assert request.prompt.head == data[:1024]
    assert (request.model, request.salt, request.output_tokens) == ("small", "s", 7)


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize(
    "text", ["plain \x7f/", "", 'quo"ted', "back\\slash", "line\nend\x00", "\N{LATIN SMALL LETTER AE}"]
)
def test_a_prompt_is_what_its_json_says(text: str, ascii_only: bool) -> None:
    body = json.dumps({"prompt": text, "model": "m"}, ensure_ascii=ascii_only).encode()
    assert prompts_of(read_body(body)) == [text.encode()]


def test_a_prompt_may_be_escaped_and_spaced_as_json_allows() -> None:
    assert prompts_of(read_body(rb'{"prompt" :  "a\u0062\/" , "model": "m"}')) == [b"ab/"]
    assert prompts_of(read_body(rb'{"prompt" :  "ab/" , "model": "m"}')) == [b"ab/"]
    assert prompts_of(read_body(rb'{"prompt":"\ud83d\ude00"}')) == ["\N{GRINNING FACE}".encode()]


@pytest.mark.parametrize("byte", [*range(32), 0x80, 0xFF])
def test_a_prompt_with_bytes_that_json_does_not_have_is_refused(byte: int) -> None:
    with pytest.raises(ApiError):
        prompts_of(read_body(b'{"prompt": "some text %c, more text"}' % byte))


@pytest.mark.parametrize("long", ["x" * 511, "x" * 512, "x" * 9000, "x" * 9000 + '"', "ä" * 512])
@pytest.mark.parametrize(
    "fields",
    [
        '"prompt": L',
        '"prompt": [L, L]',
        '"prompt": L, "prompt": ""',
        '"prompt": L, "user": "\\ud800"',
        '"prompt": L, "messages": [{"role": "user", "content": "a"}, {"role": "b", "content": L}]',
        '"tools": [{"content": L}], "messages": [{"content": [{"type": "text", "text": L}]}, {"content": L}]',
        '"messages": [{"content": L, "content": L}], "max_tokens": 7',
        '"messages": [{"content": L}, {"role": 5}]',
        '"messages": [{"content": L}, {"role": "a" "b"}]',
        '"messages": [' + '{"content": L},' * 99 + ' {"content": L}]',
    ],
)
def test_long_texts_are_read_as_short_ones(long: str, fields: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "{" + fields.replace("L", json.dumps(long, ensure_ascii=False)) + "}"
    found = [of_body(path, body.encode()) for path in (COMPLETIONS, CHAT_COMPLETIONS)]
    monkeypatch.setattr(native, "cut_texts", lambda text: (text, {}))
    assert found == [of_body(path, body.encode()) for path in (COMPLETIONS, CHAT_COMPLETIONS)]


def of_body(path: str, body: bytes) -> tuple[object, ...]:
    """What is read of it, or why it cannot be read."""
    try:
        found = READER.read(path, {}, body)
    except ApiError as error:
        return error.status, error.body()
    prompt = found.prompt
    of_prompt = prompt.blocks.tobytes(), prompt.pieces.tobytes(), prompt.tokens, prompt.head
    return *of_prompt, found.model, found.output_tokens


def test_model_adapter_and_salt_keep_prompts_apart() -> None:
    text = "x" * 640
    one = read(model="small", prompt=text)
    others = [
        read(model="large", prompt=text),
        read(model="small", prompt=text, cache_salt="tenant"),
        read(model="small", prompt=text, lora_adapter="poet"),
    ]
    assert all(not set(one.prompt.blocks) & set(other.prompt.blocks) for other in others)
    assert np.array_equal(one.prompt.blocks, read(model="small", prompt=text, temperature=0.3).prompt.blocks)


def test_a_model_that_is_an_adapter_is_one() -> None:
    by_model = read(model="poet", prompt="x" * 64)
    assert (by_model.model, by_model.adapter) == ("small", "poet")
    assert np.array_equal(
        by_model.prompt.blocks, read(model="small", lora_adapter="poet", prompt="x" * 64).prompt.blocks
    )
    assert (read(model="orphan", prompt="x").model, read(model="orphan", prompt="x").adapter) == ("orphan", "orphan")
    assert read(model="unheard-of", prompt="x").adapter == ""


def test_of_several_prompts_the_first_steers_and_all_weigh() -> None:
    request = read(prompt=["a" * 640, "b" * 320])
    assert np.array_equal(request.prompt.blocks, read(prompt="a" * 640).prompt.blocks)
    assert request.prompt.tokens == 160 + 80


def test_tokens_are_hashed_as_their_numbers() -> None:
    ids = list(range(100, 150))
    data = np.array(ids, dtype="<u4").tobytes()
    request = read(prompt=ids)
    assert request.prompt.tokens == 50 and request.prompt.block_tokens == 16
    assert np.array_equal(request.prompt.blocks, native.chain_hashes(data, 64, seed("", "", "")))
    assert np.array_equal(read(prompt=[ids, ids]).prompt.blocks, request.prompt.blocks)
    assert read(prompt=[ids, ids]).prompt.tokens == 100


def test_the_next_turn_of_a_chat_begins_with_the_turns_so_far() -> None:
    first = [("system", "You are terse. " * 10), ("user", "Where is the anchor? " * 10)]
    second = [*first, ("assistant", "Overhead."), ("user", "And now?")]
    assert begins_with(chat(*second), chat(*first))
    assert not begins_with(chat(*second), chat(first[0], ("assistant", first[1][1])))
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert begins_with(chat(*second, tools=tools), chat(*first, tools=tools))
    assert not set(chat(*first, tools=tools).prompt.blocks) & set(chat(*first).prompt.blocks)


def test_contents_in_parts_and_calls_of_tools() -> None:
    text = "Where is the anchor? " * 20
    parts = [{"type": "text", "text": text[:200]}, {"type": "text", "text": text[200:]}]
    assert np.array_equal(chat(("user", parts)).prompt.blocks, chat(("user", text)).prompt.blocks)
    called = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": None, "tool_calls": called}]
    assert begins_with(
        read(CHAT_COMPLETIONS, messages=[*turns, {"role": "tool", "content": "x" * 99}]), chat(("user", text))
    )


def test_images_count_by_what_they_show() -> None:
    def showing(url: str) -> Request:
        return chat(
            ("user", [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}])
        )

    small, large = showing("data:image/png;base64,AAAA"), showing("data:image/png;base64," + "B" * 1_000_000)
    assert not set(small.prompt.blocks[1:]) & set(large.prompt.blocks[1:])
    assert small.prompt.tokens == large.prompt.tokens > 512
    assert np.array_equal(small.prompt.blocks, showing("data:image/png;base64,AAAA").prompt.blocks)


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({"x-session-id": "h", "cookie": "session=c"}, {"user": "u"}, "h"),
        ({"cookie": "a=b; session=c; d=e"}, {"user": "u"}, "c"),
        ({"cookie": "my-session=c"}, {"user": "u"}, "u"),
        ({}, {"user": 7}, "7"),
        ({}, {}, "10.0.0.9"),
    ],
)
def test_what_distinguishes_clients(headers: dict[str, str], body: dict[str, Any], session: str) -> None:
    assert read(headers=headers, prompt="x", **body).session == session


def test_a_megabyte_is_hashed_up_to_a_bound() -> None:
    request = read(prompt="abcdefgh" * 131_072)
    assert len(request.prompt.blocks) == len(request.prompt.pieces) == 8192
    assert request.prompt.tokens == 262_144


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (COMPLETIONS, b"{", 400, "not JSON"),
        (COMPLETIONS, b"", 400, "not JSON"),
        (COMPLETIONS, b"\xff\xfe", 400, "not JSON"),
        (COMPLETIONS, b"[]", 400, "Expected `object`"),
        (COMPLETIONS, b'{"prompt": "\xff"}', 400, "not JSON"),
        (COMPLETIONS, b'{"model": "m"}', 400, "no `prompt`"),
        (COMPLETIONS, b'{"prompt": []}', 400, "empty list"),
        (COMPLETIONS, b'{"prompt": [1, -2]}', 400, "`int` >= 0"),
        (COMPLETIONS, b'{"prompt": {"a": 1}}', 400, "Expected `array`"),
        (COMPLETIONS, b'{"prompt": "x", "model": 3}', 400, "`$.model`"),
        (COMPLETIONS, b'{"prompt": "x", "model": "' + b"m" * 1000 + b'"}', 400, "256"),
        (COMPLETIONS, b'{"prompt": ' + b"[" * 4000 + b"]" * 4000 + b"}", 400, "nested"),
        (COMPLETIONS, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "32,768"),
        (COMPLETIONS, b'{"prompt": "\\ud800"}', 400, "half of a surrogate pair"),
        (CHAT_COMPLETIONS, b'{"prompt": "x"}', 400, "`prompt` is of /v1/completions"),
        (CHAT_COMPLETIONS, b'{"model": "m"}', 400, "no `messages`"),
        (CHAT_COMPLETIONS, b'{"messages": [{"role": "user", "content": 3}]}', 400, "content"),
        (CHAT_COMPLETIONS, b'{"messages": [3]}', 400, "Expected `object`"),
        ("/v1/embeddings", b"{}", 404, "takes no prompt"),
        ("/v1/responses", b"{}", 400, "`input` is missing"),
        ("/v1/messages", b'{"messages": 3}', 400, "`messages` is not a list"),
        ("/v1/messages", b'{"model": "m"}', 400, "`messages` is missing"),
        ("/v1/messages", b'{"messages": "\\ud800"}', 400, "half of a surrogate pair"),
        ("/v1/messages", b"[]", 400, "not a JSON object"),
    ],
)
def test_what_cannot_be_read_says_why(path: str, body: bytes, status: int, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        READER.read(path, {}, body)
    error = json.loads(caught.value.body())["error"]
    assert caught.value.status == status and says in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_what_is_too_large_is_refused_before_it_is_read() -> None:
    with pytest.raises(ApiError, match="at most 100") as caught:
        PromptReader(Settings(limits=Limits(max_body_bytes=100))).read(COMPLETIONS, {}, b"{" * 101)
    assert caught.value.status == 413


def test_the_limit_of_an_answer() -> None:
    request = READER.read(COMPLETIONS + "?x=1", {}, b'{"prompt": "tail", "max_tokens": 1e3, "user": ""}')
    assert request.output_tokens == 1000 and request.prompt.tokens == 1
    assert read(prompt="x", max_tokens=5, max_completion_tokens=9).output_tokens == 9
    assert read(prompt="x", max_tokens=-1).output_tokens is None, "with some engines: no limit"
    assert read(prompt="x", max_tokens=2**63 - 1).output_tokens == MAX_OUTPUT_TOKENS


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({"prompt": "x"}, 1),
        ({"prompt": "x", "n": 3}, 3),
        ({"prompt": "x" * 600, "n": 2, "best_of": 5}, 5),
        ({"prompt": ["x", "y", "z"], "n": 2}, 6),
        ({"prompt": ["x" * 50_000] * 3}, 3),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": list(range(100_000))}, 1),
        ({"prompt": [[1], [2]]}, 2),
        ({"prompt": "x", "n": None}, 1),
        ({"prompt": "x", "n": "3", "best_of": 4.0}, 4),
        ({"prompt": "x", "n": True}, 1),
        ({"prompt": "x", "n": 10**12}, 1 << 20),
        ({"prompt": "x", "n": "9" * 4300}, 1 << 20),
        ({"prompt": "x", "n": 0}, 1),
        ({"prompt": ["x", "y"], "n": 9_999_999}, 1 << 20),
    ],
)
def test_how_many_answers_are_asked_for(fields: dict[str, Any], answers: int) -> None:
    assert read(**fields).answers == answers


@pytest.mark.parametrize("value", [1.5, "many", [2], {"n": 2}, "1e3"])
@pytest.mark.parametrize("name", ["n", "best_of"])
def test_a_number_of_answers_that_is_none_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ApiError, match="whole number") as caught:
        read(prompt="x", **{name: value})
    assert caught.value.status == 400 and caught.value.param == name
