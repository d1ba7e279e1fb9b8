"""Where a cell of a sweep gets its requests: said in a few words, so that processes are sent no requests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from skymemory.sim.open_loop import OPEN_LOOPS, poisson, scaled
from skymemory.sim.trace import BATCH_S, TraceRequest, jittered, read_trace
from skymemory.sim.workload import WORKLOADS, generate


class RequestSource(Protocol):
    @property
    def name(self) -> str: ...

    def requests(self) -> list[TraceRequest]:
        """In the order of arrival. Equal sources give equal requests."""
        ...


HOUR_S = 3_537.0
"""Of the conversation trace; the generator makes as much."""
QUICK_S = 600.0
"""With ``quick``: of either."""


@dataclass(frozen=True, slots=True)
class Source:
    """Requests of the conversation trace, or of the generator that has its statistics where there is no trace."""

    trace: Path | None
    seed: int = 0
    quick: bool = False

    @property
    def name(self) -> str:
        what = "the conversation trace" if self.trace is not None else "the seeded generator in the trace's place"
        return f"{what}, first {QUICK_S:g} s" if self.quick else what

    def requests(self) -> list[TraceRequest]:
        """In the order of arrival, each spread over the time between its batch and the one before it.

        Raises:
            InvalidInput: the trace is none.
            OSError: it cannot be read.
        """
        return _requests(self)


@lru_cache(maxsize=2)
def _requests(source: Source) -> list[TraceRequest]:
    if source.trace is not None:
        requests = read_trace(source.trace)
    else:
        seconds = QUICK_S if source.quick else HOUR_S
        requests = generate(WORKLOADS["conversations"], seconds, seed=100 + source.seed)
    requests = jittered(requests, source.seed, BATCH_S)
    return [one for one in requests if one.at_s < QUICK_S] if source.quick else requests


@dataclass(frozen=True, slots=True)
class OpenSource:
    """Requests of a Poisson process (``open_loop``)."""

    workload: str
    rate_per_s: float
    count: int
    seed: int = 0
    prefixes: int | None = None
    """Different prefixes that prompts share; None: the workload's own number."""

    @property
    def name(self) -> str:
        return f"{self.workload}, Poisson"

    def requests(self) -> list[TraceRequest]:
        workload = OPEN_LOOPS[self.workload]
        if self.prefixes is not None:
            workload = scaled(workload, self.prefixes)
        return poisson(workload, self.rate_per_s, self.count, self.seed)
