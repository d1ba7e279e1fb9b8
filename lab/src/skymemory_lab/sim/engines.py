"""Simulated engines in virtual time.

- ``fifo``: one prefill at a time, by arrival. Decoding slows nothing.
- ``chunk``: steps of at most ``STEP_TOKENS`` tokens, as vLLM's chunked prefill. Each running answer takes one token of
  a step, waiting prompts the rest in order of arrival.
- ``shared``: all prefills of a server at once, at equal shares of its speed. Decoding slows nothing.

What a prompt hits is decided when its prefill begins. Others hit what of it is computed or, as in vLLM, being computed.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from skymemory.conductor.picker import DecodeTotals, PrefillTotals
from skymemory_lab.sim.clock import Event
from skymemory_lab.sim.cluster.held_cache import HeldCache, HeldRoom
from skymemory_lab.sim.cluster.pool import PrefixCache
from skymemory_lab.sim.routing_setup import RoutingSetup
from skymemory_lab.sim.trace import BLOCK_TOKENS, TraceRequest

STEP_TOKENS = 2_048
"""Token budget of a step: vLLM's default of its server on GPUs below 70 GB and on A100."""
MOST_RUNNING = 256
"""Limit of requests in prefill and decoding, vLLM's default there."""
Later = Callable[[float, Event], None]


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """Request at an engine."""

    request: TraceRequest
    chain: tuple[int, ...]
    """Ids of the prompt's full blocks."""
    hit_blocks: int = 0
    hit_tokens: int = 0
    prefill_s: float = 0.0
    """From the begin of its prefill to its first token."""
    begun_s: float = 0.0
    position: int = 0
    """Prompt tokens that are cached or computed."""
    room: HeldRoom | None = None


class EngineListener(Protocol):
    """Receiver of an engine's events."""

    def on_first_token(self, engine: SimulatedEngine, job: SimulatedJob, now_s: float) -> None: ...

    def on_answer_end(self, engine: SimulatedEngine, job: SimulatedJob, now_s: float) -> None: ...

    def on_cache_change(
        self, engine: SimulatedEngine, chain: Sequence[int], cached_blocks: int, evicted: Sequence[int], now_s: float
    ) -> None:
        """Handle that ``evicted`` blocks went and ``chain`` was stored, its first ``cached_blocks`` cached before."""


class SimulatedEngine(ABC):
    """Engine of server ``number``; ``later`` schedules its events."""

    def __init__(self, number: int, setup: RoutingSetup, later: Later, listener: EngineListener) -> None:
        self.number = number
        self.prefills = PrefillTotals(0, 0, 0, 0.0)
        """Totals of the requests that ended, as vLLM counts them."""
        self.decodes = DecodeTotals(0, 0.0)
        self._setup, self._cost, self._later, self._listener = setup, setup.cost, later, listener
        faults = setup.faults_of(number)
        self._slow = [fault for fault in faults if fault.kind == "slow"]
        self._uncached = [fault for fault in faults if fault.kind in ("uncached", "liar")]
        self._edges_s = sorted({at_s for fault in self._slow for at_s in (fault.from_s, fault.until_s)})
        # Scheduled events of an earlier version are void.
        self._version = 0

    @property
    @abstractmethod
    def waiting(self) -> int: ...

    @property
    @abstractmethod
    def running(self) -> int: ...

    @property
    @abstractmethod
    def kv_usage(self) -> float:
        """Share of the cache that running requests occupy."""

    @abstractmethod
    def arrive(self, job: SimulatedJob, now_s: float) -> None: ...

    @abstractmethod
    def abort(self, now_s: float) -> list[SimulatedJob]:
        """Drop all requests; return them."""

    @abstractmethod
    def empty(self) -> None:
        """Drop the cache, except for what running requests occupy."""

    def _at(self, at_s: float, event: Event) -> None:
        version = self._version

        def run(now_s: float) -> None:
            if version == self._version:
                event(now_s)

        self._later(at_s, run)

    def _factor(self, now_s: float) -> float:
        return math.prod(fault.factor for fault in self._slow if fault.holds(now_s))

    def _next_edge_s(self, now_s: float) -> float:
        return next((at_s for at_s in self._edges_s if at_s > now_s), math.inf)

    def _cached_chain(self, job: SimulatedJob, now_s: float) -> tuple[int, ...]:
        return () if any(fault.holds(now_s) for fault in self._uncached) else job.chain

    def _hit(self, job: SimulatedJob, blocks: int, now_s: float) -> None:
        # At least one token is computed even if all blocks are cached.
        job.begun_s = now_s
        job.hit_blocks = blocks
        job.hit_tokens = job.position = min(blocks * BLOCK_TOKENS, job.request.input_tokens - 1)

    def _end(self, job: SimulatedJob, now_s: float) -> None:
        before, tokens = self.prefills, job.request.input_tokens
        self.prefills = PrefillTotals(
            before.requests + 1,
            before.tokens + tokens,
            before.computed + tokens - job.hit_tokens,
            before.seconds + job.prefill_s,
        )
        seconds = now_s - job.begun_s - job.prefill_s
        self.decodes = DecodeTotals(self.decodes.tokens + job.request.output_tokens - 1, self.decodes.seconds + seconds)
        self._listener.on_answer_end(self, job, now_s)


