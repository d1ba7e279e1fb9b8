"""Satellites in sight of a host: above the elevation mask, the gateway first, and their light times.

After an operator's push of the box's *centre*, satellites seem to have flown that far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol, get_args

from skymemory.constellation.ground_track import Place, Track, host_at, track_over
from skymemory.constellation.orbit import Shell
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.constellation.visibility import DEFAULT_MASK_DEG, ground_angle_rad, ground_m, overhead_argument_rad
from skymemory.errors import InvalidInput
from skymemory.units import SPEED_OF_LIGHT_M_S

GatewayRule = Literal["nearest", "climbing"]
GATEWAY_RULES: tuple[GatewayRule, ...] = get_args(GatewayRule)
"""Rules for the gateway: the highest satellite in sight, or the highest on the box's branch, whose links are short."""


class Sight(Protocol):
    """View of a host, ``sky_s`` seconds after the epoch; ``centre`` is that of its box."""

    def in_sight(self, centre: SatelliteId, sky_s: float) -> tuple[SatelliteId, ...]:
        """Return the satellites at or above the mask, the gateway first."""
        ...

    def one_way_s(self, satellite: SatelliteId, centre: SatelliteId, sky_s: float) -> float:
        """Return the beam's light time; out of sight, by the paper's model (for access ``ideal``)."""
        ...

    @property
    def longest_s(self) -> float:
        """Light time at the mask."""
        ...

    @property
    def any_blocked(self) -> bool: ...

    def blocked(self, satellite: SatelliteId, neighbour: SatelliteId, centre: SatelliteId, sky_s: float) -> bool:
        """Return True if the Earth or its atmosphere is between two neighbours."""
        ...


def check_mask(mask_deg: float) -> None:
    """Refuse an elevation mask that is not from 0 to less than 90 degrees."""
    if not 0 <= mask_deg < 90:
        raise InvalidInput(f"elevation mask {mask_deg:g}: expected 0 to less than 90 degrees")


def reach_cosine(shell: Shell, mask_deg: float, ground_radius_m: float | None = None) -> float:
    """Return the cosine of the angle at a spherical Earth's centre between a host and a satellite at the mask."""
    mask_rad = math.radians(mask_deg)
    share = (ground_radius_m or shell.earth_radius_m) / shell.radius_m
    return math.cos(math.acos(share * math.cos(mask_rad)) - mask_rad)


def farthest_latitude_deg(shell: Shell, mask_deg: float) -> float:
    """Return the latitude beyond which no satellite rises, to a quarter of a degree."""
    inclination_deg = min(shell.inclination_deg, 180 - shell.inclination_deg)
    return min(90.0, inclination_deg + math.degrees(math.acos(reach_cosine(shell, mask_deg))) + 0.25)


def slant_s(shell: Shell, cosine: float) -> float:
    """Return the light time to a satellite at this angle (cosine) at the Earth's centre, on a sphere."""
    r, ground_m = shell.radius_m, shell.earth_radius_m
    return math.sqrt(ground_m**2 + r * r - 2 * ground_m * r * cosine) / SPEED_OF_LIGHT_M_S


Vector = tuple[float, float, float]


def _dot(a: Vector, b: Vector) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


class _Host(NamedTuple):
    """Place of a host; ``below`` is the unit vector from the Earth's centre to it."""

    below: Vector
    up: Vector
    """Normal of the horizon; on a sphere ``below``."""
    radius_m: float
    height_m: float

    def sine_and_slant(self, r: float, below: float, up: float) -> tuple[float, float]:
        """Return the sine of a satellite's elevation, and its distance; ``below`` and ``up`` are scalar products with
        those vectors.
        """
        slant_m = math.sqrt(max(0.0, r * r + self.radius_m**2 - 2 * r * self.radius_m * below))
        return (r * up - self.height_m) / slant_m, slant_m


