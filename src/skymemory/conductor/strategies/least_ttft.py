"""Least estimated time to first token (the default), in the spirit of Mooncake's conductor (FAST'25, algorithm 1).

Caches and queues are both seconds, so they need no weights; hot prefixes replicate by themselves.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from skymemory import native
from skymemory.conductor.picker import ElsewhereRequest, Measured, RankedServer, Ranking, Server, Weights
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex, Blocks, PrefixIndex
from skymemory.conductor.prefix_index.events import CPU, DISK, OTHER, REMOTE
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.strategies.estimates import DelayPrice, GivenSpeeds, LearnedSpeeds, PrefillCost, ServerSpeeds
from skymemory.conductor.strategies.strategy_base import GainThreshold, Indexed, RequestNotes
from skymemory.errors import InvalidInput
from skymemory.native.twin.ttft import FIGURES, SET_BACK_S

_HELD, _WAITING, _COMPUTING = "tokens held", "seconds of waiting", "seconds of computing"


@dataclass(frozen=True, slots=True)
class LeastTtftSettings:
    delay_weight: float = 1.5
    """Weight of the delay of later requests (``DelayPrice``)."""
    overdue: float = 0.1
    """Remaining time of an overdue prefill, as a share of its time so far."""
    min_match_tokens: int = 0
    min_match_ratio: float = 0.0
    guard_limit: float = 4.0
    """Limit of a server's share of recent requests, relative to the mean."""
    guard_window_s: float = 60.0
    guard_requests: int = 80
    """Requests below which no server is limited."""
    guard_mean: float = 5.0
    """Mean requests per server below which no server is limited."""
    blocks_per_server: int = 31_250
    events: bool = False
    block_tokens: int = 16
    cpu_load_s: float = 0.0
    """Seconds per block with ``events``; 0: a fifth of computing it."""
    disk_load_s: float = 0.0
    """Seconds per block; 0: three quarters of computing it."""
    remote_load_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("cpu_load_s", "disk_load_s", "remote_load_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidInput(f"{name} is {getattr(self, name)}; expected seconds, such as 1e-4, or 0")
        if self.delay_weight < 0 or self.overdue < 0:
            raise InvalidInput("delay_weight and overdue: expected 0 or more")
        if not (
            self.guard_limit >= 1 and self.guard_window_s > 0 and self.guard_requests >= 1 and self.guard_mean >= 0
        ):
            raise InvalidInput(
                f"guard with limit {self.guard_limit}, window_s {self.guard_window_s}, requests {self.guard_requests},"
                f" mean {self.guard_mean}; expected ≥ 1, > 0, ≥ 1, ≥ 0"
            )

    def load_s(self) -> dict[str, float]:
        return {CPU: self.cpu_load_s, DISK: self.disk_load_s, REMOTE: self.remote_load_s}


def saved_tokens(prompt: Prompt, cached: int, load: CacheLoading) -> int:
    """Return the cached tokens, less those that loading costs."""
    return cached if load is NOTHING else max(0, cached - round(load.blocks * prompt.block_tokens))


class _Ranked(Ranking):
    """Ranking as packed by ``native.TtftRanker``; unpacked on demand, as few callers read all figures."""

    __slots__ = ("_best", "figures")
    packed: bytes

    def __init__(self, best: tuple[int, ...], packed: bytes, figures: bytes, reasons: tuple[str, ...]) -> None:
        self._best, self.packed, self.figures = best, packed, figures
        self.reasons = reasons
        self.estimated_tbt_s = self.plan_at = None

    @property
    def scores(self) -> Sequence[float]:
        return struct.unpack(f"={len(self.packed) // 8}d", self.packed)

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

    def entry(self, at: int) -> RankedServer:
        wait_s, work_s, matched, _ = _figures_at(self.figures, _ROW_BYTES * at)
        (score,) = _score_at(self.packed, 8 * at)
        figures = (_HELD, matched), (_WAITING, wait_s), (_COMPUTING, work_s)
        return score, matched, wait_s + work_s, None, None, work_s, figures


_figures_at, _ROW_BYTES = FIGURES.unpack_from, FIGURES.size
_score_at = struct.Struct("=d").unpack_from
# Ticket of the prefill, cached tokens, time of sending, seconds of wait, loading.
_Estimated = tuple[int, int, float, float, "CacheLoading"]
# Request, servers, figures, best match if below the threshold, count of changes.
_Last = tuple[Request, Sequence[Server], bytes, int, int]


# Calls during the life of a request, and what each records:
#
#   rank       held blocks and those under way -> cached tokens -> compute seconds by the server's curve
#              + wait of the server's queue + price of delaying later requests -> score; nothing is booked
#   routed     the prompt is under way, its compute seconds join the queue, price and guard count it
#   succeeded  first byte: the request leaves the queue, and its time there teaches the curve
#   ended      first and last byte coincide if the answer is not streamed: the whole answer teaches (roughly)
#   failed     the request leaves the queue and the prompts under way; nothing is learnt
#
# ``rank`` exists twice: ``TtftRanker`` does it in a single native call; ``_rank_by_parts`` does the same if estimates
# are overridden, come from a cost model, or include loading. tests/conductor/strategies/test_one_call.py compares them.


class LeastTtft(Indexed):
    """Least-TTFT strategy. ``cost``: of all servers; None: learnt per server."""

    name = "least-ttft"

    def __init__(
        self, index: PrefixIndex, settings: LeastTtftSettings | None = None, cost: PrefillCost | None = None
    ) -> None:
        super().__init__(index)
        self.settings = settings = settings or LeastTtftSettings()
        self.speeds: ServerSpeeds = LearnedSpeeds() if cost is None else GivenSpeeds(cost)
        self._loads = LoadingCosts(index, settings.load_s()) if isinstance(index, PreciseIndex) else None
        self._gain = GainThreshold(settings.min_match_tokens, settings.min_match_ratio)
        self._guard = native.ShareGuard(
            settings.guard_limit, settings.guard_window_s, settings.guard_requests, settings.guard_mean
        )
        self._price = DelayPrice(settings.delay_weight)
        self._queues = native.PrefillQueues(settings.overdue)
        self._ranker = native.TtftRanker(
            self._queues, self._guard, self._under_way, settings.min_match_tokens, settings.min_match_ratio
        )
        self._table = index.whole_table if isinstance(index, ApproximatePrefixIndex) else None
        self._last: _Last | None = None
        kind = type(self)
        self._overridden = kind.prefills_s is not LeastTtft.prefills_s or kind.waits_s is not LeastTtft.waits_s
        self._whole: RequestNotes[_Estimated] = RequestNotes()
        self._share_measured: Measured | None = None

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        """Rank in a native call if times are learnt and nothing is loaded, else in parts."""
        speeds = self.speeds
        if self._overridden or type(speeds) is not LearnedSpeeds or (self._loads is not None and self._loads.any):
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
            speeds.read_reports,
        )
        if table is not None:
            self._last = request, servers, figures, unworthy, self._changes(table, speeds)
        reasons: tuple[str, ...] = ()
        if unworthy or held_back:
            reasons = self._why(prompt, unworthy, [servers[at] for at in held_back])
        return _Ranked(best, scores, figures, reasons)

    def _rank_by_parts(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        # Rank in Python as ``native.TtftRanker`` does: with overridden estimates, or costs of loading.
        self._last = None
        prompt = request.prompt
        self.speeds.read_reports(servers)
        slots = [server.slot for server in servers]
        matched = self.matched_tokens(prompt, self.matched_blocks(prompt, servers))
        loads = self.loads(prompt, slots)
        saved = matched
        if loads:
            saved = [saved_tokens(prompt, *counts) for counts in zip(matched, loads, strict=True)]
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
        """Return the reasons of a ranking; ``unworthy``: tokens of a best match too short to follow."""
        reasons = [self._gain.why_not(unworthy, prompt.tokens)] if unworthy else []
        if held_back:
            names = ", ".join(server.name for server in held_back)
            reasons.append(f"skipped, with {self.settings.guard_limit:g} × the mean of recent requests: {names}")
        return tuple(reasons)

    def loads(self, prompt: Prompt, slots: Sequence[int]) -> list[CacheLoading]:
        """Return the loading costs per server; empty if nothing is loaded."""
        if self._loads is None or not len(prompt.blocks) or not self._loads.any:
            return []
        return self._loads.of(prompt.blocks, slots, self._under_way.depths(prompt.blocks, slots))

    def prefills_s(self, request: Request, slots: Sequence[int], cached: Sequence[int], now_s: float) -> list[float]:
        """Return compute seconds per server; simulators override this and ``waits_s`` to add errors."""
        return self.speeds.prefills_s(slots, request.prompt.tokens, cached)

    def waits_s(self, request: Request, servers: Sequence[Server], now_s: float) -> list[float]:
        return self._queues.waits_s(servers, now_s)

    def queue_s(self, server: Server, now_s: float) -> float:
        return self._queues.waits_s((server,), now_s)[0]

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        """Book the prefill in the server's queue with the estimates of the ranking."""
        slot, prompt, load = server.slot, request.prompt, NOTHING
        # The ranking has just computed all of this. It is computed again only if something changed since, or if the
        # request goes to a server that was not ranked.
        ranked = self._take_ranked_figures(request, server)
        if ranked is not None:
            held_blocks, matched, work_s = ranked
        else:
            blocks = self.held_blocks(prompt, (server,))
            held_blocks, matched = (
                blocks[0],
                self.matched_tokens(prompt, self.matched_blocks(prompt, (server,), blocks))[0],
            )
            load = next(iter(self.loads(prompt, (slot,))), NOTHING)
            saved = saved_tokens(prompt, matched, load)
            if not self._gain.worth(saved, prompt.tokens):
                matched, saved, load = 0, 0, NOTHING
            work_s = self.prefills_s(request, (slot,), (saved,), now_s)[0] + load.seconds
        (wait_s,) = self.waits_s(request, (server,), now_s)
        prefill = self._queues.add(slot, work_s, now_s, 0.0, not request.streams)
        self.record_sent(request, server, held_blocks, (prefill, matched, now_s, wait_s, load))
        self._price.sent(work_s, now_s)
        self._guard.sent(slot, now_s)

    def _take_ranked_figures(self, request: Request, server: Server) -> tuple[int, int, float] | None:
        """Return held blocks, saved tokens and compute seconds; None if anything changed since the ranking."""
        last, table, speeds = self._last, self._table, self.speeds
        if last is None or table is None or type(speeds) is not LearnedSpeeds:
            return None
        self._last = None  # it would keep the prompt alive
        ranked, servers, figures, unworthy, changes = last
        if ranked is not request or changes != self._changes(table, speeds) or server not in servers:
            return None
        _, work_s, matched, held_blocks = _figures_at(figures, _ROW_BYTES * servers.index(server))
        if unworthy or not matched:
            return held_blocks, 0, work_s
        # The ranking checks if the best match of all servers is worth following, booking if this server's match is.
        return (held_blocks, matched, work_s) if self._gain.worth(matched, request.prompt.tokens) else None

    def _changes(self, table: native.PrefixTable, speeds: LearnedSpeeds) -> int:
        """Return a sum of growing counters, equal only if no input of the ranking changed."""
        return table.changes() + self._under_way.changes() + speeds.changes

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        sent = self.arrived(request, server)
        if sent is not None:
            _, _, estimated = sent
            self._observe(request, server, now_s, cached_tokens, estimated)
        self.learn(request, server, sent, cached_tokens)

    def _observe(
        self, request: Request, server: Server, now_s: float, cached_tokens: int | None, sent: _Estimated
    ) -> None:
        # Learn the server's speed from the time between sending and first byte.
        # ``seconds`` is None if its start or end is unknown: it, or a request before it in the queue, was not streamed.
        prefill, matched, routed_s, wait_s, load = sent
        seconds = self._queues.remove(server.slot, prefill, now_s)
        saved = matched if cached_tokens is None else cached_tokens  # prefer the engine's own count
        if load is not NOTHING:
            if cached_tokens is not None:  # only the part that was still cached was loaded
                load = load.part(cached_tokens / matched if matched else 0.0)
            saved = saved_tokens(request.prompt, saved, load)
        if seconds is not None and seconds > load.seconds:
            self.speeds.observe(server.slot, request.prompt.tokens, saved, seconds - load.seconds)
            if self._share_measured is not None:
                self._share_measured(server.slot, request.prompt.tokens, saved, seconds - load.seconds)
        if not request.streams:
            self._whole.add(request, server, (prefill, saved, routed_s, wait_s, load))

    def on_request_end(self, request: Request, server: Server, now_s: float, output_tokens: int | None = None) -> None:
        """Learn from the time of a whole answer if it was not streamed."""
        if request.streams:
            return
        sent = self._whole.take(request, server)
        if sent is not None and output_tokens is not None:
            _, saved, routed_s, wait_s, load = sent
            seconds = now_s - routed_s - wait_s - load.seconds
            self.speeds.observe_whole(server.slot, request.prompt.tokens, saved, output_tokens, seconds)

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        sent = self.arrived(request, server)
        if sent is not None:
            _, _, (prefill, *_) = sent
            self._queues.remove(server.slot, prefill, now_s)

    # Other replicas' requests join the queue as this router's do; the delay price and the guard count them on hearing.

    def sent_elsewhere(self, request: ElsewhereRequest, server: Server, now_s: float) -> object:
        prefill = 0
        if request.computes:
            prefill = self._queues.add(server.slot, request.work_s, request.sent_s, 0.0, not request.streams)
        self._price.sent(request.work_s, now_s)
        self._guard.sent(server.slot, now_s)
        return prefill, super().sent_elsewhere(request, server, now_s)

    def prefilled_elsewhere(self, ticket: object, server: Server, at_s: float) -> None:
        assert isinstance(ticket, tuple)
        prefill, under_way = ticket
        super().prefilled_elsewhere(under_way, server, at_s)
        if prefill:
            self._queues.remove(server.slot, prefill, at_s)

    def measured_elsewhere(self, server: Server, tokens: int, cached: int, seconds: float) -> None:
        if seconds > 0:
            self.speeds.observe(server.slot, tokens, cached, seconds)

    def share_measured(self, measured: Measured) -> None:
        self._share_measured = measured

    def forget(self, server: Server) -> None:
        slot = server.slot
        super().forget(server)
        for part in (self._queues, self._guard, self.speeds, self._ranker):
            part.forget(slot)
        self._whole.forget(server)
        self._last = None

    def _hold_back(self, scores: list[float], slots: Sequence[int], now_s: float) -> list[int]:
        """Penalise the best servers that have had their share of recent requests until another leads; return their
        positions.
        """
        # The penalty keeps their order: if all are above their share, the ranking does not change.
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


COMPUTED: Mapping[str, float] = MappingProxyType({CPU: 0.2, DISK: 0.75, REMOTE: 0.75, OTHER: 1.0})
"""Cost of loading a block relative to computing it, by medium.

As in llm-d (``llm-d-kv-cache-manager/pkg/kvcache/backend.go``) and Dynamo (``disk_cache_hit_weight``).
"""


@dataclass(frozen=True, slots=True)
class CacheLoading:
    """Cost of loading cached blocks into the GPU's memory, in blocks to compute and in seconds, which add up."""

    blocks: float = 0.0
    seconds: float = 0.0

    def part(self, part: float) -> CacheLoading:
        return self if part >= 1 else CacheLoading(self.blocks * part, self.seconds * part)


NOTHING = CacheLoading()


class LoadingCosts:
    """Costs of loading blocks that a server holds outside its GPU's memory; ``load_s``: seconds per block by medium."""

    def __init__(self, index: PreciseIndex, load_s: Mapping[str, float]) -> None:
        self._index = index
        self._seconds = {medium: seconds for medium, seconds in load_s.items() if seconds > 0}
        self._blocks = {medium: part for medium, part in COMPUTED.items() if medium not in self._seconds}

    @property
    def any(self) -> bool:
        return self._index.beyond_gpu

    def of(self, blocks: Blocks, slots: Sequence[int], under_way: Sequence[int]) -> list[CacheLoading]:
        """Return the costs per slot; ``under_way``: leading blocks being computed there, which need no load, or
        nothing.
        """
        loads = self._costs(blocks, slots)
        # Blocks under way will be in the GPU's memory when this prompt's turn comes: they cost nothing.
        for at, depth in enumerate(under_way):
            if depth and loads[at] is not NOTHING:
                (free,) = self._costs(blocks[:depth], slots[at : at + 1])
                loads[at] = CacheLoading(loads[at].blocks - free.blocks, loads[at].seconds - free.seconds)
        return loads

    def _costs(self, blocks: Blocks, slots: Sequence[int]) -> list[CacheLoading]:
        counts = self._index.costs(blocks, slots, self._blocks)
        seconds = self._index.costs(blocks, slots, self._seconds) if self._seconds else [0.0] * len(counts)
        return [CacheLoading(*parts) if any(parts) else NOTHING for parts in zip(counts, seconds, strict=True)]
