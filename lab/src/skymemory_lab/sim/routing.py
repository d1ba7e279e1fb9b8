"""The routing simulator: a trace through the production picker and strategies to simulated engines."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from skymemory import native
from skymemory.conductor.cost_model import CostModel, LLAMA_70B_8xA800
from skymemory.conductor.picker import Fleet, Picker, ReportedLoad, Scorer, Server
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
from skymemory_lab.sim.clock import Clock
from skymemory_lab.sim.cluster.schedulers import LEAST_FACTOR
from skymemory_lab.sim.engines import ENGINES, EngineSettings, Job
from skymemory_lab.sim.trace import BLOCK_TOKENS, TraceRequest

_SEED = seed(model="", adapter="", salt="")


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a server from one time (s) to another.

    ``slow``: it takes ``factor`` times as long. ``hung``: it answers nothing. ``emptied``: its cache loses all at
    ``from_s``, without an event. ``uncached``: it caches nothing, and says so. ``lying``: it reports that it holds
    whole prompts and has no load.
    """

    kind: Literal["slow", "hung", "emptied", "uncached", "lying"]
    server: int
    from_s: float = 0.0
    until_s: float = math.inf
    factor: float = 4.0

    def at(self, now_s: float) -> bool:
        return self.from_s <= now_s < self.until_s


@dataclass(frozen=True, slots=True)
class RoutingSetup:
    """Simulated servers, and how late the routers learn their state."""

    servers: int = 8
    engine: EngineSettings = field(default_factory=EngineSettings)
    cost: CostModel = LLAMA_70B_8xA800
    scrape_s: float = 1.0
    """Interval of the servers' load reports."""
    event_delay_s: float = 0.05  # delay of the caches' events
    reports_prefills: bool = True
    """True if reports have totals of prefill times, as vLLM's do."""
    usage: bool = False
    """True if answers end with the number of cached tokens."""
    whole: float = 0.0
    """Share of answers not streamed."""
    faults: tuple[Fault, ...] = ()
    patience_s: float = 60.0
    """Time after which a client gives up on a hung server."""
    exchange_s: float = 0.15
    """Interval in which several routers exchange state."""
    outage: tuple[float, float] = (math.inf, math.inf)
    """Times (s) between which they do not."""
    seed: int = 0
    """Seed of ties, of the choice of streamed answers, and of a request's router."""

    def __post_init__(self) -> None:
        if self.servers < 1 or self.scrape_s <= 0 or self.event_delay_s < 0 or self.exchange_s <= 0:
            raise InvalidInput("expected servers ≥ 1, scrape_s > 0, event_delay_s ≥ 0, exchange_s > 0")
        if not 0 <= self.whole <= 1:
            raise InvalidInput(f"whole is {self.whole}; expected a share from 0 to 1")
        if any(not 0 <= fault.server < self.servers for fault in self.faults):
            raise InvalidInput(f"faults: expected servers from 0 to {self.servers - 1}")


class CacheEvents(Protocol):
    """Listener of the servers' caches."""

    def changed(self, server: Server, chain: Sequence[int], cached_blocks: int, evicted_blocks: Sequence[int]) -> None:
        """Report that ``evicted_blocks`` went and ``chain`` was stored, its first ``cached_blocks`` cached before."""
        ...


class Exchange(Protocol):
    """State that several routers exchange."""

    def begin(self, pickers: Sequence[Picker]) -> None: ...

    def exchange(self, now_s: float, up: bool) -> None:
        """Exchange what is new. ``up``: False while nothing gets through."""
        ...


