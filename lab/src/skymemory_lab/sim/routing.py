"""The routing simulator: a trace through the production picker and strategies to simulated servers.

Decoding does not slow prefills down (Mooncake's separate decoders).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from skymemory import native
from skymemory.conductor.cost_model import CostModel, LLAMA_70B_8xA800
from skymemory.conductor.picker import Fleet, Picker, PrefillTotals, ReportedLoad, Scorer, Server
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex, PrefixIndex
from skymemory.conductor.prefix_index.events import BlocksRemoved, BlocksStored, EventBatch
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.request import HEAD_BYTES, Decision, Prompt, Request, seed
from skymemory.conductor.strategies.estimates import PrefillCost
from skymemory.conductor.strategies.least_ttft import LeastTtft, LeastTtftSettings
from skymemory.conductor.strategies.registry import named
from skymemory.conductor.strategies.strategy_base import mix
from skymemory.errors import InvalidInput
from skymemory.metrics import percentile
from skymemory_lab.sim.clock import Clock, Event
from skymemory_lab.sim.cluster.pool import PrefixCache
from skymemory_lab.sim.cluster.schedulers import LEAST_FACTOR
from skymemory_lab.sim.trace import BLOCK_TOKENS, TraceRequest

_SEED = seed(model="", adapter="", salt="")


@dataclass(frozen=True, slots=True)
class RoutingSetup:
    """Simulated servers, and how late the router learns their state."""

    servers: int = 8
    cache_blocks: int = 5_000
    """Capacity of each server's cache, in blocks of 512 tokens."""
    cost: CostModel = LLAMA_70B_8xA800
    decode_token_s: float = 0.04
    scrape_s: float = 0.2  # interval of the servers' load reports
    event_delay_s: float = 0.05  # delay of the caches' events
    reports_prefills: bool = True
    """True if reports have totals of prefill times, as vLLM's do."""
    whole: float = 0.0
    """Share of answers not streamed."""
    seed: int = 0
    """Seed of ties and of the choice of streamed answers."""

    def __post_init__(self) -> None:
        if self.servers < 1 or self.scrape_s <= 0 or self.event_delay_s < 0 or self.decode_token_s < 0:
            raise InvalidInput("expected servers ≥ 1, scrape_s > 0, event_delay_s ≥ 0, decode_token_s ≥ 0")
        if not 0 <= self.whole <= 1:
            raise InvalidInput(f"whole is {self.whole}; expected a share from 0 to 1")


class CacheEvents(Protocol):
    """Listener of the servers' caches."""

    def changed(self, server: Server, chain: Sequence[int], cached_blocks: int, evicted_blocks: Sequence[int]) -> None:
        """Report that ``evicted_blocks`` went and ``chain`` was stored, its first ``cached_blocks`` cached before."""
        ...


@dataclass(frozen=True, slots=True)
class RoutedOutcome:
    at_s: float
    server: int
    ttft_s: float
    tokens: int
    hit_tokens: int
    blocks: int
    hit_blocks: int


@dataclass(slots=True)
class _RoutedJob:
    at: int  # its number in the trace
    request: TraceRequest
    decision: Decision
    chain: tuple[int, ...]  # block ids of the prompt


@dataclass(slots=True)
class _SimulatedEngine:
    """Server that prefills a request at a time, by arrival."""

    server: Server  # as the router sees it
    cache: PrefixCache
    queue: deque[_RoutedJob] = field(default_factory=deque)
    serving: _RoutedJob | None = None  # in prefill
    decoding: int = 0
    tokens: int = 0  # of prompts in prefill or decoding
    prefills: PrefillTotals = field(default_factory=lambda: PrefillTotals(0, 0, 0, 0.0))


def simulate(
    requests: Sequence[TraceRequest],
    scorer: Scorer,
    setup: RoutingSetup,
    events: CacheEvents | None = None,
    prompts: Sequence[Request] | None = None,
) -> list[RoutedOutcome]:
    """Return the results of ``requests``, sorted by arrival.

    Raises:
        InvalidInput: arrivals out of order.
    """
    return _Simulation(scorer, setup, events).run(requests, prompts or [as_routed(request) for request in requests])


