"""One request on its way through the simulated cluster."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from skymemory.conductor.cost_model import CostModel
from skymemory.conductor.request import Request
from skymemory.conductor.scheduler import Placement
from skymemory.sim.cluster.pool_base import Loaded


@dataclass(slots=True, eq=False)
class Job:
    """What an attempt changes is as of the last attempt, but ``spent_s``, which all attempts add to."""

    number: int
    """In the order of arrival."""
    at_s: float
    prompt_tokens: int
    output_tokens: int
    """At least 1: a prefill gives a token."""
    ids: tuple[int, ...]
    """Of the blocks that caches keep."""
    asked: Request = field(repr=False)
    placement: Placement | None = None
    prefill: int = -1
    decode: int = -1
    attempts: int = 0
    work_s: float = 0.0
    """What its prefill is believed to take."""
    loading: Loaded | None = None
    """What it began to load when it was placed."""
    begun_s: float = -1.0
    first_token_s: float = -1.0
    held_tokens: int = 0
    sources: Mapping[str, int] = field(default_factory=dict)
    """Tokens loaded, by source."""
    computed_tokens: int = 0
    spent_s: float = 0.0
    """Machine time of its prefills so far."""
    there_s: float = 0.0
    """When the last of its KV is at the decoding instance."""
    prefilled: bool = False
    leaving: bool = False
    """Prefilled, and some of its KV is not yet where it will decode."""
    decoding: bool = False
    """It is, or was, in a batch."""
    over: bool = False

    @property
    def priority(self) -> int:
        return self.asked.priority

    @property
    def placed(self) -> Placement:
        assert self.placement is not None, "it was let in"
        return self.placement

    def restart(self, placement: Placement, prefill: int) -> None:
        """It is sent, for the first time or again."""
        self.placement, self.prefill, self.attempts = placement, prefill, self.attempts + 1
        self.loading = None
        self.begun_s = self.first_token_s = -1.0
        self.prefilled = self.leaving = self.decoding = False

    def stream(self) -> Stream:
        """Its answer, from the first token on."""
        return Stream(self.number, self.prompt_tokens, self.output_tokens, self.first_token_s, self.priority)


# A batch that decodes: every step gives each of its requests one token.
#
# The batch changes between steps only. Whoever owns it says how many steps it takes in a row (``run``); times,
# contexts
# and the times between tokens come in closed form, step for step the same as if each were simulated.
#
# The context of a request in a step is its prompt and the tokens it has: the prefill gave the first token, so the
# first
# step has ``prompt + 1``. An answer of ``n`` tokens takes ``n - 1`` steps.


@dataclass(slots=True, eq=False)
class Stream:
    """One request's answer. ``number`` is its own; equal priorities are in the order of coming."""

    number: int
    prompt_tokens: int
    output_tokens: int
    first_token_s: float
    priority: int = 0
    worst_s: float = 0.0
    """The longest time between two of its tokens."""
    joined: int = 0
    """The batch's run that was its first."""
    came: int = 0

    @property
    def kv_tokens(self) -> int:
        """What is kept free for it, from its first step on: it is never put out for want of memory."""
        return self.prompt_tokens + self.output_tokens


