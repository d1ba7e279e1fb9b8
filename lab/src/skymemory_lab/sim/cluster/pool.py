"""The simulated KV pool: the nodes' caches and the links between them.

Nodes are numbered as instances, so a caching node's number is its fleet slot. A chain is a prompt's blocks from the
beginning. Calls come in order of ``now_s`` (simulated).

Memory, and memory with SSD, hold whole prefixes: memory evicts children to the SSD before parents, the SSD drops by
arrival, and used blocks return from the root on.
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
from skymemory.conductor.request import PromptPlan
from skymemory.errors import InvalidInput
from skymemory.store.accounting import Inventory
from skymemory.store.base import StoreTicket
from skymemory_lab.sim.cluster.setup import PoolSettings
from skymemory_lab.sim.trace import BLOCK_TOKENS

LOCAL = "dram"
NODES = "node"
SSD_TIER = "ssd"
SKY_TIER = "sky"


class Far(NamedTuple):
    """A tier from which every node can load."""

    tier: str
    blocks: int
    """Leading blocks that it holds."""
    medium: Medium
    """Medium with the current queue in its latency."""


@dataclass(frozen=True, slots=True)
class PrefixOnNode:
    """Part of a prompt that a node has, or will have by ``done_s``; reserved until the prefill ends."""

    held_tokens: int
    """Prefix in memory, on the SSD, or already loading."""
    split_tokens: int
    """Start of the loaded part; above ``held_tokens`` if the plan computes a part meanwhile."""
    loaded_tokens: int
    done_s: float
    sources: Mapping[str, int] = field(default_factory=dict)  # tokens by tier
    held_s: float = 0.0  # by then the held part is in memory

    @property
    def cached_tokens(self) -> int:
        return self.held_tokens + self.loaded_tokens


class NetworkDirection:
    """One direction of a network interface, first come, first served.

    A transfer occupies each link of its path for its bytes over the link's rate, and ends with the slowest.
    """

    __slots__ = ("bytes_per_s", "carried_bytes", "free_s", "name")

    def __init__(self, name: str, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise InvalidInput(f"link {name!r} has a rate of {bytes_per_s:g} B/s; expected above 0")
        self.name = name
        self.bytes_per_s = bytes_per_s
        self.free_s = 0.0
        self.carried_bytes = 0.0

    def queue_s(self, now_s: float) -> float:
        return max(0.0, self.free_s - now_s)

    def take(self, size_bytes: float, now_s: float) -> float:
        """Book a transfer; return its end."""
        self.free_s = max(self.free_s, now_s) + size_bytes / self.bytes_per_s
        self.carried_bytes += size_bytes
        return self.free_s


def transfer_s(path: Sequence[NetworkDirection], size_bytes: float, now_s: float, latency_s: float = 0.0) -> float:
    """Return the end of a transfer over all links of ``path``."""
    if size_bytes <= 0:
        return now_s
    return latency_s + max(link.take(size_bytes, now_s) for link in path)


def streamed_s(
    path: Sequence[NetworkDirection], size_bytes: float, now_s: float, latency_s: float, over_s: float, parts: int
) -> float:
    """Return the end of a transfer whose bytes become available in ``parts``, the last ``over_s`` from now.

    All parts are booked now: later transfers wait.
    """
    if size_bytes <= 0:
        return now_s + over_s
    last_s = now_s + over_s
    end_s = transfer_s(path, size_bytes, now_s)
    return latency_s + max(end_s, *(last_s + size_bytes / parts / link.bytes_per_s for link in path))


class PrefixCache:
    """LRU cache of blocks, closed under prefixes."""

    def __init__(self, capacity: int) -> None:
        """Initialise with ``capacity`` in blocks."""
        if capacity < 1:
            raise InvalidInput(f"a cache of {capacity} blocks; expected at least 1")
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def leading(self, chain: Sequence[int]) -> int:
        blocks = self._blocks
        for at, block in enumerate(chain):
            if block not in blocks:
                return at
        return len(chain)

    def use(self, chain: Sequence[int]) -> list[int]:
        """Access ``chain`` and make its first ``capacity`` blocks resident. Return the evicted blocks."""
        blocks = self._blocks
        # From the last to the first, so that the root is the youngest block and is evicted last.
        for block in reversed(chain[: self.capacity]):
            blocks[block] = None
            blocks.move_to_end(block)
        evicted = []
        while len(blocks) > self.capacity:
            evicted.append(blocks.popitem(last=False)[0])
        return evicted


class ClusterPool:
    """Caches and links of all nodes, whose true state schedulers see.

    It implements ``PrefixIndex``, ``FarTiers`` and ``LinkWaits``.
    """

    block_tokens = BLOCK_TOKENS

    def __init__(self, names: Sequence[str], cost: CostModel, settings: PoolSettings | None = None) -> None:
        self.settings = settings or PoolSettings()
        self.names = tuple(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._cost = cost
        self.block_bytes = cost.kv_bytes(self.block_tokens)
        self.network = self.settings.network or network_of(cost)
        self._nodes = [self._create_node_memory() for _ in self.names]
        self._out = [NetworkDirection(f"{name} out", self.network.bytes_per_s) for name in self.names]
        self._in = [NetworkDirection(f"{name} in", self.network.bytes_per_s) for name in self.names]
        self._ssd = [NetworkDirection(f"{name} ssd", self.settings.ssd.bytes_per_s) for name in self.names]
        self._dice = random.Random(self.settings.seed)
        self._now_s = 0.0
        # Counters of failed nodes.
        self._evicted = self._dropped = 0
        self._tokens = {LOCAL: 0, SSD_TIER: 0, NODES: 0, SKY_TIER: 0}

    def _create_node_memory(self) -> NodeMemory:
        settings = self.settings
        blocks, ssd_blocks = int(settings.dram_bytes // self.block_bytes), int(settings.ssd_bytes // self.block_bytes)
        return NodeMemory(blocks, settings.policy, ssd_blocks)

    def at(self, now_s: float) -> None:
        self._now_s = now_s

    # Queries of schedulers; they change no state.

    def match(self, blocks: Blocks, slots: Sequence[int]) -> list[int]:
        ids = blocks.tolist()
        return [self._nodes[slot].leading(ids) for slot in slots]

    def far(self, blocks: Blocks) -> list[Far]:
        return []

    def waits_out_s(self, slots: Sequence[int], now_s: float) -> list[float]:
        return [self._out[slot].queue_s(now_s) for slot in slots]

    def waits_in_s(self, slots: Sequence[int], now_s: float) -> list[float]:
        return [self._in[slot].queue_s(now_s) for slot in slots]

    def leading(self, node: int, ids: Sequence[int]) -> int:
        return self._nodes[node].leading(ids)

    # The pool knows the true state, so it learns nothing from requests.

    def learn(self, slot: int, blocks: Blocks) -> None:
        pass

    def correct(self, slot: int, blocks: Blocks, cached_blocks: int) -> int:
        return 0

    def forget(self, slot: int) -> None:
        pass

    def blocks_of(self, slot: int) -> int:
        return len(self._nodes[slot])

    # Events.

    def load(self, node: int, ids: Sequence[int], plan: PromptPlan | None, now_s: float) -> PrefixOnNode:
        """Use what ``node`` has of the full blocks ``ids``, load what the plan says, and cache both.

        It loads less if the node holds more by now or the source lost blocks.
        """
        self._now_s = now_s
        # The node itself reads what is on its SSD, independent of the plan. It waits for blocks that are still being
        # loaded for another request. The plan's own load follows both, over the links.
        memory, block = self._nodes[node], self.block_tokens
        own = memory.leading(ids)
        in_memory = memory.in_memory(ids) if self.settings.ssd_bytes else own
        held_s = memory.ready_s(ids[:own], now_s)
        if own > in_memory:
            size_bytes = (own - in_memory) * self.block_bytes
            held_s = max(held_s, transfer_s((self._ssd[node],), size_bytes, now_s, self.settings.ssd.latency_s))
        begin = own
        loaded, done_s, kind = 0, held_s, NODES
        if plan is not None and plan.source and plan.loaded_tokens:
            begin = max(own, -(-plan.split_tokens // block))
            end = min(len(ids), (plan.split_tokens + plan.loaded_tokens) // block)
            kind = SKY_TIER if plan.source == SKY_TIER else NODES
            loaded, loaded_s = self._fetch(node, ids, begin, end, plan.source, now_s)
            done_s = max(held_s, loaded_s)
        if not loaded:
            begin = own
        # With a gap before it (Cake's front, not yet computed) the loaded part is no prefix. It is cached when the
        # prompt is ``stored``; only the blocks before the gap count as used now.
        memory.use(ids[: own + loaded] if begin == own else ids[:own])
        if loaded and begin == own:
            memory.comes(ids[own : own + loaded], done_s)
        blocks = ((LOCAL, in_memory), (SSD_TIER, own - in_memory), (kind, loaded))
        sources = {name: count * block for name, count in blocks if count}
        for name, tokens in sources.items():
            self._tokens[name] += tokens
        return PrefixOnNode(own * block, begin * block, loaded * block, done_s, sources, held_s)

    def _fetch(
        self, node: int, ids: Sequence[int], begin: int, end: int, source: str, now_s: float
    ) -> tuple[int, float]:
        """Load what the source has of blocks ``begin`` to ``end``. Return their number and the end."""
        other = self._numbers.get(source)
        if other is None or other == node:
            return 0, now_s
        source_memory = self._nodes[other]
        end = min(end, source_memory.leading(ids))
        if end <= begin:
            return 0, now_s
        size_bytes = (end - begin) * self.block_bytes
        done_s = transfer_s((self._out[other], self._in[node]), size_bytes, now_s, self.network.latency_s)
        on_ssd = end - max(begin, source_memory.in_memory(ids)) if self.settings.ssd_bytes else 0
        if on_ssd > 0:
            read_s = transfer_s((self._ssd[other],), on_ssd * self.block_bytes, now_s, self.settings.ssd.latency_s)
            done_s = max(done_s, read_s + self.network.latency_s)
        ready_s = source_memory.ready_s(ids[begin:end], now_s)
        if ready_s > now_s:  # the source is still loading: forwarded when its load is complete
            done_s = max(done_s, ready_s + self.network.seconds(size_bytes))
        return end - begin, done_s + self._late_s()

    def _late_s(self) -> float:
        jitter_s = self.settings.jitter_s
        return self._dice.expovariate(1 / jitter_s) if jitter_s else 0.0

    def stream(
        self, source: int, target: int, tokens: int, now_s: float, over_s: float = 0.0, layers: int = 1
    ) -> float:
        """Transfer the KV of ``tokens`` layer by layer while it is computed for ``over_s``. Return the end."""
        if source == target or tokens <= 0:
            return now_s + over_s
        links = (self._out[source], self._in[target])
        done_s = streamed_s(links, self._cost.kv_bytes(tokens), now_s, self.network.latency_s, over_s, layers)
        return done_s + self._late_s()

    def stored(self, node: int, ids: Sequence[int], now_s: float) -> None:
        """Cache the chain that ``node`` has computed, as far as it fits, and copy it to shared tiers."""
        self._now_s = now_s
        self._nodes[node].use(ids)

    def lost(self, node: int, now_s: float) -> None:
        """Drop the cache of the failed ``node``. Its transfers still complete."""
        self._now_s = now_s
        self._evicted += self._nodes[node].evicted
        self._dropped += self._nodes[node].dropped
        self._nodes[node] = self._create_node_memory()

    def figures(self) -> dict[str, float]:
        return {
            "network_bytes": sum(link.carried_bytes for link in self._in),
            "ssd_bytes": sum(link.carried_bytes for link in self._ssd),
            "evicted_blocks": self._evicted + sum(node.evicted for node in self._nodes),
            "dropped_blocks": self._dropped + sum(node.dropped for node in self._nodes),
            "resident_blocks": sum(len(node) for node in self._nodes),
            **{f"{name}_tokens": tokens for name, tokens in self._tokens.items()},
        }


class Memory(Protocol):
    """Blocks within a budget, closed under prefixes."""

    capacity: int

    def __len__(self) -> int: ...

    def leading(self, chain: Sequence[int]) -> int: ...

    def use(self, chain: Sequence[int]) -> list[int]: ...


class PolicyMemory:
    """Memory with an eviction policy of the production tiers."""

    def __init__(self, capacity: int, policy: str) -> None:
        if capacity < 1:
            raise InvalidInput(f"a memory of {capacity} blocks; expected at least 1")
        self.capacity = capacity
        self._inventory = Inventory(capacity, 0, policy)

    def __len__(self) -> int:
        return len(self._inventory)

    def leading(self, chain: Sequence[int]) -> int:
        entries = self._inventory.entries
        for at, block in enumerate(chain):
            if block.to_bytes(8) not in entries:
                return at
        return len(chain)

    def use(self, chain: Sequence[int]) -> list[int]:
        # The steps of a write in the production tiers: the policy learns the chain, space is reserved, blocks are
        # evicted to make room, and the new blocks are put.
        inventory, keys = self._inventory, [block.to_bytes(8) for block in chain]
        inventory.order.learn(keys)
        resident = self.leading(chain)
        inventory.use(keys[:resident])
        if resident == len(keys):
            return []
        ticket = StoreTicket(tuple((key, b"1") for key in keys[resident:]), math.inf)
        reserved = inventory.reserve(ticket, 0.0)
        wanted = [(key, 1) for (key, _), yes in zip(ticket.items, reserved, strict=True) if yes]
        count, victims = inventory.in_the_way(wanted)
        for key in victims:
            inventory.evict(key)
        for key, _ in wanted[:count]:
            inventory.put(key, 1)
        inventory.end_store(ticket)
        inventory.touch(keys[resident:])
        return [int.from_bytes(key) for key in victims]


class NoMemory:
    """Memory that evicts every block at once."""

    capacity = 0

    def __len__(self) -> int:
        return 0

    def leading(self, chain: Sequence[int]) -> int:
        return 0

    def use(self, chain: Sequence[int]) -> list[int]:
        return list(reversed(chain))


def memory_of(capacity: int, policy: str) -> Memory:
    if not capacity:
        return NoMemory()
    return PrefixCache(capacity) if policy == "lru" else PolicyMemory(capacity, policy)


class NodeMemory:
    """Memory and SSD of a node. ``ssd_blocks`` of 0: no SSD."""

    def __init__(self, blocks: int, policy: str = "lru", ssd_blocks: int = 0) -> None:
        self.memory = memory_of(blocks, policy)
        self._ssd_blocks = ssd_blocks
        self._ssd: OrderedDict[int, None] = OrderedDict()
        self.coming: dict[int, float] = {}  # end of the load of each block that is being loaded
        self._last_comes_s = -math.inf
        self.evicted = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self.memory) + len(self._ssd)

    def leading(self, chain: Sequence[int]) -> int:
        resident = self.memory.leading(chain)
        return resident + self._count_ssd_blocks(chain, resident) if self._ssd else resident

    def in_memory(self, chain: Sequence[int]) -> int:
        return self.memory.leading(chain)

    def _count_ssd_blocks(self, chain: Sequence[int], resident_blocks: int) -> int:
        # Return how many blocks after the resident blocks are on the SSD, up to the first gap.
        for at in range(resident_blocks, len(chain)):
            if chain[at] not in self._ssd:
                return at - resident_blocks
        return len(chain) - resident_blocks

    def use(self, chain: Sequence[int]) -> int:
        """Access ``chain`` and keep what fits. Return the number of blocks evicted from memory."""
        evicted = self.memory.use(chain)
        if not self.memory.capacity and not self._ssd_blocks:
            return 0
        if self._ssd:
            for block in chain[: self.memory.leading(chain)]:
                self._ssd.pop(block, None)
        self.evicted += len(evicted)
        if not self._ssd_blocks:
            self.dropped += len(evicted)
            return len(evicted)
        for block in evicted:
            self._ssd[block] = None
        while len(self._ssd) > self._ssd_blocks:
            self._ssd.popitem(last=False)
            self.dropped += 1
        return len(evicted)

    def comes(self, blocks: Sequence[int], done_s: float) -> None:
        """Record that these blocks are loaded by ``done_s``."""
        self.coming.update(dict.fromkeys(blocks, done_s))
        self._last_comes_s = max(self._last_comes_s, done_s)

    def ready_s(self, blocks: Sequence[int], now_s: float) -> float:
        """Return when these blocks' loads have ended, at least ``now_s``."""
        if not self.coming:
            return now_s
        # All loads are complete: the dictionary need not be searched until the next load starts.
        if self._last_comes_s <= now_s:
            self.coming.clear()
            return now_s
        coming = self.coming
        return max(now_s, max((coming.get(block, now_s) for block in blocks), default=now_s))
