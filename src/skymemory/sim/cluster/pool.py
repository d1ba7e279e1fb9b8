"""The pool of KV of a simulated cluster: what each node caches, links that all share, and a sky behind them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skymemory.conductor.cost_model import CostModel
from skymemory.conductor.cost_model.model import Medium, network_of
from skymemory.conductor.prefix_index.base import Blocks
from skymemory.conductor.request import Plan
from skymemory.sim.cluster.node_memory import NodeMemory
from skymemory.sim.cluster.pool_base import LOCAL, NODES, SKY_TIER, SSD_TIER, Far, Link, Loaded, streamed_s, transfer_s
from skymemory.sim.cluster.setup import PoolSettings
from skymemory.sim.trace import BLOCK_TOKENS

if TYPE_CHECKING:
    from skymemory.sim.cluster.sky import SkyTier

__all__ = ["ClusterPool", "PoolSettings"]


class ClusterPool:
    """The pool (see ``pool_base.Pool``). ``names`` of all instances, in the order of their numbers.

    Raises:
        InvalidInput: a memory that holds no block, or no such preset of a constellation.
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
        """By nodes that have died since; see ``figures``."""
        self._tokens = {LOCAL: 0, SSD_TIER: 0, NODES: 0, SKY_TIER: 0}
        self.sky: SkyTier | None = None
        if self.settings.sky is not None:
            from skymemory.sim.cluster.sky import SkyTier  # pools without one do not wait for its imports

            self.sky = SkyTier(self.settings.sky, self.block_bytes)

    def _fresh(self) -> NodeMemory:
        settings = self.settings
        blocks, ssd_blocks = int(settings.dram_bytes // self.block_bytes), int(settings.ssd_bytes // self.block_bytes)
        return NodeMemory(blocks, settings.policy, ssd_blocks)

    def at(self, now_s: float) -> None:
        self._now_s = now_s

    # --- what schedulers ask ---

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
        """Nothing to learn: what is true is known."""

    def correct(self, slot: int, blocks: Blocks, cached_blocks: int) -> int:
        return 0

    def forget(self, slot: int) -> None:
        pass

    def blocks_of(self, slot: int) -> int:
        return len(self._nodes[slot])

    # --- what happens ---

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
        """Blocks ``begin`` to ``end`` as far as the source has them: how many come, and when the last has come."""
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
        if ready_s > now_s:  # on its way to there itself: it goes on when it has come
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
        way = (self._out[source], self._in[target])
        done_s = streamed_s(way, self._cost.kv_bytes(tokens), now_s, self.network.latency_s, over_s, layers)
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
