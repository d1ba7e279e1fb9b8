"""The +GRID torus: the links between satellites, and the routes over them (SkyMemory paper §3.2 and §4).

Each satellite is linked to its neighbours in the plane and to the same slot of neighbouring planes; both rings close,
except at a *seam* (a Walker star's first and last planes fly in opposite directions). Over *gaps*, cells without a
satellite, the next living satellite is the neighbour, so links are symmetric and at most four. The next ahead in the
plane holds a gap's data.

Slots grow along the motion, east; planes grow south.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from skymemory.errors import InvalidInput

Axis = Literal["slot", "plane"]
RoutingMode = Literal["greedy", "alternate"]
ROUTING_MODES: tuple[RoutingMode, ...] = ("greedy", "alternate")


class SatelliteId(NamedTuple):
    plane: int
    slot: int

    @property
    def label(self) -> str:
        return f"sat {self.slot + 1}, orb {self.plane + 1}"


@dataclass(frozen=True, slots=True)
class Torus:
    """Grid of ``planes`` rings of ``slots_per_plane`` satellites. ``gaps`` are cells without a satellite; no links
    cross a ``seam``. A link spans at most ``most_slots`` slots or ``most_planes`` planes.
    """

    planes: int
    slots_per_plane: int
    seam: bool = False
    gaps: frozenset[SatelliteId] = field(default=frozenset(), repr=False)
    most_slots: int = 1
    most_planes: int = 1

    def __post_init__(self) -> None:
        for name, value in (("planes", self.planes), ("slots_per_plane", self.slots_per_plane)):
            if not 1 <= value <= 4096:
                raise InvalidInput(f"{name} is {value}: expected 1 to 4096")
        if self.most_slots < 1 or self.most_planes < 1:
            raise InvalidInput(f"links over {self.most_slots} slots and {self.most_planes} planes: expected 1 or more")
        if len(self.gaps) == self.cells and self.gaps:
            raise InvalidInput(f"{self.planes} planes of {self.slots_per_plane} gaps: expected a satellite")

    @property
    def size(self) -> int:
        return self.cells - len(self.gaps)

    @property
    def cells(self) -> int:
        return self.planes * self.slots_per_plane

    def __contains__(self, satellite: object) -> bool:
        if not isinstance(satellite, SatelliteId) or satellite in self.gaps:
            return False
        return 0 <= satellite.plane < self.planes and 0 <= satellite.slot < self.slots_per_plane

    def living(self, cell: SatelliteId) -> SatelliteId:
        """Return the cell's satellite, or a gap's: the next ahead in its plane, else in the next plane."""
        return _living(self, cell) if cell in self.gaps else cell

    def wrap(self, plane: int, slot: int) -> SatelliteId:
        """Return the satellite at indices that may lie beyond their rings."""
        return SatelliteId(plane % self.planes, slot % self.slots_per_plane)

    def index(self, satellite: SatelliteId) -> int:
        return satellite.plane * self.slots_per_plane + satellite.slot

    def satellite(self, index: int) -> SatelliteId:
        if not 0 <= index < self.cells:
            raise InvalidInput(f"satellite index {index}: expected 0 … {self.cells - 1}")
        return SatelliteId(*divmod(index, self.slots_per_plane))

    def satellites(self) -> list[SatelliteId]:
        every = [SatelliteId(plane, slot) for plane in range(self.planes) for slot in range(self.slots_per_plane)]
        return [satellite for satellite in every if satellite not in self.gaps] if self.gaps else every

    def north(self, satellite: SatelliteId) -> SatelliteId:
        return SatelliteId((satellite.plane - 1) % self.planes, satellite.slot)

    def east(self, satellite: SatelliteId) -> SatelliteId:
        return SatelliteId(satellite.plane, (satellite.slot + 1) % self.slots_per_plane)

    def south(self, satellite: SatelliteId) -> SatelliteId:
        return SatelliteId((satellite.plane + 1) % self.planes, satellite.slot)

    def west(self, satellite: SatelliteId) -> SatelliteId:
        return SatelliteId(satellite.plane, (satellite.slot - 1) % self.slots_per_plane)

    def neighbours(self, satellite: SatelliteId) -> tuple[SatelliteId, SatelliteId, SatelliteId, SatelliteId]:
        """Return the neighbours north, east, south, west, the order of placements.

        ``satellite`` takes the place of a neighbour across a seam or too far for a link.
        """
        if self.gaps:
            return _over_gaps(self, satellite)
        north, south = self.north(satellite), self.south(satellite)
        if self.seam:
            north = satellite if satellite.plane == 0 else north
            south = satellite if satellite.plane == self.planes - 1 else south
        return north, self.east(satellite), south, self.west(satellite)

    def delta(self, start: SatelliteId, target: SatelliteId) -> tuple[int, int]:
        """Return signed hops ``(d_slot, d_plane)`` of a shortest path; a tie counts as west or north."""
        d_slot = (target.slot - start.slot) % self.slots_per_plane
        if 2 * d_slot >= self.slots_per_plane:
            d_slot -= self.slots_per_plane
        if self.seam:
            return d_slot, target.plane - start.plane
        d_plane = (target.plane - start.plane) % self.planes
        if 2 * d_plane >= self.planes:
            d_plane -= self.planes
        return d_slot, d_plane

    def hops(self, start: SatelliteId, target: SatelliteId) -> int:
        """Count the links on a shortest path.

        Raises:
            InvalidInput: no path between the two (gaps too wide for links), or a gap.
        """
        if self.gaps:
            links = _distances(self, target)[self.index(start)]
            if links == _FAR:
                raise InvalidInput(f"no links lead from {start.label} to {target.label}")
            return links
        d_slot, d_plane = self.delta(start, target)
        return abs(d_slot) + abs(d_plane)

    def next_hop(
        self, satellite: SatelliteId, target: SatelliteId, mode: RoutingMode = "greedy", came_axis: Axis | None = None
    ) -> SatelliteId:
        """Return the next hop of a packet to ``target``; ``satellite`` itself on arrival.

        ``greedy`` is the rule of paper §4, planes first, but a tie, at which the printed rule stops, goes north or
        west. ``alternate`` swaps axes at each hop, which spreads a box's flows over its centre's links. With gaps, the
        hop must be on a shortest path.
        """
        if self.gaps:
            return self._next_over_gaps(satellite, target, mode, came_axis)
        return self._next_hop(satellite, target, mode, came_axis)

    def _next_over_gaps(
        self, satellite: SatelliteId, target: SatelliteId, mode: RoutingMode, came_axis: Axis | None
    ) -> SatelliteId:
        """Return the neighbour that ``_next_hop`` prefers if it is on a shortest path, or any that is."""
        links_to = _distances(self, target)
        links = links_to[self.index(satellite)]
        if links in (0, _FAR):
            return satellite
        nearer = [neighbour for neighbour in self.neighbours(satellite) if links_to[self.index(neighbour)] == links - 1]
        usual = self._next_hop(satellite, target, mode, came_axis)
        return usual if usual in nearer else nearer[0]

    def _next_hop(
        self, satellite: SatelliteId, target: SatelliteId, mode: RoutingMode, came_axis: Axis | None
    ) -> SatelliteId:
        """Return the neighbour on the way to ``target`` in a grid without gaps."""
        d_slot, d_plane = self.delta(satellite, target)
        if d_plane and d_slot:
            along_plane_axis = mode == "greedy" or self._alternate_on_plane_axis(d_slot, d_plane, came_axis)
        else:
            along_plane_axis = d_plane != 0
        if along_plane_axis:
            return SatelliteId((satellite.plane + (1 if d_plane > 0 else -1)) % self.planes, satellite.slot)
        if d_slot:
            return SatelliteId(satellite.plane, (satellite.slot + (1 if d_slot > 0 else -1)) % self.slots_per_plane)
        return satellite

    @staticmethod
    def _alternate_on_plane_axis(d_slot: int, d_plane: int, came_axis: Axis | None) -> bool:
        if came_axis is not None:
            return came_axis == "slot"
        if abs(d_slot) != abs(d_plane):
            return abs(d_plane) > abs(d_slot)
        return (d_slot > 0) != (d_plane > 0)  # by quadrant, so that diagonals also spread over the four links

    def path(self, satellite: SatelliteId, target: SatelliteId, mode: RoutingMode = "greedy") -> list[SatelliteId]:
        way = [satellite]
        came_axis: Axis | None = None
        while satellite != target:
            onward = self.next_hop(satellite, target, mode, came_axis)
            came_axis = "slot" if onward.plane == satellite.plane else "plane"
            way.append(onward)
            satellite = onward
        return way


# --- Over gaps ---

_FAR = 0xFFFF


@lru_cache(maxsize=1 << 14)
def _living(torus: Torus, cell: SatelliteId) -> SatelliteId:
    for plane in range(torus.planes):
        for slot in range(torus.slots_per_plane):
            candidate = torus.wrap(cell.plane + plane, cell.slot + slot)
            if candidate not in torus.gaps:
                return candidate
    raise AssertionError("a torus has a satellite")


@lru_cache(maxsize=1 << 14)
def _over_gaps(torus: Torus, satellite: SatelliteId) -> tuple[SatelliteId, SatelliteId, SatelliteId, SatelliteId]:
    """Return the four neighbours of a satellite in a torus with gaps, cached."""

    def next_along(d_plane: int, d_slot: int, most: int) -> SatelliteId:
        for steps in range(1, most + 1):
            plane = satellite.plane + steps * d_plane
            if torus.seam and not 0 <= plane < torus.planes:
                return satellite
            candidate = torus.wrap(plane, satellite.slot + steps * d_slot)
            if candidate not in torus.gaps:
                return candidate
        return satellite

    slots, planes = torus.most_slots, torus.most_planes
    return next_along(-1, 0, planes), next_along(0, 1, slots), next_along(1, 0, planes), next_along(0, -1, slots)


@lru_cache(maxsize=2048)
def _distances(torus: Torus, target: SatelliteId) -> array[int]:
    """Return the links from each satellite to ``target``, by index."""
    links = array("H", [_FAR]) * torus.cells
    if target not in torus:
        return links
    links[torus.index(target)] = 0
    edge = deque([target])
    while edge:
        satellite = edge.popleft()
        for neighbour in torus.neighbours(satellite):  # links are symmetric
            if links[torus.index(neighbour)] == _FAR:
                links[torus.index(neighbour)] = links[torus.index(satellite)] + 1
                edge.append(neighbour)
    return links


def reached_from(torus: Torus, start: SatelliteId) -> list[SatelliteId]:
    links_to = _distances(torus, start)
    return [satellite for satellite in torus.satellites() if links_to[torus.index(satellite)] != _FAR]
