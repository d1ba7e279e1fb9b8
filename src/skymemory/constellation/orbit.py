"""One shell of circular orbits: positions of its satellites, lengths and light times of its links.

SkyMemory paper §2 (equations 1 and 2), §4 (equations 3 and 4); the disclosure's D_N(t). Satellites of plane
``k`` share a right ascension of ``2π·k/planes``; slot ``j`` has the argument of latitude ``u = 2π·j/slots +
2π·phase·k/(planes·slots)`` at the epoch and advances by 2π in a period. The Earth is a sphere of 6371 km.

Rejected: propagating two-line elements. Placement needs a regular grid that every host computes to the same
bit; station keeping corrects drift within a slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from skymemory.constellation.torus import Axis, Torus
from skymemory.errors import InvalidInput
from skymemory.units import EARTH_MU_M3_S2, EARTH_RADIUS_M, SPEED_OF_LIGHT_M_S

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DistanceModel = Literal["exact", "paper"]

LINK_CLEARANCE_M = 80_000.0
"""A laser link must pass this high above the ground to stay out of the atmosphere."""
EARTH_J2 = 1.08262668e-3


def neighbour_chord_m(count: int, altitude_m: float) -> float:
    """Equations 1 and 2: distance of neighbours among ``count`` satellites spread evenly over a circle."""
    return (EARTH_RADIUS_M + altitude_m) * math.sqrt(2 * (1 - math.cos(2 * math.pi / count)))


@dataclass(frozen=True, slots=True)
class Shell:
    """A Walker shell of ``planes`` × ``slots_per_plane`` satellites; ``phase`` is Walker's F."""

    planes: int
    slots_per_plane: int
    altitude_m: float
    inclination_deg: float
    phase: int = 0

    def __post_init__(self) -> None:
        if not 100_000 <= self.altitude_m <= 2_000_000:
            raise InvalidInput(f"altitude_m is {self.altitude_m:g}: expected a low Earth orbit, 100 000 to 2 000 000 m")
        if not 0 < self.inclination_deg < 180:
            raise InvalidInput(f"inclination_deg is {self.inclination_deg:g}: expected more than 0 and less than 180")

    @property
    def torus(self) -> Torus:
        return Torus(self.planes, self.slots_per_plane)

    @property
    def radius_m(self) -> float:
        """From the centre of the Earth."""
        return EARTH_RADIUS_M + self.altitude_m

    @property
    def period_s(self) -> float:
        """One revolution (Kepler)."""
        return 2 * math.pi * math.sqrt(self.radius_m**3 / EARTH_MU_M3_S2)

    @property
    def node_rate_rad_s(self) -> float:
        """Drift of the ascending nodes due to the Earth's flattening (J2); westward for prograde orbits."""
        mean_motion = 2 * math.pi / self.period_s
        ratio = EARTH_RADIUS_M / self.radius_m
        return -1.5 * EARTH_J2 * ratio**2 * mean_motion * math.cos(math.radians(self.inclination_deg))

    def d_m_m(self) -> float:
        """Equation 1: distance of neighbours in a plane, constant."""
        return neighbour_chord_m(self.slots_per_plane, self.altitude_m)

    def d_n_max_m(self) -> float:
        """Equation 2: largest distance to the same slot of a neighbouring plane (at the equator, phase 0)."""
        return neighbour_chord_m(self.planes, self.altitude_m)

    def d_n_m(self, now_s: float, slot: int = 0, plane: int = 0) -> float:
        """Disclosure's D_N(t): distance to the same slot of the next plane. The closed form holds for phase 0 only."""
        u_rad = self.argument_rad(plane, slot, now_s)
        if self.phase:
            return self.chord_m(0, 1, u_rad)
        cos_i = math.cos(math.radians(self.inclination_deg))
        return self.d_n_max_m() * math.hypot(math.cos(u_rad), cos_i * math.sin(u_rad))

    def argument_rad(self, plane: int, slot: int, now_s: float = 0.0) -> float:
        """Argument of latitude of a satellite ``now_s`` seconds after the epoch."""
        turns = slot / self.slots_per_plane + self.phase * plane / (self.planes * self.slots_per_plane)
        return 2 * math.pi * (turns + now_s / self.period_s)

    def position_m(self, u_rad: float, node_rad: float) -> tuple[float, float, float]:
        """Inertial Cartesian position at argument of latitude ``u_rad`` of the orbit with its node at ``node_rad``."""
        i_rad = math.radians(self.inclination_deg)
        along, across, up = (math.cos(u_rad), math.sin(u_rad) * math.cos(i_rad), math.sin(u_rad) * math.sin(i_rad))
        cos_node, sin_node = math.cos(node_rad), math.sin(node_rad)
        r = self.radius_m
        return r * (cos_node * along - sin_node * across), r * (sin_node * along + cos_node * across), r * up

    def positions_m(self, now_s: float = 0.0) -> NDArray[np.float64]:
        """Inertial positions of all satellites, shape ``(planes, slots_per_plane, 3)``."""
        import numpy as np  # local: verbs that only need delays and maps start without numpy

        i_rad = math.radians(self.inclination_deg)
        plane = np.arange(self.planes)[:, None]
        slot = np.arange(self.slots_per_plane)[None, :]
        turns = slot / self.slots_per_plane + self.phase * plane / (self.planes * self.slots_per_plane)
        u = 2 * np.pi * (turns + now_s / self.period_s)
        node = np.broadcast_to(2 * np.pi * plane / self.planes + self.node_rate_rad_s * now_s, u.shape)
        along, across, up = np.cos(u), np.sin(u) * math.cos(i_rad), np.sin(u) * math.sin(i_rad)
        east, north = (np.cos(node) * along - np.sin(node) * across, np.sin(node) * along + np.cos(node) * across)
        return self.radius_m * np.stack([east, north, up], axis=-1)

    def chord_m(self, d_slot: int, d_plane: int, u_rad: float = 0.0) -> float:
        """Exact straight distance from a satellite at argument ``u_rad`` to the one ``d_slot``, ``d_plane`` on."""
        here = self.position_m(u_rad, 0.0)
        u_there = u_rad + self.argument_rad(d_plane, d_slot)
        return math.dist(here, self.position_m(u_there, 2 * math.pi * d_plane / self.planes))

    def link_blocked(self, chord_m: float) -> bool:
        """Whether a link of this length would pass through the Earth or its atmosphere."""
        if chord_m >= 2 * self.radius_m:
            return True
        return math.sqrt(self.radius_m**2 - (chord_m / 2) ** 2) < EARTH_RADIUS_M + LINK_CLEARANCE_M

    def slant_m(self, d_slot: int, d_plane: int, u_rad: float = 0.0, model: DistanceModel = "exact") -> float:
        """From the ground below a satellite at argument ``u_rad`` to the satellite at this offset from it.

        ``exact``: sqrt(h² + chord²·r_E/(r_E+h)). ``paper``: equations 3 and 4 (a flat sky; planes furthest
        apart).
        """
        if model == "paper":
            return math.hypot(self.d_m_m() * d_slot, self.d_n_max_m() * d_plane, self.altitude_m)
        chord = self.chord_m(d_slot, d_plane, u_rad)
        return math.sqrt(self.altitude_m**2 + chord**2 * EARTH_RADIUS_M / self.radius_m)

    def slant_one_way_s(self, d_slot: int, d_plane: int, u_rad: float = 0.0, model: DistanceModel = "exact") -> float:
        """Light time of ``slant_m``."""
        return self.slant_m(d_slot, d_plane, u_rad, model) / SPEED_OF_LIGHT_M_S

    def isl_one_way_s(self, axis: Axis, u_rad: float = 0.0) -> float:
        """Light time of one link, to the next slot or the next plane (at argument ``u_rad``; longest at 0)."""
        return (self.d_m_m() if axis == "slot" else self.chord_m(0, 1, u_rad)) / SPEED_OF_LIGHT_M_S
