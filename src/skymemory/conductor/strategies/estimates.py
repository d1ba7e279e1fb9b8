"""Seconds that a prefill takes at each server: from a cost model that was given, or learned from first bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from skymemory.conductor.fleet import PrefillTotals, Server


class PrefillCost(Protocol):
    """Such as ``cost_model.CostModel``."""

    def prefill_s(self, tokens: float, cached: float = 0) -> float:
        """Seconds to prefill ``tokens`` of which the first ``cached`` are cached, alone on the machine."""
        ...


class Speeds(Protocol):
    def prefills_s(self, slots: Sequence[int], tokens: int, cached: Sequence[int]) -> list[float]:
        """Seconds for a prompt of ``tokens``, per server with what it has cached of it."""
        ...

    def observe(self, slot: int, tokens: int, cached: int, seconds: float) -> None:
        """A server took so long for a prompt of ``tokens`` of which it had the first ``cached``."""
        ...

    def observe_whole(self, slot: int, tokens: int, cached: int, output_tokens: int, seconds: float) -> None:
        """A server took about so long for such a prompt and its answer together."""
        ...

    def hear(self, servers: Sequence[Server]) -> None:
        """What their latest reports say of prefills."""
        ...

    def forget(self, slot: int) -> None: ...


class _Hearing(ABC):
    """Takes what engines tell of their prefills for observations: means of those that ended since the last report."""

    def __init__(self) -> None:
        self._totals: dict[int, PrefillTotals] = {}

    @abstractmethod
    def observe(self, slot: int, tokens: int, cached: int, seconds: float) -> None: ...

    def hear(self, servers: Sequence[Server]) -> None:
        for server in servers:
            report = server.reported
            now = None if report is None else report.prefills
            before = self._totals.get(server.slot)
            if now is before or now is None:
                continue
            self._totals[server.slot] = now
            if before is None or (ended := now.requests - before.requests) <= 0:
                continue  # the first that it says, or it was started anew
            ratio = server.read_per_token / ended
            tokens, computed = (now.tokens - before.tokens) * ratio, (now.computed - before.computed) * ratio
            self.observe(server.slot, round(tokens), round(tokens - computed), (now.seconds - before.seconds) / ended)

    def forget(self, slot: int) -> None:
        self._totals.pop(slot, None)


class GivenSpeeds(_Hearing):
    """What one cost model says, times the part of it that each server is seen to need: a model may be off."""

    KEPT, ENOUGH, MOST = 32, 8, 16.0

    def __init__(self, cost: PrefillCost) -> None:
        super().__init__()
        self.cost = cost
        self._ratios: dict[int, deque[float]] = {}
        self._factors: dict[int, float] = {}

    def prefills_s(self, slots: Sequence[int], tokens: int, cached: Sequence[int]) -> list[float]:
        if not tokens:
            return [0.0] * len(slots)
        seconds: dict[int, float] = {}
        for held in cached:
            if held not in seconds:
                seconds[held] = self.cost.prefill_s(tokens, held)
        if not self._factors:
            return [seconds[held] for held in cached]
        return [seconds[held] * self._factors.get(slot, 1.0) for slot, held in zip(slots, cached, strict=True)]

    def observe(self, slot: int, tokens: int, cached: int, seconds: float) -> None:
        expected_s = self.cost.prefill_s(max(1, tokens), max(0, min(cached, tokens - 1)))
        if seconds <= 0 or expected_s <= 0:
            return
        ratios = self._ratios.setdefault(slot, deque(maxlen=self.KEPT))
        ratios.append(seconds / expected_s)
        if len(ratios) >= self.ENOUGH:
            self._factors[slot] = min(self.MOST, max(1.0 / self.MOST, median(ratios)))

    def observe_whole(self, slot: int, tokens: int, cached: int, output_tokens: int, seconds: float) -> None:
        pass

    def forget(self, slot: int) -> None:
        super().forget(slot)
        self._ratios.pop(slot, None)
        self._factors.pop(slot, None)


Line = tuple[float, float, float]
"""Fixed seconds, seconds per computed token, and how much of those again per token that it attends to (twice)."""
UNKNOWN: Line = (0.02, 1e-4, 0.0)
"""Before anything was observed: 10,000 tokens per second. Only proportions matter then, not the speed."""
BENDS = (0.0, 5e-6, 1e-5, 2e-5, 4e-5, 8e-5)
"""Of the last: attention over weights, by the cost model's ``a / (b·d)``: 2.2e-5 for a width of 8192."""
Point = tuple[float, float, float]
"""Tokens of a prompt, how many were cached, and the seconds it took."""


