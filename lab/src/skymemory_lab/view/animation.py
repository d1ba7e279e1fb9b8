"""A scenario as an HTML page without network access.

The page computes positions and shows their difference from Python's.
"""

from __future__ import annotations

import html
import json
import math
from pathlib import Path
from typing import Any

from skymemory.constellation.visibility import ground_angle_rad, ground_m
from skymemory.files import write_output
from skymemory_lab.sim.sky.scenario import Scenario
from skymemory_lab.view.czml import Spell, moment, timeline_of

_CHECKS = 24
_DAY_S = 86_400.0


def data_of(scenario: Scenario) -> dict[str, Any]:
    """Return the input of the page, in metres, radians and seconds after the constellation's epoch.

    Raises:
        InvalidInput: the grid is not an orbit, or the element sets are unusable.
    """
    timeline, preset = timeline_of(scenario), scenario.preset
    shell, epoch_unix_s, start_s = preset.shell, preset.epoch_unix_s, scenario.start_s
    turned_rad = ground_angle_rad(shell.model, epoch_unix_s, 0.0)
    hosts = []
    for number, host in enumerate(scenario.ground):
        place, fixed_m = scenario.place(number), None
        if scenario.access(number) != "onboard":
            out_m, north_m = ground_m(shell.model, place.latitude_deg)
            longitude = math.radians(place.longitude_deg)
            fixed_m = [out_m * math.cos(longitude), out_m * math.sin(longitude), north_m]
        hosts.append({"name": host.name, "fixed_m": fixed_m, "beams": _spells(timeline.beams[number])})
    return {
        "title": scenario.title or preset.name,
        "began": moment(epoch_unix_s + start_s),
        "start_s": start_s,
        "shown_s": timeline.shown_s,
        "shell": {
            "planes": shell.planes,
            "slots": shell.slots_per_plane,
            "radius_m": shell.radius_m,
            "inclination_rad": math.radians(shell.inclination_deg),
            "period_s": shell.period_s,
            "node_rate_rad_s": shell.node_rate_rad_s,
            "nodes_rad": [shell.node_rad(plane) for plane in range(shell.planes)],
            "offsets": [
                shell.argument_rad(plane, 0) * shell.slots_per_plane / (2 * math.pi) for plane in range(shell.planes)
            ],
        },
        "earth": {
            "radius_m": shell.earth_radius_m,
            "turned_rad": turned_rad,
            "rate_rad_s": (ground_angle_rad(shell.model, epoch_unix_s, _DAY_S) - turned_rad) / _DAY_S,
        },
        "box": _spells(timeline.box),
        "hosts": hosts,
        "check": _check(scenario, timeline.shown_s),
    }


def _spells(spells: tuple[Spell, ...]) -> list[list[Any]]:
    return [[round(spell.from_s, 3), [list(satellite) for satellite in spell.satellites]] for spell in spells]


def _check(scenario: Scenario, shown_s: float) -> list[list[float]]:
    # Return some positions, to which the page compares its own.
    shell, rows = scenario.preset.shell, []
    for number in range(_CHECKS):
        t = scenario.start_s + shown_s * number / (_CHECKS - 1)
        plane, slot = number * 7 % shell.planes, number * 5 % shell.slots_per_plane
        rows.append([t, plane, slot, *shell.positions_m(t)[plane, slot].tolist()])
    return rows


def page_of(scenario: Scenario) -> str:
    data = data_of(scenario)
    # A script element ends at the first "</" anywhere in its text.
    written = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    page = Path(__file__).with_suffix(".html").read_text("utf-8")
    return page.replace("%TITLE%", html.escape(data["title"])).replace("%DATA%", written)


def write_animation(scenario: Scenario, path: Path) -> Path:
    write_output(path, page_of(scenario).encode())
    return path
