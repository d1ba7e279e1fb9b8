"""The pool of KV of a simulated cluster: each node's memory, its SSD, and links that all share (``pool_base``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skymemory.conductor.cost_model import CostModel
from skymemory.conductor.cost_model.transfer import DRAM, Medium, network_of
from skymemory.conductor.prefix_index.base import Blocks
from skymemory.conductor.request import Plan
from skymemory.errors import InvalidInput
from skymemory.sim.cluster.links import Link, streamed_s, transfer_s
from skymemory.sim.cluster.pool_base import LOCAL, Far, Loaded
from skymemory.sim.prefix_cache import PrefixCache
from skymemory.sim.trace import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """What each node has, and what is between them."""

    dram_bytes: float = 1e12
    """Of KV, in the memory of each node that caches."""
    network: Medium | None = None
    """Of each node, in each direction; None: the cost model's machine."""
    dram: Medium = DRAM
    """From a node's memory to its accelerators."""

    def __post_init__(self) -> None:
        if not self.dram_bytes >= 0:
            raise InvalidInput(f"{self.dram_bytes:g} bytes of memory: 0 or more are needed")


class ClusterPool:
    """The pool (see ``pool_base.Pool``). ``names`` of all instances, in the order of their numbers."""

    block_tokens = BLOCK_TOKENS

    def __init__(self, names: Sequence[str], cost: CostModel, settings: PoolSettings | None = None) -> None:
        self.settings = settings or PoolSettings()
        self.names = tuple(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._cost = cost
        self.block_bytes = cost.kv_bytes(self.block_tokens)
        self.network = self.settings.network or network_of(cost)
        capacity = max(1, int(self.settings.dram_bytes // self.block_bytes))
        self._caches = [PrefixCache(capacity) for _ in self.names]
        self._out = [Link(f"{name} out", self.network.bytes_per_s) for name in self.names]
        self._in = [Link(f"{name} in", self.network.bytes_per_s) for name in self.names]
        self._now_s = 0.0
        self._evicted = 0

    def at(self, now_s: float) -> None:
        self._now_s = now_s

    def match(self, blocks: Blocks, slots: Sequence[int]) -> list[int]:
        ids = blocks.tolist()
        return [self._caches[slot].leading(ids) for slot in slots]

    def far(self, blocks: Blocks) -> list[Far]:
        return []

    def media(self) -> Mapping[str, Medium]:
        return {"dram": self.settings.dram, "network": self.network}

    def leading(self, node: int, ids: Sequence[int]) -> int:
        return self._caches[node].leading(ids)

    def learn(self, slot: int, blocks: Blocks) -> None:
        """Nothing to learn: it is known."""

    def correct(self, slot: int, blocks: Blocks, cached_blocks: int) -> int:
        return 0

    def forget(self, slot: int) -> None:
        pass

    def blocks_of(self, slot: int) -> int:
        return len(self._caches[slot])

    def load(self, node: int, ids: Sequence[int], plan: Plan | None, now_s: float) -> Loaded:
        self._now_s = now_s
        held = self._caches[node].leading(ids)
        begin, end = held, held
        source = self._numbers.get(plan.source) if plan is not None and plan.source else None
        if plan is not None and source is not None:
            begin = max(held, -(-plan.split_tokens // self.block_tokens))
            end = min((plan.split_tokens + plan.loaded_tokens) // self.block_tokens, self._caches[source].leading(ids))
        loaded = max(0, end - begin)
        if not loaded:
            begin = held
        done_s = now_s
        sources = {LOCAL: held * self.block_tokens}
        if loaded and source is not None:
            way = (self._out[source], self._in[node])
            done_s = transfer_s(way, loaded * self.block_bytes, now_s, self.network.latency_s)
            sources["node"] = loaded * self.block_tokens
        self._evicted += len(self._caches[node].use(ids[: begin + loaded] if begin == held else ids[:held]))
        return Loaded(held * self.block_tokens, begin * self.block_tokens, loaded * self.block_tokens, done_s, sources)

    def stream(
        self, source: int, target: int, tokens: int, now_s: float, over_s: float = 0.0, layers: int = 1
    ) -> float:
        way = () if source == target else (self._out[source], self._in[target])
        if not way:
            return now_s + over_s
        return streamed_s(way, self._cost.kv_bytes(tokens), now_s, self.network.latency_s, over_s, layers)

    def stored(self, node: int, ids: Sequence[int], now_s: float) -> None:
        self._now_s = now_s
        self._evicted += len(self._caches[node].use(ids))

    def lost(self, node: int, now_s: float) -> None:
        self._caches[node] = PrefixCache(self._caches[node].capacity)

    def figures(self) -> Mapping[str, float]:
        return {
            "network_bytes": sum(link.carried_bytes for link in self._in),
            "evicted_blocks": self._evicted,
            "resident_blocks": sum(len(cache) for cache in self._caches),
        }
