"""A scenario as CZML, the format that Cesium plays.

Positions are Earth-fixed: precession since 2000 moves orbits 42 km in Cesium's inertial frame (ICRF). A large or long
scenario has only satellites that are ever in the box or carry a beam.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.constellation.visibility import ground_angle_rad
from skymemory.errors import InvalidInput
from skymemory.files import write_output
from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.testbed.connect import clock_of, sky_of
from skymemory_lab.sim.sky.scenario import Scenario

SAMPLE_S = 60.0
INTERPOLATION_DEGREE = 5
MOST_SHOWN_S = 7200.0
_MOST_SAMPLES = 40_000
_STEPS = 2000
_BOX, _REST = [245, 169, 78, 255], [147, 161, 173, 160]
_BEAM, _LINK, _HOST = [209, 73, 91, 255], [46, 111, 149, 200], [31, 138, 76, 255]


@dataclass(frozen=True, slots=True)
class Spell:
    """Time, in seconds after the start, in which the same satellites are the box (by server) or carry a beam."""

    from_s: float
    to_s: float
    satellites: tuple[SatelliteId, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Changes of the box, and of each host's beams."""

    shown_s: float
    box: tuple[Spell, ...]
    beams: tuple[tuple[Spell, ...], ...]

    @property
    def satellites(self) -> set[SatelliteId]:
        spells = [*self.box, *(spell for host_beams in self.beams for spell in host_beams)]
        return {satellite for spell in spells for satellite in spell.satellites}


def timeline_of(scenario: Scenario) -> Timeline:
    """Sample every second, or 2000 times."""
    if scenario.preset.fixed_centre is not None:
        raise InvalidInput(
            f"{scenario.preset.name} is no orbit, so there is nothing to show: expected a preset such as starlink-a"
        )
    plan = scenario.plan
    clock, sky, code = clock_of(plan), sky_of(plan), STRATEGY_CODES[plan.strategy]  # type: ignore[index]
    shown_s = min(scenario.duration_s, MOST_SHOWN_S)
    steps = min(_STEPS, max(1, math.ceil(shown_s)))
    times = [shown_s * number / steps for number in range(steps)]
    hosts = range(len(scenario.ground))
    sights = [plan.sight(scenario.place(host) if host else None) for host in hosts]
    boxes, beams = [], [[] for _ in hosts]  # type: ignore[var-annotated]
    for now_s in times:
        moves = clock.moves(now_s)
        box = sky.servers_at(code, plan.servers, moves, moves)
        boxes.append(box)
        for host in hosts:
            access = scenario.access(host)
            visible = () if access == "onboard" else sights[host].in_sight(sky.centre_at(moves), clock.sky_s(now_s))
            direct = tuple(satellite for satellite in visible[1:] if satellite in box) if access == "hybrid" else ()
            beams[host].append(box if access not in ("gateway", "hybrid", "onboard") else (*visible[:1], *direct))
    return Timeline(
        shown_s, _spells(times, boxes, shown_s), tuple(_spells(times, host_beams, shown_s) for host_beams in beams)
    )


def _spells(times: Sequence[float], satellites: Sequence[tuple[SatelliteId, ...]], end_s: float) -> tuple[Spell, ...]:
    # Join successive samples with the same satellites.
    starts = [at for at in range(len(satellites)) if at == 0 or satellites[at] != satellites[at - 1]]
    ends = [*(times[at] for at in starts[1:]), end_s]
    return tuple(Spell(times[at], to_s, satellites[at]) for at, to_s in zip(starts, ends, strict=True))


