"""Requests of a trace through the real picker to simulated servers: who waits how long, and what hits.

The picker and the strategies are those of the proxy; only the servers are not real. Each server prefills one request
at a time, in the order of arrival, for as long as the cost model says; what hits is decided when its service begins.
Then the first token is there, and ``decode_token_s`` for each further one the request counts as running: decoding does
not slow prefills down (Mooncake's separate decoders), but it is what engines report.

What a router knows is what it would know. Load is reported as it was at the last multiple of ``scrape_s``. Engines'
cache events arrive ``event_delay_s`` after the prefill that caused them. First bytes and ends are seen at once. Who
estimates errs (``routing_errors``).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from skymemory import native
from skymemory.conductor.cost_model import CostModel, LLAMA_70B_8xA800
from skymemory.conductor.fleet import Fleet, LoadReport, PrefillTotals, Server
from skymemory.conductor.picker import Picker
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.prefix_index.base import PrefixIndex
from skymemory.conductor.prefix_index.events import Batch, BlocksRemoved, BlocksStored
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.request import HEAD_BYTES, Decision, Prompt, Request, seed
from skymemory.conductor.strategies.base import Scorer, mix
from skymemory.conductor.strategies.estimates import PrefillCost
from skymemory.conductor.strategies.least_ttft import LeastTtft, LeastTtftSettings
from skymemory.conductor.strategies.named import named
from skymemory.errors import InvalidInput
from skymemory.sim.cluster.node_memory import PrefixCache
from skymemory.sim.trace import BLOCK_TOKENS, TraceRequest

_SEED = seed(model="", adapter="", salt="")


@dataclass(frozen=True, slots=True)
class RoutingSetup:
    """The servers, and what is known of them when."""

    servers: int = 8
    cache_blocks: int = 5_000
    """Blocks of 512 tokens that each server's prefix cache holds."""
    cost: CostModel = LLAMA_70B_8xA800
    decode_token_s: float = 0.04
    scrape_s: float = 0.2
    event_delay_s: float = 0.05
    tells_prefills: bool = True
    """Whether engines' reports say what prefills took in all, as vLLM's do."""
    whole: float = 0.0
    """Part of the answers that come whole, with their last token: their first byte is not seen before."""
    seed: int = 0
    """Of ties, and of who does not stream: jitter of arrivals and errors of estimates have their own."""

    def __post_init__(self) -> None:
        if self.servers < 1 or self.scrape_s <= 0 or self.event_delay_s < 0 or self.decode_token_s < 0:
            raise InvalidInput("a fleet has servers, reads their reports every so often, and time does not run back")
        if not 0 <= self.whole <= 1:
            raise InvalidInput(f"whole is {self.whole}; expected a part of the answers, 0 to 1")


class CacheEvents(Protocol):
    """Where engines' cache events go, for strategies that are fed by them."""

    def changed(self, server: Server, chain: Sequence[int], had: int, gone: Sequence[int]) -> None:
        """Blocks ``gone`` were evicted, then ``chain`` was stored, whose first ``had`` were there before; ids."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request."""

    at_s: float
    server: int
    ttft_s: float
    tokens: int
    hit_tokens: int
    blocks: int
    hit_blocks: int


@dataclass(slots=True)
class _Job:
    at: int
    request: TraceRequest
    decision: Decision
    chain: tuple[int, ...]


@dataclass(slots=True)
class _Engine:
    """A simulated server: a queue, one prefill at a time, and the requests that decode."""

    server: Server
    cache: PrefixCache
    queue: deque[_Job] = field(default_factory=deque)
    serving: _Job | None = None
    decoding: int = 0
    tokens: int = 0
    """Prompts being prefilled or decoded."""
    prefills: PrefillTotals = field(default_factory=lambda: PrefillTotals(0, 0, 0, 0.0))


def simulate(
    requests: Sequence[TraceRequest],
    scorer: Scorer,
    setup: RoutingSetup,
    events: CacheEvents | None = None,
    prompts: Sequence[Request] | None = None,
) -> list[Outcome]:
    """What becomes of each of ``requests`` (in the order of arrival), in their order.

    ``prompts``: what ``as_routed`` makes of each, where the same requests are simulated again and again.

    Raises:
        InvalidInput: arrivals out of order.
    """
    return _Simulation(scorer, setup, events).run(requests, prompts or [as_routed(one) for one in requests])


