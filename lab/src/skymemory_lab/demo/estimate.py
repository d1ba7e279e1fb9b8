"""Run time of a demo: estimated part by part, and corrected by the measured parts of the same ``kind``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from skymemory.progress import Progress, Wait

_CORRECTED_FROM = 0.15  # relative change from which a new estimate is printed


@dataclass(frozen=True, slots=True)
class EstimatedPart:
    name: str
    seconds: float
    kind: str = ""
    """Kind of parts corrected together; empty: the part's name."""


class Estimate:
    """Seconds of a run's remaining parts, corrected by measured parts; ``spent_s`` passed before."""

    def __init__(self, parts: Iterable[EstimatedPart], *, spent_s: float = 0.0) -> None:
        self._waiting = list(parts)
        self._ratios: dict[str, float] = {}  # measured over estimated seconds, by kind
        self.first_s = self._printed_s = spent_s + sum(part.seconds for part in self._waiting)

    def seconds_of(self, name: str) -> float:
        for part in self._waiting:
            if part.name == name:
                return self._corrected_s(part)
        raise KeyError(name)

    def on_part(self, name: str, seconds: float) -> None:
        for at, part in enumerate(self._waiting):
            if part.name == name:
                del self._waiting[at]
                if part.seconds > 0:
                    self._ratios[part.kind or part.name] = seconds / part.seconds
                return
        raise KeyError(name)

    def skip(self, prefix: str) -> None:
        self._waiting = [part for part in self._waiting if not part.name.startswith(prefix)]

    @property
    def remaining_s(self) -> float:
        return sum(self._corrected_s(part) for part in self._waiting)

    def correction(self, elapsed_s: float) -> str:
        """Return words for a changed estimate; empty if it changed little."""
        total_s = elapsed_s + self.remaining_s
        if abs(total_s - self._printed_s) <= max(2.0, _CORRECTED_FROM * self._printed_s):
            return ""
        self._printed_s = total_s
        return f"estimate corrected: {format_estimate(total_s)} in all, {format_estimate(self.remaining_s)} to go"

    def _corrected_s(self, part: EstimatedPart) -> float:
        return part.seconds * self._ratios.get(part.kind or part.name, 1.0)


def format_estimate(seconds: float) -> str:
    """Format ``83.4`` as "about 83 s"; from five minutes on in minutes."""
    if not math.isfinite(seconds):
        return "an unknown time"
    return f"about {seconds:.0f} s" if seconds < 300 else f"about {seconds / 60:.0f} minutes"


def say_estimate(progress: Progress, seconds: float) -> None:
    progress.say(f"estimate: {format_estimate(seconds)} in all")


def format_took(seconds: float, estimated_s: float) -> str:
    return f"took {seconds:.0f} s (estimated {estimated_s:.0f} s)"


class TimedRun:
    def __init__(self, progress: Progress, estimate: Estimate) -> None:
        self.progress = progress
        self.estimate = estimate

    @contextmanager
    def part(self, words: str, *names: str) -> Iterator[Wait]:
        """Show ``names`` as one wait; the block reports the seconds of several parts."""
        expected_s = sum(self.estimate.seconds_of(name) for name in names)
        with self.progress.wait(words, expected_s) as wait:
            yield wait
        if len(names) == 1:
            self.on_part(names[0], wait.seconds)

    def on_part(self, name: str, seconds: float) -> None:
        self.estimate.on_part(name, seconds)
        if words := self.estimate.correction(self.progress.seconds):
            self.progress.say(words)

    def format_took(self) -> str:
        return format_took(self.progress.seconds, self.estimate.first_s)
