"""Requests that arrive by chance: Poisson processes over prompts of given lengths and given reuse.

The workloads of Mooncake's end-to-end experiments (table 2): ArXiv summarization (8,088 tokens in, 229 out, nothing
shared), L-Eval (19,019 in, 72 out, over 80 % cached), and simulated prompts of 16k to 128k tokens (512 out, half of
each cached). A simulator needs none of the data sets' words, only their lengths and what their prompts share. How
lengths scatter the paper does not say; ours are log-normal, and the simulated ones all alike.

A prompt is a prefix that others begin with too, and words of its own. ``prefixes`` says how many different prefixes
there are and how often each is wanted; what a cache that never evicts hits therefore begins below ``shared`` and
approaches it as prefixes come again (``trace_statistics`` tells by how much).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from skymemory.errors import InvalidInput
from skymemory.sim.block_names import BlockNames
from skymemory.sim.trace import TraceRequest
from skymemory.sim.workload import Popularity, Spread

_ONE = Popularity(1, 0.0)


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Prompts and answers of one kind."""

    name: str
    prompt: Spread
    answer: Spread
    shared: float = 0.0
    """Part of a prompt that is one of ``prefixes``, 0 to 1: a prefix has a length of its own, and the whole prompt
    is longer by so much that this part results."""
    prefixes: Popularity = _ONE

    def __post_init__(self) -> None:
        if not 0 <= self.shared < 1:
            raise InvalidInput(f"workload {self.name!r}: a shared part of {self.shared:g}; 0 or more, and below 1")


def poisson(workload: OpenLoop, rate_per_s: float, count: int, seed: int) -> list[TraceRequest]:
    """``count`` requests, ``rate_per_s`` of them a second on average; equal arguments give equal requests.

    At another rate the same requests come, sooner or later by the same factor: rates can be compared.

    Raises:
        InvalidInput: a rate that is not above 0, or no requests.
    """
    if not 0 < rate_per_s < math.inf or count < 1:
        raise InvalidInput(f"{count} requests at {rate_per_s:g}/s are no workload: at least one, and a rate above 0")
    dice, clock = random.Random(seed), random.Random(seed + 1)
    names = BlockNames()
    weights = workload.prefixes.weights()
    lengths = [workload.prompt.draw(dice) for _ in range(workload.prefixes.count)]
    requests, unit_s = [], 0.0
    for number in range(count):
        unit_s += clock.expovariate(1.0)
        stem: tuple[tuple[str, int, int], ...] = ()
        if workload.shared:
            which = workload.prefixes.draw(dice, weights, unit_s)
            tokens = lengths[which]
            stem = (("prefix", which, round(tokens * workload.shared)),)
        else:
            tokens = workload.prompt.draw(dice)
        ids = names.of(stem, ("own", number, tokens - sum(part[2] for part in stem)))
        answer = workload.answer.draw(dice)
        requests.append(TraceRequest(unit_s / rate_per_s, tokens, answer, ids, session=number))
    return requests


def _about(mean: float, sigma: float, least: int, most: int) -> Spread:
    """A log-normal of that mean, before its ends are cut off."""
    return Spread(mean / math.exp(sigma * sigma / 2), sigma, least, most)


def _exactly(tokens: int) -> Spread:
    return Spread(tokens, 0.0, tokens, tokens)


ARXIV = OpenLoop("arxiv", _about(8_088, 0.5, 500, 64_000), _about(229, 0.4, 20, 1_500))
L_EVAL = OpenLoop("l-eval", _about(19_019, 0.5, 3_000, 120_000), _about(72, 0.6, 1, 1_000), 0.97, Popularity(48, 0.0))
SIMULATED = tuple(
    OpenLoop(f"simulated-{thousand}k", _exactly(thousand * 1024), _exactly(512), 0.5, Popularity(24, 0.0))
    for thousand in (16, 32, 64, 128)
)
OPEN_LOOPS = {workload.name: workload for workload in (ARXIV, L_EVAL, *SIMULATED)}


def scaled(workload: OpenLoop, prefixes: int) -> OpenLoop:
    """The same prompts over another number of shared prefixes."""
    return replace(workload, prefixes=replace(workload.prefixes, count=prefixes))
