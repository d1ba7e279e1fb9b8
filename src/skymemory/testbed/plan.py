"""Plan of a constellation: the configuration that hosts and clients share."""

from __future__ import annotations

import ipaddress
import math
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from skymemory.config import integer, setting, share
from skymemory.constellation.ground_track import Place, Track, Trajectory, Waypoint, track_over
from skymemory.constellation.links import Links
from skymemory.constellation.presets import DEFAULT_HOST, DEFAULT_PRESET, FlownShell, Preset, preset_named
from skymemory.constellation.sight import GATEWAY_RULES, BoxSight, OrbitSight, Sight, check_mask, farthest_latitude_deg
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.constellation.visibility import DEFAULT_MASK_DEG, GroundHost
from skymemory.errors import InvalidInput
from skymemory.eviction import DEFAULT_REPLACEMENT, REPLACEMENTS
from skymemory.kv.value import DEFAULT_CHUNK_BYTES
from skymemory.placement.layout import check_servers, layout, parse_strategy
from skymemory.protocol.auth import MAX_SIGNED_CHUNK_BYTES
from skymemory.protocol.client.gateway import access_named
from skymemory.protocol.clock import MOST_PUSHED
from skymemory.protocol.satellite.state import EvictionConfig, parse_policies
from skymemory.protocol.wire import MAX_CHUNK_BYTES
from skymemory.testbed.key_file import KeyFollower


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """Memory policy of satellites; ``eviction`` names policies of ``protocol.satellite.state``, or ``none``."""

    eviction: str = "lazy"
    replacement: str = DEFAULT_REPLACEMENT
    sweep_s: float = 30.0

    def __post_init__(self) -> None:
        parse_policies(self.eviction)
        if self.replacement not in REPLACEMENTS:
            raise InvalidInput(f"replacement {self.replacement!r}: expected one of {', '.join(REPLACEMENTS)}")
        if not 0.1 <= self.sweep_s <= 1e6:
            raise InvalidInput(f"sweep_s {self.sweep_s}: expected 0.1 to 1000000")

    @property
    def lazy(self) -> bool:
        return "lazy" in parse_policies(self.eviction)

    def satellites(self, replicas: int = 1) -> EvictionConfig:
        return EvictionConfig.of(parse_policies(self.eviction), self.sweep_s, replicas)


@dataclass(frozen=True, slots=True)
class Ground:
    """Place of the host in degrees, its elevation mask and gateway rule.

    With ``waypoints`` (satellites' seconds since the epoch) the host moves; latitude and longitude are ignored.
    """

    latitude_deg: float = DEFAULT_HOST.latitude_deg
    longitude_deg: float = DEFAULT_HOST.longitude_deg
    mask_deg: float = DEFAULT_MASK_DEG
    gateway: str = "nearest"
    waypoints: tuple[Waypoint, ...] = ()

    def __post_init__(self) -> None:
        check_mask(self.mask_deg)
        if self.gateway not in GATEWAY_RULES:
            raise InvalidInput(f"gateway {self.gateway!r}: expected one of {', '.join(GATEWAY_RULES)}")
        if self.waypoints:
            Trajectory(self.waypoints)
        GroundHost(self.latitude_deg, self.longitude_deg)

    @property
    def place(self) -> Place:
        if self.waypoints:
            return Trajectory(self.waypoints)
        return GroundHost(self.latitude_deg, self.longitude_deg)

    def track(self, preset: Preset) -> Track | None:
        if preset.fixed_centre is not None:
            return None
        return track_over(preset.shell, self.place, preset.epoch_unix_s)

    def centre(self, preset: Preset) -> SatelliteId:
        track = self.track(preset)
        return preset.centre if track is None else preset.torus.wrap(*track.cell_at(0.0))

    def check_reach(self, preset: Preset) -> None:
        if preset.fixed_centre is not None:
            return
        farthest_deg = farthest_latitude_deg(preset.shell, self.mask_deg)
        nearest_deg = min(abs(point.latitude_deg) for point in self.waypoints or (self,))
        if nearest_deg > farthest_deg:
            raise InvalidInput(
                f"latitude {nearest_deg:g}: no satellite of {preset.name} ever rises {self.mask_deg:g}° above its "
                f"horizon; expected at most {farthest_deg:.1f}° north or south, or a lower mask"
            )

    def sight(self, preset: Preset) -> Sight:
        if preset.fixed_centre is not None:
            return BoxSight(preset.shell, preset.torus, self.mask_deg)
        rule = next(rule for rule in GATEWAY_RULES if rule == self.gateway)
        return OrbitSight(preset.shell, self.place, preset.epoch_unix_s, self.mask_deg, rule, preset.torus.gaps)