class Batch:
    def __init__(self, steps: Steps, gaps: Gaps) -> None:
        self._steps, self._gaps = steps, gaps
        self._leave: list[tuple[int, int, Stream]] = []
        """Heap, by the step after which each is done."""
        self._fresh: list[Stream] = []
        """Have joined since the last run."""
        self._runs = 0
        self._done = 0
        """Steps so far."""
        self.contexts = 0
        """Tokens of all contexts in the next step."""
        self.reserved = 0
        """Tokens of memory that are kept for its requests."""
        self._last_s = 0.0
        """When its requests, but those that are fresh, got their last token."""
        self._peak_runs: list[int] = []
        self._peaks_s: list[float] = []
        """Longest gaps, falling, each with when it was: twice the run's number for its first step, and one more for
        those behind it. What is smaller than a later one is not kept."""

    def __len__(self) -> int:
        return len(self._leave)

    def streams(self) -> list[Stream]:
        """Those in it, in the order of joining."""
        return [stream for _, _, stream in sorted(self._leave, key=lambda entry: entry[2].came)]

    def join(self, stream: Stream) -> None:
        """It takes part in the next step, and in all until it has its tokens. At least one is wanted."""
        stream.joined, stream.came = self._runs, self._done * 1_000_000 + len(self._fresh)
        self._fresh.append(stream)
        heapq.heappush(self._leave, (self._done + stream.output_tokens - 1, stream.number, stream))
        self.contexts += stream.prompt_tokens + 1
        self.reserved += stream.kv_tokens

    def steps_to_first_end(self) -> int:
        return self._leave[0][0] - self._done

    def seconds(self, steps: int) -> float:
        return self._steps.run_s(len(self._leave), self.contexts, steps)

    def steps_until(self, seconds: float, most: int) -> int:
        """The fewest steps that take ``seconds`` or longer, at most ``most``; at least one."""
        return self._steps.steps_until(len(self._leave), self.contexts, seconds, most)

    def step_s(self, steps: int = 0) -> float:
        """Seconds of the step that comes after so many more; 0 for an empty batch."""
        size = len(self._leave)
        return self._steps.step_s(size, self.contexts + steps * size) if size else 0.0

    def run(self, begun_s: float, steps: int, end_s: float) -> list[Stream]:
        """It has taken so many steps from ``begun_s`` on, the last of which ended at ``end_s``: who is done by that.

        At most ``steps_to_first_end``.
        """
        size, kv = len(self._leave), self.contexts
        first_s = self._steps.step_s(size, kv)
        self._first_step(begun_s, first_s)
        if steps > 1:
            self._gaps.add_steps(self._steps, size, kv, 1, steps)
            self._peak(2 * self._runs + 1, self._steps.step_s(size, kv + (steps - 1) * size))
        self._done += steps
        self.contexts += size * steps
        self._runs += 1
        self._last_s = end_s
        return self._leaving()

    def mixed_step(self, begun_s: float, end_s: float) -> list[Stream]:
        """One step that took as long as it did, because more than decoding was done in it: who is done by that."""
        if not self._leave:
            return []
        self._first_step(begun_s, end_s - begun_s)
        self._done += 1
        self.contexts += len(self._leave)
        self._runs += 1
        self._last_s = end_s
        return self._leaving()

    def clear(self) -> list[Stream]:
        """The machine died: who was in it."""
        streams = self.streams()
        self._leave, self._fresh = [], []
        self.contexts = self.reserved = 0
        self._peak_runs, self._peaks_s = [], []
        return streams

    def _first_step(self, begun_s: float, step_s: float) -> None:
        """Fresh requests waited since their first token, the others since the last step (0 unless it was held up)."""
        fresh = self._fresh
        for stream in fresh:
            gap_s = begun_s - stream.first_token_s + step_s
            stream.worst_s = gap_s
            self._gaps.add(gap_s)
        others = len(self._leave) - len(fresh)
        if others:
            gap_s = begun_s - self._last_s + step_s
            self._gaps.add(gap_s, others)
            self._peak(2 * self._runs, gap_s)
        if fresh:
            self._fresh = []

    def _peak(self, when: int, gap_s: float) -> None:
        runs, peaks_s = self._peak_runs, self._peaks_s
        while peaks_s and peaks_s[-1] <= gap_s:
            peaks_s.pop()
            runs.pop()
        peaks_s.append(gap_s)
        runs.append(when)

    def _leaving(self) -> list[Stream]:
        leave, done = self._leave, self._done
        gone: list[Stream] = []
        while leave and leave[0][0] <= done:
            stream = heapq.heappop(leave)[2]
            gone.append(stream)
            self.contexts -= stream.kv_tokens
            self.reserved -= stream.kv_tokens
            at = bisect_left(self._peak_runs, 2 * stream.joined + 1)
            if at < len(self._peaks_s):
                stream.worst_s = max(stream.worst_s, self._peaks_s[at])
        if not leave:
            self._peak_runs, self._peaks_s = [], []
        return gone


