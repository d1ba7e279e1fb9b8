"""Prefix cache whose blocks are held by running requests, as in vLLM: only blocks without a holder are evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from skymemory.errors import InvalidInput


@dataclass(slots=True)
class HeldRoom:
    """Blocks of a running request."""

    chain: tuple[int, ...]
    hit_blocks: int
    private_blocks: int
    """Blocks that no other request can use: computed but not stored, or of the answer."""
    evicted: list[int]
    held: int
    """Leading blocks of the chain that it holds."""


class HeldCache:
    """LRU cache of blocks, closed under prefixes, with room for running requests.

    A request holds the blocks that it hits and private ones for the rest (``hold``), shares those of its prompt when
    they are computed (``store``), and lets go in the end (``release``).
    """

    def __init__(self, capacity: int) -> None:
        """Initialise with ``capacity`` in blocks."""
        if capacity < 1:
            raise InvalidInput(f"a cache of {capacity} blocks; expected at least 1")
        self.capacity = capacity
        self._free: OrderedDict[int, None] = OrderedDict()  # without a holder, the oldest first
        self._holders: dict[int, int] = {}
        self._private = 0

    def __contains__(self, block: int) -> bool:
        return block in self._free or block in self._holders

    @property
    def held_blocks(self) -> int:
        return len(self._holders) + self._private

    def leading(self, chain: Sequence[int]) -> int:
        return next((at for at, block in enumerate(chain) if block not in self), len(chain))

    def hold(self, chain: Sequence[int], blocks: int) -> HeldRoom | None:
        """Hold ``blocks`` for a request with a prompt of ``chain``; None: too many are held.

        A request larger than the cache gets all of it.
        """
        chain = tuple(chain[: self.capacity])
        blocks = max(len(chain), min(blocks, self.capacity))
        hit = self.leading(chain)
        new = sum(block in self._free for block in chain[:hit])
        if self.held_blocks + new + blocks - hit > self.capacity:
            return None
        self._add_holder(chain[:hit])
        self._private += blocks - hit
        evicted = []
        while len(self._free) + self.held_blocks > self.capacity:
            evicted.append(self._free.popitem(last=False)[0])
        return HeldRoom(chain, hit, blocks - hit, evicted, hit)

    def store(self, room: HeldRoom, blocks: int) -> None:
        """Share the leading ``blocks`` of the prompt."""
        rest = room.chain[room.held : blocks]
        self._add_holder(rest)
        self._private -= len(rest)
        room.private_blocks -= len(rest)
        room.held += len(rest)

    def release(self, room: HeldRoom) -> None:
        # From the last to the first, so that the root is the youngest block and is evicted last.
        for block in reversed(room.chain[: room.held]):
            holders = self._holders[block] - 1
            if holders:
                self._holders[block] = holders
            else:
                del self._holders[block]
                self._free[block] = None
        self._private -= room.private_blocks
        room.held = room.private_blocks = 0

    def clear(self) -> None:
        """Drop the blocks without a holder."""
        self._free.clear()

    def _add_holder(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._free.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1
