"""Which satellite a host talks to for the sake of another: its access mode, and the gateway as the satellites fly.

``los``      a beam to each satellite, as the paper has it: the box is taken as reachable, whatever the mask says.
``gateway``  one beam, to the nearest satellite in sight; the rest by links between satellites.
``hybrid``   a beam to each satellite in sight; the others by links, through the gateway.
``onboard``  the host is a satellite: its beam has no length, and all else goes by links from there.

The gateway changes while packets are under way and nothing is lost: an answer finds the host by the gateway that its
request was sent through, and what is sent again takes the gateway of now. A gateway through which nothing comes any
more is passed over for a while.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import Literal, get_args

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.metrics import Counters
from skymemory.placement.locate import Moves
from skymemory.protocol.client.outbox import Outbox
from skymemory.protocol.clock import FollowedClock, SkyMap

Access = Literal["los", "gateway", "onboard", "hybrid"]
ACCESS_MODES: tuple[Access, ...] = get_args(Access)
_PASSED_OVER_S = 5.0
"""After so long a gateway that was silent is tried again."""


class Pointing:
    """Points the beams of an ``Outbox``. Looked at anew when the box moves, and each second that satellites fly."""

    def __init__(self, access: Access, sky: SkyMap, counters: Counters) -> None:
        self._access = access
        self._sky = sky
        self._counters = counters
        self._seen_at: tuple[Moves, int] | None = None
        self._look_again_s = math.inf
        self._silent_until_s: dict[SatelliteId, float] = {}

    def aim(self, outbox: Outbox, clock: FollowedClock, now_s: float) -> bool:
        """Point them as they must be now; whether the gateway has changed."""
        if self._access == "los":
            return False
        moves, sky_s = clock.moves(now_s), clock.sky_s(now_s)
        at = moves, math.floor(sky_s)
        if at == self._seen_at and now_s < self._look_again_s:
            return False
        self._seen_at = at
        self._silent_until_s = {here: until_s for here, until_s in self._silent_until_s.items() if until_s > now_s}
        self._look_again_s = min(self._silent_until_s.values(), default=math.inf)
        if self._access == "onboard":
            outbox.gateway = self._sky.centre
            return False
        gateway, seen = self._look(moves, sky_s)
        if self._access == "hybrid":
            outbox.direct = frozenset(seen)
        changed = outbox.gateway not in (None, gateway)
        if changed:
            self._counters.add("gateway_handovers")
        outbox.gateway = gateway
        return changed

    def silent(self, outbox: Outbox, satellite: SatelliteId, now_s: float) -> None:
        """Nobody has been heard, not even the gateway, by which we talk to ``satellite``: it is passed over for a
        while, and ``aim`` finds the next.
        """
        gateway = outbox.gateway
        if gateway is not None and self._access != "onboard" and outbox.beam(satellite) == gateway:
            self._silent_until_s[gateway] = now_s + _PASSED_OVER_S
            self._seen_at = None
            self._counters.add("gateway_silent")

    def _look(self, moves: Moves, sky_s: float) -> tuple[SatelliteId, tuple[SatelliteId, ...]]:
        """The gateway, and all that is in sight. With nothing in sight, the box's centre has to do, and is counted."""
        centre = self._sky.centre_at(moves)
        seen = self._sky.sight.in_sight(centre, sky_s) if self._sky.sight is not None else ()
        if not seen and self._sky.sight is not None:
            self._counters.add("gateway_out_of_sight")
        candidates = seen or (around(centre, self._sky.torus) if self._silent_until_s else [centre])
        return next_gateway(candidates, self._silent_until_s) or centre, seen


# Another gateway where the nearest is silent.


_MOST_CANDIDATES = 25


def next_gateway(candidates: Iterable[SatelliteId], suspects: Container[SatelliteId]) -> SatelliteId | None:
    """The first candidate (the best come first) that is not suspect; the first of all if all are; None of none."""
    first = None
    for candidate in candidates:
        if candidate not in suspects:
            return candidate
        first = first or candidate
    return first


def around(centre: SatelliteId, torus: Torus) -> list[SatelliteId]:
    """The satellites nearest to ``centre`` by links, itself first: who may stand in for it."""
    ordered = sorted(torus.satellites(), key=lambda satellite: (torus.hops(centre, satellite), satellite))
    return ordered[:_MOST_CANDIDATES]
