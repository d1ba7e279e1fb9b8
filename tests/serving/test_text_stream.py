"""Tokens as text: nothing is shown that a later token could change, and all of it is shown in the end."""

from __future__ import annotations

from typing import Any

import pytest
from tests.serving.conftest import torch

from skymemory.serving.choosing import Chooser
from skymemory.serving.generation import Sampling
from skymemory.serving.text_stream import TextStream

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
        if stream.stopped:
            break
    shown += stream.finish()
    assert shown == TEXT[: TEXT.index(stop)]
    assert stream.stopped


def test_what_only_began_like_a_stop_text_is_shown(ready: Any) -> None:
    stream = TextStream(ready.tokenizer, ["end of it", "spaces\nend of"])
    shown = "".join(stream.add(token) for token in tokens(ready, TEXT))
    assert not shown.endswith("end ") and shown + stream.finish() == TEXT


def test_drawing_keeps_to_the_likeliest_and_to_their_chances() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    assert Chooser(Sampling(temperature=0)).choose(logits) == 0
    for top_p, allowed in ((0.4, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        chooser = Chooser(Sampling(top_p=top_p, seed=1))
        assert {chooser.choose(logits) for _ in range(400)} == allowed
    chooser = Chooser(Sampling(temperature=0.5, seed=1))
    share = sum(chooser.choose(logits) == 0 for _ in range(2000)) / 2000
    assert share == pytest.approx(0.25 / (0.25 + 0.09 + 0.0225 + 0.0025), abs=0.04)
