"""Congestion control: timeouts (``RoundTrip``), windows, shares of a receive buffer (``Credit``), rate limits
(``Throttle``).
"""

from __future__ import annotations

import math

RTO_FLOOR_S = 0.020
"""Minimum margin over the round trip: 3 ms mistook scheduling for loss."""
RTO_CEILING_S = 2.0
SENDERS_PERIOD_S = 0.5
SHORT_HOLD_S = 0.02
LONG_HOLD_S = 1.0
_AT_ONCE = 64


class RoundTrip:
    """Smoothed round trip (RFC 6298), ``expected_s`` by geometry until measured."""

    def __init__(self, expected_s: float = 0.0) -> None:
        self._expected_s = expected_s
        self.forget()

    def forget(self) -> None:
        self.smoothed_s = self.latest_s = self._longest_s = self._expected_s
        self._deviation_s = 0.0
        self._is_measured = False

    def rerouted(self) -> None:
        """Assume the longest round trip until the new route is measured."""
        self.smoothed_s = self._longest_s
        self._is_measured = False

    def sample(self, round_trip_s: float) -> None:
        self.latest_s = round_trip_s
        if round_trip_s > self._longest_s:
            self._longest_s = round_trip_s
        if not self._is_measured:
            self.smoothed_s, self._deviation_s = round_trip_s, round_trip_s / 2
            self._is_measured = True
            return
        self._deviation_s += (abs(round_trip_s - self.smoothed_s) - self._deviation_s) / 4
        self.smoothed_s += (round_trip_s - self.smoothed_s) / 8

    def timeout_s(self) -> float:
        """Return ``SRTT + 4·VAR``, at least 20 ms above SRTT."""
        if not self._is_measured:
            return 2 * self.smoothed_s + 2.5 * RTO_FLOOR_S
        return min(max(self.smoothed_s + 4 * self._deviation_s, self.smoothed_s + RTO_FLOOR_S), RTO_CEILING_S)


class Window:
    """Bytes that may be in flight: halved on loss (once per round trip), growing with answers."""

    def __init__(
        self, limit_bytes: int, floor_bytes: int, rate_bytes_s: float = math.inf, most_bytes: int | None = None
    ) -> None:
        """Create a window for a link that holds ``most_bytes``."""
        self.rate_bytes_s = rate_bytes_s
        self._most_bytes = most_bytes
        self.passed_bytes = 0
        """Bytes answered or given up: the link's own clock."""
        self.moved_s = -math.inf
        self.limit_bytes = limit_bytes
        self._floor_bytes = min(floor_bytes, limit_bytes)
        self.size_bytes = limit_bytes
        self.in_flight_bytes = 0
        self._halved_until_s = 0.0
        self._bytes_before_halving = 0

    def offer(self, limit_bytes: int) -> None:
        """Adopt a limit that the receiver offers. A window that is not reduced grows with it."""
        if self._most_bytes is not None:
            limit_bytes = min(limit_bytes, self._most_bytes)
        if limit_bytes != self.limit_bytes:
            wide_open = self.size_bytes == self.limit_bytes
            self.limit_bytes = max(limit_bytes, self._floor_bytes)
            self.size_bytes = self.limit_bytes if wide_open else min(self.size_bytes, self.limit_bytes)

    @property
    def open_bytes(self) -> int:
        return self.size_bytes - self.in_flight_bytes

    def admits(self, size_bytes: int) -> bool:
        """Return True if a request fits; with nothing in flight, any does."""
        return self.in_flight_bytes == 0 or self.in_flight_bytes + size_bytes <= self.size_bytes

    def sent(self, size_bytes: int) -> None:
        self.in_flight_bytes += size_bytes

    def answered(self, size_bytes: int) -> None:
        self.passed_bytes += size_bytes
        self.in_flight_bytes = max(0, self.in_flight_bytes - size_bytes)
        if self.size_bytes < self.limit_bytes:
            self.size_bytes = min(self.limit_bytes, self.size_bytes + max(1, size_bytes // 2))

    def given_up(self, size_bytes: int) -> None:
        self.passed_bytes += size_bytes
        self.in_flight_bytes = max(0, self.in_flight_bytes - size_bytes)

    def lost(self, now_s: float, round_trip_s: float) -> None:
        if now_s >= self._halved_until_s:
            self._bytes_before_halving = self.size_bytes
            self.size_bytes = max(self._floor_bytes, self.size_bytes // 2)
            self._halved_until_s = now_s + max(round_trip_s, RTO_FLOOR_S)

    def not_lost(self) -> None:
        """Undo the last cut: the answer was only late."""
        self.size_bytes = max(self.size_bytes, min(self._bytes_before_halving, self.limit_bytes))


QUEUE_S = 0.02


_LEAST_QUEUE_BYTES = 24 * 1024


def link_window_bytes(bytes_per_s: float, round_trip_s: float, buffer_bytes: int) -> int:
    return int(min(bytes_per_s * (2 * round_trip_s + QUEUE_S) + _LEAST_QUEUE_BYTES, buffer_bytes))


class Credit:
    """Receive window offered to each sender (``each_bytes``): an equal share of the buffer among recent senders."""

    def __init__(self, buffer_bytes: int, least_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._least_bytes = min(least_bytes, buffer_bytes)
        self._senders: set[int] = set()
        self._senders_before = 0
        self._until_s = -math.inf
        self.each_bytes = buffer_bytes

    def record_sender(self, sender: int, now_s: float) -> None:
        """Count a sender of this half second, and set the shares."""
        if now_s < self._until_s and sender in self._senders:
            return
        if now_s >= self._until_s:
            self._senders_before = len(self._senders) if now_s < self._until_s + SENDERS_PERIOD_S else 0
            self._senders.clear()
            self._until_s = now_s + SENDERS_PERIOD_S
        self._senders.add(sender)
        senders = max(len(self._senders), self._senders_before)
        self.each_bytes = max(self._least_bytes, self._buffer_bytes // senders)


class Throttle:
    """Limit on how often others may trigger an action: prompt while rare, once per second under load.

    At most ``t / LONG_HOLD_S + at_once`` runs in any ``t`` seconds, ``short_hold_s`` apart (as SPF throttling, RFC
    8405).
    """

    def __init__(self, at_once: int = _AT_ONCE, short_hold_s: float = SHORT_HOLD_S) -> None:
        self._burst_s = (at_once - 1) * LONG_HOLD_S
        self._short_hold_s = short_hold_s
        self.open_s = 0.0
        self._earned_s = -math.inf

    def is_open(self, now_s: float) -> bool:
        return now_s >= self.open_s

    def done(self, now_s: float) -> None:
        self._earned_s = max(self._earned_s, now_s - self._burst_s) + LONG_HOLD_S
        self.open_s = max(now_s + self._short_hold_s, self._earned_s)