def moment(unix_s: float) -> str:
    return datetime.fromtimestamp(round(unix_s, 3), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def czml_of(scenario: Scenario) -> list[dict[str, Any]]:
    """Return the packets, the document's packet first.

    Raises:
        InvalidInput: the grid is not an orbit, or the element sets are unusable.
    """
    timeline = timeline_of(scenario)
    shell, torus = scenario.preset.shell, scenario.preset.torus
    start_unix_s = scenario.preset.epoch_unix_s + scenario.start_s
    samples_s = np.append(np.arange(0.0, timeline.shown_s, SAMPLE_S), timeline.shown_s)
    # Interpolation of degree n needs n + 1 samples, so a short scenario is sampled beyond its end.
    while len(samples_s) <= INTERPOLATION_DEGREE:
        samples_s = np.append(samples_s, samples_s[-1] + SAMPLE_S)

    def interval(from_s: float, to_s: float) -> str:
        return f"{moment(start_unix_s + from_s)}/{moment(start_unix_s + to_s)}"

    shown_interval = interval(0.0, timeline.shown_s)
    box = {satellite for spell in timeline.box for satellite in spell.satellites}
    named = timeline.satellites if torus.size * len(samples_s) > _MOST_SAMPLES else set(torus.satellites())
    positions_m = shell.positions_m(scenario.start_s + samples_s)
    turned_rad = ground_angle_rad(shell.model, scenario.preset.epoch_unix_s, scenario.start_s + samples_s)
    cos, sin = np.cos(turned_rad)[:, None, None], np.sin(turned_rad)[:, None, None]
    x, y, z = np.moveaxis(positions_m, -1, 0)
    fixed_m = np.round(np.stack([cos * x + sin * y, cos * y - sin * x, z], axis=-1), 2)
    packets: list[dict[str, Any]] = [
        {
            "id": "document",
            "name": scenario.title or scenario.preset.name,
            "version": "1.0",
            "clock": {
                "interval": shown_interval,
                "currentTime": moment(start_unix_s),
                "multiplier": 10,
                "range": "LOOP_STOP",
                "step": "SYSTEM_CLOCK_MULTIPLIER",
            },
        }
    ]
    for satellite in sorted(named):
        table = np.column_stack([samples_s, fixed_m[:, satellite.plane, satellite.slot]])
        packets.append(
            {
                "id": _id(satellite),
                "name": f"plane {satellite.plane}, slot {satellite.slot}",
                "availability": shown_interval,
                "position": {
                    "epoch": moment(start_unix_s),
                    "referenceFrame": "FIXED",
                    "interpolationAlgorithm": "LAGRANGE",
                    "interpolationDegree": INTERPOLATION_DEGREE,
                    "cartesian": table.ravel().tolist(),
                },
                "point": {
                    "pixelSize": 6 if satellite in box else 3,
                    "color": {"rgba": _BOX if satellite in box else _REST},
                },
            }
        )
    for number, host in enumerate(scenario.ground):
        if scenario.access(number) == "onboard":
            continue
        place = scenario.place(number)
        packets.append(
            {
                "id": f"host {host.name}",
                "name": host.name,
                "position": {"cartographicDegrees": [place.longitude_deg, place.latitude_deg, 0.0]},
                "point": {"pixelSize": 10, "color": {"rgba": _HOST}},
                "label": {"text": host.name, "font": "14px sans-serif", "pixelOffset": {"cartesian2": [0, -18]}},
            }
        )
        for (satellite, *_), times in _by_pair(timeline.beams[number]):
            packets.append(_line(f"host {host.name}", satellite, [interval(*time) for time in times], _BEAM))
    for ends, times in _by_pair(timeline.box, torus):
        packets.append(_line(_id(ends[0]), ends[1], [interval(*time) for time in times], _LINK))
    return packets


def _by_pair(
    spells: Iterable[Spell], torus: Torus | None = None
) -> list[tuple[tuple[SatelliteId, ...], list[tuple[float, float]]]]:
    """Return the merged times of satellites' beams, or with a torus, of two neighbours in the box."""
    times_by_pair: dict[tuple[SatelliteId, ...], list[tuple[float, float]]] = {}
    for spell in spells:
        inside = set(spell.satellites)
        pairs: list[tuple[SatelliteId, ...]] = [(satellite,) for satellite in spell.satellites]
        if torus is not None:
            pairs = [
                (satellite, neighbour)
                for satellite in sorted(inside)
                for neighbour in torus.neighbours(satellite)
                if neighbour in inside
            ]
            pairs = list(dict.fromkeys(tuple(sorted(pair)) for pair in pairs))
        for pair in pairs:
            before = times_by_pair.setdefault(pair, [])
            if before and before[-1][1] == spell.from_s:
                before[-1] = before[-1][0], spell.to_s
            else:
                before.append((spell.from_s, spell.to_s))
    return sorted(times_by_pair.items())


def _id(satellite: SatelliteId) -> str:
    return f"satellite {satellite.plane},{satellite.slot}"


def _line(source_id: str, satellite: SatelliteId, intervals: list[str], rgba: list[int]) -> dict[str, Any]:
    ends = [f"{source_id}#position", f"{_id(satellite)}#position"]
    return {
        "id": f"{source_id} to {_id(satellite)}",
        "availability": intervals if len(intervals) > 1 else intervals[0],
        "polyline": {
            "positions": {"references": ends},
            "arcType": "NONE",
            "width": 2,
            "material": {"solidColor": {"color": {"rgba": rgba}}},
        },
    }


def write_czml(scenario: Scenario, path: Path) -> Path:
    packets = ",\n".join(json.dumps(packet, separators=(",", ":")) for packet in czml_of(scenario))
    write_output(path, f"[{packets}]\n".encode())
    return path
