"""Answers as they come: the same events in whatever pieces, times of what they say, and every kind of fault."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skymemory_lab.replay.client import AnswerReader, BadAnswer, EventReader, MalformedStream

LINE = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)
CUTS = st.lists(st.integers(0, 400), max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    events=st.lists(st.lists(LINE, min_size=1, max_size=3), max_size=5),
    ends=st.sampled_from(["\n", "\r\n"]),
    cuts=CUTS,
)
def test_events_are_the_same_in_whatever_pieces_they_come(events: list[list[str]], ends: str, cuts: list[int]) -> None:
    text = "\ufeff: a comment" + ends
    for lines in events:
        text += "".join(f"data: {line}{ends}" for line in lines) + f"id: 7{ends}{ends}"
    raw = text.encode()
    reader, got = EventReader(), []
    places = sorted({0, len(raw), *(min(cut, len(raw)) for cut in cuts)})
    for begin, end in pairwise(places):
        got += reader.feed(raw[begin:end])
    assert got == ["\n".join(lines) for lines in events]
    assert not reader.unfinished


def test_an_event_that_is_cut_short_is_not_given() -> None:
    reader = EventReader()
    assert reader.feed(b"data: {}\n") == []
    assert reader.unfinished
    assert reader.feed(b"\n") == ["{}"]


@pytest.mark.parametrize("raw", [b"\xff\xfe\n", b"<html>\n"])
def test_what_is_no_event_is_reported(raw: bytes) -> None:
    with pytest.raises(MalformedStream):
        EventReader().feed(raw)


def event(content: Any) -> bytes:
    return f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n".encode()


def text(words: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": words, "finish_reason": finish}]})


def delta(finish: str | None = None, **said: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": said, "finish_reason": finish}]})


USAGE = event(
    {
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
    }
)
DONE = event("[DONE]")


def test_times_and_counts_of_a_completion() -> None:
    heard = AnswerReader()
    for at_s, piece in ((1.0, text("a")), (1.5, text("")), (1.75, text("b", "length")), (1.8, USAGE), (1.8, DONE)):
        heard.feed(piece, at_s)
    heard.close()
    assert heard.first_s == 1.0 and heard.gaps_s == [0.5, 0.25]
    assert (heard.prompt_tokens, heard.cached_tokens, heard.output_tokens) == (9, 4, 3)
    assert heard.finish == "length" and heard.done


def test_a_chats_role_is_no_token_but_text_beside_it_is() -> None:
    """Some servers send the role when they take the request, before anything is computed."""
    heard = AnswerReader()
    heard.feed(delta(role="assistant", content=""), 0.1)
    assert math.isnan(heard.first_s)
    heard.feed(delta(content="Hello"), 2.0)
    heard.feed(delta(reasoning_content="hm"), 2.5)
    heard.feed(delta("stop"), 2.6)
    assert (heard.first_s, heard.gaps_s) == (2.0, [0.5])
    ours = AnswerReader()
    ours.feed(delta(role="assistant", content="Hello"), 1.0)
    assert ours.first_s == 1.0


def test_what_comes_after_the_end_counts_for_nothing() -> None:
    heard = AnswerReader()
    heard.feed(text("a", "stop") + DONE + text("b"), 1.0)
    assert heard.gaps_s == []


def test_an_end_without_done_is_an_end_if_the_answer_had_one() -> None:
    heard = AnswerReader()
    heard.feed(text("a", "stop"), 1.0)
    heard.close()
    assert not heard.done


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (text("a"), "stream cut short: it ended without finish_reason or"),
        (text("a") + b"data: {", "stream cut short: it ended in mid-event"),
        (event("{not json"), "not JSON: '{not json'"),
        (event("[1]"), "not a chunk"),
        (event({"choices": 7}), "not a chunk"),
        (event({"choices": [7]}), "not a chunk"),
        (event({"error": {"message": "out of memory"}}), "error in the stream: out of memory"),
        (b"<html>oh no</html>\n\n", "not server-sent events: a line that is not a field"),
    ],
)
def test_every_fault_is_reported_by_its_kind(raw: bytes, words: str) -> None:
    heard = AnswerReader()
    with pytest.raises(BadAnswer, match=words.replace("[", r"\[")):
        heard.feed(raw, 1.0)
        heard.close()


@settings(max_examples=50, deadline=None)
@given(raw=st.binary(max_size=200) | st.text(max_size=80).map(lambda said: event(said.replace("\n", " "))))
def test_hostile_bytes_are_bad_answers_and_nothing_else(raw: bytes) -> None:
    heard = AnswerReader()
    with pytest.raises(BadAnswer):
        heard.feed(raw, 0.0)
        heard.close()
