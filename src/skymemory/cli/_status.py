"""Reports of ``skymemory constellation status`` and ``rotate``, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.constellation.links import LINK_CLASSES
from skymemory.errors import InvalidInput, NoConstellation
from skymemory.protocol.messages import OURS, Capabilities
from skymemory.store.sky.shared_index import inspect_journal
from skymemory.testbed.connect import tolerated_skew_s
from skymemory.testbed.control import Housekeeping, Silence, ping_all, pushed_moves, read_outages
from skymemory.testbed.liveness import Demand
from skymemory.testbed.plan_file import load_plan
from skymemory.testbed.supervisor import HostState, inspect
from skymemory.text import Table, write_line
from skymemory.units import format_duration, format_size

if TYPE_CHECKING:
    from skymemory.constellation.torus import SatelliteId
    from skymemory.index.journal import JournalState
    from skymemory.testbed.control import Rotation
    from skymemory.testbed.plan import ConstellationPlan
    from skymemory.testbed.run_directory import RunDirectory


# Reported by every satellite, but extreme values or capabilities, not amounts.
_NO_SUMS = {"late_us", *OURS.figures()}


@dataclass(frozen=True, slots=True)
class StatusReport:
    """State of a constellation: host processes, and the figures that satellites answered."""

    plan: ConstellationPlan
    hosts: list[HostState]
    answers: dict[SatelliteId, Housekeeping | None]
    where: str  # run directory or plan file
    index: tuple[JournalState, int] | None = None  # state and number of values

    @property
    def healthy(self) -> bool:
        return all(answer is not None for answer in self.answers.values())

    def answering(self, host: str) -> tuple[int, int]:
        mine = [satellite for satellite, _ in self.plan.addresses_of(self.plan.host_named(host))]
        return sum(self.answers[satellite] is not None for satellite in mine), len(mine)

    def total(self, field: str) -> int:
        return sum(answer.get(field, 0) for answer in self.answers.values() if answer)

    def worst(self, field: str) -> int:
        return max((answer.get(field, 0) for answer in self.answers.values() if answer), default=0)

    @property
    def wrong_clocks(self) -> list[SatelliteId]:
        bound_us = tolerated_skew_s(self.plan) * 1e6
        return [satellite for satellite, answer in self.answers.items() if answer and answer["clock_off_us"] > bound_us]

    @property
    def of_older_releases(self) -> int:
        known = [Capabilities.of_figures(answer) for answer in self.answers.values() if answer]
        return sum(
            not capabilities.stated or bool(OURS.operations & ~capabilities.operations) for capabilities in known
        )

    def per_host(self, field: str) -> int:
        """Return the sum over hosts of a field that all satellites of a host report alike."""
        total = 0
        for host in self.plan.hosts:
            # Satellites of a process share a socket and count its faults together: the largest value is the host's. A
            # sum would count the faults once for each satellite.
            answers = (self.answers.get(satellite) for satellite, _ in self.plan.addresses_of(host))
            total += max((answer.get(field, 0) for answer in answers if answer), default=0)
        return total


def collect(directory: RunDirectory, plan_path: Path | None, patience_s: float) -> StatusReport:
    """Inspect the run directory's processes (unless a plan file is given) and ping every satellite."""
    if plan_path is not None:
        plan = load_plan(plan_path)
        hosts = [HostState(host.name, "elsewhere", None, None, "") for host in plan.hosts]
        return StatusReport(plan, hosts, ping_all(plan, patience_s), str(plan_path))
    plan = directory.read_plan()
    hosts = inspect(directory)
    # A busy host may answer late: its satellites get more time than those of an idle or dead process.
    demand = Demand({host.name: host.pid for host in hosts if host.pid is not None and host.state == "running"})
    silence = Silence(patience_s, busy=demand.busy, off=_disabled(directory))
    if all(host.state == "dead" for host in hosts):
        raise NoConstellation(
            f"all {len(hosts)} host processes of the constellation in {directory.path} have died; "
            f"start it again with `skymemory constellation up`\n{hosts[0].log_tail}".rstrip()
        )
    index = inspect_journal(directory.index_path)
    return StatusReport(plan, hosts, ping_all(plan, silence), str(directory.path), index)


def _disabled(directory: RunDirectory) -> frozenset[SatelliteId]:
    try:
        return read_outages(directory)
    except InvalidInput:
        return frozenset()  # the hosts log it; here a disabled satellite only costs its timeout


