"""Ground tracks: the path of the overhead point over the grid, hence the moves of the box and the time of the next.

A ``Track`` is piecewise linear, so satellites and clients compute the same moves to the bit, and the next move exactly.

- A host that stands still has one piece that never ends: the anchor's closed form.
- A host that moves (``Trajectory``) has a piece for each quarter of a degree of its path.
- A user in a grid of cells on the ground (``CellGrid``) has a piece between any two stops.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from skymemory.constellation.orbit import Shell
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.constellation.visibility import (
    GroundHost,
    nearest,
    overhead_cell,
    plane_move_period_s,
    slot_move_period_s,
)
from skymemory.errors import InvalidInput
from skymemory.units import EARTH_RADIUS_M

MAX_SPEED_M_S = 1_000.0
"""Three times an airliner's: a higher speed is a typing error."""
MAX_LATITUDE_DEG = 89.0
"""Over a pole the longitude, and with it the plane overhead, would jump."""
_MAX_LEG_RAD = math.radians(170.0)
_CHECK_RAD = math.radians(0.5)
_PIECE_RAD = math.radians(0.25)
"""The overhead point is interpolated linearly over this much of a moving host's path."""


class Knot(NamedTuple):
    """The overhead point at a time, in cells: real numbers that never wrap."""

    time_s: float
    plane: float
    slot: float


