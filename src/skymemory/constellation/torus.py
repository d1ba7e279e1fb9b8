"""The +GRID torus: the links between satellites, and the routes over them.

SkyMemory paper §3.2 and §4. A constellation is ``planes`` orbital planes of ``slots_per_plane`` satellites.
Each satellite is linked to its two neighbours in the plane and to the same slot in the two neighbouring
planes; both rings close. With a *seam* (a Walker star, whose first and last plane fly in opposite directions) those
two planes have no links with each other, and no route crosses.

Directions are those of the figures: the slot grows along the motion, which is east; the plane grows south.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from skymemory.errors import InvalidInput

Axis = Literal["slot", "plane"]
RoutingMode = Literal["greedy", "alternate"]
ROUTING_MODES: tuple[RoutingMode, ...] = ("greedy", "alternate")


class SatelliteId(NamedTuple):
    """A satellite by its orbital plane and its slot in the plane, both 0-based."""

    plane: int
    slot: int

    @property
    def label(self) -> str:
        """``sat 5, orb 2``: 1-based, satellite first, as the paper's figures write it."""
        return f"sat {self.slot + 1}, orb {self.plane + 1}"


@dataclass(frozen=True, slots=True)
class Torus:
    """``planes`` rings of ``slots_per_plane`` satellites; each slot is again a ring across the planes, which is open
    between the last and the first if there is a ``seam``.
    """

    planes: int
    slots_per_plane: int
    seam: bool = False

    def __post_init__(self) -> None:
        for name, value in (("planes", self.planes), ("slots_per_plane", self.slots_per_plane)):
            if not 1 <= value <= 4096:
                raise InvalidInput(f"{name} is {value}: expected 1 to 4096")

    @property
    def size(self) -> int:
        """Number of satellites."""
        return self.planes * self.slots_per_plane

    def __contains__(self, satellite: object) -> bool:
        if not isinstance(satellite, SatelliteId):
            return False
        return 0 <= satellite.plane < self.planes and 0 <= satellite.slot < self.slots_per_plane

    def wrap(self, plane: int, slot: int) -> SatelliteId:
        """The satellite at these indices, which may lie beyond either end of their rings."""
        return SatelliteId(plane % self.planes, slot % self.slots_per_plane)

    def index(self, satellite: SatelliteId) -> int:
        """Position in plane-major order, 0 … ``size`` − 1."""
        return satellite.plane * self.slots_per_plane + satellite.slot

    def satellite(self, index: int) -> SatelliteId:
        """Inverse of ``index``."""
        if not 0 <= index < self.size:
            raise InvalidInput(f"satellite index {index}: expected 0 … {self.size - 1}")
        return SatelliteId(*divmod(index, self.slots_per_plane))

    def satellites(self) -> list[SatelliteId]:
        """All of them, plane by plane."""
        return [SatelliteId(plane, slot) for plane in range(self.planes) for slot in range(self.slots_per_plane)]

    def north(self, here: SatelliteId) -> SatelliteId:
        return SatelliteId((here.plane - 1) % self.planes, here.slot)

    def east(self, here: SatelliteId) -> SatelliteId:
        return SatelliteId(here.plane, (here.slot + 1) % self.slots_per_plane)

    def south(self, here: SatelliteId) -> SatelliteId:
        return SatelliteId((here.plane + 1) % self.planes, here.slot)

    def west(self, here: SatelliteId) -> SatelliteId:
        return SatelliteId(here.plane, (here.slot - 1) % self.slots_per_plane)

    def neighbours(self, here: SatelliteId) -> tuple[SatelliteId, SatelliteId, SatelliteId, SatelliteId]:
        """North, east, south, west: the order in which the placements walk. Across a seam there is none: in its place
        is ``here`` itself, as on a ring of one.
        """
        north, south = self.north(here), self.south(here)
        if self.seam:
            north = here if here.plane == 0 else north
            south = here if here.plane == self.planes - 1 else south
        return north, self.east(here), south, self.west(here)

    def delta(self, here: SatelliteId, there: SatelliteId) -> tuple[int, int]:
        """Signed hops ``(d_slot, d_plane)`` of a shortest path; exactly opposite on a ring counts as west or north."""
        d_slot = (there.slot - here.slot) % self.slots_per_plane
        if 2 * d_slot >= self.slots_per_plane:
            d_slot -= self.slots_per_plane
        if self.seam:
            return d_slot, there.plane - here.plane
        d_plane = (there.plane - here.plane) % self.planes
        if 2 * d_plane >= self.planes:
            d_plane -= self.planes
        return d_slot, d_plane

    def hops(self, here: SatelliteId, there: SatelliteId) -> int:
        """Links on a shortest path (Manhattan distance on the torus)."""
        d_slot, d_plane = self.delta(here, there)
        return abs(d_slot) + abs(d_plane)

    def next_hop(
        self, here: SatelliteId, there: SatelliteId, mode: RoutingMode = "greedy", came_axis: Axis | None = None
    ) -> SatelliteId:
        """The next hop of a packet for ``there``; ``here`` itself when it has arrived.

        ``greedy`` is the rule of paper §4, planes first, corrected: where both ways around a ring are equally
        long the printed rule stops, this one goes north or west. ``alternate`` swaps axes at each hop
        (``came_axis`` is the axis of the link the packet came in on; without it, the axis with more hops
        left), which spreads the flows of a box evenly over the four links of its centre, both in and out.
        """
        d_slot, d_plane = self.delta(here, there)
        if d_plane and d_slot:
            along_plane_axis = mode == "greedy" or self._alternate_on_plane_axis(d_slot, d_plane, came_axis)
        else:
            along_plane_axis = d_plane != 0
        if along_plane_axis:
            return SatelliteId((here.plane + (1 if d_plane > 0 else -1)) % self.planes, here.slot)
        if d_slot:
            return SatelliteId(here.plane, (here.slot + (1 if d_slot > 0 else -1)) % self.slots_per_plane)
        return here

    @staticmethod
    def _alternate_on_plane_axis(d_slot: int, d_plane: int, came_axis: Axis | None) -> bool:
        if came_axis is not None:
            return came_axis == "slot"
        if abs(d_slot) != abs(d_plane):
            return abs(d_plane) > abs(d_slot)
        return (d_slot > 0) != (d_plane > 0)  # by quadrant, so that the diagonals spread over the four links too

    def path(self, here: SatelliteId, there: SatelliteId, mode: RoutingMode = "greedy") -> list[SatelliteId]:
        """All satellites on the path, both ends included: ``hops(here, there) + 1``."""
        way = [here]
        came_axis: Axis | None = None
        while here != there:
            onward = self.next_hop(here, there, mode, came_axis)
            came_axis = "slot" if onward.plane == here.plane else "plane"
            way.append(onward)
            here = onward
        return way
