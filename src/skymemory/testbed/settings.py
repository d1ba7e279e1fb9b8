"""Settings of a constellation to start or plan: a TOML file, which options of the command line override."""

# ruff: noqa: RUF009 - defaults are frozen values

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skymemory.config import duration as duration_of
from skymemory.config import (
    filled,
    integer,
    number,
    path,
    section,
    setting,
    size,
    table,
    text,
    whole_number,
    yes_or_no,
)
from skymemory.constellation.ground_track import Waypoint, parse_waypoints
from skymemory.constellation.links import Links
from skymemory.constellation.presets import DEFAULT_HOST, DEFAULT_PRESET, PRESETS, Preset, preset_named
from skymemory.constellation.visibility import DEFAULT_MASK_DEG
from skymemory.errors import InvalidInput, cannot_read, quoted
from skymemory.eviction import DEFAULT_REPLACEMENT
from skymemory.files import MAX_TABLE_BYTES, read_text
from skymemory.kv.value import DEFAULT_CHUNK_BYTES
from skymemory.testbed.element_files import flown_shell
from skymemory.testbed.plan import (
    DEFAULT_MEMORY_BYTES,
    ConstellationPlan,
    Faults,
    Ground,
    HostShare,
    MemoryPolicy,
    make_plan,
)
from skymemory.units import parse_delay

_SWEEP_S = 30.0


def _delay(value: object) -> float:
    return parse_delay(value) if isinstance(value, str) else number(value)


def _links(value: object) -> Links:
    return Links.read(table(value), "")


def _place(value: object) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise InvalidInput(f"{quoted(value)}: expected latitude and longitude in degrees, such as [40, -75]")
    latitude_deg, longitude_deg = map(number, value)
    return latitude_deg, longitude_deg


@dataclass(frozen=True, slots=True)
class GroundSettings:
    at: tuple[float, float] | None = setting(
        "at", _place, None, "latitude and longitude in degrees, such as [-33.9, 18.4]; default: [40, -75]"
    )
    path: Path | None = setting(
        "path",
        path,
        None,
        "instead, the track of a moving host: a file of lines `seconds latitude longitude`, seconds of the satellites' "
        "clock from now",
    )
    mask_deg: float = setting(
        "mask", number, DEFAULT_MASK_DEG, "lowest elevation in degrees at which a satellite is in sight"
    )
    gateway: str | None = setting(
        "gateway",
        text,
        None,
        "which satellite in sight: `nearest`, or `climbing`: the nearest that flies the same way as the box (default)",
    )

    def __post_init__(self) -> None:
        if self.at is not None and self.path is not None:
            raise InvalidInput("`at` and `path`: leave one of them out")


