"""What it costs to use blocks that lie behind the GPU's memory: they are not computed, but they must be loaded.

Where seconds per block are known they are added. Where they are not, a block counts as so much of one to compute, by
its medium: a fifth in the host's memory, since llm-d gives it 0.8 of a block in the GPU's
(``llm-d-kv-cache-manager/pkg/kvcache/backend.go``); three quarters on a disk or another machine, since Dynamo gives
those 0.25 (``disk_cache_hit_weight``); and a whole one in a medium of unknown name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from skymemory.conductor.prefix_index.base import Blocks
from skymemory.conductor.prefix_index.media import CPU, DISK, OTHER, REMOTE
from skymemory.conductor.prefix_index.precise import PreciseIndex

COMPUTED: Mapping[str, float] = MappingProxyType({CPU: 0.2, DISK: 0.75, REMOTE: 0.75, OTHER: 1.0})
"""Of a block's computing, what loading it is taken to cost where that is not known."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a server has to load of a prompt."""

    blocks: float = 0.0
    """It costs as much as to compute so many blocks,"""
    seconds: float = 0.0
    """and these."""

    def part(self, part: float) -> Load:
        """Where only a part of what was believed to be held was there."""
        return self if part >= 1 else Load(self.blocks * part, self.seconds * part)


NOTHING = Load()


class Loads:
    """``load_s``: seconds per block by medium; 0 where they are not known."""

    def __init__(self, index: PreciseIndex, load_s: Mapping[str, float]) -> None:
        self._index = index
        self._seconds = {medium: seconds for medium, seconds in load_s.items() if seconds > 0}
        self._blocks = {medium: part for medium, part in COMPUTED.items() if medium not in self._seconds}

    @property
    def any(self) -> bool:
        """Whether any server was heard to hold a block elsewhere than in the GPU's memory."""
        return self._index.farther

    def of(self, blocks: Blocks, slots: Sequence[int], under_way: Sequence[int]) -> list[Load]:
        """For each of ``slots``. ``under_way``: leading blocks that it will have in the GPU's memory by then, for
        prompts that it was sent before; empty if there are none.
        """
        loads = self._costs(blocks, slots)
        for at, depth in enumerate(under_way):
            if depth and loads[at] is not NOTHING:
                (there,) = self._costs(blocks[:depth], slots[at : at + 1])
                loads[at] = Load(loads[at].blocks - there.blocks, loads[at].seconds - there.seconds)
        return loads

    def _costs(self, blocks: Blocks, slots: Sequence[int]) -> list[Load]:
        counts = self._index.costs(blocks, slots, self._blocks)
        seconds = self._index.costs(blocks, slots, self._seconds) if self._seconds else [0.0] * len(counts)
        return [Load(*one) if any(one) else NOTHING for one in zip(counts, seconds, strict=True)]
