from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skymemory.conductor.picker import Ranking, Server
from skymemory.conductor.prefix_index.approximate import PrefixIndex
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.strategy_base import GainThreshold, Indexed, loads_of, ranked_by_load
from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class RadixSettings:
    """Thresholds of ``Radix``; load is a server's number of requests."""

    balance_absolute: float = 64.0
    """Difference of loads above which load decides (if the ratio is above ``balance_relative``, too)."""
    balance_relative: float = 1.5
    min_match_tokens: int = 0
    min_match_ratio: float = 0.3
    blocks_per_server: int = 31_250

    def __post_init__(self) -> None:
        if self.balance_absolute < 0 or self.balance_relative < 1:
            raise InvalidInput(
                f"balance_absolute {self.balance_absolute} and balance_relative {self.balance_relative};"
                " expected at least 0 and 1"
            )


class Radix(Indexed):
    """Strategy by load if it differs much, otherwise by the longest match, otherwise by load.

    Source: ``cache_aware`` of SGLang's router. Differences: of equal matches the least load; failed requests are
    undone.
    """

    name = "radix"

    def __init__(self, index: PrefixIndex, settings: RadixSettings | None = None) -> None:
        super().__init__(index)
        self.settings = settings or RadixSettings()
        self._gain = GainThreshold(self.settings.min_match_tokens, self.settings.min_match_ratio)

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        loads = loads_of(servers, now_s)
        matched = self.matched_tokens(request.prompt, self.matched_blocks(request.prompt, servers))
        # Both conditions, as published: 64 more requests mean little among thousands, a ratio little among a few.
        most, least = max(loads), min(loads)
        settings, tokens = self.settings, request.prompt.tokens
        if most - least > settings.balance_absolute and most > settings.balance_relative * least:
            reason = f"load first: servers have {least:.0f} to {most:.0f} requests"
        elif not self._gain.worth(best := max(matched), tokens):
            reason = self._gain.why_not(best, tokens)
        else:
            # Loads change a score by less than one token: they decide only among equal matches.
            scores = [tokens_held + 1.0 / (1.0 + load) for tokens_held, load in zip(matched, loads, strict=True)]
            reason = f"longest match {best} of {tokens} tokens"
            return Ranking(scores, matched, reasons=(reason,), weights=(("requests there", loads),))
        return ranked_by_load(loads, reason, matched)


@dataclass(frozen=True, slots=True)
class LMetricSettings:
    blocks_per_server: int = 31_250


class LMetric(Indexed):
    """Strategy by the least ``(prompt − matched) · (requests there + 1)``; of equal products the fewest requests, then
    the fewest tokens to compute.

    Source: SGLang's model gateway (``sgl-model-gateway/src/policies/lmetric.rs``, after "Blitz Router"). Differences:
    the tree is bounded by the server's capacity; failed requests are undone; full ties are drawn, where it takes the
    first server.
    """

    name = "lmetric"

    def __init__(self, index: PrefixIndex) -> None:
        super().__init__(index)

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        matched = self.matched_tokens(request.prompt, self.matched_blocks(request.prompt, servers))
        loads = loads_of(servers, now_s)
        new = [float(request.prompt.tokens - tokens_held) for tokens_held in matched]
        products = [work * (load + 1.0) for work, load in zip(new, loads, strict=True)]
        # The score is the place in the order, since no sum of weights orders ties exactly.
        keys = list(zip(products, loads, new, strict=True))
        places = {key: -float(place) for place, key in enumerate(sorted(set(keys)))}
        scores = [places[key] for key in keys]
        weights = (("tokens held", matched), ("requests there", loads), ("their product", products))
        return Ranking(scores, matched, weights=weights)
