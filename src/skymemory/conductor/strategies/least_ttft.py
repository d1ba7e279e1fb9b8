"""Least estimated time to first token: what waits at a server, plus what of the prompt it must compute.

Ours, in the spirit of Mooncake's conductor (FAST'25, algorithm 1): a cache weighs as many seconds as it saves and a
queue as many as it costs, so no weights have to be found between them. A hot prefix is computed again elsewhere as soon
as waiting for its server takes longer: replication by itself. Beyond that:

- a second of computing costs those who come behind it too, the more of them the longer the queue (``delay_price``);
- prompts under way at a server count as cached there for whoever queues behind them (``under_way``);
- no server gets more than its share of requests (``guard``);
- speeds are given by a cost model or learned from first bytes (``speeds``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skymemory.conductor.fleet import Server
from skymemory.conductor.prefix_index.base import PrefixIndex
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.base import Ranking
from skymemory.conductor.strategies.delay_price import DelayPrice
from skymemory.conductor.strategies.gain import GainThreshold
from skymemory.conductor.strategies.guard import GuardSettings, ShareGuard
from skymemory.conductor.strategies.indexed import Indexed
from skymemory.conductor.strategies.queues import Prefill, PrefillQueues
from skymemory.conductor.strategies.speeds import GivenSpeeds, LearnedSpeeds, PrefillCost, Speeds
from skymemory.conductor.strategies.tickets import Tickets
from skymemory.conductor.strategies.under_way import UnderWay
from skymemory.errors import InvalidInput

_SET_BACK_S = 1e9
"""Taken off the score of a server that had its share: it comes after all others, and they keep their order."""


@dataclass(frozen=True, slots=True)
class LeastTtftSettings:
    delay_weight: float = 1.5
    """How much the delay of requests that come later counts (``delay_price``); 0: only this request's own time."""
    overdue: float = 0.1
    """Part of a prefill's time so far that it is believed to need still, once it takes longer than estimated."""
    under_way_blocks: int = 4096
    """Of a prompt under way, blocks that count; 0: only what is done counts."""
    min_match_tokens: int = 0
    min_match_ratio: float = 0.0
    guard_limit: float = 2.2
    guard_window_s: float = 60.0
    guard_requests: int = 80
    guard_mean: float = 5.0
    blocks_per_server: int = 31_250
    """What is believed of a server that does not report the size of its cache."""
    events: bool = False
    """Engines tell by events what they hold; without, what was sent to them is believed to be there."""
    block_tokens: int = 16
    """Of the engines' blocks, with ``events``."""

    def __post_init__(self) -> None:
        if self.delay_weight < 0 or self.overdue < 0 or self.under_way_blocks < 0:
            raise InvalidInput("delay_weight, overdue and under_way_blocks are 0 or more")
        self.guard()

    def guard(self) -> GuardSettings:
        return GuardSettings(self.guard_limit, self.guard_window_s, self.guard_requests, self.guard_mean)


@dataclass(frozen=True, slots=True)
class _Sent:
    """What was believed when a request was sent."""

    prefill: Prefill
    chain: NDArray[np.uint64] | None
    cached_tokens: int


