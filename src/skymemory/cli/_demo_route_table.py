"""What the routing demo shows: one line for each strategy, as it runs and when it is done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from skymemory.cli._demo_route_load import Heard

_HEAD = f"{'strategy':<14}{'answered':>10}{'TTFT mean':>11}{'p90':>9}{'p99':>9}{'hits':>7}   requests by server"
WIDTH = 100


@dataclass(slots=True)
class Row:
    """One strategy's run."""

    strategy: str
    requests: int
    heard: list[Heard] = field(default_factory=list)
    served: list[int] = field(default_factory=list)
    """Requests that each engine says it was sent."""
    loads: list[int] = field(default_factory=list)
    """Requests at each engine now: in line, in prefill, being answered."""
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        return sum(bool(one.error) for one in self.heard)

    @property
    def hits(self) -> float:
        """Part of the prompts' tokens that caches supplied, as the engines say."""
        return sum(one.cached_tokens for one in self.heard) / max(1, sum(one.prompt_tokens for one in self.heard))

    @property
    def mean_s(self) -> float:
        times = self._times()
        return sum(times) / len(times) if times else math.nan

    def percentile_s(self, percent: float) -> float:
        """The smallest time that so many percent do not exceed."""
        times = self._times()
        return times[max(0, math.ceil(percent / 100 * len(times)) - 1)] if times else math.nan

    def line(self) -> str:
        figures = "".join(f"{_seconds(value):>{width}}" for value, width in (
            (self.mean_s, 11), (self.percentile_s(90), 9), (self.percentile_s(99), 9)))  # fmt: skip
        hits = f"{self.hits:.0%}" if self.heard else "-"
        return f"{self.strategy:<14}{f'{len(self.heard)}/{self.requests}':>10}{figures}{hits:>7}   {_each(self.served)}"

    def as_object(self) -> dict[str, object]:
        return {
            "strategy": self.strategy,
            "answered": len(self.heard) - self.failed,
            "failed": self.failed,
            "ttft_mean_s": self.mean_s,
            "ttft_p90_s": self.percentile_s(90),
            "ttft_p99_s": self.percentile_s(99),
            "hit_ratio": self.hits,
            "prompt_tokens": sum(one.prompt_tokens for one in self.heard),
            "cached_tokens": sum(one.cached_tokens for one in self.heard),
            "requests_by_server": self.served,
            "seconds": self.seconds,
        }

    def _times(self) -> list[float]:
        return sorted(one.ttft_s for one in self.heard if not one.error)


def frame(rows: Sequence[Row], current: Row | None) -> list[str]:
    """All strategies in their order; with the one that runs, the load at each engine."""
    lines = [row.line() if row.heard or row is current else row.strategy for row in rows]
    return [_HEAD, *(line + (f"   now {_bars(row.loads)}" if row is current else "")
                     for row, line in zip(rows, lines, strict=True))]  # fmt: skip


def figures(row: Row) -> list[str]:
    """The moment in words, for a log."""
    return [
        f"{row.strategy}: {len(row.heard)} of {row.requests} answered", f"TTFT {_seconds(row.mean_s)}",
        f"hits {row.hits:.0%}", f"at the engines now {_each(row.loads)}",
    ]  # fmt: skip


def final(rows: Sequence[Row]) -> list[str]:
    """The table, best mean first."""
    return [_HEAD, *(row.line() for row in sorted(rows, key=lambda row: row.mean_s))]


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f} s" if value < 10 else f"{value:.1f} s"


def _each(counts: Sequence[int]) -> str:
    return " ".join(f"{count:>3}" for count in counts)


def _bars(loads: Sequence[int]) -> str:
    """A bar for each engine: one step for each request there, eight at most."""
    return " ".join(" ▁▂▃▄▅▆▇█"[min(8, load)] for load in loads)
