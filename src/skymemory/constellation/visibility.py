"""Visibility from the ground: elevations, the anchor of a host's box, its gateway.

The satellite nearest to a host changes about every minute, between planes and branches; a box that followed it would
always migrate. So its centre is an *anchor*: the overhead point's cell on a fixed branch, a pure function of host,
epoch and time. It steps a slot west per slot flown and a plane south per plane that the Earth turns against the nodes.

``j2``: WGS84 at height 0, geodetic, turning by mean sidereal time (TEME). ``paper``: a sphere that turns by the Earth
rotation angle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from skymemory.constellation.orbit import WGS84_RADIUS_M, Shell, SkyModel
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput
from skymemory.units import EARTH_RADIUS_M

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EARTH_ROTATION_RAD_S = 7.292115146706979e-5
WGS84_E2 = 0.0066943799901413165
Times = TypeVar("Times", float, "NDArray[np.float64]")
DEFAULT_MASK_DEG = 25.0
"""Minimum elevation for a ground antenna (Starlink's filing)."""


@dataclass(frozen=True, slots=True)
class GroundHost:
    """Place in degrees north and east."""

    latitude_deg: float
    longitude_deg: float

    def __post_init__(self) -> None:
        if not -90 <= self.latitude_deg <= 90:
            raise InvalidInput(f"latitude {self.latitude_deg:g}: expected -90 … 90 degrees")
        if not -180 <= self.longitude_deg <= 360:
            raise InvalidInput(f"longitude {self.longitude_deg:g}: expected -180 … 360 degrees")


@dataclass(frozen=True, slots=True)
class Anchor:
    satellite: SatelliteId
    slot_moves: int
    plane_moves: int

    @property
    def moves(self) -> tuple[int, int]:
        return self.slot_moves, self.plane_moves


def earth_angle_rad(epoch_unix_s: float, now_s: Times) -> Times:
    """Return the Earth rotation angle (IERS Conventions 2010, eq. 5.15; UT1 taken as UTC)."""
    days_since_j2000 = epoch_unix_s / 86400.0 + 2440587.5 - 2451545.0
    at_epoch = 2 * math.pi * (0.7790572732640 + 1.00273781191135448 * days_since_j2000)
    return math.fmod(at_epoch, 2 * math.pi) + EARTH_ROTATION_RAD_S * now_s


def sidereal_angle_rad(epoch_unix_s: float, now_s: Times) -> Times:
    """Return Greenwich mean sidereal time of 1982 as an angle (UT1 taken as UTC).

    Linear in ``now_s``; the error is 1e-9 rad after a year.
    """
    days = epoch_unix_s / 86400.0 + 2440587.5 - 2451545.0
    at_epoch_s = 67310.54841 + 86400.0 * math.fmod(days, 1.0)
    at_epoch_s += _SIDEREAL_PER_CENTURY_S * days / 36525 + 0.093104 * (days / 36525) ** 2 - 6.2e-6 * (days / 36525) ** 3
    return 2 * math.pi * math.fmod(at_epoch_s / 86400.0, 1.0) + _sidereal_rate_rad_s(days) * now_s


_SIDEREAL_PER_CENTURY_S = 8640184.812866


def _sidereal_rate_rad_s(days_since_j2000: float) -> float:
    gain = _SIDEREAL_PER_CENTURY_S + 2 * 0.093104 * days_since_j2000 / 36525
    return 2 * math.pi / 86400.0 * (1 + gain / 36525 / 86400.0)


_SIDEREAL_RATE_RAD_S = _sidereal_rate_rad_s(0.0)


def ground_angle_rad(model: SkyModel, epoch_unix_s: float, now_s: Times) -> Times:
    return earth_angle_rad(epoch_unix_s, now_s) if model == "paper" else sidereal_angle_rad(epoch_unix_s, now_s)


def ground_m(model: SkyModel, latitude_deg: float) -> tuple[float, float]:
    """Return a place's distance from the Earth's axis and, northward, from the equator's plane."""
    sine, cosine = math.sin(math.radians(latitude_deg)), math.cos(math.radians(latitude_deg))
    if model == "paper":
        return EARTH_RADIUS_M * cosine, EARTH_RADIUS_M * sine
    normal_m = WGS84_RADIUS_M / math.sqrt(1 - WGS84_E2 * sine**2)
    return normal_m * cosine, normal_m * (1 - WGS84_E2) * sine


def overhead_argument_rad(shell: Shell, host: GroundHost) -> float:
    """Return the argument of latitude at which the climbing branch passes over or nearest to the host."""
    i_rad = math.radians(shell.inclination_deg)
    if shell.model == "paper":
        sine = math.sin(math.radians(host.latitude_deg)) / math.sin(i_rad)
    else:
        # The intersection of the normal with the shell: up by t, with |ground + t·normal| equal to the radius.
        out_m, north_m = ground_m(shell.model, host.latitude_deg)
        latitude_rad = math.radians(host.latitude_deg)
        along_m = out_m * math.cos(latitude_rad) + north_m * math.sin(latitude_rad)
        up_m = math.sqrt(along_m**2 + shell.radius_m**2 - out_m**2 - north_m**2) - along_m
        sine = (north_m + up_m * math.sin(latitude_rad)) / shell.radius_m / math.sin(i_rad)
    return math.asin(max(-1.0, min(1.0, sine)))


def overhead_cell(
    shell: Shell, host: GroundHost, epoch_unix_s: float, now_s: float, descending: bool = False
) -> tuple[float, float]:
    """Return ``(plane, slot)`` of the point above a host on a branch, as real numbers, not wrapped.

    A star has no planes from its last on: each branch is overhead for half of the day.
    """
    u_rad = overhead_argument_rad(shell, host)
    if descending:
        u_rad = math.pi - u_rad
    i_rad = math.radians(shell.inclination_deg)
    from_node_rad = math.atan2(math.cos(i_rad) * math.sin(u_rad), math.cos(u_rad))
    sidereal_rad = math.radians(host.longitude_deg) + ground_angle_rad(shell.model, epoch_unix_s, now_s)
    epoch_node_rad, epoch_slot = shell.epoch_cell
    node_rad = sidereal_rad - from_node_rad - shell.node_rate_rad_s * now_s - epoch_node_rad
    plane = node_rad * shell.planes / shell.span_rad
    slot = (u_rad / (2 * math.pi) - now_s / shell.period_s) * shell.slots_per_plane - epoch_slot
    return plane, slot


def anchor(shell: Shell, host: GroundHost, epoch_unix_s: float, now_s: float) -> Anchor:
    plane0, slot0 = overhead_cell(shell, host, epoch_unix_s, 0.0)
    plane, slot = overhead_cell(shell, host, epoch_unix_s, now_s)
    slot_moves = nearest(slot0) - nearest(slot)
    plane_moves = nearest(plane) - nearest(plane0)
    return Anchor(shell.torus.wrap(nearest(plane), nearest(slot)), slot_moves, plane_moves)


def nearest(cell: float) -> int:
    return math.floor(cell + 0.5)


def slot_move_period_s(shell: Shell) -> float:
    return shell.period_s / shell.slots_per_plane


def plane_move_period_s(shell: Shell) -> float:
    rate_rad_s = EARTH_ROTATION_RAD_S if shell.model == "paper" else _SIDEREAL_RATE_RAD_S
    return shell.span_rad / shell.planes / (rate_rad_s - shell.node_rate_rad_s)


def place_m(place: GroundHost, model: SkyModel = "j2", angle_rad: float = 0.0) -> NDArray[np.float64]:
    """Return a place in the Earth-fixed frame turned by ``angle_rad``."""
    import numpy as np  # local, as below: verbs that need only delays and maps start without numpy

    out_m, north_m = ground_m(model, place.latitude_deg)
    longitude = math.radians(place.longitude_deg) + angle_rad
    return np.array([out_m * math.cos(longitude), out_m * math.sin(longitude), north_m])


def place_up(place: GroundHost, angle_rad: float = 0.0) -> NDArray[np.float64]:
    """Return the normal of the horizon in the frame of ``place_m``."""
    import numpy as np

    latitude = math.radians(place.latitude_deg)
    longitude = math.radians(place.longitude_deg) + angle_rad
    out = math.cos(latitude)
    return np.array([out * math.cos(longitude), out * math.sin(longitude), math.sin(latitude)])


def host_position_m(
    host: GroundHost, epoch_unix_s: float, now_s: float, model: SkyModel = "paper"
) -> NDArray[np.float64]:
    return place_m(host, model, ground_angle_rad(model, epoch_unix_s, now_s))


def up_vector(host: GroundHost, epoch_unix_s: float, now_s: float, model: SkyModel = "paper") -> NDArray[np.float64]:
    return place_up(host, ground_angle_rad(model, epoch_unix_s, now_s))


def slants_m(shell: Shell, host: GroundHost, epoch_unix_s: float, now_s: float) -> NDArray[np.float64]:
    """Return straight distances to every satellite, also through the Earth; ``(planes, slots)``."""
    import numpy as np

    offsets = shell.positions_m(now_s) - host_position_m(host, epoch_unix_s, now_s, shell.model)
    return np.asarray(np.linalg.norm(offsets, axis=-1), dtype=np.float64)


def elevations_deg(shell: Shell, host: GroundHost, epoch_unix_s: float, now_s: float) -> NDArray[np.float64]:
    """Return every satellite's elevation, negative below the horizon; ``(planes, slots)``."""
    return elevations_of(shell.positions_m(now_s), host, epoch_unix_s, now_s, shell.model)


def elevations_of(
    positions_m: NDArray[np.float64], host: GroundHost, epoch_unix_s: float, now_s: float, model: SkyModel = "j2"
) -> NDArray[np.float64]:
    """Return elevations for inertial positions (``j2``: TEME), shape ``(…, 3)``."""
    import numpy as np

    offsets = positions_m - host_position_m(host, epoch_unix_s, now_s, model)
    sines = offsets @ up_vector(host, epoch_unix_s, now_s, model) / np.linalg.norm(offsets, axis=-1)
    return np.asarray(np.degrees(np.arcsin(np.clip(sines, -1.0, 1.0))), dtype=np.float64)


def visible(
    shell: Shell, host: GroundHost, epoch_unix_s: float, now_s: float, mask_deg: float = DEFAULT_MASK_DEG
) -> list[SatelliteId]:
    """Return the satellites at or above the mask, highest first."""
    elevation = elevations_deg(shell, host, epoch_unix_s, now_s).ravel()
    order = (-elevation).argsort(kind="stable")
    return [shell.torus.satellite(int(index)) for index in order if elevation[index] >= mask_deg]


def gateway(
    shell: Shell, host: GroundHost, epoch_unix_s: float, now_s: float, mask_deg: float = DEFAULT_MASK_DEG
) -> SatelliteId | None:
    in_sight = visible(shell, host, epoch_unix_s, now_s, mask_deg)
    return in_sight[0] if in_sight else None
