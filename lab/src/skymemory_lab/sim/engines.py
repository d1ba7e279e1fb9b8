"""Simulated engines in virtual time: what each does with prompts and answers at once.

``FifoEngine`` computes a prompt at a time, and its answers cost nothing (Mooncake's separate decoders). ``StepEngine``
works in steps, as vLLM with chunked prefill: each takes a token of every answer and pieces of prompts up to its budget.
``SharedEngine`` computes all its prompts at once, each as much slower.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from skymemory.conductor.cost_model import CostModel
from skymemory.conductor.picker import DecodeTotals, PrefillTotals
from skymemory.errors import InvalidInput
from skymemory_lab.sim.clock import Clock
from skymemory_lab.sim.cluster.pool import PrefixCache
from skymemory_lab.sim.trace import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How a simulated engine works: seconds, tokens."""

    kind: str = "fifo"
    cache_blocks: int = 5_000
    """Capacity of its cache, in blocks of 512 tokens."""
    token_s: float = 0.04
    """Of each token of an answer; ``chunk`` has the next two instead."""
    step_s: float = 0.012
    """Of a step without work."""
    answer_s: float = 0.0003
    """Of a step, for each answer under way."""
    step_tokens: int = 2_048

    def __post_init__(self) -> None:
        if self.kind not in ENGINES:
            raise InvalidInput(f"engine {self.kind!r}; expected one of {', '.join(ENGINES)}")
        if min(self.token_s, self.step_s, self.answer_s) < 0 or self.step_tokens < 1:
            raise InvalidInput("expected token_s, step_s and answer_s ≥ 0, step_tokens ≥ 1")


@dataclass(slots=True, eq=False)
class Job:
    """A request at an engine; what the engine finds out is filled in."""

    tokens: int
    output_tokens: int
    chain: tuple[int, ...]
    """Ids of the prompt's whole blocks."""
    hit_blocks: int = 0
    hit_tokens: int = 0
    begin_s: float = 0.0
    """When its prefill began."""
    prefill_s: float = 0.0
    computed: int = 0
    """Tokens of the prompt that are cached or computed."""
    evicted_blocks: list[int] = field(default_factory=list)
    left: float = 0.0
    """Tokens of its answer still to come, or seconds of its prefill."""


class Listener(Protocol):
    def first_token(self, job: Job, evicted_blocks: list[int], now_s: float) -> None: ...

    def ended(self, job: Job, now_s: float) -> None: ...


class SimulatedEngine(ABC):
    """Engine with a prefix cache. ``slowness`` multiplies its times; one that ``caches`` nothing says so."""

    shares_at_once = False
    """True if a prompt shares the blocks of others that are being computed."""

    def __init__(self, settings: EngineSettings, cost: CostModel, clock: Clock, listener: Listener) -> None:
        self.settings, self.cost, self.clock, self.listener = settings, cost, clock, listener
        self.cache = PrefixCache(settings.cache_blocks)
        self.slowness = 1.0
        self.caches = True
        self.waiting: deque[Job] = deque()
        self.prefilling: list[Job] = []
        self.decoding = 0
        self.tokens = 0
        """Of prompts in prefill or with an answer under way."""
        self.prefills = PrefillTotals(0, 0, 0, 0.0)
        self.decodes = DecodeTotals(0, 0.0)

    @abstractmethod
    def receive(self, job: Job, now_s: float) -> None: ...

    @property
    def running(self) -> int:
        return self.decoding + len(self.prefilling)

    def empty_cache(self) -> None:
        self.cache = PrefixCache(self.settings.cache_blocks)

    def _begin(self, job: Job, now_s: float) -> None:
        # Looked up now, not at arrival: earlier requests have changed the cache meanwhile.
        hit = self.cache.leading(job.chain) if self.caches else 0
        job.hit_blocks, job.hit_tokens = hit, min(hit * BLOCK_TOKENS, job.tokens - 1)
        job.begin_s, job.computed = now_s, job.hit_tokens
        if self.shares_at_once and self.caches:
            job.evicted_blocks = self.cache.use(job.chain)
        self.tokens += job.tokens
        self.prefilling.append(job)

    def _prefilled(self, job: Job, now_s: float) -> None:
        self.prefilling.remove(job)
        self.decoding += 1
        evicted = job.evicted_blocks
        if not self.shares_at_once and self.caches:
            evicted = self.cache.use(job.chain)
        job.left = float(max(0, job.output_tokens - 1))
        job.prefill_s = now_s - job.begin_s
        self.listener.first_token(job, evicted, now_s)

    def _answered(self, job: Job, seconds: float, now_s: float) -> None:
        self.decoding -= 1
        self.tokens -= job.tokens
        before = self.prefills  # counted when a request has ended, as in vLLM
        self.prefills = PrefillTotals(
            before.requests + 1,
            before.tokens + job.tokens,
            before.computed + job.tokens - job.hit_tokens,
            before.seconds + job.prefill_s,
        )
        self.decodes = DecodeTotals(self.decodes.tokens + job.output_tokens - 1, self.decodes.seconds + seconds)
        self.listener.ended(job, now_s)

    def _answer(self, job: Job, now_s: float) -> None:
        # Let an answer end that nothing delays.
        seconds = job.left * self.settings.token_s * self.slowness
        self.clock.at(now_s + seconds, lambda at_s: self._answered(job, seconds, at_s))