@dataclass(frozen=True)
class OrbitSight:
    """View of real orbits, in closed form: per plane, the arc above the mask. ``rule`` chooses the gateway."""

    shell: Shell
    place: Place
    epoch_unix_s: float
    mask_deg: float = DEFAULT_MASK_DEG
    rule: GatewayRule = "nearest"
    gaps: frozenset[SatelliteId] = frozenset()
    descending: bool = False
    track: Track = field(init=False, repr=False)
    any_blocked: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_mask(self.mask_deg)
        track = track_over(self.shell, self.place, self.epoch_unix_s, self.descending)
        object.__setattr__(self, "track", track)
        linked = self.shell.planes - (self.shell.pattern == "star")  # none across the seam
        longest_m = (self.shell.longest_plane_link_m(plane) for plane in range(linked))
        object.__setattr__(self, "any_blocked", any(map(self.shell.link_blocked, longest_m)))

    def in_sight(self, centre: SatelliteId, sky_s: float) -> tuple[SatelliteId, ...]:
        shift_planes, shift_slots = self._pushed(centre, sky_s)
        wrap = self.shell.torus.wrap
        cells = (wrap(plane + shift_planes, slot + shift_slots) for plane, slot in self.overhead(sky_s))
        return tuple(cell for cell in cells if cell not in self.gaps)

    @property
    def longest_s(self) -> float:
        return slant_s(self.shell, reach_cosine(self.shell, self.mask_deg))

    def blocked(self, satellite: SatelliteId, neighbour: SatelliteId, centre: SatelliteId, sky_s: float) -> bool:
        if not self.any_blocked or satellite.plane == neighbour.plane:
            return False
        shell, (planes, slots) = self.shell, self._pushed(centre, sky_s)
        own_m, target_m = (
            shell.position_m(shell.argument_rad(plane, slot, sky_s), shell.node_rad(plane, sky_s))
            for plane, slot in (
                shell.torus.wrap(end.plane - planes, end.slot - slots) for end in (satellite, neighbour)
            )
        )
        return shell.link_blocked(math.dist(own_m, target_m))

    def _pushed(self, centre: SatelliteId, sky_s: float) -> tuple[int, int]:
        plane, slot = self.track.cell_at(sky_s)
        return centre.plane - plane, centre.slot - slot

    def overhead(self, sky_s: float) -> list[SatelliteId]:
        """Return the cells above the mask, the gateway first, without pushes."""
        shell, slots, r = self.shell, self.shell.slots_per_plane, self.shell.radius_m
        host = self._host(sky_s)
        # On the ellipsoid the vertical deviates from the line to the centre of the Earth, by at most a fifth of a
        # degree. So the arcs are for a lower mask, and each satellite on them is checked exactly.
        exact = host.up is not host.below
        lean_deg = math.degrees(math.acos(min(1.0, _dot(host.below, host.up)))) + 1e-6 if exact else 0.0
        reach = reach_cosine(shell, self.mask_deg - lean_deg, host.radius_m)
        least_sine = math.sin(math.radians(self.mask_deg))
        u_step = 2 * math.pi / slots
        u_now = 2 * math.pi * math.fmod(sky_s, shell.period_s) / shell.period_s
        i_rad = math.radians(shell.inclination_deg)
        cos_i, sin_i = math.cos(i_rad), math.sin(i_rad)
        east, north, up = host.below
        cells: list[tuple[bool, float, SatelliteId]] = []
        for plane in range(shell.planes):
            node = shell.node_rad(plane, sky_s)
            cos_node, sin_node = math.cos(node), math.sin(node)
            along = cos_node * east + sin_node * north
            across = (cos_node * north - sin_node * east) * cos_i + up * sin_i
            nearest_cosine = math.hypot(along, across)
            if nearest_cosine < reach:
                continue
            x, y, z = host.up
            along_up, across_up = cos_node * x + sin_node * y, (cos_node * y - sin_node * x) * cos_i + z * sin_i
            half_rad = math.acos(max(-1.0, min(1.0, reach / nearest_cosine)))
            u_nearest = math.atan2(across, along)
            # Slots as real numbers: the satellite of slot j is at u_now + j · u_step (and the plane's offset).
            middle = (u_nearest - u_now - shell.argument_rad(plane, 0)) / u_step
            for slot in range(math.ceil(middle - half_rad / u_step), math.floor(middle + half_rad / u_step) + 1):
                u_rad = u_nearest + (slot - middle) * u_step
                height = nearest_cosine * math.cos(u_rad - u_nearest)
                if exact:
                    upward = math.cos(u_rad) * along_up + math.sin(u_rad) * across_up
                    height, _ = host.sine_and_slant(r, height, upward)
                    if height < least_sine:
                        continue
                other_branch = self.rule == "climbing" and (math.cos(u_rad) <= 0) != self.descending
                cells.append((other_branch, -height, SatelliteId(plane, slot % slots)))
        return [satellite for _, _, satellite in sorted(cells)]

    def _host(self, sky_s: float) -> _Host:
        """Return the host's position at a time, in the frame of the orbits."""
        host, model = host_at(self.place, sky_s), self.shell.model
        longitude = math.radians(host.longitude_deg) + ground_angle_rad(model, self.epoch_unix_s, sky_s)
        latitude = math.radians(host.latitude_deg)
        east, north = math.cos(longitude), math.sin(longitude)
        up = math.cos(latitude) * east, math.cos(latitude) * north, math.sin(latitude)
        if model == "paper":
            return _Host(up, up, self.shell.earth_radius_m, self.shell.earth_radius_m)
        out_m, north_m = ground_m(model, host.latitude_deg)
        radius_m = math.hypot(out_m, north_m)
        below = out_m / radius_m * east, out_m / radius_m * north, north_m / radius_m
        return _Host(below, up, radius_m, out_m * math.cos(latitude) + north_m * math.sin(latitude))

    def one_way_s(self, satellite: SatelliteId, centre: SatelliteId, sky_s: float) -> float:
        shell = self.shell
        shift_planes, shift_slots = self._pushed(centre, sky_s)
        plane, slot = shell.torus.wrap(satellite.plane - shift_planes, satellite.slot - shift_slots)
        position = shell.position_m(shell.argument_rad(plane, slot, sky_s), shell.node_rad(plane, sky_s))
        host = self._host(sky_s)
        cosine = sum(a * b for a, b in zip(position, host.below, strict=True)) / shell.radius_m
        if host.up is host.below:
            if cosine >= reach_cosine(shell, self.mask_deg):
                return slant_s(shell, cosine)
        else:
            sine, slant_m = host.sine_and_slant(shell.radius_m, cosine, _dot(position, host.up) / shell.radius_m)
            if sine >= math.sin(math.radians(self.mask_deg)):
                return slant_m / SPEED_OF_LIGHT_M_S
        u_rad = overhead_argument_rad(shell, host_at(self.place, sky_s))
        u_rad = math.pi - u_rad if self.descending else u_rad
        return shell.slant_one_way_s(*shell.torus.delta(centre, satellite), u_rad, plane=centre.plane - shift_planes)


