"""Tokens as text: nothing is shown that a later token could change, and all of it is shown in the end."""

from __future__ import annotations

from typing import Any

import pytest

from skymemory_lab.engine.generation import TextStream

pytestmark = pytest.mark.engine
TEXT = "Füße im Gras — naïve 日本語 🛰️ and\tplain  spaces\nend "


def tokens(ready: Any, text: str) -> list[int]:
    return [int(token) for token in ready.tokenizer(text, add_special_tokens=False)["input_ids"]]


def test_pieces_join_to_the_text_and_hold_no_half_character(ready: Any) -> None:
    stream = TextStream(ready.tokenizer)
    pieces = [stream.add(token) for token in tokens(ready, TEXT)]
    assert all("�" not in piece for piece in pieces) and "" in pieces
    assert "".join(pieces) + stream.finish() == TEXT


def test_half_a_character_at_the_end_is_shown_as_what_it_is(ready: Any) -> None:
    ids = tokens(ready, "a 🛰")
    stream = TextStream(ready.tokenizer)
    shown = "".join(stream.add(token) for token in ids[:-1])
    assert shown.strip() == "a" and stream.finish() == ready.tokenizer.decode(ids[:-1])[len(shown) :] != ""


@pytest.mark.parametrize("stop", ["naïve", "日本語", "🛰", "ße im G", "end ", "F", "\n"])
def test_it_ends_before_a_stop_text_wherever_tokens_part(ready: Any, stop: str) -> None:
    stream = TextStream(ready.tokenizer, ["is not in it", stop])
    shown = ""
    for token in tokens(ready, TEXT):
        shown += stream.add(token)
        if stream.stopped_by:
            break
    shown += stream.finish()
    assert shown == TEXT[: TEXT.index(stop)]
    assert stream.stopped_by


def test_what_only_began_like_a_stop_text_is_shown(ready: Any) -> None:
    stream = TextStream(ready.tokenizer, ["end of it", "spaces\nend of"])
    shown = "".join(stream.add(token) for token in tokens(ready, TEXT))
    assert not shown.endswith("end ") and shown + stream.finish() == TEXT


@pytest.mark.parametrize("stop", ["naïve", "日本語", "ße im G", "end "])
def test_a_stop_text_is_kept_where_that_is_asked_for(ready: Any, stop: str) -> None:
    stream = TextStream(ready.tokenizer, ["is not in it", stop], keep_stop=True)
    shown = ""
    for token in tokens(ready, TEXT):
        shown += stream.add(token)
        if stream.stopped_by:
            break
    assert shown + stream.finish() == TEXT[: TEXT.index(stop) + len(stop)]


def test_a_stop_text_that_is_over_too_early_is_text_and_one_that_only_begins_there_stops(ready: Any) -> None:
    ids = tokens(ready, TEXT)
    stop = "Gras — naïve"
    ends = next(at for at in range(len(ids)) if stop in ready.tokenizer.decode(ids[: at + 1]))
    for free in range(len(ids)):  # the first tokens that may not stop it
        stream = TextStream(ready.tokenizer, [stop])
        shown = ""
        for at, token in enumerate(ids):
            shown += stream.add(token, may_stop=at >= free)
            if stream.stopped_by:
                break
        assert shown + stream.finish() == (TEXT[: TEXT.index(stop)] if free <= ends else TEXT), free
