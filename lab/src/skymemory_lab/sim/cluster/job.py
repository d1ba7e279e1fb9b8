"""Requests, decode batches and token gaps of the simulated cluster."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from skymemory.conductor.cost_model import CostModel
from skymemory.conductor.request import Request
from skymemory.conductor.scheduler import ScheduledRequest
from skymemory_lab.sim.cluster.pool import PrefixOnNode


@dataclass(slots=True, eq=False)
class Job:
    """Request in the simulation. Fields are of its last attempt, but ``spent_s`` sums all."""

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    """Answer length, at least 1: the prefill gives a token."""
    ids: tuple[int, ...]  # blocks of the prompt
    asked: Request = field(repr=False)  # as schedulers see it
    placement: ScheduledRequest | None = None
    prefill: int = -1  # slot of its prefill instance
    decode: int = -1
    attempts: int = 0
    work_s: float = 0.0  # estimate of its prefill
    loading: PrefixOnNode | None = None
    begun_s: float = -1.0  # start of its prefill
    first_token_s: float = -1.0
    held_tokens: int = 0  # found in the instance's memory
    sources: Mapping[str, int] = field(default_factory=dict)  # loaded tokens by tier
    computed_tokens: int = 0
    spent_s: float = 0.0  # of machines' time on its prefill
    there_s: float = 0.0
    """Arrival of its last KV at the decode instance."""
    prefilled: bool = False
    leaving: bool = False
    """True if its KV is in transfer after the prefill."""
    decoding: bool = False
    over: bool = False

    @property
    def priority(self) -> int:
        return self.asked.priority

    @property
    def required_placement(self) -> ScheduledRequest:
        assert self.placement is not None, "it was admitted"
        return self.placement

    def restart(self, placement: ScheduledRequest, prefill: int) -> None:
        self.placement, self.prefill, self.attempts = placement, prefill, self.attempts + 1
        self.loading = None
        self.begun_s = self.first_token_s = -1.0
        self.prefilled = self.leaving = self.decoding = False

    def stream(self) -> DecodeStream:
        return DecodeStream(self.number, self.prompt_tokens, self.output_tokens, self.first_token_s, self.priority)

    def stream_after(self, work_s: float) -> DecodeStream:
        return DecodeStream(self.number, self.prompt_tokens, self.output_tokens, -1.0, self.priority, work_s=work_s)


@dataclass(slots=True, eq=False)
class DecodeStream:
    """Request at a decode instance."""

    number: int
    prompt_tokens: int
    output_tokens: int
    first_token_s: float
    priority: int = 0
    work_s: float = 0.0
    """Time of the first token at the decode instance; 0: the prefill gave it."""
    worst_s: float = 0.0  # longest time between two tokens
    joined: int = 0  # run of the batch in which it joined
    came: int = 0  # order of joining

    @property
    def kv_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Listeners:
    """Callbacks of instances, with the simulated time."""

    begun: Callable[[Job, float, float], None]
    prefilled: Callable[[Job, float], None]
    coupled_prefilled: Callable[[Job, float], DecodeStream | None]
    joined: Callable[[DecodeStream, float], None]
    answered: Callable[[DecodeStream, float], None]
    first: Callable[[DecodeStream, float], None]
    """First token of a stream, computed by a decode instance."""


Waiting = TypeVar("Waiting", Job, DecodeStream)


class PriorityQueue(Generic[Waiting]):
    def __init__(self) -> None:
        # Entries of negative priority, arrival number, request.
        self._heap: list[tuple[int, int, Waiting]] = []
        self._came = 0

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Waiting]:
        """Iterate in no particular order."""
        return (request for *_, request in self._heap)

    @property
    def first(self) -> Waiting:
        return self._heap[0][2]

    def push(self, request: Waiting) -> None:
        self._came += 1
        heapq.heappush(self._heap, (-request.priority, self._came, request))

    def pop(self) -> Waiting:
        return heapq.heappop(self._heap)[2]

    def clear(self) -> list[Waiting]:
        waiting = [request for *_, request in sorted(self._heap, key=lambda entry: entry[:2])]
        self._heap = []
        return waiting


class PrefillQueue(PriorityQueue[Job]):
    """Queue with its estimated prefill time, ``work_s``."""

    def __init__(self) -> None:
        super().__init__()
        self.work_s = 0.0
        self._newest: Job | None = None

    def push(self, request: Job) -> None:
        super().push(request)
        self._newest = request
        self.work_s += request.work_s

    def pop(self) -> Job:
        job = super().pop()
        self.work_s = (
            self.work_s - job.work_s if self._heap else 0.0
        )  # exactly 0, because rounding errors would accumulate
        return job

    def clear(self) -> list[Job]:
        self.work_s, self._newest = 0.0, None
        return super().clear()

    def newest(self) -> Job:
        """Return the latest arrival. The queue must not be empty."""
        newest = self._newest
        if newest is None or newest.begun_s >= 0:  # served early because of its priority
            newest = max(self._heap, key=lambda entry: entry[1])[2]
        return newest


# Closed forms that replace the simulation of each step:
#
#   contexts  grow by one token per request and step, so ``Steps`` sums any number of steps
#   ends      are known when a request joins: after ``output_tokens - 1`` steps; a heap gives the next end
#   gaps      of all requests but the fresh ones are equal in a step: the time since the end of the last step, including
#             other work in between; the first gap of a fresh request starts at its first token, from the prefill
#   longest   gap of a request: the maximum since it joined, from a stack of decreasing peaks (as in a sliding-window
#             maximum), so a step costs O(1) amortised at any batch size


class DecodeBatch:
    """Decode batch, which changes only between steps.

    A context is the prompt plus the tokens so far. The prefill gave the first token, so ``n`` tokens take ``n - 1``
    steps, the first with ``prompt + 1``.
    """

    def __init__(self, steps: Steps, gaps: Gaps) -> None:
        self.steps, self._gaps = steps, gaps
        self._leave: list[tuple[int, int, DecodeStream]] = []
        self._fresh: list[DecodeStream] = []
        self._runs = 0
        self._done = 0
        self.contexts = 0
        self.reserved = 0
        self._last_s = 0.0  # time of the last token of all but fresh requests
        self._peak_runs: list[int] = []
        # Decreasing stack of the longest gaps. Positions in ``_peak_runs``: twice the run's number for its first step,
        # plus 1 for later steps.
        self._peaks_s: list[float] = []

    def __len__(self) -> int:
        return len(self._leave)

    def streams(self) -> list[DecodeStream]:
        return [stream for _, _, stream in sorted(self._leave, key=lambda entry: entry[2].came)]

    def join(self, stream: DecodeStream) -> None:
        # ``came`` orders by the step of joining, then by order within the step.
        stream.joined, stream.came = self._runs, self._done * 1_000_000 + len(self._fresh)
        self._fresh.append(stream)
        heapq.heappush(self._leave, (self._done + stream.output_tokens - 1, stream.number, stream))
        self.contexts += stream.prompt_tokens + 1
        self.reserved += stream.kv_tokens

    def steps_to_first_end(self) -> int:
        return self._leave[0][0] - self._done

    def seconds(self, steps: int) -> float:
        return self.steps.run_s(len(self._leave), self.contexts, steps)

    def steps_until(self, seconds: float, most: int) -> int:
        """Return the fewest steps that take at least ``seconds``, from 1 to ``most``."""
        return self.steps.steps_until(len(self._leave), self.contexts, seconds, most)

    def step_s(self, steps: int = 0) -> float:
        """Return the seconds of the step after ``steps`` more steps; 0 for an empty batch."""
        size = len(self._leave)
        return self.steps.step_s(size, self.contexts + steps * size) if size else 0.0

    def run(self, begun_s: float, steps: int, end_s: float) -> list[DecodeStream]:
        """Account for at most ``steps_to_first_end`` steps. Return the ended requests."""
        size, kv = len(self._leave), self.contexts
        first_s = self.steps.step_s(size, kv)
        self._first_step(begun_s, first_s)
        if steps > 1:
            self._gaps.add_steps(self.steps, size, kv, 1, steps)
            self._peak(2 * self._runs + 1, self.steps.step_s(size, kv + (steps - 1) * size))
        self._done += steps
        self.contexts += size * steps
        self._runs += 1
        self._last_s = end_s
        return self._leaving()

    def mixed_step(self, begun_s: float, end_s: float) -> list[DecodeStream]:
        """Account for a step that includes other work. Return the ended requests."""
        if not self._leave:
            return []
        self._first_step(begun_s, end_s - begun_s)
        self._done += 1
        self.contexts += len(self._leave)
        self._runs += 1
        self._last_s = end_s
        return self._leaving()

    def clear(self) -> list[DecodeStream]:
        streams = self.streams()
        self._leave, self._fresh = [], []
        self.contexts = self.reserved = 0
        self._peak_runs, self._peaks_s = [], []
        return streams

    def _first_step(self, begun_s: float, step_s: float) -> None:
        # Record the times between tokens: of fresh requests since their first token, of others since the last step.
        joined = self._fresh
        for stream in joined:
            gap_s = begun_s - stream.first_token_s + step_s
            stream.worst_s = gap_s
            self._gaps.add(gap_s)
        earlier = len(self._leave) - len(joined)
        if earlier:
            gap_s = begun_s - self._last_s + step_s
            self._gaps.add(gap_s, earlier)
            self._peak(2 * self._runs, gap_s)
        if joined:
            self._fresh = []

    def _peak(self, when: int, gap_s: float) -> None:
        # Push a gap to the stack; smaller gaps before it are dropped.
        runs, peaks_s = self._peak_runs, self._peaks_s
        while peaks_s and peaks_s[-1] <= gap_s:
            peaks_s.pop()
            runs.pop()
        peaks_s.append(gap_s)
        runs.append(when)

    def _leaving(self) -> list[DecodeStream]:
        # Remove the requests that have all tokens, and set their longest gaps.
        leave, done = self._leave, self._done
        streams: list[DecodeStream] = []
        while leave and leave[0][0] <= done:
            stream = heapq.heappop(leave)[2]
            streams.append(stream)
            self.contexts -= stream.kv_tokens
            self.reserved -= stream.kv_tokens
            at = bisect_left(self._peak_runs, 2 * stream.joined + 1)
            if at < len(self._peaks_s):
                stream.worst_s = max(stream.worst_s, self._peaks_s[at])
        if not leave:
            self._peak_runs, self._peaks_s = [], []
        return streams


class Steps:
    """Closed-form sums of ``CostModel.decode_step_s`` for an unchanged batch.

    Contexts grow by a token per step, so reading and computing grow linearly; a step takes the longer.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._parts: list[tuple[float, float, float, float, float]] = []

    def step_s(self, batch: int, kv_tokens: float) -> float:
        fixed_s, read_s, read_per_s, flops_s, flops_per_s = self._of(batch)
        reading, computing = read_s + read_per_s * kv_tokens, flops_s + flops_per_s * kv_tokens
        return fixed_s + (reading if reading > computing else computing)

    def run_s(self, batch: int, kv_tokens: float, steps: int) -> float:
        # Return the seconds of ``steps`` steps from ``kv_tokens`` in all contexts on.
        first, slope, cut, then, then_slope = self._lines(batch, kv_tokens)
        if steps <= cut:
            return steps * (first + slope * (steps - 1) / 2)
        later_steps = steps - cut
        return cut * (first + slope * (cut - 1) / 2) + later_steps * (then + then_slope * (cut + steps - 1) / 2)

    def steps_until(self, batch: int, kv_tokens: float, seconds: float, most: int) -> int:
        # Return the fewest steps, at most ``most``, that take ``seconds``.
        first, slope, cut, then, then_slope = self._lines(batch, kv_tokens)
        until_cut_s = cut * (first + slope * (cut - 1) / 2) if cut < most else math.inf
        if seconds <= until_cut_s:
            guess: float = _fewest(first, slope, 0, seconds)
        else:
            guess = cut + _fewest(then, then_slope, cut, seconds - until_cut_s)
        # The closed form may be off by one step in floating point; these loops run at most once or twice.
        steps = int(max(1, min(guess, most)))
        while steps > 1 and self.run_s(batch, kv_tokens, steps - 1) >= seconds:
            steps -= 1
        while steps < most and self.run_s(batch, kv_tokens, steps) < seconds:
            steps += 1
        return steps

    def _lines(self, batch: int, kv_tokens: float) -> tuple[float, float, float, float, float]:
        """Return ``first, slope, cut, then, then_slope``.

        Step ``i`` takes ``first + slope·i`` before step ``cut``, ``then + then_slope·i`` from there on.
        """
        fixed_s, read_s, read_per_s, flops_s, flops_per_s = self._of(batch)
        reading, computing = read_s + read_per_s * kv_tokens, flops_s + flops_per_s * kv_tokens
        if reading >= computing:
            first, slope, then, then_slope = reading, read_per_s * batch, computing, flops_per_s * batch
        else:
            first, slope, then, then_slope = computing, flops_per_s * batch, reading, read_per_s * batch
        cut: float = math.inf
        if then_slope > slope:
            cut = math.floor((first - then) / (then_slope - slope)) + 1
        return fixed_s + first, slope, cut, fixed_s + then, then_slope

    def _of(self, batch: int) -> tuple[float, float, float, float, float]:
        parts = self._parts
        while len(parts) <= batch:
            parts.append(self._cost.decode_parts(len(parts)))
        return parts[batch]


