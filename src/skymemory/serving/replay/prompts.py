"""Prompts of a trace's shape: equal block ids give equal words in the same place, different ids different ones.

A block begins with its number, written in words of the vocabulary, so that no two blocks are alike however short they
are; the rest is drawn by its number and the seed. Word by word, every tokenizer makes nearly the same number of tokens
of it (``calibration``), and a prompt is as many words as make its tokens, less what the server adds by itself.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from skymemory.errors import InvalidInput, SkyMemoryError

# How many tokens a server's tokenizer makes of a word, and how many the server adds by itself.
#
# Two prompts are sent before the replay: one word, and every word of the vocabulary several times. What the server
# says
# of their lengths is the price of a word, and what comes with every prompt (a beginning of text, a chat's template).


PROBE_WORDS = 600


@dataclass(frozen=True, slots=True)
class Measure:
    tokens_per_word: float
    added_tokens: float = 0.0
    """By the server, to every prompt."""

    def words(self, tokens: int) -> int:
        """How many make ``tokens``; at least one."""
        return max(1, round((tokens - self.added_tokens) / self.tokens_per_word))


def probes(words: Sequence[str], seed: int, most_words: int = PROBE_WORDS) -> tuple[str, str]:
    """The short prompt, and one of ``most_words``, in which no word is much oftener than another."""
    dice = random.Random(f"probe {seed}")
    drawn: list[str] = []
    while len(drawn) < most_words:
        drawn += dice.sample(list(words), len(words))
    return drawn[0], " ".join(drawn[:most_words])


def measured(short: str, short_tokens: int, long: str, long_tokens: int) -> Measure:
    """By what a server said of both.

    Raises:
        SkyMemoryError: its counts are none of a tokenizer's.
    """
    short_words, long_words = len(short.split()), len(long.split())
    per_word = (long_tokens - short_tokens) / (long_words - short_words)
    if not 0.05 <= per_word <= 50 or short_tokens < 1:
        raise SkyMemoryError(
            f"the server counts {short_tokens} tokens for {short_words} word and {long_tokens} for {long_words}: "
            "these are no lengths of prompts; --prompt-unit characters does without them"
        )
    return Measure(per_word, max(0.0, short_tokens - per_word * short_words))


# What a replay sends, and when: a trace's requests at another rate, cut and scaled to what the model takes.


class Shape(Protocol):
    """A request of a trace, such as ``sim.trace.TraceRequest``: sizes and block ids, no words."""

    @property
    def at_s(self) -> float: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def ids(self) -> tuple[int, ...]:
        """One per begun block of the prompt; equal ids mean equal prefixes."""
        ...


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to be sent."""

    number: int
    """Its place in the trace, from 0."""
    due_s: float
    """From the replay's beginning."""
    ids: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Asks:
    """All of them, in the order in which they are due."""

    asks: tuple[Ask, ...]
    too_long: int
    """Requests left out: prompt and answer together exceed what the model takes."""

    @property
    def prompt_tokens(self) -> int:
        return sum(ask.prompt_tokens for ask in self.asks)


def asks_of(
    shapes: Iterable[Shape],
    *,
    scale: float = 1.0,
    most_output: int | None = None,
    context_tokens: int | None = None,
    span_s: float | None = None,
    most: int | None = None,
) -> Asks:
    """``shapes`` as requests to be sent, the first of them at 0.

    Prompts and answers are ``scale`` times as long as theirs, answers of at most ``most_output`` tokens and at least
    one. Those that do not fit ``context_tokens`` are left out, and so are those due after ``span_s`` or beyond the
    first ``most``.

    Raises:
        InvalidInput: a scale or a limit that leaves nothing by itself, or nothing that remains to be sent.
    """
    if not 0 < scale < 1e6:
        raise InvalidInput(f"lengths cannot be scaled by {scale:g}; name a factor above 0, such as 0.05")
    if (most_output is not None and most_output < 1) or (most is not None and most < 1):
        raise InvalidInput("an answer has at least one token, and a replay at least one request")
    if span_s is not None and not span_s > 0:
        raise InvalidInput(f"nothing is due within {span_s:g} s; name a time above 0")
    ordered = sorted(enumerate(shapes), key=lambda pair: pair[1].at_s)
    begin_s = ordered[0][1].at_s if ordered else 0.0
    asks: list[Ask] = []
    too_long = 0
    for number, shape in ordered:
        due_s = shape.at_s - begin_s
        if len(asks) == most or (span_s is not None and due_s > span_s):
            break
        prompt = max(1, round(shape.input_tokens * scale))
        output = max(1, round(shape.output_tokens * scale))
        output = output if most_output is None else min(output, most_output)
        if context_tokens is not None and prompt + output > context_tokens:
            too_long += 1
            continue
        asks.append(Ask(number, due_s, shape.ids, prompt, output))
    if not asks:
        limit = f"; {too_long} exceed {context_tokens} tokens: scale lengths down" if too_long else ""
        raise InvalidInput(f"no request remains to be sent{limit}")
    return Asks(tuple(asks), too_long)


