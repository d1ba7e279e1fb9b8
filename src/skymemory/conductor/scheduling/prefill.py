"""Prefill schedulers: they estimate times to first token, and track the servers' queues."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from skymemory import native
from skymemory.conductor.cost_model import Medium
from skymemory.conductor.picker import Ranking, Server
from skymemory.conductor.prefix_index.approximate import Blocks, PrefixIndex
from skymemory.conductor.request import Prompt, PromptPlan, Request
from skymemory.conductor.strategies.estimates import GivenSpeeds, LearnedSpeeds, PrefillCost, ServerSpeeds
from skymemory.conductor.strategies.strategy_base import Indexed, RequestNotes


class FarTiers(Protocol):
    def far(self, blocks: Blocks) -> Sequence[tuple[str, int, Medium]]:
        """Return name, leading blocks and medium of each tier that holds part of a prompt."""
        ...


class PrefixSource(NamedTuple):
    """Server, or tier (``slot`` -1), from which a prefix of ``blocks`` blocks can be loaded."""

    name: str
    slot: int
    blocks: int
    wait_s: float
    """Time until its outgoing link is free."""
    latency_s: float
    token_s: float
    """Transfer time of a token's KV."""

    def load_s(self, tokens: int, in_wait_s: float) -> float:
        """Return the seconds of a load; the incoming link is free in ``in_wait_s``."""
        return max(self.wait_s, in_wait_s) + self.latency_s + tokens * self.token_s if tokens > 0 else 0.0


def undominated(sources: Sequence[PrefixSource]) -> list[PrefixSource]:
    """Return the sources than which no other is at least as good in everything; of equal sources the first."""
    # Sorted by blocks: all kept sources hold at least as much as the next, so the other three figures decide.
    best: list[PrefixSource] = []
    for source in sorted(
        sources, key=lambda source: (-source.blocks, source.wait_s + source.latency_s, source.token_s)
    ):
        if not any(
            other.wait_s <= source.wait_s and other.latency_s <= source.latency_s and other.token_s <= source.token_s
            for other in best
        ):
            best.append(source)
    return best


class LinkWaits(Protocol):
    def waits_out_s(self, slots: Sequence[int], now_s: float) -> Sequence[float]: ...

    def waits_in_s(self, slots: Sequence[int], now_s: float) -> Sequence[float]: ...


@dataclass(slots=True)
class PlannedLinks:
    """Waits for servers' links, caused by the loads planned here: times at which each outgoing and incoming link is
    free.
    """

    out_s: dict[int, float] = field(default_factory=dict)
    in_s: dict[int, float] = field(default_factory=dict)

    def waits_out_s(self, slots: Sequence[int], now_s: float) -> list[float]:
        until_s = self.out_s
        if not until_s:
            return [0.0] * len(slots)
        return [max(0.0, until_s.get(slot, now_s) - now_s) for slot in slots]

    def waits_in_s(self, slots: Sequence[int], now_s: float) -> list[float]:
        until_s = self.in_s
        if not until_s:
            return [0.0] * len(slots)
        return [max(0.0, until_s.get(slot, now_s) - now_s) for slot in slots]

    def take(self, source: int, target: int, seconds: float, now_s: float) -> None:
        """Book a load from ``source`` (-1: a tier) to ``target``."""
        if source >= 0:
            self.out_s[source] = max(self.out_s.get(source, now_s), now_s) + seconds
        self.in_s[target] = max(self.in_s.get(target, now_s), now_s) + seconds

    def forget(self, slot: int) -> None:
        self.out_s.pop(slot, None)
        self.in_s.pop(slot, None)


def deepest(
    servers: Sequence[Server], depths: Sequence[int], waits_s: Sequence[float], least: int
) -> list[tuple[Server, int, float]]:
    """Return the servers worth loading from, with blocks held (above ``least``) and wait: the longest prefix with a
    free outgoing link, and longer ones with a busy link.
    """
    busy: list[tuple[Server, int, float]] = []
    free: Server | None = None
    for server, count, wait_s in zip(servers, depths, waits_s, strict=True):
        if count > least:
            if wait_s > 0.0:
                busy.append((server, count, wait_s))
            else:
                free, least = server, count
    more = [candidate for candidate in busy if candidate[1] > least]
    return more if free is None else [(free, least, 0.0), *more]


OVERDUE = 0.1
"""Remaining time of an overdue prefill, as a share of its time so far."""
UNDER_WAY_BLOCKS = 4096


class ServerLoad(NamedTuple):
    """Load of a server: from ``source``, the tokens between ``split_tokens`` and ``end_tokens``; the others are
    computed.
    """

    source: PrefixSource
    split_tokens: int
    end_tokens: int
    load_s: float
    compute_s: float

    @property
    def link_s(self) -> float:
        """Seconds on the links."""
        return (self.end_tokens - self.split_tokens) * self.source.token_s


@dataclass(slots=True, eq=False)
class Estimates:
    """Estimates for a request, by position in ``servers``."""

    request: Request
    servers: Sequence[Server]
    slots: list[int]
    known: Sequence[int]
    """Leading blocks held now."""
    blocks: Sequence[int]
    """Leading blocks held once the queue is done."""
    held: list[int]
    """The same in tokens."""
    waits_s: list[float]
    alone_s: list[float]
    """Seconds of the prefill without queue."""
    ttfts_s: list[float]
    now_s: float
    loads: dict[int, ServerLoad] = field(default_factory=dict)
    """Planned loads, by position."""

    def plan(self, at: int) -> PromptPlan:
        held_tokens, wait_s = self.held[at], self.waits_s[at]
        load = self.loads.get(at)
        if load is None:
            return PromptPlan(held_tokens, held_tokens, 0, "", wait_s, 0.0, self.alone_s[at])
        source, split, end = load.source.name, load.split_tokens, load.end_tokens
        return PromptPlan(held_tokens, split, end - split, source, wait_s, load.load_s, load.compute_s)


