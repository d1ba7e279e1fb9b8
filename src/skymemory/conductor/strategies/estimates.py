"""Estimates of prefill times per server, from a cost model or learnt from first bytes, and the price of delay."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from skymemory import native
from skymemory.conductor.picker import PrefillTotals, Server
from skymemory.errors import InvalidInput
from skymemory.native.twin.ttft import delays_s

Point = tuple[float, float, float]
"""Prompt tokens, cached tokens, seconds."""


class PrefillCost(Protocol):
    def prefill_s(self, tokens: float, cached: float = 0) -> float: ...


class ServerSpeeds(ABC):
    """Prefill times per server, learnt from first bytes and from the totals that engines report."""

    def __init__(self) -> None:
        self._totals: dict[int, PrefillTotals] = {}
        self._streamed: set[int] = set()
        """Servers whose first bytes were seen."""

    @abstractmethod
    def prefills_s(self, slots: Sequence[int], tokens: int, cached: Sequence[int]) -> list[float]:
        """Return the seconds of a prompt per server, given its cached tokens."""

    @abstractmethod
    def observe(self, slot: int, tokens: float, cached: float, seconds: float) -> None:
        """Record a prefill, or the mean of some."""

    @abstractmethod
    def observe_whole(self, slot: int, tokens: int, cached: int, output_tokens: int, seconds: float) -> None:
        """Record the time of a whole answer."""

    @abstractmethod
    def seen(self, slot: int) -> int:
        """Return the number of prefills observed at a server, up to a bound."""

    @abstractmethod
    def per_token_s(self, slot: int) -> float:
        """Return the seconds that a token more adds to the prefill of a short prompt."""

    def read_reports(self, servers: Sequence[Server]) -> None:
        """Learn from the engines' counters, the mean prefill since the last report, while no first byte was seen."""
        for server in servers:
            if server.slot in self._streamed:
                continue
            report = server.reported
            now = None if report is None else report.prefills
            before = self._totals.get(server.slot)
            if now is before or now is None:
                continue
            self._totals[server.slot] = now
            if before is None or (requests := now.requests - before.requests) <= 0:
                continue  # its first report, or it restarted
            # Totals count the engine's tokens; curves are over our tokens.
            ratio = server.read_per_token / requests
            tokens, computed = (now.tokens - before.tokens) * ratio, (now.computed - before.computed) * ratio
            self.observe(server.slot, tokens, tokens - computed, (now.seconds - before.seconds) / requests)

    def observe_first(self, slot: int, tokens: float, cached: float, seconds: float) -> None:
        """Record prefills that first bytes have shown: their means."""
        self._streamed.add(slot)
        self.observe(slot, tokens, cached, seconds)

    def forget(self, slot: int) -> None:
        self._totals.pop(slot, None)
        self._streamed.discard(slot)


@dataclass(slots=True)
class _Interval:
    """Time in which a server has prefills without a break."""

    begin_s: float = 0.0
    open: int = 0
    unseen: int = 0
    """Open ones that are not streamed."""
    ended: int = 0
    tokens: float = 0.0
    cached: float = 0.0
    loading_s: float = 0.0
    spoiled: bool = False

    def begin(self, now_s: float) -> None:
        self.begin_s, self.ended, self.tokens, self.cached, self.loading_s = now_s, 0, 0.0, 0.0, 0.0
        self.spoiled = self.unseen > 0