@dataclass(frozen=True, slots=True)
class RoutedOutcome:
    at_s: float
    server: int
    ttft_s: float
    whole_s: float
    """Until the last token."""
    tokens: int
    output_tokens: int
    hit_tokens: int
    blocks: int
    hit_blocks: int
    believed_tokens: int
    """Of the prompt, as the router believed when it chose."""
    failed: bool = False
    """Given up, after ``ttft_s``."""

    @property
    def token_s(self) -> float:
        """Mean seconds between two tokens; 0 for a single token."""
        return (self.whole_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


Routers = Sequence[tuple[Scorer, CacheEvents | None]]


def simulate(
    requests: Sequence[TraceRequest],
    scorer: Scorer,
    setup: RoutingSetup,
    events: CacheEvents | None = None,
    prompts: Sequence[Request] | None = None,
    others: Routers = (),
    exchange: Exchange | None = None,
) -> list[RoutedOutcome]:
    """Return the results of ``requests``, sorted by arrival.

    ``others``: further routers, by strategy and listener; each request comes to one of all, drawn.

    Raises:
        InvalidInput: arrivals out of order.
    """
    simulation = _Simulation(((scorer, events), *others), setup, exchange)
    return simulation.run(requests, prompts or [as_routed(request) for request in requests])


@dataclass(slots=True, eq=False)
class _RoutedJob(Job):
    at: int = 0  # its number in the trace
    server: int = 0
    router: int = 0
    decision: Decision | None = None
    sent_s: float = 0.0
    ttft_s: float = 0.0


class _Simulation:
    def __init__(self, routers: Routers, setup: RoutingSetup, exchange: Exchange | None) -> None:
        self._setup, self._exchange = setup, exchange
        self._events = [events for _, events in routers]
        self._clock = Clock()
        names = [f"server-{number}" for number in range(setup.servers)]
        kind = ENGINES[setup.engine.kind]
        self._engines = [kind(setup.engine, setup.cost, self._clock, self) for _ in names]
        self._fleets, self._pickers = list[list[Server]](), list[Picker]()
        for number, (scorer, _) in enumerate(routers):
            fleet = Fleet()
            self._fleets.append([fleet.add(name) for name in names])
            self._pickers.append(Picker(fleet, scorer, seed=setup.seed + number))
        if exchange is not None:
            exchange.begin(self._pickers)
        self._numbers = {name: number for number, name in enumerate(names)}
        self._scrapes = self._exchanges = -1
        self._dice, self._doors = Random(setup.seed), Random(setup.seed + 1)
        self._outcomes: dict[int, RoutedOutcome] = {}

    def run(self, requests: Sequence[TraceRequest], prompts: Sequence[Request]) -> list[RoutedOutcome]:
        for fault in self._setup.faults:
            self._set_fault(fault)
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
            self._pass(request.at_s)
            self._arrive(at, request, prompt)
        self._clock.run()
        return [self._outcomes[at] for at in range(len(requests))]

    def _set_fault(self, fault: Fault) -> None:
        engine = self._engines[fault.server]
        if fault.kind == "emptied":
            self._clock.at(fault.from_s, lambda _: engine.empty_cache())
        elif fault.kind == "slow":
            self._clock.at(fault.from_s, lambda _: setattr(engine, "slowness", fault.factor))
            if fault.until_s < math.inf:
                self._clock.at(fault.until_s, lambda _: setattr(engine, "slowness", 1.0))
        elif fault.kind == "uncached":
            engine.caches = False

    def _is(self, kind: str, server: int, now_s: float) -> bool:
        return any(fault.kind == kind and fault.server == server and fault.at(now_s) for fault in self._setup.faults)

    def _pass(self, now_s: float) -> None:
        # Give the routers a load report of every server, if a multiple of ``scrape_s`` has passed, and let them
        # exchange what they know.
        setup = self._setup
        exchanges = math.floor(now_s / setup.exchange_s)
        if self._exchange is not None and exchanges != self._exchanges:
            self._exchanges = exchanges
            begin_s, end_s = setup.outage
            self._exchange.exchange(now_s, not begin_s <= now_s < end_s)
        scrapes = math.floor(now_s / setup.scrape_s)
        if scrapes == self._scrapes:
            return
        self._scrapes = scrapes
        for number, engine in enumerate(self._engines):
            is_idle = self._is("lying", number, now_s)
            report = ReportedLoad(
                at_s=scrapes * setup.scrape_s,
                waiting=0 if is_idle else len(engine.waiting),
                running=0 if is_idle else engine.running,
                kv_usage=0.0 if is_idle else min(1.0, engine.tokens / (engine.cache.capacity * BLOCK_TOKENS)),
                cache_blocks=engine.cache.capacity,
                block_tokens=BLOCK_TOKENS,
                prefills=engine.prefills if setup.reports_prefills else None,
                decodes=engine.decodes if setup.reports_prefills else None,
            )
            for fleet in self._fleets:
                fleet[number].reported = report

    def _arrive(self, at: int, request: TraceRequest, prompt: Request) -> None:
        now_s, setup = request.at_s, self._setup
        if setup.whole and self._dice.random() < setup.whole:
            prompt = replace(prompt, streams=False)
        router = self._doors.randrange(len(self._pickers)) if len(self._pickers) > 1 else 0
        picker = self._pickers[router]
        decision = picker.pick(prompt, now_s)
        picker.routed(decision, now_s)
        server = self._numbers[decision.server]
        job = _RoutedJob(
            request.input_tokens,
            request.output_tokens,
            request.blocks(),
            at=at,
            server=server,
            router=router,
            decision=decision,
            sent_s=now_s,
        )
        if self._is("hung", server, now_s):
            self._clock.at(now_s + setup.patience_s, lambda at_s: self._give_up(job, at_s))
        else:
            self._engines[server].receive(job, now_s)

    def _give_up(self, job: _RoutedJob, now_s: float) -> None:
        self._pass(now_s)
        assert job.decision is not None
        self._pickers[job.router].failed(job.decision, now_s)
        job.ttft_s = now_s - job.sent_s
        self._outcomes[job.at] = self._outcome(job, now_s, failed=True)

    def first_token(self, job: Job, evicted_blocks: list[int], now_s: float) -> None:
        self._pass(now_s)
        assert isinstance(job, _RoutedJob) and job.decision is not None
        job.ttft_s = now_s - job.sent_s
        if job.decision.request.streams:
            self._pickers[job.router].succeeded(job.decision, now_s)
        if any(self._events) and not self._is("uncached", job.server, now_s):
            chain = job.chain[: self._setup.engine.cache_blocks]
            self._clock.at(
                now_s + self._setup.event_delay_s,
                lambda _: self._publish(job.server, chain, job.hit_blocks, evicted_blocks),
            )

    def ended(self, job: Job, now_s: float) -> None:
        self._pass(now_s)
        assert isinstance(job, _RoutedJob) and job.decision is not None
        picker, cached = self._pickers[job.router], None
        if not job.decision.request.streams:
            picker.succeeded(job.decision, now_s)
        if self._setup.usage:
            cached = job.tokens - 1 if self._is("lying", job.server, now_s) else job.hit_tokens
        picker.on_request_end(job.decision, now_s, cached, job.output_tokens)
        self._outcomes[job.at] = self._outcome(job, now_s)

    def _outcome(self, job: _RoutedJob, now_s: float, failed: bool = False) -> RoutedOutcome:
        assert job.decision is not None
        return RoutedOutcome(
            job.sent_s,
            job.server,
            job.ttft_s,
            now_s - job.sent_s,
            job.tokens,
            job.output_tokens,
            job.hit_tokens,
            len(job.chain),
            job.hit_blocks,
            job.decision.matched_tokens,
            failed,
        )

    def _publish(self, server: int, chain: tuple[int, ...], hit: int, evicted_blocks: list[int]) -> None:
        for fleet, events in zip(self._fleets, self._events, strict=True):
            if events is not None:
                events.changed(fleet[server], chain, hit, evicted_blocks)


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
    """Times to first token, per token and of whole answers, hit rates and balance of a simulation."""

    requests: int
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    token_s: float
    """Mean over requests of their mean time between tokens."""
    token_p99_s: float
    whole_s: float
    """Mean time of a whole answer."""
    whole_p99_s: float
    token_hits: float
    block_hits: float
    used: int
    """Servers that got at least a quarter of the mean."""
    failed: int
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
    ttft_s = [outcome.ttft_s for outcome in late]
    token_s = [outcome.token_s for outcome in late if outcome.output_tokens > 1 and not outcome.failed] or [0.0]
    whole_s = [outcome.whole_s for outcome in late]
    counts = np.bincount([outcome.server for outcome in late], minlength=servers)
    return RoutingMetrics(
        requests=len(late),
        mean_s=float(np.mean(ttft_s)),
        p50_s=percentile(ttft_s, 50),
        p90_s=percentile(ttft_s, 90),
        p99_s=percentile(ttft_s, 99),
        token_s=float(np.mean(token_s)),
        token_p99_s=percentile(token_s, 99),
        whole_s=float(np.mean(whole_s)),
        whole_p99_s=percentile(whole_s, 99),
        token_hits=sum(outcome.hit_tokens for outcome in late) / sum(outcome.tokens for outcome in late),
        block_hits=sum(outcome.hit_blocks for outcome in late) / max(1, sum(outcome.blocks for outcome in late)),
        used=int((counts >= counts.mean() / 4).sum()),
        failed=sum(outcome.failed for outcome in late),
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
