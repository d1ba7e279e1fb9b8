"""Seeded distributions of the workloads: lengths, popularity, and arrivals in bursts."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Clipped log-normal distribution of whole numbers."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, dice: random.Random) -> int:
        return max(self.least, min(self.most, round(self.median * math.exp(dice.gauss(0, self.sigma)))))


@dataclass(frozen=True, slots=True)
class QuantileLengths:
    """Distribution with these quantiles: (share, value) from share 0 to 1, linear between; rounded."""

    points: tuple[tuple[float, float], ...]

    def draw(self, dice: random.Random) -> int:
        share = dice.random()
        (low, below), (high, above) = next(pair for pair in pairwise(self.points) if share < pair[1][0])
        return round(below + (above - below) * (share - low) / (high - low))


class Lengths(Protocol):
    """Distribution of whole numbers."""

    def draw(self, dice: random.Random) -> int: ...


@dataclass(frozen=True, slots=True)
class Bursts:
    """Arrivals at ``times`` the mean rate for ``lasts_s`` in the middle of every ``every_s``, and fewer otherwise."""

    times: float
    lasts_s: float
    every_s: float

    def __post_init__(self) -> None:
        if not 0 < self.times * self.lasts_s < self.every_s:
            raise InvalidInput(f"bursts with more requests than the mean rate: times · lasts_s is over {self.every_s}")

    def warped_s(self, even_s: float) -> float:
        """Return the time by which as many requests have arrived as by ``even_s`` at the mean rate."""
        periods, inside_s = divmod(even_s, self.every_s)
        burst_s = self.times * self.lasts_s
        calm_s = self.every_s - burst_s
        slow = (self.every_s - self.lasts_s) / calm_s
        if inside_s < calm_s / 2:
            at_s = inside_s * slow
        elif inside_s < calm_s / 2 + burst_s:
            at_s = calm_s / 2 * slow + (inside_s - calm_s / 2) / self.times
        else:
            at_s = self.lasts_s + (inside_s - burst_s) * slow
        return periods * self.every_s + at_s


@dataclass(frozen=True, slots=True)
class Popularity:
    """Zipf popularity, ``1 / rank ** skew``; ranks rotate by ``moves_by`` every ``moves_every_s``."""

    count: int
    skew: float
    moves_every_s: float = math.inf
    moves_by: int = 0

    def weights(self) -> list[float]:
        return list(accumulate(1 / rank**self.skew for rank in range(1, self.count + 1)))

    def draw(self, dice: random.Random, weights: list[float], at_s: float) -> int:
        rank = dice.choices(range(self.count), cum_weights=weights)[0]
        steps = 0 if math.isinf(self.moves_every_s) else math.floor(at_s / self.moves_every_s)
        return (rank + steps * self.moves_by) % self.count
