"""A host that moves over the ground: a ship, an aircraft. Waypoints with times, great circles in between.

Before the first waypoint and after the last the host stands still. Pure: where it is is a function of time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from skymemory.constellation.visibility import GroundHost
from skymemory.errors import InvalidInput
from skymemory.units import EARTH_RADIUS_M

MAX_SPEED_M_S = 1_000.0
"""Three times an airliner's: what is faster is a typing error."""
MAX_LATITUDE_DEG = 89.0
"""Over a pole the longitude, and with it the plane overhead, would jump."""
_MAX_LEG_RAD = math.radians(170.0)
_CHECK_RAD = math.radians(0.5)


class Waypoint(NamedTuple):
    """Where the host is ``time_s`` seconds (of the satellites' time) after the epoch."""

    time_s: float
    latitude_deg: float
    longitude_deg: float


Vector = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The way of a host. Waypoints in ascending order of time, at least one."""

    waypoints: tuple[Waypoint, ...]

    def __post_init__(self) -> None:
        if not self.waypoints:
            raise InvalidInput("a way without waypoints: expected at least one, `seconds latitude longitude`")
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
                f"the way is at latitude {point.latitude_deg:.2f} after {point.time_s:g} s: expected at most "
                f"{MAX_LATITUDE_DEG:g} degrees north or south, put a waypoint that goes round the pole"
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
"""Where a host is: always there, or on its way."""


def host_at(place: Place, time_s: float) -> GroundHost:
    """Where the host is ``time_s`` seconds after the epoch."""
    return place.at(time_s) if isinstance(place, Trajectory) else place


def parse_waypoints(lines: Iterable[str], where: str) -> tuple[Waypoint, ...]:
    """Waypoints as people write them: ``seconds latitude longitude``, one a line, ``#`` before a comment."""
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
