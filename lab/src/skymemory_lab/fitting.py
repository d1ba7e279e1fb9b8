"""Measurement of an engine through its OpenAI endpoint for a cost model."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

from skymemory.conductor.cost_fit import DecodePoint, PrefillPoint
from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory_lab.replay.client import Client, Clock
from skymemory_lab.replay.prompts import Prompt
from skymemory_lab.replay.report import ReplayOutcome, ResponseStatus

STEPS = 24
_LEAST_GAPS = 4
_WARM = 2

Spent = Callable[[], Awaitable[tuple[float, float]]]
"""Source of the engine's processor seconds for prefill and decoding."""
MakePrompt = Callable[[int, random.Random], Prompt]
"""Maker of a random prompt of about this length."""
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class PrefillCell:
    """Prompt length and its cached share to measure; ``held_out``: not for fitting, but to check the fit."""

    tokens: int
    share: float
    held_out: bool


@dataclass(frozen=True, slots=True)
class DecodeCell:
    """Number of concurrent requests and their prompt tokens to measure; ``held_out`` as in ``PrefillCell``."""

    batch: int
    context: int
    held_out: bool


def prefill_cells(least: int, most: int, shares: Sequence[float]) -> list[PrefillCell]:
    """Return cells with doubling lengths, and a held-out length between any two."""
    if least < 8 or most < 4 * least:
        raise InvalidInput(
            f"prompts of {least} to {most} tokens: expected at least 8, and the longest at least 4 times the shortest"
        )
    if not shares or not all(0 <= share < 1 for share in shares):
        raise InvalidInput("cached shares of a prompt must be >= 0 and < 1, such as 0,0.5,0.9")
    lengths = [least]
    while lengths[-1] * 2 < most:
        lengths.append(lengths[-1] * 2)
    lengths.append(most)
    # Costs are fitted over a logarithmic range, whose middle is the geometric mean.
    between = [round((shorter * longer) ** 0.5) for shorter, longer in pairwise(lengths)]
    kinds = [*((length, False) for length in lengths), *((length, True) for length in between)]
    return [PrefillCell(length, share, held_out) for length, held_out in sorted(kinds) for share in shares]


