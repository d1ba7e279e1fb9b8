"""The servers of a router, and the picker, which chooses a server per request in this order:

1. Servers that take requests: healthy, not draining, in the requested subset.
2. Of these, servers that have the request's LoRA adapter loaded, or have room for it.
3. The servers with the strategy's highest score.
4. Among equal scores, a draw from a seeded sequence.

A server keeps its *slot*, a small number, while it is in the fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from skymemory.conductor.request import Decision, Explanation, Names, PromptPlan, Request
from skymemory.errors import InvalidInput, SkyMemoryError

ADAPTER_STALE_S = 30.0
ADAPTER_QUEUE = 16
"""Lead in queued requests from which a server loads the adapter too."""
_MASK = (1 << 64) - 1
_KEPT = 0.95  # decay per prompt, in the ratio of our tokens to the engine's


@dataclass(frozen=True, slots=True)
class PrefillTotals:
    """Counters of an engine's prefills since its start."""

    requests: float
    tokens: float
    """Prompt tokens, by the engine's tokenizer."""
    computed: float
    """Prompt tokens not found in its cache."""
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeTotals:
    """Counters of the time between an engine's tokens since its start."""

    tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ReportedLoad:
    """Metrics that an engine published at ``at_s``; None: not published."""

    at_s: float
    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    """Used share, 0 to 1."""
    cache_blocks: int | None = None
    """Capacity of its KV cache."""
    block_tokens: int | None = None
    adapters: frozenset[str] = frozenset()
    """LoRA adapters in its memory."""
    max_adapters: int | None = None
    prefills: PrefillTotals | None = None
    decodes: DecodeTotals | None = None
    tokens: float = 0.0
    """Tokens read and generated since its start."""


class Server:
    __slots__ = (
        "_draining",
        "_engine_tokens",
        "_fleet",
        "_healthy",
        "_read_tokens",
        "elsewhere",
        "elsewhere_prefilling",
        "elsewhere_tokens",
        "in_flight",
        "name",
        "prefill_tokens",
        "prefilling",
        "reported",
        "slot",
    )

    def __init__(self, name: str, slot: int, fleet: Fleet | None = None) -> None:
        self.name = name
        # Index into the tables of strategies.
        self.slot = slot
        self.reported: ReportedLoad | None = None
        # Requests sent by this router: not ended, and those without a first byte.
        self.in_flight = 0
        self.prefilling = 0
        self.prefill_tokens = 0.0
        """Prefill backlog: prompt tokens less matched tokens."""
        # The same counts of requests that other replicas of this router sent, as far as they are known.
        self.elsewhere = self.elsewhere_prefilling = self.elsewhere_tokens = 0
        self._healthy, self._draining = True, False
        self._fleet = fleet
        # Prompt tokens as counted by this router and by the engine, with exponential decay.
        self._read_tokens = self._engine_tokens = 0.0

    def __repr__(self) -> str:
        state = "" if self._healthy else ", not healthy"
        return (
            f"Server({self.name!r}, slot {self.slot}, {self.in_flight} in flight{state}{', draining' * self._draining})"
        )

    @property
    def healthy(self) -> bool:
        return self._healthy

    @healthy.setter
    def healthy(self, healthy: bool) -> None:
        self._healthy = healthy
        self._changed()

    @property
    def draining(self) -> bool:
        return self._draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._draining = draining
        self._changed()

    @property
    def takes_requests(self) -> bool:
        return self._healthy and not self._draining

    def _changed(self) -> None:
        if self._fleet is not None:
            self._fleet.changed()

    def reported_tokens(self, read: int, reported: int) -> None:
        """Record a prompt's tokens as we count them (``read``) and as the engine does (``reported``)."""
        if read and reported:
            self._read_tokens = self._read_tokens * _KEPT + read
            self._engine_tokens = self._engine_tokens * _KEPT + reported

    @property
    def read_per_token(self) -> float:
        """Our tokens per token of the engine; 1 before its first report."""
        return self._read_tokens / self._engine_tokens if self._engine_tokens else 1.0

    def fresh_report(self, now_s: float, stale_s: float) -> ReportedLoad | None:
        report = self.reported
        return report if report is not None and now_s - report.at_s <= stale_s else None


