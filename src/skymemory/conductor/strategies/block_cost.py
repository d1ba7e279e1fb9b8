from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from skymemory.conductor.picker import Ranking, Server
from skymemory.conductor.prefix_index.approximate import Blocks, PrefixIndex
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.strategy_base import Indexed, RequestNotes
from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class BlockCostSettings:
    """Weights of ``BlockCost``: of blocks to prefill, and (0 to 1) of blocks held, which need no prefill."""

    prefill_scale: float = 1.0
    overlap_credit: float = 1.0
    blocks_per_server: int = 31_250

    def __post_init__(self) -> None:
        if self.prefill_scale < 0 or not 0 <= self.overlap_credit <= 1:
            raise InvalidInput("expected prefill_scale of 0 or more and overlap_credit of 0 to 1")


class BlockCost(Indexed):
    """Strategy by the fewest blocks: to prefill, less those in the server's cache, plus those that its requests occupy.

    Source: Dynamo's KV router (``lib/kv-router/src/scheduling/selector/default.rs``). Differences: no queue in the
    router, no credit for tiers.
    """

    name = "block-cost"

    def __init__(self, index: PrefixIndex, settings: BlockCostSettings | None = None) -> None:
        super().__init__(index)
        self.settings = settings or BlockCostSettings()
        self._kept: dict[int, Counter[int]] = {}
        self._open: RequestNotes[bool] = RequestNotes()

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        settings, prompt = self.settings, request.prompt
        # Dynamo adds work (prefill) and memory (blocks kept while decoding) in the same unit: blocks, not seconds.
        held_blocks = self.matched_blocks(prompt, servers)
        per_block = prompt.block_tokens
        chain = prompt.blocks
        prefills = [
            settings.prefill_scale
            * max(
                0.0,
                (server.prefill_tokens + server.elsewhere_tokens + prompt.tokens) / per_block
                - settings.overlap_credit * blocks,
            )
            for server, blocks in zip(servers, held_blocks, strict=True)
        ]
        decodes = [self._blocks_with(server.slot, chain) for server in servers]
        scores = [-prefill - decode for prefill, decode in zip(prefills, decodes, strict=True)]
        matched = self.matched_tokens(prompt, held_blocks)
        weights = (("tokens held", matched), ("blocks to prefill", prefills), ("blocks of its requests", decodes))
        return Ranking(scores, matched, weights=weights)

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        super().routed(request, server, now_s)
        self._open.add(request, server, True)
        self._kept.setdefault(server.slot, Counter()).update(request.prompt.blocks.tolist())

    def on_request_end(self, request: Request, server: Server, now_s: float, output_tokens: int | None = None) -> None:
        super().on_request_end(request, server, now_s, output_tokens)
        self._release(request, server)

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        super().failed(request, server, now_s)
        self._release(request, server)

    def forget(self, server: Server) -> None:
        super().forget(server)
        self._kept.pop(server.slot, None)
        self._open.forget(server)

    def _release(self, request: Request, server: Server) -> None:
        # Stop counting the blocks of an ended request, unless other requests at the server have them.
        if self._open.take(request, server) is None:
            return
        references = self._kept[server.slot]
        for block in request.prompt.blocks.tolist():
            if references[block] > 1:
                references[block] -= 1
            else:
                del references[block]

    def _blocks_with(self, slot: int, chain: Blocks) -> float:
        # Return the blocks that the server's requests would occupy, with this prompt; shared blocks count once.
        references = self._kept.get(slot)
        if not references:
            return float(len(chain))
        # A server keeps whole chains from their start, so what it keeps of this chain is a prefix of it: bisect.
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) >> 1
            low, high = (middle + 1, high) if chain.item(middle) in references else (low, middle)
        return float(len(references) + len(chain) - low)
