"""What a JSON text holds, counted without decoding: compiled and twin."""

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
