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
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from skymemory import native
from skymemory.conductor.cost_model import CostModel, LLAMA_70B_8xA800
from skymemory.conductor.fleet import Fleet, LoadReport, PrefillTotals, Server
from skymemory.conductor.picker import Picker
from skymemory.conductor.request import HEAD_BYTES, Decision, Prompt, Request
from skymemory.conductor.seeds import seed
from skymemory.conductor.strategies.base import Scorer
from skymemory.errors import InvalidInput
from skymemory.sim.prefix_cache import PrefixCache
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
