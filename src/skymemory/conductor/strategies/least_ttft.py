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
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, cast

from skymemory import native
from skymemory.conductor.fleet import Server
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.prefix_index.base import Blocks, PrefixIndex
from skymemory.conductor.prefix_index.events import CPU, DISK, OTHER, REMOTE
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.strategies.base import GainThreshold, Ranking, Standing, Tickets, Weights
from skymemory.conductor.strategies.estimates import DelayPrice, GivenSpeeds, LearnedSpeeds, PrefillCost, Speeds
from skymemory.conductor.strategies.indexed import Indexed
from skymemory.errors import InvalidInput
from skymemory.native.twin.ttft import FIGURES, SET_BACK_S

_HELD, _WAITING, _COMPUTING = "tokens held", "seconds of waiting", "seconds of computing"


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """No server gets much more than its share of requests, however good its cache is for them (``twin_guard``)."""

    limit: float = 4.0
    """Times the mean of requests per server that one server may get; infinite: no guard."""
    window_s: float = 60.0
    requests: int = 80
    """Runs of fewer requests are no concern: with few, a mean means nothing."""
    mean: float = 5.0
    """Nor are runs of less than this per server. Over 16 servers it outweighs ``requests``: of 80 requests to 64
    servers each could get two, and every conversation would wander."""

    def __post_init__(self) -> None:
        if not (self.limit >= 1 and self.window_s > 0 and self.requests >= 1 and self.mean >= 0):
            raise InvalidInput(
                f"a guard of {self.limit} × the mean over {self.window_s} s and {self.requests} requests;"
                " expected a limit of 1 or more, a window over 0 s, and 1 request or more"
            )

    def made(self) -> native.ShareGuard:
        return native.ShareGuard(self.limit, self.window_s, self.requests, self.mean)


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


class _Estimated(NamedTuple):
    """What was believed when a request was sent."""

    prefill: int
    """Its ticket in the queues."""
    cached_tokens: int
    routed_s: float
    wait_s: float
    """Until its prefill could begin."""
    load: Load
    """Of what was cached."""


def saved_tokens(prompt: Prompt, cached: int, load: Load) -> int:
    """Tokens that need not be computed, less those that loading the others costs as much as."""
    return cached if load is NOTHING else max(0, cached - round(load.blocks * prompt.block_tokens))


class _Ranked(Ranking):
    """What ``native.TtftRanker`` found, as it gave it: of most servers, nobody asks."""

    __slots__ = ("_best", "_packed", "figures")

    def __init__(self, best: tuple[int, ...], packed: bytes, figures: bytes, reasons: tuple[str, ...]) -> None:
        self._best, self._packed, self.figures = best, packed, figures
        self.reasons = reasons
        self.estimated_tbt_s = self.plans = None

    @property
    def packed(self) -> bytes:
        return self._packed

    @property
    def scores(self) -> Sequence[float]:
        return struct.unpack(f"={len(self._packed) // 8}d", self._packed)

    @property
    def matched_tokens(self) -> Sequence[int]:
        return [matched for _, _, matched, _ in FIGURES.iter_unpack(self.figures)]

    @property
    def estimated_ttft_s(self) -> Sequence[float]:
        return [wait_s + work_s for wait_s, work_s, _, _ in FIGURES.iter_unpack(self.figures)]

    @property
    def estimated_compute_s(self) -> Sequence[float]:
        return [work_s for _, work_s, _, _ in FIGURES.iter_unpack(self.figures)]

    @property
    def weights(self) -> Weights:
        waits_s, works_s, matched, _ = zip(*FIGURES.iter_unpack(self.figures), strict=True)
        return (_HELD, matched), (_WAITING, waits_s), (_COMPUTING, works_s)

    def best(self) -> Sequence[int]:
        return self._best

    def standing(self, at: int) -> Standing:
        wait_s, work_s, matched, _ = FIGURES.unpack_from(self.figures, FIGURES.size * at)
        (score,) = _SCORE.unpack_from(self._packed, 8 * at)
        figures = (_HELD, matched), (_WAITING, wait_s), (_COMPUTING, work_s)
        return score, matched, wait_s + work_s, None, None, work_s, figures