@dataclass(frozen=True, slots=True)
class SkySettings:
    preset_name: str | None = setting("preset", text, None, "geometry; default: `testbed-19x5`")
    tle: Path | None = setting(
        "tle", path, None, "instead, real satellites: a file of element sets, two-line or OMM; with `shell`"
    )
    shell: int | None = setting(
        "shell", whole_number, None, "which shell of `tle`, as `skymemory shells FILE` numbers them"
    )
    skip_bad: bool = setting("skip_bad", yes_or_no, False, "leave bad records of `tle` out instead of refusing it")
    delay_scale: float = setting(
        "delay",
        _delay,
        1.0,
        "hold each packet as long as light takes over the link (`real`), not at all (`off`), or times as long (`x2`)",
    )
    memory_per_satellite_bytes: int = setting(
        "memory_per_satellite", size, DEFAULT_MEMORY_BYTES, "memory of a satellite"
    )
    servers: int | None = setting(
        "servers",
        whole_number,
        None,
        "satellites each value is spread over; default: chosen by its size, at most the preset's number",
    )
    replicas: int = setting("replicas", integer, 1, "copies of every chunk")
    strategy: str | None = setting(
        "strategy", text, None, "placement: rotation, hop, rotation_hop, cost or baseline; default: the preset's"
    )
    access: str | None = setting(
        "access",
        text,
        None,
        "how the host reaches satellites: `gateway`: all through the nearest in sight; `hybrid` (default of real "
        "orbits): those in sight directly; `onboard`; `ideal` (default of the papers'): all directly",
    )
    chunk_bytes: int = setting("chunk", size, DEFAULT_CHUNK_BYTES, "size of a chunk, which a datagram carries")
    time_scale: float = setting(
        "time_scale", number, 0.0, "speed of the satellites' clock: 0 stands still, 1 is real time"
    )
    auth: str | None = setting(
        "auth",
        text,
        None,
        "MACs on commands (`on`), also on writes and answers except data (`answers`, the default with keys), on every "
        "packet (`every`), or none (`off`)",
    )
    keys: Path | None = setting("keys", path, None, "key file of `skymemory keys new`; default: new keys")
    eviction: str = setting(
        "eviction",
        text,
        "lazy",
        "how the rest of a block that lost a chunk is dropped: `lazy`, `gossip` or `gossip-plane`, `periodic`, "
        "`migration`, several with commas, or `none`",
    )
    replacement: str = setting(
        "replacement",
        text,
        DEFAULT_REPLACEMENT,
        "which block goes first: by recency (`lru`), frequency (`lfuda`), or both (`lrfu`)",
    )
    sweep_s: float | None = setting(
        "sweep", duration_of, None, "interval of `periodic` eviction and of the repair of lost copies; default: 30s"
    )
    ground: GroundSettings = setting("ground", section(GroundSettings), GroundSettings(), "")
    faults: Faults = setting("faults", section(Faults), Faults(), "")
    links: Links | None = setting("links", _links, None, "")

    def __post_init__(self) -> None:
        if self.tle is None and (self.shell is not None or self.skip_bad):
            raise InvalidInput("`shell` and `skip_bad` are about the file of `tle`: give it, or leave them out")
        if self.tle is not None and (self.preset_name is not None or self.shell is None):
            raise InvalidInput("`tle`: expected `shell` with it (`skymemory shells FILE` lists them), and no `preset`")
        # The sweep has two uses: periodic eviction, and the repair of lost replicas.
        if self.sweep_s is not None and "periodic" not in self.eviction and self.replicas == 1:
            raise InvalidInput(
                f"`sweep` has no effect with eviction {self.eviction!r} and one replica: add periodic, or leave it out"
            )

    def preset(self) -> Preset:
        """Return the geometry, of a preset or a shell of real satellites."""
        if self.tle is not None and self.shell is not None:
            return flown_shell(self.tle, self.shell, self.skip_bad)
        preset = preset_named(DEFAULT_PRESET if self.preset_name is None else self.preset_name)
        if preset.fixed_centre is None:
            return preset
        for key in ("at", "path", "gateway"):
            if getattr(self.ground, key) is not None:
                real = ", ".join(name for name, preset in PRESETS.items() if preset.fixed_centre is None)
                raise InvalidInput(
                    f"ground: {key} has no effect with preset {preset.name!r}, whose box is fixed: "
                    f"leave it out, or use one of {real}"
                )
        return preset

    def plan(self, preset: Preset, hosts: tuple[HostShare, ...], auth: str, keys_file: str) -> ConstellationPlan:
        return make_plan(
            preset,
            hosts=hosts,
            servers=self.servers,
            strategy=self.strategy,
            replicas=self.replicas,
            access=self.access,
            chunk_bytes=self.chunk_bytes,
            delay_scale=self.delay_scale,
            memory_per_satellite_bytes=self.memory_per_satellite_bytes,
            epoch_s=float(round(time.time())),
            time_scale=self.time_scale,
            memory_policy=MemoryPolicy(
                self.eviction, self.replacement, _SWEEP_S if self.sweep_s is None else self.sweep_s
            ),
            ground=self._ground(preset),
            links=self.links,
            faults=self.faults,
            auth=auth,
            keys_file=keys_file,
        )

    def _ground(self, preset: Preset) -> Ground:
        ground, waypoints = self.ground, tuple[Waypoint, ...]()
        if ground.path is not None:
            try:
                lines = read_text(ground.path, MAX_TABLE_BYTES).splitlines()
            except OSError as error:
                raise InvalidInput(cannot_read(ground.path, error)) from error
            waypoints = parse_waypoints(lines, str(ground.path))
        latitude_deg, longitude_deg = ground.at or (DEFAULT_HOST.latitude_deg, DEFAULT_HOST.longitude_deg)
        return Ground(latitude_deg, longitude_deg, ground.mask_deg, ground.gateway or preset.gateway, waypoints)


def read_sky_settings(content: Mapping[str, Any]) -> SkySettings:
    return filled(SkySettings, content, "")
