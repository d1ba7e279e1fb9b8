"""The same weighted sum as ``approximate``, with an index that the engines' own events feed.

Source: llm-d's precise prefix cache scorer. What each server holds is known, block by block and by medium: a block in
the GPU's memory counts whole, one in the host's 0.8, one farther away less (``prefix_index.precise``). A server of
which events were lost is believed to hold nothing until they were made up for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skymemory.conductor.fleet import Server
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.request import Prompt
from skymemory.conductor.strategies.approximate import Approximate, WeightedSettings
from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class PreciseSettings(WeightedSettings):
    block_tokens: int = 16
    """Of the engines' blocks, which the prompts' must equal."""

    def __post_init__(self) -> None:
        WeightedSettings.__post_init__(self)
        if self.block_tokens < 1:
            raise InvalidInput(f"block_tokens is {self.block_tokens}; expected 1 or more, such as 16")


class Precise(Approximate):
    name = "precise"

    def __init__(self, index: PreciseIndex, settings: PreciseSettings | None = None) -> None:
        super().__init__(index, settings or PreciseSettings())
        self._events = index

    def held(self, prompt: Prompt, servers: Sequence[Server]) -> tuple[list[int], list[float]]:
        slots = [server.slot for server in servers]
        blocks, weighted = self._events.match_weighted(prompt.blocks, slots)
        per_block = prompt.block_tokens / prompt.tokens if prompt.tokens else 0.0
        return self.matched_tokens(prompt, blocks), [min(1.0, count * per_block) for count in weighted]
