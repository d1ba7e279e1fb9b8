"""The load plan and its prompts: equal block ids give equal text in the same place."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from skymemory.errors import InvalidInput, SkyMemoryError

PROBE_WORDS = 600


@dataclass(frozen=True, slots=True)
class TokensPerWord:
    """Relation of tokens and words, as measured at the endpoint."""

    tokens_per_word: float
    added_tokens: float = 0.0
    """Tokens added to every prompt (BOS, chat template)."""

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.added_tokens) / self.tokens_per_word))


def probes(words: Sequence[str], seed: int, most_words: int = PROBE_WORDS) -> tuple[str, str]:
    """Return a prompt of one word, and of ``most_words``, all about equally frequent."""
    dice = random.Random(f"probe {seed}")
    drawn: list[str] = []
    while len(drawn) < most_words:
        drawn += dice.sample(list(words), len(words))
    return drawn[0], " ".join(drawn[:most_words])


def measured(short: str, short_tokens: int, long: str, long_tokens: int) -> TokensPerWord:
    """Compute the ratio from both probes."""
    short_words, long_words = len(short.split()), len(long.split())
    per_word = (long_tokens - short_tokens) / (long_words - short_words)
    if not 0.05 <= per_word <= 50 or short_tokens < 1:
        raise SkyMemoryError(
            f"the server counts {short_tokens} tokens for {short_words} word and {long_tokens} for {long_words}: "
            "implausible token counts; use --prompt-unit characters"
        )
    return TokensPerWord(per_word, max(0.0, short_tokens - per_word * short_words))


class TraceEntry(Protocol):
    """Request of a trace: sizes and block ids, no text."""

    @property
    def at_s(self) -> float: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def ids(self) -> tuple[int, ...]:
        """Block ids; equal ids mean equal prefixes."""
        ...


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    number: int
    due_s: float
    """Seconds after the start."""
    ids: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    requests: tuple[PlannedRequest, ...]
    too_long: int
    """Requests that exceed the model's context."""

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)


def plan_requests(
    shapes: Iterable[TraceEntry],
    *,
    scale: float = 1.0,
    most_output: int | None = None,
    context_tokens: int | None = None,
    span_s: float | None = None,
    most: int | None = None,
) -> LoadPlan:
    """Turn a trace into requests, the first at time 0.

    Lengths are multiplied by ``scale``, then limited. Requests beyond ``context_tokens``, ``span_s`` or ``most`` are
    dropped.
    """
    if not 0 < scale < 1e6:
        raise InvalidInput(f"lengths cannot be scaled by {scale:g}: expected a factor above 0, such as 0.05")
    if (most_output is not None and most_output < 1) or (most is not None and most < 1):
        raise InvalidInput("expected at least one token per answer and at least one request")
    if span_s is not None and not span_s > 0:
        raise InvalidInput(f"nothing is due within {span_s:g} s: expected a time above 0")
    ordered = sorted(enumerate(shapes), key=lambda pair: pair[1].at_s)
    begin_s = ordered[0][1].at_s if ordered else 0.0
    requests: list[PlannedRequest] = []
    too_long = 0
    for number, shape in ordered:
        due_s = shape.at_s - begin_s
        if len(requests) == most or (span_s is not None and due_s > span_s):
            break
        prompt = max(1, round(shape.input_tokens * scale))
        output = max(1, round(shape.output_tokens * scale))
        output = output if most_output is None else min(output, most_output)
        if context_tokens is not None and prompt + output > context_tokens:
            too_long += 1
            continue
        requests.append(PlannedRequest(number, due_s, shape.ids, prompt, output))
    if not requests:
        limit = f"; {too_long} exceed {context_tokens} tokens: scale lengths down" if too_long else ""
        raise InvalidInput(f"no request remains to be sent{limit}")
    return LoadPlan(tuple(requests), too_long)


def reusable_share(requests: Sequence[PlannedRequest], block_tokens: float) -> float:
    """Return the hit ratio of an unbounded cache; ``block_tokens`` is per block id, after scaling."""
    known: set[int] = set()
    reused = 0.0
    for request in requests:
        leading = next((at for at, block in enumerate(request.ids) if block not in known), len(request.ids))
        reused += min(float(request.prompt_tokens), leading * block_tokens)
        known.update(request.ids)
    total = sum(request.prompt_tokens for request in requests)
    return reused / total if total else 0.0


