"""Satellites in sight of a host: those above the elevation mask, the gateway first, and their light times.

The arguments include the *centre* of the box as its host counts it, so a grid that an operator pushed is seen as if the
satellites had flown that far. Two implementations: the real orbits, and (for presets whose grid is not an orbit) fixed
offsets from the overhead point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Protocol, get_args

from skymemory.constellation.ground_track import Place, Track, host_at, track_over
from skymemory.constellation.orbit import Shell
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.constellation.visibility import DEFAULT_MASK_DEG, earth_angle_rad, overhead_argument_rad
from skymemory.errors import InvalidInput
from skymemory.units import EARTH_RADIUS_M, SPEED_OF_LIGHT_M_S

GatewayRule = Literal["nearest", "climbing"]
GATEWAY_RULES: tuple[GatewayRule, ...] = get_args(GatewayRule)
"""``nearest``: the highest satellite in sight. ``climbing``: the highest on the climbing branch, on which the box is,
if there is one; satellites of the other branch are as near to the ground, but half the grid away along the links.
"""


class Sight(Protocol):
    """What a host sees, ``sky_s`` seconds after the epoch as satellites fly. ``centre``: of its box."""

    def in_sight(self, centre: SatelliteId, sky_s: float) -> tuple[SatelliteId, ...]:
        """Satellites at or above the mask, the gateway first."""
        ...

    def one_way_s(self, satellite: SatelliteId, centre: SatelliteId, sky_s: float) -> float:
        """Light time of the beam to this satellite; for one out of sight, by the paper's model, as if it were
        reachable.
        """
        ...


def check_mask(mask_deg: float) -> None:
    """Raises ``InvalidInput`` for an impossible elevation mask."""
    if not 0 <= mask_deg < 90:
        raise InvalidInput(f"elevation mask {mask_deg:g}: expected 0 to less than 90 degrees")


def reach_cosine(shell: Shell, mask_deg: float) -> float:
    """Cosine of the angle at the centre of the Earth between a host and a satellite exactly at the mask."""
    mask_rad = math.radians(mask_deg)
    return math.cos(math.acos(EARTH_RADIUS_M / shell.radius_m * math.cos(mask_rad)) - mask_rad)


def slant_s(shell: Shell, cosine: float) -> float:
    """Light time to a satellite at this angle (by its cosine) from the host, at the centre of the Earth."""
    r = shell.radius_m
    return math.sqrt(EARTH_RADIUS_M**2 + r * r - 2 * EARTH_RADIUS_M * r * cosine) / SPEED_OF_LIGHT_M_S


@dataclass(frozen=True)
class OrbitSight:
    """The real orbits above a place, in closed form: per plane, the arc that is above the mask."""

    shell: Shell
    place: Place
    epoch_unix_s: float
    mask_deg: float = DEFAULT_MASK_DEG
    rule: GatewayRule = "nearest"
    track: Track = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_mask(self.mask_deg)
        object.__setattr__(self, "track", track_over(self.shell, self.place, self.epoch_unix_s))

    def in_sight(self, centre: SatelliteId, sky_s: float) -> tuple[SatelliteId, ...]:
        shift_planes, shift_slots = self._pushed(centre, sky_s)
        wrap = self.shell.torus.wrap
        return tuple(wrap(plane + shift_planes, slot + shift_slots) for plane, slot in self.overhead(sky_s))

    def _pushed(self, centre: SatelliteId, sky_s: float) -> tuple[int, int]:
        """How far operators have pushed the box: its centre relative to the anchor."""
        plane, slot = self.track.cell_at(sky_s)
        return centre.plane - plane, centre.slot - slot

    def overhead(self, sky_s: float) -> list[SatelliteId]:
        """Satellites above the mask on the grid without pushes, the gateway first."""
        shell, slots = self.shell, self.shell.slots_per_plane
        reach = reach_cosine(shell, self.mask_deg)
        u_step, node_step = 2 * math.pi / slots, 2 * math.pi / shell.planes
        drift_rad = shell.node_rate_rad_s * sky_s
        u_now = 2 * math.pi * math.fmod(sky_s, shell.period_s) / shell.period_s
        i_rad = math.radians(shell.inclination_deg)
        east, north, up = self._host_unit(sky_s)
        found: list[tuple[bool, float, SatelliteId]] = []
        for plane in range(shell.planes):
            node = node_step * plane + drift_rad
            cos_node, sin_node = math.cos(node), math.sin(node)
            along = cos_node * east + sin_node * north
            across = (cos_node * north - sin_node * east) * math.cos(i_rad) + up * math.sin(i_rad)
            nearest_cosine = math.hypot(along, across)
            if nearest_cosine < reach:
                continue
            half_rad = math.acos(min(1.0, reach / nearest_cosine))
            u_nearest = math.atan2(across, along)
            # Slots as real numbers: the satellite of slot j is at u_now + j · u_step (and the plane's phase).
            middle = (u_nearest - u_now - shell.argument_rad(plane, 0)) / u_step
            for slot in range(math.ceil(middle - half_rad / u_step), math.floor(middle + half_rad / u_step) + 1):
                u_rad = u_nearest + (slot - middle) * u_step
                cosine = nearest_cosine * math.cos(u_rad - u_nearest)
                other_branch = self.rule == "climbing" and math.cos(u_rad) <= 0
                found.append((other_branch, -cosine, SatelliteId(plane, slot % slots)))
        return [satellite for _, _, satellite in sorted(found)]

    def _host_unit(self, sky_s: float) -> tuple[float, float, float]:
        host = host_at(self.place, sky_s)
        latitude = math.radians(host.latitude_deg)
        longitude = math.radians(host.longitude_deg) + earth_angle_rad(self.epoch_unix_s, sky_s)
        return math.cos(latitude) * math.cos(longitude), math.cos(latitude) * math.sin(longitude), math.sin(latitude)

    def one_way_s(self, satellite: SatelliteId, centre: SatelliteId, sky_s: float) -> float:
        shell = self.shell
        shift_planes, shift_slots = self._pushed(centre, sky_s)
        plane, slot = shell.torus.wrap(satellite.plane - shift_planes, satellite.slot - shift_slots)
        node = 2 * math.pi * plane / shell.planes + shell.node_rate_rad_s * sky_s
        position = shell.position_m(shell.argument_rad(plane, slot, sky_s), node)
        unit = self._host_unit(sky_s)
        cosine = sum(a * b for a, b in zip(position, unit, strict=True)) / shell.radius_m
        if cosine >= reach_cosine(shell, self.mask_deg):
            return slant_s(shell, cosine)
        u_rad = overhead_argument_rad(shell, host_at(self.place, sky_s))
        return shell.slant_one_way_s(*shell.torus.delta(centre, satellite), u_rad)


@dataclass(frozen=True)
class BoxSight:
    """A grid that is not an orbit (the paper's testbed): distances, elevations by offset from the overhead point."""

    shell: Shell
    torus: Torus
    mask_deg: float = DEFAULT_MASK_DEG

    def __post_init__(self) -> None:
        check_mask(self.mask_deg)

    def in_sight(self, centre: SatelliteId, sky_s: float) -> tuple[SatelliteId, ...]:
        wrap = self.torus.wrap
        seen = _offsets_in_sight(self.shell, self.torus, self.mask_deg)
        return tuple(wrap(centre.plane + y, centre.slot + x) for x, y in seen)

    def one_way_s(self, satellite: SatelliteId, centre: SatelliteId, sky_s: float) -> float:
        return self.shell.slant_one_way_s(*self.torus.delta(centre, satellite))


@lru_cache(maxsize=16)
def _offsets_in_sight(shell: Shell, torus: Torus, mask_deg: float) -> tuple[tuple[int, int], ...]:
    reach_s = slant_s(shell, reach_cosine(shell, mask_deg))
    origin = SatelliteId(0, 0)
    offsets = {torus.delta(origin, satellite) for satellite in torus.satellites()}
    slants_s = {offset: shell.slant_one_way_s(*offset) for offset in offsets}
    return tuple(sorted((offset for offset in offsets if slants_s[offset] <= reach_s), key=lambda o: (slants_s[o], o)))
