"""A simulated prefill instance."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skymemory.conductor.cost_model import CostModel, loaded_s
from skymemory.errors import InvalidInput
from skymemory_lab.sim.clock import Clock
from skymemory_lab.sim.cluster.job import Job, Listeners, PrefillQueue
from skymemory_lab.sim.cluster.pool import LOCAL, ClusterPool


@dataclass(frozen=True, slots=True)
class PrefillService:
    front: tuple[int, int]
    """Range of tokens computed during the load."""
    after: int
    """First token computed after the load."""
    sources: Mapping[str, int]
    """Tokens not computed, by source."""
    rest_s: float
    """Time until they are available; at least the transfer from memory."""

    def computed_tokens(self, prompt_tokens: int) -> int:
        return self.front[1] - self.front[0] + prompt_tokens - self.after


class PrefillInstance:
    """Machine, or pipeline of machines, with a queue.

    1. The queue is served by priority, then arrival. Cached tokens are looked up when the prefill starts.
    2. Computing hides the remaining load: first the tokens before the loaded part (Cake's front), then those after it,
       layer by layer. KV in memory moves to the accelerators likewise.
    3. The next request starts when the first machine is free.
    """

    def __init__(
        self,
        number: int,
        clock: Clock,
        pipeline: Pipeline,
        pool: ClusterPool,
        listeners: Listeners,
    ) -> None:
        self.number = number
        self._clock, self._cost, self._pipeline, self._pool = clock, pipeline.cost, pipeline, pool
        self._listeners = listeners
        self._memory = pool.settings.dram
        self.waiting = PrefillQueue()
        self.serving: dict[Job, float] = {}
        """Ends of the prefills in progress."""
        self.busy_s = 0.0
        self._free = True
        self._lives = 0  # number of failures. Events of earlier lives are ignored.

    def arrive(self, job: Job, now_s: float) -> None:
        self.waiting.push(job)
        if self._free:
            self._serve(now_s)

    def fail(self, now_s: float) -> list[Job]:
        # Machine time until now stays accounted; only the remainder of each prefill is taken back.
        for job, end_s in self.serving.items():
            undone_s = min(job.spent_s, max(0.0, end_s - now_s))
            job.spent_s -= undone_s
            self.busy_s -= undone_s / self._pipeline.machines
        jobs = [*self.serving, *self.waiting.clear()]
        self.serving, self._free = {}, True
        self._pipeline.clear()
        self._lives += 1
        return jobs

    def backlog_s(self, now_s: float) -> float:
        return max((end_s - now_s for end_s in self.serving.values()), default=0.0) + self.waiting.work_s

    def predicted_ttft_s(self, now_s: float) -> float:
        """Return the newest request's time to first token, or the longest in prefill."""
        if self.waiting:
            return now_s - self.waiting.newest().at_s + self.backlog_s(now_s)
        return max((end_s - job.at_s for job, end_s in self.serving.items()), default=0.0)

    def _serve(self, now_s: float) -> None:
        job = self.waiting.pop()
        service = self.service(job, now_s)
        job.begun_s, job.held_tokens = now_s, service.sources.get(LOCAL, 0)
        job.sources = {source: count for source, count in service.sources.items() if source != LOCAL and count}
        job.computed_tokens = service.computed_tokens(job.prompt_tokens)
        free_s, done_s, work_s = self._timed(service, job.prompt_tokens, now_s)
        job.spent_s += work_s * self._pipeline.machines
        self.busy_s += work_s
        # A failure may precede the events below, so they carry the life in which they were scheduled.
        self._free, life = False, self._lives
        self.serving[job] = done_s
        self._listeners.begun(job, now_s, done_s)
        self._clock.at(done_s, lambda at_s: self._finish(job, life, at_s))
        if self._pipeline.machines > 1:
            self._clock.at(free_s, lambda at_s: self._next(life, at_s))

    def service(self, job: Job, now_s: float) -> PrefillService:
        """Determine the held, loaded and computed parts. At least the last token is computed."""
        tokens, per_block = job.prompt_tokens, self._pool.block_tokens
        loading = job.loading or self._pool.load(self.number, job.ids, None, now_s)
        # | held | front: computed during the load | loaded | after: computed |      (``request.Plan``)
        held_tokens, loaded = loading.held_tokens, loading.loaded_tokens
        begin = loading.split_tokens if loaded else held_tokens
        remaining_s = max(0.0, loading.done_s - now_s)
        sources = dict(loading.sources)
        if job.loading is not None and not remaining_s:
            # The load is complete. Meanwhile other requests may have added blocks after it.
            local_tokens = self._pool.leading(self.number, job.ids) * per_block
            if local_tokens >= begin + loaded:
                sources[LOCAL] = sources.get(LOCAL, 0) + local_tokens - held_tokens - loaded
                begin = held_tokens = local_tokens - loaded
        end = min(begin + loaded, tokens - 1)
        begin, held_tokens = min(begin, end), min(held_tokens, end)
        cached = held_tokens + end - begin
        memory_s = self._memory.seconds(self._cost.kv_bytes(cached))
        return PrefillService((held_tokens, begin), end, _first_of(sources, cached), max(remaining_s, memory_s))

    def _timed(self, service: PrefillService, tokens: int, now_s: float) -> tuple[float, float, float]:
        """Return when the first machine is free, when all is done, and compute seconds per machine."""
        pipeline = self._pipeline
        front = pipeline.chunks_s(*service.front)
        after = pipeline.chunks_s(service.after, tokens)
        front_s, after_s = sum(front), sum(after)
        fixed_s = self._cost.fixed_s + self._cost.cached_token_s * (tokens - service.computed_tokens(tokens))
        remaining_s = max(0.0, service.rest_s - front_s)
        held_up_s = loaded_s(remaining_s, after_s, self._cost.shape.layers) - after_s
        free_s, done_s = pipeline.pass_through([*front, *after], now_s + held_up_s + fixed_s)
        return free_s, done_s, front_s + after_s + fixed_s

    def _next(self, life: int, now_s: float) -> None:
        # Free the first machine, and serve the next request.
        if life == self._lives:
            self._free = True
            if self.waiting:
                self._serve(now_s)

    def _finish(self, job: Job, life: int, now_s: float) -> None:
        if life != self._lives:
            return
        del self.serving[job]
        self._listeners.prefilled(job, now_s)
        if self._pipeline.machines == 1:
            self._next(life, now_s)


def _first_of(sources: Mapping[str, int], tokens: int) -> dict[str, int]:
    # Return the sources' counts, cut to ``tokens`` in total.
    first: dict[str, int] = {}
    for source, count in sources.items():
        first[source] = min(count, tokens)
        tokens -= first[source]
    return first


class Pipeline:
    """Chunked pipeline over ``machines``, each with a share of the layers.

    An empty pipeline takes ``cost_model.pipelined_s``, more after longer chunks of another request.
    """

    def __init__(self, cost: CostModel, machines: int, chunk_tokens: int) -> None:
        if machines < 1 or chunk_tokens < 1:
            raise InvalidInput(f"{machines} machines and chunks of {chunk_tokens} tokens; expected at least 1 each")
        self.cost, self.machines, self.chunk_tokens = cost, machines, chunk_tokens
        self._speed = cost.machine.flops_per_s * cost.mfu * machines
        self._free_s = [0.0] * machines

    def chunks_s(self, begin: int, end: int) -> list[float]:
        if end <= begin:
            return []
        flops = self.cost.prefill_flops
        if self.machines == 1:
            return [flops(end, begin) / self._speed]
        cuts = [*range(begin, end, self.chunk_tokens), end]
        return [flops(cut, before) / self._speed for before, cut in itertools.pairwise(cuts)]

    def pass_through(self, chunks_s: Sequence[float], begin_s: float) -> tuple[float, float]:
        """Pass chunks through. Return when the first machine is free and when all is done."""
        free_s = self._free_s
        done_s = begin_s
        # A chunk starts at a machine after it has left the previous machine and the previous chunk has left this
        # machine.
        for chunk_s in chunks_s:
            done_s = begin_s
            for machine, before_s in enumerate(free_s):
                done_s = (before_s if before_s > done_s else done_s) + chunk_s
                free_s[machine] = done_s
        return (max(begin_s, free_s[0]) if chunks_s else begin_s), done_s

    def clear(self) -> None:
        self._free_s = [0.0] * self.machines
