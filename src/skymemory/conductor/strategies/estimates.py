"""Seconds that a prefill takes at each server: from a cost model that was given, or learned from first bytes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Protocol

from skymemory import native
from skymemory.conductor.fleet import PrefillTotals, Server
from skymemory.errors import InvalidInput
from skymemory.native.twin.ttft import delays_s


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
    """What one cost model says, times the part of it that servers are seen to need: a model may be off.

    Servers that are about alike get the same factor. With one each, chance would tell them apart by some thousandths,
    no two idle ones would tie, and nearly all requests would go to the luckiest while the others are idle.
    """

    KEPT, ENOUGH, MOST = 32, 8, 16.0
    ALIKE = 0.1
    """So far from what is usual, as a part of it, a server is like the others."""
    EVERY = 8
    """Observations from one comparison of the servers to the next."""

    def __init__(self, cost: PrefillCost) -> None:
        super().__init__()
        self.cost = cost
        self._ratios: dict[int, deque[float]] = {}
        self._own: dict[int, float] = {}
        """What each server is seen to need."""
        self._factors: dict[int, float] = {}
        self._count = 0

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
            new = slot not in self._own
            self._own[slot] = min(self.MOST, max(1.0 / self.MOST, median(ratios)))
            self._count += 1
            if new or self._count % self.EVERY == 0:
                self._compare()

    def observe_whole(self, slot: int, tokens: int, cached: int, output_tokens: int, seconds: float) -> None:
        pass

    def forget(self, slot: int) -> None:
        super().forget(slot)
        self._ratios.pop(slot, None)
        self._own.pop(slot, None)
        self._factors.pop(slot, None)

    def _compare(self) -> None:
        usual = median(self._own.values())
        near = self.ALIKE * usual
        self._factors = {slot: usual if abs(own - usual) <= near else own for slot, own in self._own.items()}


Line = tuple[float, float, float]
"""Fixed seconds, seconds per computed token, and how much of those again per token that it attends to (twice)."""
UNKNOWN: Line = (0.02, 1e-4, 0.0)
"""Before anything was observed: 10,000 tokens per second. Only proportions matter then, not the speed."""
_NO_LINE: Line = (math.nan, math.nan, math.nan)
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
        self.changes = 0
        """How often a line has become another."""
        self.curves = array("d", UNKNOWN)
        """For ``native.TtftRanker``: the line of servers that have none, and that of each slot, or NaNs."""

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
        held = cached if cached < tokens else tokens - 1
        point = (float(tokens) if tokens > 1 else 1.0, float(held) if held > 0 else 0.0, seconds)
        seen = self._seen.get(slot)
        if seen is None:
            seen = self._seen[slot] = deque(maxlen=self.KEPT)
        seen.append(point)
        self._together.append(point)
        self._count += 1
        # Every observation while they are few, then one in eight.
        if len(seen) >= self.ENOUGH and (len(seen) < 2 * self.ENOUGH or self._count % 8 == 0):
            self._lines[slot] = line = native.fit_prefills(seen, self.line(slot)[2])
            self._show(slot, line)
            self._show_common()
        if len(self._together) >= self.ENOUGH and (self._count < self.KEPT or self._count % 32 == 0):
            self._common = native.fit_prefills(self._together, self._common[2])
            self._show_common()

    def observe_whole(self, slot: int, tokens: int, cached: int, output_tokens: int, seconds: float) -> None:
        if self._lines:
            return
        held = cached if cached < tokens else tokens - 1
        self._whole.append(
            (float(tokens) if tokens > 1 else 1.0, float(held) if held > 0 else 0.0, float(output_tokens), seconds)
        )
        self._count += 1
        if len(self._whole) >= 4 * self.ENOUGH and self._count % 8 == 0:
            self._of_whole = native.fit_whole(self._whole)
            self._show_common()

    def forget(self, slot: int) -> None:
        super().forget(slot)
        self._seen.pop(slot, None)
        if self._lines.pop(slot, None) is not None:
            self._show(slot, _NO_LINE)
            self._show_common()

    def _show(self, slot: int, line: Line) -> None:
        self.changes += 1
        missing = slot + 2 - len(self.curves) // 3
        if missing > 0:
            self.curves.extend(_NO_LINE * missing)
        self.curves[3 * slot + 3 : 3 * slot + 6] = array("d", line)

    def _show_common(self) -> None:
        self.changes += 1
        self.curves[:3] = array("d", self._common if self._lines or self._of_whole is None else self._of_whole)


# What a second of computing at a server costs the requests that will come after it.
#
# A server's queue of ``w`` seconds delays, as long as it lasts, everyone who comes behind it: where requests arrive at
# rate ``r`` and keep the server busy for a part ``b`` of its time, by ``r·w² / (2·(1 − b))`` seconds in all (the value
# function of such a queue; Hyytiä, Penttinen and Aalto, "Size- and state-aware dispatching problem with queue-specific
# job sizes", 2012). So ``e`` seconds more cost them ``r / (1 − b) · e · (w + e / 2)``. The formula takes later
# requests
# to come whatever the queue is; ours look at it and go elsewhere, which makes it less, and estimates of waiting err,
# which makes caches worth more: so ``weight`` times it counts, as tuned.
#
# That they can go elsewhere, and that the queue ends, holds as long as some server is free. Where even the shortest
# queue
# is long, all of them last, and a second of work delays those who come later by about as much wherever it is done: by
# ``q / (q + 1)``, for a shortest queue of ``q`` usual prefills, its length counts in place of the server's own, and
# the
# price rises (``CROWDED``).
#
# Rate and business are those of the requests sent lately: nothing is configured, and with little traffic the price is
# nothing.


class DelayPrice(native.DelayPrice):
    """``window_s``: what was sent so long ago counts for 1/e. ``most_busy``: a business above it is taken for it."""

    def __init__(self, weight: float = 0.3, window_s: float = 60.0, most_busy: float = 0.9) -> None:
        if weight < 0 or not window_s > 0 or not 0 <= most_busy < 1:
            raise InvalidInput(
                f"a price of delay of weight {weight:g} over {window_s:g} s, at most {most_busy:g} busy;"
                " expected 0 or more, more than 0 s, and less than 1"
            )
        super().__init__(weight, window_s, most_busy)

    def delays_s(self, waits_s: Sequence[float], works_s: Sequence[float], usual_s: float, now_s: float) -> list[float]:
        """Seconds that later requests wait longer in all, where this work is put behind the queue of each server.

        ``usual_s``: what a prefill takes, lately.
        """
        return delays_s(waits_s, works_s, usual_s, self.rate(len(waits_s), now_s))
