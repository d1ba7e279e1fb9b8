"""Links with rates in virtual time: exact to the packet, full without a repetition, and healed after outages."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from skymemory.constellation.links import DATAGRAM_OVERHEAD_BYTES, LinkQueue, Links
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput
from skymemory.protocol.client.machine import Finished
from skymemory.protocol.client.transfer import Striping
from skymemory.protocol.wire import Op
from skymemory.testbed.plan import make_plan
from skymemory.testbed.virtual import VirtualConstellation
from skymemory.transport.faults import FaultInjector
from skymemory.transport.simulated import SimulatedClient, SimulatedConstellation
from skymemory.transport.simulated_host import HostLimits

CHUNK = 6144
ROTATION_HOP = 3


def _sky(access: str, table: dict[str, Any] | None, faults: FaultInjector | None = None) -> VirtualConstellation:
    links = None if table is None else Links.read(table, "test")
    plan = make_plan(access=access, links=links, memory_per_satellite_bytes=64 << 20, strategy="rotation_hop")
    return VirtualConstellation(plan, faults)


def _value(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def _put_get(client: SimulatedClient, value: bytes, servers: int = 10) -> tuple[Finished, Finished]:
    stored = client.write(bytes([servers]) * 32, value, Striping(CHUNK, ROTATION_HOP, servers))
    assert stored.ok and stored.info is not None, stored
    out = bytearray(len(value))
    read = client.read(stored.info, memoryview(out))
    assert read.ok and out == value, read
    return stored, read


def test_a_question_takes_its_bytes_and_its_way() -> None:
    sky = _sky("los", {"up": "100kbit", "down": "50kbit"})
    client, there = sky.connect(), SatelliteId(2, 9)
    before = sky.simulated.bytes_sent
    number = client.machine.ask(Op.PING, b"", there, 0.0)
    sky.simulated.flush()
    asked = sky.simulated.bytes_sent - before
    finished = client.run([number])[number]
    answered = sky.simulated.bytes_sent - before - asked
    way_s = 2 * sky._delay_s(("ground", 1), there)
    sent_s = (asked + DATAGRAM_OVERHEAD_BYTES) * 8 / 100e3 + (answered + DATAGRAM_OVERHEAD_BYTES) * 8 / 50e3
    assert finished.ok and finished.report.seconds == pytest.approx(way_s + sent_s, abs=1e-9)


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("access", ["los", "gateway", "hybrid", "onboard"])
def test_large_values_fill_the_slowest_link_and_repeat_nothing(access: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sky = _sky(access, {"up": "20Mbit", "down": "20Mbit", "isl": "20Mbit" if access == "onboard" else "100Mbit"})
    client, sim, value = sky.connect(), sky.simulated, _value(3 << 20)
    assert sim.queues is not None
    busy_s: Counter[LinkQueue] = Counter()
    leaves_s = LinkQueue.leaves_s

    def counted(queue: LinkQueue, datagram_bytes: int, now_s: float, urgent: bool = False) -> float:
        busy_s[queue] += (datagram_bytes + DATAGRAM_OVERHEAD_BYTES) / queue.bytes_per_s  # type: ignore[assignment]
        return leaves_s(queue, datagram_bytes, now_s, urgent)

    monkeypatch.setattr(LinkQueue, "leaves_s", counted)
    stored = client.write(b"k" * 32, value, Striping(CHUNK, ROTATION_HOP, 10))
    assert stored.ok and stored.info is not None
    set_s = max(busy_s.values())
    busy_s.clear()
    out = bytearray(len(value))
    read = client.read(stored.info, memoryview(out))
    assert read.ok and out == value
    for report, at_work_s in ((stored.report, set_s), (read.report, max(busy_s.values()))):
        assert report.retransmitted_chunks == report.duplicate_chunks == report.corrupt_chunks == 0
        # Beside the first way there and back the busiest link is at work for nine tenths of the time.
        assert at_work_s >= 0.9 * (report.seconds - client.machine.config.expected_rtt_s)
    for kind, counts in sim.queues.counts.items():
        assert counts.dropped == counts.outage == 0 and counts.longest_s < 0.5, kind


@pytest.mark.parametrize("access", ["gateway", "onboard"])
def test_a_run_takes_as_long_as_its_packets_one_by_one(access: str) -> None:
    """The satellites' machines see a run once, the links every packet: the same as if each came by itself."""
    table = {"up": "50Mbit", "down": "40Mbit", "isl": "100Mbit"}
    seconds: list[list[float]] = []
    for faults in (None, FaultInjector()):  # an injector without faults makes every packet travel by itself
        client = _sky(access, table, faults).connect()
        seconds.append([one.report.seconds for one in _put_get(client, _value(1 << 20), 9)])
    assert seconds[0] == pytest.approx(seconds[1], abs=0.003)


