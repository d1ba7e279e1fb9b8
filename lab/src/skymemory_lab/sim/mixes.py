"""Requests whose mix changes between readers (long prompts, short answers) and writers (the reverse).

Readers need prefill, writers decode instances.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from skymemory.config import suggestion
from skymemory.errors import InvalidInput
from skymemory_lab.sim.distributions import LogNormal
from skymemory_lab.sim.trace import BLOCK_TOKENS, TraceRequest
from skymemory_lab.sim.workload import WORKLOADS, generate


@dataclass(frozen=True, slots=True)
class Kind:
    prompt: LogNormal
    answer: LogNormal


READERS = Kind(LogNormal(14_000, 0.5, 1_000, 64_000), LogNormal(110, 0.5, 10, 600))
WRITERS = Kind(LogNormal(900, 0.7, 50, 8_000), LogNormal(900, 0.4, 100, 3_000))

Share = Callable[[float], float]
"""Share of the readers' peak, by the elapsed part of a period, 0 to 1."""
SHAPES: Mapping[str, Share] = {
    "even": lambda part: 0.5,
    "day": lambda part: (1 + math.cos(2 * math.pi * part)) / 2,
    "turns": lambda part: float(part % 1 < 0.5),
    "switch": lambda part: float(part < 0.5),
    "ramp": lambda part: max(0.0, 1 - part),
}
"""Shapes; ``turns``: ``day`` with abrupt changes."""


@dataclass(frozen=True, slots=True)
class MixSource:
    """Poisson requests of readers at ``share`` of their peak, by ``SHAPES[shape]``, and writers at ``1 - share``."""

    shape: str
    seed: int = 0
    readers_per_s: float = 2.0
    writers_per_s: float = 4.0
    duration_s: float = 3600.0
    period_s: float = 3600.0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise InvalidInput(f"no mix {self.shape!r}; {suggestion(self.shape, SHAPES)}")
        figures = (self.readers_per_s, self.writers_per_s, self.duration_s, self.period_s)
        if not all(0 < figure < math.inf for figure in figures):
            raise InvalidInput(f"mix {self.shape!r}: expected rates, duration_s and period_s above 0")

    @property
    def name(self) -> str:
        return f"readers and writers, {self.shape}"

    def requests(self) -> list[TraceRequest]:
        return _mixed(self)


@lru_cache(maxsize=2)
def _mixed(source: MixSource) -> list[TraceRequest]:
    share = SHAPES[source.shape]
    drawn: list[tuple[float, int, int]] = []
    for number, (kind, peak_per_s) in enumerate(((READERS, source.readers_per_s), (WRITERS, source.writers_per_s))):
        dice, at_s = random.Random(f"{source.seed} {number}"), 0.0
        # Arrivals at the peak rate, each accepted with the shape's share: a Poisson process of the changing rate.
        while (at_s := at_s + dice.expovariate(peak_per_s)) < source.duration_s:
            readers = share(at_s / source.period_s)
            if dice.random() < (1 - readers if number else readers):
                drawn.append((at_s, kind.prompt.draw(dice), kind.answer.draw(dice)))
    requests, block = [], 0  # prompts share no block
    for session, (at_s, tokens, output) in enumerate(sorted(drawn)):
        blocks = -(-tokens // BLOCK_TOKENS)
        requests.append(TraceRequest(at_s, tokens, output, tuple(range(block, block + blocks)), session))
        block += blocks
    return requests


@dataclass(frozen=True, slots=True)
class WorkloadSource:
    """Generated requests of ``WORKLOADS[workload]``."""

    workload: str
    seed: int = 0
    duration_s: float = 3600.0

    @property
    def name(self) -> str:
        return f"{self.workload}, generated"

    def requests(self) -> list[TraceRequest]:
        return generate(WORKLOADS[self.workload], self.duration_s, self.seed)
