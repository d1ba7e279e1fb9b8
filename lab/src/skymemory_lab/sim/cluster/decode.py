"""Simulated instances with continuous batching, coupled with prefill or decode only.

Steps are planned up to the batch's next change; an arrival or a failure replaces the plan.
"""

from __future__ import annotations

from collections.abc import Callable

from skymemory_lab.sim.clock import Clock
from skymemory_lab.sim.cluster.job import DecodeBatch, DecodeStream, Job, Listeners, PrefillQueue, PriorityQueue
from skymemory_lab.sim.cluster.pool import ClusterPool
from skymemory_lab.sim.cluster.setup import ClusterSetup


class CoupledInstance:
    """Instance that prefills and decodes.

    Without ``mixed_tokens`` decoding waits for prefills; else every step decodes, then fills up with prefill chunks.
    """

    def __init__(
        self,
        number: int,
        clock: Clock,
        setup: ClusterSetup,
        pool: ClusterPool,
        batch: DecodeBatch,
        listeners: Listeners,
    ) -> None:
        self.number = number
        self._clock, self._cost, self._pool, self._listeners = clock, setup.cost, pool, listeners
        self._kv_tokens = setup.kv_tokens - setup.coupled_cache_tokens
        self._most_batch, self._mixed_tokens = setup.most_batch, setup.mixed_tokens
        self.batch = batch
        self.waiting = PrefillQueue()
        self.busy_s = 0.0
        self.decode_busy_s = 0.0
        self._underway: list[tuple[Job, int]] = []
        self._begun_s = 0.0
        self._planned = 0  # steps in the plan; 0: prefilling or idle
        self._idle = True
        self._version = 0

    def takes(self, job: Job) -> bool:
        return job.prompt_tokens + job.output_tokens <= self._kv_tokens

    def arrive(self, job: Job, now_s: float) -> None:
        self.waiting.push(job)
        if self._idle:
            self._next(now_s)
        # A prefill waits for the step in progress, which is not interrupted, but not for the end of the plan.
        elif self._planned and self._fits(self.waiting.first):
            steps = self.batch.steps_until(now_s - self._begun_s, self._planned)
            if steps < self._planned:
                self._decode_until(steps)

    def fail(self, now_s: float) -> tuple[list[Job], list[DecodeStream]]:
        """Fail. Return the requests before and after the first token."""
        if self._planned:
            self.decode_busy_s += now_s - self._begun_s
        elif self._underway and not self._mixed_tokens:
            job = self._underway[0][0]
            self.busy_s += now_s - self._begun_s
            job.spent_s += now_s - self._begun_s
        jobs = [*(job for job, _ in self._underway), *self.waiting.clear()]
        self._underway = []
        self._planned, self._idle, self._version = 0, True, self._version + 1
        return jobs, self.batch.clear()

    def predicted_ttft_s(self, now_s: float) -> float:
        backlog_s = sum(job.work_s for job, _ in self._underway)
        if not self.waiting:
            return max((now_s - job.at_s for job, _ in self._underway), default=0.0) + backlog_s
        return now_s - self.waiting.newest().at_s + backlog_s + self.waiting.work_s

    def step_s(self, now_s: float) -> float:
        return self.batch.step_s()

    def _fits(self, job: Job) -> bool:
        # The whole answer is reserved, as in the batch, so a request that fits is never preempted.
        underway_tokens = sum(underway.prompt_tokens + underway.output_tokens for underway, _ in self._underway)
        wanted = self.batch.reserved + underway_tokens + job.prompt_tokens + job.output_tokens
        return wanted <= self._kv_tokens and len(self.batch) + len(self._underway) < self._most_batch

    def _next(self, now_s: float) -> None:
        # Begin what comes next: a mixed step, a prefill, or decoding until a request ends.
        self._begun_s, self._idle = now_s, False
        if self._mixed_tokens and (self._underway or (self.waiting and self._fits(self.waiting.first))):
            self._mixed(now_s)
        elif self.waiting and not self._mixed_tokens and self._fits(self.waiting.first):
            job = self._take(now_s)
            seconds = self._cost.prefill_s(job.prompt_tokens, job.held_tokens)
            self._later(now_s + seconds, lambda at_s: self._on_prefill_end(job, at_s))
        elif len(self.batch):
            self._decode_until(self.batch.steps_to_first_end())
        else:
            self._idle = True

    def _take(self, now_s: float) -> Job:
        job = self.waiting.pop()
        held_tokens = self._pool.load(self.number, job.ids, None, now_s).held_tokens
        job.begun_s, job.held_tokens = now_s, min(held_tokens, job.prompt_tokens - 1)
        job.computed_tokens = job.prompt_tokens - job.held_tokens
        self._underway.append((job, job.held_tokens))
        return job

    def _on_prefill_end(self, job: Job, now_s: float) -> None:
        seconds = now_s - self._begun_s
        job.spent_s += seconds
        self.busy_s += seconds
        self._underway = []
        self._first_token(job, now_s)
        self._next(now_s)

    def _first_token(self, job: Job, now_s: float) -> None:
        stream = self._listeners.coupled_prefilled(job, now_s)
        if stream is not None:
            self.batch.join(stream)

    def _mixed(self, now_s: float) -> None:
        # Begin a step that decodes and prefills.
        # Each decoding request takes one token of the budget; prompts share the remaining tokens in order of arrival
        # (Sarathi-Serve, OSDI'24; vLLM's chunked prefill). The step reads the weights once for both, which is the
        # purpose of mixing, and lasts as long as the longer of all reading and all computing.
        size = len(self.batch)
        budget = self._mixed_tokens - size
        fixed_s, read_s, read_per_s, flops_s, flops_per_s = self._cost.decode_parts(size)
        read_s += read_per_s * self.batch.contexts
        flops_s += flops_per_s * self.batch.contexts
        speed = self._cost.machine.flops_per_s * self._cost.mfu
        done: list[Job] = []
        at, chunks_s = 0, 0.0
        while budget > 0:
            if at == len(self._underway):
                if not (self.waiting and self._fits(self.waiting.first)):
                    break
                started = self._take(now_s)
                overhead_s = self._cost.fixed_s + self._cost.cached_token_s * started.held_tokens
                fixed_s += overhead_s
                chunks_s += overhead_s
                started.spent_s += overhead_s
            job, position = self._underway[at]
            end = min(position + budget, job.prompt_tokens)
            work_s = self._cost.prefill_flops(end, position) / speed
            flops_s += work_s
            chunks_s += work_s
            read_s += read_per_s * position  # a later chunk reads the KV of earlier chunks
            job.spent_s += work_s
            budget -= end - position
            self._underway[at] = (job, end)
            if end == job.prompt_tokens:
                done.append(job)
            at += 1
        seconds = fixed_s + max(read_s, flops_s)
        self._later(now_s + seconds, lambda at_s: self._mixed_done(done, chunks_s, at_s))

    def _mixed_done(self, jobs: list[Job], chunks_s: float, now_s: float) -> None:
        self.busy_s += chunks_s
        if len(self.batch):
            self.decode_busy_s += now_s - self._begun_s - chunks_s
        done = self.batch.mixed_step(self._begun_s, now_s)
        self._underway = [entry for entry in self._underway if entry[0] not in jobs]
        for stream in done:
            self._listeners.answered(stream, now_s)
        for job in jobs:
            self._first_token(job, now_s)
        self._next(now_s)

    def _decode_until(self, steps: int) -> None:
        self._planned = steps
        self._later(self._begun_s + self.batch.seconds(steps), self._decoded)

    def _decoded(self, now_s: float) -> None:
        self.decode_busy_s += now_s - self._begun_s
        done = self.batch.run(self._begun_s, self._planned, now_s)
        self._planned = 0
        for stream in done:
            self._listeners.answered(stream, now_s)
        self._next(now_s)

    def _later(self, at_s: float, event: Callable[[float], None]) -> None:
        # A later plan or a failure cancels the event.
        self._version += 1
        version = self._version
        self._clock.at(at_s, lambda now_s: event(now_s) if version == self._version else None)


