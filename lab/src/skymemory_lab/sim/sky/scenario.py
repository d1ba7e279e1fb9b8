"""A scenario: shell, ground hosts, links, placement, memory and workload in a TOML file.

``[sweep]`` lists values by dotted path; each combination is a *cell*. Times count from ``start``.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from skymemory.config import (
    duration,
    filled,
    integer,
    one_of,
    positive,
    setting,
    size,
    suggestion,
    table,
    text,
    whole_number,
    yes_or_no,
)
from skymemory.constellation.clustering import ClusteredShell, cluster, drift
from skymemory.constellation.ground_track import Track, seam_free, track_over
from skymemory.constellation.links import Links
from skymemory.constellation.orbit import PATTERNS, Shell
from skymemory.constellation.presets import Preset, preset_named
from skymemory.constellation.sight import GATEWAY_RULES, OrbitSight, Sight, check_mask
from skymemory.constellation.tle import read_elements
from skymemory.constellation.torus import Torus
from skymemory.constellation.visibility import DEFAULT_MASK_DEG, GroundHost
from skymemory.errors import InvalidInput, os_reason
from skymemory.eviction import DEFAULT_REPLACEMENT
from skymemory.files import MAX_TABLE_BYTES, read_bounded, read_text, read_toml
from skymemory.kv.value import DEFAULT_CHUNK_BYTES
from skymemory.placement.layout import layout, parse_strategy
from skymemory.protocol.client.gateway import access_named
from skymemory.testbed.connect import check_access
from skymemory.testbed.plan import (
    DEFAULT_MEMORY_BYTES,
    ConstellationPlan,
    Ground,
    HostShare,
    MemoryPolicy,
)
from skymemory_lab.sim.distributions import Popularity
from skymemory_lab.sim.trace import read_trace

Engine = Literal["machines", "model"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
NOT_OF: dict[Engine, tuple[str, ...]] = {
    "machines": ("memory.server_time",),
    "model": (
        *(f"links.{key}" for key in ("buffer", "handover_gap", "outage", "elevations", "rain", "seed")),
        *(f"memory.{key}" for key in ("per_satellite", "replacement", "eviction")),
    ),
}
"""Keys that an engine refuses."""
_OF_A_MIX = ("rate", "put", "keys", "zipf", "seed")
MOST_CELLS = 100_000
ENDS_WITHIN_S = 120.0
"""Time in which all operations end."""
MOST_OPERATIONS = 1_000_000
MOST_SATELLITES = 100_000
"""Limit for a shell; the machines take about 50 KB per satellite."""
MOST_DAYS, MOST_DRIFT_SLOTS = 30.0, 1.0
"""Limits between element sets and flown time: days, drift."""
MOST_BYTES = 1 << 30
_SHIPPED = "scenarios"
_LOOK_S = 10.0
_MOST_LOOKS = 200


# --- Tables ---


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidInput(f"{value!r}: expected a number")
    return float(value)


_engine, _rule, _pattern = one_of(*ENGINES), one_of(*GATEWAY_RULES), one_of(*PATTERNS)


def _sizes(value: object) -> tuple[int, ...]:
    sizes = tuple(map(size, value)) if isinstance(value, list | tuple) else (size(value),)
    if not sizes or not all(1 <= value_bytes <= MOST_BYTES for value_bytes in sizes):
        raise InvalidInput(f'{value!r}: expected sizes from 1 byte to 1 GiB, such as "2.9MB" or ["64KiB", "2.9MB"]')
    return sizes


def _rate(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e6:
        raise InvalidInput(f"{value!r}: expected operations per second, more than 0 and at most 1000000")
    return float(value)


def _share(value: object) -> float:
    share = _number(value)
    if not 0 <= share <= 1:
        raise InvalidInput(f"{value!r}: expected a share from 0 to 1")
    return share


def _start(value: object) -> float | str:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, str) and value[:1].isdigit() and "-" in value:
        try:
            datetime.fromisoformat(value)
        except ValueError as error:
            raise InvalidInput(f"{value!r}: expected a moment in UTC such as 2025-01-01T06:00:00Z") from error
        return value
    return duration(value)


def _count(value: object) -> int:
    count = whole_number(value)
    if not count:
        raise InvalidInput("0: expected 1 or more")
    return count


@dataclass(frozen=True, slots=True)
class ShellTable:
    preset: str = setting("preset", text, "", "a constellation by name")
    tle: str = setting("tle", text, "", "file of element sets, beside the scenario")
    number: int = setting("number", whole_number, 1, "which of its shells, as `skymemory shells` lists them")
    skip_bad: bool = setting("skip_bad", yes_or_no, False, "leave bad records of the file out instead of refusing it")
    planes: int = setting("planes", _count, 0, "orbital planes")
    slots: int = setting("slots", _count, 0, "satellites of each")
    altitude_km: float = setting("altitude_km", positive, 550.0, "above the equator")
    inclination_deg: float = setting("inclination_deg", positive, 53.0, "of the planes")
    phase: int = setting("phase", integer, 0, "Walker's F")
    pattern: str = setting("pattern", _pattern, "delta", "delta or star")

    def __post_init__(self) -> None:
        sources = [
            name for name, value in (("preset", self.preset), ("tle", self.tle), ("planes", self.planes)) if value
        ]
        if len(sources) != 1:
            raise InvalidInput(
                f"{' and '.join(sources) or 'nothing'} given: expected a preset, a tle file, or planes and slots"
            )
        if bool(self.slots) != bool(self.planes):
            raise InvalidInput("planes and slots: expected both")
        defaults = ("altitude_km", 550.0), ("inclination_deg", 53.0), ("phase", 0), ("pattern", "delta")
        unused = [name for name, value in defaults if not self.planes and getattr(self, name) != value]
        unused += [
            name for name, set_ in (("number", self.number != 1), ("skip_bad", self.skip_bad)) if set_ and not self.tle
        ]
        if unused:
            raise InvalidInput(f"{', '.join(unused)}: no effect with {sources[0]}; leave it out")


@dataclass(frozen=True, slots=True)
class GroundTable:
    """Host; empty ``access`` means the first host's."""

    name: str = setting("name", text, "", "in the results")
    latitude_deg: float | None = setting("lat", _number, None, "degrees north")
    longitude_deg: float | None = setting("lon", _number, None, "degrees east")
    access: str = setting("access", text, "", "how it reaches the box (default: gateway)")