class LeastTtft(Indexed):
    """``cost``: seconds of a prefill, the same for all servers; None: learned for each from what they take."""

    name = "least-ttft"

    def __init__(
        self,
        index: PrefixIndex,
        settings: LeastTtftSettings | None = None,
        cost: PrefillCost | None = None,
    ) -> None:
        super().__init__(index)
        self.settings = settings = settings or LeastTtftSettings()
        self.speeds: Speeds = LearnedSpeeds() if cost is None else GivenSpeeds(cost)
        self._gain = GainThreshold(settings.min_match_tokens, settings.min_match_ratio)
        self._guard = ShareGuard(settings.guard())
        self._price = DelayPrice(settings.delay_weight)
        self._queues = PrefillQueues(settings.overdue)
        self._under_way = UnderWay(settings.under_way_blocks, getattr(index, "secret", None))
        self._sent: Tickets[_Sent] = Tickets()

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        settings, tokens = self.settings, request.prompt.tokens
        slots = [server.slot for server in servers]
        matched = self._matched(request, servers, slots)
        reasons: list[str] = []
        best_match = max(matched)
        if best_match and not self._gain.worth(best_match, tokens):
            reasons.append(self._gain.why_not(best_match, tokens))
            prefills = self.prefills_s(request, slots, [0] * len(slots), now_s)
        else:
            prefills = self.prefills_s(request, slots, matched, now_s)
        waits = self.waits_s(request, servers, now_s)
        ttfts = [wait + prefill for wait, prefill in zip(waits, prefills, strict=True)]
        delay = self._price.rate(len(servers), now_s)
        scores = [
            -wait - prefill * (1.0 + delay * (wait + prefill / 2.0))
            for wait, prefill in zip(waits, prefills, strict=True)
        ]
        held_back = self._hold_back(scores, slots, now_s)
        if held_back:
            names = ", ".join(servers[at].name for at in held_back)
            reasons.append(f"passed by, with {settings.guard_limit:g} × the mean of recent requests: {names}")
        weights = (("tokens held", matched), ("seconds of waiting", waits), ("seconds of computing", prefills))
        return Ranking(scores, matched, ttfts, tuple(reasons), weights, estimated_compute_s=prefills)

    def prefills_s(self, request: Request, slots: Sequence[int], cached: Sequence[int], now_s: float) -> list[float]:
        """Seconds that each server would compute for ``request``, with so many of its tokens cached.

        All that is believed of prefills passes here, and of waiting through ``waits_s``: a simulator, whose estimates
        would else be its truth, overrides both to err.
        """
        return self.speeds.prefills_s(slots, request.prompt.tokens, cached)

    def waits_s(self, request: Request, servers: Sequence[Server], now_s: float) -> list[float]:
        """Seconds until each server could begin with ``request``."""
        return self._queues.waits_s(servers, now_s)

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        slot, prompt = server.slot, request.prompt
        matched = self._matched(request, (server,), (slot,))
        super().routed(request, server, now_s)
        if not self._gain.worth(matched[0], prompt.tokens):
            matched = [0]
        work_s = self.prefills_s(request, (slot,), matched, now_s)[0]
        chain = None
        if self.settings.under_way_blocks and len(prompt.blocks):
            chain = self._under_way.add(slot, prompt.blocks)
        sent = _Sent(self._queues.add(slot, work_s, now_s), chain, matched[0])
        self._sent.note(request, server, sent)
        self._price.sent(work_s, now_s)
        self._guard.sent(slot, now_s)

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        sent = self._sent.take(request, server)
        if sent is not None:
            seconds = self._done(server.slot, sent, now_s)
            cached = sent.cached_tokens if cached_tokens is None else cached_tokens
            self.speeds.observe(server.slot, request.prompt.tokens, cached, seconds)
        super().succeeded(request, server, now_s, cached_tokens)

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        sent = self._sent.take(request, server)
        if sent is not None:
            self._done(server.slot, sent, now_s)
        super().failed(request, server, now_s)

    def forget(self, server: Server) -> None:
        slot = server.slot
        super().forget(server)
        for part in (self._queues, self._under_way, self._guard, self.speeds):
            part.forget(slot)
        self._sent.forget(server)

    def _matched(self, request: Request, servers: Sequence[Server], slots: Sequence[int]) -> list[int]:
        """Tokens of the prompt that each server holds or will hold when all it was sent is done."""
        blocks = self.matched_blocks(request.prompt, servers)
        under_way = self._under_way.depths(request.prompt.blocks, slots)
        if under_way:
            blocks = list(map(max, blocks, under_way))
        return self.matched_tokens(request.prompt, blocks)

    def _done(self, slot: int, sent: _Sent, now_s: float) -> float:
        if sent.chain is not None:
            self._under_way.drop(slot, sent.chain)
        return self._queues.remove(slot, sent.prefill, now_s)

    def _hold_back(self, scores: list[float], slots: Sequence[int], now_s: float) -> list[int]:
        """Set servers back that had their share, from the best down, until one is left that has not."""
        held_back: list[int] = []
        while len(held_back) < len(slots):
            best = max(scores)
            over = [
                at
                for at, score in enumerate(scores)
                if score == best and self._guard.over(slots[at], len(slots), now_s)
            ]
            if not over or best < -_SET_BACK_S / 2:
                break
            for at in over:
                scores[at] -= _SET_BACK_S
            held_back += over
        return held_back