class BusyIntervals:
    """Mean prefills of a server in the intervals in which it is busy.

    How long a single prefill takes shows only where they come one by one: engines that batch prefills end several at
    once. Over an interval from idle to idle both take as long as their sum; a longer one is cut at ``MOST`` ends.
    """

    MOST = 8

    def __init__(self) -> None:
        self._of: dict[int, _Interval] = {}

    def sent(self, slot: int, now_s: float, *, is_seen: bool) -> None:
        """``is_seen``: its first byte will show when its prefill ends."""
        interval = self._of.setdefault(slot, _Interval())
        if not interval.open:
            interval.begin(now_s)
        interval.open += 1
        if not is_seen:
            interval.unseen += 1
            interval.spoiled = True

    def ended(
        self, slot: int, tokens: int, cached: int, loading_s: float, now_s: float, seen: int, *, is_seen: bool
    ) -> Point | None:
        """Return the means of an interval that ends with this prefill, if one does, else None.

        ``seen``: prefills observed at this server so far; the first intervals are shorter.
        """
        interval = self._of.get(slot)
        if interval is None or not interval.open:
            return None
        interval.open -= 1
        interval.unseen -= not is_seen
        interval.ended += 1
        interval.tokens += tokens
        interval.cached += cached
        interval.loading_s += loading_s
        if interval.open and interval.ended < min(self.MOST, 1 + seen):
            return None
        count, seconds = interval.ended, now_s - interval.begin_s - interval.loading_s
        found = None
        if not interval.spoiled and seconds > 0:
            found = interval.tokens / count, interval.cached / count, seconds / count
        interval.begin(now_s)
        return found

    def failed(self, slot: int, *, is_seen: bool) -> None:
        interval = self._of.get(slot)
        if interval is not None and interval.open:
            interval.open -= 1
            interval.unseen -= not is_seen
            interval.spoiled = True

    def forget(self, slot: int) -> None:
        self._of.pop(slot, None)


class GivenSpeeds(ServerSpeeds):
    """Prefill times by a given cost model, corrected by a measured factor per server."""

    KEPT, ENOUGH, MOST = 32, 8, 16.0
    ALIKE = 0.1
    """Deviation from the median within which servers share a factor."""
    EVERY = 8

    def __init__(self, cost: PrefillCost) -> None:
        super().__init__()
        self.cost = cost
        self._ratios: dict[int, deque[float]] = {}
        self._own: dict[int, float] = {}
        self._factors: dict[int, float] = {}
        self._count = 0

    def prefills_s(self, slots: Sequence[int], tokens: int, cached: Sequence[int]) -> list[float]:
        if not tokens:
            return [0.0] * len(slots)
        # A cost model may be slow, and many servers hold the same number of tokens, namely none.
        seconds: dict[int, float] = {}
        for count in cached:
            if count not in seconds:
                seconds[count] = self.cost.prefill_s(tokens, count)
        if not self._factors:
            return [seconds[count] for count in cached]
        return [seconds[count] * self._factors.get(slot, 1.0) for slot, count in zip(slots, cached, strict=True)]

    def seen(self, slot: int) -> int:
        return len(self._ratios.get(slot, ()))

    def per_token_s(self, slot: int) -> float:
        return (self.cost.prefill_s(1024) - self.cost.prefill_s(512)) / 512 * self._factors.get(slot, 1.0)

    def observe(self, slot: int, tokens: float, cached: float, seconds: float) -> None:
        """Record a measured prefill; update the server's factor, the median ratio to the model."""
        expected_s = self.cost.prefill_s(max(1, tokens), max(0, min(cached, tokens - 1)))
        if seconds <= 0 or expected_s <= 0:
            return
        ratios = self._ratios.setdefault(slot, deque(maxlen=self.KEPT))
        ratios.append(seconds / expected_s)
        # The median, because a single prefill during a hang or a cold start must not set the server's speed.
        if len(ratios) >= self.ENOUGH:
            new = slot not in self._own
            self._own[slot] = min(self.MOST, max(1.0 / self.MOST, median(ratios)))
            self._count += 1
            if new or self._count % self.EVERY == 0:  # comparing sorts all servers
                self._compare()

    def observe_whole(self, slot: int, tokens: int, cached: int, output_tokens: int, seconds: float) -> None:
        pass  # the model is known: a whole answer, which includes decoding, corrects nothing

    def forget(self, slot: int) -> None:
        super().forget(slot)
        self._ratios.pop(slot, None)
        self._own.pop(slot, None)
        self._factors.pop(slot, None)

    def _compare(self) -> None:
        # Similar servers share a factor: else no idle servers would tie, and noise would send nearly all requests to
        # one server.
        usual = median(self._own.values())
        near = self.ALIKE * usual
        self._factors = {slot: usual if abs(own - usual) <= near else own for slot, own in self._own.items()}


Line = tuple[float, float, float]
"""Fixed seconds, seconds per computed token, and ``bend``."""
UNKNOWN: Line = (0.02, 1e-4, 0.0)
"""Initial curve, in which only proportions matter."""
_NO_LINE: Line = (math.nan, math.nan, math.nan)


