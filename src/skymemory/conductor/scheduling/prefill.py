"""What every scheduler of prefills does: estimate the time to the first token, and keep the account of queues.

Each server computes what it was sent in that order, one prompt after the other. A group of machines that prefills in a
pipeline is one server whose cost model says what the group takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, overload, runtime_checkable

from skymemory import native
from skymemory.conductor.cost_model.model import Medium
from skymemory.conductor.fleet import Server
from skymemory.conductor.prefix_index.base import Blocks, PrefixIndex
from skymemory.conductor.request import Plan, Prompt, Request
from skymemory.conductor.strategies.base import Ranking, Tickets
from skymemory.conductor.strategies.estimates import GivenSpeeds, LearnedSpeeds, PrefillCost, Speeds
from skymemory.conductor.strategies.indexed import Indexed

# Where KV that a server lacks could be loaded from: other servers, and tiers behind them all.
#
# Nothing here knows what a tier is made of: it has a name, holds so many of a prompt's blocks, and takes so many
# seconds.


class FarTiers(Protocol):
    """Tiers that every server can load from."""

    def far(self, blocks: Blocks) -> Sequence[tuple[str, int, Medium]]:
        """For each tier that holds any of a prompt: its name, how many blocks from the first on, and the way there."""
        ...


class Source(NamedTuple):
    """One place to load a prompt's beginning from."""

    name: str
    """The server's or the tier's."""
    slot: int
    """The server's; -1 for a tier."""
    blocks: int
    """How many it holds, from the first on."""
    wait_s: float
    """Until its way out has carried what it was asked for before."""
    latency_s: float
    token_s: float
    """Per token that is loaded."""

    def load_s(self, tokens: int, way_in_s: float) -> float:
        """Until ``tokens`` have come, where the receiver's way in is free in ``way_in_s``."""
        return max(self.wait_s, way_in_s) + self.latency_s + tokens * self.token_s if tokens > 0 else 0.0


def undominated(sources: Sequence[Source]) -> list[Source]:
    """Without those that another is as good as in everything; of equal ones the first is kept."""
    kept: list[Source] = []
    for one in sorted(sources, key=lambda one: (-one.blocks, one.wait_s + one.latency_s, one.token_s)):
        if not any(
            other.wait_s <= one.wait_s and other.latency_s <= one.latency_s and other.token_s <= one.token_s
            for other in kept
        ):
            kept.append(one)
    return kept


class Ways(Protocol):
    """How long each server's way out and way in are busy with what was asked of them before."""

    def waits_out_s(self, slots: Sequence[int], now_s: float) -> Sequence[float]: ...

    def waits_in_s(self, slots: Sequence[int], now_s: float) -> Sequence[float]: ...


@dataclass(slots=True)
class Links:
    """Ways of which only the loads that we planned are known, and nothing overtakes on them."""

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
        """A load of ``seconds`` from ``source`` (-1: a tier) to ``target`` was asked for."""
        if source >= 0:
            self.out_s[source] = max(self.out_s.get(source, now_s), now_s) + seconds
        self.in_s[target] = max(self.in_s.get(target, now_s), now_s) + seconds

    def forget(self, slot: int) -> None:
        self.out_s.pop(slot, None)
        self.in_s.pop(slot, None)


def deepest(
    servers: Sequence[Server], depths: Sequence[int], waits_s: Sequence[float], least: int
) -> list[tuple[Server, int, float]]:
    """Of those whose way out is free the one that holds most, and the busy ones that hold more than it.

    With how many blocks each holds, more than ``least``, and seconds until its way out is free.
    """
    busy: list[tuple[Server, int, float]] = []
    free: Server | None = None
    for server, count, wait_s in zip(servers, depths, waits_s, strict=True):
        if count > least:
            if wait_s > 0.0:
                busy.append((server, count, wait_s))
            else:
                free, least = server, count
    more = [one for one in busy if one[1] > least]
    return more if free is None else [(free, least, 0.0), *more]


OVERDUE = 0.1
"""Part of a prefill's time so far that it is believed to need still, once it takes longer than estimated."""
UNDER_WAY_BLOCKS = 4096


class Load(NamedTuple):
    """Part of a prompt that comes from elsewhere."""

    source: Source
    split_tokens: int
    end_tokens: int
    load_s: float
    """From now until it has come."""
    compute_s: float

    @property
    def link_s(self) -> float:
        """How long it keeps the ways busy."""
        return (self.end_tokens - self.split_tokens) * self.source.token_s


@dataclass(slots=True, eq=False)
class Outlay:
    """What a request would take at each of some servers; lists are in their order."""

    request: Request
    servers: Sequence[Server]
    slots: list[int]
    known: Sequence[int]
    """Blocks that each holds."""
    blocks: Sequence[int]
    """Blocks that each holds or will hold when it comes to this request."""
    held: list[int]
    """The same in tokens."""
    waits_s: list[float]
    alone_s: list[float]
    """Computing all that is not held."""
    ttfts_s: list[float]
    now_s: float
    loads: dict[int, Load] = field(default_factory=dict)
    """By place in the lists: what those that would load something load."""

    def plan(self, at: int) -> Plan:
        held, wait_s = self.held[at], self.waits_s[at]
        load = self.loads.get(at)
        if load is None:
            return Plan(held, held, 0, "", wait_s, 0.0, self.alone_s[at])
        source, split, end = load.source.name, load.split_tokens, load.end_tokens
        return Plan(held, split, end - split, source, wait_s, load.load_s, load.compute_s)