class FifoEngine(SimulatedEngine):
    """One prefill at a time, by arrival; the cache has no room to wait for."""

    def __init__(self, number: int, setup: RoutingSetup, later: Later, listener: EngineListener) -> None:
        super().__init__(number, setup, later, listener)
        self._cache = PrefixCache(setup.cache_blocks)
        self._queue: deque[SimulatedJob] = deque()
        self._serving: SimulatedJob | None = None
        self._decoding: dict[SimulatedJob, None] = {}
        self._tokens = 0  # of prompts in prefill or decoding

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return len(self._decoding) + (self._serving is not None)

    @property
    def kv_usage(self) -> float:
        return min(1.0, self._tokens / (self._cache.capacity * BLOCK_TOKENS))

    def arrive(self, job: SimulatedJob, now_s: float) -> None:
        self._queue.append(job)
        if self._serving is None:
            self._serve(now_s)

    def _serve(self, now_s: float) -> None:
        # Looked up now, not at arrival: earlier requests in the queue have changed the cache meanwhile.
        job = self._serving = self._queue.popleft()
        chain = self._cached_chain(job, now_s)
        hit = self._cache.leading(chain)
        self._hit(job, hit, now_s)
        evicted = self._cache.use(chain)
        self._tokens += job.request.input_tokens
        job.prefill_s = self._cost.prefill_s(job.request.input_tokens, job.hit_tokens) * self._factor(now_s)
        self._at(now_s + job.prefill_s, lambda at_s: self._first_token(job, chain, hit, evicted, at_s))

    def _first_token(
        self, job: SimulatedJob, chain: tuple[int, ...], hit: int, evicted: Sequence[int], now_s: float
    ) -> None:
        self._listener.on_first_token(self, job, now_s)
        self._serving = None
        self._decoding[job] = None
        answer_s = job.request.output_tokens * self._setup.decode_token_s * self._factor(now_s)
        self._at(now_s + answer_s, lambda at_s: self._answered(job, at_s))
        self._listener.on_cache_change(self, chain[: self._cache.capacity], hit, evicted, now_s)
        if self._queue:
            self._serve(now_s)

    def _answered(self, job: SimulatedJob, now_s: float) -> None:
        del self._decoding[job]
        self._tokens -= job.request.input_tokens
        self._end(job, now_s)

    def abort(self, now_s: float) -> list[SimulatedJob]:
        self._version += 1
        jobs = [*self._decoding, *([] if self._serving is None else [self._serving]), *self._queue]
        self._queue.clear()
        self._decoding.clear()
        self._serving, self._tokens = None, 0
        return jobs

    def empty(self) -> None:
        self._cache = PrefixCache(self._cache.capacity)


