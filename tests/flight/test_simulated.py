"""Constellations some or all of whose satellites are in C: values survive the moves of the box, a plane that dies, and
evictions, and every byte is accounted for.
"""

from __future__ import annotations

import random

import pytest
from tests.flight.machine import FlightMachine
from tests.protocol.client.test_strangers import after_a_plane_died
from tests.protocol.exchanged import PayloadExchanger
from tests.protocol.strangers import Sky, Stranger, authority

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.protocol.auth import Authority
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.client.transfer import Striping, ValueInfo
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.satellite.machine import SatelliteMachine
from skymemory.protocol.satellite.overload import Lateness
from skymemory.protocol.satellite.state import EvictionConfig, SatelliteConfig
from skymemory.protocol.wire import Op
from skymemory.transport.simulated import SimulatedClient, SimulatedConstellation

CENTRE = SatelliteId(2, 4)


def half(
    config: SatelliteConfig, sky: SkyMap, clock: MoveClock, now_s: float, lateness: Lateness | None
) -> SatelliteMachine:
    """In C every other satellite."""
    in_c = (config.address.plane + config.address.slot) % 2
    kind = FlightMachine if in_c else SatelliteMachine
    return kind(config, sky, clock, now_s, lateness)  # type: ignore[return-value]


MACHINES = {"c": FlightMachine, "half": half}


def constellation(kind: str, **more: object) -> SimulatedConstellation:
    sky = SkyMap(Torus(5, 9), CENTRE)
    clock = MoveClock(slot_period_s=3.0, plane_period_s=13.0, time_scale=1.0)
    memory_bytes = int(more.pop("memory_bytes", 1 << 20))  # type: ignore[call-overload]
    return SimulatedConstellation(
        sky,
        memory_bytes,
        clock,
        lambda one, other: 0.002,
        machine=MACHINES[kind],
        **more,  # type: ignore[arg-type]
    )


def write(client: SimulatedClient, values: dict[bytes, tuple[bytes, ValueInfo]], count: int, seed: int) -> None:
    drawn = random.Random(seed)
    for _ in range(count):
        key, value, kept = drawn.randbytes(32), drawn.randbytes(drawn.randrange(1, 9000)), list[ValueInfo]()
        done = client.write(key, value, Striping(500, 3, 10), meanwhile=kept.append)
        assert done.ok, done.report
        values[key] = value, kept[0]


def read(client: SimulatedClient, values: dict[bytes, tuple[bytes, ValueInfo]]) -> int:
    """How many values are read whole; none may be wrong."""
    found = 0
    for value, info in values.values():
        out = bytearray(len(value))
        done = client.read(info, memoryview(out))
        if done.ok:
            assert out == value
            found += 1
    return found


def check_ledgers(simulated: SimulatedConstellation) -> None:
    for satellite in simulated.satellites.values():
        figures = satellite.store.ledger.figures()
        came = figures.pop("bytes_set") + figures.pop("bytes_migrated_in")
        assert came == satellite.store.used_bytes + sum(figures.values())


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("by", [None, authority()], ids=["no MACs", "signed answers"])
@pytest.mark.parametrize("kind", MACHINES)
def test_values_survive_moves(kind: str, by: Authority | None) -> None:
    simulated = constellation(kind, authority=by)
    client = simulated.connect(ClientConfig(ground=7, authority=by))
    values: dict[bytes, tuple[bytes, ValueInfo]] = {}
    for move in range(4):
        write(client, values, 4, seed=move)
        simulated.settle(simulated.now_s + 4.0)
        assert read(client, values) == len(values)
    assert sum(each.counters.get("chunks_migrated_out") for each in simulated.satellites.values()) > 50
    check_ledgers(simulated)


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("by", [None, authority()], ids=["no MACs", "signed answers"])
@pytest.mark.parametrize("kind", MACHINES)
def test_a_plane_dies_and_comes_back(kind: str, by: Authority | None) -> None:
    simulated = constellation(kind, authority=by, eviction=EvictionConfig.of(["gossip", "periodic", "migration"]))
    client = simulated.connect(ClientConfig(ground=7, authority=by))
    values: dict[bytes, tuple[bytes, ValueInfo]] = {}
    write(client, values, 10, seed=1)
    simulated.kill_plane(3)
    simulated.settle(simulated.now_s + 2.0)
    read(client, values)
    simulated.revive_plane(3)
    simulated.settle(simulated.now_s + 20.0)
    values.clear()
    write(client, values, 10, seed=2)
    assert read(client, values) == len(values)
    check_ledgers(simulated)


@pytest.mark.parametrize("kind", MACHINES)
def test_payloads_that_were_exchanged_are_refused_and_sent_again(kind: str) -> None:
    exchanger, by = PayloadExchanger(0.2), authority()
    simulated = constellation(kind, authority=by, faults=exchanger)
    client = simulated.connect(ClientConfig(ground=7, authority=by))
    values: dict[bytes, tuple[bytes, ValueInfo]] = {}
    for move in range(2):
        write(client, values, 4, seed=move)
        simulated.settle(simulated.now_s + 4.0)
        assert read(client, values) == len(values)
    refused = sum(each.counters.get("packets_refused") for each in simulated.satellites.values())
    assert min(exchanger.count[op] for op in (Op.SET, Op.MIGRATE)) > 5 and refused == exchanger.count.total()
    check_ledgers(simulated)


@pytest.mark.parametrize("kind", MACHINES)
def test_full_memories_evict(kind: str) -> None:
    simulated = constellation(kind, memory_bytes=9_000, eviction=EvictionConfig.of(["gossip"]))
    client = simulated.connect(ClientConfig(ground=7))
    values: dict[bytes, tuple[bytes, ValueInfo]] = {}
    write(client, values, 25, seed=3)
    simulated.settle(simulated.now_s + 5.0)
    assert 0 < read(client, values) < len(values)
    assert sum(each.counters.get("chunks_evicted") for each in simulated.satellites.values()) > 0
    check_ledgers(simulated)


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("kind", MACHINES)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_stranger_on_the_ports_of_dead_satellites_is_not_believed(kind: str, replicas: int) -> None:
    """Satellites in C, or some of them, sign their answers, and a client takes no others."""

    def sky() -> Sky:
        return Sky(SkyMap(Torus(5, 9), CENTRE), authority(), replicas, machine=MACHINES[kind])

    stranger, haunted = Stranger(), sky()
    alone, beset = after_a_plane_died(sky(), None), after_a_plane_died(haunted, stranger)
    assert stranger.sent > 100 and alone.unreadable == beset.unreadable == 0
    assert beset.reads_s <= 2 * alone.reads_s and beset.found == alone.found
    assert haunted.counted("packets_refused") > 50
