"""How many tokens a server's tokenizer makes of a word, and how many the server adds by itself.

Two prompts are sent before the replay: one word, and every word of the vocabulary several times. What the server says
of their lengths is the price of a word, and what comes with every prompt (a beginning of text, a chat's template).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from skymemory.errors import SkyMemoryError

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
