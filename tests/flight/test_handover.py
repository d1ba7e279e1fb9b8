"""Handovers, gossip, checks, sweeps and repair in C against Python: every packet, timer and counter of a constellation.

All satellites are both machines at once (``shadow``): what one of them did otherwise ends the run.
"""

from __future__ import annotations

import random

import pytest
from tests.flight.machine import compiler
from tests.flight.shadow import Divergence, ShadowMachine

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.client.transfer import Striping
from skymemory.protocol.clock import STRATEGY_CODES, MoveClock, SkyMap
from skymemory.protocol.messages import pack_moves
from skymemory.protocol.satellite.state import EvictionConfig
from skymemory.protocol.wire import Op
from skymemory.transport.faults import FaultInjector
from skymemory.transport.simulated import SimulatedConstellation

TORUS = Torus(5, 9)
CENTRE = SatelliteId(2, 4)
STRATEGIES = ("rotation", "rotation_hop", "cost", "hop")


def a_week(seed: int, replicas: int, policies: tuple[str, ...], memory_bytes: int, steps: int) -> dict[str, int]:
    """Random puts, reads, moves, deaths and lost datagrams; the sums of all counters."""
    dice = random.Random(seed)
    eviction = EvictionConfig.of(policies, 5.0, replicas)
    faults = FaultInjector(seed=seed, loss=0.01, duplicate=0.01)
    clock = MoveClock(0.0, 11.0, 17.0, 1.0)
    sim = SimulatedConstellation(
        SkyMap(TORUS, CENTRE),
        memory_bytes,
        clock,
        lambda sender, receiver: 0.004,
        faults,
        eviction=eviction,
        machine=ShadowMachine,  # type: ignore[arg-type]
    )
    host = sim.connect(ClientConfig(7, "los", expected_rtt_s=0.008))
    infos, pushed = [], (0, 0)
    for _ in range(steps):
        what = dice.random()
        if what < 0.5 or not infos:
            key = dice.randrange(24).to_bytes(32, "big")
            value = dice.randbytes(dice.randrange(1, 12_000))
            how = Striping(1000, STRATEGY_CODES[dice.choice(STRATEGIES)], dice.choice((4, 9)), replicas)
            number, info = host.machine.put(key, value, how, sim.now_s)
            host.run([number])
            infos.append(info)
        elif what < 0.75:
            info = dice.choice(infos)
            out = bytearray(info.value_bytes)
            host.run([host.machine.get(info, memoryview(out), sim.now_s, replicas)])
        elif what < 0.85:
            pushed = pushed[0] + dice.randrange(-2, 3), pushed[1] + dice.randrange(-1, 2)
            host.run([host.machine.ask(Op.ADVANCE, pack_moves(*pushed), CENTRE, sim.now_s)])
        elif what < 0.9:
            dead = SatelliteId(dice.randrange(5), dice.randrange(9))
            sim.kill(dead)
            sim.settle(sim.now_s + dice.choice((0.5, 3.0)))
            sim.revive(dead)
        else:
            sim.settle(sim.now_s + dice.choice((0.2, 1.0, 6.0)))
    sim.settle(sim.now_s + 6.0)
    counted: dict[str, int] = {}
    for satellite in sim.satellites.values():
        satellite.compare_all(sim.now_s)  # type: ignore[attr-defined]
        for name, count in satellite.counters.as_dict().items():
            counted[name] = counted.get(name, 0) + count
    return counted


@pytest.mark.brief("1-policies0-7000")
@pytest.mark.parametrize(
    ("replicas", "policies", "memory_bytes"),
    [
        (1, ("gossip", "periodic", "migration"), 7_000),
        (2, ("gossip-plane", "periodic", "migration"), 12_000),
    ],
)
def test_moves_deaths_and_full_memories(replicas, policies, memory_bytes):
    compiler()
    counted = a_week(1, replicas, policies, memory_bytes, 24)
    for name in ("chunks_migrated_out", "chunks_evicted", "questions_asked"):
        assert counted[name] > 0, name
    assert replicas > 1 or counted["notices_sent"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2, 8))
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_many_moves_deaths_and_full_memories(seed, replicas):
    compiler()
    policies = (("gossip", "periodic", "migration"), ("gossip-plane", "migration"), ("periodic",))[seed % 3]
    a_week(seed, replicas, policies, 7_000 * (1 + seed % 4), 150)


@pytest.mark.brief()
@pytest.mark.timeout(120)
def test_reads_end_where_a_copy_is_of_another_version():
    """One that was passed over once left its read with no request in flight, without a limit."""
    compiler()
    a_week(1, 2, ("gossip-plane", "migration"), 14_000, 60)


def test_a_difference_is_noticed():
    compiler()
    sim = SimulatedConstellation(SkyMap(TORUS, CENTRE), 1 << 20, machine=ShadowMachine)  # type: ignore[arg-type]
    both = sim.satellites[CENTRE]
    both.python.counters.add("chunks_purged")  # type: ignore[attr-defined]
    with pytest.raises(Divergence, match="chunks_purged"):
        both.compare_all(1.0)  # type: ignore[attr-defined]
