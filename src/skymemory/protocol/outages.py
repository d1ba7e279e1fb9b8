"""What a ground host does about silence: ask others, take another gateway, and stop waiting when nobody is there."""

from __future__ import annotations

import math
from collections.abc import Callable

from skymemory.constellation.torus import SatelliteId
from skymemory.metrics import Counters
from skymemory.protocol.breaker import CircuitBreaker, witnesses
from skymemory.protocol.links import Links
from skymemory.protocol.motion import SkyMap
from skymemory.protocol.outbox import Operation, Outbox, Request
from skymemory.protocol.pointing import Pointing

Ask = Callable[[SatelliteId, float], int]
"""Begins a PING; the number of the operation."""


class Outages:
    """``unclaimed`` are the numbers of questions of our own, whose answers nobody waits for."""

    def __init__(
        self, sky: SkyMap, links: Links, outbox: Outbox, pointing: Pointing, counters: Counters, ping: Ask
    ) -> None:
        self.breaker = CircuitBreaker(counters)
        self.unclaimed: set[int] = set()
        self._sky = sky
        self._links = links
        self._outbox = outbox
        self._pointing = pointing
        self._ping = ping
        self._doubted_s = -math.inf

    def refuses(self, satellite: SatelliteId | None, centre: SatelliteId, now_s: float) -> bool:
        """Whether to fail at once, because the constellation (or this satellite) has been silent of late."""
        if not self.breaker.is_open:
            return satellite is not None and self._links.is_suspect(satellite, now_s)
        if self.breaker.refuse(now_s):
            self._call_witnesses(None, centre, now_s)
        return True

    def doubt(self, request: Request, centre: SatelliteId, now_s: float) -> bool:
        """It is overdue. With nobody heard meanwhile, is anybody there? And if not, is it the gateway? True: another
        one is to be taken.
        """
        gateway = self._outbox.gateway
        direct = self._outbox.direct - {gateway} if self._outbox.beam(request.satellite) == gateway else frozenset()
        if request.operation.number in self.unclaimed or self._links.heard_anybody_since(request.sent_s, direct):
            return False
        if self._doubted_s < request.begun_s:
            self._doubted_s = now_s
            self._call_witnesses(request.satellite, centre, now_s)
            return False
        if request.sent_s < self._doubted_s or self._links.heard_anybody_since(self._doubted_s, direct):
            return False
        self._doubted_s = now_s
        self._pointing.silent(self._outbox, request.satellite, now_s)
        self._call_witnesses(request.satellite, centre, now_s)
        return True

    def ended(self, operation: Operation, failure: str, now_s: float) -> bool:
        """An operation has ended; whether it was one of ours."""
        if not failure:
            self.breaker.answered()
        if operation.number in self.unclaimed:
            self.unclaimed.discard(operation.number)
            return True
        if failure == "timeout" and not self._links.heard_anybody_since(operation.started_s):
            self.breaker.timed_out(now_s)
        return False

    def _call_witnesses(self, silent: SatelliteId | None, centre: SatelliteId, now_s: float) -> None:
        gateway = [] if self._outbox.gateway is None else [self._outbox.gateway]
        for satellite in (*witnesses(self._sky, centre, silent), *gateway):
            self.unclaimed.add(self._ping(satellite, now_s))