@dataclass(frozen=True)
class BoxSight:
    """View of a grid without orbits (the paper's testbed), by offsets from the overhead point. No link is blocked."""

    shell: Shell
    torus: Torus
    mask_deg: float = DEFAULT_MASK_DEG
    _one_way_s: dict[tuple[SatelliteId, SatelliteId], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    any_blocked = False

    def __post_init__(self) -> None:
        check_mask(self.mask_deg)

    def in_sight(self, centre: SatelliteId, sky_s: float) -> tuple[SatelliteId, ...]:
        wrap = self.torus.wrap
        offsets = _offsets_in_sight(self.shell, self.torus, self.mask_deg)
        return tuple(wrap(centre.plane + y, centre.slot + x) for x, y in offsets)

    def one_way_s(self, satellite: SatelliteId, centre: SatelliteId, sky_s: float) -> float:
        light_time_s = self._one_way_s.get((satellite, centre))
        if light_time_s is None:
            light_time_s = self._one_way_s[satellite, centre] = self.shell.slant_one_way_s(
                *self.torus.delta(centre, satellite)
            )
        return light_time_s

    def blocked(self, satellite: SatelliteId, neighbour: SatelliteId, centre: SatelliteId, sky_s: float) -> bool:
        return False

    @property
    def longest_s(self) -> float:
        return slant_s(self.shell, reach_cosine(self.shell, self.mask_deg))


@lru_cache(maxsize=16)
def _offsets_in_sight(shell: Shell, torus: Torus, mask_deg: float) -> tuple[tuple[int, int], ...]:
    """Return cells above the mask as offsets from the overhead point, nearest first."""
    reach_s = slant_s(shell, reach_cosine(shell, mask_deg))
    origin = SatelliteId(0, 0)
    offsets = {torus.delta(origin, satellite) for satellite in torus.satellites()}
    slants_s = {offset: shell.slant_one_way_s(*offset) for offset in offsets}
    return tuple(sorted((offset for offset in offsets if slants_s[offset] <= reach_s), key=lambda o: (slants_s[o], o)))