class RoomyEngine(SimulatedEngine):
    """Base of engines that run several requests: each needs room in the cache for its prompt and whole answer."""

    def __init__(self, number: int, setup: RoutingSetup, later: Later, listener: EngineListener) -> None:
        super().__init__(number, setup, later, listener)
        self._cache = HeldCache(setup.cache_blocks)
        self._queue: deque[SimulatedJob] = deque()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def kv_usage(self) -> float:
        return self._cache.held_blocks / self._cache.capacity

    def empty(self) -> None:
        self._cache.clear()

    def _take(self, now_s: float) -> SimulatedJob | None:
        # Begin the first waiting request, if any, and if there is room.
        if not self._queue or self.running >= MOST_RUNNING:
            return None
        job = self._queue[0]
        chain = self._cached_chain(job, now_s)
        blocks = -(-(job.request.input_tokens + job.request.output_tokens) // BLOCK_TOKENS)
        job.room = self._cache.hold(chain, blocks)
        if job.room is None:
            return None
        self._queue.popleft()
        self._hit(job, job.room.hit_blocks, now_s)
        if job.room.evicted:
            self._listener.on_cache_change(self, (), 0, job.room.evicted, now_s)
        return job

    def _on_prefilled(self, job: SimulatedJob, now_s: float) -> None:
        assert job.room is not None
        job.prefill_s = now_s - job.begun_s
        self._listener.on_first_token(self, job, now_s)
        self._listener.on_cache_change(self, job.room.chain, job.hit_blocks, (), now_s)

    def _on_answered(self, job: SimulatedJob, now_s: float) -> None:
        self._release(job)
        self._end(job, now_s)

    def _release(self, job: SimulatedJob) -> None:
        if job.room is not None:
            self._cache.release(job.room)


class SharedEngine(RoomyEngine):
    """Prefills share the server's speed equally."""

    def __init__(self, number: int, setup: RoutingSetup, later: Later, listener: EngineListener) -> None:
        super().__init__(number, setup, later, listener)
        # A prefill ends when the work that each has been given since the start, in seconds, reaches its mark.
        self._given_s = self._at_s = 0.0
        self._speed = 1.0
        self._prefilling: list[tuple[float, int, SimulatedJob]] = []
        self._decoding: dict[SimulatedJob, None] = {}
        self._count = 0
        self._plan = 0
        for edge_s in self._edges_s:
            if math.isfinite(edge_s):
                later(edge_s, self._next)

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def arrive(self, job: SimulatedJob, now_s: float) -> None:
        self._queue.append(job)
        self._next(now_s)

    def _next(self, now_s: float) -> None:
        # Count the work since the last event, begin what has room, and plan the next end of a prefill.
        if self._prefilling:
            self._given_s += (now_s - self._at_s) * self._speed / len(self._prefilling)
        self._at_s = now_s
        while (job := self._take(now_s)) is not None:
            assert job.room is not None
            self._cache.store(job.room, len(job.room.chain))
            work_s = self._cost.prefill_s(job.request.input_tokens, job.hit_tokens)
            self._count += 1
            heapq.heappush(self._prefilling, (self._given_s + work_s, self._count, job))
        self._speed = 1.0 / self._factor(now_s)
        self._plan += 1
        if self._prefilling:
            plan = self._plan
            left_s = max(0.0, self._prefilling[0][0] - self._given_s)
            due_s = now_s + left_s * len(self._prefilling) / self._speed
            self._at(due_s, lambda at_s: self._first_token(plan, at_s))

    def _first_token(self, plan: int, now_s: float) -> None:
        if plan != self._plan:
            return
        self._given_s, _, job = self._prefilling[0]
        heapq.heappop(self._prefilling)
        self._at_s = now_s
        self._decoding[job] = None
        self._on_prefilled(job, now_s)
        answer_s = job.request.output_tokens * self._setup.decode_token_s * self._factor(now_s)
        self._at(now_s + answer_s, lambda at_s: self._answered(job, at_s))
        self._next(now_s)

    def _answered(self, job: SimulatedJob, now_s: float) -> None:
        del self._decoding[job]
        self._on_answered(job, now_s)
        if self._queue:
            self._next(now_s)

    def abort(self, now_s: float) -> list[SimulatedJob]:
        self._version += 1
        running = [*self._decoding, *(job for _, _, job in self._prefilling)]
        for job in running:
            self._release(job)
        jobs = [*running, *self._queue]
        self._queue.clear()
        self._decoding.clear()
        self._prefilling.clear()
        return jobs