@runtime_checkable
class PipelineCost(Protocol):
    def drain_s(self, tokens: float, cached: float) -> float:
        """Return the seconds by which a pipeline's first machine is free before its last."""
        ...


@dataclass(frozen=True, slots=True)
class _Sent:
    prefill: int
    plan: PromptPlan


class PrefillScheduler(Indexed, ABC):
    """Base of the scorers of prefill servers; without ``cost`` it is learnt."""

    name = ""

    def __init__(
        self,
        index: PrefixIndex,
        cost: PrefillCost | None,
        overdue: float = OVERDUE,
        under_way_blocks: int = UNDER_WAY_BLOCKS,
    ) -> None:
        super().__init__(index, under_way_blocks)
        self.speeds: ServerSpeeds = LearnedSpeeds() if cost is None else GivenSpeeds(cost)
        self._pipeline = cost if isinstance(cost, PipelineCost) else None
        self._queues = native.PrefillQueues(overdue)
        self._sent: RequestNotes[_Sent] = RequestNotes()
        self._last: Estimates | None = None

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        estimates = self._last = self._estimate(request, servers, now_s)
        return Ranking(
            self.scores(estimates),
            estimates.held,
            estimates.ttfts_s,
            (),
            (("seconds of waiting", estimates.waits_s), ("tokens held", estimates.held)),
            plan_at=estimates.plan,
        )

    @abstractmethod
    def scores(self, estimates: Estimates) -> list[float]: ...

    def fetch(self, estimates: Estimates) -> None:
        """Add loads, and their times to first token."""

    def load_s(self, server: Server, now_s: float) -> float:
        return self._queues.waits_s((server,), now_s)[0]

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        """Book the prefill, and its load, as they were estimated for the decision."""
        # Book the estimates of the decision, not new estimates: caches and links may have changed since.
        slot, last = server.slot, self._last
        if last is None or last.request is not request or slot not in last.slots:
            last = self._estimate(request, (server,), now_s)
        at = last.slots.index(slot)
        plan = last.plan(at)
        super().routed(request, server, now_s)
        work_s = last.ttfts_s[at] - last.waits_s[at]
        drain_s = 0.0
        # A pipeline's first machine is free before its last, so the next prefill begins ``drain_s`` earlier.
        if self._pipeline is not None:
            drain_s = min(work_s, self._pipeline.drain_s(request.prompt.tokens, plan.cached_tokens))
        prefill = self._queues.add(slot, work_s - drain_s, now_s, drain_s)
        self._sent.add(request, server, _Sent(prefill, plan))
        self.booked(last, at, now_s)

    def booked(self, estimates: Estimates, at: int, now_s: float) -> None:
        """Record that the request was sent to the server at ``at``."""

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        """Remove the prefill from the queue; learn from its duration."""
        sent = self._sent.take(request, server)
        if sent is not None:
            seconds, plan = self._queues.remove(server.slot, sent.prefill, now_s), sent.plan
            if seconds is not None and plan.load_s <= plan.queue_s:  # otherwise it may have waited for the load
                cached = plan.cached_tokens if cached_tokens is None else cached_tokens
                self.speeds.observe(server.slot, request.prompt.tokens, cached, seconds)
        super().succeeded(request, server, now_s, cached_tokens)

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        sent = self._sent.take(request, server)
        if sent is not None:
            self._queues.remove(server.slot, sent.prefill, now_s)
        super().failed(request, server, now_s)

    def forget(self, server: Server) -> None:
        super().forget(server)
        for part in (self._queues, self.speeds):
            part.forget(server.slot)
        self._sent.forget(server)
        self._last = None

    def _estimate(self, request: Request, servers: Sequence[Server], now_s: float) -> Estimates:
        prompt = request.prompt
        slots = [server.slot for server in servers]
        known = self.held_blocks(prompt, servers)
        blocks = self.matched_blocks(prompt, servers, known)
        held_tokens = self.matched_tokens(prompt, blocks)
        waits_s = self._queues.waits_s(servers, now_s)
        alone_s = self.speeds.prefills_s(slots, prompt.tokens, held_tokens)
        ttfts_s = [wait + alone for wait, alone in zip(waits_s, alone_s, strict=True)]
        estimates = Estimates(request, servers, slots, known, blocks, held_tokens, waits_s, alone_s, ttfts_s, now_s)
        self.fetch(estimates)
        return estimates


def tokens_of(prompt: Prompt, blocks: int) -> int:
    return min(prompt.tokens, int(blocks * prompt.block_tokens))


class RandomServer(PrefillScheduler):
    name = "random"

    def scores(self, estimates: Estimates) -> list[float]:
        return [0.0] * len(estimates.slots)


class LeastQueue(PrefillScheduler):
    name = "load-balance"

    def scores(self, estimates: Estimates) -> list[float]:
        return [-wait_s for wait_s in estimates.waits_s]


class CacheAware(PrefillScheduler):
    """Shortest time to first token, by each server's own cache."""

    name = "cache-aware"

    def scores(self, estimates: Estimates) -> list[float]:
        return [-ttft_s for ttft_s in estimates.ttfts_s]