class LearnedSpeeds(_Hearing):
    """A curve through the latest observations of each server, without those that lie far off it.

    It has the shape of ``cost_model``: n tokens of which p are cached take ``fixed + s·(n − p)·(1 + bend·(n + p))``. A
    server with fewer than ``ENOUGH`` takes the curve of all servers together. Nobody has to configure a speed, and a
    slow server among fast ones is found out by itself.
    """

    KEPT = 32
    ENOUGH = 4

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, deque[Point]] = {}
        self._lines: dict[int, Line] = {}
        self._together: deque[Point] = deque(maxlen=2 * self.KEPT)
        self._common: Line = UNKNOWN
        self._whole: deque[tuple[float, float, float, float]] = deque(maxlen=4 * self.KEPT)
        self._of_whole: Line | None = None
        self._count = 0

    def line(self, slot: int) -> Line:
        return self._lines.get(slot, self._common)

    def prefills_s(self, slots: Sequence[int], tokens: int, cached: Sequence[int]) -> list[float]:
        lines, common = self._lines, self._common
        if not lines and self._of_whole is not None:
            common = self._of_whole
        seconds = []
        for slot, held in zip(slots, cached, strict=True):
            fixed_s, per_token_s, bend = lines.get(slot, common)
            seconds.append(fixed_s + per_token_s * (tokens - held) * (1.0 + bend * (tokens + held)))
        return seconds

    def observe(self, slot: int, tokens: int, cached: int, seconds: float) -> None:
        point = (float(max(1, tokens)), float(max(0, min(cached, tokens - 1))), seconds)
        seen = self._seen.setdefault(slot, deque(maxlen=self.KEPT))
        seen.append(point)
        self._together.append(point)
        self._count += 1
        # Every observation while they are few, then one in eight: a fit takes some 0.2 ms.
        if len(seen) >= self.ENOUGH and (len(seen) < 2 * self.ENOUGH or self._count % 8 == 0):
            self._lines[slot] = fit(seen, self.line(slot)[2])
        if len(self._together) >= self.ENOUGH and (self._count < self.KEPT or self._count % 32 == 0):
            self._common = fit(self._together, self._common[2])

    def observe_whole(self, slot: int, tokens: int, cached: int, output_tokens: int, seconds: float) -> None:
        if self._lines:
            return
        self._whole.append(
            (float(max(1, tokens)), float(max(0, min(cached, tokens - 1))), float(output_tokens), seconds)
        )
        self._count += 1
        if len(self._whole) >= 4 * self.ENOUGH and self._count % 8 == 0:
            self._of_whole = fit_whole(self._whole)

    def forget(self, slot: int) -> None:
        super().forget(slot)
        self._seen.pop(slot, None)
        self._lines.pop(slot, None)


def fit(points: Sequence[Point], bend: float = 0.0) -> Line:
    """The best curve whose bend is ``bend`` or next to it in ``BENDS``; more bend must be better by a twentieth.

    Best is the least mean error, without the worst sixteenth of the points.
    """
    tokens, cached, seconds = np.array(points, dtype=np.float64).T
    at = BENDS.index(bend)
    tried = BENDS[max(0, at - 1) : at + 2]
    work = (tokens - cached) * (1.0 + np.array(tried)[:, None] * (tokens + cached))
    lines = _lines(work, seconds)
    kept = len(points) - len(points) // 16
    errors = np.sort(np.abs(seconds - lines[:, :1] - lines[:, 1:] * work), axis=1)[:, :kept].mean(axis=1).tolist()
    best = 0
    for other in range(1, len(tried)):
        if errors[other] < 0.95 * errors[best]:
            best = other
    fixed_s, per_token_s = lines[best].tolist()
    return fixed_s, per_token_s, tried[best]


