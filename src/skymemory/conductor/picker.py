"""The picker: chooses the server of a request, for the HTTP proxy, Envoy's endpoint picker and the simulator.

1. Servers that take requests: healthy, not draining, in the requested subset.
2. Of those, servers that have the request's LoRA adapter loaded, or room for it.
3. The strategy's highest score.
4. Among equal scores, a draw from a seeded sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from skymemory.conductor.fleet import Fleet, Server
from skymemory.conductor.request import Decision, Request
from skymemory.conductor.strategies.base import Scorer, unpack_scores
from skymemory.errors import SkyMemoryError

ADAPTER_STALE_S = 30.0
ADAPTER_QUEUE = 16
"""A server with room loads an adapter too once its queue is this many requests shorter than the shortest where the
adapter is loaded: loading one takes about as long as a few prefills.
"""
_MASK = (1 << 64) - 1


class NoServer(SkyMemoryError):
    """No server takes the request now; the message says why."""


class Picker:
    """Chooses servers and counts their requests in flight.

    A ``pick`` that is used is followed by ``routed``, then ``succeeded`` (first byte) or ``failed``, and after
    ``succeeded`` by ``ended``. A retry is ``failed`` and a new ``routed``. Not thread-safe.
    """

    def __init__(self, fleet: Fleet, scorer: Scorer, seed: int = 0) -> None:
        self.fleet = fleet
        self.scorer = scorer
        self._random_state = seed & _MASK

    def pick(self, request: Request, now_s: float, among: Collection[str] | None = None) -> Decision:
        """The best server for ``request`` among those named (None: all).

        Raises:
            NoServer: none of them takes requests.
        """
        available: Sequence[Server] = self.fleet.available
        if among is not None:
            available = [server for server in available if server.name in among]
        if not available:
            raise NoServer(self._why_none(among))
        servers, adapter_reason = (
            _with_adapter(request.adapter, available, now_s) if request.adapter else (available, "")
        )
        ranking = self.scorer.rank(request, servers, now_s)
        tied = ranking.best()
        at = tied[0] if len(tied) == 1 else tied[self._next_random() % len(tied)]
        score, matched_tokens, ttft_s, tbt_s, plan, compute_s, figures = ranking.entry(at)
        in_flight = [server.in_flight for server in servers]
        state = (ranking.packed, ranking.reasons, servers, in_flight, at, available, adapter_reason, figures, len(tied))
        return Decision(
            request,
            servers[at].name,
            partial(_fallbacks, state),
            self.scorer.name,
            score,
            matched_tokens,
            partial(_reasons, state),
            now_s,
            ttft_s,
            tbt_s,
            plan,
            compute_s,
        )

    def routed(self, decision: Decision, now_s: float) -> None:
        server = self.fleet.servers.get(decision.server)
        if server is not None:
            request = decision.request
            server.in_flight += 1
            server.prefilling += 1
            server.prefill_tokens += request.prompt.tokens - decision.matched_tokens
            self.scorer.routed(request, server, now_s)

    def succeeded(self, decision: Decision, now_s: float, cached_tokens: int | None = None) -> None:
        """The first byte came."""
        server = self._prefilled(decision)
        if server is not None:
            self.scorer.succeeded(decision.request, server, now_s, cached_tokens)

    def failed(self, decision: Decision, now_s: float) -> None:
        """The request ended without a first byte."""
        server = self._prefilled(decision)
        if server is not None:
            server.in_flight = max(0, server.in_flight - 1)
            self.scorer.failed(decision.request, server, now_s)

    def ended(
        self,
        decision: Decision,
        now_s: float,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """The last byte came, or the client disconnected after the first.

        ``cached_tokens`` and ``output_tokens``: from the answer's usage, where it has them.
        """
        server = self.fleet.servers.get(decision.server)
        if server is not None:
            server.in_flight = max(0, server.in_flight - 1)
            self.scorer.ended(decision.request, server, now_s, output_tokens)
            if cached_tokens is not None:
                self.scorer.corrected(decision.request, server, now_s, cached_tokens)

    def remove(self, name: str) -> None:
        """Removes a server from the fleet and its state from the scorer."""
        server = self.fleet.servers.get(name)
        if server is not None:
            self.scorer.forget(server)
            self.fleet.remove(name)

    def _prefilled(self, decision: Decision) -> Server | None:
        server = self.fleet.servers.get(decision.server)
        if server is not None:
            if server.prefilling > 1:
                server.prefilling -= 1
                left = server.prefill_tokens - (decision.request.prompt.tokens - decision.matched_tokens)
                server.prefill_tokens = left if left > 0.0 else 0.0
            else:
                server.prefilling, server.prefill_tokens = 0, 0.0
        return server

    def _next_random(self) -> int:
        """The next number of a seeded sequence (splitmix64)."""
        self._random_state = (self._random_state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._random_state
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
        return mixed ^ mixed >> 31

    def _why_none(self, among: Collection[str] | None) -> str:
        if not len(self.fleet):
            return "the fleet has no server: add at least one"
        asked = [server for server in self.fleet if among is None or server.name in among]
        if not asked:
            return f"none of the {len(self.fleet)} servers is in the requested subset"
        down = sum(not server.healthy for server in asked)
        return f"no server takes requests: of {len(asked)}, {down} are unhealthy, {len(asked) - down} draining"


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
"""What ``Decision.fallbacks`` and ``reasons`` are made of, which few callers read: scores, reasons that hold for all
servers, the ranked servers, their requests in flight, the index of the chosen one, all available servers, the adapter's
reason, the chosen one's figures, and how many tied. A plain tuple, since every request makes one.
"""


def _fallbacks(state: _PickState) -> tuple[str, ...]:
    """Other servers by score, then by requests in flight; those without room for the adapter last."""
    packed, _, servers, in_flight, chosen, available, *_ = state
    scores = unpack_scores(packed)
    others = sorted((-scores[at], in_flight[at], server.name) for at, server in enumerate(servers) if at != chosen)
    rest = [server.name for server in available if server not in servers] if len(servers) < len(available) else []
    return (*(name for *_, name in others), *rest)


def _reasons(state: _PickState) -> tuple[str, ...]:
    _, reasons, servers, _, _, _, adapter, figures, tied = state
    found = [adapter] if adapter else []
    found += reasons
    found += [f"{name} {figure:.4g}" for name, figure in figures]
    if tied > 1:
        found.append(f"drawn among {tied} of {len(servers)} with equal scores")
    elif len(servers) == 1:
        found.append("the only available server")
    return tuple(found)


def _with_adapter(adapter: str, available: Sequence[Server], now_s: float) -> tuple[Sequence[Server], str]:
    """Servers with the adapter loaded, plus those with room for it while the queues of the former are long. If none has
    it loaded: those with room, else all.

    The adapter is decided before prefixes: adapters share no cache, and loading one costs more than a prefix saves.
    """
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
    """Requests queued for or in their prefill: reported, or sent by us since the report, whichever are more."""
    report = server.fresh_report(now_s, ADAPTER_STALE_S)
    return server.prefilling if report is None else max(report.waiting, server.prefilling - report.running)
