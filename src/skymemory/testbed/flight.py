"""Hosts with satellites in C: the daemon of ``flight/posix``, and its configuration, lines of words."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NoReturn, get_args

from skymemory.constellation.ground_track import Trajectory
from skymemory.constellation.links import LINK_CLASSES, rain_coefficients
from skymemory.constellation.sight import OrbitSight
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.constellation.visibility import WGS84_E2, ground_angle_rad
from skymemory.errors import ConstellationError, InvalidInput
from skymemory.installation import make_command
from skymemory.protocol.satellite.state import SatelliteConfig
from skymemory.testbed.connect import clock_of, shell_of
from skymemory.testbed.plan import ConstellationPlan, HostShare
from skymemory.testbed.run_directory import OUTAGES_NAME, Kind
from skymemory.transport.delay_line import handover_timeout_s
from skymemory.transport.faults import DEFAULT_REORDER_DELAY_S
from skymemory.transport.udp_host import PATIENCE_S

Choice = Literal["python", "c", "mixed"]
CHOICES: tuple[Choice, ...] = get_args(Choice)
DAEMON = "skymemory-flight"
DAEMON_SETTING = "SKYMEMORY_FLIGHT"
_SHARE_UNITS = 65_536
MOST_REPLICAS = 32
_FAULT_UNITS = 1 << 32
FORMAT_VERSION = 1
_LONG_S = 1e6


def kinds_of(choice: Choice, hosts: Sequence[HostShare]) -> dict[str, Kind]:
    return {host.name: "c" for at, host in enumerate(hosts) if choice == "c" or (choice == "mixed" and at % 2 == 1)}


def kinds_for(choice: Choice, plan: ConstellationPlan) -> dict[str, Kind]:
    """Return which of the plan's hosts run satellites in C."""
    kinds = kinds_of(choice, plan.hosts)
    if kinds:
        daemon_path()
        check_plan(plan)
    elif choice != "python":
        raise InvalidInput("--satellite mixed with one host process: expected at least two, or --satellite c")
    return kinds


def daemon_path() -> Path:
    """Return the daemon's path: ``$SKYMEMORY_FLIGHT``, or next to Python (``make flight``), or in PATH."""
    if chosen := os.environ.get(DAEMON_SETTING):
        return Path(chosen)
    next_to_python = Path(sys.executable).with_name(DAEMON)
    path = str(next_to_python) if os.access(next_to_python, os.X_OK) else shutil.which(DAEMON)
    if path is None:
        raise ConstellationError(
            f"no {DAEMON} beside {sys.executable}: {make_command('flight')} builds the "
            f"satellite in C; where this Python is not of that tree's .venv, set {DAEMON_SETTING} to its "
            f"build/flight/{DAEMON}"
        )
    return Path(path)


def check_plan(plan: ConstellationPlan) -> None:
    if plan.replicas > MOST_REPLICAS:
        raise InvalidInput(f"satellites in C keep at most {MOST_REPLICAS} replicas: use --satellite python")


def _us(seconds: float) -> int:
    """Return microseconds, rounded up: timers never fire early."""
    return math.ceil(seconds * 1e6)


def _gaps(torus: Torus) -> Iterator[str]:
    if torus.gaps:
        yield f"reach {torus.most_planes} {torus.most_slots}"
    for gap in sorted(torus.gaps):
        yield f"gap {gap.plane} {gap.slot}"


def _delays(plan: ConstellationPlan) -> Iterator[str]:
    """Yield lines: delays of links, and of beams to the ground."""
    shell, torus, scale = shell_of(plan), plan.torus, plan.delay_scale
    if scale:
        yield f"delay-scale {scale!r}"
        yield f"slot-delay-us {_us(shell.isl_one_way_s('slot') * scale)}"
        for plane in range(torus.planes):
            yield f"plane-delay-us {plane} {_us(shell.plane_link_one_way_s(plane) * scale)}"
    if plan.access == "onboard":
        yield f"onboard {' '.join(map(str, torus.living(plan.centre)))}"
    sight = plan.sight()
    if isinstance(sight, OrbitSight):
        yield from _orbits(sight)
    elif scale or plan.links is not None:
        centre = SatelliteId(0, 0)
        for satellite in torus.satellites():
            yield f"beam-s {satellite.plane} {satellite.slot} {sight.one_way_s(satellite, centre, 0.0)!r}"


