"""Constellations by name (SkyMemory disclosure, table 2; paper §4 and §5)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from skymemory.config import suggestion
from skymemory.constellation.orbit import Shell
from skymemory.constellation.torus import SatelliteId, Torus, reached_from
from skymemory.constellation.visibility import GroundHost, anchor
from skymemory.errors import InvalidInput, UnknownPreset

EPOCH_UNIX_S = 1_735_689_600.0
"""Time 2025-01-01T00:00:00Z: plane 0 has its node at the vernal equinox, slot 0 of each plane is at its node."""
DEFAULT_HOST = GroundHost(latitude_deg=40.0, longitude_deg=-75.0)
DEFAULT_PRESET = "testbed-19x5"


@dataclass(frozen=True, slots=True)
class FlownShell:
    """Shell of real satellites, from which a plan rebuilds it; nodes and offsets (in slots) by plane."""

    source: str
    epoch_unix_s: float
    slots_per_plane: int
    altitude_m: float
    inclination_deg: float
    nodes_rad: tuple[float, ...]
    offsets_slots: tuple[float, ...]
    gaps: tuple[SatelliteId, ...]
    """Cells without a satellite that links lead to."""
    star: bool = False

    def preset(self) -> Preset:
        """Return it as a constellation."""
        return _flown_preset(self)

    def linked(self) -> FlownShell:
        """Return the largest set of linked satellites; the others become gaps."""
        torus = self.torus()
        unreached, most = set(torus.satellites()), list[SatelliteId]()
        while len(unreached) > len(most):
            part = reached_from(torus, min(unreached))
            unreached -= set(part)
            most = max(most, part, key=len)
        return replace(self, gaps=tuple(sorted(set(replace(torus, gaps=frozenset()).satellites()) - set(most))))

    def torus(self) -> Torus:
        """Return the grid; its links never pass through the Earth."""
        most_slots, most_planes = _widest(self.shell())
        return Torus(
            len(self.nodes_rad), self.slots_per_plane, self.star, frozenset(self.gaps), most_slots, most_planes
        )

    def shell(self) -> Shell:
        return Shell(
            len(self.nodes_rad),
            self.slots_per_plane,
            self.altitude_m,
            self.inclination_deg,
            pattern="star" if self.star else "delta",
            model="j2",
            plane_offsets=self.offsets_slots,
            plane_nodes_rad=self.nodes_rad,
        )


def _widest(shell: Shell) -> tuple[int, int]:
    """Return how many slots and planes a link can span above the atmosphere."""
    slots = planes = 1
    while slots < shell.slots_per_plane // 2 and not shell.link_blocked(shell.chord_m(slots + 1, 0)):
        slots += 1
    # Planes at their mean spacing, at the point of the orbit with the largest distance.
    while planes < shell.planes // 2 and not shell.link_blocked(
        2 * shell.radius_m * math.sin(shell.span_rad / 2 * (planes + 1) / shell.planes)
    ):
        planes += 1
    return slots, planes


@lru_cache(maxsize=8)
def _flown_preset(flown: FlownShell) -> Preset:
    shell, torus = flown.shell(), flown.torus()
    if any(torus.wrap(*gap) != gap for gap in torus.gaps):
        raise InvalidInput(f"{flown.source}: a gap outside of {torus.planes} planes of {torus.slots_per_plane} slots")
    if len(reached_from(torus, torus.satellites()[0])) < torus.size:
        raise InvalidInput(f"{flown.source}: its links do not join all {torus.size} satellites")
    words = f"{torus.size} satellites in {shell.planes} planes of {shell.slots_per_plane} slots of {flown.source}"
    return Preset(
        flown.source,
        words,
        shell,
        torus,
        servers=min(10, torus.size),
        access="hybrid",
        gateway="climbing",
        epoch_unix_s=flown.epoch_unix_s,
        flown=flown,
    )


@dataclass(frozen=True)
class Preset:
    """Constellation with its defaults.

    ``shell`` gives lengths, delays and the pace of moves, ``torus`` the grid (smaller in the testbed). ``fixed_centre``
    is overhead at moves (0, 0); default the anchor of ``host``. Plans name a ``version``: its positions never change.
    """

    name: str
    description: str
    shell: Shell
    torus: Torus
    fixed_centre: SatelliteId | None = None
    access: Literal["ideal", "hybrid"] = "ideal"
    gateway: Literal["nearest", "climbing"] = "nearest"
    servers: int = 10
    strategy: Literal["rotation", "hop", "rotation_hop", "cost", "baseline"] = "rotation_hop"
    host: GroundHost = DEFAULT_HOST
    epoch_unix_s: float = EPOCH_UNIX_S
    version: int = 1
    flown: FlownShell | None = None

    @cached_property
    def centre(self) -> SatelliteId:
        if self.fixed_centre is not None:
            return self.fixed_centre
        return anchor(self.shell, self.host, self.epoch_unix_s, 0.0).satellite

    def moves_at(self, now_s: float) -> tuple[int, int]:
        return anchor(self.shell, self.host, self.epoch_unix_s, now_s).moves


def _real(
    name: str, planes: int, slots: int, altitude_m: float, inclination_deg: float, phase: int
) -> tuple[Preset, Preset]:
    """Return a real constellation's present version, and that of the papers: phase 0, a spherical Earth."""
    where = f"{altitude_m / 1000:.0f} km, {inclination_deg:g}°"
    title = name.replace("-", " ").title()
    words = f"{title}: {planes} planes of {slots} satellites at {where}"
    shell = Shell(planes, slots, altitude_m, inclination_deg, phase, model="j2")
    before = Shell(planes, slots, altitude_m, inclination_deg)
    # A hybrid host with a climbing gateway has the fastest reads in all four, at 17 places through a revolution: 2.9 MB
    # on Starlink A in 38 ms in the median and 58 ms in p99; with the nearest gateway in 66 and 410 ms. Access through
    # the gateway alone takes as long, and longer if beams have rates (``skymemory_lab.sim.sky.physical``).
    newest = Preset(name, words, shell, shell.torus, access="hybrid", gateway="climbing", version=2)
    return newest, Preset(name, words, before, before.torus)