class LearnedSpeeds(ServerSpeeds):
    """Curve per server through its latest observations, robust to outliers.

    n tokens, p of them cached, take ``fixed + s·(n − p)·(1 + bend·(n + p))`` seconds. A server with fewer than
    ``ENOUGH`` observations, or whose usual prompt takes as long as elsewhere, uses the common curve: else no idle
    servers would tie, and noise would choose.
    """

    KEPT = 32
    ENOUGH = 4
    ALIKE = 0.15
    """Deviation from the common curve, at the usual prompt, within which a server uses it."""
    EXPIRES = 64
    """Observations per server after which a curve that got no new one is dropped: a server that seemed slow is tried
    again.
    """

    def __init__(self) -> None:
        super().__init__()
        # Last observations and curve of each server, and of all servers together.
        self._seen: dict[int, deque[Point]] = {}
        self._fitted: dict[int, Line] = {}
        self._last: dict[int, int] = {}
        """``_count`` at a server's last observation."""
        self._lines: dict[int, Line] = {}
        """Curves of servers that differ."""
        self._usual: tuple[float, float] | None = None
        """Recent mean of a prompt's tokens and of those cached."""
        self._together: deque[Point] = deque(maxlen=2 * self.KEPT)
        self._common: Line = UNKNOWN
        # Answers that were not streamed, used while no prefill was seen alone.
        self._whole: deque[tuple[float, float, float, float]] = deque(maxlen=4 * self.KEPT)
        self._of_whole: Line | None = None
        self._count = 0
        self.changes = 0
        self.curves = array("d", UNKNOWN)
        """Common curve, then a curve per slot, NaNs if there is none (``native.TtftRanker``)."""

    def line(self, slot: int) -> Line:
        return self._lines.get(slot, self._common)

    def seen(self, slot: int) -> int:
        return len(self._seen.get(slot, ()))

    def per_token_s(self, slot: int) -> float:
        return self.line(slot)[1]

    def prefills_s(self, slots: Sequence[int], tokens: int, cached: Sequence[int]) -> list[float]:
        # Until a streamed answer has shown a prefill alone, the fit of whole answers is the best estimate.
        lines, common = self._lines, self._common
        if not self._fitted and self._of_whole is not None:
            common = self._of_whole
        seconds = []
        for slot, count in zip(slots, cached, strict=True):
            fixed_s, per_token_s, bend = lines.get(slot, common)
            seconds.append(fixed_s + per_token_s * (tokens - count) * (1.0 + bend * (tokens + count)))
        return seconds

    def observe(self, slot: int, tokens: float, cached: float, seconds: float) -> None:
        """Record a measured prefill; fit the server's curve and the common curve again now and then."""
        # At least one token is computed even for a fully cached prompt: its logits are needed.
        reused = cached if cached < tokens else tokens - 1
        point = (float(tokens) if tokens > 1 else 1.0, float(reused) if reused > 0 else 0.0, seconds)
        points = self._seen.get(slot)
        if points is None:
            points = self._seen[slot] = deque(maxlen=self.KEPT)
        points.append(point)
        self._together.append(point)
        self._count += 1
        self._last[slot] = self._count
        before = self._usual or point[:2]
        self._usual = before[0] + (point[0] - before[0]) / 16, before[1] + (point[1] - before[1]) / 16
        # Refit at every observation while they are few, then at every eighth.
        if len(points) >= self.ENOUGH and (len(points) < 2 * self.ENOUGH or self._count % 8 == 0):
            self._fitted[slot] = native.fit_prefills(points, self._fitted.get(slot, self._common)[2])
            self._compare(slot)
            self._show_common()
        if len(self._together) >= self.ENOUGH and (self._count < self.KEPT or self._count % 32 == 0):
            self._common = native.fit_prefills(self._together, self._common[2])
            for fitted in list(self._fitted):
                if self._count - self._last.get(fitted, 0) > self.EXPIRES * len(self._seen):
                    self._drop(fitted)
                else:
                    self._compare(fitted)
            self._show_common()
        elif len(self._together) < self.ENOUGH:
            # Too few points for a curve, but enough to scale the assumed speed.
            fixed_s, per_token_s, _ = UNKNOWN
            off = median(seconds / (fixed_s + per_token_s * (new - old)) for new, old, seconds in self._together)
            self._common = (fixed_s * off, per_token_s * off, 0.0)
            self._show_common()

    def observe_whole(self, slot: int, tokens: int, cached: int, output_tokens: int, seconds: float) -> None:
        """Record an answer that was not streamed, whose prefill time is not visible; used until any is."""
        if self._fitted:
            return  # first bytes are more precise
        reused = cached if cached < tokens else tokens - 1
        self._whole.append(
            (float(tokens) if tokens > 1 else 1.0, float(reused) if reused > 0 else 0.0, float(output_tokens), seconds)
        )
        self._count += 1
        count = len(self._whole)
        if count >= 4 * self.ENOUGH and self._count % (8 if count < 4 * self.KEPT else 32) == 0:
            self._of_whole = native.fit_whole(self._whole)
            self._show_common()

    def forget(self, slot: int) -> None:
        super().forget(slot)
        self._drop(slot)
        self._show_common()

    def _drop(self, slot: int) -> None:
        self._seen.pop(slot, None)
        self._last.pop(slot, None)
        self._fitted.pop(slot, None)
        if self._lines.pop(slot, None) is not None:
            self._show(slot, _NO_LINE)

    def _compare(self, slot: int) -> None:
        """Let a server use its own curve if its usual prompt takes longer or shorter there."""
        line = self._fitted[slot]
        assert self._usual is not None
        own_s, common_s = _prefill_s(line, *self._usual), _prefill_s(self._common, *self._usual)
        is_alike = len(self._together) >= self.ENOUGH and abs(own_s - common_s) <= self.ALIKE * common_s
        if not is_alike:
            self._lines[slot] = line
            self._show(slot, line)
        elif self._lines.pop(slot, None) is not None:
            self._show(slot, _NO_LINE)

    def _show(self, slot: int, line: Line) -> None:
        self.changes += 1
        missing = slot + 2 - len(self.curves) // 3
        if missing > 0:
            self.curves.extend(_NO_LINE * missing)
        self.curves[3 * slot + 3 : 3 * slot + 6] = array("d", line)

    def _show_common(self) -> None:
        self.changes += 1
        self.curves[:3] = array("d", self._common if self._fitted or self._of_whole is None else self._of_whole)


