"""Decoding steps of one batch in a row, in closed form: how long so many take, and how many begin within a time.

Between two changes of a batch its contexts grow by one token per request with each step, so that reading and computing
are both linear in the step's number and a step takes the longer of the two: ``CostModel.decode_run_s``, with the parts
of each batch size computed once.
"""

from __future__ import annotations

import math

from skymemory.conductor.cost_model import CostModel


class Steps:
    """Of one kind of machine. Contexts are the tokens of all requests in the batch, as of the first step."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._parts: list[tuple[float, float, float, float, float]] = []

    def step_s(self, batch: int, kv_tokens: float) -> float:
        fixed_s, read_s, read_per_s, flops_s, flops_per_s = self._of(batch)
        reading, computing = read_s + read_per_s * kv_tokens, flops_s + flops_per_s * kv_tokens
        return fixed_s + (reading if reading > computing else computing)

    def run_s(self, batch: int, kv_tokens: float, steps: int) -> float:
        """Seconds of so many steps."""
        first, slope, cut, then, then_slope = self._lines(batch, kv_tokens)
        if steps <= cut:
            return steps * (first + slope * (steps - 1) / 2)
        rest = steps - cut
        return cut * (first + slope * (cut - 1) / 2) + rest * (then + then_slope * (cut + steps - 1) / 2)

    def steps_until(self, batch: int, kv_tokens: float, seconds: float, most: int) -> int:
        """The fewest steps that together take ``seconds`` or longer, at most ``most``; at least one."""
        first, slope, cut, then, then_slope = self._lines(batch, kv_tokens)
        begun = cut * (first + slope * (cut - 1) / 2) if cut < most else math.inf
        if seconds <= begun:
            guess: float = _fewest(first, slope, 0, seconds)
        else:
            guess = cut + _fewest(then, then_slope, cut, seconds - begun)
        steps = int(max(1, min(guess, most)))
        while steps > 1 and self.run_s(batch, kv_tokens, steps - 1) >= seconds:
            steps -= 1
        while steps < most and self.run_s(batch, kv_tokens, steps) < seconds:
            steps += 1
        return steps

    def _lines(self, batch: int, kv_tokens: float) -> tuple[float, float, float, float, float]:
        """Step ``i`` takes ``first + slope·i`` up to ``cut`` steps, and ``then + then_slope·i`` from there on."""
        fixed_s, read_s, read_per_s, flops_s, flops_per_s = self._of(batch)
        reading, computing = read_s + read_per_s * kv_tokens, flops_s + flops_per_s * kv_tokens
        if reading >= computing:
            first, slope, then, then_slope = reading, read_per_s * batch, computing, flops_per_s * batch
        else:
            first, slope, then, then_slope = computing, flops_per_s * batch, reading, read_per_s * batch
        cut: float = math.inf
        if then_slope > slope:
            cut = math.floor((first - then) / (then_slope - slope)) + 1
        return fixed_s + first, slope, cut, fixed_s + then, then_slope

    def _of(self, batch: int) -> tuple[float, float, float, float, float]:
        parts = self._parts
        while len(parts) <= batch:
            parts.append(self._cost.decode_parts(len(parts)))
        return parts[batch]


def _fewest(start: float, slope: float, begin: float, seconds: float) -> int:
    """About how many terms ``start + slope·i``, from ``i = begin`` on, reach ``seconds``."""
    begins = start + slope * begin
    if slope <= 0.0:
        return math.ceil(seconds / begins) if begins > 0.0 else 1
    half = begins / slope - 0.5
    return math.ceil(math.sqrt(half * half + 2.0 * seconds / slope) - half)
