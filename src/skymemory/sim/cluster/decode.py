"""An instance that decodes: continuous batching, a queue before it when its memory is full.

Requests join between two steps, in the order of priority and then of coming; the first of the line that does not fit
holds up those behind it. Steps are planned as far as nothing changes: up to the first end of an answer, or to the end
of the step in which somebody comes who fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from skymemory.sim.cluster.batch import Batch, Stream
from skymemory.sim.cluster.clock import Clock
from skymemory.sim.cluster.gaps import Gaps
from skymemory.sim.cluster.steps import Steps

Told = Callable[[Stream, float], None]


class DecodeInstance:
    """``kv_tokens`` of memory for KV; at most ``most_batch`` requests at once. ``joined`` and ``ended`` are told."""

    def __init__(
        self, clock: Clock, steps: Steps, gaps: Gaps, kv_tokens: int, most_batch: int, joined: Told, ended: Told
    ) -> None:
        self._clock = clock
        self._kv_tokens, self._most_batch = kv_tokens, most_batch
        self._joined, self._ended = joined, ended
        self.batch = Batch(steps, gaps)
        self.waiting: list[tuple[int, int, Stream]] = []
        """Heap: priority (negative), order of coming."""
        self.busy_s = 0.0
        self._came = 0
        self._begun_s = 0.0
        self._planned = 0
        """Steps from ``_begun_s`` on; 0: idle."""
        self._version = 0
        """Of the plan: an event of another one is stale."""

    def takes(self, kv_tokens: int) -> bool:
        """Whether it could ever hold that much."""
        return kv_tokens <= self._kv_tokens

    def arrive(self, stream: Stream, now_s: float) -> None:
        """Its KV has come. It must be one that it ``takes``, with a step to do."""
        self._came += 1
        heapq.heappush(self.waiting, (-stream.priority, self._came, stream))
        if not self._planned:
            self._plan(now_s)
        elif self.waiting[0][2] is stream and self._fits(stream):
            steps = self.batch.steps_until(now_s - self._begun_s, self._planned)
            if steps < self._planned:
                self._until(steps)

    def fail(self, now_s: float) -> list[Stream]:
        """It dies: who was there."""
        if self._planned:
            self.busy_s += now_s - self._begun_s
        self._planned, self._version = 0, self._version + 1
        streams = self.batch.clear() + [stream for *_, stream in sorted(self.waiting, key=lambda entry: entry[:2])]
        self.waiting = []
        return streams

    def step_s(self, now_s: float) -> float:
        """Seconds of the step that it is doing; 0: idle."""
        if not self._planned:
            return 0.0
        return self.batch.step_s(self.batch.steps_until(now_s - self._begun_s, self._planned) - 1)

    def _fits(self, stream: Stream) -> bool:
        batch = self.batch
        return batch.reserved + stream.kv_tokens <= self._kv_tokens and len(batch) < self._most_batch

    def _plan(self, now_s: float) -> None:
        """Between two steps: who fits joins, and the next steps are planned."""
        while self.waiting and self._fits(self.waiting[0][2]):
            stream = heapq.heappop(self.waiting)[2]
            self.batch.join(stream)
            self._joined(stream, now_s)
        self._begun_s = now_s
        if len(self.batch):
            self._until(self.batch.steps_to_first_end())
        else:
            self._planned = 0

    def _until(self, steps: int) -> None:
        self._planned, self._version = steps, self._version + 1
        version = self._version
        self._clock.at(self._begun_s + self.batch.seconds(steps), lambda at_s: self._boundary(version, at_s))

    def _boundary(self, version: int, now_s: float) -> None:
        if version != self._version:
            return
        self.busy_s += now_s - self._begun_s
        gone = self.batch.run(self._begun_s, self._planned, now_s)
        for stream in gone:
            self._ended(stream, now_s)
        self._plan(now_s)