class FifoEngine(SimulatedEngine):
    def receive(self, job: Job, now_s: float) -> None:
        self.waiting.append(job)
        if not self.prefilling:
            self._next(now_s)

    def _next(self, now_s: float) -> None:
        job = self.waiting.popleft()
        self._begin(job, now_s)
        seconds = self.cost.prefill_s(job.tokens, job.hit_tokens) * self.slowness
        self.clock.at(now_s + seconds, lambda at_s: self._end(job, at_s))

    def _end(self, job: Job, now_s: float) -> None:
        self._prefilled(job, now_s)
        self._answer(job, now_s)
        if self.waiting:
            self._next(now_s)


class SharedEngine(SimulatedEngine):
    """``Job.left``: seconds that its prefill would take alone from here."""

    shares_at_once = True

    _at_s = 0.0
    _turn = 0
    """Number of the last change: a time that was set before it is void."""

    def receive(self, job: Job, now_s: float) -> None:
        self._advance(now_s)
        self._begin(job, now_s)
        job.left = self.cost.prefill_s(job.tokens, job.hit_tokens)
        self._set_time(now_s)

    def _advance(self, now_s: float) -> None:
        if self.prefilling:
            passed_s = (now_s - self._at_s) / (len(self.prefilling) * self.slowness)
            for job in self.prefilling:
                job.left -= passed_s
        self._at_s = now_s

    def _set_time(self, now_s: float) -> None:
        self._turn += 1
        if self.prefilling:
            turn, first = self._turn, min(self.prefilling, key=lambda job: job.left)
            seconds = max(0.0, first.left) * len(self.prefilling) * self.slowness
            self.clock.at(now_s + seconds, lambda at_s: self._end(first, turn, at_s))

    def _end(self, job: Job, turn: int, now_s: float) -> None:
        if turn != self._turn:
            return
        self._advance(now_s)
        self._prefilled(job, now_s)
        self._answer(job, now_s)
        self._set_time(now_s)


class StepEngine(SimulatedEngine):
    """``Job.left``: tokens of its answer still to come."""

    def __init__(self, settings: EngineSettings, cost: CostModel, clock: Clock, listener: Listener) -> None:
        super().__init__(settings, cost, clock, listener)
        self._answers: list[tuple[Job, float]] = []
        """And the time of its first token."""
        self._turn = 0
        self._begun_s = self._step_s = 0.0
        self._steps = 0
        """Equal steps that were begun at once; 0: idle."""

    def receive(self, job: Job, now_s: float) -> None:
        self.waiting.append(job)
        if not self._steps:
            self._begin_steps(now_s)
        elif self._steps > 1:  # it joins after the present one
            done = min(self._steps, math.floor((now_s - self._begun_s) / self._step_s) + 1)
            self._set_steps(done)

    def _begin_steps(self, now_s: float) -> None:
        """Begin a step, or if there is no prompt all up to the first end of an answer."""
        settings = self.settings
        budget, work_s, pieces = settings.step_tokens - len(self._answers), 0.0, list[tuple[Job, int]]()
        for job in self.prefilling:
            budget = self._give(job, budget, pieces)
        while self.waiting and budget > 0 and self._has_room(self.waiting[0]):
            job = self.waiting.popleft()
            self._begin(job, now_s)
            budget = self._give(job, budget, pieces)
        for job, count in pieces:
            work_s += self.cost.prefill_s(job.computed + count, job.computed)
            job.computed += count
        if not pieces and not self._answers:
            self._steps = 0
            return
        self._begun_s = now_s
        self._step_s = (settings.step_s + settings.answer_s * len(self._answers) + work_s) * self.slowness
        fewest = 1 if pieces else math.ceil(min(job.left for job, _ in self._answers))
        self._set_steps(max(1, fewest))

    def _give(self, job: Job, budget: int, pieces: list[tuple[Job, int]]) -> int:
        count = min(budget, job.tokens - job.computed)
        if count > 0:
            pieces.append((job, count))
        return budget - max(0, count)

    def _has_room(self, job: Job) -> bool:
        return not self.running or self.tokens + job.tokens <= self.cache.capacity * BLOCK_TOKENS

    def _set_steps(self, steps: int) -> None:
        self._steps = steps
        self._turn += 1
        turn = self._turn
        self.clock.at(self._begun_s + steps * self._step_s, lambda at_s: self._end_steps(turn, at_s))

    def _end_steps(self, turn: int, now_s: float) -> None:
        if turn != self._turn:
            return
        for job, _ in self._answers:
            job.left -= self._steps
        ended = [one for one in self._answers if one[0].left <= 0]
        self._answers = [one for one in self._answers if one[0].left > 0]
        for job in [job for job in self.prefilling if job.computed >= job.tokens]:
            self._prefilled(job, now_s)
            (self._answers if job.left > 0 else ended).append((job, now_s))
        for job, first_s in ended:
            self._answered(job, now_s - first_s, now_s)
        self._begin_steps(now_s)


ENGINES: dict[str, type[SimulatedEngine]] = {"fifo": FifoEngine, "chunk": StepEngine, "shared": SharedEngine}
