"""Hash trie: a tree of blocks, each with the set of servers that served it.

Source: vLLM production-stack's prefix router, second of its two ways (chunks of 128 characters, a random one of the
servers at the deepest node). If all prompts share their first chunk it sends everything to the first server, however
long its queue. Differences: servers over the load bound are skipped, then shorter matches count, then load; a match
must reach a threshold; the tree is bounded and evicts leaves first; what a failed request taught is undone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skymemory.conductor.picker import Ranking, Scorer, Server
from skymemory.conductor.prefix_index.approximate import Blocks
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.base import (
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
    max_blocks: int = 500_000
    load_factor: float = 1.25
    min_match_tokens: int = 0
    min_match_ratio: float = 0.1

    def __post_init__(self) -> None:
        check_factor(self.load_factor)
        if self.max_blocks < 1:
            raise InvalidInput(f"max_blocks is {self.max_blocks}; expected 1 or more")


class HashTrie(Scorer):
    name = "hash-trie"

    def __init__(self, settings: HashTrieSettings | None = None) -> None:
        self.settings = settings or HashTrieSettings()
        self._gain = GainThreshold(self.settings.min_match_tokens, self.settings.min_match_ratio)
        self._sets: OrderedDict[int, int] = OrderedDict()
        """Servers (as bits) by the chained hash of a block, least recently used first.

        Chained hashes flatten the tree: a node's key determines its path.
        """
        self._held: RequestNotes[int] = RequestNotes()
        """Leading blocks that the server held when a request was sent."""

    def __len__(self) -> int:
        return len(self._sets)

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        loads = loads_of(servers, now_s)
        prompt = request.prompt
        deep = depths(self._sets, prompt.blocks)
        held = [deep.get(server.slot, 0) for server in servers]
        tokens = [min(prompt.tokens, int(blocks * prompt.block_tokens)) for blocks in held]
        worth = [self._gain.worth(matched, prompt.tokens) for matched in tokens]
        if not any(worth):
            reason = self._gain.why_not(max(tokens), prompt.tokens)
            return ranked_by_load(loads, reason, tokens)
        # Servers with a match score 1 and more, the others at most 0: a match comes first, then the least load.
        most = load_bound(loads, self.settings.load_factor)
        scores = [
            float(blocks) if good and load + 1.0 <= most else -load
            for blocks, good, load in zip(held, worth, loads, strict=True)
        ]
        longest = max(held)
        at_node = [load for blocks, load in zip(held, loads, strict=True) if blocks == longest]
        reason = f"longest match {max(tokens)} of {prompt.tokens} tokens, at {len(at_node)} servers"
        if min(at_node) + 1.0 > most:
            reason += f", all over the bound of {most} requests"
        return Ranking(scores, tokens, reasons=(reason,), weights=(("requests there", loads),))

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        blocks = request.prompt.blocks
        self._held.note(request, server, depths(self._sets, blocks).get(server.slot, 0))
        self._learn(blocks, server)

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        if self._held.take(request, server) is not None:
            self._learn(request.prompt.blocks, server)

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        held = self._held.take(request, server)
        if held is None:
            return
        # Only the blocks that the send had added; those that it found may be held by virtue of other prompts.
        for block in request.prompt.blocks[held:].tolist():
            left = self._sets.get(block, 0) & ~(1 << server.slot)
            if left:
                self._sets[block] = left
            else:
                self._sets.pop(block, None)

    def _learn(self, blocks: Blocks, server: Server) -> None:
        sets, bit = self._sets, 1 << server.slot
        # From the end to the front, so that the head of a chain is evicted after its tail.
        for block in reversed(blocks[: self.settings.max_blocks].tolist()):
            sets[block] = sets.get(block, 0) | bit
            sets.move_to_end(block)
        for _ in range(len(sets) - self.settings.max_blocks):
            sets.popitem(last=False)

    def forget(self, server: Server) -> None:
        self._held.forget(server)
        others = ~(1 << server.slot)
        self._sets = OrderedDict((block, left) for block, at in self._sets.items() if (left := at & others))


def depths(sets: Mapping[int, int], blocks: NDArray[np.uint64]) -> dict[int, int]:
    """Leading blocks of the chain ``blocks`` that each slot holds; slots with none are left out. ``sets``: slots, as
    bits of an integer, by a block's hash.

    A slot that holds a block holds all before it, so the sets shrink along a chain: bisection finds each change in some
    ten lookups for a prompt of 512 blocks.
    """
    found: dict[int, int] = {}
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
            found[lowest.bit_length() - 1] = at
            ends ^= lowest
        known = further
    return found
