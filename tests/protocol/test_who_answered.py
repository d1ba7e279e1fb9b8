"""Who says that a satellite cannot be reached is not that satellite."""

from __future__ import annotations

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.client import ClientConfig
from skymemory.protocol.motion import MoveClock
from skymemory.protocol.wire import Op
from skymemory.transport.simulated import SimulatedConstellation


def test_a_neighbour_with_a_wrong_clock_does_not_speak_for_all_it_cannot_reach(world):
    """All packets for the dead plane end at it."""
    liar = SatelliteId(1, 9)
    sky = world("gateway")
    sky.sim = SimulatedConstellation(
        sky.sky, 1 << 20, delay_s=lambda *_: sky.link_s, clocks={liar: MoveClock(pushed=(5, 0))}
    )
    sky.host = sky.sim.connect(ClientConfig(7, "gateway", expected_rtt_s=2 * sky.link_s))
    dead = [SatelliteId(0, slot) for slot in (3, 6, 9, 12, 15)]
    sky.sim.kill_plane(0)
    failures = []
    for _ in range(4):
        for satellite in dead:
            failures.append(sky.ask(Op.PING, b"", satellite).report.failure)
            assert sky.host.machine.moves(sky.now_s) == (0, 0)
        sky.settle(2.0)
    assert failures.count("unreachable") > 5