class DecodeInstance:
    """Instance that only decodes, with a queue for requests that do not fit into its memory.

    Requests join between steps, by priority, then arrival; the first that does not fit blocks the queue. First tokens
    computed here hold up the batch, with a step between two, as in engines that take one prompt per turn.
    """

    def __init__(self, clock: Clock, setup: ClusterSetup, batch: DecodeBatch, listeners: Listeners) -> None:
        self._clock, self._listeners = clock, listeners
        self._kv_tokens, self._most_batch = setup.kv_tokens, setup.most_batch
        self._taking: DecodeStream | None = None
        self.batch = batch
        self.waiting: PriorityQueue[DecodeStream] = PriorityQueue()
        self.busy_s = 0.0
        self._begun_s = 0.0
        self._planned = 0
        self._version = 0

    def takes(self, kv_tokens: int) -> bool:
        return kv_tokens <= self._kv_tokens

    def arrive(self, stream: DecodeStream, now_s: float) -> None:
        """Queue a stream whose KV has arrived, which ``takes`` and which has a step to do."""
        self.waiting.push(stream)
        if self._taking is not None:
            return
        if not self._planned:
            self._plan(now_s)
        # If it is not first in the queue, the requests before it do not fit either, so the plan stays.
        elif self.waiting.first is stream and self._fits(stream):
            steps = self.batch.steps_until(now_s - self._begun_s, self._planned)
            if steps < self._planned:
                self._until(steps)

    def fail(self, now_s: float) -> list[DecodeStream]:
        taking = [] if self._taking is None else [self._taking]
        if self._planned or taking:
            self.busy_s += now_s - self._begun_s
        self._planned, self._taking, self._version = 0, None, self._version + 1
        return self.batch.clear() + taking + self.waiting.clear()

    def turn_ends_s(self, now_s: float) -> float:
        """Return the end of the step in progress; ``now_s`` if idle."""
        if self._taking is not None:
            size, contexts = len(self.batch) + 1, self.batch.contexts + self._taking.prompt_tokens + 1
            return self._begun_s + self._taking.work_s + self.batch.steps.step_s(size, contexts)
        if not self._planned:
            return now_s
        return self._begun_s + self.batch.seconds(self.batch.steps_until(now_s - self._begun_s, self._planned))

    def step_s(self, now_s: float) -> float:
        if not self._planned:
            return 0.0
        return self.batch.step_s(self.batch.steps_until(now_s - self._begun_s, self._planned) - 1)

    def needed_share(self) -> float:
        """Return the needed share of the KV memory, or of the longest batch, if larger."""
        tokens = self.batch.reserved + sum(stream.kv_tokens for stream in self.waiting)
        return max(tokens / self._kv_tokens, (len(self.batch) + len(self.waiting)) / self._most_batch)

    def _fits(self, stream: DecodeStream) -> bool:
        batch = self.batch
        return batch.reserved + stream.kv_tokens <= self._kv_tokens and len(batch) < self._most_batch

    def _plan(self, now_s: float) -> None:
        # Join the waiting requests that fit, and decode until the first end.
        self._begun_s = now_s
        while self.waiting and self._fits(self.waiting.first):
            stream = self.waiting.pop()
            if stream.work_s:
                self._take(stream, now_s)
                return
            self.batch.join(stream)
            self._listeners.joined(stream, now_s)
        if len(self.batch):
            self._until(self.batch.steps_to_first_end())
        else:
            self._planned = 0

    def _take(self, stream: DecodeStream, now_s: float) -> None:
        # Compute the first token of a prompt from the store, while the batch waits.
        self._planned, self._taking, self._version = 0, stream, self._version + 1
        version = self._version
        self._clock.at(now_s + stream.work_s, lambda at_s: self._on_prompt_taken(version, at_s))

    def _on_prompt_taken(self, version: int, now_s: float) -> None:
        # Report the first token, join the batch, and decode: a single step if another prompt fits.
        stream = self._taking
        if version != self._version or stream is None:
            return
        self.busy_s += now_s - self._begun_s
        self._taking, self._begun_s = None, now_s
        stream.first_token_s = now_s
        self._listeners.first(stream, now_s)
        if stream.output_tokens > 1:
            self.batch.join(stream)
            self._listeners.joined(stream, now_s)
        if not len(self.batch):
            self._plan(now_s)
        elif self.waiting and self._fits(self.waiting.first):
            self._until(1)
        else:
            self._until(self.batch.steps_to_first_end())

    def _until(self, steps: int) -> None:
        self._planned, self._version = steps, self._version + 1
        version = self._version
        self._clock.at(self._begun_s + self.batch.seconds(steps), lambda at_s: self._boundary(version, at_s))

    def _boundary(self, version: int, now_s: float) -> None:
        # End the planned steps, unless a newer plan has replaced them.
        if version != self._version:
            return
        self.busy_s += now_s - self._begun_s
        done = self.batch.run(self._begun_s, self._planned, now_s)
        for stream in done:
            self._listeners.answered(stream, now_s)
        self._plan(now_s)
