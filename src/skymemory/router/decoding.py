"""The choice of decode servers, and of those that serve a request alone, where prefill and decode are apart.

A request takes two steps where that is worth it. One of which a decode server lacks few tokens goes there alone
(``DecodeServers.lacking_few``): computing those delays its other requests by little more than taking values over does,
and the first token need not wait for the hand-over. The rule is llm-d's (its scheduler's ``nonCachedTokens``); its
figure is the setting ``split_from``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from skymemory.conductor.picker import Fleet, Picker, Ranking, Scorer, Server
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.request import Request
from skymemory.conductor.scheduler import DecodeForecast, Scheduler
from skymemory.conductor.scheduling.decode import LeastTbt
from skymemory.conductor.strategies.base import Indexed
from skymemory.conductor.strategies.simple import LeastLoad
from skymemory.router.admission import without_probes
from skymemory.router.settings import Settings, read_cost


class DecodeServers(Indexed):
    """Ranks decode servers as ``ranking`` does, and knows what each has of a prompt.

    A server that answered a prompt has its values: it computed them, or took them over. It is counted on for as many
    tokens as it reports that its memory holds; that it finds older ones in the store is not. Where the usage of an
    answer that it gave alone says otherwise, the index is corrected.
    """

    def __init__(self, fleet: Fleet, ranking: Scorer) -> None:
        # A prompt counts from its first token on: until then its values may still be at the prefill server.
        super().__init__(ApproximatePrefixIndex(secret=int.from_bytes(os.urandom(8), "little") | 1), under_way_blocks=0)
        self._fleet = fleet
        self.ranking = ranking
        self.name = ranking.name

    def lacking_few(self, request: Request, among: Collection[str] | None, below_tokens: int) -> list[str]:
        """Names of the servers, of those ``among`` (None: all) that take requests, that would have to compute fewer
        than ``below_tokens`` of the prompt.
        """
        servers = [each for each in self._fleet.available if among is None or each.name in among]
        if not servers or below_tokens <= 0:
            return []
        held = self.matched_tokens(request.prompt, self.held_blocks(request.prompt, servers))
        lacks = [request.prompt.tokens - tokens for tokens in held]
        return [each.name for each, tokens in zip(servers, lacks, strict=True) if tokens < below_tokens]

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        return self.ranking.rank(request, servers, now_s)

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        super().routed(request, server, now_s)
        self.ranking.routed(request, server, now_s)

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        super().succeeded(request, server, now_s, cached_tokens)
        self.ranking.succeeded(request, server, now_s, cached_tokens)

    def ended(self, request: Request, server: Server, now_s: float, output_tokens: int | None = None) -> None:
        self.ranking.ended(request, server, now_s, output_tokens)

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        super().failed(request, server, now_s)
        self.ranking.failed(request, server, now_s)

    def forget(self, server: Server) -> None:
        super().forget(server)
        self.ranking.forget(server)


def decode_picker(settings: Settings) -> Picker:
    """The picker of the servers that decode: by the shortest time between tokens where a cost model is given, else by
    requests. Its ties must not follow those of the prefill servers.

    Raises:
        InvalidInput: the cost model cannot be read.
    """
    fleet = Fleet()
    ranking = LeastLoad() if settings.cost is None else LeastTbt(read_cost(settings.cost), fleet)
    return Picker(fleet, DecodeServers(fleet, ranking), settings.seed + 1)


def forecast_of(decode: Picker | None) -> DecodeForecast | None:
    """The forecast of the decode servers' load; None where no cost model estimates it."""
    ranking = decode.scorer.ranking if decode is not None and isinstance(decode.scorer, DecodeServers) else None
    return ranking if isinstance(ranking, LeastTbt) else None


def lacking_few(
    scheduler: Scheduler, request: Request, among: Collection[str] | None, split_from: int
) -> Collection[str]:
    """Decode servers that may serve the request alone, as they lack fewer than ``split_from`` tokens of its prompt."""
    scorer = None if scheduler.decode is None else scheduler.decode.scorer
    return scorer.lacking_few(request, among, split_from) if isinstance(scorer, DecodeServers) else ()


def alone_schedulers(scheduler: Scheduler, seed: int) -> tuple[Scheduler, Scheduler | None]:
    """Schedulers of requests that one server serves: of those without a prompt, by the least load, which are always
    admitted; and of prompts, by the decode servers' own books. The second is None where prefill and decode are not
    apart.
    """
    decode = scheduler.decode
    least_load = Scheduler(Picker((decode or scheduler.prefill).fleet, LeastLoad(), seed))
    if decode is None:
        return least_load, None
    return least_load, Scheduler(decode, None, without_probes(scheduler.admission), scheduler.forecast)