def _orbits(sight: OrbitSight) -> Iterator[str]:
    """Yield lines from which the daemon computes orbits and sight."""
    shell, epoch_s = sight.shell, sight.epoch_unix_s
    numbers = shell.radius_m, math.radians(shell.inclination_deg), shell.period_s, shell.node_rate_rad_s, shell.span_rad
    yield f"orbit {' '.join(map(repr, (*numbers, *shell.epoch_cell)))}"
    for plane in range(shell.planes):
        ahead = shell.argument_rad(plane, 0) / (2 * math.pi) * shell.slots_per_plane
        yield f"plane-orbit {plane} {shell.node_rad(plane)!r} {ahead!r}"
    eccentricity2 = 0.0 if shell.model == "paper" else WGS84_E2
    angle_rad = ground_angle_rad(shell.model, epoch_s, 0.0)
    turn_rad_s = (ground_angle_rad(shell.model, epoch_s, _LONG_S) - angle_rad) / _LONG_S
    blocked_m = shell.longest_link_m if sight.any_blocked else 0.0
    earth = shell.earth_radius_m, eccentricity2, angle_rad, turn_rad_s, sight.mask_deg, blocked_m
    yield f"earth {' '.join(map(repr, earth))}"
    place = sight.place
    points = place.waypoints if isinstance(place, Trajectory) else ((0.0, place.latitude_deg, place.longitude_deg),)
    for point in points:
        yield f"waypoint {' '.join(map(repr, point))}"


def _links(plan: ConstellationPlan) -> Iterator[str]:
    """Yield lines: rates, outages, elevations and rain of links."""
    links = plan.links
    if links is None:
        return
    yield f"links {plan.epoch_s!r} {links.buffer_bytes} {shell_of(plan).altitude_m!r} {links.seed}"
    for number, kind in enumerate(LINK_CLASSES):
        if (bytes_per_s := links.bytes_per_s(kind)) < math.inf:
            yield f"rate {number} {bytes_per_s!r}"
    for outage in links.outages:
        classes = sum(1 << number for number, kind in enumerate(LINK_CLASSES) if kind in outage.classes)
        ends = (f" {satellite.plane} {satellite.slot}" for satellite in sorted(outage.satellites))
        yield f"link-outage {outage.from_s!r} {outage.to_s!r} {classes}{''.join(ends)}"
    for least_deg, share in links.elevations:
        yield f"elevation {least_deg!r} {share!r}"
    if (rain := links.rain) is not None:
        terms = rain_coefficients(rain.up_ghz), rain_coefficients(rain.down_ghz)
        numbers = rain.mm_h, rain.share, rain.spell_s, rain.margin_db, rain.height_km, *terms[0], *terms[1]
        yield f"rain {' '.join(map(repr, numbers))}"
    timeout_s = handover_timeout_s(SatelliteConfig(SatelliteId(0, 0), 1).handover_timeout_s, links)
    yield f"handover-timeout-us {_us(timeout_s)}"


def _clock(plan: ConstellationPlan) -> Iterator[str]:
    """Yield lines: the clock of the box's moves."""
    clock = clock_of(plan)
    yield f"pushed {clock.pushed[0]} {clock.pushed[1]}"
    if not clock.time_scale:
        return
    if clock.track is None:
        yield f"clock periods {clock.epoch_s!r} {clock.time_scale!r} {clock.slot_period_s!r} {clock.plane_period_s!r}"
        return
    for knot in clock.track.knots:
        yield f"knot {' '.join(map(repr, knot))}"
    plane_rate, slot_rate = clock.track.rates
    yield f"clock track {clock.epoch_s!r} {clock.time_scale!r} {plane_rate!r} {slot_rate!r}"


