"""A store whose loads come at a bounded rate: a token bucket around any tier.

It leaves the rest of a link to others, and it stands for a link that the machine at hand does not have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Lock

from skymemory.errors import InvalidInput
from skymemory.store.base import LoadTicket, Store
from skymemory.store.wrapped import Wrapped


class RateLimited(Wrapped):
    """``store``, read at ``bytes_per_s``: one load after the other, each as long as its bytes take.

    ``burst_s`` is what a bucket that was left alone holds: so many seconds' worth of bytes go through at once.
    ``bytes_per_s`` may be set anew at any time and holds for the loads that begin then. Only loads are limited.
    """

    def __init__(
        self,
        store: Store,
        bytes_per_s: float,
        *,
        burst_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if not bytes_per_s > 0 or burst_s < 0:
            raise InvalidInput(f"a rate must be above 0 and a burst not negative, got {bytes_per_s} and {burst_s}")
        super().__init__(store)
        self.bytes_per_s = bytes_per_s
        self._burst_s = burst_s
        self._clock, self._sleep = clock, sleep
        self._lock = Lock()
        self._free_s = float("-inf")  # when all that was asked for will be through

    @property
    def backlog_s(self) -> float:
        """Seconds until the loads under way are through."""
        return max(0.0, self._free_s - self._clock())

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        values = super().complete_load(ticket)
        size_bytes = sum(len(value) for value in values if value is not None)
        with self._lock:
            # Counted from when the link was free, not from when we woke: a late thread costs the link nothing.
            self._free_s = max(self._free_s, self._clock() - self._burst_s) + size_bytes / self.bytes_per_s
            until_s = self._free_s
        while (left_s := until_s - self._clock()) > 0:
            self._sleep(left_s)
        return values

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float:
        return self.backlog_s + super().estimate_load_s(keys, now_s)
