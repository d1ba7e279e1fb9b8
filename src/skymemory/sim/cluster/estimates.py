"""What a scheduler believes that a prefill takes: apart from what it takes in the simulation."""

from __future__ import annotations

import random
from collections.abc import Sequence

from skymemory.conductor.cost_model import CostModel
from skymemory.conductor.cost_model.transfer import pipelined_s
from skymemory.conductor.strategies.speeds import GivenSpeeds, PrefillCost
from skymemory.sim.cluster.pipeline import Pipeline
from skymemory.sim.cluster.setup import ClusterSetup

LEAST_FACTOR = 0.1
_DRAWS = 4096


class Estimates:
    """By the cost model that is believed, for the pipelines that there are."""

    def __init__(self, setup: ClusterSetup) -> None:
        self.cost: CostModel = setup.believed or setup.cost
        self._pipeline = Pipeline(self.cost, setup.pipeline, setup.chunk_tokens)

    def prefill_s(self, tokens: float, cached: float = 0) -> float:
        """Seconds from the beginning of a prefill alone on its machines to its first token."""
        machines = self._pipeline.machines
        seconds = self.cost.prefill_s(tokens, cached)
        if machines > 1:
            chunks_s = self._pipeline.chunks_s(max(0, min(int(cached), int(tokens) - 1)), int(tokens))
            seconds += pipelined_s(chunks_s, machines) - sum(chunks_s) * machines
        return seconds

    def drain_s(self, tokens: float, cached: float) -> float:
        """Of that, the seconds in which the first machine is free already."""
        chunks_s = self._pipeline.chunks_s(max(0, min(int(cached), int(tokens) - 1)), int(tokens))
        return (self._pipeline.machines - 1) * max(chunks_s, default=0.0)


class ErringSpeeds(GivenSpeeds):
    """Each estimate is off by a factor of its own, drawn from the seed for every server and length of prompt.

    Normal, of mean 1 and a standard deviation of ``error``, never below a tenth. Servers of which nothing differs come
    out different; all that is asked of one server for one prompt is off by as much, whatever it has cached of it. The
    work that is then believed to wait there is off by it too. Equal questions get equal answers.
    """

    def __init__(self, cost: PrefillCost, error: float, seed: int) -> None:
        super().__init__(cost)
        dice = random.Random(seed)
        self._errors = [max(LEAST_FACTOR, 1.0 + error * dice.gauss(0.0, 1.0)) for _ in range(_DRAWS)]

    def prefills_s(self, slots: Sequence[int], tokens: int, cached: Sequence[int]) -> list[float]:
        seconds = super().prefills_s(slots, tokens, cached)
        return [one * self.factor(slot, tokens) for slot, one in zip(slots, seconds, strict=True)]

    def factor(self, slot: int, tokens: int) -> float:
        mixed = (tokens * 0x9E3779B97F4A7C15 + (slot + 1) * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
        return self._errors[(mixed ^ mixed >> 31) * 0x94D049BB133111EB >> 40 & _DRAWS - 1]
