"""Times of one engine, by way of its OpenAI endpoint: prompts alone, and answers in batches."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

from skymemory.conductor.cost_model.fit import DecodePoint, PrefillPoint
from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.serving.replay.client import Client, Clock
from skymemory.serving.replay.outcome import Outcome, Status
from skymemory.serving.replay.prompts import Prompt

STEPS = 24
"""Tokens of each answer in a batch."""
_LEAST_GAPS = 4
_WARM = 2

Spent = Callable[[], Awaitable[tuple[float, float]]]
"""Processor time (s) that an engine took until now: for prompts, and for the tokens after the first."""
MakePrompt = Callable[[int, random.Random], Prompt]
"""A prompt of about so many tokens, of words or ids drawn from the dice."""


def cut(prompt: Prompt, share: float) -> Prompt:
    """The first ``share`` of its words or ids, at least one."""
    if isinstance(prompt, str):
        words = prompt.split()
        return " ".join(words[: max(1, round(len(words) * share))])
    return prompt[: max(1, round(len(prompt) * share))]


class Measuring:
    """``tell`` hears how much is done, from 0 to 1, as it goes on. Whatever fails ends it: SkyMemoryError says why.

    ``spent``: measure by the engine's own processor time, which others on the computer hardly change; else by the
    clock, from sending to the first piece and between pieces.
    """

    def __init__(
        self,
        client: Client,
        make: MakePrompt,
        clock: Clock,
        seed: int,
        tell: Callable[[str, float], object],
        spent: Spent | None = None,
    ) -> None:
        self._spent = spent
        self._client = client
        self._make = make
        self._clock = clock
        self._dice = random.Random(f"fit {seed}")
        self._tell = tell

    async def prefills(
        self, cells: Sequence[PrefillCell], repeats: int, statistic: str
    ) -> list[tuple[PrefillPoint, bool]]:
        """Each cell's point, and whether it is held out: the ``statistic`` of ``repeats``, every time another prompt.

        All cells come once before any comes again, in an order that is drawn anew: what drifts meanwhile harms all
        alike. How much of a prompt was cached is what the engine says; one that does not say is asked nothing twice.
        """
        longest = max(cell.tokens for cell in cells)
        for _ in range(_WARM):
            told = await self._alone(self._make(longest, self._dice), 2)
        if told.cached_tokens is None:
            cells = [cell for cell in cells if not cell.share]
        if not cells:
            raise SkyMemoryError("the engine does not tell cached_tokens: measure with --shares 0")
        taken: list[tuple[tuple[PrefillCell, int, int], float]] = []
        for turn in range(repeats):
            order = list(cells)
            self._dice.shuffle(order)
            for at, cell in enumerate(order):
                self._tell("prompts", (turn + at / len(order)) / repeats)
                prompt = self._make(cell.tokens, self._dice)
                if cell.share:
                    await self._alone(cut(prompt, cell.share), 1)
                before_s = 0.0 if self._spent is None else (await self._spent())[0]
                outcome = await self._alone(prompt, 2)
                seconds = outcome.ttft_s if self._spent is None else (await self._spent())[0] - before_s
                tokens, cached = outcome.prompt_tokens or cell.tokens, outcome.cached_tokens or 0
                taken.append(((cell, tokens, cached), seconds))
        points = []
        for (cell, tokens, cached), repeated in grouped(taken).items():
            points.append((PrefillPoint(tokens, cached, typical(repeated, statistic)), cell.held_out))
        return sorted(points, key=lambda pair: (pair[0].tokens, pair[0].cached))

    async def decodes(
        self, cells: Sequence[DecodeCell], repeats: int, statistic: str
    ) -> tuple[list[tuple[DecodePoint, bool]], list[DecodeCell]]:
        """Each cell's point and whether it is held out; and the cells whose requests never ran all at once."""
        taken: list[tuple[tuple[DecodeCell, float], float]] = []
        never = dict.fromkeys(cells)
        for turn in range(repeats):
            order = list(cells)
            self._dice.shuffle(order)
            for at, cell in enumerate(order):
                self._tell("answers", (turn + at / len(order)) / repeats)
                prompt = self._make(cell.context, self._dice)
                first = await self._alone(prompt, 1)  # afterwards it is cached: all begin to answer almost at once
                steps = STEPS + 2 * cell.batch
                before_s = 0.0 if self._spent is None else (await self._spent())[1]
                asked = [self._client.probe(prompt, steps, self._clock) for _ in range(cell.batch)]
                outcomes = [_good(outcome) for outcome in await asyncio.gather(*asked)]
                seconds = step_s(outcomes)
                if math.isnan(seconds):
                    continue
                never.pop(cell, None)
                context = (first.prompt_tokens or cell.context) + steps / 2
                if self._spent is not None:
                    # Of an engine that computes its answers one after the other: what a token took, so many times.
                    tokens = sum((outcome.output_tokens or steps) - 1 for outcome in outcomes)
                    seconds = cell.batch * ((await self._spent())[1] - before_s) / tokens
                taken.append(((cell, cell.batch * context), seconds))
        points = [
            (DecodePoint(cell.batch, kv_tokens, typical(repeated, statistic)), cell.held_out)
            for (cell, kv_tokens), repeated in grouped(taken).items()
        ]
        return sorted(points, key=lambda pair: (pair[0].batch, pair[0].kv_tokens)), list(never)

    async def _alone(self, prompt: Prompt, output_tokens: int) -> Outcome:
        return _good(await self._client.probe(prompt, output_tokens, self._clock))


