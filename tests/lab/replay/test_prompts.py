"""Prompts of a replay: equal ids are equal prefixes, different ids differ at once, lengths are as wanted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory_lab.replay.prompts import (
    HEAD,
    Pieces,
    PlannedRequest,
    TokensPerWord,
    character_prompts,
    id_prompts,
    measured,
    probes,
    word_prompts,
)
from skymemory_lab.sim.prompt_text import WORDS

BLOCK = 40.0
IDS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=8, unique=True)


def an_ask(ids: list[int], tokens: int | None = None, number: int = 0) -> PlannedRequest:
    return PlannedRequest(number, 0.0, tuple(ids), round(len(ids) * BLOCK) if tokens is None else tokens, 1)


def common(one: Sequence[object], other: Sequence[object]) -> int:
    """Leading things that two lists share."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@settings(max_examples=60, deadline=None)
@given(shared=IDS, one=st.integers(2**65, 2**66), other=st.integers(2**66 + 1, 2**67), seed=st.integers(0, 9))
def test_prompts_share_exactly_the_blocks_that_they_share(shared: list[int], one: int, other: int, seed: int) -> None:
    """Words up to the last shared block's end are equal, and within the next block's first three they part."""
    pieces = Pieces(len(WORDS), BLOCK / 1.3, seed)
    first, second = (pieces.prompt([*shared, last], 500) for last in (one, other))
    whole = len(pieces.prompt([*shared, one], 0)) - HEAD
    assert abs(whole - len(shared) * BLOCK / 1.3) < len(shared)
    assert whole <= common(first, second) < whole + HEAD
    make = word_prompts(WORDS, BLOCK, TokensPerWord(1.3), seed)
    texts = [str(make(an_ask([*shared, last], 900))).split() for last in (one, other)]
    assert whole <= common(*texts) < whole + HEAD


@settings(max_examples=60, deadline=None)
@given(ids=IDS, more=st.integers(0, 400), seed=st.integers(0, 3))
def test_prompts_of_ids_are_as_long_as_wanted(ids: list[int], more: int, seed: int) -> None:
    """To the token, wherever the last block has room for its name; and every token is one of those allowed."""
    make = id_prompts(300, 1000, BLOCK, seed)
    wanted = round((len(ids) - 1) * (BLOCK + 1)) + HEAD + more
    prompt = make(an_ask(ids, wanted))
    assert isinstance(prompt, list)
    assert len(prompt) == wanted
    assert min(prompt) >= 300 and max(prompt) <= 1000


def test_a_longer_prompt_of_the_same_ids_begins_with_the_shorter() -> None:
    make = id_prompts(0, 99, BLOCK, 0)
    long, short = make(an_ask([5, 6], 300)), make(an_ask([5, 6], 60))
    assert long[: len(short)] == short


def test_no_two_of_many_short_blocks_are_alike() -> None:
    """4,000 blocks of three pieces out of 16: as many as there are names, and not one twice."""
    pieces = Pieces(16, float(HEAD), seed=3)
    assert len({tuple(pieces.prompt([block], HEAD)) for block in range(16**HEAD)}) == 16**HEAD
    with pytest.raises(InvalidInput, match="distinct blocks"):
        pieces.prompt([10**9], HEAD)


def test_blocks_are_as_long_as_wanted_on_average_and_their_words_are_all_words() -> None:
    pieces = Pieces(len(WORDS), 6.4, seed=1)
    bodies = [pieces.prompt([block, -1], 0)[:-HEAD] for block in range(3000)]
    assert sum(map(len, bodies)) / len(bodies) == pytest.approx(6.4, rel=0.01)
    counts = [0] * len(WORDS)
    for body in bodies:
        for piece in body:
            counts[piece] += 1
    assert min(counts) > 0 and max(counts) < 3 * sum(counts) / len(counts)


def test_equal_arguments_give_equal_prompts_and_other_seeds_give_others() -> None:
    first, again, other = (word_prompts(WORDS, BLOCK, TokensPerWord(1.0), seed) for seed in (1, 1, 2))
    ask = an_ask([3, 1, 4])
    assert first(ask) == again(ask) != other(ask)
    assert str(first(ask)).split()[0] != str(other(ask)).split()[0]


@settings(max_examples=30, deadline=None)
@given(ids=IDS, one=st.integers(2**65, 2**66), other=st.integers(2**66 + 1, 2**67))
def test_prompts_by_characters_share_whole_blocks_too(ids: list[int], one: int, other: int) -> None:
    make = character_prompts(WORDS, 64.0, 0)
    first, second = (str(make(PlannedRequest(0, 0.0, (*ids, last), 64 * (len(ids) + 1), 1))) for last in (one, other))
    assert len(first) == len(second) == 64 * (len(ids) + 1)
    assert first[: 64 * len(ids)] == second[: 64 * len(ids)]
    assert first[64 * len(ids) :] != second[64 * len(ids) :]


def test_blocks_too_short_to_differ_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"scale lengths by 1\.5 times"):
        word_prompts(WORDS, 2.6, TokensPerWord(1.3), 0)
    with pytest.raises(InvalidInput, match="too short"):
        character_prompts(WORDS, 10.0, 0)
    with pytest.raises(InvalidInput, match="at least 16"):
        id_prompts(300, 310, BLOCK, 0)


def test_a_server_that_counts_so_many_tokens_a_word_is_found_out() -> None:
    """A tokenizer of 1.5 tokens a word behind a template of 7 tokens: both come out, and so do lengths."""
    short, long = probes(WORDS, 0)
    assert len(short.split()) == 1 and len(long.split()) == 600

    def tokens(text: str) -> int:
        return 7 + round(1.5 * len(text.split()))

    measure = measured(short, tokens(short), long, tokens(long))
    assert measure.tokens_per_word == pytest.approx(1.5, rel=0.01)
    assert measure.added_tokens == pytest.approx(7, abs=1)
    prompt = word_prompts(WORDS, BLOCK, measure, 0)(an_ask([1, 2, 3, 4], 157))
    assert tokens(str(prompt)) == pytest.approx(157, abs=2)
    with pytest.raises(SkyMemoryError, match="implausible token counts"):
        measured(short, 5, long, 5)
