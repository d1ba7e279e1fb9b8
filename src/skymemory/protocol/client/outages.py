"""What a ground host does about silence: ask others, take another gateway, and stop waiting when nobody is there.

Who is silent is asked again by the timer, with nobody waiting for the answer; so all heals by itself. And when one
satellite falls silent, its neighbours are asked: what else is gone (its plane, its computer) is known before a read
has to wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from skymemory.constellation.torus import SatelliteId
from skymemory.metrics import Counters
from skymemory.protocol.client.gateway import Pointing, around
from skymemory.protocol.client.outbox import Operation, Outbox, Request
from skymemory.protocol.client.peers import Links
from skymemory.protocol.clock import SkyMap

Ask = Callable[[SatelliteId, float, bool], int]
"""Begins a PING, which may be sent once only; the number of the operation."""
_LATELY_S = 1.0
"""Who has been heard (or asked) since then is not asked for the sake of a silent neighbour."""
_MOST_SCOUTED = 32
"""With more suspects than that, neighbours are no longer asked: it is a large part of the constellation."""


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
        self._counters = counters
        self._doubted_s = -math.inf
        self._scouted_s: dict[SatelliteId, float] = {}
        self._checked: dict[SatelliteId, int] = {}
        """Whom we have asked for a sign of life, and by which operation."""

    def refuses(self, satellite: SatelliteId | None) -> bool:
        """Whether to fail at once, because the constellation (or this satellite) has been silent of late."""
        return self.breaker.refuses() or (satellite is not None and satellite in self._links.suspects)

    @property
    def next_s(self) -> float:
        """When ``handle_timer`` is to be called; infinite while all is well."""
        return self.breaker.next_probe_s if self.breaker.is_open else self._links.suspects.next_s

    def handle_timer(self, centre: SatelliteId, now_s: float) -> None:
        """Ask who has been silent: all the suspects, or, where nobody is there, a few witnesses."""
        if self.breaker.is_open:
            if self.breaker.probe_due(now_s):
                self._call_witnesses(None, centre, now_s, once=True)
            return
        for satellite in self._links.suspects.due(now_s):
            self._counters.add("suspects_asked")
            self.unclaimed.add(self._ping(satellite, now_s, True))
        self._scout(now_s)

    def _scout(self, now_s: float) -> None:
        """Ask the neighbours of new suspects, but those that have just been heard, or asked."""
        for suspect in self._links.suspects.take_fresh():
            if len(self._links.suspects) > _MOST_SCOUTED:
                return
            for satellite in self._sky.torus.neighbours(suspect):
                lately_s = max(self._links.peer(satellite).heard_s, self._scouted_s.get(satellite, -math.inf))
                if satellite not in self._links.suspects and lately_s < now_s - _LATELY_S:
                    self._scouted_s[satellite] = now_s
                    self._counters.add("neighbours_of_suspects_asked")
                    self.unclaimed.add(self._ping(satellite, now_s, False))

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
            self._call_witnesses(request.satellite, centre, now_s, once=False)
            return False
        if request.sent_s < self._doubted_s or self._links.heard_anybody_since(self._doubted_s, direct):
            return False
        self._doubted_s = now_s
        self._pointing.silent(self._outbox, request.satellite, now_s)
        self._call_witnesses(request.satellite, centre, now_s, once=False)
        return True

    def check(self, satellite: SatelliteId, now_s: float) -> None:
        """A question to it is overdue, which need not mean that it is silent: it is asked for a sign of life."""
        if self._checked.get(satellite) not in self.unclaimed:
            self._checked[satellite] = number = self._ping(satellite, now_s, False)
            self.unclaimed.add(number)

    def ended(self, operation: Operation, failure: str, now_s: float) -> bool:
        """An operation has ended; whether it was one of ours."""
        if not failure and self.breaker.answered():
            self._links.suspects.ask_all(now_s)
        if operation.number in self.unclaimed:
            self.unclaimed.discard(operation.number)
            return True
        if failure == "timeout" and not self._links.heard_anybody_since(operation.started_s):
            self.breaker.timed_out(now_s)
        return False

    def _call_witnesses(self, silent: SatelliteId | None, centre: SatelliteId, now_s: float, once: bool) -> None:
        gateway = [] if self._outbox.gateway is None else [self._outbox.gateway]
        for satellite in (*witnesses(self._sky, centre, silent), *gateway):
            self.unclaimed.add(self._ping(satellite, now_s, once))


# A circuit breaker: with the whole constellation gone, operations fail at once instead of waiting for it again.
#
# It opens when an operation has timed out and nobody at all has been heard since it began, though others were asked
# too.
# While it is open, later operations fail at once, and the client's timer sends probes. Any answer closes it.


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
