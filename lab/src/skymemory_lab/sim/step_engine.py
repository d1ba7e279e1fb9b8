"""Engine of steps, as vLLM with chunked prefill: a step computes a token of each answer, and chunks of prompts."""

from __future__ import annotations

import heapq
from collections import deque

from skymemory_lab.sim.engines import MOST_RUNNING, STEP_TOKENS, EngineListener, Later, RoomyEngine, SimulatedJob
from skymemory_lab.sim.routing_setup import RoutingSetup
from skymemory_lab.sim.trace import BLOCK_TOKENS


class StepEngine(RoomyEngine):
    """Steps of at most ``STEP_TOKENS`` tokens: one for each running answer, the rest for prompts in order of arrival.

    A step takes the time of its chunks (differences of ``CostModel.prefill_s``, so that the context counts), and with n
    answers ``decode_token_s + (n − 1) · decode_more_s``. First tokens come at the end of the step that ends the prompt.
    """

    # Equal steps are planned together: with answers alone up to the first that ends (an arrival ends the plan after the
    # current step), and while the first prompt needs the whole budget (an arrival changes nothing).

    def __init__(self, number: int, setup: RoutingSetup, later: Later, listener: EngineListener) -> None:
        super().__init__(number, setup, later, listener)
        self._prefilling: deque[SimulatedJob] = deque()
        self._decoding: list[tuple[int, int, SimulatedJob]] = []  # with the step that ends the answer
        self._steps = self._count = 0
        # The plan: its steps, begin, seconds per step if only answers run, and tokens per prompt.
        self._planned, self._plan = 0, 0
        self._plan_s = self._step_s = 0.0
        self._chunks: list[tuple[SimulatedJob, int]] = []

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def arrive(self, job: SimulatedJob, now_s: float) -> None:
        self._queue.append(job)
        if not self._planned:
            self._begin(now_s)
        elif not self._chunks and len(self._queue) == 1 and self.running < MOST_RUNNING:
            steps = int((now_s - self._plan_s) / self._step_s) + 1
            if steps < self._planned:
                self._schedule(steps, self._plan_s + steps * self._step_s)

    def _schedule(self, steps: int, end_s: float) -> None:
        self._planned = steps
        self._plan += 1
        plan = self._plan
        self._at(end_s, lambda at_s: self._end_steps(at_s) if plan == self._plan else None)

    def _begin(self, now_s: float) -> None:
        # Plan the next steps: of answers alone, of whole budgets for the first prompt, or one of several prompts.
        self._plan_s, self._chunks, self._planned = now_s, [], 0
        answers = len(self._decoding)
        decode_s, budget = self._decode_s(answers), STEP_TOKENS - answers
        first_end = self._decoding[0][0] - self._steps if answers else None
        if not self._prefilling and (job := self._take(now_s)) is not None:
            self._prefilling.append(job)
        if not self._prefilling:
            if first_end is None:
                return
            self._step_s = decode_s * self._factor(now_s)
            steps = first_end
            # A plan ends with the step in which the server's speed changes.
            if now_s + steps * self._step_s > (edge_s := self._next_edge_s(now_s)):
                steps = min(steps, int((edge_s - now_s) / self._step_s) + 1)
            self._schedule(steps, now_s + steps * self._step_s)
            return
        steps = self._whole_budgets(budget, first_end)
        seconds_s = self._chunk_s(self._prefilling[0], steps * budget) + steps * decode_s if steps else 0.0
        if steps > 1 and now_s + seconds_s * self._factor(now_s) > self._next_edge_s(now_s):
            steps, seconds_s = 1, self._chunk_s(self._prefilling[0], budget) + decode_s
        if steps:
            self._add_chunk(self._prefilling[0], steps * budget)
        else:
            steps, seconds_s = 1, self._fill(budget, now_s) + decode_s
        self._schedule(steps, now_s + seconds_s * self._factor(now_s))

    def _decode_s(self, answers: int) -> float:
        return self._setup.decode_token_s + (answers - 1) * self._setup.decode_more_s if answers else 0.0

    def _whole_budgets(self, budget: int, most: int | None) -> int:
        first = self._prefilling[0]
        steps = (first.request.input_tokens - first.position) // budget
        return steps if most is None else min(steps, most)

    def _chunk_s(self, job: SimulatedJob, tokens: int) -> float:
        cost, end = self._cost, job.position + tokens
        seconds = cost.prefill_s(end, job.hit_tokens)
        return seconds - cost.prefill_s(job.position, job.hit_tokens) if job.position > job.hit_tokens else seconds

    def _fill(self, budget: int, now_s: float) -> float:
        # Give the step's tokens to prompts; return the seconds of their chunks.
        seconds, at = 0.0, 0
        while budget > 0:
            if at == len(self._prefilling):
                job = self._take(now_s)
                if job is None:
                    break
                self._prefilling.append(job)
            job = self._prefilling[at]
            tokens = min(budget, job.request.input_tokens - job.position)
            self._add_chunk(job, tokens)
            seconds += self._chunk_s(job, tokens)
            budget -= tokens
            at += 1
        return seconds

    def _add_chunk(self, job: SimulatedJob, tokens: int) -> None:
        assert job.room is not None
        self._chunks.append((job, tokens))
        self._cache.store(job.room, (job.position + tokens) // BLOCK_TOKENS)

    def _end_steps(self, now_s: float) -> None:
        self._steps += self._planned
        for job, tokens in self._chunks:
            job.position += tokens
        while self._decoding and self._decoding[0][0] <= self._steps:
            self._on_answered(heapq.heappop(self._decoding)[2], now_s)
        while self._prefilling and self._prefilling[0].position == self._prefilling[0].request.input_tokens:
            job = self._prefilling.popleft()
            self._on_prefilled(job, now_s)
            if job.request.output_tokens <= 1:
                self._on_answered(job, now_s)
            else:
                self._count += 1
                heapq.heappush(self._decoding, (self._steps + job.request.output_tokens - 1, self._count, job))
        self._begin(now_s)

    def abort(self, now_s: float) -> list[SimulatedJob]:
        self._version += 1
        running = [*self._prefilling, *(job for _, _, job in self._decoding)]
        for job in running:
            self._release(job)
        jobs = [*running, *self._queue]
        self._queue.clear()
        self._prefilling.clear()
        self._decoding.clear()
        self._chunks = []
        self._planned = 0
        return jobs
