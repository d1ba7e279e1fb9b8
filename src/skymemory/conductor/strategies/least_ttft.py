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
from skymemory.conductor.picker import (
    ElsewhereRequest,
    Measured,
    RankedServer,
    Ranking,
    ReportedLoad,
    Server,
    Weights,
)
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex, Blocks, PrefixIndex
from skymemory.conductor.prefix_index.events import CPU, DISK, OTHER, REMOTE
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.strategies.decode_costs import Mark
from skymemory.conductor.strategies.estimates import (
    BusyIntervals,
    DelayPrice,
    GivenSpeeds,
    LearnedSpeeds,
    PrefillCost,
    ServerSpeeds,
)
from skymemory.conductor.strategies.server_prices import GOALS, Due, ServerPrices
from skymemory.conductor.strategies.strategy_base import GainThreshold, Indexed, RequestNotes
from skymemory.errors import InvalidInput
from skymemory.native.twin.ttft import FIGURES, HOT, SET_BACK_S, Price

SEEN_ENOUGH = 8
"""Prefills seen at a server from which those that other replicas measured teach nothing."""
_HELD, _WAITING, _COMPUTING = "tokens held", "seconds of waiting", "seconds of computing"
_PRICE = "seconds of decoding and evicting"
REFRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class LeastTtftSettings:
    goal: str = "balanced"
    """Which times count most: to the first token (``ttft``), per token (``tpot``), of whole answers (``e2e``)."""
    delay_weight: float = 1.0
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
        if self.goal not in GOALS:
            raise InvalidInput(f"goal is {self.goal!r}; expected one of {', '.join(GOALS)}")
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
        return [matched for _, _, _, matched, _ in FIGURES.iter_unpack(self.figures)]

    @property
    def estimated_ttft_s(self) -> Sequence[float]:
        return [wait_s + work_s for wait_s, work_s, *_ in FIGURES.iter_unpack(self.figures)]

    @property
    def estimated_compute_s(self) -> Sequence[float]:
        return [work_s for _, work_s, *_ in FIGURES.iter_unpack(self.figures)]

    @property
    def weights(self) -> Weights:
        waits_s, works_s, prices_s, matched, _ = zip(*FIGURES.iter_unpack(self.figures), strict=True)
        return (_HELD, matched), (_WAITING, waits_s), (_COMPUTING, works_s), (_PRICE, prices_s)

    def best(self) -> Sequence[int]:
        return self._best

    def entry(self, at: int) -> RankedServer:
        wait_s, work_s, price_s, matched, _ = _figures_at(self.figures, _ROW_BYTES * at)
        (score,) = _score_at(self.packed, 8 * at)
        figures = (_HELD, matched), (_WAITING, wait_s), (_COMPUTING, work_s), (_PRICE, price_s)
        return score, matched, wait_s + work_s, None, None, work_s, figures


_figures_at, _ROW_BYTES = FIGURES.unpack_from, FIGURES.size
_score_at = struct.Struct("=d").unpack_from


@dataclass(slots=True)
class _Estimated:
    """Estimates of a request that was sent, and the ticket of its prefill."""

    prefill: int
    due: Due
    matched: int
    saved: int
    routed_s: float
    wait_s: float
    work_s: float
    load: CacheLoading
    decoding: Mark | None = None


