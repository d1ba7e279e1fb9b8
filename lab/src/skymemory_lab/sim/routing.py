"""The routing simulator: a trace through the production picker and strategies to simulated servers.

``sim.routing_setup`` has the settings and faults, ``sim.engines`` and ``sim.step_engine`` the servers' engines,
``sim.routing_metrics`` the outcomes and their metrics, ``sim.routed_strategies`` the strategies by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from skymemory import native
from skymemory.conductor.picker import Fleet, Picker, ReportedLoad, Scorer, Server
from skymemory.conductor.request import HEAD_BYTES, Decision, Prompt, Request, seed
from skymemory.errors import InvalidInput
from skymemory_lab.sim.clock import Clock, Event
from skymemory_lab.sim.engines import FifoEngine, SharedEngine, SimulatedEngine, SimulatedJob
from skymemory_lab.sim.routing_metrics import RoutedOutcome, RoutingMetrics, measured, worst_share
from skymemory_lab.sim.routing_setup import RoutingSetup, ServerFault
from skymemory_lab.sim.step_engine import StepEngine
from skymemory_lab.sim.trace import BLOCK_TOKENS, TraceRequest

__all__ = [
    "CacheEvents",
    "RoutedOutcome",
    "RouterExchange",
    "RoutingMetrics",
    "RoutingSetup",
    "ServerFault",
    "as_routed",
    "measured",
    "simulate",
    "tokens_of",
    "worst_share",
]
_SEED = seed(model="", adapter="", salt="")
_ENGINES: dict[str, Callable[..., SimulatedEngine]] = {
    "fifo": FifoEngine,
    "chunk": StepEngine,
    "shared": SharedEngine,
}


class CacheEvents(Protocol):
    """Listener of the servers' caches."""

    def changed(self, server: Server, chain: Sequence[int], cached_blocks: int, evicted_blocks: Sequence[int]) -> None:
        """Report that ``evicted_blocks`` went and ``chain`` was stored, its first ``cached_blocks`` cached before."""
        ...


class RouterExchange(Protocol):
    """Exchange of state between routers."""

    def connect(self, pickers: Sequence[Picker]) -> None:
        """Receive the routers' pickers before the first request."""

    def exchange(self, now_s: float) -> None:
        """Exchange what the routers have learnt since the last call."""


@dataclass(slots=True, eq=False)
class _RoutedJob(SimulatedJob):
    at: int = 0  # its number in the trace
    router: int = 0
    decision: Decision | None = None
    first_s: float | None = None


def simulate(
    requests: Sequence[TraceRequest],
    scorer: Scorer | Sequence[Scorer],
    setup: RoutingSetup,
    events: CacheEvents | Sequence[CacheEvents | None] | None = None,
    prompts: Sequence[Request] | None = None,
    exchange: RouterExchange | None = None,
) -> list[RoutedOutcome]:
    """Return the results of ``requests``, sorted by arrival. Several routers need a scorer (and its events) each.

    Raises:
        InvalidInput: arrivals out of order, or another number of scorers than of routers.
    """
    scorers = [scorer] if isinstance(scorer, Scorer) else list(scorer)
    listeners = list(events) if isinstance(events, Sequence) else [events]
    if len(scorers) != setup.routers or len(listeners) not in (1, setup.routers):
        raise InvalidInput(f"{len(scorers)} strategies for {setup.routers} routers; expected one each")
    listeners += [None] * (setup.routers - len(listeners))
    simulation = _Simulation(scorers, setup, listeners, exchange)
    return simulation.run(requests, prompts or [as_routed(request) for request in requests])