Rates = tuple[float, float]
"""Planes and slots per second."""
STILL: Rates = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Track:
    """Knots in ascending order of time, at least one; ``rates`` hold before the first and after the last."""

    knots: tuple[Knot, ...]
    rates: Rates = STILL
    _times: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _origin: tuple[int, int] = field(init=False, repr=False, compare=False)
    """The cell overhead at time 0."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_times", tuple(knot.time_s for knot in self.knots))
        object.__setattr__(self, "_origin", self.cell_at(0.0))

    def cell(self, time_s: float) -> tuple[float, float]:
        """``(plane, slot)`` of the overhead point, real numbers."""
        piece = bisect_right(self._times, time_s)
        at, plane, slot = self.knots[max(piece - 1, 0)]
        plane_rate, slot_rate = self._rates_of(piece)
        return plane + plane_rate * (time_s - at), slot + slot_rate * (time_s - at)

    def _rates_of(self, piece: int) -> Rates:
        """Of the piece that ends with knot ``piece``."""
        if not 0 < piece < len(self.knots):
            return self.rates
        before, after = self.knots[piece - 1], self.knots[piece]
        seconds = after.time_s - before.time_s
        return (after.plane - before.plane) / seconds, (after.slot - before.slot) / seconds

    def cell_at(self, time_s: float) -> tuple[int, int]:
        """``(plane, slot)`` of the cell overhead: the anchor, not wrapped."""
        plane, slot = self.cell(time_s)
        return nearest(plane), nearest(slot)

    def moves(self, time_s: float) -> tuple[int, int]:
        """Slot moves (each one slot west) and plane moves (each one plane south) since time 0."""
        plane0, slot0 = self._origin
        plane, slot = self.cell_at(time_s)
        return slot0 - slot, plane - plane0

    def next_crossing_s(self, time_s: float) -> float:
        """When the overhead point next reaches the edge of its cell, to within rounding; infinity: never."""
        piece = bisect_right(self._times, time_s)
        while True:
            end_s = self.knots[piece].time_s if piece < len(self.knots) else math.inf
            plane, slot = self.cell(time_s)
            plane_rate, slot_rate = self._rates_of(piece)
            crossing_s = time_s + min(_until_edge_s(plane, plane_rate), _until_edge_s(slot, slot_rate))
            if crossing_s <= end_s or end_s == math.inf:
                return crossing_s
            time_s = end_s
            piece += 1


def _until_edge_s(cell: float, rate: float) -> float:
    if rate == 0:
        return math.inf
    middle = nearest(cell)
    return (middle + 0.5 - cell) / rate if rate > 0 else (cell - (middle - 0.5)) / -rate


def track_over(shell: Shell, place: Place, epoch_unix_s: float, descending: bool = False) -> Track:
    """The track of the overhead point of ``place`` on one branch (see ``visibility``), from the epoch on.

    For a moving host it is exact at its waypoints and every quarter of a degree between them.
    """
    rates = (1 / plane_move_period_s(shell), -1 / slot_move_period_s(shell))
    times = _knot_times(place) if isinstance(place, Trajectory) else [0.0]
    knots: list[Knot] = []
    for time_s in times:
        plane, slot = overhead_cell(shell, host_at(place, time_s), epoch_unix_s, time_s, descending)
        if knots:
            # Longitudes wrap, the track does not: of the possible planes take the one nearest to the Earth's rotation.
            expected = knots[-1].plane + rates[0] * (time_s - knots[-1].time_s)
            turn = planes_of_turn(shell)
            plane += turn * round((expected - plane) / turn)
        knots.append(Knot(time_s, plane, slot))
    return Track(tuple(knots), rates)


def planes_of_turn(shell: Shell) -> int:
    """Planes that pass while the Earth turns once: of a star each twice, climbing and descending."""
    return shell.planes * round(2 * math.pi / shell.span_rad)


def seam_free(track: Track, shell: Shell, north: int, south: int, from_s: float) -> tuple[float, float]:
    """``(wait_s, for_s)``: how long after ``from_s`` until a box that reaches this many planes north and south of its
    centre has no seam of the star in it, and for how long from then on. Of a host that stands still.
    """
    rate = track.rates[0]
    first, last = north - 0.5, shell.planes - 1 - south + 0.5
    turn = planes_of_turn(shell)
    place = (track.cell(from_s)[0] - first) % turn + first
    if place < last:
        return 0.0, (last - place) / rate
    return (first + turn - place) / rate, (last - first) / rate


def _knot_times(way: Trajectory) -> list[float]:
    times = [way.waypoints[0].time_s]
    for leg, (here, there) in enumerate(zip(way.waypoints, way.waypoints[1:], strict=False)):
        pieces = max(1, math.ceil(way.leg_rad(leg) / _PIECE_RAD))
        times += [here.time_s + (there.time_s - here.time_s) * piece / pieces for piece in range(1, pieces + 1)]
    return times


# --- Moving hosts ---


class Waypoint(NamedTuple):
    """Where the host is ``time_s`` seconds (of the satellites' time) after the epoch."""

    time_s: float
    latitude_deg: float
    longitude_deg: float


Vector = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The path of a host over the ground, such as a ship or an aircraft: great circles between timed waypoints.

    At least one waypoint, in ascending order of time; the host stands still before the first and after the last.
    """

    waypoints: tuple[Waypoint, ...]

    def __post_init__(self) -> None:
        if not self.waypoints:
            raise InvalidInput("a trajectory without waypoints: expected at least one, `seconds latitude longitude`")
        for point in self.waypoints:
            GroundHost(point.latitude_deg, point.longitude_deg)
            if not math.isfinite(point.time_s):
                raise InvalidInput(f"waypoint at {point.time_s} s: expected seconds after the epoch")
        self._check_latitude(self.waypoints[0])
        for leg in range(len(self.waypoints) - 1):
            self._check_leg(leg)

    def _check_leg(self, leg: int) -> None:
        here, there = self.waypoints[leg], self.waypoints[leg + 1]
        seconds = there.time_s - here.time_s
        if seconds <= 0:
            raise InvalidInput(
                f"waypoint {leg + 2} is at {there.time_s:g} s, the one before at {here.time_s:g} s: each must be later"
            )
        angle = self.leg_rad(leg)
        if angle > _MAX_LEG_RAD:
            raise InvalidInput(f"waypoints {leg + 1} and {leg + 2} are nearly opposite: put one between them")
        speed_m_s = angle * EARTH_RADIUS_M / seconds
        if speed_m_s > MAX_SPEED_M_S:
            raise InvalidInput(
                f"{speed_m_s:.0f} m/s from waypoint {leg + 1} to {leg + 2}: expected at most {MAX_SPEED_M_S:g}"
            )
        pieces = max(1, math.ceil(angle / _CHECK_RAD))
        for piece in range(1, pieces + 1):
            time_s = here.time_s + seconds * piece / pieces
            place = self.at(time_s)
            self._check_latitude(Waypoint(time_s, place.latitude_deg, place.longitude_deg))

    @staticmethod
    def _check_latitude(point: Waypoint) -> None:
        if abs(point.latitude_deg) > MAX_LATITUDE_DEG:
            raise InvalidInput(
                f"the path is at latitude {point.latitude_deg:.2f} after {point.time_s:g} s: expected at most "
                f"{MAX_LATITUDE_DEG:g} degrees north or south, add a waypoint that avoids the pole"
            )

    def leg_rad(self, leg: int) -> float:
        """Angle at the centre of the Earth between a waypoint and the next."""
        return _angle_rad(_unit(self.waypoints[leg]), _unit(self.waypoints[leg + 1]))

    def at(self, time_s: float) -> GroundHost:
        """Where the host is."""
        leg = bisect_right(self.waypoints, time_s, key=lambda point: point.time_s) - 1
        if leg < 0 or leg == len(self.waypoints) - 1:
            point = self.waypoints[max(leg, 0)]
            return GroundHost(point.latitude_deg, point.longitude_deg)
        here, there = self.waypoints[leg], self.waypoints[leg + 1]
        start, end = _unit(here), _unit(there)
        angle = _angle_rad(start, end)
        share = (time_s - here.time_s) / (there.time_s - here.time_s)
        if angle < 1e-9:
            return GroundHost(here.latitude_deg, here.longitude_deg)
        a, b = math.sin((1 - share) * angle), math.sin(share * angle)
        x, y, z = (a * s + b * e for s, e in zip(start, end, strict=True))
        return GroundHost(math.degrees(math.atan2(z, math.hypot(x, y))), math.degrees(math.atan2(y, x)))


Place = GroundHost | Trajectory
"""A fixed or a moving host."""


def host_at(place: Place, time_s: float) -> GroundHost:
    """Where the host is ``time_s`` seconds after the epoch."""
    return place.at(time_s) if isinstance(place, Trajectory) else place


def parse_waypoints(lines: Iterable[str], where: str) -> tuple[Waypoint, ...]:
    """Waypoints from text: ``seconds latitude longitude``, one per line, ``#`` before a comment."""
    points = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        try:
            time_s, latitude_deg, longitude_deg = (float(word) for word in words)
        except ValueError as error:
            raise InvalidInput(
                f"{where}, line {number}: {line.strip()!r}: expected seconds, latitude and longitude"
            ) from error
        points.append(Waypoint(time_s, latitude_deg, longitude_deg))
    return Trajectory(tuple(points)).waypoints


def _unit(point: Waypoint) -> Vector:
    latitude, longitude = math.radians(point.latitude_deg), math.radians(point.longitude_deg)
    return math.cos(latitude) * math.cos(longitude), math.cos(latitude) * math.sin(longitude), math.sin(latitude)


def _angle_rad(a: Vector, b: Vector) -> float:
    cross = math.hypot(a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0])
    return math.atan2(cross, sum(p * q for p, q in zip(a, b, strict=True)))