_new = tuple.__new__
"""Makes a NamedTuple in half the time that its own call takes."""
_SCORE = struct.Struct("=d")
_Last = tuple[Request, Sequence[Server], bytes, int, int]
"""A request that was ranked, for which servers, their figures, the best match that was not worth following, and how
many changes there had been.
"""


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
        self._guard = settings.guard().made()
        self._price = DelayPrice(settings.delay_weight)
        self._queues = native.PrefillQueues(settings.overdue)
        self._ranker = native.TtftRanker(
            self._queues, self._guard, self._under_way, settings.min_match_tokens, settings.min_match_ratio
        )
        self._table = index.whole_table if isinstance(index, ApproximatePrefixIndex) else None
        self._last: _Last | None = None
        """Of the request that was ranked last."""
        kind = type(self)
        self._errs = kind.prefills_s is not LeastTtft.prefills_s or kind.waits_s is not LeastTtft.waits_s
        """Whether estimates are not those that the ranker makes."""
        self._whole: Tickets[_Estimated] = Tickets()
        """Of answers that came whole, until their end is told."""

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        """In one call where estimates are by learnt curves and nothing has to be loaded; else part by part, which
        comes to the same.
        """
        speeds = self.speeds
        if self._errs or type(speeds) is not LearnedSpeeds or (self._loads is not None and self._loads.any):
            return self._rank_by_parts(request, servers, now_s)
        prompt, table = request.prompt, self._table
        best, held_back, unworthy, scores, figures = self._ranker.rank(
            self.held_blocks(prompt, servers) if table is None else table,
            prompt.blocks,
            prompt.tokens,
            prompt.block_tokens,
            servers,
            now_s,
            self._price.rate(len(servers), now_s),
            speeds.curves,
            speeds.hear,
        )
        if table is not None:
            self._last = request, servers, figures, unworthy, self._changes(table, speeds)
        reasons: tuple[str, ...] = ()
        if unworthy or held_back:
            reasons = self._why(prompt, unworthy, [servers[at] for at in held_back])
        return _Ranked(best, scores, figures, reasons)

    def _rank_by_parts(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        self._last = None
        prompt = request.prompt
        self.speeds.hear(servers)
        slots = [server.slot for server in servers]
        matched = self.matched_tokens(prompt, self.matched_blocks(prompt, servers))
        loads = self.loads(prompt, slots)
        saved = matched
        if loads:
            saved = [saved_tokens(prompt, *one) for one in zip(matched, loads, strict=True)]
        best_match = max(saved)
        unworthy = best_match if best_match and not self._gain.worth(best_match, prompt.tokens) else 0
        if unworthy:
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
        weights: Weights = ((_HELD, matched), (_WAITING, waits), (_COMPUTING, prefills))
        if loads:
            weights += (("of them saved", saved),)
        reasons = self._why(prompt, unworthy, [servers[at] for at in held_back])
        return Ranking(scores, matched, ttfts, reasons, weights, estimated_compute_s=prefills)

    def _why(self, prompt: Prompt, unworthy: int, held_back: Sequence[Server]) -> tuple[str, ...]:
        """``unworthy``: tokens of the best match, where it was not worth following, else 0."""
        reasons = [self._gain.why_not(unworthy, prompt.tokens)] if unworthy else []
        if held_back:
            names = ", ".join(server.name for server in held_back)
            reasons.append(f"passed by, with {self.settings.guard_limit:g} × the mean of recent requests: {names}")
        return tuple(reasons)

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
        slot, prompt, load = server.slot, request.prompt, NOTHING
        found = self._found(request, server)
        if found is not None:
            held, matched, work_s = found
        else:
            blocks = self.held_blocks(prompt, (server,))
            held, matched = blocks[0], self.matched_tokens(prompt, self.matched_blocks(prompt, (server,), blocks))[0]
            load = next(iter(self.loads(prompt, (slot,))), NOTHING)
            saved = saved_tokens(prompt, matched, load)
            if not self._gain.worth(saved, prompt.tokens):
                matched, saved, load = 0, 0, NOTHING
            work_s = self.prefills_s(request, (slot,), (saved,), now_s)[0] + load.seconds
        (wait_s,) = self.waits_s(request, (server,), now_s)
        prefill = self._queues.add(slot, work_s, now_s, 0.0, not request.streams)
        self.note(request, server, held, _new(_Estimated, (prefill, matched, now_s, wait_s, load)))
        self._price.sent(work_s, now_s)
        self._guard.sent(slot, now_s)

    def _found(self, request: Request, server: Server) -> tuple[int, int, float] | None:
        """Blocks that the server holds, tokens that it need not compute, and seconds that it computes, as they were
        found when the request was ranked; None where something has changed since.
        """
        last, table, speeds = self._last, self._table, self.speeds
        if last is None or table is None or type(speeds) is not LearnedSpeeds:
            return None
        self._last = None  # It keeps the prompt alive.
        asked, servers, figures, unworthy, changes = last
        if asked is not request or changes != self._changes(table, speeds) or server not in servers:
            return None
        _, work_s, matched, held = FIGURES.unpack_from(figures, FIGURES.size * servers.index(server))
        if unworthy or not matched:
            return held, 0, work_s
        return (held, matched, work_s) if self._gain.worth(matched, request.prompt.tokens) else None

    def _changes(self, table: native.PrefixTable, speeds: LearnedSpeeds) -> int:
        """Each of these only grows, so their sum stays the same only if nothing of what is ranked by has changed."""
        return table.changes() + self._under_way.changes() + speeds.changes

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        sent = self.arrived(request, server)
        if sent is not None:
            self._observe(request, server, now_s, cached_tokens, cast("_Estimated", sent.estimated))
        self.learn(request, server, sent, cached_tokens)

    def _observe(
        self, request: Request, server: Server, now_s: float, cached_tokens: int | None, sent: _Estimated
    ) -> None:
        """What its first byte says of the server's speed."""
        seconds = self._queues.remove(server.slot, sent.prefill, now_s)
        saved, load = sent.cached_tokens, sent.load
        if cached_tokens is not None:
            load = load.part(cached_tokens / saved if saved else 0.0)
            saved = cached_tokens
        if load is not NOTHING:
            saved = saved_tokens(request.prompt, saved, load)
        if seconds is not None and seconds > load.seconds:
            self.speeds.observe(server.slot, request.prompt.tokens, saved, seconds - load.seconds)
        if not request.streams:
            noted = _new(_Estimated, (sent.prefill, saved, sent.routed_s, sent.wait_s, load))
            self._whole.note(request, server, noted)

    def ended(self, request: Request, server: Server, now_s: float, output_tokens: int | None = None) -> None:
        sent = None if request.streams else self._whole.take(request, server)
        if sent is not None and output_tokens is not None:
            seconds = now_s - sent.routed_s - sent.wait_s - sent.load.seconds
            self.speeds.observe_whole(server.slot, request.prompt.tokens, sent.cached_tokens, output_tokens, seconds)

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        sent = self.arrived(request, server)
        if sent is not None:
            self._queues.remove(server.slot, cast("_Estimated", sent.estimated).prefill, now_s)

    def forget(self, server: Server) -> None:
        slot = server.slot
        super().forget(server)
        for part in (self._queues, self._guard, self.speeds, self._ranker):
            part.forget(slot)
        self._whole.forget(server)
        self._last = None

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
            if not over or best < -SET_BACK_S / 2:
                break
            for at in over:
                scores[at] -= SET_BACK_S
            held_back += over
        return held_back


# What it costs to use blocks that lie behind the GPU's memory: they are not computed, but they must be loaded.
#
# Where seconds per block are known they are added. Where they are not, a block counts as so much of one to compute, by
# its medium: a fifth in the host's memory, since llm-d gives it 0.8 of a block in the GPU's
# (``llm-d-kv-cache-manager/pkg/kvcache/backend.go``); three quarters on a disk or another machine, since Dynamo gives
# those 0.25 (``disk_cache_hit_weight``); and a whole one in a medium of unknown name.


COMPUTED: Mapping[str, float] = MappingProxyType({CPU: 0.2, DISK: 0.75, REMOTE: 0.75, OTHER: 1.0})
"""Of a block's computing, what loading it is taken to cost where that is not known."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a server has to load of a prompt."""

    blocks: float = 0.0
    """It costs as much as to compute so many blocks,"""
    seconds: float = 0.0
    """and these."""

    def part(self, part: float) -> Load:
        """Where only a part of what was believed to be held was there."""
        return self if part >= 1 else Load(self.blocks * part, self.seconds * part)


NOTHING = Load()


class Loads:
    """``load_s``: seconds per block by medium; 0 where they are not known."""

    def __init__(self, index: PreciseIndex, load_s: Mapping[str, float]) -> None:
        self._index = index
        self._seconds = {medium: seconds for medium, seconds in load_s.items() if seconds > 0}
        self._blocks = {medium: part for medium, part in COMPUTED.items() if medium not in self._seconds}

    @property
    def any(self) -> bool:
        """Whether any server was heard to hold a block elsewhere than in the GPU's memory."""
        return self._index.farther

    def of(self, blocks: Blocks, slots: Sequence[int], under_way: Sequence[int]) -> list[Load]:
        """For each of ``slots``. ``under_way``: leading blocks that it will have in the GPU's memory by then, for
        prompts that it was sent before; empty if there are none.
        """
        loads = self._costs(blocks, slots)
        for at, depth in enumerate(under_way):
            if depth and loads[at] is not NOTHING:
                (there,) = self._costs(blocks[:depth], slots[at : at + 1])
                loads[at] = Load(loads[at].blocks - there.blocks, loads[at].seconds - there.seconds)
        return loads

    def _costs(self, blocks: Blocks, slots: Sequence[int]) -> list[Load]:
        counts = self._index.costs(blocks, slots, self._blocks)
        seconds = self._index.costs(blocks, slots, self._seconds) if self._seconds else [0.0] * len(counts)
        return [Load(*one) if any(one) else NOTHING for one in zip(counts, seconds, strict=True)]