@dataclass(frozen=True, slots=True)
class PlacementTable:
    strategy: str = setting("strategy", text, "", "which satellite is which server (default: the preset's)")
    servers: int = setting("servers", whole_number, 10, "satellites of every value")
    chunk_bytes: int = setting("chunk", size, DEFAULT_CHUNK_BYTES, "bytes of a value in one packet")


@dataclass(frozen=True, slots=True)
class MemoryTable:
    per_satellite_bytes: int = setting("per_satellite", size, DEFAULT_MEMORY_BYTES, "memory of one satellite")
    replacement: str = setting("replacement", text, DEFAULT_REPLACEMENT, "which chunks go first")
    eviction: str = setting("eviction", text, "lazy", "how the rest of a value goes")
    server_s: float = setting("server_time", duration, 0.0, "a satellite's time for a chunk; only of the model")


@dataclass(frozen=True, slots=True)
class WorkloadTable:
    """Mix of puts and gets, or a request trace; first uses and certain misses store their value."""

    rate_s: float = setting("rate", _rate, 1.0, "operations a second of each host, in random intervals")
    put_share: float = setting("put", _share, 0.1, "share of puts, the rest are gets")
    sizes: tuple[int, ...] = setting("size", _sizes, (2_883_584,), "bytes of a value; of a list each key has one")
    keys: int = setting("keys", whole_number, 100, "how many there are")
    zipf: float = setting("zipf", _number, 0.9, "skew of their popularity; 0: all alike")
    seed: int = setting("seed", whole_number, 0, "of all draws")
    trace: str = setting("trace", text, "", "request trace in Mooncake's format, instead of a mix")
    requests: int = setting("requests", whole_number, 0, "of the trace; 0: all of the duration")

    def __post_init__(self) -> None:
        if self.keys < 1 or not 0 <= self.zipf <= 10:
            raise InvalidInput(f"{self.keys} keys, zipf {self.zipf:g}: expected at least 1, and 0 to 10")
        if self.trace and len(self.sizes) > 1:
            raise InvalidInput("trace with several sizes: expected one, that of the values of its blocks")


class ScheduledOperation(NamedTuple):
    """Operation at ``at_s`` after the start. A request's gets form a prefix: after a miss all miss."""

    at_s: float
    host: int
    put: bool
    key: int
    value_bytes: int


