"""Choice of decode servers, including servers that serve a request alone.

A decode server that lacks few tokens of a prompt serves it alone: computing them delays others little more than loading
transferred values, and the first token comes sooner. The rule is llm-d's (``nonCachedTokens``).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from skymemory.conductor.picker import Fleet, Picker, Ranking, Scorer, Server
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.request import Request
from skymemory.conductor.scheduler import DecodeForecast, Scheduler
from skymemory.conductor.scheduling.decode import LeastTbt
from skymemory.conductor.strategies.simple import LeastLoad
from skymemory.conductor.strategies.strategy_base import Indexed
from skymemory.router.admission import without_probes
from skymemory.router.settings import Settings, read_cost


class DecodeServers(Indexed):
    """Scorer of decode servers, with a prefix index of their caches to find those that need no prefill server.

    A server that answered a prompt holds its values, as far as its memory does. Usage of answers given alone corrects
    the index.
    """

    def __init__(self, fleet: Fleet, ranking: Scorer) -> None:
        # A prompt counts only from its first token on: before that its values may still be at the prefill server.
        super().__init__(ApproximatePrefixIndex(secret=int.from_bytes(os.urandom(8), "little") | 1), under_way_blocks=0)
        self._fleet = fleet
        self.ranking = ranking
        self.name = ranking.name

    def lacking_few(self, request: Request, among: Collection[str] | None, below_tokens: int) -> list[str]:
        """Return available servers of ``among`` (None: all) that lack fewer tokens than ``below_tokens``."""
        servers = [server for server in self._fleet.available if among is None or server.name in among]
        if not servers or below_tokens <= 0:
            return []
        held_tokens = self.matched_tokens(request.prompt, self.held_blocks(request.prompt, servers))
        missing_tokens = [request.prompt.tokens - tokens for tokens in held_tokens]
        return [server.name for server, tokens in zip(servers, missing_tokens, strict=True) if tokens < below_tokens]

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        return self.ranking.rank(request, servers, now_s)

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        super().routed(request, server, now_s)
        self.ranking.routed(request, server, now_s)

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        super().succeeded(request, server, now_s, cached_tokens)
        self.ranking.succeeded(request, server, now_s, cached_tokens)

    def on_request_end(self, request: Request, server: Server, now_s: float, output_tokens: int | None = None) -> None:
        self.ranking.on_request_end(request, server, now_s, output_tokens)

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        super().failed(request, server, now_s)
        self.ranking.failed(request, server, now_s)

    def forget(self, server: Server) -> None:
        super().forget(server)
        self.ranking.forget(server)


def decode_picker(settings: Settings) -> Picker:
    """Return the picker of the decode servers: by the time between tokens with a cost model, else by requests."""
    fleet = Fleet()
    ranking = LeastLoad() if settings.cost is None else LeastTbt(read_cost(settings.cost), fleet)
    return Picker(fleet, DecodeServers(fleet, ranking), settings.seed + 1)


def forecast_of(decode: Picker | None) -> DecodeForecast | None:
    """Return the forecast of the decode servers' load; None without a cost model."""
    ranking = decode.scorer.ranking if decode is not None and isinstance(decode.scorer, DecodeServers) else None
    return ranking if isinstance(ranking, LeastTbt) else None


def lacking_few(
    scheduler: Scheduler, request: Request, among: Collection[str] | None, split_from: int
) -> Collection[str]:
    """Return decode servers that lack fewer than ``split_from`` tokens: they need no prefill server."""
    scorer = None if scheduler.decode is None else scheduler.decode.scorer
    return scorer.lacking_few(request, among, split_from) if isinstance(scorer, DecodeServers) else ()


def alone_schedulers(scheduler: Scheduler, seed: int) -> tuple[Scheduler, Scheduler | None]:
    """Return schedulers for a single server: without a prompt, by the least load, always admitted; with a prompt, on
    decode servers (None without roles).
    """
    decode = scheduler.decode
    by_load = Picker((decode or scheduler.prefill).fleet, LeastLoad(), seed)
    by_load.watch = scheduler.prefill.watch
    least_load = Scheduler(by_load)
    if decode is None:
        return least_load, None
    return least_load, Scheduler(decode, None, without_probes(scheduler.admission), scheduler.forecast)
