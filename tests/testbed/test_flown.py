"""Shells of real satellites, with gaps, flown by plans: in virtual time and as processes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.constellation import synthetic

from skymemory.constellation.clustering import cluster
from skymemory.constellation.presets import FlownShell
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.testbed import supervisor
from skymemory.testbed.connect import host_spec, store_of
from skymemory.testbed.control import confirm_all_answer, rotate
from skymemory.testbed.element_files import flown_shell
from skymemory.testbed.plan import ConstellationPlan, Ground, local_hosts, make_plan
from skymemory.testbed.plan_file import from_json, to_json
from skymemory.testbed.run_directory import RunDirectory
from skymemory.testbed.virtual import VirtualConstellation

STARLINK = Path(__file__).parents[3] / "shared/data/tle/starlink-2025-09-22.tle"
GAPS = tuple(SatelliteId(*gap) for gap in ((0, 5), (1, 2), (1, 3), (3, 0)))
SMALL = FlownShell("made", 1.75e9, 6, 550e3, 53.0, (0.1, 1.7, 3.2, 4.8), (0.1, -0.4, 0.2, 0.3), GAPS)
VALUES = {bytes([number]) * 32: random.Random(number).randbytes(20_000 * number) for number in range(1, 6)}


def check_flight(plan: ConstellationPlan, least_moves: int, pause_s: float) -> VirtualConstellation:
    """Stores, and reads until the box has moved that often: all hits, nothing on a gap."""
    sky = VirtualConstellation(plan)
    store = sky.store(index=SharedIndex())
    assert all(store.put_many(list(VALUES.items())))
    reads = 0
    while sum(sky.clock.moves(sky.simulated.now_s)) < least_moves:
        found = store.get_many(list(VALUES))
        assert [bytes(value) for value in found if value is not None] == list(VALUES.values()), sky.simulated.now_s
        reads += 1
        sky.simulated.settle(sky.simulated.now_s + pause_s)
    machines = sky.simulated.satellites
    assert reads > least_moves / 2 and not plan.torus.gaps & machines.keys() and len(machines) == plan.torus.size
    assert sum(machine.counters.get("chunks_migrated_out") for machine in machines.values()) > 0
    return sky


def test_a_small_shell_with_gaps_keeps_its_values_as_the_box_moves() -> None:
    plan = make_plan(SMALL.preset(), access="ideal", time_scale=400.0, servers=9)
    sky = check_flight(plan, 12, 1.0)
    crowded = [
        servers
        for moves in ((r, p) for r in range(6) for p in range(4))
        for servers in [sky.simulated.sky.servers_at(3, 9, (0, 0), moves)]
        if len(set(servers)) < 9
    ]
    assert crowded, "two servers of a value on one satellite, and read all the same"


def test_a_plan_holds_all_that_rebuilds_it_and_bad_shells_are_refused() -> None:
    plan = make_plan(SMALL.preset(), hosts=local_hosts(SMALL.preset(), 2, 30_000), access="ideal")
    text = to_json(plan)
    assert from_json(text) == plan and from_json(text).constellation.shell == plan.constellation.shell
    assert len(plan.addresses()) == 20 == sum(len(host_spec(plan, host).mine) for host in plan.hosts)
    assert not set(GAPS) & plan.addresses().keys()
    assert len(set(plan.addresses().values())) == 20 and plan.memory_bytes == 20 * plan.memory_per_satellite_bytes
    for change, message in (
        ({"gaps": [[9, 9]]}, "a gap outside of 4 planes of 6 slots"),
        ({"gaps": "none"}, r"gaps: expected a list of \[plane, slot\]"),
        ({"nodes_rad": [0.1, "x"]}, "nodes_rad: expected a list of numbers"),
        ({"offsets_slots": [0.1]}, "plane_offsets has 1 numbers"),
        ({"altitude_m": 1.0}, "altitude_m is 1: expected a low Earth orbit"),
    ):
        fields = json.loads(text)
        fields["flown"] |= change
        with pytest.raises(InvalidInput, match=message):
            from_json(json.dumps(fields))
    apart = tuple(SatelliteId(plane, slot) for plane in (0, 2) for slot in range(6))
    with pytest.raises(InvalidInput, match="its links do not join all 12 satellites"):
        replace(SMALL, gaps=apart).preset()
    assert len(replace(SMALL, gaps=apart).linked().gaps) == 18, "of two planes without links between them one flies"


def test_element_sets_of_a_shell_with_gaps_become_its_plan() -> None:
    elements, made, _ = synthetic.shell(random.Random(8), 12, 16, 5, gap_share=0.15)
    found = cluster(elements).shells[0]
    preset = found.flown("a file").preset()
    assert preset.torus.gaps >= found.torus.gaps and len(made.gaps) == len(found.torus.gaps)
    assert preset.shell == found.shell() and preset.epoch_unix_s == found.epoch_unix_s
    check_flight(make_plan(preset, time_scale=200.0, ground=Ground(30.0, 10.0, 15.0, "climbing")), 4, 1.5)


def test_a_walker_star_is_refused() -> None:
    elements, _, _ = synthetic.shell(
        random.Random(0), 12, 24, 0, gap_share=0.2, star=True, altitude_m=1200e3, inclination_deg=87.9, slot_jitter=0.1
    )
    preset = cluster(elements).shells[0].flown("x").preset()
    assert preset.torus.seam and preset.shell.pattern == "star"
    with pytest.raises(InvalidInput, match=r"x is a Walker star: .* expected a Walker delta, or a scenario"):
        make_plan(preset)


@pytest.mark.slow
def test_its_processes_are_its_satellites_and_no_others(tmp_path: Path) -> None:
    directory, preset = RunDirectory(tmp_path / "run"), SMALL.preset()

    def plan_at(ports: object) -> ConstellationPlan:
        return make_plan(preset, hosts=local_hosts(preset, 2, ports), access="ideal", servers=9, delay_scale=0.0)  # type: ignore[arg-type]

    started = supervisor.start_on_free_ports(directory, plan_at, preset.torus.cells, confirm=confirm_all_answer)
    try:
        store = store_of(started.plan, index=SharedIndex(directory.index_path))
        assert all(store.put_many(list(VALUES.items())))
        for step in ((1, 0), (0, 1), (2, -1)):
            report = rotate(started.plan, *step)
            assert report.complete
            assert [bytes(value or b"") for value in store.get_many(list(VALUES))] == list(VALUES.values())
        store.close()
    finally:
        supervisor.stop(directory)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 4])
def test_the_largest_shells_of_starlink_fly(number: int) -> None:
    """1,359 satellites with 3,690 gaps, 1,212 with 84, 1,146 with 534; an hour of flight in a minute."""
    if not STARLINK.exists():
        pytest.skip(f"no {STARLINK.name} beside this checkout")
    preset = flown_shell(STARLINK, number, skip_bad=False)
    assert preset.torus.size == {1: 1359, 2: 1212, 4: 1146}[number]
    plan = make_plan(preset, time_scale=60.0, ground=Ground(gateway="climbing"))
    assert plan.access == "hybrid" and from_json(to_json(plan)) == plan
    check_flight(plan, 15, 1.0)
    with pytest.raises(InvalidInput, match=r"no shell 11 in .*: expected 1 to 10, as `skymemory shells"):
        flown_shell(STARLINK, 11, skip_bad=False)
