"""Constellations by name (SkyMemory disclosure, table 2; paper §4 and §5)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from skymemory.config import suggestion
from skymemory.constellation.orbit import Shell
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.constellation.visibility import GroundHost, anchor
from skymemory.errors import UnknownPreset

EPOCH_UNIX_S = 1_735_689_600.0
"""2025-01-01T00:00:00Z: plane 0 has its node at the vernal equinox and slot 0 of each plane is at its node.
"""
DEFAULT_HOST = GroundHost(latitude_deg=40.0, longitude_deg=-75.0)
DEFAULT_PRESET = "testbed-19x5"


@dataclass(frozen=True)
class Preset:
    """A constellation with its defaults.

    ``shell`` gives lengths, delays and the pace of moves; ``torus`` is the grid of satellites that exist.
    They agree for real constellations. For the testbed the grid is smaller than the shell whose geometry it
    borrows. ``fixed_centre`` is the satellite overhead at moves (0, 0); None takes the anchor of ``host`` at
    the epoch. Where satellites of a ``version`` are, at any time, never changes: plans name theirs.
    """

    name: str
    description: str
    shell: Shell
    torus: Torus
    fixed_centre: SatelliteId | None = None
    access: Literal["ideal", "hybrid"] = "ideal"
    """Of new plans, with the gateway rule: what can be flown, or the paper's idealization."""
    gateway: Literal["nearest", "climbing"] = "nearest"
    servers: int = 10
    strategy: Literal["rotation", "hop", "rotation_hop", "cost", "baseline"] = "rotation_hop"
    host: GroundHost = DEFAULT_HOST
    epoch_unix_s: float = EPOCH_UNIX_S
    version: int = 1

    @cached_property
    def centre(self) -> SatelliteId:
        """The satellite overhead at moves (0, 0)."""
        if self.fixed_centre is not None:
            return self.fixed_centre
        return anchor(self.shell, self.host, self.epoch_unix_s, 0.0).satellite

    def moves_at(self, now_s: float) -> tuple[int, int]:
        """``(slot_moves, plane_moves)`` of the overhead point ``now_s`` seconds after the epoch."""
        return anchor(self.shell, self.host, self.epoch_unix_s, now_s).moves


def _real(
    name: str, planes: int, slots: int, altitude_m: float, inclination_deg: float, phase: int
) -> tuple[Preset, Preset]:
    """The constellation in this version, and in that of the papers: phase 0 and a spherical Earth."""
    where = f"{altitude_m / 1000:.0f} km, {inclination_deg:g}°"
    title = name.replace("-", " ").title()
    words = f"{title}: {planes} planes of {slots} satellites at {where}"
    shell = Shell(planes, slots, altitude_m, inclination_deg, phase, model="j2")
    before = Shell(planes, slots, altitude_m, inclination_deg)
    # A hybrid host with a climbing gateway reads fastest in all four, at each of 17 places through one revolution:
    # 2.9 MB on Starlink A in 38 ms in the median and 58 ms in p99; with the nearest gateway in 66 and 410 ms. Through
    # the gateway alone it takes as long, and longer where beams have rates (``sim.sky.physical``).
    newest = Preset(name, words, shell, shell.torus, access="hybrid", gateway="climbing", version=2)
    return newest, Preset(name, words, before, before.torus)


_STARLINK_A = Shell(72, 22, 550_000.0, 53.0)
_PAPER = Shell(15, 15, 550_000.0, 53.0)

# Walker phases, none of which lets two satellites of a shell come nearer than 49 km (``nearest_approach_m``).
# Starlink A: 39, estimated from filings and ephemerides by Stock, Fraire and Hermanns (2022); also in the examples of
# draft-piraux-space-constellation-code. For the others we know of none: of all phases these keep satellites furthest
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
"""The newest version of each."""
_VERSIONS = {(preset.name, preset.version): preset for preset in (*PRESETS.values(), *(before for _, before in _REAL))}


def preset_named(name: str, version: int | None = None) -> Preset:
    """The preset of this name, in its newest version or the given one; an unknown name is answered with the nearest
    one we know.

    Raises:
        UnknownPreset: no such name, or no such version of it.
    """
    found = PRESETS.get(name.lower().replace("_", "-"))
    if found is None:
        raise UnknownPreset(f"unknown constellation preset {name!r}; {suggestion(name.lower(), PRESETS)}")
    if version is None or version == found.version:
        return found
    if (found.name, version) not in _VERSIONS:
        raise UnknownPreset(
            f"version {version} of constellation preset {found.name}: expected 1 to {found.version}; a later release "
            "may know it"
        )
    return _VERSIONS[found.name, version]
