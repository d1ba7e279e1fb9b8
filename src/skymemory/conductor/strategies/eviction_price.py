"""What a server loses by the blocks that a new prompt evicts there, and how crowded its cache is."""

from __future__ import annotations

from collections.abc import Sequence

from skymemory import native

MOST_FULL = 0.9
"""Share of a cache beyond which it counts as no fuller."""
_EXPECTED, _DOUBT = 12, 50_000
"""Later uses of a token while few prompts were seen, and the tokens by which that is doubted: a new prompt is better
put where there is room for the many turns that it may have.
"""
_DOUBTED_BLOCKS = 100
_EVERY = 64
_KEPT = 0.98
"""Decay per prompt, in the share of tokens found."""


class EvictionPrice:
    """Price of room, by the ages at which blocks of ``table`` are used again (``native.PrefixTable.ages``)."""

    def __init__(self, table: native.PrefixTable) -> None:
        self._table = table
        self._chances: Sequence[tuple[float, int]] = ()
        self._until = 0
        self._tokens = self._found = 0.0
        self._coming: dict[int, int] = {}
        """Blocks of prompts that were sent to a server and are not in the table yet."""

    def sent(self, slot: int, tokens: int, matched: int, new_blocks: int) -> None:
        """Record a prompt: the more of them is found, the more often a new one will be used again."""
        self._coming[slot] = self._coming.get(slot, 0) + new_blocks
        self._tokens = self._tokens * _KEPT + tokens
        self._found = self._found * _KEPT + matched

    def arrived(self, slot: int, new_blocks: int) -> None:
        """Record that a prompt that was sent is in the table, or has failed."""
        self._coming[slot] = max(0, self._coming.get(slot, 0) - new_blocks)

    def forget(self, slot: int) -> None:
        self._coming.pop(slot, None)

    @property
    def future_uses(self) -> float:
        """Return how often a token that is computed now will be found later."""
        new = self._tokens - self._found
        return (self._found + _EXPECTED * _DOUBT) / (new + _DOUBT)

    def lost_share(self, slot: int) -> float:
        """Return the chance that the next block to be evicted would have been used again; 0 if there is room."""
        age = self._table.oldest(slot)
        if age < 0 or self._table.block_count(slot) < self._table.capacity(slot):
            return 0.0
        return self._read()[age.bit_length()][0]

    def fullness(self, slot: int) -> float:
        """Return the share of a server's cache that is in use, weighted by the chance that its oldest block is used
        again: 1 without evidence.
        """
        age, capacity = self._table.oldest(slot), self._table.capacity(slot)
        used = self._table.block_count(slot) + self._coming.get(slot, 0)
        if not used or not capacity:
            return 0.0
        chance, blocks = self._read()[max(0, age).bit_length()]
        chance = (chance * blocks + _DOUBTED_BLOCKS) / (blocks + _DOUBTED_BLOCKS)
        return min(MOST_FULL, chance * used / capacity)

    def _read(self) -> Sequence[tuple[float, int]]:
        changes = self._table.changes()
        if changes >= self._until or not self._chances:
            self._until = changes + _EVERY
            self._chances = chances_of_use(*self._table.ages())
        return self._chances

    def crowding(self, slot: int) -> float:
        """Return the later uses of a new prompt that will find others evicted for it, or itself."""
        full = self.fullness(slot)
        return self.future_uses * full / (1.0 - full)


def chances_of_use(used: Sequence[int], evicted: Sequence[int]) -> tuple[tuple[float, int], ...]:
    """Return the chance that a block is used again, by the binary digits of its age, and how many blocks show it.

    ``used`` and ``evicted``: numbers of blocks that were used again or evicted at that age. An evicted block says only
    that it was not used until then (the estimate of Kaplan and Meier, 1958).
    """
    chances, at_risk, never = [], 0, 1.0
    for again, gone in zip(reversed(used), reversed(evicted), strict=True):
        at_risk += again + gone
        if at_risk:
            never *= 1.0 - again / at_risk
        chances.append((1.0 - never, at_risk))
    return tuple(reversed(chances))
