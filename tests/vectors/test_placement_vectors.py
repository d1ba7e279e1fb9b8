"""Golden satellites (``placement.json``) and moves (``moves.json``), for other implementations too.

Three judges: the vectors, our code, and ``reference_placement``, which is written from docs/reference/wire.md alone.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from tests.vectors import reference_placement as page

from skymemory.constellation.ground_track import Waypoint
from skymemory.constellation.presets import PRESETS, preset_named
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.placement.layout import STRATEGIES, layout
from skymemory.placement.locate import Placement
from skymemory.protocol.clock import DISPLACEMENTS, STRATEGY_CODES, SkyMap, displaced
from skymemory.testbed.connect import clock_of, sky_of
from skymemory.testbed.plan import Ground, make_plan

HERE = Path(__file__).parent
PLACEMENTS: list[dict[str, Any]] = json.loads((HERE / "placement.json").read_text("utf-8"))
MOVES: list[dict[str, Any]] = json.loads((HERE / "moves.json").read_text("utf-8"))


def host_of(entry: dict[str, Any]) -> Any:
    host = entry["host"]
    return [tuple(point) for point in host] if isinstance(host[0], list) else tuple(host)


def by_page(entry: dict[str, Any]) -> list[list[int]]:
    found = page.satellites(
        entry["strategy"],
        entry["servers"],
        tuple(entry["torus"]),
        tuple(entry["centre"]),
        tuple(entry["link_delays_ps"]),
        tuple(entry["set_moves"]),
        tuple(entry["now_moves"]),
        entry["replica"],
        entry.get("displacement", 0),
    )
    return [list(satellite) for satellite in found]


def by_code(entry: dict[str, Any]) -> list[list[int]]:
    slot_s, plane_s = (delay_ps * 1e-12 for delay_ps in entry["link_delays_ps"])
    sky = SkyMap(Torus(*entry["torus"]), SatelliteId(*entry["centre"]), slot_s, plane_s)
    found = sky.servers_at(
        displaced(STRATEGY_CODES[entry["strategy"]], entry.get("displacement", 0)),
        entry["servers"],
        tuple(entry["set_moves"]),
        tuple(entry["now_moves"]),
        entry["replica"],
    )
    return [list(satellite) for satellite in found]


@pytest.mark.parametrize("entry", PLACEMENTS, ids=lambda entry: entry["says"])
def test_satellites_are_those_of_the_vectors(entry):
    assert by_code(entry) == entry["satellites"]
    assert by_page(entry) == entry["satellites"]


def test_the_vectors_cover_what_the_page_says():
    assert {entry["strategy"] for entry in PLACEMENTS} == set(STRATEGIES)
    assert {entry["replica"] > 0 for entry in PLACEMENTS} == {True, False}
    assert any(min(entry["now_moves"]) < 0 for entry in PLACEMENTS)
    assert {entry.get("displacement", 0) for entry in PLACEMENTS} == set(range(len(DISPLACEMENTS)))
    assert {entry["preset"] for entry in MOVES} == set(PRESETS) == set(page.PRESETS)
    assert any(isinstance(entry["host"][0], list) for entry in MOVES)


def test_the_page_and_the_code_place_alike_wherever_they_are_asked():
    rng = random.Random(20)
    for _ in range(250):
        torus = rng.randint(1, 9), rng.randint(1, 11)
        strategy = rng.choice(STRATEGIES)
        servers = rng.randint(1, torus[0] * torus[1])
        delays = rng.choice([(1, 1), (rng.randint(1, 40), rng.randint(1, 40))])
        box = layout(strategy, servers, Torus(*torus), *(delay * 1e-12 for delay in delays)).box
        entry = {
            "strategy": strategy,
            "servers": servers,
            "torus": torus,
            "link_delays_ps": delays,
            "centre": (rng.randrange(torus[0]), rng.randrange(torus[1])),
            "set_moves": (rng.randint(-50, 50), rng.randint(-50, 50)),
            "now_moves": (rng.randint(-50, 50), rng.randint(-50, 50)),
            "replica": rng.randrange(min(255, box.width * box.height)),
            "displacement": rng.randrange(len(DISPLACEMENTS)),
        }
        assert by_page(entry) == by_code(entry), entry


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_those_of_the_page(name):
    preset = preset_named(name, 1)  # of the page
    shell = preset.shell
    rows = re.findall(rf"^\| {name} \| (.*) \|$", (HERE.parents[1] / "docs/reference/wire.md").read_text("utf-8"), re.M)
    row = rows[0]  # then the second version's
    planes, slots, altitude, inclination, torus, counted = (part.strip() for part in row.split("|"))
    assert (int(planes), int(slots)) == (shell.planes, shell.slots_per_plane)
    assert altitude == f"{shell.altitude_m:,.0f} m" and inclination == f"{shell.inclination_deg:g}°"
    assert torus == f"{preset.torus.planes} × {preset.torus.slots_per_plane}"
    assert (counted == "periods") == (preset.fixed_centre is not None)
    links_s = shell.isl_one_way_s("slot"), shell.isl_one_way_s("plane")
    assert page.link_delays_ps(name) == tuple(round(link_s * 1e12) for link_s in links_s)
    placement = Placement.for_preset(preset, "cost", 17)
    servers = page.satellites(
        "cost",
        17,
        (preset.torus.planes, preset.torus.slots_per_plane),
        preset.centre,
        page.link_delays_ps(name),
        (3, 4),
        (10, -6),
        0,
    )
    assert list(placement.locate_all((3, 4), (10, -6))) == servers


def clock_by_code(entry: dict[str, Any]):
    host = host_of(entry)
    if isinstance(host, list):
        ground = Ground(waypoints=tuple(Waypoint(*point) for point in host))
    else:
        ground = Ground(latitude_deg=host[0], longitude_deg=host[1])
    plan = make_plan(entry["preset"], access="ideal", ground=ground, epoch_s=1_000_000.0, time_scale=60.0)
    centre = ground.centre(preset_named(entry["preset"], 1))
    plan = dataclasses.replace(plan, preset_version=1, centre=centre)  # of the page
    return plan, clock_of(plan)


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("entry", MOVES, ids=lambda entry: f"{entry['preset']} {entry['time_s']:g} s")
def test_moves_are_those_of_the_vectors(entry):
    plan, clock = clock_by_code(entry)
    assert list(clock.moves(1_000_000.0 + entry["time_s"] / 60.0)) == entry["moves"]
    assert list(page.moves(entry["preset"], host_of(entry), entry["time_s"])) == entry["moves"]
    assert list(plan.centre) == entry["centre"] == list(sky_of(plan).centre)
    if page.PRESETS[entry["preset"]][2]:
        assert list(page.centre(entry["preset"], host_of(entry))) == entry["centre"]


def test_starlink_a_after_an_hour_is_as_the_page_says():
    (entry,) = [one for one in MOVES if one["says"] == "the page's example"]
    assert entry["moves"] == [14, 3]
    assert [int(3600 // period_s) for period_s in page.periods_s("starlink-a")] == [13, 3]
