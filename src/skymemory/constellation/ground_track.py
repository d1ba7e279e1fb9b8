"""Ground tracks: the overhead point's path over the grid, which gives the moves of the box.

A ``Track`` is piecewise linear, so satellites and clients compute the same moves to the bit.
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
MAX_LATITUDE_DEG = 89.0
_MAX_LEG_RAD = math.radians(170.0)
_CHECK_RAD = math.radians(0.5)
_PIECE_RAD = math.radians(0.25)


class Knot(NamedTuple):
    """Overhead point in cells: real numbers that do not wrap."""

    time_s: float
    plane: float
    slot: float


Rates = tuple[float, float]
"""Planes and slots per second."""
STILL: Rates = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Track:
    """Path of the overhead point over the grid, linear between ascending knots; ``rates`` apply before the first and
    after the last.
    """

    knots: tuple[Knot, ...]
    rates: Rates = STILL
    _times: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _origin: tuple[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_times", tuple(knot.time_s for knot in self.knots))
        object.__setattr__(self, "_origin", self.cell_at(0.0))

    def cell(self, time_s: float) -> tuple[float, float]:
        piece = bisect_right(self._times, time_s)
        at, plane, slot = self.knots[max(piece - 1, 0)]
        plane_rate, slot_rate = self._rates_of(piece)
        return plane + plane_rate * (time_s - at), slot + slot_rate * (time_s - at)

    def _rates_of(self, piece: int) -> Rates:
        if not 0 < piece < len(self.knots):
            return self.rates
        before, after = self.knots[piece - 1], self.knots[piece]
        seconds = after.time_s - before.time_s
        return (after.plane - before.plane) / seconds, (after.slot - before.slot) / seconds

    def cell_at(self, time_s: float) -> tuple[int, int]:
        """Return ``(plane, slot)`` of the nearest cell, not wrapped."""
        plane, slot = self.cell(time_s)
        return nearest(plane), nearest(slot)

    def moves(self, time_s: float) -> tuple[int, int]:
        """Return slot moves (west) and plane moves (south) since time 0."""
        plane0, slot0 = self._origin
        plane, slot = self.cell_at(time_s)
        return slot0 - slot, plane - plane0

    def next_crossing_s(self, time_s: float) -> float:
        """Return when the overhead point next reaches its cell's edge."""
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
    """Return the track of ``place`` on the climbing or ``descending`` branch of the orbits."""
    rates = (1 / plane_move_period_s(shell), -1 / slot_move_period_s(shell))
    times = _knot_times(place) if isinstance(place, Trajectory) else [0.0]
    knots: list[Knot] = []
    for time_s in times:
        plane, slot = overhead_cell(shell, host_at(place, time_s), epoch_unix_s, time_s, descending)
        if knots:
            # Longitudes wrap, the track does not: take the plane nearest to the position expected from the rotation.
            expected = knots[-1].plane + rates[0] * (time_s - knots[-1].time_s)
            turn = planes_of_turn(shell)
            plane += turn * round((expected - plane) / turn)
        knots.append(Knot(time_s, plane, slot))
    return Track(tuple(knots), rates)


def planes_of_turn(shell: Shell) -> int:
    """Return the planes that pass per rotation of the Earth; a star's pass twice."""
    return shell.planes * round(2 * math.pi / shell.span_rad)


def seam_free(track: Track, shell: Shell, north: int, south: int, from_s: float) -> tuple[float, float]:
    """Return ``(wait_s, for_s)`` until, and of, the next time without a star's seam in a fixed host's box."""
    rate = track.rates[0]
    first, last = north - 0.5, shell.planes - 1 - south + 0.5
    turn = planes_of_turn(shell)
    place = (track.cell(from_s)[0] - first) % turn + first
    if place < last:
        return 0.0, (last - place) / rate
    return (first + turn - place) / rate, (last - first) / rate