@dataclass(frozen=True)
class Scenario:
    """Scenario or a cell of it: everything that a run depends on.

    ``folder`` contains the named files; ``source`` is the table as read.
    """

    title: str = setting("title", text, "", "one line for the list")
    engine: Engine = setting("engine", _engine, "machines", "machines or model")  # noqa: RUF009 - a word
    duration_s: float = setting("duration", duration, 60.0, "how long operations begin")
    start: float | str = setting("start", _start, 0.0, "time after the epoch, or a moment in UTC")
    mask_deg: float = setting("mask", _number, DEFAULT_MASK_DEG, "lowest elevation of a beam, degrees")
    gateway: str = setting("gateway", _rule, "climbing", "nearest or climbing")
    shell: ShellTable = field(default_factory=lambda: ShellTable(preset="starlink-a"))
    ground: tuple[GroundTable, ...] = (GroundTable(name="host"),)
    links: Links = field(default_factory=Links)
    placement: PlacementTable = field(default_factory=PlacementTable)
    memory: MemoryTable = field(default_factory=MemoryTable)
    workload: WorkloadTable = field(default_factory=WorkloadTable)
    folder: str = "."
    source: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def read(cls, path: Path) -> Scenario:
        """Read a scenario from a TOML file.

        Raises:
            InvalidInput: it cannot be read, an unknown key (with the nearest known key), an impossible value.
        """
        content = read_toml(path)
        if not content:  # all keys have defaults, but an empty file is more likely a mistake
            raise InvalidInput(
                f"{path}: it has no key of a scenario: expected at least one, such as title or [workload]"
            )
        return cls.of(content, str(path), path.parent)

    @classmethod
    def of(cls, table: Mapping[str, Any], where: str = "scenario", folder: Path = Path()) -> Scenario:
        """Read a scenario from a TOML table."""
        sections: dict[str, Any] = {
            "shell": ShellTable,
            "placement": PlacementTable,
            "memory": MemoryTable,
            "workload": WorkloadTable,
        }
        names = [*sections, "links", "ground", "sweep"]
        more: dict[str, Any] = {"folder": str(folder), "source": _to_json_value(table)}
        for name, kind in sections.items():
            if name in table:
                more[name] = filled(kind, _table(table[name], f"{where}: {name}"), f"{where}: {name}")
        if "links" in table:
            more["links"] = Links.read(_table(table["links"], f"{where}: links"), f"{where}: links")
        if "ground" in table:
            more["ground"] = _ground(table["ground"], where)
        own = {key: value for key, value in table.items() if key not in names}
        scenario = filled(cls, own, where, names, **more)
        _check_obeyed(scenario, table, where)
        return scenario

    def __post_init__(self) -> None:
        if not 0 < self.duration_s <= 30 * 86400:
            raise InvalidInput(f"duration {self.duration_s:g} s: expected more than 0, and at most 30d")
        check_mask(self.mask_deg)
        names = [host.name for host in self.ground]
        if len(set(names)) != len(names):
            raise InvalidInput(f"ground: two hosts share a name: {', '.join(names)}")
        # Impossible orbits, places and links of a plan are refused here, not during a sweep. (With a file of element
        # sets they are refused later, because reading it takes seconds.)
        if not self.shell.tle:
            _ = self.plan

    # --- What the tables mean ---

    @cached_property
    def preset(self) -> Preset:
        """Constellation, whose box is around the first host."""
        first, shell = self.ground[0], self.shell
        if shell.preset:
            preset = preset_named(shell.preset)
            if preset.fixed_centre is not None:
                if len(self.ground) > 1 or (first.latitude_deg, first.longitude_deg) != (None, None):
                    raise InvalidInput(
                        f"ground: {preset.name} is no orbit, and its box is fixed: expected one host without lat and "
                        "lon, or a preset such as starlink-a"
                    )
                return preset
        elif shell.tle:
            path = Path(self.folder, shell.tle)
            preset = (
                _of_elements(path, shell.number, shell.skip_bad).flown(f"{path.stem} shell {shell.number}").preset()
            )
        else:
            how: Any = {"phase": shell.phase, "pattern": shell.pattern, "model": "j2"}
            orbits = Shell(shell.planes, shell.slots, shell.altitude_km * 1e3, shell.inclination_deg, **how)
            preset = Preset(f"{shell.planes}x{shell.slots}", "of a scenario", orbits, orbits.torus)
        return replace(preset, host=self.place(0, preset.host))

    def place(self, host: int, default: GroundHost | None = None) -> GroundHost:
        entry, other = self.ground[host], default or self.preset.host
        if (entry.latitude_deg is None) != (entry.longitude_deg is None):
            raise InvalidInput(f"ground: {entry.name}: expected lat and lon, or neither")
        if entry.latitude_deg is None or entry.longitude_deg is None:
            if host:
                raise InvalidInput(f"ground: {entry.name}: expected lat and lon: only the first host has a default")
            return other
        return GroundHost(entry.latitude_deg, entry.longitude_deg)

    def access(self, host: int) -> str:
        return access_named(self.ground[host].access or self.ground[0].access or "gateway")

    @property
    def start_s(self) -> float:
        if not isinstance(self.start, str):
            return self.start
        moment = datetime.fromisoformat(self.start)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - self.preset.epoch_unix_s

    @cached_property
    def plan(self) -> ConstellationPlan:
        """Plan for this scenario; its clock is 0 at the start and runs at the sky's pace."""
        preset, memory, placement = self.preset, self.memory, self.placement
        for number, host in enumerate(self.ground):
            try:
                self.access(number)
            except InvalidInput as error:
                raise InvalidInput(f"ground: {host.name}: {error}") from None
        if preset.flown is not None:
            self._check_drift(preset)
        access = self.access(0)
        if access == "onboard" and len(self.ground) > 1:
            raise InvalidInput(
                f"ground: {self.ground[0].name} is on board, where the box stands still: expected no other host, or "
                "another access of the first"
            )
        place = preset.host
        strategy = placement.strategy or ("hop" if access == "onboard" else preset.strategy)
        ground = Ground(place.latitude_deg, place.longitude_deg, self.mask_deg, self.gateway)
        if preset.torus.seam:
            ground = self._beside_the_seam(ground, preset, strategy)
        # Outages of a scenario count from the start, outages of a plan from the epoch.
        shift_s = self.start_s
        outages = tuple(
            replace(outage, from_s=outage.from_s + shift_s, to_s=outage.to_s + shift_s) for outage in self.links.outages
        )
        plan = ScenarioPlan(
            preset=preset.name,
            planes=preset.torus.planes,
            slots_per_plane=preset.torus.slots_per_plane,
            hosts=(HostShare("all", "127.0.0.1", 1, tuple(range(preset.torus.planes))),),
            servers=placement.servers,
            strategy=strategy,
            centre=ground.centre(preset),
            access=access,
            chunk_bytes=placement.chunk_bytes,
            memory_per_satellite_bytes=memory.per_satellite_bytes,
            epoch_s=-shift_s,
            time_scale=1.0,
            memory_policy=MemoryPolicy(memory.eviction, memory.replacement),
            ground=ground,
            fan_out="fixed",
            links=replace(self.links, outages=outages),
            own=preset,
        )
        for number in range(1, len(self.ground)):
            plan.sight(self.place(number))  # refuses a place if the first host is on board or the box is fixed
            try:
                check_access(plan, self.access(number))
            except InvalidInput as error:
                raise InvalidInput(f"ground: {self.ground[number].name}: {error}") from error
        return plan

    def _check_drift(self, preset: Preset) -> None:
        """Refuse a start too far from the element sets: the closed form must have their satellites in place."""
        farthest_s = max(self.start_s, self.start_s + self.duration_s, key=abs)
        shell = _of_elements(Path(self.folder, self.shell.tle), self.shell.number, self.shell.skip_bad)
        at = datetime.fromtimestamp(round(preset.epoch_unix_s), UTC).isoformat().replace("+00:00", "Z")
        expected = f"expected a start nearer to {at}, or newer element sets"
        if abs(farthest_s) > MOST_DAYS * 86400:
            days = abs(farthest_s) / 86400
            raise InvalidInput(f"start: {days:.0f} days from the element sets of {preset.name}: {expected}")
        if (slots := drift(shell, farthest_s).p99_slots) > MOST_DRIFT_SLOTS:
            raise InvalidInput(
                f"start: {farthest_s / 3600:.1f} h from the element sets of {preset.name} its satellites are up to "
                f"{slots:.1f} slots from their places in one shell (99 % are within): {expected}"
            )

    def _beside_the_seam(self, ground: Ground, preset: Preset, strategy: str) -> Ground:
        """Choose the branch over the host whose box contains no seam for the whole duration; raise if neither does."""
        shell, onboard = preset.shell, self.access(0) == "onboard"
        links_s = shell.isl_one_way_s("slot"), shell.isl_one_way_s("plane")
        box = layout(parse_strategy(strategy), self.placement.servers, preset.torus, *links_s).box
        # On board the box is around the satellite that is overhead at the epoch, and flies with it.
        from_s, needed_s = (0.0, 0.0) if onboard else (self.start_s, self.duration_s + ENDS_WITHIN_S)
        seam_free_s = []
        for descending in (False,) if onboard else (False, True):
            track = track_over(shell, ground.place, preset.epoch_unix_s, descending)
            wait_s, for_s = seam_free(track, shell, box.north, box.height - 1 - box.north, from_s)
            if wait_s == 0 and for_s >= needed_s:
                how = ground.latitude_deg, ground.longitude_deg, ground.mask_deg, ground.gateway
                return StarGround(*how, descending=descending)
            seam_free_s.append((wait_s, for_s))
        longest_s = max(for_s for _, for_s in seam_free_s) - ENDS_WITHIN_S
        wait_s = min((wait_s for wait_s, _ in seam_free_s if wait_s), default=0.0)
        what = f"expected start = {math.ceil(self.start_s + wait_s)}, or another time of day"
        if onboard:
            what = "expected another first host, or fewer servers"
        elif self.duration_s > longest_s:
            what = f"expected a duration of at most {longest_s:.0f} s, or fewer servers"
        raise InvalidInput(
            f"shell: {preset.name} is a Walker star, whose first and last plane have no links with each other: its box "
            f"of {box.height} planes over {self.ground[0].name} would reach across meanwhile; {what}"
        )

    def check_sight(self) -> None:
        """Raise ``InvalidInput`` if a host that depends on beams never sees a satellite."""
        moments = min(_MOST_LOOKS, math.ceil(self.duration_s / _LOOK_S) + 1)
        for number, host in enumerate(self.ground):
            if self.access(number) not in ("gateway", "hybrid"):
                continue
            sight = self.plan.sight(self.place(number) if number else None)
            centre = self.plan.centre  # what is in sight does not depend on it, except for pushes
            times = [self.start_s + self.duration_s * at / max(1, moments - 1) for at in range(moments)]
            if not any(sight.in_sight(centre, time_s) for time_s in times):
                place = self.place(number)
                raise InvalidInput(
                    f"ground: {host.name} at {place.latitude_deg:g}, {place.longitude_deg:g} sees no satellite of "
                    f"{self.preset.name} above {self.mask_deg:g}° in {self.duration_s:g} s: expected a place nearer to "
                    f"its orbits ({self.preset.shell.inclination_deg:.4g}° north or south at most, and some degrees), "
                    "a lower mask or a longer duration"
                )

    # --- Workload ---

    def operations(self) -> list[list[ScheduledOperation]]:
        """Return all operations in order of time, grouped by request."""
        requests = list(self._of_trace() if self.workload.trace else self._mix())
        count = sum(map(len, requests))
        if count > MOST_OPERATIONS:
            raise InvalidInput(
                f"workload: {count} operations: expected at most {MOST_OPERATIONS}; a lower rate or shorter duration"
            )
        return requests

    def _mix(self) -> Iterator[list[ScheduledOperation]]:
        work = self.workload
        if work.rate_s * self.duration_s * len(self.ground) > 2 * MOST_OPERATIONS:
            expected = round(work.rate_s * self.duration_s * len(self.ground))
            raise InvalidInput(
                f"workload: about {expected} operations: expected at most {MOST_OPERATIONS}; a lower rate or shorter "
                "duration"
            )
        popularity = Popularity(work.keys, work.zipf)
        weights = popularity.weights()
        drawn: list[ScheduledOperation] = []
        for host in range(len(self.ground)):
            dice, at_s = random.Random(f"{work.seed}/{host}"), 0.0
            while (at_s := at_s + dice.expovariate(work.rate_s)) < self.duration_s:
                put, key = dice.random() < work.put_share, popularity.draw(dice, weights, at_s)
                drawn.append(ScheduledOperation(at_s, host, put, key, self.size_of(key)))
        return iter(
            [[operation] for operation in sorted(drawn, key=lambda operation: (operation.at_s, operation.host))]
        )

    def size_of(self, key: int) -> int:
        sizes = self.workload.sizes
        return sizes[0] if len(sizes) == 1 else random.Random(f"{self.workload.seed}/size/{key}").choice(sizes)

    def _of_trace(self) -> Iterator[list[ScheduledOperation]]:
        # Yield each request of the trace as gets of its full blocks.
        path = Path(self.folder, self.workload.trace)
        try:
            requests = read_trace(path, self.workload.requests or None)
        except OSError as error:
            raise InvalidInput(f"workload: trace: cannot read {path}: {os_reason(error)}") from error
        first_s = requests[0].at_s
        for request in requests:
            if request.at_s - first_s >= self.duration_s:
                return
            host, at_s = request.session % len(self.ground), request.at_s - first_s
            if blocks := request.blocks():
                yield [ScheduledOperation(at_s, host, False, block, self.workload.sizes[0]) for block in blocks]

    # --- Sweep ---

    def cells(self) -> list[Cell]:
        """Return the product of the sweep's lists, the last key varying fastest."""
        swept = _lists(self.source.get("sweep", {}))
        count = math.prod(len(values) for values in swept.values())
        if count > MOST_CELLS:
            raise InvalidInput(f"sweep: {count} cells: expected at most {MOST_CELLS}; shorter lists")
        digests = {name: _digest(Path(self.folder, name)) for name in (self.shell.tle, self.workload.trace) if name}
        base = {key: value for key, value in self.source.items() if key not in ("sweep", "title")}
        for path, values in swept.items():
            for value in values:  # each value by itself: checking all combinations could take minutes
                where = f"sweep: {path} = {json.dumps(value)}"
                Scenario.of(_with(base, path.split("."), value, path), where, Path(self.folder))
        cells = []
        for number, values in enumerate(product(*swept.values())):
            own = base
            for path, value in zip(swept, values, strict=True):
                own = _with(own, path.split("."), value, path)
            chosen = tuple(zip(swept, values, strict=True))
            written = (json.dumps(content, sort_keys=True) for content in (own, digests))
            cells.append(Cell(number, chosen, next(written), self.folder, next(written)))
        return cells