def _fewest(start: float, slope: float, begin: float, seconds: float) -> int:
    # Return the fewest steps from step ``begin`` on that take ``seconds``; step i takes ``start + slope·i``.
    begins = start + slope * begin
    if slope <= 0.0:
        return math.ceil(seconds / begins) if begins > 0.0 else 1
    half = begins / slope - 0.5
    return math.ceil(math.sqrt(half * half + 2.0 * seconds / slope) - half)


LEAST_S = 1e-6
"""Upper bound of the first class."""
_WIDTH = math.log(1.01)


class Gaps:
    """Histogram of times between tokens in classes 1 % wide, with exact counts and means."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._sums_s: dict[int, float] = {}

    def add(self, gap_s: float, tokens: int = 1) -> None:
        self._put(_class_of(gap_s), tokens, gap_s * tokens)

    def add_steps(self, steps: Steps, batch: int, kv_tokens: float, begin: int, end: int) -> None:
        # Add the gaps of all requests in steps ``begin`` to ``end`` of a batch.
        # Halves until a piece falls into one class: gaps grow slowly, so hundreds of steps take few calls.
        if end <= begin:
            return
        first = _class_of(steps.step_s(batch, kv_tokens + begin * batch))
        if end - begin == 1 or first == _class_of(steps.step_s(batch, kv_tokens + (end - 1) * batch)):
            seconds = steps.run_s(batch, kv_tokens + begin * batch, end - begin)
            self._put(first, batch * (end - begin), batch * seconds)
            return
        middle = (begin + end) // 2
        self.add_steps(steps, batch, kv_tokens, begin, middle)
        self.add_steps(steps, batch, kv_tokens, middle, end)

    def classes(self) -> tuple[Sequence[float], Sequence[int]]:
        """Return the mean gap (s) and the number of tokens of each non-empty class, ascending."""
        numbers = sorted(self._counts)
        counts = [self._counts[number] for number in numbers]
        return [self._sums_s[number] / self._counts[number] for number in numbers], counts

    def _put(self, number: int, tokens: int, seconds: float) -> None:
        self._counts[number] = self._counts.get(number, 0) + tokens
        self._sums_s[number] = self._sums_s.get(number, 0.0) + seconds


def _class_of(gap_s: float) -> int:
    return int(math.log(gap_s / LEAST_S) / _WIDTH) if gap_s > LEAST_S else 0
