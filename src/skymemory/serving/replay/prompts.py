"""Prompts of a trace's shape: equal block ids give equal words in the same place, different ids different ones.

A block begins with its number, written in words of the vocabulary, so that no two blocks are alike however short they
are; the rest is drawn by its number and the seed. Word by word, every tokenizer makes nearly the same number of tokens
of it (``calibration``), and a prompt is as many words as make its tokens, less what the server adds by itself.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import lru_cache

from skymemory.errors import InvalidInput
from skymemory.serving.replay.ask import Ask
from skymemory.serving.replay.calibration import Measure

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
