"""A shell of circular orbits: positions of its satellites, lengths and light times of its links.

Source: SkyMemory paper §2 (equations 1 and 2), §4 (equations 3 and 4); the disclosure's D_N(t). Models:

- ``paper``: Kepler's period, a drifting node, a spherical Earth of 6371 km.
- ``j2``: SGP4's secular rates without drag (Brouwer's, with J2, J2² and J4, WGS72), without periodic terms (10 km,
  which do not grow); WGS84 ground, inertial frame TEME.

Walker's slot j of plane k is F/P of a slot ahead of slot j of plane k − 1, so after P planes the grid is twisted by F
slots. Here slot s of plane k is the satellite *nearest* to its position for F = 0 (``Shell.walker_slot`` maps back):
the torus closes without a twist, and routing, placement and handover need not know F.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from skymemory.constellation.torus import Axis, SatelliteId, Torus
from skymemory.errors import InvalidInput
from skymemory.units import EARTH_MU_M3_S2, EARTH_RADIUS_M, SPEED_OF_LIGHT_M_S

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DistanceModel = Literal["exact", "paper"]
SkyModel = Literal["paper", "j2"]
SKY_MODELS: tuple[SkyModel, ...] = get_args(SkyModel)
Pattern = Literal["delta", "star"]
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)
"""Spread of nodes: round the equator, or over half of it."""

LINK_CLEARANCE_M = 80_000.0
EARTH_J2 = 1.08262668e-3
WGS84_RADIUS_M = 6_378_137.0

# SGP4's constants (WGS72, Spacetrack Report 3 as revised by Vallado 2006).
_WGS72_RADIUS_M = 6_378_135.0
_WGS72_XKE = 60.0 / math.sqrt(6378.135**3 / 398600.8)
"""Mean motion at one Earth radius, in radians per minute."""
_WGS72_J2 = 1.082616e-3
_WGS72_J4 = -1.65597e-6


def neighbour_chord_m(count: int, altitude_m: float) -> float:
    """Return the distance of neighbours among ``count`` satellites (equations 1 and 2)."""
    return (EARTH_RADIUS_M + altitude_m) * math.sqrt(2 * (1 - math.cos(2 * math.pi / count)))


class Secular(NamedTuple):
    """Circular orbit of SGP4 without drag and periodic terms."""

    radius_m: float
    argument_rad_s: float
    node_rad_s: float
    kozai_rad_min: float
    """Mean motion as element sets state it (Kozai's)."""


@lru_cache(maxsize=256)
def secular(axis_m: float, inclination_rad: float) -> Secular:
    """Return the rates for Brouwer's mean semi-major axis."""
    cos2 = math.cos(inclination_rad) ** 2
    axis = axis_m / _WGS72_RADIUS_M
    motion = _WGS72_XKE / axis**1.5
    first = 1.5 * _WGS72_J2 / axis**2 * motion
    second = 0.5 * first * _WGS72_J2 / axis**2
    fourth = -0.46875 * _WGS72_J4 / axis**4 * motion
    anomaly = motion + 0.5 * first * (3 * cos2 - 1) + 0.0625 * second * (13 - 78 * cos2 + 137 * cos2**2)
    perigee = (
        -0.5 * first * (1 - 5 * cos2)
        + 0.0625 * second * (7 - 114 * cos2 + 395 * cos2**2)
        + fourth * (3 - 36 * cos2 + 49 * cos2**2)
    )
    node = -first + 0.5 * second * (4 - 19 * cos2) + 2 * fourth * (3 - 7 * cos2)
    kozai = motion
    for _ in range(10):  # the error falls a thousandfold each time
        kozai = motion * (1 + _kozai_excess(kozai, cos2))
    radius_m = axis_m * (1 - 0.75 * _WGS72_J2 / axis**2 * (3 * cos2 - 1))
    return Secular(radius_m, (anomaly + perigee) / 60, node * math.cos(inclination_rad) / 60, kozai)


def _kozai_excess(kozai: float, cos2: float) -> float:
    """Return Kozai's relative excess over Brouwer's mean motion; SGP4's ``del``."""
    axis = (_WGS72_XKE / kozai) ** (2 / 3)
    d1 = 0.75 * _WGS72_J2 * (3 * cos2 - 1)
    share = d1 / axis**2
    axis *= 1 - share**2 - share * (1 / 3 + 134 * share**2 / 81)
    return float(d1 / axis**2)


def altitude_of_mean_motion_m(kozai_rad_min: float, inclination_deg: float) -> float:
    cos2 = math.cos(math.radians(inclination_deg)) ** 2
    motion = kozai_rad_min / (1 + _kozai_excess(kozai_rad_min, cos2))
    return float((_WGS72_XKE / motion) ** (2 / 3) * _WGS72_RADIUS_M - WGS84_RADIUS_M)


@dataclass(frozen=True, slots=True)
class Shell:
    """Shell of ``planes`` × ``slots_per_plane`` satellites: a Walker constellation, or close to it.

    Args:
        altitude_m: radius (``paper``) or mean semi-major axis (``j2``) minus ``earth_radius_m``.
        phase: Walker's F, 0 to planes − 1.
        plane_offsets: offset of each plane at the epoch, in slots; default from ``phase``.
        plane_nodes_rad: right ascensions at the epoch, eastward once round; default evenly spread.
    """

    planes: int
    slots_per_plane: int
    altitude_m: float
    inclination_deg: float
    phase: int = 0
    pattern: Pattern = "delta"
    model: SkyModel = "paper"
    plane_offsets: tuple[float, ...] = ()
    plane_nodes_rad: tuple[float, ...] = ()
    radius_m: float = field(init=False, repr=False, compare=False)
    period_s: float = field(init=False, repr=False, compare=False)
    """Time of a revolution; ``j2``: from node to node."""
    node_rate_rad_s: float = field(init=False, repr=False, compare=False)
    """Drift of the nodes; westward for prograde orbits."""
    _offsets: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _nodes_rad: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        nodes_rad = self.plane_nodes_rad or tuple(self.span_rad * plane / self.planes for plane in range(self.planes))
        offsets = self.plane_offsets or tuple(
            shift - math.floor(shift + 0.5) for shift in (self.phase * k / self.planes for k in range(self.planes))
        )
        if self.model == "paper":
            radius_m = EARTH_RADIUS_M + self.altitude_m
            period_s = 2 * math.pi * math.sqrt(radius_m**3 / EARTH_MU_M3_S2)
            mean_motion, ratio = 2 * math.pi / period_s, EARTH_RADIUS_M / radius_m
            node = -1.5 * EARTH_J2 * ratio**2 * mean_motion * math.cos(math.radians(self.inclination_deg))
        else:
            rates = self._secular()
            radius_m, period_s, node = rates.radius_m, 2 * math.pi / rates.argument_rad_s, rates.node_rad_s
        derived = {"radius_m": radius_m, "period_s": period_s, "node_rate_rad_s": node}
        for name, value in {**derived, "_offsets": offsets, "_nodes_rad": nodes_rad}.items():
            object.__setattr__(self, name, value)

    def _check(self) -> None:
        Torus(self.planes, self.slots_per_plane)
        if not 100_000 <= self.altitude_m <= 2_000_000:
            raise InvalidInput(f"altitude_m is {self.altitude_m:g}: expected a low Earth orbit, 100 000 to 2 000 000 m")
        if not 0 < self.inclination_deg < 180:
            raise InvalidInput(
                f"inclination_deg is {self.inclination_deg:g}: expected more than 0 and less than 180; planes over the "
                "equator have no nodes that set them apart"
            )
        if self.pattern not in PATTERNS or self.model not in SKY_MODELS:
            raise InvalidInput(
                f"pattern {self.pattern!r}, model {self.model!r}: expected one of {', '.join(PATTERNS)}, and one of "
                f"{', '.join(SKY_MODELS)}"
            )
        if not 0 <= self.phase < self.planes or self.phase != int(self.phase):
            raise InvalidInput(
                f"Walker phase {self.phase}: expected a whole number from 0 to {self.planes - 1}, one below the planes"
            )
        for name, values in (("plane_offsets", self.plane_offsets), ("plane_nodes_rad", self.plane_nodes_rad)):
            if values and not (len(values) == self.planes and all(map(math.isfinite, values))):
                raise InvalidInput(f"{name} has {len(values)} numbers: expected a finite one for each of {self.planes}")
        if self.plane_offsets and self.phase:
            raise InvalidInput(f"Walker phase {self.phase} and plane_offsets: give one of them")
        nodes = self.plane_nodes_rad
        steps = [(east - west) % (2 * math.pi) for west, east in zip(nodes, (*nodes[1:], *nodes[:1]), strict=True)]
        if self.planes > 1 and nodes and not math.isclose(sum(steps), 2 * math.pi):
            raise InvalidInput("plane_nodes_rad: expected to go eastward from plane to plane, and once round at most")

    def _secular(self) -> Secular:
        return secular(self.earth_radius_m + self.altitude_m, math.radians(self.inclination_deg))

    @property
    def torus(self) -> Torus:
        return Torus(self.planes, self.slots_per_plane, seam=self.pattern == "star")

    @property
    def earth_radius_m(self) -> float:
        return EARTH_RADIUS_M if self.model == "paper" else WGS84_RADIUS_M

    @property
    def span_rad(self) -> float:
        return math.pi if self.pattern == "star" else 2 * math.pi

    @property
    def kozai_rad_min(self) -> float:
        """Mean motion for element sets, as ``sgp4init`` takes it; only for ``j2``."""
        if self.model == "paper":
            raise InvalidInput("a shell of model 'paper' has no mean motion of SGP4's: expected model 'j2'")
        return self._secular().kozai_rad_min

    @property
    def epoch_cell(self) -> tuple[float, float]:
        """Pair ``(node_rad, slots)`` that all planes' given nodes and offsets share."""
        node_rad = slots = 0.0
        if self.plane_nodes_rad:
            parts = [node - self.span_rad * k / self.planes for k, node in enumerate(self.plane_nodes_rad)]
            node_rad = math.atan2(sum(map(math.sin, parts)), sum(map(math.cos, parts)))
        if self.plane_offsets:
            slots = sum(self.plane_offsets) / self.planes
        return node_rad, slots

    def walker_slot(self, plane: int, slot: int) -> int:
        """Return Walker's slot, which has the argument of latitude 2π·(j + F·k/P)/M at the epoch."""
        return (slot - math.floor(self.phase * plane / self.planes + 0.5)) % self.slots_per_plane

    def node_rad(self, plane: int, now_s: float = 0.0) -> float:
        return self._nodes_rad[plane % self.planes] + self.node_rate_rad_s * now_s

    def argument_rad(self, plane: int, slot: int, now_s: float = 0.0) -> float:
        turns = (slot + self._offsets[plane % self.planes]) / self.slots_per_plane
        return 2 * math.pi * (turns + now_s / self.period_s)

    def position_m(self, u_rad: float, node_rad: float) -> tuple[float, float, float]:
        """Return the inertial position at argument of latitude ``u_rad``."""
        i_rad = math.radians(self.inclination_deg)
        along, across, up = (math.cos(u_rad), math.sin(u_rad) * math.cos(i_rad), math.sin(u_rad) * math.sin(i_rad))
        cos_node, sin_node = math.cos(node_rad), math.sin(node_rad)
        r = self.radius_m
        return r * (cos_node * along - sin_node * across), r * (sin_node * along + cos_node * across), r * up

    def positions_m(self, now_s: float | NDArray[np.float64] = 0.0) -> NDArray[np.float64]:
        """Return all inertial positions, shape ``(planes, slots_per_plane, 3)``; times prepend their axis."""
        import numpy as np  # local: verbs that need only delays and maps start without numpy

        times = np.asarray(now_s, dtype=np.float64)[..., None, None]
        i_rad = math.radians(self.inclination_deg)
        turns = (np.arange(self.slots_per_plane) + np.array(self._offsets)[:, None]) / self.slots_per_plane
        u = 2 * np.pi * (turns + times / self.period_s)
        node = np.array(self._nodes_rad)[:, None] + self.node_rate_rad_s * times
        along, sine = np.cos(u), np.sin(u)
        across = sine * math.cos(i_rad)
        cos_node, sin_node = np.cos(node), np.sin(node)
        positions = np.empty((*u.shape, 3))
        positions[..., 0] = cos_node * along - sin_node * across
        positions[..., 1] = sin_node * along + cos_node * across
        positions[..., 2] = sine * math.sin(i_rad)
        positions *= self.radius_m
        return positions

    # --- Links ---

    def d_m_m(self) -> float:
        """Return the distance of neighbours in a plane (equation 1)."""
        if self.model == "paper":
            return neighbour_chord_m(self.slots_per_plane, self.altitude_m)
        return 2 * self.radius_m * math.sin(math.pi / self.slots_per_plane)

    def d_n_max_m(self) -> float:
        """Return the largest distance to a neighbouring plane's same slot (equation 2)."""
        if self.model == "paper":
            return neighbour_chord_m(self.planes, self.altitude_m)
        return 2 * self.radius_m * math.sin(math.pi / self.planes)

    def d_n_m(self, now_s: float, slot: int = 0, plane: int = 0) -> float:
        """Return the distance to the next plane's same slot (the disclosure's D_N(t))."""
        u_rad = self.argument_rad(plane, slot, now_s)
        if self.phase or self.pattern == "star" or self.plane_offsets or self.plane_nodes_rad:
            return self.chord_m(0, 1, u_rad, plane)
        cos_i = math.cos(math.radians(self.inclination_deg))
        return self.d_n_max_m() * math.hypot(math.cos(u_rad), cos_i * math.sin(u_rad))

    def chord_m(self, d_slot: int, d_plane: int, u_rad: float = 0.0, plane: int = 0) -> float:
        """Return the straight distance between a satellite of ``plane`` at ``u_rad`` and that at this offset."""
        own_m = self.position_m(u_rad, 0.0)
        u_there = u_rad + self.argument_rad(plane + d_plane, d_slot) - self.argument_rad(plane, 0)
        if self.pattern == "delta" and not self.plane_nodes_rad:
            node_rad = 2 * math.pi * d_plane / self.planes
        else:
            node_rad = self.node_rad(plane + d_plane) - self.node_rad(plane)
        return math.dist(own_m, self.position_m(u_there, node_rad))

    def longest_plane_link_m(self, plane: int) -> float:
        # The scalar product of the two unit vectors is A − |B|·cos(2u + δ), with δ the difference of their arguments.
        delta_rad = self.argument_rad(plane + 1, 0) - self.argument_rad(plane, 0)
        return self.chord_m(0, 1, -delta_rad / 2, plane)

    def nearest_approach_m(self) -> float:
        """Return the least distance ever between satellites of different planes, exactly."""
        import numpy as np

        if self.planes == 1:
            return math.inf
        cos_i, sin2_i = math.cos(math.radians(self.inclination_deg)), math.sin(math.radians(self.inclination_deg)) ** 2
        nodes, offsets = np.array(self._nodes_rad), np.array(self._offsets)
        slots = np.arange(self.slots_per_plane)
        most = -1.0
        for plane in range(self.planes - 1):
            node = (nodes[plane + 1 :] - nodes[plane])[:, None]
            argument = 2 * np.pi / self.slots_per_plane * (slots + (offsets[plane + 1 :] - offsets[plane])[:, None])
            k = cos_i**2 * np.cos(node) + sin2_i
            mean = 0.5 * (np.cos(node) + k) * np.cos(argument) - cos_i * np.sin(node) * np.sin(argument)
            most = max(most, float((mean + np.abs(0.5 * (np.cos(node) - k))).max()))
        return self.radius_m * math.sqrt(max(0.0, 2 * (1 - most)))

    @property
    def longest_link_m(self) -> float:
        return 2 * math.sqrt(max(0.0, self.radius_m**2 - (self.earth_radius_m + LINK_CLEARANCE_M) ** 2))

    def link_blocked(self, chord_m: float) -> bool:
        if chord_m >= 2 * self.radius_m:
            return True
        return math.sqrt(self.radius_m**2 - (chord_m / 2) ** 2) < self.earth_radius_m + LINK_CLEARANCE_M

    def slant_m(
        self, d_slot: int, d_plane: int, u_rad: float = 0.0, model: DistanceModel = "exact", plane: int = 0
    ) -> float:
        """Return the distance from the ground below a satellite of ``plane`` to that at this offset.

        ``exact``: sqrt(h² + chord²·r_E/(r_E+h)), on a sphere. ``paper``: equations 3 and 4 (flat sky, planes at maximum
        distance).
        """
        if model == "paper":
            return math.hypot(self.d_m_m() * d_slot, self.d_n_max_m() * d_plane, self.altitude_m)
        chord = self.chord_m(d_slot, d_plane, u_rad, plane)
        height_m = self.altitude_m if self.model == "paper" else self.radius_m - self.earth_radius_m
        return math.sqrt(height_m**2 + chord**2 * self.earth_radius_m / self.radius_m)

    def slant_one_way_s(
        self, d_slot: int, d_plane: int, u_rad: float = 0.0, model: DistanceModel = "exact", plane: int = 0
    ) -> float:
        return self.slant_m(d_slot, d_plane, u_rad, model, plane) / SPEED_OF_LIGHT_M_S

    def isl_one_way_s(self, axis: Axis) -> float:
        """Return the light time of a link; between planes, the mean of the planes' maxima."""
        if axis == "slot":
            return self.d_m_m() / SPEED_OF_LIGHT_M_S
        return _plane_links_s(self)[0]

    def plane_link_one_way_s(self, plane: int) -> float:
        return _plane_links_s(self)[1][plane % self.planes]

    def hop_one_way_s(self, torus: Torus, satellite: SatelliteId, neighbour: SatelliteId) -> float:
        """Return the light time between neighbours; over a gap, that of the missing links."""
        return self.path_one_way_s(satellite.plane, *torus.delta(satellite, neighbour))

    def route_one_way_s(self, torus: Torus, start: SatelliteId, target: SatelliteId) -> float:
        if not torus.gaps:
            return self.path_one_way_s(start.plane, *torus.delta(start, target))
        return sum(self.hop_one_way_s(torus, *link) for link in pairwise(torus.path(start, target)))

    def path_one_way_s(self, plane: int, d_slot: int, d_plane: int) -> float:
        """Return the light time of these links, starting in ``plane``."""
        if not (self.phase or self.plane_offsets or self.plane_nodes_rad):
            return abs(d_slot) * self.isl_one_way_s("slot") + abs(d_plane) * self.isl_one_way_s("plane")
        crossed = range(plane, plane + d_plane) if d_plane > 0 else range(plane + d_plane, plane)
        return abs(d_slot) * self.isl_one_way_s("slot") + sum(map(self.plane_link_one_way_s, crossed))


@lru_cache(maxsize=64)
def _plane_links_s(shell: Shell) -> tuple[float, tuple[float, ...]]:
    """Return the mean of planes' maximum light times to the next plane, and each plane's."""
    links_s = tuple(shell.longest_plane_link_m(plane) / SPEED_OF_LIGHT_M_S for plane in range(shell.planes))
    linked = links_s[:-1] if shell.pattern == "star" and shell.planes > 1 else links_s
    # In phase, planes are equal except for rounding: use the first exactly.
    alike = not (shell.phase or shell.plane_offsets or shell.plane_nodes_rad)
    return links_s[0] if alike else sum(linked) / len(linked), links_s
