"""Limits of retries: the sends of a request, and the share of retries among all requests."""

from __future__ import annotations

import math
from collections import deque

WINDOW_S = 10
"""Window, as in Finagle's budget."""
FIRST_S, MOST_S = 0.025, 0.25
"""First and maximum back-off; Envoy's ``base_interval`` and ``max_interval``."""


class Sends:
    """Limit of a request's sends, and their count."""

    __slots__ = ("count", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0

    @property
    def remaining(self) -> int:
        return self.most - self.count

    def take(self) -> bool:
        if self.count >= self.most:
            return False
        self.count += 1
        return True

    def take_back(self) -> None:
        self.count -= 1


class RetryBudget:
    """Limit of retries: ``share`` of the requests of the last ten seconds or in flight, whichever is more; at least
    ``floor``.
    """

    def __init__(self, share: float = 0.2, floor: int = 3) -> None:
        self.share, self.floor = share, floor
        self._seconds: deque[list[int]] = deque()  # per second: number, requests begun before, retries
        self._next_s = -math.inf
        self._requests_begun = self._requests_ended = self._retries = 0

    def on_request(self, now_s: float) -> None:
        if now_s >= self._next_s:
            self._get_second(now_s)
        self._requests_begun += 1

    def on_request_end(self) -> None:
        self._requests_ended += 1

    def take(self, now_s: float, *, is_free: bool = False) -> bool:
        """Count a retry, if allowed; always if ``is_free``."""
        second = self._get_second(now_s)
        # Requests begun in the window, or in flight.
        requests = self._requests_begun - min(self._seconds[0][1], self._requests_ended)
        if not is_free and self._retries + 1 > max(self.floor, self.share * requests + 1e-9):
            return False
        self._retries += 1
        second[2] += 1
        return True

    def _get_second(self, now_s: float) -> list[int]:
        """Return this second's counts; drop those before the window."""
        number, seconds = int(now_s), self._seconds
        if seconds and seconds[-1][0] >= number:
            return seconds[-1]
        while seconds and seconds[0][0] <= number - WINDOW_S:
            self._retries -= seconds.popleft()[2]
        seconds.append([number, self._requests_begun, 0])
        self._next_s = number + 1.0
        return seconds[-1]