class _Simulation:
    def __init__(self, scorer: Scorer, setup: RoutingSetup, events: CacheEvents | None) -> None:
        self._setup, self._events = setup, events
        self._fleet = Fleet()
        self._picker = Picker(self._fleet, scorer, seed=setup.seed)
        names = [f"server-{number}" for number in range(setup.servers)]
        self._engines = {name: _Engine(self._fleet.add(name), PrefixCache(setup.cache_blocks)) for name in names}
        self._numbers = {name: number for number, name in enumerate(names)}
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._counted = 0
        self._scrapes = -1
        self._dice = Random(setup.seed)
        self._outcomes: dict[int, Outcome] = {}

    def run(self, requests: Sequence[TraceRequest], prompts: Sequence[Request]) -> list[Outcome]:
        before_s = -math.inf
        for at, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
            if request.at_s < before_s:
                raise InvalidInput(
                    f"request {at} arrives at {request.at_s:g} s, after one at {before_s:g} s; sort them"
                )
            before_s = request.at_s
            self._advance(request.at_s)
            self._arrive(at, request, prompt)
        self._advance(math.inf)
        return [self._outcomes[at] for at in range(len(requests))]

    def _advance(self, until_s: float) -> None:
        """Everything that is due up to then."""
        while self._due and self._due[0][0] <= until_s:
            now_s, _, happens = heapq.heappop(self._due)
            self._scrape(now_s)
            happens(now_s)
        if until_s < math.inf:
            self._scrape(until_s)

    def _later(self, at_s: float, happens: Callable[[float], None]) -> None:
        self._counted += 1
        heapq.heappush(self._due, (at_s, self._counted, happens))

    def _scrape(self, now_s: float) -> None:
        """Nothing has changed since the last event: so what is true now was true at the last multiple of the period."""
        scrapes = math.floor(now_s / self._setup.scrape_s)
        if scrapes == self._scrapes:
            return
        self._scrapes = scrapes
        for engine in self._engines.values():
            engine.server.reported = LoadReport(
                at_s=scrapes * self._setup.scrape_s,
                waiting=len(engine.queue),
                running=engine.decoding + (engine.serving is not None),
                kv_usage=min(1.0, engine.tokens / (engine.cache.capacity * BLOCK_TOKENS)),
                cache_blocks=engine.cache.capacity,
                block_tokens=BLOCK_TOKENS,
                prefills=engine.prefills if self._setup.tells_prefills else None,
            )

    def _arrive(self, at: int, request: TraceRequest, prompt: Request) -> None:
        if self._setup.whole and self._dice.random() < self._setup.whole:
            prompt = replace(prompt, streams=False)
        decision = self._picker.pick(prompt, request.at_s)
        self._picker.routed(decision, request.at_s)
        engine = self._engines[decision.server]
        engine.queue.append(_Job(at, request, decision, request.blocks()))
        if engine.serving is None:
            self._serve(engine, request.at_s)

    def _serve(self, engine: _Engine, now_s: float) -> None:
        """The next of the queue begins its prefill."""
        job = engine.serving = engine.queue.popleft()
        tokens, hit = job.request.input_tokens, engine.cache.leading(job.chain)
        hit_tokens = min(hit * BLOCK_TOKENS, tokens - 1)
        gone = engine.cache.use(job.chain)
        engine.tokens += tokens
        done_s = now_s + self._setup.cost.prefill_s(tokens, hit_tokens)
        self._outcomes[job.at] = Outcome(
            job.request.at_s,
            self._numbers[job.decision.server],
            done_s - job.request.at_s,
            tokens,
            hit_tokens,
            len(job.chain),
            hit,
        )
        self._later(done_s, lambda at_s: self._first_token(engine, job, hit, gone, at_s))

    def _first_token(self, engine: _Engine, job: _Job, hit: int, gone: list[int], now_s: float) -> None:
        if job.decision.request.streams:
            self._picker.succeeded(job.decision, now_s)
        engine.serving = None
        engine.decoding += 1
        self._later(
            now_s + job.request.output_tokens * self._setup.decode_token_s, lambda at_s: self._end(engine, job, at_s)
        )
        if self._events is not None:
            self._later(now_s + self._setup.event_delay_s, lambda _: self._tell(engine.server, job.chain, hit, gone))
        if engine.queue:
            self._serve(engine, now_s)

    def _end(self, engine: _Engine, job: _Job, now_s: float) -> None:
        if not job.decision.request.streams:
            self._picker.succeeded(job.decision, now_s)
        self._picker.ended(job.decision, now_s, output_tokens=job.request.output_tokens)
        engine.decoding -= 1
        engine.tokens -= job.request.input_tokens
        before, outcome = engine.prefills, self._outcomes[job.at]
        engine.prefills = PrefillTotals(
            before.requests + 1,
            before.tokens + outcome.tokens,
            before.computed + outcome.tokens - outcome.hit_tokens,
            before.seconds + self._setup.cost.prefill_s(outcome.tokens, outcome.hit_tokens),
        )

    def _tell(self, server: Server, chain: tuple[int, ...], hit: int, gone: list[int]) -> None:
        assert self._events is not None
        self._events.changed(server, chain[: self._setup.cache_blocks], hit, gone)