@dataclass(frozen=True)
class PlaceSight:
    """Sight of a second host (``own``) in a constellation whose box stays around the plan's host (``box``)."""

    box: OrbitSight
    own: OrbitSight

    def in_sight(self, centre: SatelliteId, sky_s: float) -> tuple[SatelliteId, ...]:
        return self.own.in_sight(self._own_centre(centre, sky_s), sky_s)

    def one_way_s(self, satellite: SatelliteId, centre: SatelliteId, sky_s: float) -> float:
        return self.own.one_way_s(satellite, self._own_centre(centre, sky_s), sky_s)

    @property
    def longest_s(self) -> float:
        return self.own.longest_s

    @property
    def any_blocked(self) -> bool:
        return self.box.any_blocked

    def blocked(self, satellite: SatelliteId, neighbour: SatelliteId, centre: SatelliteId, sky_s: float) -> bool:
        return self.box.blocked(satellite, neighbour, centre, sky_s)

    def _own_centre(self, centre: SatelliteId, sky_s: float) -> SatelliteId:
        plane, slot = self.box.track.cell_at(sky_s)
        own_plane, own_slot = self.own.track.cell_at(sky_s)
        return self.own.shell.torus.wrap(centre.plane - plane + own_plane, centre.slot - slot + own_slot)


DEFAULT_HOSTS = 5
DEFAULT_BASE_PORT = 26_000
DEFAULT_MEMORY_BYTES = 64 * 2**20
MAX_PORT = 65_535
FAN_OUTS = ("size", "fixed")
MAX_PUSHED_MOVES = MOST_PUSHED


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidInput(message)


