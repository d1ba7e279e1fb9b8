"""LMetric: the least product of tokens to compute and requests at the server.

Source: SGLang's model gateway, policy ``lmetric`` (``sgl-model-gateway/src/policies/lmetric.rs``, after "Blitz
Router"): the least ``(prompt − matched) · (requests there + 1)``, then the fewest requests. No weights. Differences:
the tree is of blocks, not characters, and is bounded by the capacity of the server's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skymemory.conductor.fleet import Server
from skymemory.conductor.prefix_index.base import PrefixIndex
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.base import Indexed, Ranking, loads_of

_TIE = 1e-6
"""Weight of a request among equal products, which are whole numbers."""


@dataclass(frozen=True, slots=True)
class LMetricSettings:
    blocks_per_server: int = 31_250
    """Assumed capacity of a server that does not report its cache's size."""


class LMetric(Indexed):
    name = "lmetric"

    def __init__(self, index: PrefixIndex) -> None:
        super().__init__(index)

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        matched = self.matched_tokens(request.prompt, self.matched_blocks(request.prompt, servers))
        loads = loads_of(servers, now_s)
        new = [float(request.prompt.tokens - held) for held in matched]
        scores = [-work * (load + 1.0) - _TIE * load for work, load in zip(new, loads, strict=True)]
        return Ranking(scores, matched, weights=(("tokens held", matched), ("requests there", loads)))
