"""Rivals that only the arena knows: rules of other routers' source, in our own words.

Where a prompt is held they take from ``approximate`` or ``precise``, as their originals share one index; a failed
request is undone there, in their favour.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import Any

from skymemory.conductor.picker import Ranking, Scorer, Server
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.sglang import LMetric, LMetricSettings
from skymemory.conductor.strategies.simple import SessionAffinity, SessionSettings
from skymemory.conductor.strategies.strategy_base import hash_words
from skymemory.conductor.strategies.weighted import Approximate, ApproximateSettings, Precise, PreciseSettings
from skymemory_lab.sim.routed_strategies import EngineEvents
from skymemory_lab.sim.routing import CacheEvents
from skymemory_lab.sim.trace import BLOCK_TOKENS


def placed(keys: Sequence[Any]) -> list[float]:
    """Scores that prefer the least key; every score is another if every key is."""
    places = {key: -float(place) for place, key in enumerate(sorted(set(keys)))}
    return [places[key] for key in keys]


class OfTable(Scorer):
    """Base of rivals that ask another strategy which server holds what, and let it learn."""

    def __init__(self, table: Approximate) -> None:
        self.table = table

    def held(self, request: Request, servers: Sequence[Server], now_s: float) -> tuple[Sequence[int], Sequence[float]]:
        """The tokens that each server holds, and their part of the prompt."""
        ranking = self.table.rank(request, servers, now_s)
        return ranking.matched_tokens or [0] * len(servers), dict(ranking.weights)["share of the prompt held"]

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        self.table.routed(request, server, now_s)

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        self.table.succeeded(request, server, now_s, cached_tokens)

    def corrected(self, request: Request, server: Server, now_s: float, cached_tokens: int) -> None:
        self.table.corrected(request, server, now_s, cached_tokens)

    def on_request_end(self, request: Request, server: Server, now_s: float, output_tokens: int | None = None) -> None:
        self.table.on_request_end(request, server, now_s, output_tokens)

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        self.table.failed(request, server, now_s)

    def forget(self, server: Server) -> None:
        self.table.forget(server)


class TokenLoad(OfTable):
    """The fewest tokens to compute: of prompts sent there without a first byte, and of this one; what was held when
    they were sent does not count.

    Source: llm-d's ``token-load-scorer``, fed by its ``inflight-load-producer``, alone in its profile. Setting:
    ``queue_threshold_tokens``, 4,194,304, above which servers are equal; not swept, since no queue here comes near it.
    """

    name = "token-load"

    def __init__(self, table: Approximate, queue_threshold_tokens: float = 4_194_304.0) -> None:
        super().__init__(table)
        self._threshold = queue_threshold_tokens

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        matched, shares = self.held(request, servers, now_s)
        left = self.left(servers, shares)
        tokens = [
            server.prefill_tokens + request.prompt.tokens - held for server, held in zip(servers, matched, strict=True)
        ]
        scores = [
            1.0 - min(count, self._threshold) / self._threshold if at in left else -1.0
            for at, count in enumerate(tokens)
        ]
        return Ranking(scores, matched, weights=(("tokens to compute", tokens), ("share of the prompt held", shares)))

    def left(self, servers: Sequence[Server], shares: Sequence[float]) -> set[int]:
        """The places of the servers that may take the request."""
        return set(range(len(servers)))


class Affinity(TokenLoad):
    """``TokenLoad`` among the servers that hold most of the prompt, unless the least loaded of these would answer much
    later than the least loaded of the others: then among all.

    Source: llm-d's ``prefix-cache-affinity-filter`` before ``token-load-scorer``, as in its guide *optimized baseline*.
    Settings: ``affinity_threshold``, 0.80, the part held; ``penalty_s``, 18, how much later; ``prefill_tokens_per_s``,
    15,928, by which tokens under way become seconds, measured by its authors on Qwen 32B and to be measured for
    each model: swept. ``explorationProbability`` is 0.
    """

    name = "affinity"

    def __init__(
        self,
        table: Approximate,
        affinity_threshold: float = 0.80,
        penalty_s: float = 18.0,
        prefill_tokens_per_s: float = 15_928.0,
    ) -> None:
        super().__init__(table)
        self._least, self._penalty_s, self._speed = affinity_threshold, penalty_s, prefill_tokens_per_s

    def left(self, servers: Sequence[Server], shares: Sequence[float]) -> set[int]:
        every = super().left(servers, shares)
        sticky = {at for at, share in enumerate(shares) if share >= self._least}
        if not sticky or sticky == every or self._least <= 0:
            return every
        if self._penalty_s > 0:
            theirs, others = (
                min(servers[at].prefill_tokens for at in some) / self._speed for some in (sticky, every - sticky)
            )
            if theirs - others > self._penalty_s:
                return every
        return sticky


class PreciseAffinity(Affinity):
    """``Affinity`` by engines' events, and for two seconds by what was sent.

    Source: llm-d's guide *precise prefix cache routing*. Settings and the one that is swept: as ``Affinity``; its
    measured 15,926 tokens a second are those of the same machines.
    """

    name = "precise-affinity"


class NoHitLru(Approximate):
    """``approximate``, and prompts of which no server holds anything go where the last of these is longest ago.

    A server's place among them counts from 1 (never had one, then the longest ago) down to 0 (the latest); where any
    server holds anything, all count 0.5. Source: llm-d's ``no-hit-lru-scorer`` with the weights of its *optimized
    baseline* before it became ``Affinity``. Settings: weights of queue, free KV cache and prefix, 2, 2 and 3;
    ``no_hit_weight``, 2: swept. (The order is of up to 1,024 servers there.)
    """

    name = "no-hit-lru"

    def __init__(self, index: ApproximatePrefixIndex, no_hit_weight: float = 2.0) -> None:
        super().__init__(index, ApproximateSettings())
        self._weight = no_hit_weight
        # Slots by their last prompt that no server held, the longest ago first.
        self._last: OrderedDict[int, None] = OrderedDict()
        self._ranked: tuple[Request | None, bool] = None, False

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        ranking = super().rank(request, servers, now_s)
        is_cold = not any(ranking.matched_tokens or ())
        self._ranked = request, is_cold
        shares = self._places(servers) if is_cold else [0.5] * len(servers)
        scores = [score + self._weight * share for score, share in zip(ranking.scores, shares, strict=True)]
        return Ranking(scores, ranking.matched_tokens, weights=(*ranking.weights, ("no hit, longest ago", shares)))

    def _places(self, servers: Sequence[Server]) -> list[float]:
        if len(servers) == 1:
            return [1.0]
        never = [server.slot for server in servers if server.slot not in self._last]
        places = {slot: place for place, slot in enumerate((*never, *self._last))}
        return [max(0.0, 1.0 - places[server.slot] / (len(servers) - 1)) for server in servers]

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        super().routed(request, server, now_s)
        asked, is_cold = self._ranked
        if is_cold and asked is request:
            self._last[server.slot] = None
            self._last.move_to_end(server.slot)

    def forget(self, server: Server) -> None:
        super().forget(server)
        self._last.pop(server.slot, None)


SWEPT_EVERY_S = 60.0


class StickyLeastLoaded(Scorer):
    """A session stays at its server; a new one goes to the server with the fewest sessions, of equal ones by the
    session's rendezvous hash. Without a session: the same by the prompt's hash, not remembered.

    Source: ``sticky_least_loaded`` of vLLM's router. Setting: ``expires_s``, 7,200, after which an idle session is
    gone, if its next request or a sweep each minute finds it so: swept, since no trace says that a session has ended.
    """

    name = "sticky-least-loaded"

    def __init__(self, expires_s: float = 7_200.0) -> None:
        self._expires_s = expires_s
        # Slot and last request by session.
        self._sessions: dict[str, tuple[int, float]] = {}
        self._counts: Counter[int] = Counter()
        self._last_sweep_s = 0.0

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        self._sweep(now_s)
        session = request.session
        slot, last_s = self._sessions.get(session, (-1, now_s)) if session else (-1, now_s)
        stays = now_s - last_s < self._expires_s and any(server.slot == slot for server in servers)
        counts = [self._counts[server.slot] for server in servers]
        if slot >= 0 and not stays:  # its place is free before it is given again
            counts = [count - (server.slot == slot) for count, server in zip(counts, servers, strict=True)]
        blocks = request.prompt.blocks
        word = session.encode() or (int(blocks[-1]).to_bytes(8, "little") if len(blocks) else b"")
        keys = [
            (not (stays and server.slot == slot), count, -hash_words(word, server.name.encode()))
            for server, count in zip(servers, counts, strict=True)
        ]
        return Ranking(placed(keys), weights=(("sessions there", counts),))

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        if request.session:
            self._end(request.session)
            self._sessions[request.session] = server.slot, now_s
            self._counts[server.slot] += 1

    def forget(self, server: Server) -> None:
        for session in [session for session, (slot, _) in self._sessions.items() if slot == server.slot]:
            self._end(session)

    def _end(self, session: str) -> None:
        if (known := self._sessions.pop(session, None)) is not None:
            self._counts[known[0]] -= 1

    def _sweep(self, now_s: float) -> None:
        if now_s - self._last_sweep_s < SWEPT_EVERY_S:
            return
        self._last_sweep_s = now_s
        old = [session for session, (_, last_s) in self._sessions.items() if now_s - last_s >= self._expires_s]
        for session in old:
            self._end(session)


QPS_S = 60.0


class LoadAware(OfTable):
    """The part of the prompt held, less ``beta`` times how far a server's requests are above the mean, relative to the
    mean (at least 1); of equal scores the first name.

    Where no server holds anything: by the session's hash, without a session the fewest requests sent within a minute.
    Source: ``loadaware`` of vLLM's production-stack, which asks LMCache's controller: here engines' events. Setting:
    ``beta``, 1: swept.
    """

    name = "load-aware"

    def __init__(self, table: Precise, beta: float = 1.0) -> None:
        super().__init__(table)
        self._beta = beta
        self._by_session = SessionAffinity(SessionSettings(load_factor=1e9))
        self._sent: deque[tuple[float, int]] = deque()

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        matched, _ = self.held(request, servers, now_s)
        if not any(matched):
            return self._fallback(request, servers, now_s)
        loads = [float(server.in_flight) for server in servers]
        mean = sum(loads) / len(loads)
        scores = [
            held / request.prompt.tokens - self._beta * (load - mean) / max(1.0, mean)
            for held, load in zip(matched, loads, strict=True)
        ]
        keys = [(-score, server.name) for score, server in zip(scores, servers, strict=True)]
        return Ranking(placed(keys), matched, weights=(("benefit less load", scores), ("requests there", loads)))

    def _fallback(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        if request.session:
            return self._by_session.rank(request, servers, now_s)
        while self._sent and now_s - self._sent[0][0] > QPS_S:
            self._sent.popleft()
        counts = Counter(slot for _, slot in self._sent)
        return Ranking(placed([(counts[server.slot], at) for at, server in enumerate(servers)]))

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        super().routed(request, server, now_s)
        self._sent.append((now_s, server.slot))


class FirstLMetric(LMetric):
    """``lmetric`` as published: of full ties the first server, where ours draws."""

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        ranking = super().rank(request, servers, now_s)
        scores = placed([(-score, at) for at, score in enumerate(ranking.scores)])
        return Ranking(scores, ranking.matched_tokens, weights=ranking.weights)


RIVALS = ("affinity", "precise-affinity", "token-load", "no-hit-lru", "sticky-least-loaded", "load-aware", "lmetric")
SPECULATIVE_S = 2.0
"""llm-d's ``speculativeTTL``; its guides switch speculation on."""


def rival(name: str, **options: float) -> tuple[Scorer, CacheEvents | None]:
    """Return the rival of that name, and its listener of cache changes."""
    tuned = ApproximateSettings()
    learnt = ApproximatePrefixIndex(tuned.blocks_per_server, tuned.most_blocks)
    events = PreciseIndex(BLOCK_TOKENS)
    match name:
        case "affinity":
            return Affinity(Approximate(learnt, tuned), **options), None
        case "token-load":
            return TokenLoad(Approximate(learnt, tuned), **options), None
        case "precise-affinity":
            table = Precise(events, PreciseSettings(speculative_s=SPECULATIVE_S))
            return PreciseAffinity(table, **options), EngineEvents(events)
        case "no-hit-lru":
            return NoHitLru(learnt, **options), None
        case "sticky-least-loaded":
            return StickyLeastLoaded(**options), None
        case "load-aware":
            return LoadAware(Precise(events), **options), EngineEvents(events)
        case "lmetric":
            return FirstLMetric(ApproximatePrefixIndex(LMetricSettings(**options).blocks_per_server)), None  # type: ignore[arg-type]
    raise ValueError(f"no rival {name!r}")
