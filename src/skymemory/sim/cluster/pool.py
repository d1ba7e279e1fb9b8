"""The simulated KV pool: the nodes' caches, shared links, and a constellation behind them.

A node caches blocks in memory under a policy, and on an SSD what memory evicts. Neither drops a parent before its
child: memory evicts deeper blocks first, so the SSD gets children before parents and drops in the order in which it got
them; used blocks return to memory from the root on. So memory and SSD together hold whole prefixes, and memory does
alone."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from skymemory.conductor.cost_model import CostModel
from skymemory.conductor.cost_model.model import Medium, network_of
from skymemory.conductor.prefix_index.base import Blocks
from skymemory.conductor.request import Plan
from skymemory.errors import InvalidInput
from skymemory.sim.cluster.pool_base import (
    LOCAL,
    NODES,
    SKY_TIER,
    SSD_TIER,
    Far,
    Link,
    Loaded,
    PrefixCache,
    streamed_s,
    transfer_s,
)
from skymemory.sim.cluster.setup import PoolSettings
from skymemory.sim.trace import BLOCK_TOKENS
from skymemory.store.accounting import Inventory
from skymemory.store.base import StoreTicket

if TYPE_CHECKING:
    from skymemory.sim.cluster.sky import SkyTier


__all__ = ["ClusterPool", "PoolSettings"]


class ClusterPool:
    """See ``pool_base.Pool``. ``names``: of all instances, by number.

    Raises:
        InvalidInput: a memory smaller than a block, or an unknown preset of a constellation.
    """

    block_tokens = BLOCK_TOKENS

    def __init__(self, names: Sequence[str], cost: CostModel, settings: PoolSettings | None = None) -> None:
        self.settings = settings or PoolSettings()
        self.names = tuple(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._cost = cost
        self.block_bytes = cost.kv_bytes(self.block_tokens)
        self.network = self.settings.network or network_of(cost)
        self._nodes = [self._fresh() for _ in self.names]
        self._out = [Link(f"{name} out", self.network.bytes_per_s) for name in self.names]
        self._in = [Link(f"{name} in", self.network.bytes_per_s) for name in self.names]
        self._ssd = [Link(f"{name} ssd", self.settings.ssd.bytes_per_s) for name in self.names]
        self._dice = random.Random(self.settings.seed)
        self._now_s = 0.0
        self._evicted = self._dropped = 0
        """Counters of failed nodes."""
        self._tokens = {LOCAL: 0, SSD_TIER: 0, NODES: 0, SKY_TIER: 0}
        self.sky: SkyTier | None = None
        if self.settings.sky is not None:
            from skymemory.sim.cluster.sky import SkyTier  # imported only where a pool has one

            self.sky = SkyTier(self.settings.sky, self.block_bytes)

    def _fresh(self) -> NodeMemory:
        settings = self.settings
        blocks, ssd_blocks = int(settings.dram_bytes // self.block_bytes), int(settings.ssd_bytes // self.block_bytes)
        return NodeMemory(blocks, settings.policy, ssd_blocks)

    def at(self, now_s: float) -> None:
        self._now_s = now_s

    # Queries of schedulers.

    def match(self, blocks: Blocks, slots: Sequence[int]) -> list[int]:
        ids = blocks.tolist()
        return [self._nodes[slot].leading(ids) for slot in slots]

    def far(self, blocks: Blocks) -> list[Far]:
        if self.sky is None:
            return []
        offer = self.sky.offer(blocks.tolist(), self._now_s)
        return [] if offer is None else [offer]

    def media(self) -> Mapping[str, Medium]:
        media = {LOCAL: self.settings.dram, "network": self.network, SSD_TIER: self.settings.ssd}
        if self.sky is not None:
            media[SKY_TIER] = Medium(SKY_TIER, self.sky.kv_bytes_per_s)
        return media

    def waits_out_s(self, slots: Sequence[int], now_s: float) -> list[float]:
        return [self._out[slot].queue_s(now_s) for slot in slots]

    def waits_in_s(self, slots: Sequence[int], now_s: float) -> list[float]:
        return [self._in[slot].queue_s(now_s) for slot in slots]

    def leading(self, node: int, ids: Sequence[int]) -> int:
        return self._nodes[node].leading(ids)

    def learn(self, slot: int, blocks: Blocks) -> None:
        """No effect: the pool knows the true state."""

    def correct(self, slot: int, blocks: Blocks, cached_blocks: int) -> int:
        return 0

    def forget(self, slot: int) -> None:
        pass

    def blocks_of(self, slot: int) -> int:
        return len(self._nodes[slot])

    # Events.

    def load(self, node: int, ids: Sequence[int], plan: Plan | None, now_s: float) -> Loaded:
        self._now_s = now_s
        here, block = self._nodes[node], self.block_tokens
        own = here.leading(ids)
        in_memory = here.in_memory(ids) if self.settings.ssd_bytes else own
        held_s = here.ready_s(ids[:own], now_s)
        if own > in_memory:
            size_bytes = (own - in_memory) * self.block_bytes
            held_s = max(held_s, transfer_s((self._ssd[node],), size_bytes, now_s, self.settings.ssd.latency_s))
        begin = own
        loaded, done_s, kind = 0, held_s, NODES
        if plan is not None and plan.source and plan.loaded_tokens:
            begin = max(own, -(-plan.split_tokens // block))
            end = min(len(ids), (plan.split_tokens + plan.loaded_tokens) // block)
            kind = SKY_TIER if plan.source == SKY_TIER else NODES
            loaded, come_s = self._fetch(node, ids, begin, end, plan.source, now_s)
            done_s = max(held_s, come_s)
        if not loaded:
            begin = own
        here.use(ids[: own + loaded] if begin == own else ids[:own])
        if loaded and begin == own:
            here.comes(ids[own : own + loaded], done_s)
        blocks = ((LOCAL, in_memory), (SSD_TIER, own - in_memory), (kind, loaded))
        sources = {name: count * block for name, count in blocks if count}
        for name, tokens in sources.items():
            self._tokens[name] += tokens
        return Loaded(own * block, begin * block, loaded * block, done_s, sources, held_s)

    def _fetch(
        self, node: int, ids: Sequence[int], begin: int, end: int, source: str, now_s: float
    ) -> tuple[int, float]:
        """Loads blocks ``begin`` to ``end`` as far as the source has them; returns how many, and the end of the
        load."""
        if source == SKY_TIER:
            if self.sky is None:
                return 0, now_s
            count, done_s = self.sky.read(ids, begin, end, self._in[node], now_s)
            return count, done_s + self._late_s() if count else done_s
        other = self._numbers.get(source)
        if other is None or other == node:
            return 0, now_s
        there = self._nodes[other]
        end = min(end, there.leading(ids))
        if end <= begin:
            return 0, now_s
        size_bytes = (end - begin) * self.block_bytes
        done_s = transfer_s((self._out[other], self._in[node]), size_bytes, now_s, self.network.latency_s)
        behind = end - max(begin, there.in_memory(ids)) if self.settings.ssd_bytes else 0
        if behind > 0:
            read_s = transfer_s((self._ssd[other],), behind * self.block_bytes, now_s, self.settings.ssd.latency_s)
            done_s = max(done_s, read_s + self.network.latency_s)
        ready_s = there.ready_s(ids[begin:end], now_s)
        if ready_s > now_s:  # still loading there: forwarded when it is complete
            done_s = max(done_s, ready_s + self.network.seconds(size_bytes))
        return end - begin, done_s + self._late_s()

    def _late_s(self) -> float:
        jitter_s = self.settings.jitter_s
        return self._dice.expovariate(1 / jitter_s) if jitter_s else 0.0

    def stream(
        self, source: int, target: int, tokens: int, now_s: float, over_s: float = 0.0, layers: int = 1
    ) -> float:
        if source == target or tokens <= 0:
            return now_s + over_s
        links = (self._out[source], self._in[target])
        done_s = streamed_s(links, self._cost.kv_bytes(tokens), now_s, self.network.latency_s, over_s, layers)
        return done_s + self._late_s()

    def stored(self, node: int, ids: Sequence[int], now_s: float) -> None:
        self._now_s = now_s
        self._nodes[node].use(ids)
        if self.sky is not None and ids:
            self.sky.write(ids, self._out[node], now_s)

    def lost(self, node: int, now_s: float) -> None:
        self._now_s = now_s
        self._evicted += self._nodes[node].evicted
        self._dropped += self._nodes[node].dropped
        self._nodes[node] = self._fresh()

    def figures(self) -> Mapping[str, float]:
        figures: dict[str, float] = {
            "network_bytes": sum(link.carried_bytes for link in self._in),
            "ssd_bytes": sum(link.carried_bytes for link in self._ssd),
            "evicted_blocks": self._evicted + sum(node.evicted for node in self._nodes),
            "dropped_blocks": self._dropped + sum(node.dropped for node in self._nodes),
            "resident_blocks": sum(len(node) for node in self._nodes),
            **{f"{name}_tokens": tokens for name, tokens in self._tokens.items()},
        }
        return figures if self.sky is None else {**figures, **self.sky.figures()}


class Memory(Protocol):
    """A memory of blocks within a budget, closed under prefixes."""

    capacity: int

    def __len__(self) -> int: ...

    def leading(self, chain: Sequence[int]) -> int: ...

    def use(self, chain: Sequence[int]) -> list[int]:
        """As ``PrefixCache.use``."""
        ...


class PolicyMemory:
    """A memory with one of the tiers' eviction policies, by the same accounting."""

    def __init__(self, capacity: int, policy: str) -> None:
        if capacity < 1:
            raise InvalidInput(f"a memory of {capacity} blocks; expected at least 1")
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
    """No memory: all computed blocks go to the SSD, if there is one."""

    capacity = 0

    def __len__(self) -> int:
        return 0

    def leading(self, chain: Sequence[int]) -> int:
        return 0

    def use(self, chain: Sequence[int]) -> list[int]:
        return list(reversed(chain))


