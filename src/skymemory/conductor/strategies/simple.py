"""Strategies that ignore prompts: random, round robin, least load, session affinity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skymemory.conductor.picker import Ranking, Scorer, Server
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.strategy_base import (
    NameHashes,
    check_factor,
    hash_words,
    load_bound,
    loads_of,
    mix,
    ranked_by_load,
)


class RandomChoice(Scorer):
    name = "random"

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        return Ranking([0.0] * len(servers))


class RoundRobin(Scorer):
    """Round robin: the server whose last request was the longest ago."""

    name = "round-robin"

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[int, int] = {}

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        return Ranking([-float(self._last.get(server.slot, 0)) for server in servers])

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        self._turn += 1
        self._last[server.slot] = self._turn

    def forget(self, server: Server) -> None:
        self._last.pop(server.slot, None)


class LeastLoad(Scorer):
    name = "least-load"

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        return ranked_by_load(loads_of(servers, now_s))


@dataclass(frozen=True, slots=True)
class SessionSettings:
    load_factor: float = 2.0
    """Multiple of the mean load above which a session avoids its server."""

    def __post_init__(self) -> None:
        check_factor(self.load_factor)


class SessionAffinity(Scorer):
    """Session affinity by rendezvous hashing, unless overloaded; without a session, least load.

    Source: prefix-aware-routing. A server that leaves or joins moves only its own sessions.
    """

    name = "session"

    def __init__(self, settings: SessionSettings | None = None) -> None:
        self.settings = settings or SessionSettings()
        self._names = NameHashes()

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        loads = loads_of(servers, now_s)
        if not request.session:
            return ranked_by_load(loads, "load only: the request names no session")
        names = np.array([self._names.of(server.name) for server in servers], dtype=np.uint64)
        # Rendezvous hashing (Thaler and Ravishankar, 1998): each session has its own order of all servers.
        drawn = mix(names ^ np.uint64(hash_words(request.session.encode())))
        places = np.empty(len(servers), dtype=np.int64)
        places[np.argsort(drawn, kind="stable")] = np.arange(len(servers))
        most = load_bound(loads, self.settings.load_factor)
        # Overloaded servers rank after all others, the least loaded of them first.
        scores = [
            float(place) if load + 1.0 <= most else -1.0 - load
            for place, load in zip(places.tolist(), loads, strict=True)
        ]
        return Ranking(scores, reasons=(self._reason(places, loads, most),), weights=(("requests there", loads),))

    @staticmethod
    def _reason(places: np.ndarray[tuple[int], np.dtype[np.int64]], loads: Sequence[float], most: int) -> str:
        own = loads[int(places.argmax())]
        if own + 1.0 <= most:
            return "by its session"
        return f"away from its session's server: {own:.0f} requests are there, and {most} are allowed"