@runtime_checkable
class PipelineCost(Protocol):
    """What the cost of several machines in a row says beside ``prefill_s``."""

    def drain_s(self, tokens: float, cached: float) -> float:
        """Of a prefill's seconds, those in which the first machine is free for the next already."""
        ...


class Plans(Sequence[Plan]):
    """The plans of an outlay, each made when it is asked for: one of them is."""

    __slots__ = ("_outlay",)

    def __init__(self, outlay: Outlay) -> None:
        self._outlay = outlay

    @overload
    def __getitem__(self, at: int) -> Plan: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Plan]: ...

    def __getitem__(self, at: int | slice) -> Plan | Sequence[Plan]:
        if isinstance(at, slice):
            return [self._outlay.plan(one) for one in range(*at.indices(len(self)))]
        return self._outlay.plan(range(len(self))[at])

    def __len__(self) -> int:
        return len(self._outlay.slots)

    def __iter__(self) -> Iterator[Plan]:
        return (self._outlay.plan(at) for at in range(len(self)))


@dataclass(frozen=True, slots=True)
class _Sent:
    """What was believed when a request was sent."""

    prefill: int
    """Its ticket in the queues."""
    plan: Plan


class PrefillScheduler(Indexed, ABC):
    """A scorer of servers that prefill. ``cost`` None: what prefills take is learnt."""

    name = ""

    def __init__(
        self,
        index: PrefixIndex,
        cost: PrefillCost | None,
        overdue: float = OVERDUE,
        under_way_blocks: int = UNDER_WAY_BLOCKS,
    ) -> None:
        super().__init__(index, under_way_blocks)
        self.speeds: Speeds = LearnedSpeeds() if cost is None else GivenSpeeds(cost)
        self._pipeline = cost if isinstance(cost, PipelineCost) else None
        self._queues = native.PrefillQueues(overdue)
        self._sent: Tickets[_Sent] = Tickets()
        self._last: Outlay | None = None
        """Of the last request that was asked about: what is decided by it is what is booked."""

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        outlay = self._last = self._outlay(request, servers, now_s)
        return Ranking(
            self.scores(outlay),
            outlay.held,
            outlay.ttfts_s,
            (),
            (("seconds of waiting", outlay.waits_s), ("tokens held", outlay.held)),
            plans=Plans(outlay),
        )

    @abstractmethod
    def scores(self, outlay: Outlay) -> list[float]:
        """Higher is better."""

    def fetch(self, outlay: Outlay) -> None:
        """Put into ``outlay`` what servers would load, and when they would be done with that."""

    def load_s(self, server: Server, now_s: float) -> float:
        """Seconds until the server has computed all that it was sent: what a report of load is made of."""
        return self._queues.waits_s((server,), now_s)[0]

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        slot, last = server.slot, self._last
        if last is None or last.request is not request or slot not in last.slots:
            last = self._outlay(request, (server,), now_s)
        at = last.slots.index(slot)
        plan = last.plan(at)
        super().routed(request, server, now_s)
        work_s = last.ttfts_s[at] - last.waits_s[at]
        drain_s = 0.0
        if self._pipeline is not None:
            drain_s = min(work_s, self._pipeline.drain_s(request.prompt.tokens, plan.cached_tokens))
        prefill = self._queues.add(slot, work_s - drain_s, now_s, drain_s)
        self._sent.note(request, server, _Sent(prefill, plan))
        self.booked(last, at, now_s)

    def booked(self, outlay: Outlay, at: int, now_s: float) -> None:
        """The request of ``outlay`` goes to the server at ``at``."""

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        sent = self._sent.take(request, server)
        if sent is not None:
            seconds, plan = self._queues.remove(server.slot, sent.prefill, now_s), sent.plan
            if seconds is not None and plan.load_s <= plan.queue_s:  # Otherwise it may have waited for what it loaded.
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

    def _outlay(self, request: Request, servers: Sequence[Server], now_s: float) -> Outlay:
        prompt = request.prompt
        slots = [server.slot for server in servers]
        known = self.held_blocks(prompt, servers)
        blocks = self.matched_blocks(prompt, servers, known)
        held = self.matched_tokens(prompt, blocks)
        waits_s = self._queues.waits_s(servers, now_s)
        alone_s = self.speeds.prefills_s(slots, prompt.tokens, held)
        ttfts_s = [wait + alone for wait, alone in zip(waits_s, alone_s, strict=True)]
        outlay = Outlay(request, servers, slots, known, blocks, held, waits_s, alone_s, ttfts_s, now_s)
        self.fetch(outlay)
        return outlay


def tokens_of(prompt: Prompt, blocks: int) -> int:
    """Tokens of a prompt's first ``blocks`` blocks."""
    return min(prompt.tokens, int(blocks * prompt.block_tokens))


class Anywhere(PrefillScheduler):
    """At random: all servers tie, and the picker's seeded tie-break chooses."""

    name = "random"

    def scores(self, outlay: Outlay) -> list[float]:
        return [0.0] * len(outlay.slots)


class LeastQueue(PrefillScheduler):
    """Where a request waits least, whatever is cached there."""

    name = "load-balance"

    def scores(self, outlay: Outlay) -> list[float]:
        return [-wait_s for wait_s in outlay.waits_s]


class CacheAware(PrefillScheduler):
    """The least time to the first token, where each server has only what itself holds."""

    name = "cache-aware"

    def scores(self, outlay: Outlay) -> list[float]:
        return [-ttft_s for ttft_s in outlay.ttfts_s]
