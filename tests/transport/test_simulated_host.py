"""A simulated host with a processor: work takes its time, pauses are gaps, buffers end, and a seed gives one run."""

from __future__ import annotations

import pytest

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.client.transfer import Striping
from skymemory.protocol.clock import STRATEGY_CODES, MoveClock, SkyMap
from skymemory.protocol.messages import unpack_housekeeping
from skymemory.protocol.wire import Op
from skymemory.transport.faults import FaultInjector
from skymemory.transport.simulated import SimulatedConstellation
from skymemory.transport.simulated_host import HostLimits, WorkCosts, split_evenly

TORUS = Torus(3, 5)
SKY = SkyMap(TORUS, SatelliteId(1, 2))
HERE = SatelliteId(1, 2)
LINK_S = 0.004


class Sky:
    """Three hosts, a plane each, and a ground host with a beam to each satellite."""

    def __init__(self, clock: MoveClock | None = None, faults: FaultInjector | None = None, **limits: object) -> None:
        limited = HostLimits(split_evenly(TORUS.satellites(), 3), **limits)
        self.sim = SimulatedConstellation(SKY, 8 << 20, clock, lambda sender, receiver: LINK_S, faults, limits=limited)
        self.ground = self.sim.connect(ClientConfig(7, "los", expected_rtt_s=2 * LINK_S, give_up_s=60.0))
        self.sim.settle(1.0)

    def ask_s(self, satellite: SatelliteId = HERE) -> float:
        """How long a PING takes."""
        began_s = self.sim.now_s
        number = self.ground.machine.ask(Op.PING, b"", satellite, began_s)
        assert self.ground.run([number])[number].ok
        return self.sim.now_s - began_s

    def put(self, name: int, size: int = 60_000) -> bool:
        machine = self.ground.machine
        value = bytes(size)
        number, _ = machine.put(
            name.to_bytes(32, "big"), value, Striping(6144, STRATEGY_CODES["rotation_hop"], 9), self.sim.now_s
        )
        return self.ground.run([number])[number].ok


def test_work_takes_as_long_as_it_costs_by_the_share_of_a_core():
    costs = WorkCosts().times(100.0)
    of_one = costs.wake_s * 2 + costs.run_s + costs.control_s + costs.packed_s + costs.batch_s + costs.packet_s
    for share in (1.0, 0.5):
        assert Sky(costs=costs, share=share).ask_s() == pytest.approx(2 * LINK_S + of_one / share, rel=0.01)


def test_satellites_of_one_host_wait_for_each_other_and_those_of_another_do_not():
    costs = WorkCosts().times(100.0)
    alone_s = Sky(costs=costs).ask_s()
    for others, waits in ((1, True), (2, False)):
        sky = Sky(costs=costs)
        for slot in range(5):
            if slot != HERE.slot or others != HERE.plane:
                sky.ground.machine.ask(Op.PING, b"", SatelliteId(others, slot), sky.sim.now_s)
        sky.sim.flush()
        assert (sky.ask_s() > 2 * alone_s - 2 * LINK_S) == waits


def test_a_paused_host_answers_when_it_goes_on():
    sky = Sky()
    for host in sky.sim.hosts:
        host.set_share(0.0, sky.sim.now_s)
    number = sky.ground.machine.ask(Op.PING, b"", HERE, sky.sim.now_s)
    sky.sim.settle(11.0)
    busy_s = [host.busy_s for host in sky.sim.hosts]
    assert sky.ground.machine.next_event() is None
    sky.sim.settle(14.0)
    assert [host.busy_s for host in sky.sim.hosts] == busy_s
    for host in sky.sim.hosts:
        host.set_share(1.0, sky.sim.now_s)
    finished = sky.ground.run([number])[number]
    assert finished.ok and 14.0 < sky.sim.now_s < 14.1


def test_a_pause_in_the_middle_of_work_only_puts_it_off():
    costs = WorkCosts().times(10_000.0)
    sky = Sky(costs=costs, share=1.0)
    plain_s = sky.ask_s()
    sky.sim.settle(sky.sim.now_s + 5.0)
    number = sky.ground.machine.ask(Op.PING, b"", HERE, sky.sim.now_s)
    began_s = sky.sim.now_s
    sky.sim.settle(began_s + LINK_S + 0.1)
    for share, after_s in ((0.0, 3.0), (1.0, 0.0)):
        for host in sky.sim.hosts:
            host.set_share(share, sky.sim.now_s)
        sky.sim.settle(sky.sim.now_s + after_s)
    sky.ground.run([number])
    assert sky.sim.now_s - began_s == pytest.approx(plain_s + 3.0, abs=0.5)


