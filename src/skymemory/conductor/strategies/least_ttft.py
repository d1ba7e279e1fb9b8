"""Least estimated time to first token: what waits at a server, plus what of the prompt it must compute.

Ours, in the spirit of Mooncake's conductor (FAST'25, algorithm 1): a cache weighs as many seconds as it saves and a
queue as many as it costs, so no weights have to be found between them. A hot prefix is computed again elsewhere as soon
as waiting for its server takes longer: replication by itself. Beyond that:

- a second of computing costs those who come behind it too, the more of them the longer the queue (``delay_price``);
- no server gets more than its share of requests (``guard``);
- speeds are given by a cost model or learned from first bytes (``speeds``);
- what engines' events say to be behind the GPU's memory costs its loading (``loading``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from skymemory.conductor.fleet import Server
from skymemory.conductor.prefix_index.base import PrefixIndex
from skymemory.conductor.prefix_index.media import CPU, DISK, REMOTE
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.strategies.base import Ranking
from skymemory.conductor.strategies.delay_price import DelayPrice
from skymemory.conductor.strategies.gain import GainThreshold
from skymemory.conductor.strategies.guard import GuardSettings, ShareGuard
from skymemory.conductor.strategies.indexed import Indexed
from skymemory.conductor.strategies.loading import NOTHING, Load, Loads
from skymemory.conductor.strategies.queues import Prefill, PrefillQueues
from skymemory.conductor.strategies.speeds import GivenSpeeds, LearnedSpeeds, PrefillCost, Speeds
from skymemory.conductor.strategies.tickets import Tickets
from skymemory.errors import InvalidInput

_SET_BACK_S = 1e9
"""Taken off the score of a server that had its share: it comes after all others, and they keep their order."""


@dataclass(frozen=True, slots=True)
class LeastTtftSettings:
    delay_weight: float = 1.5
    """How much the delay of requests that come later counts (``delay_price``); 0: only this request's own time."""
    overdue: float = 0.1
    """Part of a prefill's time so far that it is believed to need still, once it takes longer than estimated."""
    min_match_tokens: int = 0
    min_match_ratio: float = 0.0
    guard_limit: float = 4.0
    guard_window_s: float = 60.0
    guard_requests: int = 80
    guard_mean: float = 5.0
    blocks_per_server: int = 31_250
    """What is believed of a server that does not report the size of its cache."""
    events: bool = False
    """Engines tell by events what they hold; without, what was sent to them is believed to be there."""
    block_tokens: int = 16
    """Of the engines' blocks, with ``events``."""
    cpu_load_s: float = 0.0
    """Seconds to load a block from the host's memory, with ``events``; 0: not known, a fifth of computing it."""
    disk_load_s: float = 0.0
    """The same from a disk; 0: three quarters."""
    remote_load_s: float = 0.0
    """The same from another machine; 0: three quarters."""

    def __post_init__(self) -> None:
        for name in ("cpu_load_s", "disk_load_s", "remote_load_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidInput(f"{name} is {getattr(self, name)}; expected seconds, such as 1e-4, or 0")
        if self.delay_weight < 0 or self.overdue < 0:
            raise InvalidInput("delay_weight and overdue are 0 or more")
        self.guard()

    def load_s(self) -> dict[str, float]:
        return {CPU: self.cpu_load_s, DISK: self.disk_load_s, REMOTE: self.remote_load_s}

    def guard(self) -> GuardSettings:
        return GuardSettings(self.guard_limit, self.guard_window_s, self.guard_requests, self.guard_mean)


@dataclass(frozen=True, slots=True)
class _Sent:
    """What was believed when a request was sent."""

    prefill: Prefill
    cached_tokens: int
    routed_s: float
    wait_s: float
    """Until its prefill could begin."""
    load: Load
    """Of what was cached."""


def saved_tokens(prompt: Prompt, cached: int, load: Load) -> int:
    """Tokens that need not be computed, less those that loading the others costs as much as."""
    return cached if load is NOTHING else max(0, cached - round(load.blocks * prompt.block_tokens))


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
        self._loads = Loads(index, settings.load_s()) if isinstance(index, PreciseIndex) else None
        self._gain = GainThreshold(settings.min_match_tokens, settings.min_match_ratio)
        self._guard = ShareGuard(settings.guard())
        self._price = DelayPrice(settings.delay_weight)
        self._queues = PrefillQueues(settings.overdue)
        self._sent: Tickets[_Sent] = Tickets()
        self._whole: Tickets[_Sent] = Tickets()
        """Of answers that came whole, until their end is told."""

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        settings, tokens = self.settings, request.prompt.tokens
        self.speeds.hear(servers)
        slots = [server.slot for server in servers]
        matched = self.matched_tokens(request.prompt, self.matched_blocks(request.prompt, servers))
        loads = self.loads(request.prompt, slots)
        saved = matched
        if loads:
            saved = [saved_tokens(request.prompt, *one) for one in zip(matched, loads, strict=True)]
        reasons: list[str] = []
        best_match = max(saved)
        if best_match and not self._gain.worth(best_match, tokens):
            reasons.append(self._gain.why_not(best_match, tokens))
            prefills = self.prefills_s(request, slots, [0] * len(slots), now_s)
        else:
            prefills = self.prefills_s(request, slots, saved, now_s)
            if loads:
                prefills = [seconds + load.seconds for seconds, load in zip(prefills, loads, strict=True)]
        waits = self.waits_s(request, servers, now_s)
        ttfts = [wait + prefill for wait, prefill in zip(waits, prefills, strict=True)]
        delays = self._price.delays_s(waits, prefills, self._queues.usual_s, now_s)
        scores = [-ttft - delay for ttft, delay in zip(ttfts, delays, strict=True)]
        held_back = self._hold_back(scores, slots, now_s)
        if held_back:
            names = ", ".join(servers[at].name for at in held_back)
            reasons.append(f"passed by, with {settings.guard_limit:g} × the mean of recent requests: {names}")
        weights: tuple[tuple[str, Sequence[float]], ...] = (
            ("tokens held", matched),
            ("seconds of waiting", waits),
            ("seconds of computing", prefills),
        )
        if loads:
            weights += (("of them saved", saved),)
        return Ranking(scores, matched, ttfts, tuple(reasons), weights, estimated_compute_s=prefills)

    def loads(self, prompt: Prompt, slots: Sequence[int]) -> list[Load]:
        """What each server has to load of what it is said to hold; nothing at all where all is in GPUs' memories."""
        if self._loads is None or not len(prompt.blocks) or not self._loads.any:
            return []
        return self._loads.of(prompt.blocks, slots, self._under_way.depths(prompt.blocks, slots))

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
        matched = self.matched_tokens(prompt, self.matched_blocks(prompt, (server,)))[0]
        load = next(iter(self.loads(prompt, (slot,))), NOTHING)
        super().routed(request, server, now_s)
        saved = saved_tokens(prompt, matched, load)
        if not self._gain.worth(saved, prompt.tokens):
            matched, saved, load = 0, 0, NOTHING
        work_s = self.prefills_s(request, (slot,), (saved,), now_s)[0] + load.seconds
        wait_s = self.waits_s(request, (server,), now_s)[0]
        prefill = self._queues.add(slot, work_s, now_s, unseen=not request.streams)
        sent = _Sent(prefill, matched, now_s, wait_s, load)
        self._sent.note(request, server, sent)
        self._price.sent(work_s, now_s)
        self._guard.sent(slot, now_s)

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        sent = self._sent.take(request, server)
        if sent is not None:
            seconds = self._queues.remove(server.slot, sent.prefill, now_s)
            cached, load = sent.cached_tokens, sent.load
            if cached_tokens is not None:
                load = load.part(cached_tokens / cached if cached else 0.0)
                cached = cached_tokens
            saved = saved_tokens(request.prompt, cached, load)
            if seconds is not None and seconds > load.seconds:
                self.speeds.observe(server.slot, request.prompt.tokens, saved, seconds - load.seconds)
            if not request.streams:
                self._whole.note(request, server, replace(sent, cached_tokens=saved, load=load))
        super().succeeded(request, server, now_s, cached_tokens)

    def ended(self, request: Request, server: Server, now_s: float, output_tokens: int | None = None) -> None:
        sent = None if request.streams else self._whole.take(request, server)
        if sent is not None and output_tokens is not None:
            seconds = now_s - sent.routed_s - sent.wait_s - sent.load.seconds
            self.speeds.observe_whole(server.slot, request.prompt.tokens, sent.cached_tokens, output_tokens, seconds)

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        sent = self._sent.take(request, server)
        if sent is not None:
            self._queues.remove(server.slot, sent.prefill, now_s)
        super().failed(request, server, now_s)

    def forget(self, server: Server) -> None:
        slot = server.slot
        super().forget(server)
        for part in (self._queues, self._guard, self.speeds):
            part.forget(slot)
        self._sent.forget(server)
        self._whole.forget(server)

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