def memory_of(capacity: int, policy: str) -> Memory:
    """A fast LRU, or any other policy."""
    if not capacity:
        return NoMemory()
    return PrefixCache(capacity) if policy == "lru" else PolicyMemory(capacity, policy)


class NodeMemory:
    """Memory and SSD of one node. ``ssd_blocks`` 0: no SSD."""

    def __init__(self, blocks: int, policy: str = "lru", ssd_blocks: int = 0) -> None:
        self.memory = memory_of(blocks, policy)
        self._ssd_blocks = ssd_blocks
        self._ssd: OrderedDict[int, None] = OrderedDict()
        self.coming: dict[int, float] = {}
        """Blocks being loaded, with the end of their load."""
        self._last_comes_s = -math.inf
        self.evicted = 0
        """Blocks evicted from memory so far."""
        self.dropped = 0
        """Blocks dropped from the node so far."""

    def __len__(self) -> int:
        return len(self.memory) + len(self._ssd)

    def leading(self, chain: Sequence[int]) -> int:
        """Leading blocks of ``chain`` in memory or on the SSD."""
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
        """Accesses ``chain``, and keeps in memory what fits. Returns the number of blocks evicted from memory."""
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
        """These blocks are being loaded until ``done_s``."""
        self.coming.update(dict.fromkeys(blocks, done_s))
        self._last_comes_s = max(self._last_comes_s, done_s)

    def ready_s(self, blocks: Sequence[int], now_s: float) -> float:
        """End of the last load among these blocks; ``now_s`` if none is loading."""
        if not self.coming:
            return now_s
        if self._last_comes_s <= now_s:
            self.coming.clear()
            return now_s
        coming = self.coming
        return max(now_s, max((coming.get(block, now_s) for block in blocks), default=now_s))
