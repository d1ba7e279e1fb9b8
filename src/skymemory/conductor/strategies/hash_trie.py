from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skymemory.conductor.picker import Ranking, Scorer, Server
from skymemory.conductor.prefix_index.approximate import Blocks
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.strategy_base import (
    GainThreshold,
    RequestNotes,
    check_factor,
    load_bound,
    loads_of,
    ranked_by_load,
)
from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class HashTrieSettings:
    """Settings of ``HashTrie``: limits of the tree, of a server's load relative to the mean, and of a useful match."""

    max_blocks: int = 500_000
    load_factor: float = 1.25
    min_match_tokens: int = 0
    min_match_ratio: float = 0.1

    def __post_init__(self) -> None:
        check_factor(self.load_factor)
        if self.max_blocks < 1:
            raise InvalidInput(f"max_blocks is {self.max_blocks}; expected 1 or more")


class HashTrie(Scorer):
    """Strategy by the longest match in a tree of blocks, each with the set of servers that served it.

    Source: vLLM production-stack's prefix router (``prefixaware``), which learns when it routes, too. Differences:
    servers over the load bound are skipped; the least match is a tenth of the prompt (there 0 characters), and without
    it the least load decides (there any server, or the fewest requests of late below its least match); the tree is
    bounded; a failed request is undone.
    """

    name = "hash-trie"

    def __init__(self, settings: HashTrieSettings | None = None) -> None:
        self.settings = settings or HashTrieSettings()
        self._gain = GainThreshold(self.settings.min_match_tokens, self.settings.min_match_ratio)
        # Servers (as bits) by chained hash, least recently used first.
        self._sets: OrderedDict[int, int] = OrderedDict()
        self._held: RequestNotes[int] = RequestNotes()

    def __len__(self) -> int:
        return len(self._sets)

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        """Prefer the longest match among servers below the load bound; without a useful match the least load."""
        loads = loads_of(servers, now_s)
        prompt = request.prompt
        deep = depths(self._sets, prompt.blocks)
        deepest = [deep.get(server.slot, 0) for server in servers]
        tokens = [min(prompt.tokens, int(blocks * prompt.block_tokens)) for blocks in deepest]
        worth = [self._gain.worth(matched, prompt.tokens) for matched in tokens]
        if not any(worth):
            reason = self._gain.why_not(max(tokens), prompt.tokens)
            return ranked_by_load(loads, reason, tokens)
        # Servers with a match score 1 or more, all others at most 0: a match comes first, then the least load.
        most = load_bound(loads, self.settings.load_factor)
        scores = [
            float(blocks) if good and load + 1.0 <= most else -load
            for blocks, good, load in zip(deepest, worth, loads, strict=True)
        ]
        longest = max(deepest)
        at_node = [load for blocks, load in zip(deepest, loads, strict=True) if blocks == longest]
        reason = f"longest match {max(tokens)} of {prompt.tokens} tokens, at {len(at_node)} servers"
        if min(at_node) + 1.0 > most:
            reason += f", all over the bound of {most} requests"
        return Ranking(scores, tokens, reasons=(reason,), weights=(("requests there", loads),))

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        blocks = request.prompt.blocks
        self._held.add(request, server, depths(self._sets, blocks).get(server.slot, 0))
        self._learn(blocks, server)

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        if self._held.take(request, server) is not None:
            self._learn(request.prompt.blocks, server)

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        """Forget the blocks that only this failed request would have brought to the server."""
        known = self._held.take(request, server)
        if known is None:
            return
        # Only the blocks that this send added; the server may hold the earlier blocks due to other prompts.
        for block in request.prompt.blocks[known:].tolist():
            servers = self._sets.get(block, 0) & ~(1 << server.slot)
            if servers:
                self._sets[block] = servers
            else:
                self._sets.pop(block, None)

    def _learn(self, blocks: Blocks, server: Server) -> None:
        # Record that the server holds these blocks; evict the least recently used.
        sets, bit = self._sets, 1 << server.slot
        # From the end to the start, so that the head of a chain is evicted after its tail.
        for block in reversed(blocks[: self.settings.max_blocks].tolist()):
            sets[block] = sets.get(block, 0) | bit
            sets.move_to_end(block)
        for _ in range(len(sets) - self.settings.max_blocks):
            sets.popitem(last=False)

    def forget(self, server: Server) -> None:
        self._held.forget(server)
        mask = ~(1 << server.slot)
        self._sets = OrderedDict((block, slots) for block, at in self._sets.items() if (slots := at & mask))


def depths(sets: Mapping[int, int], blocks: NDArray[np.uint64]) -> dict[int, int]:
    """Return the leading blocks that each slot holds; ``sets`` has slots, as bits, by hash.

    A slot holds all blocks before a held block, so bisection finds each change.
    """
    depth_of: dict[int, int] = {}
    hash_at, count = blocks.item, len(blocks)
    known = sets.get(hash_at(0), 0) if count else 0
    at = 0
    while known:
        low, high = at, count - 1
        while low < high:
            middle = (low + high + 1) >> 1
            if sets.get(hash_at(middle), 0) == known:
                low = middle
            else:
                high = middle - 1
        at = low + 1
        further = sets.get(hash_at(at), 0) & known if at < count else 0
        ends = known & ~further
        while ends:
            lowest = ends & -ends
            depth_of[lowest.bit_length() - 1] = at
            ends ^= lowest
        known = further
    return depth_of