@dataclass(slots=True)
class _Elsewhere:
    """Request of another replica, and the tickets of its prefill (0: it has ended) and of its answer."""

    request: ElsewhereRequest
    under_way: object
    prefill: int = 0
    decoding: Mark | None = None


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
        self._read: dict[int, ReportedLoad] = {}
        self._refreshed_s = 0.0
        kind = type(self)
        self._overridden = kind.prefills_s is not LeastTtft.prefills_s or kind.waits_s is not LeastTtft.waits_s
        self._intervals = BusyIntervals()
        self._prices = ServerPrices(settings.goal, self._table, self.speeds.per_token_s)
        self._answers: RequestNotes[_Estimated] = RequestNotes()
        self._share_measured: Measured | None = None

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        """Rank in a native call if times are learnt and nothing is loaded, else in parts."""
        speeds = self.speeds
        if self._overridden or type(speeds) is not LearnedSpeeds or (self._loads is not None and self._loads.any):
            return self._rank_by_parts(request, servers, now_s)
        self._refresh(servers, now_s)
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
            self._prices.rows,
            self._prices.answer_tokens(request),
            self._read_reports,
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
        self._read_reports(servers)
        self._refresh(servers, now_s)
        slots = [server.slot for server in servers]
        prices = [self._prices.of(slot) for slot in slots]
        matched = self._trusted_tokens(prompt, self.matched_blocks(prompt, servers), prices)
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
        waits = [
            wait_s + price.late_s(now_s)
            for wait_s, price in zip(self.waits_s(request, servers, now_s), prices, strict=True)
        ]
        ttfts = [wait + prefill for wait, prefill in zip(waits, prefills, strict=True)]
        hot, scored = 0 if unworthy else self._hot_tokens(prompt, servers), prefills
        if hot:
            scored = self.prefills_s(request, slots, [max(hot, cached) for cached in matched], now_s)
        delays = self._price.delays_s(waits, scored, self._queues.usual_s, now_s)
        answer_tokens = self._prices.answer_tokens(request)
        costs = [
            price.of(work_s, prompt.tokens, prompt.tokens - (0 if unworthy else cached), answer_tokens)
            for price, work_s, cached in zip(prices, scored, matched, strict=True)
        ]
        totals = zip(waits, scored, delays, costs, strict=True)
        scores = [-(wait_s + work_s) - delay_s - cost_s for wait_s, work_s, delay_s, cost_s in totals]
        held_back = self._hold_back(scores, slots, now_s)
        weights: Weights = ((_HELD, matched), (_WAITING, waits), (_COMPUTING, prefills), (_PRICE, costs))
        if loads:
            weights += (("of them saved", saved),)
        reasons = self._why(prompt, unworthy, [servers[at] for at in held_back])
        return Ranking(scores, matched, ttfts, reasons, weights, estimated_compute_s=prefills)

    def _trusted_tokens(self, prompt: Prompt, blocks: Sequence[int], prices: Sequence[Price]) -> list[int]:
        """Return the tokens in ``blocks`` that count, by each server's trust."""
        return [
            min(prompt.tokens, int(count * prompt.block_tokens * price.trust)) if count else 0
            for count, price in zip(blocks, prices, strict=True)
        ]

    def _hot_tokens(self, prompt: Prompt, servers: Sequence[Server]) -> int:
        """Return the leading tokens that count as held everywhere (``HOT``)."""
        if self._table is None:
            return 0
        held = self.held_blocks(prompt, servers)
        at = held.index(max(held))
        blocks = self._table.used_every(servers[at].slot, prompt.blocks[: held[at]], HOT * len(servers))
        return min(prompt.tokens, int(blocks * prompt.block_tokens))

    def _is_new(self, server: Server) -> bool:
        """Return True once for each report."""
        report = server.reported
        if report is None or self._read.get(server.slot) is report:
            return False
        self._read[server.slot] = report
        return True

    def _read_reports(self, servers: Sequence[Server]) -> None:
        servers = [server for server in servers if self._is_new(server)]
        self.speeds.read_reports(servers)
        for server in servers:
            self._prices.read_report(server)
            if server.reported is not None:
                self._prices.update(server, self._queues.usual_s, server.reported.at_s)

    def _refresh(self, servers: Sequence[Server], now_s: float) -> None:
        """Compute all prices again from time to time: reports grow old, and servers idle."""
        if now_s - self._refreshed_s >= REFRESH_S:
            self._refreshed_s = now_s
            for server in servers:
                self._prices.update(server, self._queues.usual_s, now_s)

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
            held_blocks = blocks[0]
            reach = self.matched_blocks(prompt, (server,), blocks)
            (matched,) = self._trusted_tokens(prompt, reach, (self._prices.of(slot),))
            load = next(iter(self.loads(prompt, (slot,))), NOTHING)
            saved = saved_tokens(prompt, matched, load)
            if not self._gain.worth(saved, prompt.tokens):
                matched, saved, load = 0, 0, NOTHING
            work_s = self.prefills_s(request, (slot,), (saved,), now_s)[0] + load.seconds
        (wait_s,) = self.waits_s(request, (server,), now_s)
        prefill = self._queues.add(slot, work_s, now_s, 0.0, not request.streams)
        due = self._prices.routed(request, server, matched, wait_s + work_s, now_s)
        sent = _Estimated(prefill, due, matched, matched, now_s, wait_s, work_s, load)
        if not request.streams:
            self._prices.decoding.prefilled(slot, work_s, now_s)
            sent.decoding = self._prices.decoding.began(slot, now_s)
        self._intervals.sent(slot, now_s, is_seen=request.streams)
        self.record_sent(request, server, held_blocks, sent)
        self._price.sent(work_s, now_s)
        self._guard.sent(slot, now_s)
        self._prices.update(server, self._queues.usual_s, now_s)

    def _take_ranked_figures(self, request: Request, server: Server) -> tuple[int, int, float] | None:
        """Return held blocks, saved tokens and compute seconds; None if anything changed since the ranking."""
        last, table, speeds = self._last, self._table, self.speeds
        if last is None or table is None or type(speeds) is not LearnedSpeeds:
            return None
        self._last = None  # it would keep the prompt alive
        ranked, servers, figures, unworthy, changes = last
        if ranked is not request or changes != self._changes(table, speeds) or server not in servers:
            return None
        _, work_s, _, matched, held_blocks = _figures_at(figures, _ROW_BYTES * servers.index(server))
        if unworthy or not matched:
            return held_blocks, 0, work_s
        # The ranking checks if the best match of all servers is worth following, booking if this server's match is.
        return (held_blocks, matched, work_s) if self._gain.worth(matched, request.prompt.tokens) else None

    def _changes(self, table: native.PrefixTable, speeds: LearnedSpeeds) -> int:
        """Return a sum of growing counters, equal only if no input of the ranking changed."""
        return table.changes() + self._under_way.changes() + speeds.changes + self._prices.changes

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        sent = self.arrived(request, server)
        if sent is not None:
            believed_blocks, _, estimated = sent
            self._observe(request, server, now_s, cached_tokens, estimated)
            if cached_tokens is not None:
                self._judge(request.prompt, server, believed_blocks, cached_tokens)
        self.learn(request, server, sent, cached_tokens)
        self._prices.update(server, self._queues.usual_s, now_s)

    def _observe(
        self, request: Request, server: Server, now_s: float, cached_tokens: int | None, sent: _Estimated
    ) -> None:
        # Learn the server's speed from the time between sending and first byte.
        slot, load, tokens = server.slot, sent.load, request.prompt.tokens
        self._queues.remove(slot, sent.prefill, now_s)
        saved = sent.saved if cached_tokens is None else cached_tokens  # prefer the engine's own count
        if load is not NOTHING:
            if cached_tokens is not None:  # only the part that was still cached was loaded
                load = load.part(cached_tokens / sent.saved if sent.saved else 0.0)
            saved = saved_tokens(request.prompt, saved, load)
        seen = self._intervals.ended(
            slot, tokens, saved, load.seconds, now_s, self.speeds.seen(slot), is_seen=request.streams
        )
        if seen is not None:
            self.speeds.observe_first(slot, *seen)
            if self._share_measured is not None:
                self._share_measured(slot, *seen)
        self._prices.arrived(request, slot, sent.matched)
        sent.saved = saved
        if request.streams:
            self._prices.first_byte(now_s - sent.routed_s)
            self._prices.decoding.prefilled(slot, sent.work_s, now_s)
            sent.decoding = self._prices.decoding.began(slot, now_s)
        self._answers.add(request, server, sent)

    def on_request_end(self, request: Request, server: Server, now_s: float, output_tokens: int | None = None) -> None:
        """Learn from the time of an answer: per token, and of its prefill if it was not streamed."""
        sent = self._answers.take(request, server)
        if sent is None:
            return
        slot, before_s = server.slot, sent.wait_s + sent.work_s
        if not request.streams:
            self._prices.answered(slot, sent.due, now_s - sent.routed_s, now_s)
            self._prices.first_byte(before_s)
        if sent.decoding is not None:
            unseen_s = None if request.streams else before_s
            self._prices.decoding.ended(slot, sent.decoding, output_tokens, now_s, unseen_s)
        if not request.streams and output_tokens is not None:
            seconds = now_s - sent.routed_s - sent.wait_s - sent.load.seconds
            self.speeds.observe_whole(slot, request.prompt.tokens, sent.saved, output_tokens, seconds)
        self._prices.update(server, self._queues.usual_s, now_s)

    def corrected(self, request: Request, server: Server, now_s: float, cached_tokens: int) -> None:
        blocks = request.prompt.blocks
        believed_blocks, last = self._answering.get((id(request), server.slot), (0, 0))
        super().corrected(request, server, now_s, cached_tokens)
        if len(blocks) and blocks.item(-1) == last:
            self._judge(request.prompt, server, believed_blocks, cached_tokens)
        self._prices.update(server, self._queues.usual_s, now_s)

    def _judge(self, prompt: Prompt, server: Server, believed_blocks: int, cached_tokens: int) -> None:
        # Compare what a server had of a prompt with what was believed.
        is_denied = self._prices.trust.reported(server.slot, believed_blocks * prompt.block_tokens, cached_tokens)
        if is_denied and isinstance(self.index, ApproximatePrefixIndex):  # events report an emptied cache
            self.index.forget(server.slot)

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        sent = self.arrived(request, server)
        if sent is not None:
            _, _, estimated = sent
            self._queues.remove(server.slot, estimated.prefill, now_s)
            self._intervals.failed(server.slot, is_seen=request.streams)
            self._prices.due.drop(server.slot, estimated.due.ticket)
            self._prices.arrived(request, server.slot, estimated.matched)
            if estimated.decoding is not None:
                self._prices.decoding.ended(server.slot, estimated.decoding, None, now_s)
            self._prices.update(server, self._queues.usual_s, now_s)

    # Requests of other replicas join the queue, the busy intervals and the answers under way as this router's own do;
    # the delay price and the guard count them on hearing. Only this router's own answers teach the time per token.

    def sent_elsewhere(self, request: ElsewhereRequest, server: Server, now_s: float) -> object:
        slot, sent_s = server.slot, request.sent_s
        under_way = super().sent_elsewhere(request, server, now_s)
        sent = _Elsewhere(request, under_way)
        if request.computes:
            sent.prefill = self._queues.add(slot, request.work_s, sent_s, unseen=not request.streams)
            self._intervals.sent(slot, sent_s, is_seen=request.streams)
        else:
            sent.decoding = self._prices.decoding.began(slot, now_s)
        self._price.sent(request.work_s, now_s)
        self._guard.sent(slot, now_s)
        self._prices.update(server, self._queues.usual_s, now_s)
        return sent

    def prefilled_elsewhere(self, ticket: object, server: Server, at_s: float, *, is_seen: bool) -> None:
        if not isinstance(ticket, _Elsewhere):
            return
        sent, slot, request = ticket, server.slot, ticket.request
        super().prefilled_elsewhere(sent.under_way, server, at_s, is_seen=is_seen)
        if not sent.prefill:
            return
        self._queues.remove(slot, sent.prefill, at_s)
        if is_seen:
            tokens, saved, streams = request.prompt_tokens, request.matched_tokens, request.streams
            seen = self._intervals.ended(slot, tokens, saved, 0.0, at_s, self.speeds.seen(slot), is_seen=streams)
            if seen is not None:
                self.speeds.observe_first(slot, *seen)
        else:
            self._intervals.failed(slot, is_seen=request.streams)
        self._prices.decoding.prefilled(slot, request.work_s, at_s)
        sent.decoding = self._prices.decoding.began(slot, at_s)

    def ended_elsewhere(self, ticket: object, server: Server, at_s: float) -> None:
        if isinstance(ticket, _Elsewhere):
            if ticket.decoding is not None:
                self._prices.decoding.ended(server.slot, ticket.decoding, None, at_s)
            self._prices.update(server, self._queues.usual_s, at_s)

    def measured_elsewhere(self, server: Server, tokens: float, cached: float, seconds: float) -> None:
        # A router that has seen prefills there has seen those of other replicas, too.
        if seconds > 0 and self.speeds.seen(server.slot) < SEEN_ENOUGH:
            self.speeds.observe(server.slot, tokens, cached, seconds)

    def share_measured(self, measured: Measured) -> None:
        self._share_measured = measured

    def forget(self, server: Server) -> None:
        slot = server.slot
        super().forget(server)
        for part in (self._queues, self._guard, self.speeds, self._ranker, self._prices, self._intervals):
            part.forget(slot)
        self._answers.forget(server)
        self._read.pop(slot, None)
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
