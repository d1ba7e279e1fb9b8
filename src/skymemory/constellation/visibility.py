"""Visibility from the ground: elevations, the anchor of a host's box, its gateway.

The satellite nearest to a host changes every minute or so, mostly across planes and between the branches of
orbits that climb and descend. A box that followed it would migrate all the time. So the box is centred on an
*anchor*: the grid cell of the overhead point on one frozen branch, a pure function of host, epoch and time.
It steps one slot west whenever the satellites have flown one slot, and one plane south whenever the Earth,
and the drift of the nodes against it, have turned one plane.

The papers step slots only; then the plane of the box sinks below the horizon within two hours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skymemory.constellation.orbit import Shell
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput
from skymemory.units import EARTH_RADIUS_M

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EARTH_ROTATION_RAD_S = 7.292115146706979e-5
DEFAULT_MASK_DEG = 25.0
"""Lowest elevation at which a ground antenna talks to a satellite (Starlink's filing)."""


@dataclass(frozen=True, slots=True)
class GroundHost:
    """A place on the ground; latitude grows north, longitude east."""

    latitude_deg: float
    longitude_deg: float

    def __post_init__(self) -> None:
        if not -90 <= self.latitude_deg <= 90:
            raise InvalidInput(f"latitude {self.latitude_deg:g}: expected -90 … 90 degrees")
        if not -180 <= self.longitude_deg <= 360:
            raise InvalidInput(f"longitude {self.longitude_deg:g}: expected -180 … 360 degrees")


@dataclass(frozen=True, slots=True)
class Anchor:
    """The centre of a host's box, and the moves since the epoch that brought it there."""

    satellite: SatelliteId
    slot_moves: int
    plane_moves: int

    @property
    def moves(self) -> tuple[int, int]:
        return self.slot_moves, self.plane_moves


def earth_angle_rad(epoch_unix_s: float, now_s: float) -> float:
    """Earth rotation angle ``now_s`` after the epoch (IERS Conventions 2010, eq. 5.15; UT1 taken as UTC)."""
    days_since_j2000 = epoch_unix_s / 86400.0 + 2440587.5 - 2451545.0
    at_epoch = 2 * math.pi * (0.7790572732640 + 1.00273781191135448 * days_since_j2000)
    return math.fmod(at_epoch, 2 * math.pi) + EARTH_ROTATION_RAD_S * now_s


def overhead_argument_rad(shell: Shell, host: GroundHost) -> float:
    """Argument of latitude where the climbing branch passes the host's latitude (or comes nearest)."""
    sine = math.sin(math.radians(host.latitude_deg)) / math.sin(math.radians(shell.inclination_deg))
    return math.asin(max(-1.0, min(1.0, sine)))


def overhead_cell(shell: Shell, host: GroundHost, epoch_unix_s: float, now_s: float) -> tuple[float, float]:
    """``(plane, slot)`` of the overhead point on the climbing branch: real numbers that never wrap."""
    if shell.phase:
        raise InvalidInput(f"Walker phase {shell.phase}: a box needs aligned planes, phase 0")
    u_rad = overhead_argument_rad(shell, host)
    i_rad = math.radians(shell.inclination_deg)
    from_node_rad = math.atan2(math.cos(i_rad) * math.sin(u_rad), math.cos(u_rad))
    sidereal_rad = math.radians(host.longitude_deg) + earth_angle_rad(epoch_unix_s, now_s)
    node_rad = sidereal_rad - from_node_rad - shell.node_rate_rad_s * now_s
    plane = node_rad * shell.planes / (2 * math.pi)
    slot = (u_rad / (2 * math.pi) - now_s / shell.period_s) * shell.slots_per_plane
    return plane, slot


def anchor(shell: Shell, host: GroundHost, epoch_unix_s: float, now_s: float) -> Anchor:
    """The anchor ``now_s`` seconds after the epoch."""
    plane0, slot0 = overhead_cell(shell, host, epoch_unix_s, 0.0)
    plane, slot = overhead_cell(shell, host, epoch_unix_s, now_s)
    slot_moves = nearest(slot0) - nearest(slot)
    plane_moves = nearest(plane) - nearest(plane0)
    return Anchor(shell.torus.wrap(nearest(plane), nearest(slot)), slot_moves, plane_moves)


def nearest(cell: float) -> int:
    """The cell that a point lies in; a cell extends half a cell to either side."""
    return math.floor(cell + 0.5)


def slot_move_period_s(shell: Shell) -> float:
    """Time between two slot moves."""
    return shell.period_s / shell.slots_per_plane


def plane_move_period_s(shell: Shell) -> float:
    """Time between two plane moves: Earth's rotation against the drifting nodes."""
    return 2 * math.pi / shell.planes / (EARTH_ROTATION_RAD_S - shell.node_rate_rad_s)


def host_position_m(host: GroundHost, epoch_unix_s: float, now_s: float) -> NDArray[np.float64]:
    """Inertial position of the host, shape ``(3,)``."""
    import numpy as np  # local, as below: verbs that only need delays and maps start without numpy

    latitude = math.radians(host.latitude_deg)
    longitude = math.radians(host.longitude_deg) + earth_angle_rad(epoch_unix_s, now_s)
    unit = [math.cos(latitude) * math.cos(longitude), math.cos(latitude) * math.sin(longitude), math.sin(latitude)]
    return EARTH_RADIUS_M * np.array(unit)


def slants_m(shell: Shell, host: GroundHost, epoch_unix_s: float, now_s: float) -> NDArray[np.float64]:
    """Straight distances from the host to every satellite, through the Earth too; ``(planes, slots)``."""
    import numpy as np

    offsets = shell.positions_m(now_s) - host_position_m(host, epoch_unix_s, now_s)
    return np.asarray(np.linalg.norm(offsets, axis=-1), dtype=np.float64)


def elevations_deg(shell: Shell, host: GroundHost, epoch_unix_s: float, now_s: float) -> NDArray[np.float64]:
    """Elevation of every satellite above the host's horizon, negative below it; ``(planes, slots)``."""
    import numpy as np

    ground = host_position_m(host, epoch_unix_s, now_s)
    offsets = shell.positions_m(now_s) - ground
    upward = offsets @ (ground / EARTH_RADIUS_M)
    return np.asarray(np.degrees(np.arcsin(upward / np.linalg.norm(offsets, axis=-1))), dtype=np.float64)


def visible(
    shell: Shell, host: GroundHost, epoch_unix_s: float, now_s: float, mask_deg: float = DEFAULT_MASK_DEG
) -> list[SatelliteId]:
    """Satellites at or above the elevation mask, highest first."""
    elevation = elevations_deg(shell, host, epoch_unix_s, now_s).ravel()
    order = (-elevation).argsort(kind="stable")
    return [shell.torus.satellite(int(index)) for index in order if elevation[index] >= mask_deg]


def gateway(
    shell: Shell, host: GroundHost, epoch_unix_s: float, now_s: float, mask_deg: float = DEFAULT_MASK_DEG
) -> SatelliteId | None:
    """The nearest visible satellite (at one altitude also the highest); None when none is in sight."""
    in_sight = visible(shell, host, epoch_unix_s, now_s, mask_deg)
    return in_sight[0] if in_sight else None
