"""What a second of computing at a server costs the requests that will come after it.

A server's queue of ``w`` seconds delays, as long as it lasts, everyone who comes behind it: where requests arrive at
rate ``r`` and keep the server busy for a part ``b`` of its time, by ``r·w² / (2·(1 − b))`` seconds in all (the value
function of such a queue; Hyytiä, Penttinen and Aalto, "Size- and state-aware dispatching problem with queue-specific
job sizes", 2012). So ``e`` seconds more cost them ``r / (1 − b) · e · (w + e / 2)``. The formula takes later requests
to come whatever the queue is; ours look at it and go elsewhere, which makes it less, and estimates of waiting err,
which makes caches worth more: so ``weight`` times it counts, as tuned.

That they can go elsewhere, and that the queue ends, holds as long as some server is free. Where even the shortest queue
is long, all of them last, and a second of work delays those who come later by about as much wherever it is done: by
``q / (q + 1)``, for a shortest queue of ``q`` usual prefills, its length counts in place of the server's own, and the
price rises (``CROWDED``).

Rate and business are those of the requests sent lately: nothing is configured, and with little traffic the price is
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from skymemory.errors import InvalidInput

CROWDED = 2.0
"""By how much of itself the price rises where all servers have endless queues."""


class DelayPrice:
    """``window_s``: what was sent so long ago counts for 1/e. ``most_busy``: a business above it is taken for it."""

    def __init__(self, weight: float = 0.3, window_s: float = 60.0, most_busy: float = 0.9) -> None:
        if weight < 0 or not window_s > 0 or not 0 <= most_busy < 1:
            raise InvalidInput(
                f"a price of delay of weight {weight:g} over {window_s:g} s, at most {most_busy:g} busy;"
                " expected 0 or more, more than 0 s, and less than 1"
            )
        self._weight, self._window_s, self._most_busy = weight, window_s, most_busy
        self._requests = self._work_s = 0.0
        self._at_s = -math.inf

    def sent(self, work_s: float, now_s: float) -> None:
        """A request was sent that takes ``work_s`` to prefill."""
        kept = self._kept(now_s)
        self._requests, self._work_s = self._requests * kept + 1.0, self._work_s * kept + work_s
        self._at_s = max(self._at_s, now_s)

    def delays_s(self, waits_s: Sequence[float], works_s: Sequence[float], usual_s: float, now_s: float) -> list[float]:
        """Seconds that later requests wait longer in all, where this work is put behind the queue of each server.

        ``usual_s``: what a prefill takes, lately.
        """
        shortest_s = min(waits_s)
        crowded = shortest_s / (shortest_s + usual_s) if usual_s else 0.0
        rate = self.rate(len(waits_s), now_s) * (1.0 + CROWDED * crowded)
        return [
            rate * work_s * (wait_s - crowded * (wait_s - shortest_s) + work_s / 2.0)
            for wait_s, work_s in zip(waits_s, works_s, strict=True)
        ]

    def rate(self, servers: int, now_s: float) -> float:
        """Seconds of later requests' delay per second of work and second of queue, at one of so many servers (1/s)."""
        share = self._kept(now_s) / (self._window_s * servers)
        busy = min(self._work_s * share, self._most_busy)
        return self._weight * self._requests * share / (1.0 - busy)

    def _kept(self, now_s: float) -> float:
        return math.exp(-max(0.0, now_s - self._at_s) / self._window_s)