def _faults(plan: ConstellationPlan, host: HostShare) -> Iterator[str]:
    """Yield the configuration line of this host's injected faults, as fixed-point shares."""
    faults = plan.faults
    if not faults.any:
        return
    shares = (faults.loss, faults.duplicate, faults.reorder, faults.corrupt)
    parts = (math.ceil(share * _FAULT_UNITS) for share in shares)
    seed = (faults.seed + plan.hosts.index(host)) % 2**63
    yield f"faults {' '.join(map(str, parts))} {_us(DEFAULT_REORDER_DELAY_S)} {seed}"


def share_text(plan: ConstellationPlan, host: HostShare, listen: str | None = None, record: Path | None = None) -> str:
    """Return the configuration of the daemon of ``host``; ``record`` is its pid file."""
    check_plan(plan)
    shell, eviction = shell_of(plan), plan.memory_policy.satellites(plan.replicas)
    # With gaps, the daemon adds the longest link of each satellite.
    longest_s = max(shell.isl_one_way_s("slot"), *map(shell.plane_link_one_way_s, range(plan.planes)))
    longest_s = 0.0 if plan.torus.gaps else longest_s
    links_s = shell.isl_one_way_s("slot"), shell.isl_one_way_s("plane")
    lines = [
        f"skymemory-flight {FORMAT_VERSION}",
        f"name {host.name}",
        f"torus {plan.planes} {plan.slots_per_plane}",
        *_gaps(plan.torus),
        f"centre {plan.centre.plane} {plan.centre.slot}",
        f"memory-bytes {plan.memory_per_satellite_bytes}",
        f"chunk-bytes {plan.chunk_bytes}",
        f"replacement {plan.memory_policy.replacement}",
        f"eviction {eviction.gossip:d} {eviction.plane_only:d} {eviction.periodic:d} {eviction.migration:d}",
        f"sweep-us {round(eviction.sweep_s * 1e6)}",
        f"notice-hold-us {round(eviction.notice_hold_s * 1e6)}",
        f"confirm-us {round(eviction.confirm_s * 1e6)}",
        f"pin-share {round(eviction.pin_share * _SHARE_UNITS)}",
        f"replicas {plan.replicas}",
        f"slot-link-ps {round(links_s[0] * 1e12)}",
        f"plane-link-ps {round(links_s[1] * 1e12)}",
        f"neighbour-timeout-us {_us(PATIENCE_S + 2 * longest_s * plan.delay_scale)}",
        *_clock(plan),
        *_delays(plan),
        *_links(plan),
        *_faults(plan, host),
    ]
    if plan.auth != "off":
        lines += [f"auth {plan.auth}", f"keys {_path(Path(plan.keys_file))}"]
    if record is not None:
        if plan.unix_at_boot_s is not None:
            lines.append(f"unix-at-boot-us {round(plan.unix_at_boot_s * 1e6)}")
        lines += [f"outages {_path(record.with_name(OUTAGES_NAME))}", f"record {_path(record)}"]
    mine = dict(plan.addresses_of(host))
    for satellite, (ip, port) in plan.addresses().items():
        word, address = ("satellite", listen or ip) if satellite in mine else ("peer", ip)
        lines.append(f"{word} {satellite.plane} {satellite.slot} {address} {port}")
    return "\n".join(lines) + "\n"


def _path(path: Path) -> str:
    text = str(path.absolute())
    if "\n" in text:
        raise InvalidInput(f"{text!r}: a path with a line break cannot be given to {DAEMON}")
    return text


def become_daemon(text: str, host: HostShare, run_dir: Path | None, supervisor_fd: int | None) -> NoReturn:
    """Replace this process by the daemon, which keeps its pid and so its record."""
    daemon = daemon_path()
    # In memory, not in a file that would have to be removed; the daemon opens it by its descriptor number.
    config_fd = os.memfd_create("share", 0)
    os.write(config_fd, text.encode())
    words = [DAEMON, "satellite", "--host", host.name, "--config", f"/proc/self/fd/{config_fd}"]
    if run_dir is not None:
        words += ["--run-dir", str(run_dir)]
    if supervisor_fd is not None:
        words += ["--supervisor-fd", str(supervisor_fd)]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(daemon, words)
    except OSError as error:
        raise ConstellationError(f"cannot run {daemon}: {error.strerror}") from error
