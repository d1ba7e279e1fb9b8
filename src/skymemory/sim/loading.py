"""The loader in virtual time: the very scheduler of ``cache.loader`` over a simulated GPU and link.

Also the best split in hindsight, by trying them all, to say how far from it the loader stays.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from skymemory.cache.loader import BidirectionalLoader
from skymemory.cache.loader_actions import ComputeStep, LoaderResult
from skymemory.cache.pace import Pace
from skymemory.cache.prompt_chunks import PromptChunk
from skymemory.errors import InvalidInput

StepSeconds = Callable[[int, int], float]
"""Seconds of one prefill step: (first token, our tokens in it)."""


@dataclass(frozen=True, slots=True)
class LinkTrace:
    """A link whose rate changes at given times; the last rate lasts. A rate of 0 is an outage."""

    since_s: tuple[float, ...]
    """Ascending, beginning with 0."""
    bytes_per_s: tuple[float, ...]
    latency_s: float = 0.0
    """From asking to the first byte; of fetches asked for behind one another only the first one's counts."""

    def __post_init__(self) -> None:
        if (
            len(self.since_s) != len(self.bytes_per_s)
            or not self.since_s
            or self.since_s[0]
            or any(b <= a for a, b in zip(self.since_s, self.since_s[1:], strict=False))
            or min(self.bytes_per_s) < 0
            or self.bytes_per_s[-1] <= 0
            or self.latency_s < 0
        ):
            raise InvalidInput("a trace begins at 0, ascends, has a rate for each time, and does not end in an outage")

    @classmethod
    def constant(cls, bytes_per_s: float, latency_s: float = 0.0) -> LinkTrace:
        return cls((0.0,), (bytes_per_s,), latency_s)

    def finish_s(self, start_s: float, size_bytes: float) -> float:
        """When ``size_bytes`` whose first byte comes at ``start_s`` are through."""
        at = bisect_right(self.since_s, start_s) - 1
        now_s, left = start_s, float(size_bytes)
        while at + 1 < len(self.since_s):
            room = (self.since_s[at + 1] - now_s) * self.bytes_per_s[at]
            if self.bytes_per_s[at] and room >= left:
                break
            left -= room
            at += 1
            now_s = self.since_s[at]
        return now_s + left / self.bytes_per_s[at]


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """One prompt, loaded in virtual time."""

    ttft_s: float
    """Until every chunk is there and no step is under way."""
    result: LoaderResult
    origins: tuple[str, ...]
    """Of each chunk: where it came from, or "" after an abort."""
    scheduling_s: tuple[float, ...] = ()
    """What the scheduler really took from one step's begin to the next one's, where a ``timer`` was given."""


def simulate_load(
    chunks: Sequence[PromptChunk],
    step_s: StepSeconds,
    trace: LinkTrace,
    *,
    budget_tokens: int,
    max_in_flight_bytes: int,
    pace: Pace | None = None,
    computes: bool = True,
    loads: bool = True,
    others_fill: bool | None = None,
    failing: Collection[int] = (),
    budgets: Mapping[float, int] | None = None,
    abort_at_s: float | None = None,
    timer: Callable[[], float] | None = None,
) -> SimulatedLoad:
    """Run the loader from second 0 until it is done.

    Chunks in ``failing`` take their time on the link and fail then; ``budgets`` maps seconds to a new budget.
    ``timer``, for example ``time.perf_counter``, tells what the scheduler itself costs on this computer.
    Raises InvalidInput where the prompt can never be done, for example with a budget that stays 0.
    """
    loader = BidirectionalLoader(
        max_in_flight_bytes=max_in_flight_bytes,
        budget_tokens=budget_tokens,
        pace=pace,
        computes=computes,
        loads=loads,
        others_fill=others_fill,
    )
    loader.push_seq(chunks, 0.0)
    events: list[tuple[float, int, str, int]] = []
    asked = 0

    def post(at_s: float, what: str, value: int) -> None:
        nonlocal asked
        asked += 1
        heapq.heappush(events, (at_s, asked, what, value))

    for at_s, tokens in (budgets or {}).items():
        post(at_s, "budget", tokens)
    if abort_at_s is not None:
        post(abort_at_s, "abort", 0)
    now_s = link_free_s = 0.0
    on_link: list[int] = []
    asked_s: dict[int, float] = {}
    sending: int | None = None
    spent_s = 0.0
    scheduling_s: list[float] = []
    while not loader.done:
        began_s = timer() if timer else 0.0
        actions = loader.poll(now_s)
        if timer:
            spent_s += timer() - began_s
        on_link.extend(actions.fetch)
        asked_s.update((index, now_s) for index in actions.fetch)
        for index in actions.cancel:
            if index in on_link:
                on_link.remove(index)
        if sending is None and on_link:
            sending = on_link.pop(0)
            first_byte_s = max(now_s, asked_s[sending] + trace.latency_s)
            link_free_s = trace.finish_s(first_byte_s, chunks[sending].size_bytes)
            post(link_free_s, "link", sending)
        step: ComputeStep | None = actions.compute
        if step is not None:
            post(now_s + step_s(step.first_token, step.tokens), "computed", step.index)
            if timer:
                scheduling_s.append(spent_s)
                spent_s = 0.0
        if actions.wake_s is not None:
            post(max(actions.wake_s, now_s), "wake", 0)
        if loader.done:
            break
        if not events:
            raise InvalidInput("nothing can go on: a budget of 0 and nothing to load")
        now_s, _, what, value = heapq.heappop(events)
        began_s = timer() if timer else 0.0
        if what == "computed":
            loader.chunk_computed(now_s)
        elif what == "link":
            sending = None
            (loader.load_failed if value in failing else loader.chunk_loaded)(value, now_s)
        elif what == "budget":
            loader.budget_changed(value)
        elif what == "abort":
            loader.abort(now_s)
        if timer:
            spent_s += timer() - began_s
    origins = tuple(loader.origin(i) for i in range(len(chunks)))
    return SimulatedLoad(now_s, loader.result(), origins, tuple(scheduling_s))


def best_split_s(chunks: Sequence[PromptChunk], step_s: StepSeconds, trace: LinkTrace, *, budget_tokens: int) -> float:
    """TTFT of the best split in hindsight: compute the first k chunks, load the rest from the back; all k tried.

    Steps are as full as they can be, over the borders of chunks. For chunks that can all be loaded; raises InvalidInput
    otherwise.
    """
    if not budget_tokens or any(not chunk.loadable or chunk.resident for chunk in chunks):
        raise InvalidInput("hindsight is worked out for chunks that can all be loaded, and a budget")
    computed_s = [0.0]
    full_s, at = 0.0, chunks[0].first_token  # full steps so far, and where they end
    for chunk in chunks:
        end = chunk.first_token + chunk.tokens
        while end - at >= budget_tokens:
            full_s += step_s(at, budget_tokens)
            at += budget_tokens
        computed_s.append(full_s + (step_s(at, end - at) if end > at else 0.0))
    best_s, tail_bytes = computed_s[-1], 0
    for k in reversed(range(len(chunks))):
        tail_bytes += chunks[k].size_bytes
        best_s = min(best_s, max(computed_s[k], trace.finish_s(trace.latency_s, tail_bytes)))
    return best_s
