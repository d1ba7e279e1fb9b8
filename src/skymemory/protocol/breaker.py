"""A circuit breaker: with the whole constellation gone, operations fail at once instead of waiting for it again.

It opens when an operation has timed out and nobody at all has been heard since it began, though others were asked too.
While it is open, later operations fail at once, and the client's timer sends probes. Any answer closes it.
"""

from __future__ import annotations

import math

from skymemory.constellation.torus import SatelliteId
from skymemory.metrics import Counters
from skymemory.protocol.gateways import around
from skymemory.protocol.motion import SkyMap

_FIRST_PROBE_S = 0.1
_LAST_PROBE_S = 2.0
"""Probes come at 0.1, 0.2, 0.4, … 2, 2 s after one another."""
_WITNESSES = 3


class CircuitBreaker:
    """``closed`` (all is well), ``open``, or ``half-open``: probes are on their way."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._next_probe_s = 0.0
        self._wait_s = _FIRST_PROBE_S
        self.state = "closed"

    @property
    def is_open(self) -> bool:
        return self.state != "closed"

    @property
    def next_probe_s(self) -> float:
        """When to send the next probes; never while it is closed."""
        return self._next_probe_s if self.is_open else math.inf

    def timed_out(self, now_s: float) -> None:
        """An operation ended without a word from anybody."""
        if self.state == "closed":
            self._counters.add("breaker_opened")
            self._wait_s, self._next_probe_s = _FIRST_PROBE_S, now_s
        self.state = "open"

    def refuses(self) -> bool:
        """Whether an operation has to be refused now."""
        if self.is_open:
            self._counters.add("breaker_refused")
        return self.is_open

    def probe_due(self, now_s: float) -> bool:
        """Whether probes are to be sent now."""
        if now_s < self.next_probe_s:
            return False
        self._counters.add("breaker_probes")
        self._next_probe_s = now_s + self._wait_s
        self._wait_s = min(2 * self._wait_s, _LAST_PROBE_S)
        self.state = "half-open"
        return True

    def answered(self) -> bool:
        """Somebody is there; whether that is news."""
        if self.state == "closed":
            return False
        self._counters.add("breaker_closed")
        self.state = "closed"
        return True


def witnesses(sky: SkyMap, centre: SatelliteId, silent: SatelliteId | None) -> list[SatelliteId]:
    """Whom to ask whether anybody is there: near the box's centre, of different planes, and not who is silent."""
    near = [satellite for satellite in around(centre, sky.torus) if silent is None or satellite.plane != silent.plane]
    by_plane = {satellite.plane: satellite for satellite in reversed(near)}
    return sorted(by_plane.values(), key=near.index)[:_WITNESSES] or [centre]
