"""LMetric: the least product of what a server would have to compute and of how many requests it has.

Source: SGLang's model gateway, policy ``lmetric`` (``sgl-model-gateway/src/policies/lmetric.rs``, after "Blitz
Router"): of ``(prompt − matched) · (requests there + 1)`` the least, then the fewest requests. No weights. Done
otherwise: the tree is on blocks, not on characters, and is bounded by what a server's cache holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skymemory.conductor.fleet import Server
from skymemory.conductor.prefix_index.base import PrefixIndex
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.base import Ranking, loads_of
from skymemory.conductor.strategies.indexed import Indexed

_TIE = 1e-6
"""What a request counts where products tie; they are whole numbers."""


@dataclass(frozen=True, slots=True)
class LMetricSettings:
    blocks_per_server: int = 31_250
    """What is believed of a server that does not report the size of its cache."""


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
