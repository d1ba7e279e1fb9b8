"""Small worlds in which everything can be computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from skymemory.conductor.cost_model import Medium
from skymemory.conductor.picker import Fleet
from skymemory.conductor.prefix_index.approximate import Blocks
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.scheduling.kvcache_centric import KvCacheCentric, KvCacheCentricSettings, LoadSources

BLOCK = 10
"""Tokens of a block."""


@dataclass
class Quadratic:
    """Tokens and, twice, what each attends to; one token is always computed."""

    token_s: float = 1.0
    pair_s: float = 0.0

    def prefill_s(self, tokens: float, cached: float = 0) -> float:
        cached = max(0, min(cached, tokens - 1))
        return (tokens - cached) * self.token_s + (tokens**2 - cached**2) * self.pair_s


@dataclass
class KnownHoldings:
    """Who holds how many blocks, by slot, whatever the prompt."""

    held: dict[int, int] = field(default_factory=dict)
    learnt: list[tuple[int, int]] = field(default_factory=list)

    def match(self, blocks: Blocks, slots: Sequence[int]) -> list[int]:
        return [min(len(blocks), self.held.get(slot, 0)) for slot in slots]

    def learn(self, slot: int, blocks: Blocks) -> None:
        self.learnt.append((slot, len(blocks)))

    def correct(self, slot: int, blocks: Blocks, cached_blocks: int) -> int:
        return 0

    def forget(self, slot: int) -> None:
        self.held.pop(slot, None)

    def blocks_of(self, slot: int) -> int:
        return self.held.get(slot, 0)


@dataclass
class Tiers:
    tiers: list[tuple[str, int, Medium]]

    def far(self, blocks: Blocks) -> list[tuple[str, int, Medium]]:
        return self.tiers


@dataclass
class Busy:
    """LinkWaits with given waits."""

    out_s: dict[int, float]
    in_s: dict[int, float]

    def waits_out_s(self, slots: Sequence[int], now_s: float) -> list[float]:
        return [self.out_s.get(slot, 0.0) for slot in slots]

    def waits_in_s(self, slots: Sequence[int], now_s: float) -> list[float]:
        return [self.in_s.get(slot, 0.0) for slot in slots]


def fleet_of(servers: int) -> Fleet:
    fleet = Fleet()
    for number in range(servers):
        fleet.add(f"s{number}")
    return fleet


def a_request(blocks: int, extra_tokens: int = 0, seed: int = 0) -> Request:
    chain = np.random.default_rng(seed).integers(1, 2**63, blocks).astype(np.uint64)
    return Request(Prompt(chain, chain, BLOCK, blocks * BLOCK + extra_tokens))


def centric(
    held: dict[int, int],
    cost: Quadratic | None = None,
    network: Medium | None = None,
    far: Sequence[tuple[str, int, Medium]] = (),
    fleet: Fleet | None = None,
    **settings: object,
) -> KvCacheCentric:
    """A token's KV is one byte."""
    tiers = Tiers(list(far)) if far else None
    made = KvCacheCentricSettings(**settings)  # type: ignore[arg-type]
    return KvCacheCentric(KnownHoldings(held), cost or Quadratic(), 1.0, LoadSources(network, tiers, fleet), made)