def _as_object(report: StatusReport) -> dict[str, Any]:
    hosts = []
    for host in report.hosts:
        answering, satellites = report.answering(host.name)
        hosts.append(
            {
                "name": host.name,
                "state": host.state,
                "pid": host.pid,
                "satellite": host.kind,
                "memory_bytes": host.memory_bytes,
                "satellites": satellites,
                "answering": answering,
            }
        )
    # Every counter of a satellite is summed, so that new counters appear without a change. States (moves, clocks,
    # delays) are left out, because their sum means nothing.
    fields = sorted({field for answer in report.answers.values() if answer for field in answer})
    moves = pushed_moves(report.answers.values()) if any(report.answers.values()) else (0, 0)
    return {
        "healthy": report.healthy,
        "where": report.where,
        "preset": report.plan.preset,
        "planes": report.plan.planes,
        "slots_per_plane": report.plan.slots_per_plane,
        "servers": report.plan.servers,
        "servers_by_size": report.plan.by_size,
        "strategy": report.plan.strategy,
        "access": report.plan.access,
        "delay_scale": report.plan.delay_scale,
        "pushed_slot_moves": moves[0],
        "pushed_plane_moves": moves[1],
        "delay_error_p99_us": report.worst("delay_error_p99_us"),
        "clock_off_us": report.worst("clock_off_us"),
        "clocks_beyond_bound": len(report.wrong_clocks),
        "late_us": report.worst("late_us"),
        "of_older_releases": report.of_older_releases,
        "faults_injected": report.per_host("faults_injected"),
        "links": _links(report),
        "index": None
        if report.index is None
        else {
            "complete": report.index[0].complete,
            "values": report.index[1],
            "keys_probed": report.index[0].keys_probed,
            "values_adopted": report.index[0].values_adopted,
        },
        "hosts": hosts,
        "totals": {
            field: report.total(field)
            for field in fields
            if field not in _NO_SUMS and not field.startswith(("pushed_", "delay_", "faults_", "clock_", "link_"))
        },
    }


def _links(report: StatusReport) -> dict[str, dict[str, float | int | None]] | None:
    links = report.plan.links
    if links is None:
        return None
    return {
        kind: {
            "bit_s": None if links.bytes_per_s(kind) == math.inf else links.bytes_per_s(kind) * 8,
            "lost": report.per_host(f"link_{kind}_lost"),
            "queued_bytes": report.per_host(f"link_{kind}_queued_bytes"),
        }
        for kind in LINK_CLASSES
    }


def _delay_text(scale: float) -> str:
    return {0.0: "off", 1.0: "real"}.get(scale, f"x{scale:g}")


def print_status(report: StatusReport, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_as_object(report), indent=2))
        return
    plan = report.plan
    write_line(
        f"{plan.preset}: {plan.planes} planes x {plan.slots_per_plane} slots = {plan.torus.size} satellites; "
        f"{'up to ' if plan.by_size else ''}{plan.servers} servers by {plan.strategy}; access {plan.access}; "
        f"delay {_delay_text(plan.delay_scale)}"
    )
    rows = []
    for share, host in zip(plan.hosts, report.hosts, strict=True):
        answering, satellites = report.answering(host.name)
        planes = f"{share.planes[0]}" if len(share.planes) == 1 else f"{share.planes[0]}-{share.planes[-1]}"
        ports = f"{share.base_port}-{share.ports(plan.slots_per_plane)[-1]}"
        process = f"{host.state} {host.pid}" if host.state == "running" else host.state
        memory = format_size(host.memory_bytes) if host.memory_bytes is not None else "-"
        kind = {"c": "C", "python": "Python", None: "-"}[host.kind]
        rows.append([host.name, planes, ports, process, kind, memory, f"{answering} of {satellites}"])
    Table(("host", "planes", "ports", "process", "in", "memory", "answering"), rows, left=range(5)).print()
    if any(report.answers.values()):
        moves = pushed_moves(report.answers.values())
        write_line(
            f"holding {report.total('chunks_held')} chunks, {format_size(report.total('memory_used_bytes'))} of "
            f"{format_size(report.total('memory_limit_bytes'))}; moved by hand: {moves[0]} slots, {moves[1]} planes"
        )
        if plan.delay_scale > 0:
            error_s = report.worst("delay_error_p99_us") / 1e6
            write_line(
                f"link delays of the last minute: 99 % late by less than {format_duration(error_s)} (worst host)"
            )
        for kind, link in (_links(report) or {}).items():
            rate = "unlimited" if link["bit_s"] is None else f"{link['bit_s'] / 1e6:g} Mbit/s"
            write_line(
                f"links {kind}: {rate}; {link['lost']} packets lost, {format_size(link['queued_bytes'] or 0)} waiting"
            )
        if full := report.total("pools_full"):
            write_line(f"fixed pools of satellites were full {full} times; each time a value was refused or put off")
        if plan.faults.any:
            write_line(f"faults injected: {report.per_host('faults_injected')}")
    if report.index is not None:
        standing, values = report.index
        write_line(
            f"index of this computer: {values} values"
            + ("" if standing.complete else "; incomplete: keys that it lacks are looked up at the satellites")
            + (f": {standing.values_adopted} values found there so far" if standing.values_adopted else "")
        )
    if older := report.of_older_releases:
        write_line(f"{older} satellites run an older release than this program; operations that they lack are not used")
    if report.wrong_clocks:
        write_line(
            f"WARNING: clocks of {len(report.wrong_clocks)} satellites differ from this computer's by up to "
            f"{report.worst('clock_off_us') / 1e6:.3g} s; at time scale {plan.time_scale:g} at most "
            f"{tolerated_skew_s(plan):.3g} s is tolerated: synchronise the clocks of the hosts (NTP)"
        )
    for host in report.hosts:
        if host.state == "dead":
            write_line(f"{host.name} is dead" + (f"; its log ends with:\n{host.log_tail}" if host.log_tail else ""))


def print_rotation(report: Rotation, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**dataclasses.asdict(report), "complete": report.complete}, indent=2))
        return
    write_line(
        f"moved from {report.moves_before} to {report.moves_after} (slots, planes): {report.acknowledged} of "
        f"{report.satellites} satellites acknowledged, {report.chunks_migrated} chunks handed over in "
        f"{format_duration(report.seconds)}" + ("" if report.settled else "; more are in flight")
    )
