"""An instance that prefills: one machine, or several as a pipeline; one line before it.

The line is served by priority, then in the order of coming. What of a prompt is cached is seen when its service begins.
What a plan loads from elsewhere began to load when the request was placed: the rest of the load is hidden behind
computing. First the tokens before what is loaded (Cake's front), then, layer by layer as layers come, those behind it:
``loaded_s``. KV that is held comes from memory to the accelerators in the same way. The next request begins when the
first machine is free.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from skymemory.conductor.cost_model import CostModel
from skymemory.conductor.cost_model.transfer import loaded_s
from skymemory.sim.cluster.clock import Clock
from skymemory.sim.cluster.job import Job
from skymemory.sim.cluster.pipeline import Pipeline
from skymemory.sim.cluster.pool_base import LOCAL, SSD_TIER, Loaded, Pool

Told = Callable[[Job, float], None]


@dataclass(frozen=True, slots=True)
class Service:
    """What a prompt's prefill consists of, as found when it begins."""

    held_tokens: int
    front: tuple[int, int]
    """Tokens computed while the rest is loaded: from, to."""
    after: int
    """All tokens from here on are computed; those between are loaded."""
    sources: Mapping[str, int]
    rest_s: float
    """Until all that is loaded has come; at least what memory takes to hand over what is held."""

    def computed_tokens(self, prompt_tokens: int) -> int:
        return self.front[1] - self.front[0] + prompt_tokens - self.after


class PrefillInstance:
    """``begun`` is told when a service begins and its end is known, ``done`` when its first token is there."""

    def __init__(
        self,
        number: int,
        clock: Clock,
        cost: CostModel,
        pipeline: Pipeline,
        pool: Pool,
        begun: Callable[[Job, float, float], None],
        done: Told,
    ) -> None:
        self.number = number
        self._clock, self._cost, self._pipeline, self._pool = clock, cost, pipeline, pool
        self._begun, self._done = begun, done
        self._memory = pool.media()["dram"]
        self.waiting: list[tuple[int, int, Job]] = []
        """Heap: priority (negative), order of coming."""
        self.waiting_work_s = 0.0
        """Of those waiting, as believed."""
        self.serving: dict[Job, float] = {}
        """In service, each with its end; more than one in a pipeline."""
        self.busy_s = 0.0
        self._came = 0
        self._free = True
        self._lives = 0
        """Events of an earlier life are stale."""

    def arrive(self, job: Job, now_s: float) -> None:
        self._came += 1
        heapq.heappush(self.waiting, (-job.priority, self._came, job))
        self.waiting_work_s += job.work_s
        if self._free:
            self._serve(now_s)

    def fail(self, now_s: float) -> list[Job]:
        """It dies: who was there."""
        for job, end_s in self.serving.items():
            undone_s = min(job.spent_s, max(0.0, end_s - now_s))
            job.spent_s -= undone_s
            self.busy_s -= undone_s / self._pipeline.machines
        jobs = [*self.serving, *(job for *_, job in sorted(self.waiting, key=lambda entry: entry[:2]))]
        self.serving, self.waiting, self.waiting_work_s, self._free = {}, [], 0.0, True
        self._pipeline.clear()
        self._lives += 1
        return jobs

    def predicted_ttft_s(self, now_s: float) -> float:
        """Of the one that will be served last: its age, and all the work that is there, as believed."""
        rest_s = max((end_s - now_s for end_s in self.serving.values()), default=0.0)
        if self.waiting:
            return now_s - max(self.waiting, key=lambda entry: entry[1])[2].at_s + rest_s + self.waiting_work_s
        return max((end_s - job.at_s for job, end_s in self.serving.items()), default=0.0)

    def _serve(self, now_s: float) -> None:
        job = heapq.heappop(self.waiting)[2]
        self.waiting_work_s = self.waiting_work_s - job.work_s if self.waiting else 0.0
        service = self.service(job, now_s)
        job.begun_s, job.held_tokens, job.sources = now_s, service.held_tokens, service.sources
        job.computed_tokens = service.computed_tokens(job.prompt_tokens)
        free_s, done_s, work_s = self._timed(service, job.prompt_tokens, now_s)
        job.spent_s += work_s * self._pipeline.machines
        self.busy_s += work_s
        self._free, life = False, self._lives
        self.serving[job] = done_s
        self._begun(job, now_s, done_s)
        self._clock.at(done_s, lambda at_s: self._finish(job, life, at_s))
        if self._pipeline.machines > 1:
            self._clock.at(free_s, lambda at_s: self._next(life, at_s))

    def service(self, job: Job, now_s: float) -> Service:
        """What is there, and what must be computed: of every prompt at least the last token."""
        tokens, per_block = job.prompt_tokens, self._pool.block_tokens
        loading = job.loading or self._pool.load(self.number, job.ids, None, now_s)
        held, loaded = loading.held_tokens, loading.loaded_tokens
        begin = loading.split_tokens if loaded else held
        rest_s = max(0.0, loading.done_s - now_s)  # what is held may be on its way too, or on an SSD
        if job.loading is not None and not rest_s:
            # All has come. What others computed here meanwhile is there too, and may go further.
            here = self._pool.leading(self.number, job.ids) * per_block
            if here >= begin + loaded:
                begin = held = here - loaded
        end = min(begin + loaded, tokens - 1)
        begin, held = min(begin, end), min(held, end)
        sources = _loaded_by_source(loading, end - begin)
        memory_s = self._memory.seconds(self._cost.kv_bytes(held + end - begin))
        return Service(held, (held, begin), end, sources, max(rest_s, memory_s))

    def _timed(self, service: Service, tokens: int, now_s: float) -> tuple[float, float, float]:
        """When the first machine is free, when all is done, and seconds of computing at each machine."""
        pipeline = self._pipeline
        front = pipeline.chunks_s(*service.front)
        after = pipeline.chunks_s(service.after, tokens)
        front_s, after_s = sum(front), sum(after)
        fixed_s = self._cost.fixed_s + self._cost.cached_token_s * (tokens - service.computed_tokens(tokens))
        rest_s = max(0.0, service.rest_s - front_s)
        held_up_s = loaded_s(rest_s, after_s, self._cost.shape.layers) - after_s
        pipeline.hold(now_s)
        free_s, done_s = pipeline.pass_through([*front, *after], now_s + held_up_s + fixed_s)
        return free_s, done_s, front_s + after_s + fixed_s

    def _next(self, life: int, now_s: float) -> None:
        if life == self._lives:
            self._free = True
            if self.waiting:
                self._serve(now_s)

    def _finish(self, job: Job, life: int, now_s: float) -> None:
        if life != self._lives:
            return
        del self.serving[job]
        self._done(job, now_s)
        if self._pipeline.machines == 1:
            self._next(life, now_s)


def _loaded_by_source(loading: Loaded, loaded: int) -> dict[str, int]:
    """Of what was loaded, the ``loaded`` tokens that are used; a last block that is cut short is its last source's."""
    sources: dict[str, int] = {}
    for source, tokens in loading.sources.items():
        if source not in (LOCAL, SSD_TIER) and tokens and loaded > 0:
            sources[source] = min(tokens, loaded)
            loaded -= sources[source]
    return sources
