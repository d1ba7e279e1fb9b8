"""What a run looked like at each moment, from the records of its requests: for who plays it back."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from skymemory.conductor.admission.base import Slo
from skymemory.sim.cluster.metrics import keeps
from skymemory.sim.cluster.outcome import ClusterRun, RequestOutcome


@dataclass(slots=True)
class Moment:
    """Counts up to now, and what is where now."""

    waiting: list[int]
    """Requests in line, by prefilling instance."""
    prefilling: list[int]
    decoding: list[int]
    """Requests in the batch, by decoding instance."""
    arrived: int = 0
    completed: int = 0
    met: int = 0
    refused: int = 0
    refused_after_prefill: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    """Of prompts whose prefill has begun."""
    held_tokens: int = 0
    loaded_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    """Of the first tokens that came, sorted by when."""

    @property
    def hits(self) -> float:
        return (self.held_tokens + self.loaded_tokens) / max(1, self.prompt_tokens)

    @property
    def loaded(self) -> float:
        """Part of the tokens that came from elsewhere."""
        return self.loaded_tokens / max(1, self.prompt_tokens)


class Playback:
    """A run, moment by moment. Time only goes on."""

    def __init__(self, run: ClusterRun, prefills: int, decodes: int, slo: Slo) -> None:
        self.moment = Moment([0] * prefills, [0] * prefills, [0] * decodes)
        self._slo = slo
        self._events = [(at_s, number, step) for number, one in enumerate(run.outcomes) for at_s, step in _steps(one)]
        heapq.heapify(self._events)
        self._outcomes = run.outcomes
        self.end_s = run.end_s

    def at(self, now_s: float) -> Moment:
        while self._events and self._events[0][0] <= now_s:
            _, number, step = heapq.heappop(self._events)
            self._happens(self._outcomes[number], step)
        return self.moment

    def _happens(self, one: RequestOutcome, step: int) -> None:
        moment = self.moment
        if step == _ARRIVES:
            moment.arrived += 1
            if one.prefill is not None:
                moment.waiting[one.prefill] += 1
        elif step == _BEGINS and one.prefill is not None:
            moment.waiting[one.prefill] -= 1
            moment.prefilling[one.prefill] += 1
            moment.prompt_tokens += one.prompt_tokens
            moment.held_tokens += one.held_tokens
            moment.loaded_tokens += sum(one.loaded_tokens.values())
        elif step == _FIRST_TOKEN and one.prefill is not None and one.ttft_s is not None:
            moment.prefilling[one.prefill] -= 1
            moment.ttft_s.append(one.ttft_s)
            if one.decode is not None:
                moment.decoding[one.decode] += 1
        elif step == _ENDS:
            self._ends(one)

    def _ends(self, one: RequestOutcome) -> None:
        moment = self.moment
        if one.prefill is not None and one.ttft_s is None:
            moment.prefilling[one.prefill] -= 1
        elif one.ttft_s is not None and one.decode is not None:
            moment.decoding[one.decode] -= 1
        moment.completed += one.status == "completed"
        moment.met += keeps(one, self._slo)
        moment.refused += one.status == "refused"
        moment.refused_after_prefill += one.status == "refused_after_prefill"
        moment.failed += one.status == "failed"


_ARRIVES, _BEGINS, _FIRST_TOKEN, _ENDS = range(4)


def _steps(one: RequestOutcome) -> Iterator[tuple[float, int]]:
    """When what happens to a request."""
    yield one.at_s, _ARRIVES
    if one.prefill is not None:
        yield one.at_s + one.queue_s, _BEGINS
        if one.ttft_s is not None:
            yield one.at_s + one.ttft_s, _FIRST_TOKEN
    yield one.at_s if one.end_s is None else one.end_s, _ENDS
