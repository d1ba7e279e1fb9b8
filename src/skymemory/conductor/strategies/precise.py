"""The same weighted sum as ``approximate``, with an index that the engines' own events feed.

Source: llm-d's precise prefix cache scorer. What each server holds is known, block by block and by medium: a block in
the GPU's memory counts whole, one in the host's 0.8, one farther away less, by the best medium that has it. A server of
which events were lost is believed to hold nothing until they were made up for. As there, what was sent can count as
held for a while, until events say so (``speculative_s``; llm-d's is off, and 2 s where it is switched on).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from skymemory.conductor.fleet import Server
from skymemory.conductor.prefix_index.media import CPU, DISK, GPU, REMOTE
from skymemory.conductor.prefix_index.precise import WEIGHTS, PreciseIndex
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.strategies.approximate import Approximate, WeightedSettings
from skymemory.conductor.strategies.base import Ranking
from skymemory.conductor.strategies.under_way import Blocks, UnderWay
from skymemory.errors import InvalidInput

MOST_BLOCKS = 8192
"""Of a prompt that was sent, so many count as held."""


@dataclass(frozen=True, slots=True)
class PreciseSettings(WeightedSettings):
    block_tokens: int = 16
    """Of the engines' blocks, which the prompts' must equal."""
    speculative_s: float = 0.0
    """How long a prompt that was sent counts as held; 0: only what events say."""
    gpu_weight: float = WEIGHTS[GPU]
    """What a block counts by its medium: llm-d's ``kvCacheBackendConfigs``."""
    cpu_weight: float = WEIGHTS[CPU]
    disk_weight: float = WEIGHTS[DISK]
    remote_weight: float = WEIGHTS[REMOTE]

    def __post_init__(self) -> None:
        WeightedSettings.__post_init__(self)
        if self.speculative_s < 0:
            raise InvalidInput(f"speculative_s is {self.speculative_s}; expected 0 or more, such as 2")
        if self.block_tokens < 1:
            raise InvalidInput(f"block_tokens is {self.block_tokens}; expected 1 or more, such as 16")
        for medium, weight in self.weights().items():
            if not 0 <= weight < math.inf:
                raise InvalidInput(f"{medium.lower()}_weight is {weight}; expected 0 or more, such as 0.8")

    def weights(self) -> dict[str, float]:
        return {GPU: self.gpu_weight, CPU: self.cpu_weight, DISK: self.disk_weight, REMOTE: self.remote_weight}


class Precise(Approximate):
    name = "precise"

    def __init__(self, index: PreciseIndex, settings: PreciseSettings | None = None) -> None:
        settings = settings or PreciseSettings()
        super().__init__(index, settings, under_way_blocks=0)
        self._events = index
        self._speculative_s = settings.speculative_s
        self._speculative = UnderWay(MOST_BLOCKS, index.secret)
        self._until: OrderedDict[tuple[int, int], tuple[float, Request, Blocks]] = OrderedDict()
        """By request and slot, in the order of their ends."""

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        while self._until and next(iter(self._until.values()))[0] <= now_s:
            (_, slot), (_, _, chain) = self._until.popitem(last=False)
            self._speculative.drop(slot, chain)
        return super().rank(request, servers, now_s)

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        super().routed(request, server, now_s)
        blocks, key = request.prompt.blocks, (id(request), server.slot)
        if self._speculative_s and len(blocks) and key not in self._until:
            self._until[key] = now_s + self._speculative_s, request, self._speculative.add(server.slot, blocks)

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        super().failed(request, server, now_s)
        if (sent := self._until.pop((id(request), server.slot), None)) is not None:
            self._speculative.drop(server.slot, sent[2])

    def forget(self, server: Server) -> None:
        super().forget(server)
        self._speculative.forget(server.slot)
        for key in [key for key in self._until if key[1] == server.slot]:
            del self._until[key]

    def held(self, prompt: Prompt, servers: Sequence[Server]) -> tuple[list[int], list[float]]:
        slots = [server.slot for server in servers]
        blocks, weighted = self._events.match_weighted(prompt.blocks, slots)
        if sent := self._speculative.depths(prompt.blocks, slots):
            weighted = [max(float(one), other) for one, other in zip(sent, weighted, strict=True)]
            blocks = list(map(max, blocks, sent))
        per_block = prompt.block_tokens / prompt.tokens if prompt.tokens else 0.0
        return self.matched_tokens(prompt, blocks), [min(1.0, count * per_block) for count in weighted]
