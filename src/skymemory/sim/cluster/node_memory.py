"""What one node caches: blocks in memory under a policy, and behind them an SSD for what memory evicts.

Neither ever lets a parent go before its child. Memory evicts the deeper block first whatever its policy, so the SSD
gets children before parents; it lets go first what it got first; and what is used again goes back to memory from the
root on. So memory and SSD together are closed under prefixes, and memory is by itself.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

from skymemory.errors import InvalidInput
from skymemory.store.accounting import Inventory
from skymemory.store.base import StoreTicket


class Memory(Protocol):
    """Blocks within a budget; what is here is closed under prefixes."""

    capacity: int

    def __len__(self) -> int: ...

    def leading(self, chain: Sequence[int]) -> int: ...

    def use(self, chain: Sequence[int]) -> list[int]:
        """As ``PrefixCache.use``: all of ``chain`` is accessed, and as much of it as fits is here."""
        ...


class PolicyMemory:
    """Blocks under one of the policies of the memory and disk tiers, through the inventory that these use."""

    def __init__(self, capacity: int, policy: str) -> None:
        if capacity < 1:
            raise InvalidInput(f"a memory of {capacity} blocks holds nothing; at least one is needed")
        self.capacity = capacity
        self._inventory = Inventory(capacity, 0, policy)

    def __len__(self) -> int:
        return len(self._inventory)

    def leading(self, chain: Sequence[int]) -> int:
        here = self._inventory.entries
        for at, block in enumerate(chain):
            if block.to_bytes(8) not in here:
                return at
        return len(chain)

    def use(self, chain: Sequence[int]) -> list[int]:
        inventory, keys = self._inventory, [block.to_bytes(8) for block in chain]
        inventory.order.learn(keys)
        held = self.leading(chain)
        inventory.use(keys[:held])
        if held == len(keys):
            return []
        ticket = StoreTicket(tuple((key, b"1") for key in keys[held:]), math.inf)
        given = inventory.reserve(ticket, 0.0)
        wanted = [(key, 1) for (key, _), yes in zip(ticket.items, given, strict=True) if yes]
        count, gone = inventory.in_the_way(wanted)
        for key in gone:
            inventory.evict(key)
        for key, _ in wanted[:count]:
            inventory.put(key, 1)
        inventory.end_store(ticket)
        inventory.touch(keys[held:])
        return [int.from_bytes(key) for key in gone]


class NoMemory:
    """A node that keeps nothing in memory: all that it computes goes on to its SSD, if it has one."""

    capacity = 0

    def __len__(self) -> int:
        return 0

    def leading(self, chain: Sequence[int]) -> int:
        return 0

    def use(self, chain: Sequence[int]) -> list[int]:
        return list(reversed(chain))


def memory_of(capacity: int, policy: str) -> Memory:
    """LRU in its fastest form, or any other policy."""
    if not capacity:
        return NoMemory()
    return PrefixCache(capacity) if policy == "lru" else PolicyMemory(capacity, policy)


class NodeMemory:
    """Memory and SSD of one node. ``ssd_blocks`` 0: what memory evicts is gone."""

    def __init__(self, blocks: int, policy: str = "lru", ssd_blocks: int = 0) -> None:
        self.memory = memory_of(blocks, policy)
        self._ssd_blocks = ssd_blocks
        self._ssd: OrderedDict[int, None] = OrderedDict()
        self.coming: dict[int, float] = {}
        """Blocks that are being loaded, and when each will have come."""
        self._last_comes_s = -math.inf
        self.evicted = 0
        """From memory, so far."""
        self.dropped = 0
        """From the node altogether."""

    def __len__(self) -> int:
        return len(self.memory) + len(self._ssd)

    def leading(self, chain: Sequence[int]) -> int:
        """How many of ``chain``'s first blocks are here, in memory or behind it."""
        held = self.memory.leading(chain)
        return held + self._behind(chain, held) if self._ssd else held

    def in_memory(self, chain: Sequence[int]) -> int:
        return self.memory.leading(chain)

    def _behind(self, chain: Sequence[int], held: int) -> int:
        for at in range(held, len(chain)):
            if chain[at] not in self._ssd:
                return at - held
        return len(chain) - held

    def use(self, chain: Sequence[int]) -> int:
        """All of ``chain`` is accessed, and in memory as far as it fits. Returns how many blocks memory evicted."""
        gone = self.memory.use(chain)
        if not self.memory.capacity and not self._ssd_blocks:
            return 0
        if self._ssd:
            for block in chain[: self.memory.leading(chain)]:
                self._ssd.pop(block, None)
        self.evicted += len(gone)
        if not self._ssd_blocks:
            self.dropped += len(gone)
            return len(gone)
        for block in gone:
            self._ssd[block] = None
        while len(self._ssd) > self._ssd_blocks:
            self._ssd.popitem(last=False)
            self.dropped += 1
        return len(gone)

    def comes(self, blocks: Sequence[int], done_s: float) -> None:
        """They have room here, and will have come then."""
        self.coming.update(dict.fromkeys(blocks, done_s))
        self._last_comes_s = max(self._last_comes_s, done_s)

    def ready_s(self, blocks: Sequence[int], now_s: float) -> float:
        """When the last of them that is still on its way will have come; ``now_s`` if none is."""
        if not self.coming:
            return now_s
        if self._last_comes_s <= now_s:
            self.coming.clear()
            return now_s
        coming = self.coming
        return max(now_s, max((coming.get(block, now_s) for block in blocks), default=now_s))


# A simulated server's prefix cache: so many blocks, the least recently used go first, a parent never before its child.
#
# A prompt's blocks are touched from its last to its first, so that of one chain the deepest is always the oldest.
# What is
# resident is therefore closed under prefixes: the leading resident blocks of a prompt are all that it could hit.


class PrefixCache:
    def __init__(self, capacity: int) -> None:
        """``capacity`` in blocks. Raises InvalidInput for none."""
        if capacity < 1:
            raise InvalidInput(f"a cache of {capacity} blocks holds nothing; at least one is needed")
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def leading(self, chain: Sequence[int]) -> int:
        """How many of ``chain``'s first blocks are resident."""
        here = self._blocks
        for at, block in enumerate(chain):
            if block not in here:
                return at
        return len(chain)

    def use(self, chain: Sequence[int]) -> list[int]:
        """``chain`` is accessed and resident, of one longer than the cache its first ``capacity`` blocks.

        Returns what had to go.
        """
        here = self._blocks
        for block in reversed(chain[: self.capacity]):
            here[block] = None
            here.move_to_end(block)
        gone = []
        while len(here) > self.capacity:
            gone.append(here.popitem(last=False)[0])
        return gone
