"""How often bytes are sent: the sends of one request, and the share of retries among all requests.

A request has ``Sends``: each time its bytes leave counts, a replay on a fresh connection like an attempt at another
server. All requests together have a ``RetryBudget``, so that a fleet that is down gets little more than its load.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

WINDOW_S = 10
"""Over which requests and their retries are compared. Finagle's budget, too, counts over ten seconds."""
FIRST_S, MOST_S = 0.025, 0.25
"""Back-off before the first retry and at most; Envoy's ``base_interval`` and ``max_interval``."""


class RandomNumbers(Protocol):
    """A seeded ``random.Random``."""

    def random(self) -> float: ...


class Sends:
    """The sends of one request's bytes."""

    __slots__ = ("count", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0

    @property
    def left(self) -> int:
        return self.most - self.count

    def take(self) -> bool:
        """Count a send that is about to leave; False: it may not."""
        if self.count >= self.most:
            return False
        self.count += 1
        return True

    def take_back(self) -> None:
        """Uncount a send that was not executed."""
        self.count -= 1


class RetryBudget:
    """Retries of all requests: at most ``share`` of the requests of the last ten seconds or under way, whichever are
    more, and always ``floor``.

    Envoy compares with the requests under way alone: where a server answers an error at once few are, and its floor of
    three concurrent retries lets each of them be sent three times.
    """

    def __init__(self, share: float = 0.2, floor: int = 3) -> None:
        self.share, self.floor = share, floor
        self._seconds: deque[list[int]] = deque()
        """Of each second: its number, requests that had begun before, retries."""
        self._next_s = -math.inf
        """When the last of these has ended."""
        self._begun = self._ended = self._retries = 0

    def on_request(self, now_s: float) -> None:
        if now_s >= self._next_s:
            self._second(now_s)
        self._begun += 1

    def on_request_end(self) -> None:
        self._ended += 1

    def take(self, now_s: float, *, is_free: bool = False) -> bool:
        """Count a retry; False: there are too many already. ``is_free``: it is counted, and allowed even so."""
        second = self._second(now_s)
        requests = self._begun - min(self._seconds[0][1], self._ended)  # begun lately, or under way
        if not is_free and self._retries + 1 > max(self.floor, self.share * requests + 1e-9):
            return False
        self._retries += 1
        second[2] += 1
        return True

    def _second(self, now_s: float) -> list[int]:
        number, seconds = int(now_s), self._seconds
        if seconds and seconds[-1][0] >= number:
            return seconds[-1]
        while seconds and seconds[0][0] <= number - WINDOW_S:
            self._retries -= seconds.popleft()[2]
        seconds.append([number, self._begun, 0])
        self._next_s = number + 1.0
        return seconds[-1]


def backoff_s(number: int, random: RandomNumbers) -> float:
    """Seconds before a request's retry ``number`` (from 1): doubling, of which a random half is left out, so that the
    retries of requests that failed together do not arrive together.
    """
    bound_s: float = min(MOST_S, FIRST_S * 2.0 ** min(number - 1, 16))
    return bound_s * (0.5 + 0.5 * random.random())
