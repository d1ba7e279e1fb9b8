"""What a scheduler believes that a prefill takes: apart from what it takes in the simulation."""

from __future__ import annotations

import random

from skymemory.conductor.cost_model import CostModel
from skymemory.conductor.cost_model.transfer import pipelined_s
from skymemory.sim.cluster.pipeline import Pipeline
from skymemory.sim.cluster.setup import ClusterSetup

_DRAWS = 4096


class Estimates:
    """By the cost model that is believed, for the pipeline that there is, each off by a seeded draw.

    Normal, of mean 0 and a standard deviation of ``error``, cut off at three; equal questions get equal answers.
    """

    def __init__(self, setup: ClusterSetup) -> None:
        self.cost: CostModel = setup.believed or setup.cost
        self._pipeline = Pipeline(self.cost, setup.pipeline, setup.chunk_tokens)
        dice = random.Random(setup.seed)
        self._factors: list[float] = []
        if setup.error:
            self._factors = [1 + setup.error * max(-3.0, min(3.0, dice.gauss(0, 1))) for _ in range(_DRAWS)]

    def prefill_s(self, tokens: float, cached: float = 0) -> float:
        """Seconds from the beginning of a prefill alone on its machines to its first token."""
        machines = self._pipeline.machines
        seconds = self.cost.prefill_s(tokens, cached)
        if machines > 1:
            chunks_s = self._pipeline.chunks_s(max(0, min(int(cached), int(tokens) - 1)), int(tokens))
            seconds += pipelined_s(chunks_s, machines) - sum(chunks_s) * machines
        if not self._factors:
            return seconds
        mixed = (int(tokens) * 0x9E3779B97F4A7C15 + int(cached) * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
        return seconds * self._factors[(mixed >> 40) % _DRAWS]
