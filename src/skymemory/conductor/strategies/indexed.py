"""What strategies share that ask a prefix index: matched tokens, learning, capacities that servers report."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from skymemory import native
from skymemory.conductor.fleet import LoadReport, Server
from skymemory.conductor.prefix_index.base import PrefixIndex
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.strategies.base import Tickets

MOST_UNDER_WAY = 8192
"""Blocks of a prompt that count from when it is sent."""
ANSWERING = 4096
"""Requests being answered of which it is noted what was believed."""
BELIEVABLE = 0.5
"""Part of the blocks believed to be held that a server must confirm; with less, what it lacked is not believed
elsewhere either. Blocks of characters and an engine's own block size make small differences meaningless."""


class Sent(NamedTuple):
    """What was noted when a request was sent."""

    believed: int
    """Blocks that the index gave."""
    under_way: int
    """Its ticket; 0: none."""
    estimated: object = None
    """What a strategy noted besides."""


class Indexed:
    """A strategy with a prefix index.

    A prompt counts as held by the server that it was sent to, from then on: whoever is sent behind it finds it cached.
    Until its first byte came it is *under way*, which a failure takes back; then the index learns it. (An index that
    engines' events feed takes no notice of that.)
    """

    def __init__(self, index: PrefixIndex, under_way_blocks: int = MOST_UNDER_WAY) -> None:
        self.index = index
        self._set_capacity = getattr(index, "set_capacity", None)
        self._counts_under_way = under_way_blocks > 0
        self._under_way = under_way(under_way_blocks, getattr(index, "secret", None))
        self._notes: Tickets[Sent] = Tickets()
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
        if not len(prompt.blocks) or not len(self._under_way):
            return held
        return list(map(max, held, self._under_way.depths(prompt.blocks, [server.slot for server in servers])))

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        self.note(request, server, self.held_blocks(request.prompt, (server,))[0])

    def note(self, request: Request, server: Server, believed: int, estimated: object = None) -> None:
        """It is sent to a server that is believed to hold so many of its blocks: under way from now on."""
        blocks = request.prompt.blocks
        ticket = self._under_way.add(server.slot, blocks) if self._counts_under_way and len(blocks) else 0
        self._notes.note(request, server, tuple.__new__(Sent, (believed, ticket, estimated)))

    def arrived(self, request: Request, server: Server) -> Sent | None:
        """It is no longer under way: what was noted, None where nothing was."""
        sent = self._notes.take(request, server)
        if sent is not None and sent.under_way:
            self._under_way.drop(sent.under_way)
        return sent

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        self.learn(request, server, self.arrived(request, server), cached_tokens)

    def learn(self, request: Request, server: Server, sent: Sent | None, cached_tokens: int | None) -> None:
        """The server holds it now; ``sent`` is what ``arrived`` gave."""
        prompt = request.prompt
        if not len(prompt.blocks):
            return
        if sent is not None and sent.believed:
            if cached_tokens is None:
                self._answering[id(request), server.slot] = sent.believed, prompt.blocks.item(-1)
                if len(self._answering) > ANSWERING:
                    self._answering.popitem(last=False)
            else:
                self._correct(prompt, server, sent.believed, cached_tokens)
        if server.reported is not None:
            self._fit_capacity(prompt, server, server.reported)
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
        self.arrived(request, server)

    def forget(self, server: Server) -> None:
        self._notes.forget(server)
        self._under_way.forget(server.slot)
        for key in [key for key in self._answering if key[1] == server.slot]:
            del self._answering[key]
        self.index.forget(server.slot)

    def _correct(self, prompt: Prompt, server: Server, believed: int, cached_tokens: int) -> bool:
        """What it lacked of ``believed`` blocks it lacks in other prompts too; whether anything was taken back."""
        held = int(cached_tokens / prompt.block_tokens)
        return held + 1 < believed * BELIEVABLE and self.index.correct(server.slot, prompt.blocks, held) > 0

    def _fit_capacity(self, prompt: Prompt, server: Server, report: LoadReport) -> None:
        """An index that bounds what it believes of a server takes the size that the server tells of its cache.

        The endpoint picker's original ignores it: it then believes in blocks that were evicted long ago.
        """
        if report.cache_blocks and report.block_tokens and self._set_capacity is not None:
            tokens = report.cache_blocks * report.block_tokens * server.read_per_token
            self._set_capacity(server.slot, max(1, int(tokens / prompt.block_tokens)))


def under_way(most_blocks: int, secret: int | None) -> native.UnderWay:
    return native.UnderWay(most_blocks) if secret is None else native.UnderWay(most_blocks, secret)
