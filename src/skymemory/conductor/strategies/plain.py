"""Strategies that know nothing of prompts: at random, in turn, least load."""

from __future__ import annotations

from collections.abc import Sequence

from skymemory.conductor.fleet import Server
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.base import Forgetful, Ranking
from skymemory.conductor.strategies.loads import loads_of


class AtRandom(Forgetful):
    """All servers tie, and the picker's seeded tie-break chooses."""

    name = "random"

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        return Ranking([0.0] * len(servers))


class InTurn(Forgetful):
    """Round robin: the server whose last turn is longest ago."""

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


class LeastLoad(Forgetful):
    """The server with the fewest requests: those we sent and that have not ended, or those it reports, if more."""

    name = "least-load"

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        loads = loads_of(servers, now_s)
        return Ranking([-load for load in loads], weights=(("requests there", loads),))