class _Simulation:
    def __init__(
        self,
        scorers: Sequence[Scorer],
        setup: RoutingSetup,
        events: Sequence[CacheEvents | None],
        exchange: RouterExchange | None,
    ) -> None:
        self._setup, self._events, self._exchange = setup, events, exchange
        self._pickers = [Picker(Fleet(), scorer, seed=setup.seed + at) for at, scorer in enumerate(scorers)]
        names = setup.server_names
        self._servers = [[picker.fleet.add(name) for name in names] for picker in self._pickers]
        self._numbers = {name: number for number, name in enumerate(names)}
        self._clock = Clock()
        kind = _ENGINES[setup.engine]
        self._engines = [kind(number, setup, self._later, self) for number in range(setup.servers)]
        self._hung = {number: _kinds(setup, number, "hung") for number in range(setup.servers)}
        self._liars = {number: _kinds(setup, number, "liar") for number in range(setup.servers)}
        for fault in setup.faults:
            self._plan_fault(fault)
        self._scrapes, self._exchanges = -1, 0
        self._dice, self._balancer = Random(setup.seed), Random(setup.seed + 1)
        self._outcomes: dict[int, RoutedOutcome] = {}
        if exchange is not None:
            exchange.connect(self._pickers)

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
            self._catch_up(request.at_s)
            self._arrive(at, request, prompt)
        self._clock.run()
        return [self._outcomes[at] for at in range(len(requests))]

    def _later(self, at_s: float, event: Event) -> None:
        # With the load reports and exchanges that are due by then.
        def run(now_s: float) -> None:
            self._catch_up(now_s)
            event(now_s)

        self._clock.at(at_s, run)

    def _catch_up(self, now_s: float) -> None:
        # Nothing has changed since the times at which reports and exchanges were due.
        setup = self._setup
        scrapes = math.floor(now_s / setup.scrape_s)
        if scrapes != self._scrapes:
            self._scrapes = scrapes
            self._scrape(scrapes * setup.scrape_s)
        if self._exchange is not None and setup.exchange_s is not None:
            begin_s, end_s = setup.outage or (math.inf, math.inf)
            while (due_s := (self._exchanges + 1) * setup.exchange_s) <= now_s:
                self._exchanges += 1
                if not begin_s <= due_s < end_s:
                    self._exchange.exchange(due_s)

    def _scrape(self, at_s: float) -> None:
        # Give the routers a load report of every server.
        setup = self._setup
        for number, engine in enumerate(self._engines):
            if _holds(self._hung[number], at_s):
                continue
            idle = _holds(self._liars[number], at_s)
            report = ReportedLoad(
                at_s=at_s,
                waiting=0 if idle else engine.waiting,
                running=0 if idle else engine.running,
                kv_usage=0.0 if idle else engine.kv_usage,
                cache_blocks=setup.cache_blocks,
                block_tokens=BLOCK_TOKENS,
                prefills=engine.prefills if setup.reports_totals else None,
                decodes=engine.decodes if setup.reports_totals else None,
            )
            for servers in self._servers:
                servers[number].reported = report

    def _plan_fault(self, fault: ServerFault) -> None:
        engine = self._engines[fault.server]
        if fault.kind == "emptied":
            self._later(fault.from_s, lambda _: engine.empty())
        elif fault.kind == "hung":
            self._later(fault.from_s, lambda now_s: self._hang(engine, now_s))

    def _hang(self, engine: SimulatedEngine, now_s: float) -> None:
        for job in engine.abort(now_s):
            self._time_out(job, now_s)

    def _time_out(self, job: SimulatedJob, now_s: float) -> None:
        self._later(now_s + self._setup.timeout_s, lambda at_s: self._fail(job, at_s))

    def _arrive(self, at: int, request: TraceRequest, prompt: Request) -> None:
        if self._setup.whole and self._dice.random() < self._setup.whole:
            prompt = replace(prompt, streams=False)
        router = self._balancer.randrange(self._setup.routers) if self._setup.routers > 1 else 0
        picker = self._pickers[router]
        decision = picker.pick(prompt, request.at_s)
        picker.routed(decision, request.at_s)
        job = _RoutedJob(request, request.blocks(), at=at, router=router, decision=decision)
        number = self._numbers[decision.server]
        if _holds(self._hung[number], request.at_s):
            self._time_out(job, request.at_s)
        else:
            self._engines[number].arrive(job, request.at_s)

    # Events of the engines. As with the router, an answer that is not streamed has its first byte with its last; usage
    # comes at the end.

    def on_first_token(self, engine: SimulatedEngine, job: SimulatedJob, now_s: float) -> None:
        assert isinstance(job, _RoutedJob) and job.decision is not None
        job.first_s = now_s
        if job.decision.request.streams:
            self._pickers[job.router].succeeded(job.decision, now_s)

    def on_answer_end(self, engine: SimulatedEngine, job: SimulatedJob, now_s: float) -> None:
        assert isinstance(job, _RoutedJob) and job.decision is not None
        picker, cached_tokens = self._pickers[job.router], None
        if self._setup.usage:
            lies = _holds(self._liars[engine.number], now_s)
            cached_tokens = len(job.chain) * BLOCK_TOKENS if lies else job.hit_tokens
        if not job.decision.request.streams:
            picker.succeeded(job.decision, now_s, cached_tokens)
            cached_tokens = None
        picker.on_request_end(job.decision, now_s, cached_tokens, job.request.output_tokens)
        self._record(job, now_s)

    def on_cache_change(
        self, engine: SimulatedEngine, chain: Sequence[int], cached_blocks: int, evicted: Sequence[int], now_s: float
    ) -> None:
        for events, servers in zip(self._events, self._servers, strict=True):
            if events is not None:
                self._later(
                    now_s + self._setup.event_delay_s,
                    _published(events, servers[engine.number], chain, cached_blocks, evicted),
                )

    def _fail(self, job: SimulatedJob, now_s: float) -> None:
        assert isinstance(job, _RoutedJob) and job.decision is not None
        picker = self._pickers[job.router]
        if job.first_s is not None and job.decision.request.streams:
            picker.on_request_end(job.decision, now_s)
        else:
            picker.failed(job.decision, now_s)
        self._record(job, now_s, failed=True)

    def _record(self, job: _RoutedJob, now_s: float, failed: bool = False) -> None:
        assert job.decision is not None
        request = job.request
        self._outcomes[job.at] = RoutedOutcome(
            at_s=request.at_s,
            server=self._numbers[job.decision.server],
            ttft_s=(now_s if job.first_s is None else job.first_s) - request.at_s,
            tokens=request.input_tokens,
            hit_tokens=job.hit_tokens,
            blocks=len(job.chain),
            hit_blocks=job.hit_blocks,
            answer_s=now_s - request.at_s,
            output_tokens=request.output_tokens,
            believed_tokens=job.decision.matched_tokens,
            router=job.router,
            failed=failed,
        )


def _kinds(setup: RoutingSetup, number: int, kind: str) -> list[ServerFault]:
    return [fault for fault in setup.faults_of(number) if fault.kind == kind]


def _holds(faults: Sequence[ServerFault], now_s: float) -> bool:
    return any(fault.holds(now_s) for fault in faults)


def _published(
    events: CacheEvents, server: Server, chain: Sequence[int], cached_blocks: int, evicted: Sequence[int]
) -> Event:
    return lambda _: events.changed(server, chain, cached_blocks, evicted)


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
