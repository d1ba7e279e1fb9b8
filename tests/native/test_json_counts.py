"""What a JSON text holds, counted without decoding, and its long texts cut out: compiled and twin."""

from __future__ import annotations

import json
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.native.conftest import IMPLEMENTATIONS

VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.sampled_from(['"', "\\", '\\"', "],[", "{", ""]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


def test_lists_texts_and_commas_outside_texts_are_counted(impl: ModuleType) -> None:
    assert impl.json_counts(b'{"a": [1, {"b": "],\\",["}], "c": 2}') == (3, 4, 2, 1, 26)
    assert impl.json_counts(b"") == impl.json_counts(b"12") == (0, 0, 0, 0, 0)
    assert impl.json_counts(b"[]") == (1, 0, 0, 0, 1)


def test_the_first_item_of_a_list_is_found(impl: ModuleType) -> None:
    for first in ("1", '"a,b"', "[1, 2]", '{"a": [3]}', '"\\\\"'):
        for text in (f"[{first}]", f"[{first},7]", f"[{first},[5,6],8]"):
            *_, items, end = impl.json_counts(memoryview(text.encode()))
            assert (items, text[1:end]) == (len(json.loads(text)) - 1, first)


def test_what_is_no_json_is_counted_too(impl: ModuleType) -> None:
    assert impl.json_counts(b'["abc\\') == (1, 1, 0, 0, 0)
    assert impl.json_counts(b"]]],[") == (1, 0, 1, 0, 0)
    assert impl.json_counts(b"[" * 100_000)[0] == 100_000
    for wrong in ("text", 5, None):
        with pytest.raises(TypeError):
            impl.json_counts(wrong)


@settings(max_examples=200, deadline=None)
@given(value=VALUES)
def test_it_counts_what_a_reader_finds(value: object) -> None:
    def walk(each: object) -> tuple[int, int]:
        if isinstance(each, str):
            return 0, 1
        inner = list(each) + list(each.values()) if isinstance(each, dict) else each if isinstance(each, list) else None
        if inner is None:
            return 0, 0
        found = [walk(one) for one in inner]
        return 1 + sum(lists for lists, _ in found), sum(texts for _, texts in found)

    for impl in IMPLEMENTATIONS:
        assert impl.json_counts(json.dumps(value).encode())[:2] == walk(value)


@pytest.mark.skipif(len(IMPLEMENTATIONS) < 2, reason="the compiled helper was not built")
@settings(max_examples=500, deadline=None)
@given(text=st.text(alphabet='"\\[]{},a1 \n', max_size=60))
def test_compiled_and_twin_agree(text: str) -> None:
    twin, fast = IMPLEMENTATIONS
    assert fast.json_counts(text.encode()) == twin.json_counts(text.encode())


LONG = "x" * 600
FIELDS = st.sampled_from(["prompt", "messages", "content", "other", 'pr"', "p\\"])
TEXTS = st.sampled_from(["", "a", LONG, LONG + '"', LONG + "é", LONG + "\n", LONG + "\\"])
BODIES = st.recursive(
    TEXTS | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=12,
)


def test_long_texts_of_a_prompt_are_cut_out(impl: ModuleType) -> None:
    body = json.dumps({"prompt": LONG, "user": LONG}).encode()
    assert impl.cut_texts(body) == (body.replace(LONG.encode(), b"", 1), {-1: LONG.encode()})
    turns = [{"role": "user", "content": each} for each in ("short", LONG, LONG + "é", [{"content": LONG}], LONG + "y")]
    rest, texts = impl.cut_texts(json.dumps({"messages": turns, "tools": [{"content": LONG}]}).encode())
    assert texts == {1: LONG.encode(), 4: LONG.encode() + b"y"}
    turns[1]["content"] = turns[4]["content"] = ""
    assert json.loads(rest) == {"messages": turns, "tools": [{"content": LONG}]}


def test_what_a_decoder_has_to_judge_is_left(impl: ModuleType) -> None:
    once = b'"prompt": "%b"' % LONG.encode()
    for fields in (
        once + b", " + once,  # which one counts?
        once + b', "pr\\u006fmpt": ""',
        b'"messages": [{"content": "%b"}], "messages": []' % LONG.encode(),
        b'"messages": [{"content": "%b", "content": 5}]' % LONG.encode(),
        b'"prompt": "%b' % LONG.encode(),
        b'"prompt": "%b\\"' % LONG.encode(),
        b'"prompt": ["%b"]' % LONG.encode(),
        b'"prompt"',
        b'"prompt":',
        b'"prompt":"',
    ):
        body = b"{" + fields
        assert impl.cut_texts(body) == (body, {})
    for wrong in ("text", 5, None):
        with pytest.raises(TypeError):
            impl.cut_texts(wrong)


@settings(max_examples=300, deadline=None)
@given(body=BODIES, indent=st.sampled_from([None, 1]), at=st.integers(0, 3000), put=st.sampled_from(list('"\\[]{}:, ')))
def test_texts_put_back_give_the_same_body(body: object, indent: int | None, at: int, put: str) -> None:
    text = json.dumps(body, indent=indent, ensure_ascii=False).encode()
    cut = [impl.cut_texts(text) for impl in IMPLEMENTATIONS]
    assert cut[0] == cut[-1]
    rest, texts = cut[0]
    found = json.loads(rest)
    for number, long in texts.items():
        place, field = (found, "prompt") if number < 0 else (found["messages"][number], "content")
        assert place[field] == "" and long.decode() == LONG
        place[field] = LONG
    assert found == body
    broken = text[: at % (len(text) + 1)] + put.encode() + text[at % (len(text) + 1) :]
    cut = [impl.cut_texts(broken) for impl in IMPLEMENTATIONS]
    assert cut[0] == cut[-1] and is_json(cut[0][0]) == is_json(broken)


def is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