def decode_cells(most_batch: int, contexts: Sequence[int]) -> list[DecodeCell]:
    """Return cells for batches of 1, 2, 4, …; batches in between and every second context are held out."""
    if most_batch < 2 or len(contexts) < 2 or min(contexts) < 1 or sorted(set(contexts)) != list(contexts):
        raise InvalidInput("expected a largest batch of at least 2, and at least two contexts, ascending")
    batches = [1]
    while batches[-1] * 2 <= most_batch:
        batches.append(batches[-1] * 2)
    fitted = [contexts[at] for at in range(0, len(contexts), 2)]
    fitted = fitted if len(fitted) > 1 else list(contexts)
    held_out = [context for context in contexts if context not in fitted]
    cells = [DecodeCell(batch, context, False) for batch in batches for context in fitted]
    cells += [DecodeCell(batch, context, True) for batch in batches for context in held_out]
    return cells + [DecodeCell(batch * 3 // 2, context, True) for batch in batches[1:-1] for context in contexts]


def cut(prompt: Prompt, share: float) -> Prompt:
    """Return the first ``share``, at least a word or id."""
    if isinstance(prompt, str):
        words = prompt.split()
        return " ".join(words[: max(1, round(len(words) * share))])
    return prompt[: max(1, round(len(prompt) * share))]


class Measurement:
    """Measurement of an engine; a failed request raises SkyMemoryError.

    ``on_progress`` receives the phase and the fraction done. ``spent``: measure processor time, which other load hardly
    changes.
    """

    def __init__(
        self,
        client: Client,
        make: MakePrompt,
        clock: Clock,
        seed: int,
        on_progress: Callable[[str, float], object],
        spent: Spent | None = None,
    ) -> None:
        self._spent = spent
        self._client = client
        self._make = make
        self._clock = clock
        self._dice = random.Random(f"fit {seed}")
        self._on_progress = on_progress

    async def prefills(
        self, cells: Sequence[PrefillCell], repeats: int, statistic: str
    ) -> list[tuple[PrefillPoint, bool]]:
        """Return each cell's point (the ``statistic`` of ``repeats``), and True if it is held out.

        Each round measures all cells in random order, so that drift affects all alike.
        """
        longest = max(cell.tokens for cell in cells)
        for _ in range(_WARM):
            warm = await self._alone(self._make(longest, self._dice), 2)
        if warm.cached_tokens is None:
            cells = [cell for cell in cells if not cell.share]
        if not cells:
            raise SkyMemoryError("the engine does not report cached_tokens: measure with shares = [0]")
        samples: list[tuple[tuple[PrefillCell, int, int], float]] = []
        for turn in range(repeats):
            order = list(cells)
            self._dice.shuffle(order)
            for at, cell in enumerate(order):
                self._on_progress("prompts", (turn + at / len(order)) / repeats)
                prompt = self._make(cell.tokens, self._dice)
                if cell.share:
                    await self._alone(cut(prompt, cell.share), 1)
                before_s = 0.0 if self._spent is None else (await self._spent())[0]
                outcome = await self._alone(prompt, 2)
                seconds = outcome.ttft_s if self._spent is None else (await self._spent())[0] - before_s
                tokens, cached = outcome.prompt_tokens or cell.tokens, outcome.cached_tokens or 0
                samples.append(((cell, tokens, cached), seconds))
        points = []
        for (cell, tokens, cached), repeated in grouped(samples).items():
            points.append((PrefillPoint(tokens, cached, typical(repeated, statistic)), cell.held_out))
        return sorted(points, key=lambda pair: (pair[0].tokens, pair[0].cached))

    async def decodes(
        self, cells: Sequence[DecodeCell], repeats: int, statistic: str
    ) -> tuple[list[tuple[DecodePoint, bool]], list[DecodeCell]]:
        """Return each cell's point, and True if held out; and the cells without concurrent requests."""
        samples: list[tuple[tuple[DecodeCell, float], float]] = []
        never = dict.fromkeys(cells)
        for turn in range(repeats):
            order = list(cells)
            self._dice.shuffle(order)
            for at, cell in enumerate(order):
                self._on_progress("answers", (turn + at / len(order)) / repeats)
                prompt = self._make(cell.context, self._dice)
                first = await self._alone(prompt, 1)  # cached from now on: all requests begin to decode almost at once
                # Requests of a large batch begin over several steps: more steps keep the overlap long.
                steps = STEPS + 2 * cell.batch
                before_s = 0.0 if self._spent is None else (await self._spent())[1]
                probes = [self._client.probe(prompt, steps, self._clock) for _ in range(cell.batch)]
                outcomes = [_good(outcome) for outcome in await asyncio.gather(*probes)]
                seconds = step_s(outcomes)
                if math.isnan(seconds):
                    continue
                never.pop(cell, None)
                context = (first.prompt_tokens or cell.context) + steps / 2
                if self._spent is not None:
                    # Valid even if an engine decodes requests sequentially: seconds per token times the batch.
                    tokens = sum((outcome.output_tokens or steps) - 1 for outcome in outcomes)
                    seconds = cell.batch * ((await self._spent())[1] - before_s) / tokens
                samples.append(((cell, cell.batch * context), seconds))
        points = [
            (DecodePoint(cell.batch, kv_tokens, typical(repeated, statistic)), cell.held_out)
            for (cell, kv_tokens), repeated in grouped(samples).items()
        ]
        return sorted(points, key=lambda pair: (pair[0].batch, pair[0].kv_tokens)), list(never)

    async def _alone(self, prompt: Prompt, output_tokens: int) -> ReplayOutcome:
        return _good(await self._client.probe(prompt, output_tokens, self._clock))


def step_s(outcomes: Sequence[ReplayOutcome]) -> float:
    """Return the mean seconds per step while all were being answered; nan without enough overlap."""
    times = [list(accumulate((outcome.first_s, *outcome.gaps_s))) for outcome in outcomes]
    # Only the time in which all were decoding counts: before and after it the batch was smaller.
    begin_s, end_s = max(arrivals_s[0] for arrivals_s in times), min(arrivals_s[-1] for arrivals_s in times)
    spent_s, gaps = 0.0, 0
    for arrivals_s in times:
        overlap_s = [at_s for at_s in arrivals_s if begin_s <= at_s <= end_s]
        if len(overlap_s) > 1:
            spent_s += overlap_s[-1] - overlap_s[0]
            gaps += len(overlap_s) - 1
    if gaps < _LEAST_GAPS or not spent_s > 0:
        return math.nan
    chunks = sum(len(arrivals_s) - 1 for arrivals_s in times)
    tokens = sum((outcome.output_tokens or len(outcome.gaps_s) + 1) - 1 for outcome in outcomes)
    return spent_s / gaps * (chunks / tokens if tokens > 0 else 1.0)


def _good(outcome: ReplayOutcome) -> ReplayOutcome:
    if outcome.status is not ResponseStatus.COMPLETED:
        raise SkyMemoryError(f"a request failed during the measurement: {outcome.error}")
    return outcome


def typical(values: Sequence[float], statistic: str) -> float:
    """Return the ``median``, or the ``fastest`` for a machine with other load."""
    return min(values) if statistic == "fastest" else statistics.median(values)


def grouped(pairs: Iterable[tuple[K, float]]) -> dict[K, list[float]]:
    groups: dict[K, list[float]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