Prompt = str | list[int]
MakePrompt = Callable[[PlannedRequest], Prompt]
HEAD = 3
_KEPT_BLOCKS = 2048


class Pieces:
    """Blocks as lists of numbers below ``kinds``; ``per_block`` is their mean length."""

    def __init__(self, kinds: int, per_block: float, seed: int) -> None:
        if per_block < HEAD:
            raise InvalidInput(
                f"blocks of {per_block:.1f} words are too short to be distinct; scale lengths by "
                f"{math.ceil(HEAD / per_block * 100) / 100:g} times as much, or more"
            )
        self._kinds = kinds
        self._per_block = per_block
        self._seed = seed
        self._numbers: dict[int, int] = {}
        self._names = kinds**HEAD
        # Numbers are spread over all names; otherwise most blocks would begin with the same few words. The factor is
        # coprime to the number of names, so that no two numbers get the same name.
        dice = random.Random(f"names {seed}")
        self._offset = dice.randrange(self._names)
        self._factor = dice.randrange(self._names)
        while math.gcd(self._factor, self._names) != 1:
            self._factor += 1
        self._block = lru_cache(_KEPT_BLOCKS)(self._drawn)

    def prompt(self, ids: Sequence[int], count: int) -> list[int]:
        """Return about ``count`` numbers: those of the blocks, of the last as many as remain."""
        pieces: list[int] = []
        for block in ids[:-1]:
            pieces += self._block(block)
        size = max(HEAD, count - len(pieces))
        last = self._block(ids[-1])
        if size > len(last):  # earlier blocks were slightly shorter than the average
            last = self._drawn(ids[-1], size)
        return pieces + last[:size]

    def _drawn(self, block: int, at_least: int = 0) -> list[int]:
        """Return a block's pieces; the first do not depend on ``at_least``."""
        number = self._numbers.setdefault(block, len(self._numbers))
        if number >= self._names:
            raise InvalidInput(f"more than {self._names:,} distinct blocks: send fewer requests")
        dice = random.Random(f"block {self._seed} {block}")
        size = max(HEAD, math.floor(self._per_block + dice.random()), at_least)
        name = (number * self._factor + self._offset) % self._names
        head = [name // self._kinds**place % self._kinds for place in range(HEAD)]
        return head + dice.choices(range(self._kinds), k=size - HEAD)


def word_prompts(words: Sequence[str], block_tokens: float, measure: TokensPerWord, seed: int) -> MakePrompt:
    pieces = Pieces(len(words), block_tokens / measure.tokens_per_word, seed)

    def prompt(request: PlannedRequest) -> str:
        return " ".join(words[piece] for piece in pieces.prompt(request.ids, measure.words(request.prompt_tokens)))

    return prompt


def id_prompts(first: int, last: int, block_tokens: float, seed: int) -> MakePrompt:
    """Make prompts of token ids, of exactly the planned length."""
    if first < 0 or last - first < 15:
        raise InvalidInput(f"token ids {first} to {last}: expected at least 16, none below 0")
    pieces = Pieces(last - first + 1, block_tokens, seed)

    def prompt(request: PlannedRequest) -> list[int]:
        return [first + piece for piece in pieces.prompt(request.ids, request.prompt_tokens)]

    return prompt


def character_prompts(words: Sequence[str], block_characters: float, seed: int) -> MakePrompt:
    """Make prompts by characters, for servers that report no usage."""
    longest = max(len(word) for word in words)
    mean = sum(len(word) + 1 for word in words) / len(words)
    if block_characters < HEAD * (longest + 1):
        raise InvalidInput(
            f"blocks of {block_characters:.0f} characters are too short to be distinct: "
            f"expected at least {HEAD * (longest + 1)}; scale lengths by more"
        )
    pieces = Pieces(len(words), max(float(HEAD), block_characters / mean), seed)
    size = round(block_characters)

    @lru_cache(_KEPT_BLOCKS)
    def block(block_id: int) -> str:
        count = HEAD + size // 2  # more than enough: the shortest word and its space are two characters
        return " ".join(words[piece] for piece in pieces.prompt((block_id,), count))[: size - 1] + " "

    def prompt(request: PlannedRequest) -> str:
        text = "".join(block(block_id) for block_id in request.ids)
        return text[: max((len(request.ids) - 1) * size + HEAD * (longest + 1), request.prompt_tokens)]

    return prompt
