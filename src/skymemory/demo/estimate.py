"""The time that a demo will take: estimated part by part before it starts, corrected by the parts that were measured.

Parts of one ``kind`` are estimated from one speed: if the first takes twice as long, so will the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from skymemory.progress import Progress, Wait

_CORRECTED_FROM = 0.15
"""Share of the last printed estimate by which a new one must differ to be printed."""


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of one part of a run."""

    name: str
    seconds: float
    kind: str = ""
    """Parts with the same kind are corrected together; empty: by its own name."""


class Estimate:
    """The parts of a run in their order."""

    def __init__(self, parts: Iterable[Part], *, spent_s: float = 0.0) -> None:
        """``spent_s``: seconds of the run before the first part, such as those of the probe."""
        self._waiting = list(parts)
        self._ratios: dict[str, float] = {}
        self.first_s = self._printed_s = spent_s + sum(part.seconds for part in self._waiting)
        """The estimate of the whole before it starts."""

    def seconds_of(self, name: str) -> float:
        """Seconds that the next part of this name will take, as corrected so far. Raises KeyError if none waits."""
        for part in self._waiting:
            if part.name == name:
                return self._corrected_s(part)
        raise KeyError(name)

    def on_part(self, name: str, seconds: float) -> None:
        """Corrects the parts that wait by the ``seconds`` that this one took. Raises KeyError if none waits."""
        for at, part in enumerate(self._waiting):
            if part.name == name:
                del self._waiting[at]
                if part.seconds > 0:
                    self._ratios[part.kind or part.name] = seconds / part.seconds
                return
        raise KeyError(name)

    def skip(self, prefix: str) -> None:
        """Drops the parts whose names begin with ``prefix``."""
        self._waiting = [part for part in self._waiting if not part.name.startswith(prefix)]

    @property
    def remaining_s(self) -> float:
        """Seconds of the parts that wait, as corrected so far."""
        return sum(self._corrected_s(part) for part in self._waiting)

    def correction(self, elapsed_s: float) -> str:
        """Words for a changed estimate of the whole, ``elapsed_s`` after its start; empty if it changed little."""
        whole_s = elapsed_s + self.remaining_s
        if abs(whole_s - self._printed_s) <= max(2.0, _CORRECTED_FROM * self._printed_s):
            return ""
        self._printed_s = whole_s
        return f"estimate corrected: {format_estimate(whole_s)} in all, {format_estimate(self.remaining_s)} to go"

    def _corrected_s(self, part: Part) -> float:
        return part.seconds * self._ratios.get(part.kind or part.name, 1.0)


def format_estimate(seconds: float) -> str:
    """``83.4`` → "about 83 s"; from five minutes on in minutes."""
    if not math.isfinite(seconds):
        return "an unknown time"
    return f"about {seconds:.0f} s" if seconds < 300 else f"about {seconds / 60:.0f} minutes"


def say_estimate(progress: Progress, seconds: float) -> None:
    """Prints the first estimate of a run: its length, and when it will have ended."""
    progress.say(f"estimate: {format_estimate(seconds)} in all")


def took(seconds: float, estimated_s: float) -> str:
    """The last line of every demo."""
    return f"took {seconds:.0f} s (estimated {estimated_s:.0f} s)"


class TimedRun:
    """A run with its estimate: each part is a wait whose progress is shown, and whose time corrects the others."""

    def __init__(self, progress: Progress, estimate: Estimate) -> None:
        self.progress = progress
        self.estimate = estimate

    @contextmanager
    def part(self, words: str, *names: str) -> Iterator[Wait]:
        """Shows the parts called ``names`` under way as one wait, ``words``.

        The block reports the seconds of each by ``on_part`` if they are several; of a single one they are the block's.
        """
        expected_s = sum(self.estimate.seconds_of(name) for name in names)
        with self.progress.wait(words, expected_s) as wait:
            yield wait
        if len(names) == 1:
            self.on_part(names[0], wait.seconds)

    def on_part(self, name: str, seconds: float) -> None:
        """Records what a part took; prints the estimate if it changed much."""
        self.estimate.on_part(name, seconds)
        if words := self.estimate.correction(self.progress.seconds):
            self.progress.say(words)

    def took(self) -> str:
        """The last line: seconds since the start, and as they were estimated before it."""
        return took(self.progress.seconds, self.estimate.first_s)
