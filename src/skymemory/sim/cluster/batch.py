"""A batch that decodes: every step gives each of its requests one token.

The batch changes between steps only. Whoever owns it says how many steps it takes in a row (``run``); times, contexts
and the times between tokens come in closed form, step for step the same as if each were simulated.

The context of a request in a step is its prompt and the tokens it has: the prefill gave the first token, so the first
step has ``prompt + 1``. An answer of ``n`` tokens takes ``n - 1`` steps.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from dataclasses import dataclass

from skymemory.sim.cluster.gaps import Gaps
from skymemory.sim.cluster.steps import Steps


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
