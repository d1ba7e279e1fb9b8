"""Which server gets a request: the one object behind the HTTP proxy, Envoy's endpoint picker and the simulator.

Order of what weighs: who may serve it at all (health, draining, a subset asked for), the adapter it names, the
strategy's score, and of those who tie the one that a seeded number names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from skymemory.conductor.fleet import Fleet, Server
from skymemory.conductor.request import Decision, Request
from skymemory.conductor.strategies.base import Scorer, unpacked
from skymemory.errors import SkyMemoryError

ADAPTER_STALE_S = 30.0
ADAPTER_QUEUE = 16
"""Requests that may wait at every server with an adapter, more than where least do, before others get it too: to load
an adapter takes about as long as a few prefills.
"""
_MASK = (1 << 64) - 1


class NoServer(SkyMemoryError):
    """No server can take the request now; the message says why, server by server if they are few."""


class Picker:
    """Chooses, and keeps the account of what was sent.

    Every ``pick`` that is acted on is followed by ``routed``, then ``succeeded`` (first byte) or ``failed``, and after
    ``succeeded`` by ``ended``. A retry elsewhere is ``failed`` and a new ``routed``. Not for several threads at once.
    """

    def __init__(self, fleet: Fleet, scorer: Scorer, seed: int = 0) -> None:
        self.fleet = fleet
        self.scorer = scorer
        self._dice = seed & _MASK

    def pick(self, request: Request, now_s: float, among: Collection[str] | None = None) -> Decision:
        """The best server for ``request``, of those named in ``among`` (None: of all).

        Raises:
            NoServer: none of them takes requests.
        """
        able: Sequence[Server] = self.fleet.able
        if among is not None:
            able = [server for server in able if server.name in among]
        if not able:
            raise NoServer(self._why_none(among))
        servers, adapter_reason = _with_adapter(request.adapter, able, now_s) if request.adapter else (able, "")
        ranking = self.scorer.rank(request, servers, now_s)
        tied = ranking.best()
        at = tied[0] if len(tied) == 1 else tied[self._roll() % len(tied)]
        score, matched_tokens, ttft_s, tbt_s, plan, compute_s, figures = ranking.standing(at)
        in_flight = [server.in_flight for server in servers]
        state = (ranking.packed, ranking.reasons, servers, in_flight, at, able, adapter_reason, figures, len(tied))
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
        """Its first byte came."""
        server = self._prefilled(decision)
        if server is not None:
            self.scorer.succeeded(decision.request, server, now_s, cached_tokens)

    def failed(self, decision: Decision, now_s: float) -> None:
        """It ended without a first byte."""
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
        """Its last byte came, or its client went away after the first.

        ``cached_tokens``: as for ``succeeded``, where the end of the answer says so. ``output_tokens``: of the answer,
        likewise.
        """
        server = self.fleet.servers.get(decision.server)
        if server is not None:
            server.in_flight = max(0, server.in_flight - 1)
            self.scorer.ended(decision.request, server, now_s, output_tokens)
            if cached_tokens is not None:
                self.scorer.corrected(decision.request, server, now_s, cached_tokens)

    def remove(self, name: str) -> None:
        """Take a server out of the fleet, with all that was believed of it."""
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

    def _roll(self) -> int:
        """The next of a seeded sequence (splitmix64)."""
        self._dice = (self._dice + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._dice
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
        return mixed ^ mixed >> 31

    def _why_none(self, among: Collection[str] | None) -> str:
        if not len(self.fleet):
            return "no server is known; name at least one"
        asked = [server for server in self.fleet if among is None or server.name in among]
        if not asked:
            return f"none of the {len(self.fleet)} servers is in the subset that was asked for"
        down = sum(not server.healthy for server in asked)
        return f"no server takes requests: of {len(asked)}, {down} failed their checks, {len(asked) - down} drain"


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
"""What a decision can say when it is asked why, and who else, which few are; as things were when it was made: scores,
reasons that hold for all, servers, their requests in flight, the place of the chosen one, all that take requests, the
adapter's reason, the chosen one's figures, and how many tied. A plain tuple, since every request makes one.
"""


def _fallbacks(state: _PickState) -> tuple[str, ...]:
    """By score, then by who has fewer requests; those without room for the adapter come last."""
    packed, _, servers, in_flight, chosen, able, *_ = state
    scores = unpacked(packed)
    others = sorted((-scores[at], in_flight[at], server.name) for at, server in enumerate(servers) if at != chosen)
    rest = [server.name for server in able if server not in servers] if len(servers) < len(able) else []
    return (*(name for *_, name in others), *rest)


def _reasons(state: _PickState) -> tuple[str, ...]:
    _, reasons, servers, _, _, _, adapter, figures, tied = state
    said = [adapter] if adapter else []
    said += reasons
    said += [f"{name} {figure:.4g}" for name, figure in figures]
    if tied > 1:
        said.append(f"drawn among {tied} of {len(servers)} that tie")
    elif len(servers) == 1:
        said.append("the only server that can")
    return tuple(said)


def _with_adapter(adapter: str, able: Sequence[Server], now_s: float) -> tuple[Sequence[Server], str]:
    """Servers that have the adapter loaded, and with them those with room to load it once too many requests wait at
    all of the former; where it is loaded nowhere those with room; else all.

    Adapters come before prefixes: they do not share caches, and loading one costs more than a prefix saves.
    """
    reports = [(server, server.fresh_report(now_s, ADAPTER_STALE_S)) for server in able]
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
        where = f"adapter {adapter!r} is loaded at {len(having)} of {len(able)}"
        waiting = min(_waiting(server, now_s) for server in having)
        spared = [server for server in roomy if waiting - _waiting(server, now_s) > ADAPTER_QUEUE]
        if not spared:
            return having, where
        return [*having, *spared], f"{where}, where {waiting} wait or more; {len(spared)} others have room for it"
    if roomy:
        return roomy, f"adapter {adapter!r} is loaded nowhere; {len(roomy)} of {len(able)} have room for it"
    return able, f"adapter {adapter!r} is loaded nowhere that is known"


def _waiting(server: Server, now_s: float) -> int:
    """Requests that wait for their prefill, or are in it; what was sent since a report may not be in it."""
    report = server.fresh_report(now_s, ADAPTER_STALE_S)
    return server.prefilling if report is None else max(report.waiting, server.prefilling - report.running)
