"""The simulated KV pool: the nodes' caches and the links between them. ``sky.SkyPool`` has a constellation behind it.

Nodes have the numbers of the cluster's instances: prefill (or coupled) instances first, so that a caching node has the
number of its slot in their fleet, then decode instances. Blocks are a trace's ids, of ``BLOCK_TOKENS`` tokens each; a
chain of them is a prompt from its beginning. Times are seconds of the simulation; calls come in the order of ``now_s``.

A node caches blocks in memory under a policy, and on an SSD what memory evicts. Neither drops a parent before its
child: memory evicts deeper blocks first, so the SSD gets children before parents and drops in the order in which it got
them; used blocks return to memory from the root on. So memory and SSD together hold whole prefixes, and memory does
alone.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from skymemory.conductor.cost_model import CostModel, Medium, network_of
from skymemory.conductor.prefix_index.approximate import Blocks
from skymemory.conductor.request import Plan
from skymemory.errors import InvalidInput
from skymemory.sim.cluster.setup import PoolSettings
from skymemory.sim.trace import BLOCK_TOKENS
from skymemory.store.accounting import Inventory
from skymemory.store.base import StoreTicket

LOCAL = "dram"
"""Source of tokens in the node's own memory."""
NODES = "node"
"""Source of tokens in another node's memory."""
SSD_TIER = "ssd"
SKY_TIER = "sky"


class Far(NamedTuple):
    """A tier that every node can load from, for one prompt at this time."""

    tier: str
    """The ``Plan.source`` to load from it."""
    blocks: int
    """Leading blocks of the prompt that it holds."""
    medium: Medium
    """Its latency includes the current queue."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The part of a prompt that a node has, or will have by ``done_s``.

    It is reserved for the request until its prefill ends, whatever the cache evicts meanwhile.
    """

    held_tokens: int
    """Prefix on the node: in memory, on the SSD, or already loading."""
    split_tokens: int
    """Start of the loaded part; ``held_tokens`` unless the plan computes a part meanwhile."""
    loaded_tokens: int
    done_s: float
    """Time at which all of it is available."""
    sources: Mapping[str, int] = field(default_factory=dict)
    """Tokens by source: ``LOCAL``, ``SSD_TIER``, ``SKY_TIER``, ``NODES``."""
    held_s: float = 0.0
    """Time at which the held part is available: later if some is on the SSD or loading."""

    @property
    def cached_tokens(self) -> int:
        """Tokens that are not computed."""
        return self.held_tokens + self.loaded_tokens