def _prefill_s(line: Line, tokens: float, cached: float) -> float:
    fixed_s, per_token_s, bend = line
    return fixed_s + per_token_s * (tokens - cached) * (1.0 + bend * (tokens + cached))


class DelayPrice(native.DelayPrice):
    """Delay that a second of compute on a server causes to later requests.

    With arrivals at rate ``r`` and a busy share ``b``, a queue of ``w`` seconds delays later requests by
    ``r·w² / (2·(1 − b))`` seconds in total (Hyytiä, Penttinen and Aalto, "Size- and state-aware dispatching problem
    with queue-specific job sizes", 2012). So ``e`` more seconds cost ``r / (1 − b) · e · (w + e / 2)``. ``weight`` is
    tuned.

    Rate and busy share (at most ``most_busy``) are measured with exponential weights over ``window_s``.
    """

    def __init__(self, weight: float = 0.3, window_s: float = 60.0, most_busy: float = 0.9) -> None:
        if weight < 0 or not window_s > 0 or not 0 <= most_busy < 1:
            raise InvalidInput(
                f"delay price with weight {weight:g}, window_s {window_s:g}, most_busy {most_busy:g};"
                " expected ≥ 0, > 0, and from 0 to below 1"
            )
        super().__init__(weight, window_s, most_busy)

    def delays_s(self, waits_s: Sequence[float], works_s: Sequence[float], usual_s: float, now_s: float) -> list[float]:
        """Return the delay of later requests by this work on each server."""
        # If even the shortest queue q (in usual prefills) is long, work on any server delays later requests alike: with
        # share q / (q + 1) the shortest queue replaces the server's own, and the price rises (``CROWDED``).
        return delays_s(waits_s, works_s, usual_s, self.rate(len(waits_s), now_s))