def test_a_full_buffer_loses_what_comes():
    sky = Sky(buffer_bytes=20_000)
    for host in sky.sim.hosts:
        host.set_share(0.0, sky.sim.now_s)
    machine = sky.ground.machine
    machine.put(bytes(32), bytes(600_000), Striping(6144, STRATEGY_CODES["rotation_hop"], 9), sky.sim.now_s)
    sky.sim.settle(sky.sim.now_s + 0.5)
    assert sum(host.lost_bytes for host in sky.sim.hosts) > 300_000
    assert Sky().put(1) and not sum(host.lost_bytes for host in Sky().sim.hosts)


def test_a_host_knows_how_late_it_is_and_says_nothing_of_it_when_it_is_not():
    sky = Sky()
    assert sky.sim.hosts[1].lateness.at(sky.sim.now_s) < 0.01
    for host in sky.sim.hosts:
        host.set_share(0.0, sky.sim.now_s)
    sky.sim.settle(6.0)
    for host in sky.sim.hosts:
        host.set_share(1.0, sky.sim.now_s)
    sky.sim.settle(6.01)
    assert 4.0 < sky.sim.hosts[1].lateness.at(sky.sim.now_s) < 5.1


def test_a_clock_that_stood_still_is_set():
    clock = MoveClock(slot_period_s=10.0, time_scale=1.0)
    sky = Sky(clock)
    sky.sim.settle(5.0)
    for host in sky.sim.hosts:
        host.fall_behind(40.0)
    sky.sim.now_s = 45.0  # no satellite moved meanwhile
    sky.sim.settle(46.0)
    assert all(machine.moves == clock.moves(46.0) for machine in sky.sim.satellites.values())


def test_the_dead_answer_nothing_and_come_back_empty():
    sky = Sky()
    assert sky.put(1)
    held = {here: len(machine.store) for here, machine in sky.sim.satellites.items()}
    assert held[HERE]
    sky.sim.kill(HERE)
    number = sky.ground.machine.ask(Op.PING, b"", HERE, sky.sim.now_s)
    sky.sim.settle(sky.sim.now_s + 2.0)
    assert sky.ground.machine.next_event() is None
    sky.sim.revive(HERE)
    finished = sky.ground.run([number])[number]
    assert finished.ok and unpack_housekeeping(finished.body)["chunks_held"] == 0


def test_one_that_dies_and_comes_back_while_its_socket_is_read_goes_on_with_what_comes_then():
    sky = Sky(costs=WorkCosts().times(10_000.0))
    for _ in range(3):
        sky.ground.machine.ask(Op.PING, b"", HERE, sky.sim.now_s)
    sky.sim.settle(sky.sim.now_s + LINK_S + 0.06)
    sky.sim.settle(sky.sim.hosts[1].wake_s - 1e-6)
    sky.sim.kill(HERE)
    sky.sim.revive(HERE)
    assert sky.ask_s() < 60.0


def test_a_seed_gives_the_same_run():
    def run() -> list[object]:
        sky = Sky(MoveClock(slot_period_s=1.0, time_scale=1.0), FaultInjector(0.05, 0.05, 0.1, 0.02, seed=3), share=0.1)
        stored = [sky.put(name) for name in range(5)]
        sky.sim.settle(sky.sim.now_s + 5.0)
        return [stored, *((host.busy_s, host.work, host.lost_bytes) for host in sky.sim.hosts)]

    assert run() == run()


def test_a_share_is_a_share():
    with pytest.raises(InvalidInput, match=r"share 1\.5 of a core: expected 0"):
        Sky().sim.hosts[0].set_share(1.5, 1.0)


@pytest.mark.parametrize(("hosts", "planes"), [(1, [3]), (2, [2, 1]), (3, [1, 1, 1])])
def test_planes_are_dealt_to_hosts_whole(hosts, planes):
    shares = split_evenly(TORUS.satellites(), hosts)
    assert [len({one.plane for one in share}) for share in shares] == planes
    assert sorted(one for share in shares for one in share) == sorted(TORUS.satellites())
