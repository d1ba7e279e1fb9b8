"""A scenario as CZML and as an animation: structure, positions as the shell has them, a page that needs no network."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from skyfield.functions import rot_z
from skyfield.sgp4lib import theta_GMST1982

from skymemory.constellation.visibility import host_position_m
from skymemory.errors import InvalidInput
from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.testbed.connect import clock_of, sky_of
from skymemory_lab.sim.sky import Scenario
from skymemory_lab.view.animation import data_of, page_of
from skymemory_lab.view.czml import czml_of, timeline_of, write_czml

TABLE: dict[str, Any] = {
    "duration": "10min",
    "start": "2h",
    "shell": {"planes": 12, "slots": 10, "altitude_km": 1200, "inclination_deg": 53, "phase": 5},
    "ground": [{"name": "berlin", "lat": 52.5, "lon": 13.4}, {"name": "</script>", "lat": 40, "lon": -75}],
    "placement": {"servers": 4},
}
ISO = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return Scenario.of(TABLE)


def moments(interval: str) -> tuple[float, float]:
    assert re.fullmatch(f"{ISO}/{ISO}", interval)
    first, last = (datetime.fromisoformat(one).timestamp() for one in interval.split("/"))
    return first, last


def test_czml_has_the_documented_structure(scenario: Scenario, tmp_path: Path) -> None:
    packets = json.loads(write_czml(scenario, tmp_path / "sky.czml").read_text())
    document, *others = packets
    assert document["id"] == "document" and document["version"] == "1.0"
    whole = moments(document["clock"]["interval"])
    assert whole[1] - whole[0] == 600.0 and whole[0] == scenario.preset.epoch_unix_s + 7200.0
    names = [one["id"] for one in packets]
    assert len(set(names)) == len(names)
    seen = set(names[:1])
    for one in others:
        for interval in np.atleast_1d(one.get("availability", [])):
            first, last = moments(str(interval))
            assert whole[0] <= first < last <= whole[1]
        position = one.get("position", {})
        if "cartesian" in position:
            assert len(position["cartesian"]) % 4 == 0 and all(map(math.isfinite, position["cartesian"]))
            times = position["cartesian"][::4]
            assert times == sorted(set(times)) and len(times) > position["interpolationDegree"]
            assert re.fullmatch(ISO, position["epoch"]) and position["referenceFrame"] == "FIXED"
        for reference in one.get("polyline", {}).get("positions", {}).get("references", []):
            name, _, property_name = reference.rpartition("#")
            assert name in seen and property_name == "position", "refers to a packet before it"
        seen.add(one["id"])
    assert sum("point" in one and "cartesian" in one["position"] for one in others) == 120
    assert sum("polyline" in one for one in others) >= 6


def over_the_ground(scenario: Scenario, times_s: Any, plane: int, slot: int) -> Any:
    """Earth-fixed, by skyfield's turn of TEME."""
    turned_rad = [
        theta_GMST1982(2_440_587.5, (scenario.preset.epoch_unix_s + scenario.start_s + t) / 86400)[0] for t in times_s
    ]
    found = scenario.preset.shell.positions_m(scenario.start_s + np.asarray(times_s))[:, plane, slot]
    return np.array([rot_z(-angle) @ one for angle, one in zip(turned_rad, found, strict=True)])


def test_czml_positions_are_the_shells(scenario: Scenario) -> None:
    for packet in czml_of(scenario):
        if "cartesian" not in packet.get("position", {}):
            continue
        plane, slot = map(int, re.findall(r"\d+", packet["id"]))
        table = np.array(packet["position"]["cartesian"]).reshape(-1, 4)
        assert np.abs(table[:, 1:] - over_the_ground(scenario, table[:, 0], plane, slot)).max() <= 0.05


def test_what_cesium_interpolates_is_metres_off_at_most(scenario: Scenario) -> None:
    packet = next(one for one in czml_of(scenario) if one["id"] == "satellite 3,4")
    table = np.array(packet["position"]["cartesian"]).reshape(-1, 4)
    degree = packet["position"]["interpolationDegree"]
    for t in np.linspace(0.0, 600.0, 101):
        nearest = np.sort(np.argsort(np.abs(table[:, 0] - t))[: degree + 1])
        times = table[nearest, 0]
        weights = [np.prod([(t - b) / (a - b) for b in times if b != a]) for a in times]
        found = np.array(weights) @ table[nearest, 1:]
        assert np.linalg.norm(found - over_the_ground(scenario, [t], 3, 4)[0]) < 5.0


def test_the_timeline_is_what_the_machines_use(scenario: Scenario) -> None:
    shown, plan = timeline_of(scenario), scenario.plan
    clock, sky = clock_of(plan), sky_of(plan)
    for spells in (shown.box, *shown.beams):
        assert spells[0].from_s == 0.0 and spells[-1].to_s == 600.0
        assert all(one.to_s == other.from_s and one.satellites != other.satellites for one, other in pairwise(spells))
    for t in (0.0, 250.0, 599.0):
        box = next(one for one in shown.box if one.from_s <= t < one.to_s)
        moves = clock.moves(t)
        code = STRATEGY_CODES[plan.strategy]  # type: ignore[index]
        assert box.satellites == sky.servers_at(code, plan.servers, moves, moves)
        beam = next(one for one in shown.beams[0] if one.from_s <= t < one.to_s)
        seen = plan.sight().in_sight(sky.centre_at(moves), clock.sky_s(t))
        assert beam.satellites == seen[:1]