class Fleet:
    """Servers by name. A server's slot indexes the tables of strategies."""

    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}
        self._free_slots: list[int] = []
        self._slots = 0
        self._available: tuple[Server, ...] | None = None

    @property
    def available(self) -> tuple[Server, ...]:
        available = self._available
        if available is None:
            available = self._available = tuple(server for server in self.servers.values() if server.takes_requests)
        return available

    def changed(self) -> None:
        self._available = None

    def __iter__(self) -> Iterator[Server]:
        return iter(self.servers.values())

    def __len__(self) -> int:
        return len(self.servers)

    def add(self, name: str) -> Server:
        """Add a healthy server under a new name."""
        if name in self.servers:
            raise InvalidInput(f"server {name!r} is in the fleet already; names must differ")
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot, self._slots = self._slots, self._slots + 1
        server = self.servers[name] = Server(name, slot, self)
        self.changed()
        return server

    def remove(self, name: str) -> Server | None:
        """Remove a server. Its slot is reused, so scorers must have forgotten it."""
        server = self.servers.pop(name, None)
        if server is not None:
            self._free_slots.append(server.slot)
            self.changed()
        return server


Weights = tuple[tuple[str, Sequence[float]], ...]
RankedServer = tuple[
    float, int, float | None, float | None, PromptPlan | None, float | None, tuple[tuple[str, float], ...]
]
"""Entry of a server in a ranking; a plain tuple, as every request creates it.

Score, matched tokens, time to first token and between tokens, plan, compute time, figures.
"""


class Ranking:
    """Scores and estimates, in the order of the ranked servers."""

    __slots__ = (
        "_compute_s",
        "_matched",
        "_scores",
        "_ttft_s",
        "_weights",
        "estimated_tbt_s",
        "packed",
        "plan_at",
        "reasons",
    )

    def __init__(
        self,
        scores: Sequence[float],
        matched_tokens: Sequence[int] | None = None,
        estimated_ttft_s: Sequence[float] | None = None,
        reasons: tuple[str, ...] = (),
        weights: Weights = (),
        estimated_tbt_s: Sequence[float] | None = None,
        plan_at: Callable[[int], PromptPlan] | None = None,
        estimated_compute_s: Sequence[float] | None = None,
    ) -> None:
        """Store figures by ranked server; None: not estimated.

        ``matched_tokens``: prompt tokens in its cache. ``reasons``, ``weights`` (named figures): explanation of the
        decision. ``plan_at`` returns the plan to obtain the KV.
        """
        self._scores, self._matched = scores, matched_tokens
        self.packed: Sequence[float] | bytes = scores
        self._ttft_s, self._compute_s, self._weights = estimated_ttft_s, estimated_compute_s, weights
        self.reasons = reasons
        self.estimated_tbt_s = estimated_tbt_s
        self.plan_at = plan_at

    @property
    def scores(self) -> Sequence[float]:
        """Score per server; higher is better."""
        return self._scores

    @property
    def matched_tokens(self) -> Sequence[int] | None:
        return self._matched

    @property
    def estimated_ttft_s(self) -> Sequence[float] | None:
        return self._ttft_s

    @property
    def estimated_compute_s(self) -> Sequence[float] | None:
        """Part of ``estimated_ttft_s``; plans have it instead."""
        return self._compute_s

    @property
    def weights(self) -> Weights:
        return self._weights

    def best(self) -> Sequence[int]:
        scores = self.scores
        best = max(scores)
        return [at for at, score in enumerate(scores) if score == best]

    def entry(self, at: int) -> RankedServer:
        matched, ttft_s, tbt_s = self.matched_tokens, self.estimated_ttft_s, self.estimated_tbt_s
        plan = None if self.plan_at is None else self.plan_at(at)
        compute_s = self.estimated_compute_s
        return (
            self.scores[at],
            0 if matched is None else matched[at],
            None if ttft_s is None else ttft_s[at],
            None if tbt_s is None else tbt_s[at],
            plan,
            plan.compute_s if plan is not None else None if compute_s is None else compute_s[at],
            tuple((name, figures[at]) for name, figures in self.weights),
        )


