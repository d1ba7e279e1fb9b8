"""What strategies share that ask a prefix index: matched tokens, learning, capacities that servers report."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from skymemory.conductor.fleet import Server
from skymemory.conductor.prefix_index.base import Blocks, PrefixIndex
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.strategies.tickets import Tickets
from skymemory.conductor.strategies.under_way import UnderWay

MOST_UNDER_WAY = 8192
"""Blocks of a prompt that count from when it is sent."""
ANSWERING = 4096
"""Requests being answered of which it is noted what was believed."""
BELIEVABLE = 0.5
"""Part of the blocks believed to be held that a server must confirm; with less, what it lacked is not believed
elsewhere either. Blocks of characters and an engine's own block size make small differences meaningless."""


class Indexed:
    """A strategy with a prefix index.

    A prompt counts as held by the server that it was sent to, from then on: whoever is sent behind it finds it cached.
    Until its first byte came it is *under way*, which a failure takes back; then the index learns it. (An index that
    engines' events feed takes no notice of that.)
    """

    def __init__(self, index: PrefixIndex, under_way_blocks: int = MOST_UNDER_WAY) -> None:
        self.index = index
        self._under_way = UnderWay(under_way_blocks, getattr(index, "secret", None))
        self._chains: Tickets[Blocks] = Tickets()
        self._believed: Tickets[int] = Tickets()
        """Blocks that the index gave when the request was sent."""
        self._answering: OrderedDict[tuple[int, int], tuple[int, int]] = OrderedDict()
        """The same, with the prompt's last block, for requests that are being answered: some servers say with the end
        what they had cached. Most never do, so requests are not kept alive for it: one is known by its number, and
        by the last block if another got that number since."""

    def matched_tokens(self, prompt: Prompt, blocks: Sequence[int]) -> list[int]:
        """Tokens of the first ``blocks`` blocks of a prompt, for each of them."""
        per_block, tokens = prompt.block_tokens, prompt.tokens
        return [min(tokens, int(count * per_block)) if count else 0 for count in blocks]

    def held_blocks(self, prompt: Prompt, servers: Sequence[Server]) -> list[int]:
        """Leading blocks of the prompt that each server is believed to hold."""
        if not len(prompt.blocks):
            return [0] * len(servers)
        return self.index.match(prompt.blocks, [server.slot for server in servers])

    def matched_blocks(
        self, prompt: Prompt, servers: Sequence[Server], held: Sequence[int] | None = None
    ) -> Sequence[int]:
        """The same, with what each will hold when it has done all that it was sent. ``held``: what ``held_blocks``
        said.
        """
        held = self.held_blocks(prompt, servers) if held is None else held
        under_way = self._under_way.depths(prompt.blocks, [server.slot for server in servers])
        return list(map(max, held, under_way)) if under_way and len(prompt.blocks) else held

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        blocks = request.prompt.blocks
        self._believed.note(request, server, self.held_blocks(request.prompt, (server,))[0])
        if self._under_way.most_blocks and len(blocks):
            self._chains.note(request, server, self._under_way.add(server.slot, blocks))

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        believed = self._believed.take(request, server)
        self._arrived(request, server)
        prompt = request.prompt
        if not len(prompt.blocks):
            return
        if believed and cached_tokens is None:
            self._answering[id(request), server.slot] = believed, prompt.blocks.item(-1)
            if len(self._answering) > ANSWERING:
                self._answering.popitem(last=False)
        elif believed and cached_tokens is not None:
            self._correct(prompt, server, believed, cached_tokens)
        self._fit_capacity(prompt, server)
        self.index.learn(server.slot, prompt.blocks)

    def corrected(self, request: Request, server: Server, now_s: float, cached_tokens: int) -> None:
        blocks = request.prompt.blocks
        believed, last = self._answering.pop((id(request), server.slot), (0, 0))
        if not believed or not len(blocks) or blocks.item(-1) != last:
            return
        if self._correct(request.prompt, server, believed, cached_tokens):
            self.index.learn(server.slot, blocks)  # It holds the prompt by now, whatever it had before.

    def ended(self, request: Request, server: Server, now_s: float, output_tokens: int | None = None) -> None:
        pass

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        self._believed.take(request, server)
        self._arrived(request, server)

    def forget(self, server: Server) -> None:
        self._believed.forget(server)
        self._chains.forget(server)
        self._under_way.forget(server.slot)
        for key in [key for key in self._answering if key[1] == server.slot]:
            del self._answering[key]
        self.index.forget(server.slot)

    def _arrived(self, request: Request, server: Server) -> None:
        chain = self._chains.take(request, server)
        if chain is not None:
            self._under_way.drop(server.slot, chain)

    def _correct(self, prompt: Prompt, server: Server, believed: int, cached_tokens: int) -> bool:
        """What it lacked of ``believed`` blocks it lacks in other prompts too; whether anything was taken back."""
        held = int(cached_tokens / prompt.block_tokens)
        return held + 1 < believed * BELIEVABLE and self.index.correct(server.slot, prompt.blocks, held) > 0

    def _fit_capacity(self, prompt: Prompt, server: Server) -> None:
        """An index that bounds what it believes of a server takes the size that the server tells of its cache.

        The endpoint picker's original ignores it: it then believes in blocks that were evicted long ago.
        """
        report = server.reported
        set_capacity = getattr(self.index, "set_capacity", None)
        if set_capacity is not None and report is not None and report.cache_blocks and report.block_tokens:
            tokens = report.cache_blocks * report.block_tokens * server.read_per_token
            set_capacity(server.slot, max(1, int(tokens / prompt.block_tokens)))
