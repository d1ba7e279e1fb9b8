"""Access modes: the satellite through whose beam a host reaches another satellite.

``ideal``    a beam to each satellite, as in the paper, even below the elevation mask.
``gateway``  a single beam, to the nearest satellite in sight; inter-satellite links carry the packets from there.
``hybrid``   a beam to each satellite in sight; the others through the gateway.
``onboard``  the host is a satellite: its beam has no length.

With no satellite in sight, ``gateway`` and ``hybrid`` are *dark*: nothing is sent. An answer returns through its
request's gateway, so a change loses no packets.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import Literal, get_args

from skymemory.config import suggestion
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput
from skymemory.metrics import Counters
from skymemory.placement.locate import Moves
from skymemory.protocol.clock import FollowedClock, SkyMap

Access = Literal["ideal", "gateway", "onboard", "hybrid"]
ACCESS_MODES: tuple[Access, ...] = get_args(Access)
IDEAL_ONCE = "los"
_SKIPPED_S = 5.0
_MAX_CANDIDATES = 25


class Gateway:
    """Current gateway: the satellite whose beam carries this host's packets, except to ``direct`` satellites. It is
    chosen again when the box moves, and each second.
    """

    def __init__(self, access: Access, sky: SkyMap, counters: Counters) -> None:
        self.current: SatelliteId | None = None
        self.direct: frozenset[SatelliteId] = frozenset()
        self.dark = False
        self._access = access
        self._sky = sky
        self._counters = counters
        self._chosen_at: tuple[Moves, int] | None = None
        self._choose_again_s = math.inf
        self._silent_until_s: dict[SatelliteId, float] = {}

    def beam(self, satellite: SatelliteId) -> SatelliteId:
        return satellite if self.current is None or satellite in self.direct else self.current

    def update(self, clock: FollowedClock, now_s: float) -> bool:
        """Choose the gateway again, if due. Return True if it has changed; ``dark``: no satellite is in sight."""
        moves, sky_s = clock.moves(now_s), clock.sky_s(now_s)
        at = moves, math.floor(sky_s)
        if at == self._chosen_at and now_s < self._choose_again_s:
            return False
        self._chosen_at = at
        self._silent_until_s = {
            satellite: until_s for satellite, until_s in self._silent_until_s.items() if until_s > now_s
        }
        self._choose_again_s = min(self._silent_until_s.values(), default=math.inf)
        if self._access == "onboard":
            self.current = self._sky.torus.living(self._sky.centre)
            return False
        gateway, in_sight = self._choose(moves, sky_s)
        if self._access == "hybrid":
            self.direct = frozenset(in_sight)
        changed = gateway is not None and (self.dark or self.current not in (None, gateway))
        self.dark = gateway is None
        if self.dark:
            self._counters.add("gateway_out_of_sight")
        if changed:
            self._counters.add("gateway_handovers")
        self.current = gateway
        return changed

    def silent(self, satellite: SatelliteId, now_s: float) -> None:
        """Skip the gateway that serves a silent satellite for a while."""
        gateway = self.current
        if gateway is not None and self._access != "onboard" and self.beam(satellite) == gateway:
            self._silent_until_s[gateway] = now_s + _SKIPPED_S
            self._chosen_at = None
            self._counters.add("gateway_silent")

    def _choose(self, moves: Moves, sky_s: float) -> tuple[SatelliteId | None, tuple[SatelliteId, ...]]:
        centre = self._sky.centre_at(moves)
        if self._sky.sight is not None:
            in_sight = self._sky.sight.in_sight(centre, sky_s)
            return first_responsive(in_sight, self._silent_until_s), in_sight
        candidates = nearest(centre, self._sky.torus) if self._silent_until_s else [self._sky.torus.living(centre)]
        return first_responsive(candidates, self._silent_until_s), ()


def access_named(name: str) -> Access:
    """Return an access mode; earlier releases call ``ideal`` ``los``."""
    access = next((mode for mode in ACCESS_MODES if name == mode), None)
    if access is None and name != IDEAL_ONCE:
        raise InvalidInput(f"access {name!r}; {suggestion(name, ACCESS_MODES)}")
    return access or "ideal"


def first_responsive(candidates: Iterable[SatelliteId], silent: Container[SatelliteId]) -> SatelliteId | None:
    """Return the first candidate that is not silent; the very first if all are."""
    first = None
    for candidate in candidates:
        if candidate not in silent:
            return candidate
        first = first or candidate
    return first


def nearest(centre: SatelliteId, torus: Torus) -> list[SatelliteId]:
    """Return possible gateways, those nearest to the satellite overhead first."""
    centre = torus.living(centre)
    ordered = sorted(torus.satellites(), key=lambda satellite: (torus.hops(centre, satellite), satellite))
    return ordered[:_MAX_CANDIDATES]