@dataclass(frozen=True, slots=True)
class Cell:
    """Picklable combination of a sweep."""

    number: int
    swept: tuple[tuple[str, Any], ...]  # dotted path and value of each swept key
    table: str  # the scenario, as JSON
    folder: str
    digests: str = "{}"  # hashes of the named files, as JSON

    @property
    def scenario(self) -> Scenario:
        return Scenario.of(json.loads(self.table), folder=Path(self.folder))

    def key(self, version: str) -> str:
        """Return a name that differs whenever the results might differ."""
        return hashlib.sha256(f"{version}\n{self.table}\n{self.digests}".encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class StarGround(Ground):
    """Host below a Walker star, on one of two branches."""

    descending: bool = False

    def track(self, preset: Preset) -> Track:
        return track_over(preset.shell, self.place, preset.epoch_unix_s, self.descending)

    def sight(self, preset: Preset) -> Sight:
        sight = Ground.sight(self, preset)
        return replace(sight, descending=self.descending) if isinstance(sight, OrbitSight) else sight


@dataclass(frozen=True)
class ScenarioPlan(ConstellationPlan):
    """Plan of a constellation that need not be a known preset."""

    own: Preset | None = None

    def _check_seam(self, torus: Torus) -> None:
        """Skip the check: ``Scenario`` keeps the box off the seam."""

    def _check_hosts(self) -> None:
        if self.planes * self.slots_per_plane > MOST_SATELLITES:
            raise InvalidInput(
                f"shell: {self.planes} planes of {self.slots_per_plane} slots: expected at most {MOST_SATELLITES} "
                "satellites"
            )

    @property
    def constellation(self) -> Preset:
        assert self.own is not None
        return self.own


def shipped() -> dict[str, Path]:
    folder = Path(str(files("skymemory_lab.sim.sky"))) / _SHIPPED
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def scenario_named(name: str) -> Scenario:
    """Return a scenario of this package, or of a file."""
    known = shipped()
    if name in known:
        return Scenario.read(known[name])
    if not Path(name).exists() and "/" not in name and not name.endswith(".toml"):
        raise InvalidInput(f"no scenario {name!r}; {suggestion(name, known)} (or the path of a TOML file)")
    return Scenario.read(Path(name))


# --- Parts ---


def _check_obeyed(scenario: Scenario, table: Mapping[str, Any], where: str) -> None:
    # Refuse keys that have no effect with this engine or workload.
    engine = scenario.engine
    present = {f"{section}.{key}" for section, own in table.items() if isinstance(own, Mapping) for key in own}
    unused = [path for path in NOT_OF[engine] if path in present]
    if unused:
        other = next(name for name in ENGINES if name != engine)
        raise InvalidInput(
            f"{where}: {', '.join(unused)}: no effect with engine = {json.dumps(engine)}; leave "
            f"{'it' if len(unused) == 1 else 'them'} out, or use engine = {json.dumps(other)}"
        )
    workload = table.get("workload", {})
    if scenario.workload.trace:
        unused, expected = [key for key in _OF_A_MIX if key in workload], "leave out what the trace says by itself"
    else:
        unused, expected = [key for key in ("requests",) if key in workload], "expected a trace with it"
    if unused:
        raise InvalidInput(f"{where}: workload: {', '.join(unused)}: no effect; {expected}")


def _table(value: object, where: str) -> dict[str, Any]:
    try:
        return table(value)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from error


def _ground(value: object, where: str) -> tuple[GroundTable, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise InvalidInput(f'{where}: ground: expected [[ground]] tables with name = "berlin", lat = 52.5, lon = 13.4')
    hosts = []
    for number, entry in enumerate(value, 1):
        place = f"{where}: ground {number}"
        host = filled(GroundTable, _table(entry, place), place)
        hosts.append(host if host.name else replace(host, name=f"host-{number}"))
    return tuple(hosts)


def _to_json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(item) for item in value]
    return value.isoformat() if hasattr(value, "isoformat") else value


def _lists(value: object, before: str = "") -> dict[str, Sequence[Any]]:
    # Return the lists of a sweep's nested tables, by dotted path.
    if not isinstance(value, Mapping):
        raise InvalidInput("sweep: expected a table of lists, such as placement.servers = [4, 10]")
    lists: dict[str, Sequence[Any]] = {}
    for key, item in value.items():
        path = f"{before}{key}"
        if isinstance(item, Mapping):
            lists.update(_lists(item, f"{path}."))
        elif isinstance(item, list) and item:
            lists[path] = item
        else:
            raise InvalidInput(f"sweep: {path}: {item!r}: expected a list of values, at least one")
    return lists


def _with(own: Any, path: Sequence[str], value: Any, whole_path: str) -> Any:
    # Return a copy of the table ``own`` with this value at ``path``.
    key, *path_rest = path
    if isinstance(own, list):
        if not key.isdecimal() or int(key) >= len(own):
            raise InvalidInput(
                f"sweep: {whole_path}: no entry {key!r} in a list of {len(own)}: expected 0 to {len(own) - 1}"
            )
        at = int(key)
        return [*own[:at], _with(own[at], path_rest, value, whole_path) if path_rest else value, *own[at + 1 :]]
    if not isinstance(own, Mapping):
        raise InvalidInput(f"sweep: {whole_path}: {key!r} is below a value: expected the path of a key")
    inner = _with(own.get(key, {}), path_rest, value, whole_path) if path_rest else value
    return {**own, key: inner}


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(read_bounded(path, MAX_TABLE_BYTES)).hexdigest()
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {os_reason(error)}") from error


def _of_elements(path: Path, number: int, skip_bad: bool) -> ClusteredShell:
    # Return the shell of this number, from 1, in a file of element sets.
    try:
        content = read_text(path, MAX_TABLE_BYTES)
    except OSError as error:
        raise InvalidInput(f"shell: tle: cannot read {path}: {os_reason(error)}") from error
    except InvalidInput as error:
        raise InvalidInput(f"shell: tle: {error}") from error
    try:
        shells = _shells_of(content, skip_bad)
    except InvalidInput as error:
        raise InvalidInput(f"shell: tle: {path}: {error}") from error
    if not 1 <= number <= len(shells):
        raise InvalidInput(
            f"shell: number {number}: {path} has {len(shells)} shells; see `skymemory shells {path.name}`"
        )
    return shells[number - 1]


@lru_cache(maxsize=4)
def _shells_of(content: str, skip_bad: bool) -> tuple[ClusteredShell, ...]:
    """Cluster a file's content, the cache key, as files may change between runs."""
    return cluster(read_elements(content, skip_bad=skip_bad).elements).shells