_SURE = 4.0
"""Standard errors that what a prompt's token takes must be above nothing: it is known within a half then."""


def fit_whole(points: Sequence[tuple[float, float, float, float]]) -> Line | None:
    """The same where what is known is the time of prefill and answer together: tokens, cached, tokens of the answer,
    and seconds. Each token of an answer is taken to need the same time.

    None where that does not show what a prompt's token takes: beside long answers, whose times differ by more than a
    prefill takes, the likeliest figure may be next to nothing, and with it no cache would be worth a detour.
    """
    tokens, cached, output, seconds = np.array(points, dtype=np.float64).T
    best: tuple[float, Line] | None = None
    for bend in BENDS:
        work = (tokens - cached) * (1.0 + bend * (tokens + cached))
        terms = np.stack([work, output], axis=1)
        near = np.ones(len(points), bool)
        for _ in range(4):
            found, *_ = np.linalg.lstsq(terms[near], seconds[near], rcond=None)
            errors = np.abs(seconds - terms @ found)
            near = errors <= 3.0 * np.median(errors) + 1e-9
        error = float(np.sort(errors)[: len(points) * 3 // 4].mean())
        spread = terms.T @ terms
        off = float(np.square(errors).sum()) / (len(points) - 2)  # with those far off: they are part of the doubt
        shows = found[0] > 0 and off * spread[1, 1] <= (found[0] / _SURE) ** 2 * np.linalg.det(spread)
        if shows and found[1] >= 0 and (best is None or error < 0.95 * best[0]):
            best = error, (0.0, float(found[0]), bend)
    return None if best is None else best[1]


Columns = NDArray[np.float64]
"""A row for each bend that is tried."""


def _lines(work: Columns, seconds: Columns) -> Columns:
    """Least squares, then again without points more than three usual errors off the line: fixed, per work.

    An error is usual for the point's size: three seconds are much for a short prompt and little for a long one.
    """
    lines = _least_squares(work, seconds, np.ones(work.shape))
    for _ in range(2):
        there = lines[:, :1] + lines[:, 1:] * work
        errors = np.abs(seconds - there) / there
        near = errors <= 3.0 * _medians(errors) + 1e-9
        lines = _least_squares(work, seconds, near.astype(np.float64))
    return lines


def _medians(rows: Columns) -> Columns:
    """As ``np.median``, which takes as long as all else here together."""
    half = rows.shape[1] // 2
    ordered = np.sort(rows, axis=1)
    return (ordered[:, half : half + 1] + ordered[:, (rows.shape[1] - 1) // 2, None]) / 2.0


def _least_squares(work: Columns, seconds: Columns, near: Columns) -> Columns:
    """Never a negative part: prompts of one length only say what a token takes, not what is fixed."""
    count = near.sum(axis=1)
    work_mean, seconds_mean = (near * work).sum(axis=1) / count, (near * seconds).sum(axis=1) / count
    off = (work - work_mean[:, None]) * near
    spread = (off * off).sum(axis=1) / count
    lean = (off * (seconds - seconds_mean[:, None])).sum(axis=1) / count
    wide = spread >= (0.1 * work_mean) ** 2
    per_work_s = np.where(wide, lean, 0.0) / np.where(wide, spread, 1.0)
    fixed_s = seconds_mean - per_work_s * work_mean
    straight = wide & (fixed_s >= 0.0) & (per_work_s > 0.0)
    through_zero = np.maximum(1e-9, seconds_mean / work_mean)
    return np.stack([np.where(straight, fixed_s, 0.0), np.where(straight, per_work_s, through_zero)], axis=1)