class _Simulation:
    def __init__(self, scorer: Scorer, setup: RoutingSetup, events: CacheEvents | None) -> None:
        self._setup, self._events = setup, events
        self._fleet = Fleet()
        self._picker = Picker(self._fleet, scorer, seed=setup.seed)
        names = [f"server-{number}" for number in range(setup.servers)]
        self._engines = {
            name: _SimulatedEngine(self._fleet.add(name), PrefixCache(setup.cache_blocks)) for name in names
        }
        self._numbers = {name: number for number, name in enumerate(names)}
        self._clock = Clock()
        self._scrapes = -1
        self._dice = Random(setup.seed)
        self._outcomes: dict[int, RoutedOutcome] = {}

    def run(self, requests: Sequence[TraceRequest], prompts: Sequence[Request]) -> list[RoutedOutcome]:
        # Arrivals need no events: the clock runs up to each arrival, then the request is placed with the report of that
        # time.
        before_s = -math.inf
        for at, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
            if request.at_s < before_s:
                raise InvalidInput(
                    f"request {at} arrives at {request.at_s:g} s, after one at {before_s:g} s; sort them"
                )
            before_s = request.at_s
            self._clock.run(request.at_s)
            self._scrape(request.at_s)
            self._arrive(at, request, prompt)
        self._clock.run()
        return [self._outcomes[at] for at in range(len(requests))]

    def _later(self, at_s: float, event: Event) -> None:
        # With the load reports that are due by then.
        def run(now_s: float) -> None:
            self._scrape(now_s)
            event(now_s)

        self._clock.at(at_s, run)

    def _scrape(self, now_s: float) -> None:
        # Give the router a load report of every server, if a multiple of ``scrape_s`` has passed.
        scrapes = math.floor(now_s / self._setup.scrape_s)
        if scrapes == self._scrapes:
            return
        self._scrapes = scrapes
        for engine in self._engines.values():
            engine.server.reported = ReportedLoad(
                at_s=scrapes * self._setup.scrape_s,
                waiting=len(engine.queue),
                running=engine.decoding + (engine.serving is not None),
                kv_usage=min(1.0, engine.tokens / (engine.cache.capacity * BLOCK_TOKENS)),
                cache_blocks=engine.cache.capacity,
                block_tokens=BLOCK_TOKENS,
                prefills=engine.prefills if self._setup.reports_prefills else None,
            )

    def _arrive(self, at: int, request: TraceRequest, prompt: Request) -> None:
        if self._setup.whole and self._dice.random() < self._setup.whole:
            prompt = replace(prompt, streams=False)
        decision = self._picker.pick(prompt, request.at_s)
        self._picker.routed(decision, request.at_s)
        engine = self._engines[decision.server]
        engine.queue.append(_RoutedJob(at, request, decision, request.blocks()))
        if engine.serving is None:
            self._serve(engine, request.at_s)

    def _serve(self, engine: _SimulatedEngine, now_s: float) -> None:
        # Begin the prefill of the next request in the queue.
        # Looked up now, not at arrival: earlier requests in the queue have changed the cache meanwhile.
        job = engine.serving = engine.queue.popleft()
        tokens, hit = job.request.input_tokens, engine.cache.leading(job.chain)
        hit_tokens = min(hit * BLOCK_TOKENS, tokens - 1)
        evicted = engine.cache.use(job.chain)
        engine.tokens += tokens
        done_s = now_s + self._setup.cost.prefill_s(tokens, hit_tokens)
        self._outcomes[job.at] = RoutedOutcome(
            job.request.at_s,
            self._numbers[job.decision.server],
            done_s - job.request.at_s,
            tokens,
            hit_tokens,
            len(job.chain),
            hit,
        )
        self._later(done_s, lambda at_s: self._first_token(engine, job, hit, evicted, at_s))

    def _first_token(
        self, engine: _SimulatedEngine, job: _RoutedJob, hit: int, evicted_blocks: list[int], now_s: float
    ) -> None:
        if job.decision.request.streams:
            self._picker.succeeded(job.decision, now_s)
        engine.serving = None
        engine.decoding += 1
        self._later(
            now_s + job.request.output_tokens * self._setup.decode_token_s, lambda at_s: self._end(engine, job, at_s)
        )
        if self._events is not None:
            self._later(
                now_s + self._setup.event_delay_s,
                lambda _: self._publish(engine.server, job.chain, hit, evicted_blocks),
            )
        if engine.queue:
            self._serve(engine, now_s)

    def _end(self, engine: _SimulatedEngine, job: _RoutedJob, now_s: float) -> None:
        if not job.decision.request.streams:
            self._picker.succeeded(job.decision, now_s)
        self._picker.on_request_end(job.decision, now_s, output_tokens=job.request.output_tokens)
        engine.decoding -= 1
        engine.tokens -= job.request.input_tokens
        before, outcome = engine.prefills, self._outcomes[job.at]
        engine.prefills = PrefillTotals(
            before.requests + 1,
            before.tokens + outcome.tokens,
            before.computed + outcome.tokens - outcome.hit_tokens,
            before.seconds + self._setup.cost.prefill_s(outcome.tokens, outcome.hit_tokens),
        )

    def _publish(self, server: Server, chain: tuple[int, ...], hit: int, evicted_blocks: list[int]) -> None:
        assert self._events is not None
        self._events.changed(server, chain[: self._setup.cache_blocks], hit, evicted_blocks)