def unpack_scores(scores: Sequence[float] | bytes) -> Sequence[float]:
    return memoryview(scores).cast("d") if isinstance(scores, bytes) else scores


@dataclass(frozen=True, slots=True, eq=False)
class ElsewhereRequest:
    """Request that another replica of this router has sent to a server."""

    sent_s: float
    work_s: float
    """Estimated seconds of its prefill, alone."""
    prompt_tokens: int
    matched_tokens: int
    """Prompt tokens that the server is believed to hold."""
    output_tokens: int | None
    streams: bool
    computes: bool
    """True: its first byte is awaited."""
    blocks: NDArray[np.uint64]
    """Leading blocks of its prompt, if it computes."""


class Scorer:
    """Base of routing strategies. Only ``rank`` is required.

    Scorers do no I/O, read no clock and draw no random numbers: equal calls give equal scores.
    """

    name: str

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        """Score ``servers`` (at least one); change no visible state."""
        raise NotImplementedError

    def routed(self, request: Request, server: Server, now_s: float) -> None: ...

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        """Record the first byte of the answer: the server holds the prompt.

        ``cached_tokens``: as reported by the server.
        """

    def corrected(self, request: Request, server: Server, now_s: float, cached_tokens: int) -> None:
        """Record the cached tokens that the end of the answer reports."""

    def on_request_end(self, request: Request, server: Server, now_s: float, output_tokens: int | None = None) -> None:
        """Record the last byte, or a disconnect of the client after ``succeeded``; called before ``corrected``."""

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        """Record that the request ended before its first byte; nothing is cached."""

    def forget(self, server: Server) -> None:
        """Drop the state of a server that left or restarted: its cache is empty."""

    # Requests of other replicas of this router, heard of later. ``sent_elsewhere`` returns a ticket for the others.

    def sent_elsewhere(self, request: ElsewhereRequest, server: Server, now_s: float) -> object:
        """Record a request that another replica has sent."""

    def prefilled_elsewhere(self, ticket: object, server: Server, at_s: float, *, is_seen: bool) -> None:
        """Record its first byte; not ``is_seen``: that it failed before, or that the time is a guess."""

    def ended_elsewhere(self, ticket: object, server: Server, at_s: float) -> None:
        """Record its end, after ``prefilled_elsewhere``."""

    def measured_elsewhere(self, server: Server, tokens: float, cached: float, seconds: float) -> None:
        """Record a prefill that another replica has measured."""

    def share_measured(self, measured: Measured) -> None:
        """Call ``measured`` with each prefill that this strategy measures."""


Measured = Callable[[int, float, float, float], None]
"""Slot, tokens, cached tokens and seconds of a prefill, or the means of some."""


class NoServer(SkyMemoryError): ...


class Watch(Protocol):
    """Observer of a picker's requests."""

    def routed(self, decision: Decision, now_s: float) -> None: ...

    def first_byte(self, decision: Decision, now_s: float) -> None: ...

    def ended(self, decision: Decision, now_s: float) -> None: ...