# Decoding steps of one batch in a row, in closed form: how long so many take, and how many begin within a time.
#
# Between two changes of a batch its contexts grow by one token per request with each step, so that reading and
# computing
# are both linear in the step's number and a step takes the longer of the two: ``CostModel.decode_run_s``, with the
# parts
# of each batch size computed once.


class Steps:
    """Of one kind of machine. Contexts are the tokens of all requests in the batch, as of the first step."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._parts: list[tuple[float, float, float, float, float]] = []

    def step_s(self, batch: int, kv_tokens: float) -> float:
        fixed_s, read_s, read_per_s, flops_s, flops_per_s = self._of(batch)
        reading, computing = read_s + read_per_s * kv_tokens, flops_s + flops_per_s * kv_tokens
        return fixed_s + (reading if reading > computing else computing)

    def run_s(self, batch: int, kv_tokens: float, steps: int) -> float:
        """Seconds of so many steps."""
        first, slope, cut, then, then_slope = self._lines(batch, kv_tokens)
        if steps <= cut:
            return steps * (first + slope * (steps - 1) / 2)
        rest = steps - cut
        return cut * (first + slope * (cut - 1) / 2) + rest * (then + then_slope * (cut + steps - 1) / 2)

    def steps_until(self, batch: int, kv_tokens: float, seconds: float, most: int) -> int:
        """The fewest steps that together take ``seconds`` or longer, at most ``most``; at least one."""
        first, slope, cut, then, then_slope = self._lines(batch, kv_tokens)
        begun = cut * (first + slope * (cut - 1) / 2) if cut < most else math.inf
        if seconds <= begun:
            guess: float = _fewest(first, slope, 0, seconds)
        else:
            guess = cut + _fewest(then, then_slope, cut, seconds - begun)
        steps = int(max(1, min(guess, most)))
        while steps > 1 and self.run_s(batch, kv_tokens, steps - 1) >= seconds:
            steps -= 1
        while steps < most and self.run_s(batch, kv_tokens, steps) < seconds:
            steps += 1
        return steps

    def _lines(self, batch: int, kv_tokens: float) -> tuple[float, float, float, float, float]:
        """Step ``i`` takes ``first + slope·i`` up to ``cut`` steps, and ``then + then_slope·i`` from there on."""
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
    """About how many terms ``start + slope·i``, from ``i = begin`` on, reach ``seconds``."""
    begins = start + slope * begin
    if slope <= 0.0:
        return math.ceil(seconds / begins) if begins > 0.0 else 1
    half = begins / slope - 0.5
    return math.ceil(math.sqrt(half * half + 2.0 * seconds / slope) - half)


# Times from token to token of all requests of a run: a histogram whose classes are 1 % wide.
#
# Every token counts, with the time since the one before it of the same request; first tokens have none. Counts are
# exact;
# what is lost is where in its class a time lies, and the mean of a class is kept.


LEAST_S = 1e-6
"""Whatever is shorter is in the first class."""
_WIDTH = math.log(1.01)


class Gaps:
    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._sums_s: dict[int, float] = {}

    def add(self, gap_s: float, tokens: int = 1) -> None:
        """So many tokens came ``gap_s`` after the one before."""
        self._put(_class_of(gap_s), tokens, gap_s * tokens)

    def add_steps(self, steps: Steps, batch: int, kv_tokens: float, begin: int, end: int) -> None:
        """Steps ``begin`` to ``end - 1`` of a batch (``Steps``): each gave every request of it a token."""
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
        """The mean time (s) in each class that has any, rising, and how many tokens are in it."""
        numbers = sorted(self._counts)
        counts = [self._counts[number] for number in numbers]
        return [self._sums_s[number] / self._counts[number] for number in numbers], counts

    def _put(self, number: int, tokens: int, seconds: float) -> None:
        self._counts[number] = self._counts.get(number, 0) + tokens
        self._sums_s[number] = self._sums_s.get(number, 0.0) + seconds


def _class_of(gap_s: float) -> int:
    return int(math.log(gap_s / LEAST_S) / _WIDTH) if gap_s > LEAST_S else 0
