"""Access modes: through which satellite's beam a host reaches another satellite.

``los``      a beam to each satellite, as in the paper: the box counts as reachable, whatever the elevation mask says.
``gateway``  one beam, to the nearest satellite in sight; inter-satellite links carry the rest.
``hybrid``   a beam to each satellite in sight; the others through the gateway.
``onboard``  the host is a satellite: its beam has no length, and links carry the rest from there.

A change of gateway loses no packets: an answer returns through the gateway that its request took, and a retransmission
takes the current one. A gateway that has fallen silent is skipped for a while.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import Literal, get_args

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.metrics import Counters
from skymemory.placement.locate import Moves
from skymemory.protocol.clock import FollowedClock, SkyMap

Access = Literal["los", "gateway", "onboard", "hybrid"]
ACCESS_MODES: tuple[Access, ...] = get_args(Access)
_SKIPPED_S = 5.0
"""A silent gateway is tried again after this time."""
_MAX_CANDIDATES = 25


class Gateway:
    """The current gateway of every mode but ``los``, which needs none. ``direct``: satellites with a beam of their own.

    Chosen again when the box moves, and for each second of the satellites' flight.
    """

    def __init__(self, access: Access, sky: SkyMap, counters: Counters) -> None:
        self.current: SatelliteId | None = None
        self.direct: frozenset[SatelliteId] = frozenset()
        self._access = access
        self._sky = sky
        self._counters = counters
        self._chosen_at: tuple[Moves, int] | None = None
        self._choose_again_s = math.inf
        self._silent_until_s: dict[SatelliteId, float] = {}

    def beam(self, satellite: SatelliteId) -> SatelliteId:
        """The satellite whose beam carries packets for ``satellite``."""
        return satellite if self.current is None or satellite in self.direct else self.current

    def update(self, clock: FollowedClock, now_s: float) -> bool:
        """Choose the gateway for this time; returns whether it has changed."""
        moves, sky_s = clock.moves(now_s), clock.sky_s(now_s)
        at = moves, math.floor(sky_s)
        if at == self._chosen_at and now_s < self._choose_again_s:
            return False
        self._chosen_at = at
        self._silent_until_s = {here: until_s for here, until_s in self._silent_until_s.items() if until_s > now_s}
        self._choose_again_s = min(self._silent_until_s.values(), default=math.inf)
        if self._access == "onboard":
            self.current = self._sky.centre
            return False
        gateway, in_sight = self._choose(moves, sky_s)
        if self._access == "hybrid":
            self.direct = frozenset(in_sight)
        changed = self.current not in (None, gateway)
        if changed:
            self._counters.add("gateway_handovers")
        self.current = gateway
        return changed

    def silent(self, satellite: SatelliteId, now_s: float) -> None:
        """No answer came, not even from the gateway, if it carries packets for ``satellite``: skip it for a while."""
        gateway = self.current
        if gateway is not None and self._access != "onboard" and self.beam(satellite) == gateway:
            self._silent_until_s[gateway] = now_s + _SKIPPED_S
            self._chosen_at = None
            self._counters.add("gateway_silent")

    def _choose(self, moves: Moves, sky_s: float) -> tuple[SatelliteId, tuple[SatelliteId, ...]]:
        """The gateway, and all satellites in sight. With none in sight, the box's centre is used, and counted."""
        centre = self._sky.centre_at(moves)
        in_sight = self._sky.sight.in_sight(centre, sky_s) if self._sky.sight is not None else ()
        if not in_sight and self._sky.sight is not None:
            self._counters.add("gateway_out_of_sight")
        candidates = in_sight or (nearest(centre, self._sky.torus) if self._silent_until_s else [centre])
        return first_responsive(candidates, self._silent_until_s) or centre, in_sight


def first_responsive(candidates: Iterable[SatelliteId], silent: Container[SatelliteId]) -> SatelliteId | None:
    """The first candidate (the best come first) that is not silent; the very first if all are; None of none."""
    first = None
    for candidate in candidates:
        if candidate not in silent:
            return candidate
        first = first or candidate
    return first


def nearest(centre: SatelliteId, torus: Torus) -> list[SatelliteId]:
    """The satellites with the fewest links to ``centre``, itself first: possible gateways in its place."""
    ordered = sorted(torus.satellites(), key=lambda satellite: (torus.hops(centre, satellite), satellite))
    return ordered[:_MAX_CANDIDATES]