class Picker:
    """Chooser of servers. Not thread-safe.

    After a ``pick`` call ``routed`` if the request is sent, then ``succeeded`` (first byte) or ``failed``, and after
    ``succeeded`` call ``on_request_end``. A retry is ``failed`` and a new ``routed``.
    """

    def __init__(self, fleet: Fleet, scorer: Scorer, seed: int = 0) -> None:
        self.fleet = fleet
        self.scorer = scorer
        self.watch: Watch | None = None
        self._random_state = seed & _MASK

    def pick(self, request: Request, now_s: float, among: Collection[str] | None = None) -> Decision:
        """Choose the server with the highest score among the named servers (None: all).

        Raises:
            NoServer: none of them takes requests.
        """
        # First the servers that take requests, of these those for the adapter, of these those with the best score.
        available: Sequence[Server] = self.fleet.available
        if among is not None:
            available = [server for server in available if server.name in among]
        if not available:
            raise NoServer(self._why_none(among))
        servers, adapter_reason = available, ""
        if request.adapter:
            servers, adapter_reason = _with_adapter(request.adapter, available, now_s)
        ranking = self.scorer.rank(request, servers, now_s)
        tied = ranking.best()
        at = tied[0] if len(tied) == 1 else tied[self._next_random() % len(tied)]
        score, matched_tokens, ttft_s, tbt_s, plan, compute_s, figures = ranking.entry(at)
        # Copied, because the explanation is computed later, after the counts have changed.
        in_flight = [server.in_flight for server in servers]
        state = (ranking.packed, ranking.reasons, servers, in_flight, at, available, adapter_reason, figures, len(tied))
        return Decision(
            request,
            servers[at].name,
            partial(_explanation, state),
            self.scorer.name,
            score,
            matched_tokens,
            now_s,
            ttft_s,
            tbt_s,
            plan,
            compute_s,
        )

    # Counts cover the requests that we sent. Each call is a no-op if the server left, since its counts left with it.

    def routed(self, decision: Decision, now_s: float) -> None:
        """Record that the request was sent to the decision's server."""
        server = self.fleet.servers.get(decision.server)
        if server is not None:
            request = decision.request
            server.in_flight += 1
            server.prefilling += 1
            server.prefill_tokens += request.prompt.tokens - decision.matched_tokens
            self.scorer.routed(request, server, now_s)
            if self.watch is not None:
                self.watch.routed(decision, now_s)

    def succeeded(self, decision: Decision, now_s: float, cached_tokens: int | None = None) -> None:
        server = self._prefilled(decision)
        if self.watch is not None:
            self.watch.first_byte(decision, now_s)
        if server is not None:
            self.scorer.succeeded(decision.request, server, now_s, cached_tokens)

    def failed(self, decision: Decision, now_s: float) -> None:
        server = self._prefilled(decision)
        if self.watch is not None:
            self.watch.ended(decision, now_s)
        if server is not None:
            if server.in_flight:
                server.in_flight -= 1
            self.scorer.failed(decision.request, server, now_s)

    def on_request_end(
        self, decision: Decision, now_s: float, cached_tokens: int | None = None, output_tokens: int | None = None
    ) -> None:
        """Record the last byte, or a disconnect of the client."""
        if self.watch is not None:
            self.watch.ended(decision, now_s)
        server = self.fleet.servers.get(decision.server)
        if server is not None:
            if server.in_flight:
                server.in_flight -= 1
            self.scorer.on_request_end(decision.request, server, now_s, output_tokens)
            if cached_tokens is not None:
                self.scorer.corrected(decision.request, server, now_s, cached_tokens)

    def remove(self, name: str) -> None:
        server = self.fleet.servers.get(name)
        if server is not None:
            self.scorer.forget(server)
            self.fleet.remove(name)

    def _prefilled(self, decision: Decision) -> Server | None:
        # End the request's prefill in its server's counts; return the server, None if it left.
        server = self.fleet.servers.get(decision.server)
        if server is not None:
            if server.prefilling > 1:
                server.prefilling -= 1
                # A request sent to an earlier server of this name also ends here; it must not turn the backlog of the
                # new server negative.
                backlog = server.prefill_tokens - (decision.request.prompt.tokens - decision.matched_tokens)
                server.prefill_tokens = backlog if backlog > 0.0 else 0.0
            else:
                server.prefilling, server.prefill_tokens = 0, 0.0
        return server

    def _next_random(self) -> int:
        # Return the next 64-bit number of a seeded splitmix64 sequence, to draw among ties.
        self._random_state = (self._random_state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._random_state
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
        return mixed ^ mixed >> 31

    def _why_none(self, among: Collection[str] | None) -> str:
        if not len(self.fleet):
            return "the fleet has no server: add at least one"
        candidates = [server for server in self.fleet if among is None or server.name in among]
        if not candidates:
            return f"none of the {len(self.fleet)} servers is in the requested subset"
        down = sum(not server.healthy for server in candidates)
        return (
            f"no server takes requests: of {len(candidates)}, {down} are unhealthy, {len(candidates) - down} draining"
        )


# State from which the explanation is computed on demand; a plain tuple, as every request creates it. Scores, reasons,
# ranked servers, their requests in flight, the chosen server's position, all available servers, the adapter's reason,
# the chosen server's figures, number of ties.
_PickState = tuple[
    Sequence[float] | bytes,
    tuple[str, ...],
    Sequence[Server],
    list[int],
    int,
    Sequence[Server],
    str,
    tuple[tuple[str, float], ...],
    int,
]


def _explanation(state: _PickState) -> Explanation:
    return _fallbacks(state), _reasons(state)


def _fallbacks(state: _PickState) -> Names:
    """Return the other servers by score, then requests in flight; last, servers without room for the adapter."""
    packed, _, servers, in_flight, chosen, available, *_ = state
    scores = unpack_scores(packed)
    by_score = sorted((-scores[at], in_flight[at], server.name) for at, server in enumerate(servers) if at != chosen)
    excluded = [server.name for server in available if server not in servers] if len(servers) < len(available) else []
    return (*(name for *_, name in by_score), *excluded)


def _reasons(state: _PickState) -> Names:
    _, reasons, servers, _, _, _, adapter, figures, tied = state
    texts = [adapter] if adapter else []
    texts += reasons
    texts += [f"{name} {figure:.4g}" for name, figure in figures]
    if tied > 1:
        texts.append(f"drawn among {tied} of {len(servers)} with equal scores")
    elif len(servers) == 1:
        texts.append("the only available server")
    return tuple(texts)


def _with_adapter(adapter: str, available: Sequence[Server], now_s: float) -> tuple[Sequence[Server], str]:
    """Return the servers that have the LoRA adapter loaded and, if their queues are long, those with room for it; and a
    reason.
    """
    # Decided before prefixes: adapters share no cache, and loading an adapter costs more than a prefix saves.
    reports = [(server, server.fresh_report(now_s, ADAPTER_STALE_S)) for server in available]
    having = [server for server, report in reports if report is not None and adapter in report.adapters]
    roomy = [
        server
        for server, report in reports
        if report is not None
        and report.max_adapters is not None
        and len(report.adapters) < report.max_adapters
        and adapter not in report.adapters
    ]
    if having:
        where = f"adapter {adapter!r} is loaded at {len(having)} of {len(available)}"
        waiting = min(_waiting(server, now_s) for server in having)
        spared = [server for server in roomy if waiting - _waiting(server, now_s) > ADAPTER_QUEUE]
        if not spared:
            return having, where
        return [
            *having,
            *spared,
        ], f"{where}, where at least {waiting} requests wait; {len(spared)} others have room for it"
    if roomy:
        return roomy, f"adapter {adapter!r} is loaded nowhere; {len(roomy)} of {len(available)} have room for it"
    return available, f"adapter {adapter!r} is not reported as loaded anywhere"


def _waiting(server: Server, now_s: float) -> int:
    """Return the requests in or before their prefill, as reported or ours."""
    report = server.fresh_report(now_s, ADAPTER_STALE_S)
    prefilling = server.prefilling + server.elsewhere_prefilling
    return prefilling if report is None else max(report.waiting, prefilling - report.running)
