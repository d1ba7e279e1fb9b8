"""Which satellite a host talks to for the sake of another: its access mode, and the gateway as the satellites fly.

``los``      a beam to each satellite, as the paper has it: the box is taken as reachable, whatever the mask says.
``gateway``  one beam, to the nearest satellite in sight; the rest by links between satellites.
``hybrid``   a beam to each satellite in sight; the others by links, through the gateway.
``onboard``  the host is a satellite: its beam has no length, and all else goes by links from there.

The gateway changes while packets are under way and nothing is lost: an answer finds the host by the gateway that its
request was sent through, and what is sent again takes the gateway of now.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from skymemory.constellation.torus import SatelliteId
from skymemory.metrics import Counters
from skymemory.placement.locate import Moves
from skymemory.protocol.followed_clock import FollowedClock
from skymemory.protocol.motion import SkyMap
from skymemory.protocol.outbox import Outbox

Access = Literal["los", "gateway", "onboard", "hybrid"]
ACCESS_MODES: tuple[Access, ...] = get_args(Access)


class Pointing:
    """Points the beams of an ``Outbox``. Looked at anew when the box moves, and each second that satellites fly."""

    def __init__(self, access: Access, sky: SkyMap, counters: Counters) -> None:
        self._access = access
        self._sky = sky
        self._counters = counters
        self._seen_at: tuple[Moves, int] | None = None

    def aim(self, outbox: Outbox, clock: FollowedClock, now_s: float) -> bool:
        """Point them as they must be now; whether the gateway has changed."""
        if self._access == "los":
            return False
        moves, sky_s = clock.moves(now_s), clock.sky_s(now_s)
        at = moves, math.floor(sky_s)
        if at == self._seen_at:
            return False
        self._seen_at = at
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

    def _look(self, moves: Moves, sky_s: float) -> tuple[SatelliteId, tuple[SatelliteId, ...]]:
        """The gateway, and all that is in sight. With nothing in sight, the box's centre has to do, and is counted."""
        centre = self._sky.centre_at(moves)
        if self._sky.sight is None:
            return centre, ()
        seen = self._sky.sight.in_sight(centre, sky_s)
        if seen:
            return seen[0], seen
        self._counters.add("gateway_out_of_sight")
        return centre, ()
