"""A slow, obviously correct prefix index, as the oracle in tests."""

from __future__ import annotations

from collections.abc import Sequence

from skymemory.conductor.prefix_index.approximate import Blocks

Chain = tuple[int, ...]
"""A block with its predecessors."""


class NaivePrefixIndex:
    """Per slot the chains of its blocks, most recently used first."""

    def __init__(self, blocks_per_server: int) -> None:
        self._blocks_per_server = blocks_per_server
        self._capacities: dict[int, int] = {}
        self._held: dict[int, list[Chain]] = {}

    def match(self, blocks: Blocks, slots: Sequence[int]) -> list[int]:
        counts = []
        for slot in slots:
            held = {chain[-1] for chain in self._held.get(slot, [])}
            count = 0
            for block in blocks.tolist():
                if block not in held:
                    break
                count += 1
            counts.append(count)
        return counts

    def learn(self, slot: int, blocks: Blocks) -> None:
        chain = tuple(blocks.tolist())
        used = [chain[: length + 1] for length in range(len(chain))]
        before = [other for other in self._held.get(slot, []) if other not in used]
        self._held[slot] = (used + before)[: self.capacity_of(slot)]

    def correct(self, slot: int, blocks: Blocks, cached_blocks: int) -> int:
        gone = blocks.tolist()[cached_blocks : cached_blocks + 1]
        before = self._held.get(slot, [])
        self._held[slot] = [chain for chain in before if not set(gone) & set(chain)]
        return len(before) - len(self._held[slot])

    def forget(self, slot: int) -> None:
        self._held.pop(slot, None)
        self._capacities.pop(slot, None)

    def blocks_of(self, slot: int) -> int:
        return len(self._held.get(slot, []))

    def set_capacity(self, slot: int, blocks: int) -> None:
        self._capacities[slot] = blocks
        self._held[slot] = self._held.get(slot, [])[:blocks]

    def capacity_of(self, slot: int) -> int:
        return self._capacities.get(slot, self._blocks_per_server)