def parse_ip(text: str, where: str) -> str:
    """Return an IP address as sockets spell senders; refuse IPv6 addresses valid on a single link."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError as error:
        raise InvalidInput(
            f"{where}: ip {text!r}: expected an IPv4 or IPv6 address such as 127.0.0.1 or fd00::1"
        ) from error
    if address.version == 4:
        return str(address)
    mapped = address.ipv4_mapped
    _require(mapped is None, f"{where}: ip {text!r} is an IPv4 address: expected it as {mapped}")
    _require(
        not address.is_link_local and address.scope_id is None,
        f"{where}: ip {text!r} belongs to one link of one computer: expected an address without a zone such as fd00::1",
    )
    return socket.inet_ntop(socket.AF_INET6, address.packed)


@dataclass(frozen=True, slots=True)
class Ports:
    """UDP ports from ``base_port`` on, except ``skipped`` gaps (first, last)."""

    base_port: int
    skipped: tuple[tuple[int, int], ...] = ()

    def first(self, count: int) -> list[int]:
        ports: list[int] = []
        at = self.base_port
        for gap_first, gap_last in self.skipped:
            ports += range(at, min(gap_first, at + count - len(ports)))
            at = max(at, gap_last + 1)
        return ports + list(range(at, at + count - len(ports)))


@dataclass(frozen=True, slots=True)
class HostShare:
    """Planes of a host process, with a UDP port per satellite; ``skipped_ports`` are gaps (first, last), ascending."""

    name: str
    ip: str
    base_port: int
    planes: tuple[int, ...]
    skipped_ports: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        _require(
            re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", self.name) is not None,
            f"host name {self.name!r}: expected letters, digits, dots and dashes",
        )
        object.__setattr__(self, "ip", parse_ip(self.ip, self.name))
        _require(1 <= self.base_port <= MAX_PORT, f"{self.name}: base port {self.base_port}: expected 1 to {MAX_PORT}")
        _require(len(self.planes) > 0, f"{self.name} has no planes: expected at least one")
        gaps = [(self.base_port, self.base_port), *self.skipped_ports]
        _require(
            all(len(gap) == 2 and gap[0] <= gap[1] for gap in gaps)
            and all(before[1] < after[0] for before, after in pairwise(gaps)),
            f"{self.name}: skipped ports {list(self.skipped_ports)}: expected the first and last of each gap, "
            f"beyond {self.base_port} and in ascending order",
        )

    def ports(self, slots_per_plane: int) -> list[int]:
        return Ports(self.base_port, self.skipped_ports).first(len(self.planes) * slots_per_plane)

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.ip).is_loopback

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.ip


@dataclass(frozen=True, slots=True)
class Faults:
    """Shares (0 to 1) of received packets with injected faults, seeded."""

    loss: float = setting("loss", share, 0.0, "packets dropped, as a share such as `1%`")
    duplicate: float = setting("duplicate", share, 0.0, "packets sent twice")
    reorder: float = setting("reorder", share, 0.0, "packets delayed behind later ones")
    corrupt: float = setting("corrupt", share, 0.0, "packets with a flipped bit")
    seed: int = setting("seed", integer, 0, "seed of the faults")

    def __post_init__(self) -> None:
        for name in ("loss", "duplicate", "reorder", "corrupt"):
            value = getattr(self, name)
            _require(0.0 <= value <= 1.0, f"fault {name} {value}: expected a share from 0 to 1")
        _require(0 <= self.seed < 2**63, f"fault seed {self.seed}: expected 0 to 2^63 - 1")

    @property
    def any(self) -> bool:
        return max(self.loss, self.duplicate, self.reorder, self.corrupt) > 0


@dataclass(frozen=True, slots=True)
class ConstellationPlan:
    """Configuration of a constellation. Bytes, seconds (Unix time for the epoch), indices from 0.

    ``centre`` is overhead without moves, and with access ``onboard`` the host. ``delay_scale`` is relative to light.
    ``time_scale`` is the clock's speed; 0 stands still.
    """

    preset: str
    planes: int
    slots_per_plane: int
    hosts: tuple[HostShare, ...]
    servers: int
    strategy: str
    centre: SatelliteId
    access: str = "ideal"
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    delay_scale: float = 1.0
    memory_per_satellite_bytes: int = DEFAULT_MEMORY_BYTES
    epoch_s: float = 0.0
    time_scale: float = 0.0
    faults: Faults = field(default_factory=Faults)
    memory_policy: MemoryPolicy = field(default_factory=MemoryPolicy)
    replicas: int = 1
    pushed_slot_moves: int = 0
    pushed_plane_moves: int = 0
    ground: Ground = field(default_factory=Ground)
    auth: str = "off"
    keys_file: str = ""
    fan_out: str = ""
    """Satellites per value: ``size`` (at most ``servers``) or ``fixed``; empty: ``size`` for the preset's ``servers``.
    """
    preset_version: int = 1

    links: Links | None = None
    flown: FlownShell | None = None
    unix_at_boot_s: float | None = field(default=None, compare=False)
    """Origin of this computer's clocks (``UnixClock.count_from``); None: the wall clock."""

    def __post_init__(self) -> None:
        preset = self.constellation
        torus = preset.torus
        _require(
            (torus.planes, torus.slots_per_plane) == (self.planes, self.slots_per_plane),
            f"preset {self.preset} has {torus.planes} planes of {torus.slots_per_plane} slots, "
            f"the plan says {self.planes} of {self.slots_per_plane}",
        )
        self._check_seam(torus)
        check_servers(self.servers, torus)
        _require(self.fan_out in ("", *FAN_OUTS), f"fan_out {self.fan_out!r}: expected {' or '.join(FAN_OUTS)}")
        box = layout(parse_strategy(self.strategy), self.servers, torus).box
        most = min(255, box.width * box.height)
        _require(1 <= self.replicas <= most, f"{self.replicas} replicas: expected 1 to {most}, the box's satellites")
        object.__setattr__(self, "access", access_named(self.access))
        on_grid = torus.wrap(*self.centre) == self.centre  # it may be a gap
        _require(on_grid, f"centre {tuple(self.centre)} is not on the torus of {self.preset}")
        overhead = self.ground.centre(preset)
        _require(
            preset.fixed_centre is not None or self.centre == overhead,
            f"centre {tuple(self.centre)}: expected {tuple(overhead)}, overhead the plan's host at the epoch",
        )
        _require(
            64 <= self.chunk_bytes <= MAX_CHUNK_BYTES,
            f"chunks of {self.chunk_bytes} bytes: a datagram carries one of 64 to {MAX_CHUNK_BYTES}",
        )
        _require(0 <= self.delay_scale <= 1000, f"delay scale {self.delay_scale}: expected 0 (off) to 1000")
        _require(
            self.memory_per_satellite_bytes >= self.chunk_bytes,
            f"{self.memory_per_satellite_bytes} bytes of memory hold no chunk of {self.chunk_bytes}",
        )
        check_auth(self.auth, self.keys_file, self.chunk_bytes)
        _require(math.isfinite(self.epoch_s), f"epoch {self.epoch_s}: expected Unix time in seconds")
        _require(
            max(abs(self.pushed_slot_moves), abs(self.pushed_plane_moves)) <= MAX_PUSHED_MOVES,
            f"pushed moves {self.pushed_slot_moves}, {self.pushed_plane_moves}: at most {MAX_PUSHED_MOVES}",
        )
        _require(0 <= self.time_scale <= 1e6, f"time scale {self.time_scale}: expected 0 (standing still) to 1000000")
        for outage in self.links.outages if self.links is not None else ():
            outage.check(torus)
        self._check_hosts()

    def _check_seam(self, torus: Torus) -> None:
        """Refuse a Walker star: its seam passes over a host twice a day."""
        _require(
            not torus.seam,
            f"{self.preset} is a Walker star: its planes pass over a host climbing for half a day, then descending, "
            "with no links between the two, so no box stays there; expected a Walker delta, or a scenario of "
            "`skymemory simulate`, which lies between two passes of the seam",
        )

    def _check_hosts(self) -> None:
        _require(len(self.hosts) > 0, "no hosts: expected at least one")
        names = [host.name for host in self.hosts]
        _require(len(set(names)) == len(names), f"two hosts share a name: {', '.join(names)}")
        planes = sorted(plane for host in self.hosts for plane in host.planes)
        _require(
            planes == list(range(self.planes)),
            f"the hosts' planes are {planes}: expected 0 to {self.planes - 1}, each once",
        )
        # A satellite is known by the address it sends from; IPv4 and IPv6 addresses cannot reach each other.
        first = self.hosts[0]
        for host in self.hosts:
            _require(
                host.is_ipv6 == first.is_ipv6,
                f"{first.name} is at {first.ip}, {host.name} at {host.ip}: IPv4 and IPv6 do not reach each other; "
                "expected the hosts' addresses in one of both",
            )
        owners: dict[tuple[str, int], str] = {}
        for host in self.hosts:
            ports = host.ports(self.slots_per_plane)
            _require(
                ports[-1] <= MAX_PORT, f"{host.name} needs ports {ports[0]} to {ports[-1]}: the last port is {MAX_PORT}"
            )
            for port in ports:
                other = owners.setdefault((host.ip, port), host.name)
                _require(other == host.name, f"{host.name} and {other} share ports on {host.ip}, the first is {port}")

    def sight(self, host: GroundHost | None = None) -> Sight:
        """Return the sight of the plan's host, or of ``host``; the box stays over the plan's."""
        preset = self.constellation
        box = self.ground.sight(preset)
        if host is None:
            return box
        if not isinstance(box, OrbitSight) or self.access == "onboard":
            raise InvalidInput(
                f"a host at {host.latitude_deg:g},{host.longitude_deg:g}: this constellation ({self.preset}, access "
                f"{self.access}) has no places on the ground; expected a preset with real orbits such as starlink-a"
            )
        place = Ground(host.latitude_deg, host.longitude_deg, self.ground.mask_deg, self.ground.gateway)
        own = place.sight(preset)
        assert isinstance(own, OrbitSight)
        return PlaceSight(box, own)

    @property
    def constellation(self) -> Preset:
        if self.flown is not None:
            return self.flown.preset()
        return preset_named(self.preset, self.preset_version)

    @property
    def torus(self) -> Torus:
        return self.constellation.torus

    @property
    def by_size(self) -> bool:
        if self.fan_out:
            return self.fan_out == "size"
        return self.servers == self.constellation.servers

    @property
    def memory_bytes(self) -> int:
        return self.torus.size * self.memory_per_satellite_bytes

    def addresses_of(self, host: HostShare) -> Iterator[tuple[SatelliteId, tuple[str, int]]]:
        torus = self.torus
        cells = (SatelliteId(plane, slot) for plane in host.planes for slot in range(self.slots_per_plane))
        for cell, port in zip(cells, host.ports(self.slots_per_plane), strict=True):
            if cell in torus:  # the port of a gap stays free
                yield cell, (host.ip, port)

    def addresses(self) -> dict[SatelliteId, tuple[str, int]]:
        return {satellite: address for host in self.hosts for satellite, address in self.addresses_of(host)}

    @property
    def is_ipv6(self) -> bool:
        return self.hosts[0].is_ipv6

    def parse_own_ip(self, text: str, where: str) -> str:
        """Parse an address of this computer to bind."""
        ip = parse_ip(text, where)
        family = "IPv6" if self.is_ipv6 else "IPv4"
        _require(
            (":" in ip) == self.is_ipv6, f"{where}: ip {text!r}: expected an {family} address, as the plan's hosts have"
        )
        return ip

    def host_named(self, which: str) -> HostShare:
        for number, host in enumerate(self.hosts):
            if which in (host.name, str(number)):
                return host
        raise InvalidInput(f"no host {which!r} in the plan: expected one of {', '.join(h.name for h in self.hosts)}")