def as_routed(request: TraceRequest) -> Request:
    """What a router would read of it: whole blocks hashed as token numbers are, and a beginning.

    A trace has no words. The tokens of a block are taken to be its number, over and over. In the head eight bytes stand
    for each block, so that strategies which hash the first characters can tell prompts apart by more than the block
    with which all of them begin, if they look far enough: of the words themselves the first 1,024 bytes are all alike.
    """
    tokens = tokens_of(request.blocks())
    block_bytes = BLOCK_TOKENS * tokens.itemsize
    blocks = native.chain_hashes(tokens.tobytes(), block_bytes, _SEED)
    pieces = native.piece_hashes(tokens.tobytes(), block_bytes, _SEED)
    head = np.array(request.ids[: HEAD_BYTES // 8], dtype="<u8").tobytes()
    prompt = Prompt(blocks, pieces, BLOCK_TOKENS, request.input_tokens, head)
    return Request(prompt, session=str(request.session), output_tokens=request.output_tokens)


def tokens_of(ids: Sequence[int]) -> NDArray[np.uint32]:
    """Token numbers of blocks of these ids."""
    return np.repeat(np.array(ids, dtype="<u4"), BLOCK_TOKENS)


# What is told of a simulated run: time to the first token, hits, and how evenly requests were spread.


WINDOW_S = 60.0
WINDOW_REQUESTS = 80


@dataclass(frozen=True, slots=True)
class RoutingMetrics:
    """Of the requests that were measured."""

    requests: int
    mean_s: float
    """Mean time to the first token; ``p50_s``, ``p90_s``, ``p99_s`` are its percentiles."""
    p50_s: float
    p90_s: float
    p99_s: float
    token_hits: float
    """Part of the prompts' tokens that hit."""
    block_hits: float
    """Part of their whole blocks."""
    worst_share: float
    """The most requests that one server got in a window of 60 s, over the mean of the servers in it; 0: no window."""
    spread: float
    """Standard deviation of the requests per server, over their mean."""

    def as_json(self) -> dict[str, float]:
        return {name: value if isinstance(value, int) else round(value, 6) for name, value in asdict(self).items()}


def measured(outcomes: Sequence[Outcome], servers: int, from_s: float = 0.0) -> RoutingMetrics:
    """The metrics of the requests that arrived at ``from_s`` or later.

    Raises:
        InvalidInput: there are none.
    """
    late = [outcome for outcome in outcomes if outcome.at_s >= from_s]
    if not late:
        raise InvalidInput(f"no request arrived at {from_s:g} s or later: nothing to measure")
    ttft_s = np.array([outcome.ttft_s for outcome in late])
    p50_s, p90_s, p99_s = (float(value) for value in np.percentile(ttft_s, [50, 90, 99]))
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
    arrivals: Sequence[tuple[float, int]],
    servers: int,
    window_s: float = WINDOW_S,
    least: int = WINDOW_REQUESTS,
) -> float:
    """Over every window of ``window_s`` with ``least`` requests or more: a server's requests over the servers' mean.

    ``arrivals``: (s, server) in the order of time. A window is closed at its begin and open at its end; each that
    differs from its neighbour in what it holds is looked at.
    """
    comes = [(at_s, 1, server) for at_s, server in arrivals]
    goes = [(at_s + window_s, 0, server) for at_s, server in arrivals]
    counts = [0] * servers
    inside, worst, before_s = 0, 0.0, None
    for at_s, is_new, server in heapq.merge(goes, comes):
        if at_s != before_s and inside >= least:
            worst = max(worst, max(counts) * servers / inside)
        step = 1 if is_new else -1
        counts[server] += step
        inside += step
        before_s = at_s
    return worst


# Errors of estimates, for strategies that estimate: a simulator's would else be its own truth.
#
# Each request's estimates at each server are off by a factor of their own: normal, of mean 1 and a standard deviation
# of
# ``error``, never below a tenth. It is drawn anew for every request and every server, from the seed, the request and
# the
# time: servers of which nothing differs come out different, and a long wait is off by as many more seconds. Computing
# and waiting are off by it, and so is the work that is believed to wait there from then on. Equal questions get equal
# answers.


LEAST_FACTOR = 0.1
_ODD = 0x9E3779B97F4A7C15


class ErringLeastTtft(LeastTtft):
    """The default strategy, whose every estimate errs.

    Raises:
        InvalidInput: an error that is no part of an estimate, 0 to 1.
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
            raise InvalidInput(f"error is {error}; expected a part of the estimate, 0 to 1")
        super().__init__(index, settings, cost)
        self._error, self._seed = error, seed * _ODD & (1 << 64) - 1

    def prefills_s(self, request: Request, slots: Sequence[int], cached: Sequence[int], now_s: float) -> list[float]:
        return self._off(super().prefills_s(request, slots, cached, now_s), request, slots, now_s)

    def waits_s(self, request: Request, servers: Sequence[Server], now_s: float) -> list[float]:
        slots = [server.slot for server in servers]
        return self._off(super().waits_s(request, servers, now_s), request, slots, now_s)

    def _off(self, seconds: list[float], request: Request, slots: Sequence[int], now_s: float) -> list[float]:
        factors = self.factors(request, max(slots) + 1, now_s)
        return [one * factors[slot] for one, slot in zip(seconds, slots, strict=True)]

    def factors(self, request: Request, slots: int, now_s: float) -> list[float]:
        """By how much what is estimated for ``request`` is off, at each of the first ``slots`` slots."""
        blocks = request.prompt.blocks
        last = blocks.item(-1) if len(blocks) else request.prompt.tokens
        at = np.array([now_s], dtype=np.float64).view(np.uint64)
        key = mix(mix(np.array([last ^ self._seed], dtype=np.uint64)) ^ at)
        drawn = mix(key + np.arange(1, 2 * slots + 1, dtype=np.uint64) * np.uint64(_ODD))
        share = (drawn.astype(np.float64) + 1.0) / (2.0**64 + 2.0)
        normal = np.sqrt(-2.0 * np.log(share[::2])) * np.cos(2.0 * np.pi * share[1::2])
        factors: list[float] = np.maximum(LEAST_FACTOR, 1.0 + self._error * normal).tolist()
        return factors


# The router's strategies as the simulator runs them: built by name, with what each of them really is told.
#
# ``precise`` hears the engines' events, in the form in which engines publish them: numbered batches, blocks by the
# engine's own names, their tokens told once. Who estimates gets a cost model that errs. All others learn from what
# they
# sent and what was answered.


class EngineEvents:
    """Changes of simulated caches, told to a ``PreciseIndex`` as engines tell theirs."""

    def __init__(self, index: PreciseIndex) -> None:
        self.index = index
        self._batches: dict[int, int] = {}

    def changed(self, server: Server, chain: Sequence[int], had: int, gone: Sequence[int]) -> None:
        number = self._batches.get(server.slot, 0)
        self._batches[server.slot] = number + 1
        if not number:
            self.index.follow(server.slot, "")
        events: list[BlocksRemoved | BlocksStored] = []
        if gone:
            events.append(BlocksRemoved(gone))
        if new := chain[had:]:
            parent = chain[had - 1] if had else None
            events.append(BlocksStored(new, parent, cast("Sequence[int]", tokens_of(new)), BLOCK_TOKENS))
        self.index.apply(server.slot, Batch(number, events))


def strategy_for(
    name: str, setup: RoutingSetup, error: float, *, given: bool = False, **options: Any
) -> tuple[Scorer, CacheEvents | None]:
    """The strategy of that name with such options, and what must hear events for it.

    ``error``: standard deviation of what estimates are off by, as a part of them. ``given``: who estimates is told the
    servers' speeds, and learns them otherwise.

    Raises:
        InvalidInput: no strategy of that name.
    """
    if name in ("precise", "block-cost"):
        index = PreciseIndex(BLOCK_TOKENS)
        return named(name, index=index, **options), EngineEvents(index)
    if name == "least-ttft":
        settings = LeastTtftSettings(**options)
        table = ApproximatePrefixIndex(settings.blocks_per_server)
        cost = setup.cost if given else None
        return ErringLeastTtft(table, settings, cost, error=error, seed=setup.seed), None
    return named(name, **options), None
