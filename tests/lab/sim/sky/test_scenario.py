"""Scenarios: what the file may say, what is refused, the same figures however they are computed, nothing below the
bound.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.constellation import synthetic

from skymemory.cli.main import main
from skymemory.constellation.orbit import Shell
from skymemory.constellation.presets import Preset
from skymemory.constellation.torus import SatelliteId
from skymemory.constellation.visibility import elevations_deg
from skymemory.errors import InvalidInput
from skymemory.testbed.connect import clock_of, sky_of
from skymemory.units import SPEED_OF_LIGHT_M_S, parse_rate
from skymemory_lab.sim.sky import Scenario, physical, run, scenario_named, shipped
from skymemory_lab.sim.sky.bound import lower_bound_s
from skymemory_lab.sim.sky.run import VirtualConstellation, run_cell
from skymemory_lab.sim.sky.scenario import StarGround

TLE = Path(__file__).parents[5] / "shared/data/tle/oneweb-2025-08-01.tle"
STARLINK = TLE.with_name("starlink-2025-09-22.tle")
TRACE = Path(__file__).parents[5] / "shared/data/traces/conversation_trace.jsonl"
SMALL = """
duration = "20s"
[shell]
planes = 12
slots = 10
altitude_km = 1200
inclination_deg = 53
phase = 5
[[ground]]
name = "berlin"
lat = 52.5
lon = 13.4
[links]
up = "300Mbit"
down = "1.2Gbit"
isl = "20Gbit"
[placement]
servers = 4
[workload]
rate = 1.0
keys = 4
size = ["24KiB", "60000"]
"""


def scenario(text: str = "", before: str = "") -> Scenario:
    return Scenario.of(tomllib.loads(before + SMALL + text))


def figures(one: Scenario) -> dict[str, Any]:
    (cell,) = one.cells()
    return run_cell(cell).figures


# --- What it says ---


def test_units_and_defaults() -> None:
    one = scenario('[memory]\nper_satellite = "2MiB"\n', 'start = "90min"\n')
    assert (one.duration_s, one.start_s, one.plan.memory_per_satellite_bytes) == (20.0, 5400.0, 2 << 20)
    assert one.links.down_bit_s == parse_rate("1.2Gbit") and one.workload.sizes == (24 * 1024, 60_000)
    shell = one.preset.shell
    assert (shell.planes, shell.slots_per_plane, shell.phase, shell.model) == (12, 10, 5, "j2")
    assert one.plan.epoch_s == -5400.0 and one.plan.time_scale == 1.0


def test_a_start_may_be_a_moment() -> None:
    for text in ("start = 2025-01-01T06:00:00Z\n", 'start = "2025-01-01T06:00:00"\n'):
        assert scenario(before=text).start_s == 6 * 3600.0


def test_outages_count_from_the_start() -> None:
    one = scenario('[[links.outage]]\nlink = "beams"\nfrom = 5\nto = 9\n', 'start = "1h"\n')
    assert one.plan.links is not None
    (outage,) = one.plan.links.outages
    assert (outage.from_s, outage.to_s) == (3605.0, 3609.0)
    assert all(one.plan.links.factor("up", (), at_s) == 1.0 for at_s in (3604.9, 3609.0))


def test_a_sweep_is_a_product_by_dotted_paths() -> None:
    one = scenario('[sweep]\nplacement.servers = [4, 9]\n"links.down" = ["1Gbit", "2Gbit"]\nground.0.lat = [10]\n')
    cells = one.cells()
    assert [dict(cell.swept)["placement.servers"] for cell in cells] == [4, 4, 9, 9]
    assert [cell.scenario.links.down_bit_s for cell in cells] == [1e9, 2e9, 1e9, 2e9]
    assert {cell.scenario.ground[0].latitude_deg for cell in cells} == {10.0}
    assert len({cell.key("1") for cell in cells}) == 4 and cells[0].key("1") != cells[0].key("2")


def test_every_shipped_scenario_is_valid() -> None:
    assert set(shipped()) >= {"two-continents", "access-modes", "rain-and-outages", "shells"}
    for name in shipped():
        assert scenario_named(name).title and scenario_named(name).cells()


def test_a_workload_is_the_same_for_a_seed_and_other_for_another() -> None:
    one, same, other = scenario(), scenario(), scenario("seed = 1\n")
    assert one.operations() == same.operations() != other.operations()
    two = scenario('[[ground]]\nname = "oslo"\nlat = 59.9\nlon = 10.7\n')
    assert [work for work in two.operations() if work[0].host == 0] == one.operations()


# --- What it refuses ---


@pytest.mark.parametrize(
    ("text", "before", "says"),
    [
        ("", "duratoin = 1\n", "scenario: duratoin: unknown setting; did you mean 'duration'?"),
        ("", 'engine = "machine"\n', "did you mean 'machines'"),
        ("", 'start = "2025-13-01"\n', "expected a moment in UTC"),
        ("", "mask = 95\n", "elevation mask 95"),
        ("szie = 1\n", "", "workload: szie: unknown setting; did you mean 'size'?"),
        ("put = 1.5\n", "", "put: 1.5: expected a share"),
        ("[memory]\nserver_time = '1ms'\n", "", "no effect with engine"),
        ("[memory]\nper_satellite = 64\n", "", "hold no chunk"),
        ("[[ground]]\nname = 'berlin'\n", "", "two hosts share a name"),
        ("[[ground]]\nname = 'x'\n", "", "x: expected lat and lon"),
        ("[[ground]]\nname = 'x'\nlat = 91\nlon = 0\n", "", "latitude 91"),
        ("[[ground]]\nname = 'x'\nlat = 1\nlon = 0\naccess = 'gatway'\n", "", "did you mean 'gateway'"),
        ("[[links.outage]]\nlink = '2,9-2,10'\nfrom = 0\nto = 1\n", "", "no satellite 2,10: expected plane 0 to 11"),
        ("[[links.outage]]\nlink = '2,1-4,1'\nfrom = 0\nto = 1\n", "", "expected one of 2,1 with 1,1, 2,0, 2,2, 3,1"),
        ("access = 'onboard'\n[[ground]]\nlat = 1\nlon = 0\n", "", "berlin is on board, where the box stands still"),
        ("[[ground]]\nname = 'x'\nlat = 1\nlon = 0\naccess = 'onboard'\n", "", "its box moves differently"),
        ("[sweep]\nlinks.dwn = [1]\n", "", "sweep: links.dwn = 1: links: dwn: unknown setting; did you mean 'down'?"),
        ("[sweep]\nplacment.servers = [1]\n", "", "placment: unknown setting; did you mean 'placement'?"),
        ("[sweep]\nground.1.lat = [1]\n", "", "no entry '1' in a list of 1"),
        ("[sweep]\nduration.x = [1]\n", "", "below a value"),
        ("[sweep]\nplacement.servers = 4\n", "", "expected a list of values"),
        ("[sweep]\nplacement.servers = [4, 500]\n", "", "servers = 500"),
        (f"[sweep]\nmask = {[*range(400)]}\nworkload.seed = {[*range(300)]}\n", "", "120000 cells"),
    ],
)
def test_bad_input_says_where_and_what(text: str, before: str, says: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        if text.startswith("access"):  # of the host that is there
            Scenario.of(tomllib.loads(SMALL.replace("[links]", f"{text}[links]")))
        scenario(text, before).cells()
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("planes", 0, "planes: 0: expected 1 or more"),
        ("slots", 0, "slots: 0: expected 1 or more"),
        ("altitude_km", 50, "expected a low Earth orbit"),
        ("inclination_deg", 190, "inclination_deg"),
        ("phase", 12, "Walker phase 12"),
        ("pattern", "dleta", "did you mean 'delta'"),
        ("preset", "starlink-a", "preset and planes given"),
        ("altitud_km", 550, "did you mean 'altitude_km'"),
    ],
)
def test_impossible_shells_are_refused(key: str, value: object, says: str) -> None:
    table = tomllib.loads(SMALL)
    table["shell"][key] = value
    with pytest.raises(InvalidInput, match=r"shell|scenario") as caught:
        Scenario.of(table)
    assert says in str(caught.value)


@pytest.mark.parametrize(("section", "key", "value"), [("workload", "rate", 0), ("links", "down", 0)])
def test_zero_rates_are_refused(section: str, key: str, value: object) -> None:
    table = tomllib.loads(SMALL)
    table[section][key] = value
    with pytest.raises(InvalidInput, match=f"{section}: {key}: 0: expected"):
        Scenario.of(table)


def test_a_place_that_sees_nothing_is_refused() -> None:
    table = tomllib.loads(SMALL)
    table["ground"][0]["lat"] = 89
    for engine in ("machines", "model"):
        with pytest.raises(InvalidInput, match=r"berlin at 89, 13\.4 sees no satellite of 12x10 above 25°"):
            run(Scenario.of({**table, "engine": engine}), way="sequence")


def test_a_fixed_box_has_no_places() -> None:
    with pytest.raises(InvalidInput, match="expected one host without lat and lon"):
        Scenario.of({"shell": {"preset": "testbed-19x5"}, "ground": [{"lat": 1.0, "lon": 2.0}]}).cells()


def test_element_sets_are_checked(tmp_path: Path) -> None:
    table = {"engine": "model", "shell": {"tle": "sky.tle"}}
    with pytest.raises(InvalidInput, match="cannot read"):
        run(Scenario.of(table, folder=tmp_path), way="sequence")
    lines = [
        "1 44713U 19074A   25265.50000000  .00001000  00000+0  80000-4 0  9990",
        "2 44713  53.0500 100.0000 0001000  90.0000 270.0000 15.06400000    19",
    ]
    (tmp_path / "sky.tle").write_text("\n".join(lines) + "\n")
    with pytest.raises(InvalidInput, match="checksum"):
        run(Scenario.of(table, folder=tmp_path), way="sequence")


def test_bad_records_and_old_elements_of_a_file(tmp_path: Path) -> None:
    table = made_of_element_sets(tmp_path)
    lines = (tmp_path / "sky.tle").read_text().splitlines()
    (tmp_path / "sky.tle").write_text("\r\n".join([*lines, *lines[:3]]) + "\r\n")
    with pytest.raises(InvalidInput, match=r"a second element set of S1 \(1\).*skip_bad = true"):
        _ = Scenario.of(table, folder=tmp_path).plan
    table["shell"] = {"tle": "sky.tle", "skip_bad": True}
    assert Scenario.of(table, folder=tmp_path).plan.torus.size == 82
    with pytest.raises(InvalidInput, match=r"start: \d+ days from the element sets of sky shell 1: expected"):
        _ = Scenario.of({**table, "start": "2025-09-01"}, folder=tmp_path).plan
    with pytest.raises(InvalidInput, match="skip_bad: no effect with planes"):
        Scenario.of({"shell": {"planes": 3, "slots": 3, "skip_bad": True}})
    # Another file of the same name, in the same process.
    (tmp_path / "sky.tle").write_text("\n".join(lines[:9]) + "\n")
    with pytest.raises(InvalidInput, match="has 0 shells"):
        _ = Scenario.of(table, folder=tmp_path).plan


def test_a_cell_that_cannot_be_run_says_which_it_is() -> None:
    one = scenario("[sweep]\nmask = [25, 89.9]\nworkload.seed = [1, 2]\n", 'engine = "model"\n')
    with pytest.raises(InvalidInput, match=r"cell 3 \(mask = 89.9, workload.seed = 2\): ground: berlin at"):
        run_cell(one.cells()[3])


def test_large_shells_need_no_ports() -> None:
    shell = {"planes": 300, "slots": 300, "phase": 7}
    assert figures(Scenario.of({"engine": "model", "shell": shell, "duration": 5}))["misses"] >= 0
    with pytest.raises(InvalidInput, match="400 planes of 300 slots: expected at most 100000 satellites"):
        Scenario.of({"engine": "model", "shell": {**shell, "planes": 400}})


def made_of_element_sets(folder: Path) -> dict[str, Any]:
    """A file of real satellites in 8 planes of 12 slots with gaps, and a scenario over them."""
    export_tle = pytest.importorskip("sgp4.exporter").export_tle
    elements, _, _ = synthetic.shell(random.Random(5), 8, 12, 3, gap_share=0.15, altitude_m=1200e3)
    lines = [line for one in elements for line in (one.name, *export_tle(one.satrec))]
    (folder / "sky.tle").write_text("\n".join(lines) + "\n")
    table = tomllib.loads(SMALL)
    table["ground"] = [{"name": "far", "lat": 52.5, "lon": 13.4}, {"name": "near", "lat": -40, "lon": -75}]
    work = {"rate": 0.05, "keys": 3, "size": 60_000}
    return {**table, "duration": 500, "shell": {"tle": "sky.tle"}, "workload": work}


@pytest.mark.brief()
@pytest.mark.parametrize("access", ["hybrid", "ideal"])
def test_real_satellites_with_gaps_fly_as_machines(access: str, tmp_path: Path) -> None:
    table = made_of_element_sets(tmp_path)
    table["ground"] = [{**host, "access": access} for host in table["ground"]]
    one = Scenario.of(table, folder=tmp_path)
    (cell,), gaps = one.cells(), one.plan.torus.gaps
    found = run_cell(cell).figures
    assert len(gaps) == 14 and one.plan.torus.most_slots == 2
    assert found["wrong_values"] == 0 and found["misses_by_reason"] == {"first use": 3}
    assert found["slot_moves"] >= 1 and found["chunks_handed_over"] > 0
    for host in found["hosts"].values():
        for part in ("p50", "p99", "mean"):
            least, took, model = (host[f"get{label}_{part}_s"] for label in ("_bound", "", "_model"))
            assert least * (1 - 1e-9) <= took <= 1.1 * least and model == pytest.approx(took, rel=0.05)
    machines = run_cell(replace_engine(one, "model").cells()[0]).figures
    assert all(machines[name] == found[name] for name in ("hits", "misses", "sets"))


def test_on_board_of_real_satellites_with_gaps(tmp_path: Path) -> None:
    table = made_of_element_sets(tmp_path)
    table["ground"] = [{**table["ground"][0], "access": "onboard"}]
    found = figures(Scenario.of(table, folder=tmp_path))
    assert found["hits"] >= 20 and found["misses_by_reason"] == {"first use": 3} and found["up_bytes"] == 0
    assert found["get_bound_p50_s"] * (1 - 1e-9) <= found["get_p50_s"] <= 1.1 * found["get_bound_p50_s"]


def test_links_of_a_run_are_as_long_as_those_of_processes(tmp_path: Path) -> None:
    """Each plane's own, over gaps those of the satellites that are not there; the model's routes are made of them."""
    for table in (made_of_element_sets(tmp_path), tomllib.loads(SMALL)):
        one = Scenario.of(table, folder=tmp_path)
        plan, shell, torus = one.plan, one.preset.shell, one.plan.torus
        world, paths = (
            VirtualConstellation(plan),
            physical._Paths(one.preset, sight=None, access="gateway", exact=False),
        )
        longer = 0
        for here in torus.satellites():
            for there in {*torus.neighbours(here)} - {here}:
                link_s = world._delay_s(here, there)
                assert link_s == shell.hop_one_way_s(torus, here, there) == world._delay_s(there, here)
                apart_m = np.linalg.norm(np.subtract(*shell.positions_m(700.0)[tuple(zip(here, there, strict=True))]))
                # Links between planes have their longest length, a link over a gap that of those beside it in a row.
                assert link_s >= 0.999 * apart_m / SPEED_OF_LIGHT_M_S
                longer += link_s > 1.5 * shell.isl_one_way_s("slot" if here.plane == there.plane else "plane")
        assert bool(longer) == bool(torus.gaps)
        for here, there in zip(torus.satellites()[::7], torus.satellites()[5::7], strict=False):
            way_s = paths.from_gateway(here, (there,), 0.0)[0][0]
            both_s = shell.route_one_way_s(torus, here, there) + shell.route_one_way_s(torus, there, here)
            assert way_s == pytest.approx(both_s / 2)


def test_the_bound_holds_where_satellites_send_around_the_earth() -> None:
    """Planes that are unevenly spread: links over the wide steps are behind the Earth, so packets take more and shorter
    ones, and are there sooner than by the route of the fewest.
    """
    nodes = tuple(math.radians(node) for node in (0.0, 178.0, 188.0, 198.0))
    shell = Shell(4, 24, 546e3, 97.6, model="j2", plane_offsets=(0.1, -0.2, 0.3, 0.0), plane_nodes_rad=nodes)
    torus, servers = shell.torus, (SatelliteId(3, 13), SatelliteId(0, 3), SatelliteId(1, 11))
    preset = Preset("uneven", "", shell, torus)
    paths, gateway = physical._Paths(preset, sight=None, access="gateway", exact=False), SatelliteId(1, 11)
    routed_s = paths.from_gateway(gateway, servers, 0.0)[0]
    least_s = paths.least_s(gateway, servers, routed_s)
    in_plane_s, over_s = shell.isl_one_way_s("slot"), [shell.plane_link_one_way_s(plane) for plane in range(4)]
    assert least_s[0] == pytest.approx(2 * in_plane_s + over_s[1] + over_s[2]) and least_s[2] == 0
    # There by the one half of the ring, back by the other: both have two links.
    assert routed_s[0] == pytest.approx(2 * in_plane_s + sum(over_s) / 2) and routed_s[0] > 2 * least_s[0]
    links = np.full((1, 1), 0)
    ways = physical.Ways("gateway", np.zeros(1), routed_s[None, :1], links + 4, links, links, 1.0, least_s[None, :1])
    bound_s = lower_bound_s(ways, physical.TransferSetting(1000), physical.LinkRates())
    assert bound_s[0] == pytest.approx(2 * least_s[0])
    assert ways.of(slice(0, 1)).least_one_way_s is not None


def replace_engine(one: Scenario, engine: str) -> Scenario:
    return Scenario.of({**one.source, "engine": engine}, folder=Path(one.folder))


# --- Walker stars ---

STAR = {"planes": 12, "slots": 16, "altitude_km": 1200, "inclination_deg": 87.9, "phase": 5, "pattern": "star"}


def over_a_star(start_s: float, duration_s: float = 60.0, **more: Any) -> Scenario:
    table = tomllib.loads(SMALL)
    return Scenario.of({**table, "shell": STAR, "start": start_s, "duration": duration_s, **more})


@pytest.mark.brief()
@pytest.mark.parametrize(("start_s", "descending"), [(3600.0, False), (7 * 3600.0, True)])
def test_a_box_over_a_star_is_on_the_branch_that_is_there(start_s: float, descending: bool) -> None:
    one = over_a_star(start_s, 900.0, workload={"rate": 0.05, "keys": 2, "size": 24_576})
    (cell,), plan, shell = one.cells(), one.plan, one.preset.shell
    found = run_cell(cell).figures
    assert isinstance(plan.ground, StarGround) and plan.ground.descending is descending
    assert found["wrong_values"] == 0 and found["misses_by_reason"] == {"first use": 2}
    assert found["slot_moves"] >= 2 and found["chunks_handed_over"] > 0
    for part in ("p50", "p99", "mean"):
        least, took, model = (found[f"get{label}_{part}_s"] for label in ("_bound", "", "_model"))
        assert least * (1 - 1e-9) <= took <= 1.2 * least and model == pytest.approx(took, rel=0.05)
    clock, sky, place = clock_of(plan), sky_of(plan), one.place(0)
    for now_s in range(0, 900, 60):
        centre, sky_s = sky.centre_at(clock.moves(now_s)), start_s + now_s
        before, after = (
            elevations_deg(shell, place, one.preset.epoch_unix_s, sky_s + more)[centre] for more in (-1.0, 1.0)
        )
        north_m = np.diff([shell.positions_m(sky_s + more)[centre][2] for more in (-1.0, 1.0)])
        # Planes are 15° apart, slots 22.5° and by half of that out of phase: 24° from straight up at most.
        assert min(before, after) > 15 and (north_m[0] < 0) is np.bool_(descending)
        servers = sky.servers_at(3, 4, clock.moves(now_s), clock.moves(now_s))
        assert max(plan.torus.hops(centre, server) for server in servers) <= 2, "none beyond the seam"


def test_a_box_that_would_reach_over_the_seam_is_refused_with_a_time_when_it_does_not() -> None:
    with pytest.raises(InvalidInput, match=r"box of 2 planes over berlin .* expected a duration of at most \d+ s"):
        over_a_star(3600.0, 13 * 3600.0)
    with pytest.raises(InvalidInput, match=r"expected start = \d+, or another") as caught:
        over_a_star(3600.0, 9 * 3600.0)
    start_s = float(str(caught.value).partition("start = ")[2].partition(",")[0])
    assert over_a_star(start_s, 9 * 3600.0).plan.torus.seam
    with pytest.raises(InvalidInput, match="would reach across"):
        over_a_star(start_s - 2, 9 * 3600.0)
    with pytest.raises(InvalidInput, match=r"box of 12 planes .* at most 3468 s, or fewer servers"):
        over_a_star(0.0, 7200.0, placement={"servers": 192})


@pytest.mark.brief()
def test_two_places_and_a_host_on_board_of_a_star() -> None:
    far = [{"name": "berlin", "lat": 52.5, "lon": 13.4}, {"name": "sydney", "lat": -33.9, "lon": 151.2}]
    found = figures(over_a_star(7 * 3600.0, 30.0, ground=far))
    assert found["misses_by_reason"] == {"first use": 4} and found["wrong_values"] == 0
    # No link crosses the seam: the way leads round, over the pole.
    assert found["hosts"]["sydney"]["get_p50_s"] > 2 * found["hosts"]["berlin"]["get_p50_s"]
    board = figures(over_a_star(7 * 3600.0, 30.0, ground=[{**far[0], "access": "onboard"}]))
    assert set(board["misses_by_reason"]) == {"first use"} and board["hits"] > 20 and board["up_bytes"] == 0


@pytest.mark.slow
@pytest.mark.skipif(not TLE.exists(), reason=f"needs {TLE.name}")
def test_oneweb_flies_beside_its_seam() -> None:
    table = {**tomllib.loads(SMALL), "shell": {"tle": TLE.name}, "duration": "3m", "placement": {"servers": 10}}
    one = Scenario.of(table, folder=TLE.parent)
    found = figures(one)
    assert one.plan.torus.seam and one.plan.torus.size == 565 and found["slot_moves"] >= 1
    assert found["wrong_values"] == 0 and found["hits"] > 100 and set(found["misses_by_reason"]) <= {"first use"}
    assert found["get_bound_p50_s"] * (1 - 1e-9) <= found["get_p50_s"] <= 1.1 * found["get_bound_p50_s"]
    with pytest.raises(InvalidInput, match=r"24.1 h from .* slots from their places in one shell"):
        _ = Scenario.of({**table, "start": "1d"}, folder=TLE.parent).plan


@pytest.mark.slow
@pytest.mark.skipif(not STARLINK.exists(), reason=f"needs {STARLINK.name}")
def test_the_largest_shell_of_starlink_flies_as_machines() -> None:
    """1,359 satellites in 99 planes of 51 slots, most of which are gaps."""
    table = {
        "shell": {"tle": STARLINK.name},
        "duration": "3m",
        "ground": [{"lat": 40.0, "lon": -75.0}],
        "links": {"up": "300Mbit", "down": "1.2Gbit", "isl": "20Gbit"},
        "workload": {"rate": 1.0, "keys": 20, "size": "640KiB"},
    }
    one = Scenario.of(table, folder=STARLINK.parent)
    found = figures(one)
    assert one.plan.torus.size == 1359 and len(one.plan.torus.gaps) == 3690
    assert found["wrong_values"] == 0 and found["hits"] > 100 and found["slot_moves"] >= 1
    assert set(found["misses_by_reason"]) <= {"first use", "being stored", "under way"}
    for way in ("get", "set"):
        for part in ("p50", "p99", "mean"):
            assert found[f"{way}_bound_{part}_s"] * (1 - 1e-9) <= found[f"{way}_{part}_s"]


@pytest.mark.slow
@pytest.mark.skipif(not TLE.exists(), reason=f"needs {TLE.name}")
def test_real_shells_by_the_model() -> None:
    table = {"engine": "model", "shell": {"tle": TLE.name}, "ground": [{"lat": 52.5, "lon": 13.4}]}
    starlink = {**table, "shell": {"tle": "starlink-2025-09-22.tle"}, "duration": 600}
    with pytest.raises(InvalidInput, match="sees no satellite of starlink-2025-09-22"):  # the largest is at 43°
        run(Scenario.of(starlink, folder=TLE.parent), way="sequence")
    starlink["ground"] = [{"lat": 40.0, "lon": -75.0}]
    (cell,) = run(Scenario.of(starlink, folder=TLE.parent), way="sequence").cells
    assert cell.figures["gets"] > 0 and cell.figures["get_p50_s"] >= cell.figures["get_bound_p50_s"]
    with pytest.raises(InvalidInput, match=r"start: 696.2 h from .* up to 25\.\d slots from their places"):
        run(Scenario.of({**starlink, "start": "29d"}, folder=TLE.parent), way="sequence")
    starlink["shell"] = {"tle": "starlink-2025-09-22.tle", "number": 99}
    with pytest.raises(InvalidInput, match=r"number 99: .* has \d+ shells"):
        run(Scenario.of(starlink, folder=TLE.parent), way="sequence")


def test_a_scenario_of_no_such_name() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'two-continents'"):
        scenario_named("two-continent")


# --- What it gives ---


def test_nothing_is_faster_than_light_and_the_model_agrees() -> None:
    one = scenario('[[ground]]\nname = "oslo"\nlat = 59.9\nlon = 10.7\naccess = "los"\n')
    (cell,) = one.cells()
    found = run_cell(cell).figures
    assert found["wrong_values"] == 0 and found["hits"] > 20 and found["misses_by_reason"] == {"first use": 4}
    assert sum(host["hits"] for host in found["hosts"].values()) == found["hits"]
    assert found["gets"] == found["hits"] and found["sets"] >= 4
    for host in found["hosts"].values():
        for way in ("get", "set"):
            for part in ("p50", "p99", "mean"):
                least, took, model = (host[f"{way}{label}_{part}_s"] for label in ("_bound", "", "_model"))
                assert least * (1 - 1e-9) <= took <= 1.2 * least and model == pytest.approx(took, rel=0.05)
    assert found["up_bytes"] > 4 * 24 * 1024 and found["down_bytes"] > 20 * 24 * 1024 and found["isl_bytes"] > 0


def test_values_follow_the_moving_box_and_are_found() -> None:
    found = figures(
        scenario(before='start = "2m"\n').__class__.of(
            tomllib.loads(SMALL) | {"duration": 700.0, "workload": {"rate": 0.05, "keys": 2, "size": 12_288}}
        )
    )
    assert found["slot_moves"] >= 1 and found["chunks_handed_over"] > 0
    assert found["misses_by_reason"] == {"first use": 2} and found["wrong_values"] == 0


def test_an_outage_is_a_miss_with_its_reason_and_packets_lost() -> None:
    found = figures(scenario('[[links.outage]]\nlink = "beams"\nfrom = 8\nto = 14\n'))
    assert found["misses_by_reason"].get("timeout", 0) + found["misses_by_reason"].get("unreachable", 0) > 0
    assert found["up_packets_lost"] > 0 and found["wrong_values"] == 0 and found["hits"] > 0


@pytest.mark.brief()
def test_small_memory_evicts_and_values_are_stored_again() -> None:
    table = tomllib.loads(SMALL)
    table |= {"memory": {"per_satellite": 65_536}, "workload": {"rate": 2.0, "keys": 12, "size": 60_000, "zipf": 0.2}}
    one = Scenario.of(table)
    found, work = figures(one), [operation for request in one.operations() for operation in request]
    reasons = found["misses_by_reason"]
    assert found["chunks_evicted"] > 0 and reasons["missing"] > 0 and found["wrong_values"] == 0
    assert set(reasons) == {"first use", "missing", "under way"} and reasons["first use"] <= 12
    assert found["sets"] == sum(operation.put for operation in work) + reasons["first use"] + reasons["missing"]


def test_the_model_counts_the_same_operations() -> None:
    machines, model = figures(scenario()), figures(scenario(before='engine = "model"\n'))
    for name in ("hits", "misses", "gets", "sets"):
        assert machines[name] == model[name]
    assert model["get_mean_s"] == pytest.approx(machines["get_mean_s"], rel=0.05)


@pytest.mark.skipif(not TRACE.exists(), reason=f"needs {TRACE.name}")
def test_a_trace_reads_what_it_stored_before() -> None:
    table = tomllib.loads(SMALL)
    table |= {"duration": 30, "workload": {"trace": TRACE.name, "requests": 12, "size": 4096}}
    one = Scenario.of(table, folder=TRACE.parent)
    work, found = one.operations(), figures(one)
    blocks = [operation.key for request in work for operation in request]
    assert found["hits"] + found["misses"] == len(blocks) and found["hits"] > 0
    assert found["sets"] == len(set(blocks)) and found["wrong_values"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped())
def test_shipped_scenarios_read_what_they_stored_and_never_below_the_bound(name: str) -> None:
    found = run_cell(scenario_named(name).cells()[-1]).figures
    assert found["hits"] > 0 and found.get("wrong_values", 0) == 0
    for way in ("get", "set"):
        for part in ("p50", "p99", "mean"):
            assert found[f"{way}_bound_{part}_s"] * (1 - 1e-9) <= found[f"{way}_{part}_s"]
    if name == "rain-and-outages":
        assert found["up_packets_lost"] > 0 and found["get_p99_s"] > 2 * found["get_bound_p99_s"]


SWEEP = '[sweep]\nplacement.servers = [2, 4]\nground.0.access = ["gateway", "los"]\n'


def test_one_and_two_workers_and_a_resumed_run_give_the_same_bytes(tmp_path: Path) -> None:
    one = scenario(SWEEP, "mask = 20\n")
    shorter = Scenario.of(tomllib.loads("mask = 20\n" + SMALL + SWEEP) | {"duration": 6})
    ran: dict[str, list[tuple[int, int]]] = {"sequence": [], "two": [], "resumed": []}
    for name, jobs in (("sequence", 1), ("two", 2)):
        run(shorter, tmp_path / name, jobs=jobs, progress=lambda *done, name=name: ran[name].append(done))
    kept = sorted((tmp_path / "two/cells").iterdir())
    assert len(kept) == 4
    kept[0].unlink()
    other = json.loads(kept[1].read_text())
    kept[1].write_text(json.dumps({**other, "figures": {**other["figures"], "hits": 7}}))
    kept[3].write_bytes(kept[3].read_bytes()[:-20])  # torn
    before = kept[2].read_bytes()
    (tmp_path / "two").rename(tmp_path / "resumed")
    results = run(shorter, tmp_path / "resumed", jobs=1, progress=lambda *done: ran["resumed"].append(done))
    assert ran["resumed"] == [(number, 4) for number in (1, 2, 3, 4)] and sum(cell.kept for cell in results.cells) == 1
    assert (tmp_path / "resumed/cells" / kept[2].name).read_bytes() == before
    for file in ("results.csv", "results.json"):
        assert (tmp_path / "resumed" / file).read_bytes() == (tmp_path / "sequence" / file).read_bytes()
    rows = (tmp_path / "sequence/results.csv").read_text().splitlines()
    assert len(rows) == 5 and rows[0].startswith("cell,placement.servers,ground.0.access,hits,misses")
    assert {cell.key("") for cell in one.cells()}.isdisjoint(cell.key("") for cell in shorter.cells())


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    path, out = tmp_path / "sky.toml", tmp_path / "out"
    path.write_text(SMALL + "[sweep]\nworkload.seed = [1, 2, 3, 4, 5, 6, 7, 8]\n")
    command = [sys.executable, "-m", "skymemory.cli.main", "simulate", str(path), "--jobs", "2", "--out"]
    process = subprocess.Popen([*command, str(out)], start_new_session=True, stdout=subprocess.DEVNULL)
    until_s = time.monotonic() + 60
    while len(list(out.glob("cells/*.json"))) < 2 and time.monotonic() < until_s:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = len(list(out.glob("cells/*.json")))
    assert 2 <= kept < 8 and not (out / "results.csv").exists()
    said = subprocess.run([*command, str(out)], capture_output=True, text=True, check=True).stdout
    assert f"{kept} of 8 cells were there already" in said
    subprocess.run([*command, str(tmp_path / "whole")], capture_output=True, check=True)
    assert (out / "results.csv").read_bytes() == (tmp_path / "whole/results.csv").read_bytes()


def test_parquet_has_the_same_rows(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow (extra 'parquet')")
    results = run(scenario(before='engine = "model"\n'), tmp_path, way="sequence")
    assert pq.read_table(tmp_path / "results.parquet").to_pylist() == results.rows()


# --- The command ---


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sky.toml"
    path.write_text('engine = "model"\n' + SMALL)
    assert main(["simulate", str(path), "--out", str(tmp_path / "out"), "--view", str(tmp_path / "view")]) == 0
    printed = capsys.readouterr()
    assert "get p50  get least" in printed.out and "misses: 3 first use" in printed.out
    assert {one.name for one in (tmp_path / "view").iterdir()} == {"sky.czml", "sky.html"}
    assert main(["simulate", str(path), "--json"]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    assert cell["hits"] > 0 and cell["hosts"]["berlin"]["hits"] == cell["hits"]
    assert main(["simulate", "--list"]) == 0 and "two-continents" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["simulate"], "expected a scenario"),
        (["simulate", "nothing.toml"], "cannot read nothing.toml"),
        (["simulate", "two-continents", "--jobs", "0"], "jobs 0: expected at least 1"),
    ],
)
def test_the_command_refuses(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err