@pytest.mark.parametrize("access", ["ideal", "gateway"])
def test_satellites_serve_as_their_machines_do(access: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is served without the machine has the same packets at the same times."""
    seen: list[tuple[object, ...]] = []
    for whole in (False, True):
        if whole:
            monkeypatch.setattr(SimulatedConstellation, "_serve", lambda *_: (True, []))
        sky = _sky(access, {"up": "50Mbit", "down": "40Mbit", "isl": "80Mbit"})
        stored, read = _put_get(sky.connect(), _value(600_000), 9)
        sim = sky.simulated
        counts = [satellite.counters.as_dict() for satellite in sim.satellites.values()]
        figures = stored.report.seconds, read.report.seconds, sim.now_s, sim.datagrams_sent, sim.bytes_sent
        seen.append((*figures, stored.report.requests, read.report.requests, counts))
    assert seen[0] == seen[1]


def test_what_came_before_a_satellite_died_is_lost() -> None:
    """Packets of a run come 1 ms apart and are handed over each 10 ms: the satellite dies and is back within them."""
    sky = _sky("ideal", {"up": "50Mbit"})
    client, sim, value = sky.connect(), sky.simulated, _value(20 * CHUNK)
    number, _ = client.machine.put(b"k" * 32, value, Striping(CHUNK, ROTATION_HOP, 1), 0.0)
    sim.flush()
    assert sim.queues is not None
    there = next(to for host, to in sim.queues._queues if host == ("ground", 1))
    died_s = sky._delay_s(("ground", 1), there) + 0.0045
    sim.settle(died_s)
    sim.kill(there)
    sim.revive(there)
    sim.settle(died_s + 0.016)
    assert 0 < sim.satellites[there].counters.as_dict()["chunks_set"] <= 17
    assert client.run([number])[number].report.retransmitted_chunks >= 3


def test_without_rates_nothing_changes() -> None:
    """The same packets at the same times as with links that carry everything."""
    plain, unlimited = (_put_get(_sky("gateway", table).connect(), _value(300_000)) for table in (None, {}))
    for one, other in zip(plain, unlimited, strict=True):
        assert one.report.seconds == pytest.approx(other.report.seconds, abs=1e-12)
        assert one.report.requests == other.report.requests


def test_slow_links_are_not_taken_for_dead_satellites() -> None:
    client = _sky("gateway", {"up": "2Mbit", "down": "1Mbit", "isl": "10Mbit"}).connect()
    stored, read = _put_get(client, _value(1 << 20))
    assert stored.report.retransmitted_chunks == read.report.retransmitted_chunks == 0
    assert read.report.seconds == pytest.approx((1 << 20) * 8 / 1e6, rel=0.1)


def test_reads_and_writes_of_several_hosts_share_the_links_between_satellites() -> None:
    sky = _sky("gateway", {"up": "100Mbit", "down": "100Mbit", "isl": "20Mbit", "buffer": "128KiB"})
    clients = [sky.connect(ground=number) for number in (1, 2, 3)]
    values = [_value(700_000, seed) for seed in range(3)]
    numbers = []
    for at, client in enumerate(clients):
        numbers.append(
            client.machine.put(bytes([at]) * 32, values[at], Striping(CHUNK, ROTATION_HOP, 10), sky.simulated.now_s)
        )
    for client, (number, info), value in zip(clients, numbers, values, strict=True):
        assert client.run([number])[number].ok
        out = bytearray(len(value))
        assert clients[0].read(info, memoryview(out)).ok and out == value
    assert sky.simulated.queues is not None and sky.simulated.queues.counts["isl"].dropped > 0


def test_lost_packets_are_repeated_and_no_more() -> None:
    client = _sky("gateway", {"up": "50Mbit", "down": "50Mbit"}, FaultInjector(loss=0.01, seed=7)).connect()
    stored, read = _put_get(client, _value(2 << 20))
    for report in (stored.report, read.report):
        assert 0 < report.retransmitted_chunks < 60  # of 342 chunks, which take up to eight links
        assert report.duplicate_chunks <= report.retransmitted_chunks


def test_a_beam_that_is_out_is_waited_for() -> None:
    table = {"up": "20Mbit", "down": "20Mbit", "outage": [{"link": "down", "from": "0.2s", "to": "0.5s"}]}
    sky = _sky("gateway", table)
    stored, read = _put_get(sky.connect(), _value(1 << 20))
    assert sky.simulated.queues is not None
    assert stored.ok and read.ok and sky.simulated.queues.counts["down"].outage > 0


def test_a_link_that_is_out_is_gone_around() -> None:
    # The gateway's link east is out for good: its neighbours learn it, and packets take another way.
    sky = _sky("gateway", {"isl": "50Mbit", "outage": [{"link": "2,9-2,10", "from": 0, "to": "1h"}]})
    client = sky.connect()
    stored, _ = _put_get(client, _value(400_000))
    again = bytearray(400_000)
    assert stored.info is not None
    later = client.read(stored.info, memoryview(again))
    assert later.ok and later.report.retransmitted_chunks == 0 and later.report.seconds < 0.5


@pytest.mark.brief()
def test_after_a_change_of_the_gateway_nothing_is_sent_for_a_while() -> None:
    links = {"down": "200Mbit", "handover_gap": "100ms"}
    plan = make_plan("starlink-a", access="gateway", time_scale=1.0, links=Links.read(links, "x"))
    sky = VirtualConstellation(plan)
    client = sky.connect()
    stored, _ = _put_get(client, _value(50_000), 1)
    assert stored.info is not None
    out, waits = bytearray(50_000), []
    while not waits and sky.simulated.now_s < 200.0:
        before = client.machine.counters.get("gateway_handovers")
        sky.simulated.settle(sky.simulated.now_s + 1.0)
        read = client.read(stored.info, memoryview(out))
        assert read.ok
        if client.machine.counters.get("gateway_handovers") > before:
            waits.append(read.report.seconds)
        else:
            assert read.report.seconds < 0.1
    assert waits and waits[0] >= 0.1


def test_the_same_seed_gives_the_same_run() -> None:
    table = {"up": "80Mbit", "down": "40Mbit", "isl": "60Mbit", "rain": {"share": 0.5, "spell": 0.05}, "seed": 3}
    runs = []
    for _ in range(2):
        sky = _sky("hybrid", table, FaultInjector(loss=0.005, seed=2))
        runs.append([one.report for one in _put_get(sky.connect(), _value(600_000))])
    assert runs[0] == runs[1]


def test_limits_of_hosts_and_rates_exclude_each_other() -> None:
    sky = _sky("los", {"up": "1Mbit"}).simulated
    limits = HostLimits((tuple(sky.sky.torus.satellites()),))
    with pytest.raises(InvalidInput, match="one of them"):
        SimulatedConstellation(sky.sky, 1 << 20, limits=limits, queues=sky.queues)