_STARLINK_A = Shell(72, 22, 550_000.0, 53.0)
_PAPER = Shell(15, 15, 550_000.0, 53.0)

# Walker phases, with which no two satellites of a shell come nearer than 49 km (``nearest_approach_m``).
# Starlink A: 39, estimated from filings and ephemerides by Stock, Fraire and Hermanns (2022); also in the examples of
# draft-piraux-space-constellation-code. For the others we found no published phase: these keep satellites furthest
# apart (Starlink B 69 km, Kuiper A 78, Kuiper B 109). Altitudes are filed above the equatorial radius.
_REAL = (
    _real("starlink-a", 72, 22, 550_000.0, 53.0, phase=39),
    _real("starlink-b", 5, 75, 1_275_000.0, 81.0, phase=4),
    _real("kuiper-a", 34, 34, 630_000.0, 51.9, phase=7),
    _real("kuiper-b", 28, 28, 590_000.0, 33.0, phase=17),
)
PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "testbed-19x5",
            "the paper's testbed: 5 planes of 19 satellites with Starlink A's link lengths and altitude; "
            "links of a ring of five planes would pass through the Earth, so the box is taken as reachable",
            _STARLINK_A,
            Torus(5, 19),
            SatelliteId(2, 9),
        ),
        Preset(
            "paper-15x15",
            "the paper's simulation: 15 planes of 15 satellites around satellite 8 of plane 8",
            _PAPER,
            _PAPER.torus,
            SatelliteId(7, 7),
        ),
        *(newest for newest, _ in _REAL),
    )
}
_VERSIONS = {(preset.name, preset.version): preset for preset in (*PRESETS.values(), *(before for _, before in _REAL))}


def preset_named(name: str, version: int | None = None) -> Preset:
    """Return the preset of this name; None takes the newest version.

    Raises:
        UnknownPreset: no such name (the message suggests the nearest) or version.
    """
    preset = PRESETS.get(name.lower().replace("_", "-"))
    if preset is None:
        raise UnknownPreset(f"unknown constellation preset {name!r}; {suggestion(name.lower(), PRESETS)}")
    if version is None or version == preset.version:
        return preset
    if (preset.name, version) not in _VERSIONS:
        raise UnknownPreset(
            f"version {version} of constellation preset {preset.name}: expected 1 to {preset.version}; a later release "
            "may know it"
        )
    return _VERSIONS[preset.name, version]
