"""What an experiment is told with, and where its requests come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from skymemory.sim.open_loop import OPEN_LOOPS, poisson
from skymemory.sim.sweeps import Way
from skymemory.sim.trace import BATCH_S, TraceRequest, jittered, read_trace
from skymemory.sim.workload import WORKLOADS, generate

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

    @property
    def name(self) -> str:
        return f"{self.workload}, Poisson"

    def requests(self) -> list[TraceRequest]:
        return poisson(OPEN_LOOPS[self.workload], self.rate_per_s, self.count, self.seed)


@dataclass(frozen=True, slots=True)
class Told:
    """One figure that was published, beside ours."""

    what: str
    unit: str
    published: float | str | None
    """None: nothing was."""
    ours: float
    why: str = ""
    """Why they differ, or what ours says that theirs does not."""
    digits: int = 2


@dataclass(frozen=True, slots=True)
class Experiment:
    """What came of one."""

    name: str
    published_as: str
    title: str
    source: str
    """Whose requests."""
    assumed: tuple[str, ...]
    """What the papers leave open, and what was taken."""
    header: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    told: tuple[Told, ...]
    series: Mapping[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    """Curves for a drawing, by name: columns of equal length."""

    def as_json(self) -> dict[str, object]:
        return {
            "experiment": self.name,
            "published_as": self.published_as,
            "title": self.title,
            "requests": self.source,
            "assumed": list(self.assumed),
            "told": [
                {"what": one.what, "unit": one.unit, "published": one.published, "ours": one.ours, "why": one.why}
                for one in self.told
            ],
            "rows": [dict(zip(self.header, row, strict=True)) for row in self.rows],
        }


@dataclass(frozen=True, slots=True)
class Setting:
    """How an experiment is run."""

    source: Source
    way: Way = "processes"
    jobs: int | None = None
    progress: Callable[[int, int], None] = lambda done, of: None

    @property
    def seed(self) -> int:
        return self.source.seed

    @property
    def quick(self) -> bool:
        return self.source.quick