def _chosen(preset: str | Preset) -> Preset:
    return preset if isinstance(preset, Preset) else preset_named(preset)


def _shares(planes: int, hosts: int) -> list[tuple[int, ...]]:
    return [tuple(range(planes * host // hosts, planes * (host + 1) // hosts)) for host in range(hosts)]


def local_hosts(preset: str | Preset, hosts: int, ports: int | Ports, ip: str = "127.0.0.1") -> tuple[HostShare, ...]:
    torus = _chosen(preset).torus
    _require(1 <= hosts <= torus.planes, f"{hosts} hosts for {torus.planes} planes: expected 1 to {torus.planes}")
    ports = Ports(ports) if isinstance(ports, int) else ports
    all_ports = ports.first(torus.cells)
    shares = []
    for number, planes in enumerate(_shares(torus.planes, hosts)):
        first = all_ports[planes[0] * torus.slots_per_plane]
        last = all_ports[(planes[-1] + 1) * torus.slots_per_plane - 1]
        gaps = tuple(gap for gap in ports.skipped if first < gap[0] < last)
        shares.append(HostShare(f"host-{number}", ip, first, planes, gaps))
    return tuple(shares)


def remote_hosts(preset: str | Preset, addresses: Sequence[tuple[str, int]]) -> tuple[HostShare, ...]:
    torus = _chosen(preset).torus
    _require(
        1 <= len(addresses) <= torus.planes,
        f"{len(addresses)} hosts for {torus.planes} planes: expected 1 to {torus.planes}",
    )
    shares = _shares(torus.planes, len(addresses))
    return tuple(
        HostShare(f"host-{number}", ip, port, planes)
        for number, ((ip, port), planes) in enumerate(zip(addresses, shares, strict=True))
    )


def make_plan(
    preset: str | Preset = DEFAULT_PRESET,
    *,
    hosts: tuple[HostShare, ...] | None = None,
    servers: int | None = None,
    strategy: str | None = None,
    access: str | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    delay_scale: float = 1.0,
    memory_per_satellite_bytes: int = DEFAULT_MEMORY_BYTES,
    epoch_s: float = 0.0,
    time_scale: float = 0.0,
    replicas: int = 1,
    faults: Faults | None = None,
    memory_policy: MemoryPolicy | None = None,
    ground: Ground | None = None,
    auth: str = "off",
    keys_file: str = "",
    links: Links | None = None,
) -> ConstellationPlan:
    """Make a plan with the preset's defaults; without ``servers`` a value's size decides."""
    chosen = _chosen(preset)
    ground = ground or Ground(gateway=chosen.gateway)
    access = access_named(access or chosen.access)
    if access in ("gateway", "hybrid"):
        ground.check_reach(chosen)
    torus = chosen.torus
    return ConstellationPlan(
        preset=chosen.name,
        planes=torus.planes,
        slots_per_plane=torus.slots_per_plane,
        hosts=hosts or local_hosts(chosen, min(DEFAULT_HOSTS, torus.planes), DEFAULT_BASE_PORT),
        servers=chosen.servers if servers is None else servers,
        strategy=strategy or ("hop" if access == "onboard" else chosen.strategy),
        centre=ground.centre(chosen),
        access=access,
        chunk_bytes=chunk_bytes,
        delay_scale=delay_scale,
        memory_per_satellite_bytes=memory_per_satellite_bytes,
        epoch_s=epoch_s,
        time_scale=time_scale,
        replicas=replicas,
        faults=faults or Faults(),
        memory_policy=memory_policy or MemoryPolicy(),
        ground=ground,
        auth=auth,
        keys_file=keys_file,
        fan_out="fixed" if servers == chosen.servers else "",
        links=links,
        preset_version=chosen.version,
        flown=chosen.flown,
    )


AUTH_MODES = ("off", "on", "answers", "every")
"""No MACs; MACs on commands; also on answers except DATA; on every packet."""
DEFAULT_AUTH = "answers"


def check_auth(auth: str, keys_file: str, chunk_bytes: int) -> None:
    if auth not in AUTH_MODES:
        raise InvalidInput(f"auth {auth!r}: expected one of {', '.join(AUTH_MODES)}")
    if auth != "off" and not keys_file:
        raise InvalidInput(f"auth {auth} without keys_file: expected a file of `skymemory keys new`")
    if auth != "off" and chunk_bytes > MAX_SIGNED_CHUNK_BYTES:
        raise InvalidInput(
            f"chunks of {chunk_bytes} bytes with MACs: expected at most {MAX_SIGNED_CHUNK_BYTES}, or --auth off"
        )


def follower_of(plan: ConstellationPlan, say: Callable[[str], None] | None = None) -> KeyFollower | None:
    if plan.auth == "off":
        return None
    return KeyFollower(Path(plan.keys_file), plan.auth, say)


def check_exposure(plan: ConstellationPlan, host: HostShare, listen: str | None, insecure: bool) -> None:
    """Refuse to bind a non-loopback address without MACs: any computer could command the satellites."""
    address = listen or host.ip
    if plan.auth == "off" and not insecure and not ipaddress.ip_address(address).is_loopback:
        raise InvalidInput(
            f"{host.name} would accept commands from any computer that reaches {address}: make the plan with --auth "
            f"{DEFAULT_AUTH}, or use --insecure on a network that only your computers reach"
        )