def step_s(outcomes: Sequence[Outcome]) -> float:
    """Seconds of a step while all of ``outcomes`` were being answered; nan where they hardly ever were at once.

    The mean over that time: pieces that come in one go are as many steps as they are, and a piece of several tokens is
    as many steps as tokens.
    """
    times = [list(accumulate((outcome.first_s, *outcome.gaps_s))) for outcome in outcomes]
    begin_s, end_s = max(one[0] for one in times), min(one[-1] for one in times)
    spent_s, gaps = 0.0, 0
    for one in times:
        within = [at_s for at_s in one if begin_s <= at_s <= end_s]
        if len(within) > 1:
            spent_s += within[-1] - within[0]
            gaps += len(within) - 1
    if gaps < _LEAST_GAPS or not spent_s > 0:
        return math.nan
    pieces = sum(len(one) - 1 for one in times)
    tokens = sum((outcome.output_tokens or len(outcome.gaps_s) + 1) - 1 for outcome in outcomes)
    return spent_s / gaps * (pieces / tokens if tokens > 0 else 1.0)


def _good(outcome: Outcome) -> Outcome:
    if outcome.status is not Status.COMPLETED:
        raise SkyMemoryError(f"the engine did not answer while it was measured: {outcome.error}")
    return outcome


# What is measured for a cost model: lengths it is fitted on, and others in between that it has to foretell.


K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class PrefillCell:
    tokens: int
    share: float
    """Of the prompt, what was sent before it."""
    held_out: bool
    """Not fitted on."""


@dataclass(frozen=True, slots=True)
class DecodeCell:
    batch: int
    context: int
    """Tokens of each prompt."""
    held_out: bool


def prefill_cells(least: int, most: int, shares: Sequence[float]) -> list[PrefillCell]:
    """Lengths from ``least``, each twice the one before, up to ``most``, to be fitted on; one between any two held out.

    Raises:
        InvalidInput: fewer than three lengths, or shares that are none.
    """
    if least < 8 or most < 4 * least:
        raise InvalidInput(
            f"prompts of {least} to {most} tokens: from 8 on, and the longest at least 4 times the least"
        )
    if not shares or not all(0 <= share < 1 for share in shares):
        raise InvalidInput("shares of a prompt that are cached are 0 or more and below 1, such as 0,0.5,0.9")
    lengths = [least]
    while lengths[-1] * 2 < most:
        lengths.append(lengths[-1] * 2)
    lengths.append(most)
    between = [round((one * other) ** 0.5) for one, other in pairwise(lengths)]
    kinds = [*((length, False) for length in lengths), *((length, True) for length in between)]
    return [PrefillCell(length, share, held_out) for length, held_out in sorted(kinds) for share in shares]


def decode_cells(most_batch: int, contexts: Sequence[int]) -> list[DecodeCell]:
    """Batches of 1, 2, 4, ... up to ``most_batch``, over contexts; every batch between two of them is held out, and so
    is every second context.

    Raises:
        InvalidInput: nothing that could be told from each other.
    """
    if most_batch < 2 or len(contexts) < 2 or min(contexts) < 1 or sorted(set(contexts)) != list(contexts):
        raise InvalidInput("batches of up to 2 or more and at least two contexts, ascending, are needed")
    batches = [1]
    while batches[-1] * 2 <= most_batch:
        batches.append(batches[-1] * 2)
    fitted = [contexts[at] for at in range(0, len(contexts), 2)]
    fitted = fitted if len(fitted) > 1 else list(contexts)
    held = [one for one in contexts if one not in fitted]
    cells = [DecodeCell(batch, context, False) for batch in batches for context in fitted]
    cells += [DecodeCell(batch, context, True) for batch in batches for context in held]
    return cells + [DecodeCell(batch * 3 // 2, context, True) for batch in batches[1:-1] for context in contexts]


def typical(values: Sequence[float], statistic: str) -> float:
    """Of repeated measurements: their ``median``, or the ``fastest``, where others use the computer too."""
    return min(values) if statistic == "fastest" else statistics.median(values)


def grouped(pairs: Iterable[tuple[K, float]]) -> dict[K, list[float]]:
    """Values by their key, in the order in which keys first came."""
    groups: dict[K, list[float]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