class Link:
    """One direction of a network interface, served in order of request.

    A transfer takes all links of its path at once: at each it waits for earlier transfers, and it ends when the slowest
    has carried it, plus the path's latency. Each link is occupied for the bytes over its own rate, so a slow link does
    not hold up a fast one. The end is known at the start and never changes. (Fair sharing, closer to real networks,
    would move the ends of others with each newcomer; the bytes carried by busy links are the same.)"""

    __slots__ = ("bytes_per_s", "carried_bytes", "free_s", "name")

    def __init__(self, name: str, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise InvalidInput(f"link {name!r} has a rate of {bytes_per_s:g} B/s; expected above 0")
        self.name = name
        self.bytes_per_s = bytes_per_s
        self.free_s = 0.0
        """Time at which it is free."""
        self.carried_bytes = 0.0
        """Total so far."""

    def queue_s(self, now_s: float) -> float:
        """Wait of a new transfer."""
        return max(0.0, self.free_s - now_s)

    def take(self, size_bytes: float, now_s: float) -> float:
        """Books ``size_bytes``; returns the end."""
        self.free_s = max(self.free_s, now_s) + size_bytes / self.bytes_per_s
        self.carried_bytes += size_bytes
        return self.free_s


def transfer_s(path: Sequence[Link], size_bytes: float, now_s: float, latency_s: float = 0.0) -> float:
    """End of a transfer over all links of ``path``; of 0 bytes immediately."""
    if size_bytes <= 0:
        return now_s
    return latency_s + max(link.take(size_bytes, now_s) for link in path)


def streamed_s(
    path: Sequence[Link], size_bytes: float, now_s: float, latency_s: float, over_s: float, parts: int
) -> float:
    """As ``transfer_s``, of bytes that become available in ``parts`` equal parts, the last ``over_s`` from now.

    The links are booked for all of them now: later transfers wait behind the whole stream.
    """
    if size_bytes <= 0:
        return now_s + over_s
    last_s = now_s + over_s
    end_s = transfer_s(path, size_bytes, now_s)
    return latency_s + max(end_s, *(last_s + size_bytes / parts / link.bytes_per_s for link in path))


class PrefixCache:
    """An LRU cache of blocks that never evicts a parent before its child.

    A prompt's blocks are touched from the last to the first, so the deepest of a chain is the oldest, and the cache is
    closed under prefixes.
    """

    def __init__(self, capacity: int) -> None:
        """``capacity`` in blocks. Raises InvalidInput for none."""
        if capacity < 1:
            raise InvalidInput(f"a cache of {capacity} blocks; expected at least 1")
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def leading(self, chain: Sequence[int]) -> int:
        """Leading blocks of ``chain`` that are resident."""
        here = self._blocks
        for at, block in enumerate(chain):
            if block not in here:
                return at
        return len(chain)

    def use(self, chain: Sequence[int]) -> list[int]:
        """Accesses ``chain`` and makes its first ``capacity`` blocks resident. Returns the evicted blocks."""
        here = self._blocks
        # From the last to the first, so that the root is the youngest and goes last.
        for block in reversed(chain[: self.capacity]):
            here[block] = None
            here.move_to_end(block)
        gone = []
        while len(here) > self.capacity:
            gone.append(here.popitem(last=False)[0])
        return gone


class ClusterPool:
    """Caches of all nodes and the links between. ``names``: of all instances, by number. ``settings.sky`` is
    for ``sky.SkyPool`` (``simulation.new_pool`` chooses).

    A ``PrefixIndex``, ``FarTiers`` and ``LinkWaits`` too: schedulers see the true state of caches and links.

    Raises:
        InvalidInput: a memory smaller than a block.
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
        # Counters of failed nodes.
        self._evicted = self._dropped = 0
        self._tokens = {LOCAL: 0, SSD_TIER: 0, NODES: 0, SKY_TIER: 0}

    def _fresh(self) -> NodeMemory:
        settings = self.settings
        blocks, ssd_blocks = int(settings.dram_bytes // self.block_bytes), int(settings.ssd_bytes // self.block_bytes)
        return NodeMemory(blocks, settings.policy, ssd_blocks)

    def at(self, now_s: float) -> None:
        """Sets the time of the following queries (``match``, ``far``)."""
        self._now_s = now_s

    # Queries of schedulers; none changes state.

    def match(self, blocks: Blocks, slots: Sequence[int]) -> list[int]:
        """Leading blocks that each node has in memory or on its SSD."""
        ids = blocks.tolist()
        return [self._nodes[slot].leading(ids) for slot in slots]

    def far(self, blocks: Blocks) -> list[Far]:
        """Tiers behind the nodes that hold part of it."""
        return []

    def media(self) -> dict[str, Medium]:
        """Idle media: ``dram`` (a node's memory to its accelerators), ``network``, ``ssd``, tiers."""
        return {LOCAL: self.settings.dram, "network": self.network, SSD_TIER: self.settings.ssd}

    def waits_out_s(self, slots: Sequence[int], now_s: float) -> list[float]:
        return [self._out[slot].queue_s(now_s) for slot in slots]

    def waits_in_s(self, slots: Sequence[int], now_s: float) -> list[float]:
        return [self._in[slot].queue_s(now_s) for slot in slots]

    def leading(self, node: int, ids: Sequence[int]) -> int:
        """As ``match``, for one node."""
        return self._nodes[node].leading(ids)

    # The pool knows the true state: nothing is learnt from requests.

    def learn(self, slot: int, blocks: Blocks) -> None:
        pass

    def correct(self, slot: int, blocks: Blocks, cached_blocks: int) -> int:
        return 0

    def forget(self, slot: int) -> None:
        pass

    def blocks_of(self, slot: int) -> int:
        return len(self._nodes[slot])

    # Events.

    def load(self, node: int, ids: Sequence[int], plan: Plan | None, now_s: float) -> Loaded:
        """A request with the full blocks ``ids`` goes to ``node``: uses what it has, loads what the plan says.

        Loads less if the node holds more by now, or the source has lost some. Without a plan, or a source in it, only
        the node's own SSD is read. ``node`` caches what it loads, so hot prefixes replicate.
        """
        self._now_s = now_s
        # What is on its SSD is read by the node itself, whatever the plan says; what is still being loaded for another
        # request is waited for; the plan's own load comes behind both, over the links.
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
        # With a gap before it (Cake's front, not yet computed) the loaded part is no prefix: it is cached when the
        # prompt is ``stored``, and only what was there before counts as used now.
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
        """Loads blocks ``begin`` to ``end`` as far as the source has them; returns how many, and the load's end."""
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
        """Transfers KV of ``tokens`` between nodes while it is computed, layer by layer, for ``over_s``. Returns the
        end."""
        if source == target or tokens <= 0:
            return now_s + over_s
        links = (self._out[source], self._in[target])
        done_s = streamed_s(links, self._cost.kv_bytes(tokens), now_s, self.network.latency_s, over_s, layers)
        return done_s + self._late_s()

    def stored(self, node: int, ids: Sequence[int], now_s: float) -> None:
        """``node`` has computed this chain: it caches what fits, and tiers behind it get copies."""
        self._now_s = now_s
        self._nodes[node].use(ids)

    def lost(self, node: int, now_s: float) -> None:
        """``node`` failed and lost its cache. Transfers from it complete: they count as read already."""
        self._now_s = now_s
        self._evicted += self._nodes[node].evicted
        self._dropped += self._nodes[node].dropped
        self._nodes[node] = self._fresh()

    def figures(self) -> dict[str, float]:
        """Counters: bytes by medium, blocks evicted and resident."""
        return {
            "network_bytes": sum(link.carried_bytes for link in self._in),
            "ssd_bytes": sum(link.carried_bytes for link in self._ssd),
            "evicted_blocks": self._evicted + sum(node.evicted for node in self._nodes),
            "dropped_blocks": self._dropped + sum(node.dropped for node in self._nodes),
            "resident_blocks": sum(len(node) for node in self._nodes),
            **{f"{name}_tokens": tokens for name, tokens in self._tokens.items()},
        }


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
        # As the tiers of production do a write: the policy learns the chain, reserves, evicts what is in the way, and
        # puts.
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
        # All loads are complete: the dictionary need not be searched until the next one starts.
        if self._last_comes_s <= now_s:
            self.coming.clear()
            return now_s
        coming = self.coming
        return max(now_s, max((coming.get(block, now_s) for block in blocks), default=now_s))