def as_routed(request: TraceRequest) -> Request:
    """Return the request as a router reads it: the tokens of a block are its id, repeated.

    The head has eight bytes per block, so its hashes distinguish prompts after the block that all share.
    """
    tokens = tokens_of(request.blocks())
    block_bytes = BLOCK_TOKENS * tokens.itemsize
    blocks = native.chain_hashes(tokens.tobytes(), block_bytes, _SEED)
    pieces = native.piece_hashes(tokens.tobytes(), block_bytes, _SEED)
    head = np.array(request.ids[: HEAD_BYTES // 8], dtype="<u8").tobytes()
    prompt = Prompt(blocks, pieces, BLOCK_TOKENS, request.input_tokens, head)
    return Request(prompt, session=str(request.session), output_tokens=request.output_tokens)


def tokens_of(ids: Sequence[int]) -> NDArray[np.uint32]:
    return np.repeat(np.array(ids, dtype="<u4"), BLOCK_TOKENS)


WINDOW_S = 60.0
WINDOW_REQUESTS = 80


@dataclass(frozen=True, slots=True)
class RoutingMetrics:
    """Times to first token, hit rates and balance of a simulation."""

    requests: int
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    token_hits: float
    block_hits: float
    worst_share: float
    """Largest share of a server in any window of 60 s, relative to the mean."""
    spread: float  # of requests per server: standard deviation over mean

    def as_json(self) -> dict[str, float]:
        return {name: value if isinstance(value, int) else round(value, 6) for name, value in asdict(self).items()}


def measured(outcomes: Sequence[RoutedOutcome], servers: int, from_s: float = 0.0) -> RoutingMetrics:
    """Return the metrics of the requests that arrived at ``from_s`` or later.

    Raises:
        InvalidInput: no request.
    """
    late = [outcome for outcome in outcomes if outcome.at_s >= from_s]
    if not late:
        raise InvalidInput(f"no request arrived at {from_s:g} s or later")
    ttft_s = np.array([outcome.ttft_s for outcome in late])
    p50_s, p90_s, p99_s = (percentile(ttft_s.tolist(), percent) for percent in (50, 90, 99))
    counts = np.bincount([outcome.server for outcome in late], minlength=servers)
    return RoutingMetrics(
        requests=len(late),
        mean_s=float(ttft_s.mean()),
        p50_s=p50_s,
        p90_s=p90_s,
        p99_s=p99_s,
        token_hits=sum(outcome.hit_tokens for outcome in late) / sum(outcome.tokens for outcome in late),
        block_hits=sum(outcome.hit_blocks for outcome in late) / max(1, sum(outcome.blocks for outcome in late)),
        worst_share=worst_share([(outcome.at_s, outcome.server) for outcome in late], servers),
        spread=float(counts.std() / counts.mean()),
    )


def worst_share(
    arrivals: Sequence[tuple[float, int]], servers: int, window_s: float = WINDOW_S, least: int = WINDOW_REQUESTS
) -> float:
    """Return the largest ratio of a server's requests to the mean, in windows with at least ``least`` requests.

    ``arrivals`` are (s, server) in order of time.
    """
    arriving = [(at_s, 1, server) for at_s, server in arrivals]
    leaving = [(at_s + window_s, 0, server) for at_s, server in arrivals]
    counts = [0] * servers
    inside, worst, before_s = 0, 0.0, None
    for at_s, is_new, server in heapq.merge(leaving, arriving):
        if at_s != before_s and inside >= least:
            worst = max(worst, max(counts) * servers / inside)
        step = 1 if is_new else -1
        counts[server] += step
        inside += step
        before_s = at_s
    return worst


_ODD = 0x9E3779B97F4A7C15


class ErringLeastTtft(LeastTtft):
    """``least-ttft`` with seeded errors in its estimates, which would otherwise be the truth.

    The factor per request and server is normal with mean 1 and standard deviation ``error``, at least 0.1.
    """

    def __init__(
        self,
        index: PrefixIndex,
        settings: LeastTtftSettings | None = None,
        cost: PrefillCost | None = None,
        *,
        error: float,
        seed: int,
    ) -> None:
        if not 0 <= error <= 1:
            raise InvalidInput(f"error is {error}; expected 0 to 1")
        super().__init__(index, settings, cost)
        self._error, self._seed = error, seed * _ODD & (1 << 64) - 1

    def prefills_s(self, request: Request, slots: Sequence[int], cached: Sequence[int], now_s: float) -> list[float]:
        return self._off(super().prefills_s(request, slots, cached, now_s), request, slots, now_s)

    def waits_s(self, request: Request, servers: Sequence[Server], now_s: float) -> list[float]:
        slots = [server.slot for server in servers]
        return self._off(super().waits_s(request, servers, now_s), request, slots, now_s)

    def _off(self, seconds: list[float], request: Request, slots: Sequence[int], now_s: float) -> list[float]:
        # Multiply the estimates by each server's error factor.
        factors = self.factors(request, max(slots) + 1, now_s)
        return [estimate_s * factors[slot] for estimate_s, slot in zip(seconds, slots, strict=True)]

    def factors(self, request: Request, slots: int, now_s: float) -> list[float]:
        # Keyed by the request and the time, so a retry errs differently, but rank and booking err alike.
        blocks = request.prompt.blocks
        last = blocks.item(-1) if len(blocks) else request.prompt.tokens
        at = np.array([now_s], dtype=np.float64).view(np.uint64)
        key = mix(mix(np.array([last ^ self._seed], dtype=np.uint64)) ^ at)
        drawn = mix(key + np.arange(1, 2 * slots + 1, dtype=np.uint64) * np.uint64(_ODD))
        # Box–Muller: two uniform numbers, never 0 or 1, give a normal number.
        share = (drawn.astype(np.float64) + 1.0) / (2.0**64 + 2.0)
        normal = np.sqrt(-2.0 * np.log(share[::2])) * np.cos(2.0 * np.pi * share[1::2])
        factors: list[float] = np.maximum(LEAST_FACTOR, 1.0 + self._error * normal).tolist()
        return factors


class EngineEvents:
    """Translator of cache changes into engines' KV events, for a precise prefix index."""

    def __init__(self, index: PreciseIndex) -> None:
        self.index = index
        self._batches: dict[int, int] = {}

    def changed(self, server: Server, chain: Sequence[int], cached_blocks: int, evicted_blocks: Sequence[int]) -> None:
        number = self._batches.get(server.slot, 0)
        self._batches[server.slot] = number + 1
        if not number:
            self.index.follow(server.slot, "")
        events: list[BlocksRemoved | BlocksStored] = []
        if evicted_blocks:
            events.append(BlocksRemoved(evicted_blocks))
        if new := chain[cached_blocks:]:
            parent = chain[cached_blocks - 1] if cached_blocks else None
            events.append(BlocksStored(new, parent, cast("Sequence[int]", tokens_of(new)), BLOCK_TOKENS))
        self.index.apply(server.slot, EventBatch(number, events))


def strategy_for(
    name: str, setup: RoutingSetup, error: float, *, cost_known: bool = False, **options: Any
) -> tuple[Scorer, CacheEvents | None]:
    """Return the strategy of that name, and its listener of cache changes.

    ``error`` is the standard deviation of the estimates' relative errors. With ``cost_known``, ``least-ttft`` knows the
    cost model.

    Raises:
        InvalidInput: unknown strategy.
    """
    # The authors of these two strategies feed them with events, and so does the simulator.
    if name in ("precise", "block-cost"):
        index = PreciseIndex(BLOCK_TOKENS)
        return named(name, index=index, **options), EngineEvents(index)
    if name == "least-ttft":
        settings = LeastTtftSettings(**options)
        table = ApproximatePrefixIndex(settings.blocks_per_server)
        cost = setup.cost if cost_known else None
        return ErringLeastTtft(table, settings, cost, error=error, seed=setup.seed), None
    return named(name, **options), None