# --- Cells on the ground in place of satellites (paper §6) ---
#
# A base station is linked to the four around it, as a satellite is; rows are planes, columns are slots. Not the grid
# moves but its user, whose path takes the place of the orbit: each border crossed is a move, and the same placement and
# migration keep the cache around the user. A grid has edges, the torus has none: the path must stay far enough from the
# edges that no box, and no shortest path inside one, crosses them.
#
# One grid has one path: a train, a bus, or a single user. Users on different paths need a grid (a clock) each.


class Stop(NamedTuple):
    """A user's position at a time, in cells; straight lines in between. Rows grow south, columns east; a whole number
    is the middle of a cell.
    """

    time_s: float
    row: float
    column: float


@dataclass(frozen=True, slots=True)
class CellGrid:
    """``rows`` by ``columns`` of base stations, each with its four neighbours."""

    rows: int
    columns: int

    @property
    def torus(self) -> Torus:
        """The grid as placement and routing see it; paths keep away from the links that join opposite edges."""
        return Torus(self.rows, self.columns)

    def track(self, path: Sequence[Stop], margin: int) -> Track:
        """The moves of a box around a user on this path, standing still before the first stop and after the last.

        ``margin`` is how many cells the box reaches from its centre.

        Raises:
            InvalidInput: no stops, stops out of order, or one too near to the edge of the grid.
        """
        if not path:
            raise InvalidInput("a path without stops: expected at least one")
        for number, stop in enumerate(path, start=1):
            if not all(math.isfinite(part) for part in stop):
                raise InvalidInput(f"stop {number} {tuple(stop)}: expected seconds, row and column")
            if number > 1 and stop.time_s <= path[number - 2].time_s:
                raise InvalidInput(f"stop {number} is at {stop.time_s:g} s: each must be later than the one before")
            for name, at, count in (("row", stop.row, self.rows), ("column", stop.column, self.columns)):
                lowest, highest = margin - 0.5, count - margin - 0.5
                if not lowest <= at < highest:
                    raise InvalidInput(
                        f"stop {number} is in {name} {at:g} of {count}: a box that reaches {margin} cells needs "
                        f"{lowest:g} to less than {highest:g}, so that it stays off the edge; use a larger grid"
                    )
        return Track(tuple(Knot(*stop) for stop in path))

    def centre(self, path: Sequence[Stop], margin: int) -> SatelliteId:
        """The cell the user is in at time 0."""
        return SatelliteId(*self.track(path, margin).cell_at(0.0))


def parse_grid(text: str) -> CellGrid:
    """``24x24``: rows and columns. Raises ``InvalidInput``."""
    rows, cross, columns = text.partition("x")
    if not (cross and rows.isascii() and columns.isascii() and rows.isdigit() and columns.isdigit()):
        raise InvalidInput(f"a grid of {text!r}: expected rows and columns, such as 24x24")
    if not (int(rows) <= 200 and int(columns) <= 200):
        raise InvalidInput(f"a grid of {text}: expected at most 200x200")
    return CellGrid(int(rows), int(columns))