def _knot_times(way: Trajectory) -> list[float]:
    """Return times that cut a path into pieces short enough for interpolation."""
    times = [way.waypoints[0].time_s]
    for leg, (start, end) in enumerate(zip(way.waypoints, way.waypoints[1:], strict=False)):
        pieces = max(1, math.ceil(way.leg_rad(leg) / _PIECE_RAD))
        times += [start.time_s + (end.time_s - start.time_s) * piece / pieces for piece in range(1, pieces + 1)]
    return times


# --- Moving hosts ---


class Waypoint(NamedTuple):
    """Position of a host, in satellites' seconds after the epoch."""

    time_s: float
    latitude_deg: float
    longitude_deg: float


Vector = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Path of a host over the ground: great circles between ascending waypoints, at least one.

    The host stands still before the first and after the last.
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
        start, end = self.waypoints[leg], self.waypoints[leg + 1]
        seconds = end.time_s - start.time_s
        if seconds <= 0:
            raise InvalidInput(
                f"waypoint {leg + 2} is at {end.time_s:g} s, the one before at {start.time_s:g} s: each must be later"
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
            time_s = start.time_s + seconds * piece / pieces
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
        return _angle_rad(_unit(self.waypoints[leg]), _unit(self.waypoints[leg + 1]))

    def at(self, time_s: float) -> GroundHost:
        """Return the position at a time, on the great circle between waypoints."""
        leg = bisect_right(self.waypoints, time_s, key=lambda point: point.time_s) - 1
        if leg < 0 or leg == len(self.waypoints) - 1:
            point = self.waypoints[max(leg, 0)]
            return GroundHost(point.latitude_deg, point.longitude_deg)
        before, after = self.waypoints[leg], self.waypoints[leg + 1]
        start, end = _unit(before), _unit(after)
        angle = _angle_rad(start, end)
        share = (time_s - before.time_s) / (after.time_s - before.time_s)
        if angle < 1e-9:
            return GroundHost(before.latitude_deg, before.longitude_deg)
        a, b = math.sin((1 - share) * angle), math.sin(share * angle)
        x, y, z = (a * s + b * e for s, e in zip(start, end, strict=True))
        return GroundHost(math.degrees(math.atan2(z, math.hypot(x, y))), math.degrees(math.atan2(y, x)))


Place = GroundHost | Trajectory


def host_at(place: Place, time_s: float) -> GroundHost:
    return place.at(time_s) if isinstance(place, Trajectory) else place


def parse_waypoints(lines: Iterable[str], where: str) -> tuple[Waypoint, ...]:
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


# --- Cells on the ground instead of satellites (paper §6) ---
#
# A base station is linked to its four neighbours, as a satellite is; rows are planes, columns are slots. The user moves
# instead of the grid, and the user's path takes the place of the orbit: each border crossed is a move, and the same
# placement and migration keep the cache around the user. Unlike the torus, a grid has edges: the path must stay far
# enough from them that no box, and no shortest path inside a box, crosses them.
#
# A grid has a single path: a train, a bus, or a single user. Users on different paths need separate grids (clocks).


class Stop(NamedTuple):
    """Position of a user in cells, whose centres are whole numbers; rows grow south, columns east."""

    time_s: float
    row: float
    column: float


@dataclass(frozen=True, slots=True)
class CellGrid:
    """Grid of base stations in place of satellites, linked to their neighbours; a user moves over it."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"

    @property
    def torus(self) -> Torus:
        return Torus(self.rows, self.columns)

    def track(self, path: Sequence[Stop], margin: int) -> Track:
        """Return the moves of a box that extends ``margin`` cells around a user on this path."""
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
        return SatelliteId(*self.track(path, margin).cell_at(0.0))


def parse_grid(text: str) -> CellGrid:
    """Parse rows and columns, at most 200 each, such as ``24x24``."""
    rows, cross, columns = text.partition("x")
    if not (cross and rows.isascii() and columns.isascii() and rows.isdigit() and columns.isdigit()):
        raise InvalidInput(f"a grid of {text!r}: expected rows and columns, such as 24x24")
    if not (int(rows) <= 200 and int(columns) <= 200):
        raise InvalidInput(f"a grid of {text}: expected at most 200x200")
    return CellGrid(int(rows), int(columns))