def reusable_share(asks: Sequence[Ask], block_tokens: float) -> float:
    """Part of all prompt tokens whose block an earlier prompt had in the same place: what one endless cache would hit.

    ``block_tokens``: of one id, after scaling. A prompt's last block counts for what it has.
    """
    seen: set[int] = set()
    reused = 0.0
    for ask in asks:
        leading = next((at for at, one in enumerate(ask.ids) if one not in seen), len(ask.ids))
        reused += min(float(ask.prompt_tokens), leading * block_tokens)
        seen.update(ask.ids)
    total = sum(ask.prompt_tokens for ask in asks)
    return reused / total if total else 0.0


Prompt = str | list[int]
MakePrompt = Callable[[Ask], Prompt]
HEAD = 3
"""Pieces (words or tokens) at a block's beginning that are its number."""
_KEPT_BLOCKS = 2048


class Pieces:
    """Blocks as lists of pieces, each a number below ``kinds``: what words and token ids have in common.

    ``per_block``: pieces of a whole block, on average. A block has one fewer or one more than that as its number
    falls, so that the average is met.
    """

    def __init__(self, kinds: int, per_block: float, seed: int) -> None:
        if per_block < HEAD:
            raise InvalidInput(
                f"blocks of {per_block:.1f} words are too short to be told apart; scale lengths by "
                f"{math.ceil(HEAD / per_block * 100) / 100:g} times as much, or more"
            )
        self._kinds = kinds
        self._per_block = per_block
        self._seed = seed
        self._numbers: dict[int, int] = {}
        self._names = kinds**HEAD
        # Numbers are spread over all names, or the first pieces of most blocks would be the same few words: a factor
        # that has no divisor in common with their count leaves every name to one number.
        dice = random.Random(f"names {seed}")
        self._offset = dice.randrange(self._names)
        self._factor = dice.randrange(self._names)
        while math.gcd(self._factor, self._names) != 1:
            self._factor += 1
        self._block = lru_cache(_KEPT_BLOCKS)(self._drawn)

    def prompt(self, ids: Sequence[int], count: int) -> list[int]:
        """About ``count`` pieces for ``ids``: exactly that where the last block can be cut or drawn to fit."""
        pieces: list[int] = []
        for block in ids[:-1]:
            pieces += self._block(block)
        left = max(HEAD, count - len(pieces))
        last = self._block(ids[-1])
        if left > len(last):  # it may be as much as a piece or two longer than an average one
            last = self._drawn(ids[-1], left)
        return pieces + last[:left]

    def _drawn(self, block: int, at_least: int = 0) -> list[int]:
        """A block's pieces, and so many that it has ``at_least``: what is drawn first does not depend on that."""
        number = self._numbers.setdefault(block, len(self._numbers))
        if number >= self._names:
            raise InvalidInput(f"more than {self._names:,} different blocks; send fewer requests")
        dice = random.Random(f"block {self._seed} {block}")
        size = max(HEAD, math.floor(self._per_block + dice.random()), at_least)
        name = (number * self._factor + self._offset) % self._names
        head = [name // self._kinds**place % self._kinds for place in range(HEAD)]
        return head + dice.choices(range(self._kinds), k=size - HEAD)


def word_prompts(words: Sequence[str], block_tokens: float, measure: Measure, seed: int) -> MakePrompt:
    """Prompts in ``words``, as many as make the tokens that are asked for."""
    pieces = Pieces(len(words), block_tokens / measure.tokens_per_word, seed)

    def prompt(ask: Ask) -> str:
        return " ".join(words[one] for one in pieces.prompt(ask.ids, measure.words(ask.prompt_tokens)))

    return prompt


def id_prompts(first: int, last: int, block_tokens: float, seed: int) -> MakePrompt:
    """Prompts as token ids from ``first`` to ``last``: exactly as long as asked for, for servers that take such.

    Raises:
        InvalidInput: fewer than 16 ids to choose from.
    """
    if first < 0 or last - first < 15:
        raise InvalidInput(f"token ids {first} to {last}: at least 16 are wanted, none below 0")
    pieces = Pieces(last - first + 1, block_tokens, seed)

    def prompt(ask: Ask) -> list[int]:
        return [first + one for one in pieces.prompt(ask.ids, ask.prompt_tokens)]

    return prompt


def character_prompts(words: Sequence[str], block_characters: float, seed: int) -> MakePrompt:
    """Prompts in ``words`` of as many characters as tokens are asked for, for servers that tell no usage."""
    longest = max(len(word) for word in words)
    mean = sum(len(word) + 1 for word in words) / len(words)
    if block_characters < HEAD * (longest + 1):
        raise InvalidInput(
            f"blocks of {block_characters:.0f} characters are too short to be told apart: "
            f"{HEAD * (longest + 1)} are wanted; scale lengths by more"
        )
    pieces = Pieces(len(words), max(float(HEAD), block_characters / mean), seed)
    size = round(block_characters)

    @lru_cache(_KEPT_BLOCKS)
    def block(one: int) -> str:
        count = HEAD + size // 2  # more than enough: the shortest word and its space are two characters
        return " ".join(words[each] for each in pieces.prompt((one,), count))[: size - 1] + " "

    def prompt(ask: Ask) -> str:
        text = "".join(block(one) for one in ask.ids)
        return text[: max((len(ask.ids) - 1) * size + HEAD * (longest + 1), ask.prompt_tokens)]

    return prompt