def position(shell: dict[str, Any], plane: int, slot: int, t: float) -> list[float]:
    """The page's closed form, in Python."""
    u = 2 * math.pi * ((slot + shell["offsets"][plane]) / shell["slots"] + t / shell["period_s"])
    node = shell["nodes_rad"][plane] + shell["node_rate_rad_s"] * t
    along, across = math.cos(u), math.sin(u) * math.cos(shell["inclination_rad"])
    c, s, r = math.cos(node), math.sin(node), shell["radius_m"]
    up = r * math.sin(u) * math.sin(shell["inclination_rad"])
    return [r * (c * along - s * across), r * (s * along + c * across), up]


def test_the_page_has_the_elements_of_the_shell_and_of_the_earth(scenario: Scenario) -> None:
    data, preset = data_of(scenario), scenario.preset
    for t, plane, slot, *expected in data["check"]:
        assert math.dist(position(data["shell"], plane, slot, t), expected) < 1e-5
        assert math.dist(preset.shell.positions_m(t)[plane, slot], expected) == 0.0
    t = scenario.start_s + 300.0
    angle = data["earth"]["turned_rad"] + data["earth"]["rate_rad_s"] * t
    x, y, z = data["hosts"][0]["fixed_m"]
    here = x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle), z
    assert math.dist(here, host_position_m(scenario.place(0), preset.epoch_unix_s, t, "j2")) < 0.01


def test_the_page_is_small_whole_and_needs_no_network() -> None:
    page = page_of(Scenario.of({**TABLE, "title": "<b>&", "shell": {"preset": "starlink-a"}}))
    assert len(page.encode()) < 100_000 and "%DATA%" not in page and "<title>&lt;b&gt;&amp;</title>" in page
    assert not re.search(r"https?://|src=|import |fetch\(|@import|url\(", page)
    assert page.count("</script>") == 3, "a host's name ends no script"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_javascript_computes_the_same_positions(scenario: Scenario, tmp_path: Path) -> None:
    page = page_of(scenario)
    data = re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.S)
    code = re.search(r'<script id="orbits">(.*?)</script>', page, re.S)
    assert data and code
    moved = json.loads(data[1])
    moved["check"][0][3] += 7.0
    script = tmp_path / "check.js"
    script.write_text(f"{code[1]}\nconsole.log(JSON.stringify([selfCheck({data[1]}), selfCheck({json.dumps(moved)})]))")
    said = json.loads(subprocess.run(["node", str(script)], capture_output=True, text=True, check=True).stdout)
    assert said[0] < 1e-5 and said[1] == pytest.approx(7.0)


FAKE_PAGE = """
const made = {}, strokes = [], texts = [];
const fake = new Proxy({fillText: text => texts.push(text), stroke: () => strokes.push(1)},
  {get: (o, name) => name in o ? o[name] : () => {}, set: () => true});
const element = id => made[id] ??= {clientWidth: 800, clientHeight: 600, getContext: () => fake, value: "10",
  textContent: id === "data" ? DATA : ""};
globalThis.document = {getElementById: element};
globalThis.window = {};
let frames = 0, later = null;
globalThis.requestAnimationFrame = next => { later = next; };
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_page_draws_and_its_slider_and_clock_move(scenario: Scenario, tmp_path: Path) -> None:
    page = page_of(scenario)
    data = re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.S)
    codes = re.findall(r"<script(?: id=\"orbits\")?>(.*?)</script>", page, re.S)
    assert data and len(codes) == 2
    script = tmp_path / "page.js"
    script.write_text(
        f"const DATA = {json.dumps(data[1])};{FAKE_PAGE}{''.join(codes)}\n"
        "const drawn = strokes.length, began = made.now.textContent;\n"
        "later(performance.now() + 1000); const next = made.now.textContent;\n"
        "made.time.value = 1000; made.time.oninput(); made.play.onclick();\n"
        "console.log(JSON.stringify([drawn, began, next, made.now.textContent, made.check.textContent, texts]));"
    )
    said = subprocess.run(["node", str(script)], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    drawn, began, later, last, check, texts = json.loads(said.stdout)
    assert drawn > 30 and "berlin" in texts and check == "positions checked"
    assert [began[:16], last[:19]] == ["2025-01-01T02:00", "2025-01-01T02:10:00"] and later > began


def test_a_grid_that_is_no_orbit_has_no_view() -> None:
    with pytest.raises(InvalidInput, match="is no orbit"):
        czml_of(Scenario.of({"shell": {"preset": "testbed-19x5"}}))


@pytest.mark.parametrize("access", ["hybrid", "los", "onboard"])
def test_beams_of_the_other_ways(access: str) -> None:
    one = Scenario.of({**TABLE, "duration": 30, "ground": [{"name": "a", "access": access}]})
    shown = timeline_of(one)
    box, beams = set(shown.box[0].satellites), shown.beams[0][0].satellites
    if access == "onboard":
        assert beams == () and not any(packet["id"].startswith("host") for packet in czml_of(one))
        assert data_of(one)["hosts"][0]["fixed_m"] is None
    else:
        assert set(beams) == box if access == "los" else set(beams[1:]) <= box
