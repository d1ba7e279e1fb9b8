"""A stranger on the ports of dead satellites: what he says is no answer, no acknowledgement and no sign of life."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from tests.protocol.strangers import HauntedConstellation, Sky, Stranger, authority

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.protocol.client.machine import ClientConfig, ClientMachine
from skymemory.protocol.client.transfer import Striping
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.messages import pack_dead, pack_keys
from skymemory.protocol.wire import GROUND_SHELL, TELEMETRY_BYTES, Address, Op, SkyHeader, build_packet, single

SKY = SkyMap(Torus(5, 19), SatelliteId(2, 9))
DEAD_PLANE = 2
READS, PUTS = 30, 8


@dataclass
class Ended:
    reads_s: float
    found: int
    puts_s: float
    unreadable: int
    """Values whose put was acknowledged and which no read finds."""


def after_a_plane_died(sky: Sky, stranger: Stranger | None) -> Ended:
    """Reads and puts, half of whose chunks belong to satellites of a dead plane."""
    sky.sim.stranger = Stranger() if stranger is None else stranger  # to overhear, until the plane is dead
    assert sky.ping()
    before = [written for _ in range(5) if (written := sky.put()) is not None]
    assert len(before) == 5 and all(sky.reads(written) for written in before)
    sky.sim.stranger = stranger
    sky.sim.kill_plane(DEAD_PLANE)
    found: list[bool] = []
    reads_s = sky.seconds(lambda: found.extend(sky.reads(before[number % 5]) for number in range(READS)))
    after: list = []
    puts_s = sky.seconds(lambda: after.extend(sky.put() for _ in range(PUTS)))
    return Ended(reads_s, sum(found), puts_s, sum(not sky.reads(written) for written in after if written is not None))


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("how", ["replays", "forges", "both"])
def test_nothing_that_a_stranger_says_is_believed(how: str, replicas: int) -> None:
    dead = after_a_plane_died(Sky(SKY, authority(), replicas), None)
    stranger = Stranger(how != "forges", how != "replays")
    sky = Sky(SKY, authority(), replicas)
    haunted = after_a_plane_died(sky, stranger)
    assert stranger.sent > 100
    assert haunted.unreadable == dead.unreadable == 0
    assert haunted.reads_s <= 2 * dead.reads_s and haunted.puts_s <= 2 * dead.puts_s, (haunted, dead)
    assert haunted.found == dead.found
    if how != "replays":
        assert sky.counted("packets_refused") > 50 and sky.counted("refusals_unproved") > 0


@pytest.mark.brief()
def test_where_answers_carry_no_macs_he_is_believed() -> None:
    """What docs/guide/security.md admits of `--auth on`."""
    dead = after_a_plane_died(Sky(SKY, authority(signed_answers=False)), None)
    assert after_a_plane_died(Sky(SKY, authority(signed_answers=False)), Stranger(replays=False)).unreadable > 0
    replayed = after_a_plane_died(Sky(SKY, authority(signed_answers=False)), Stranger(forges=False))
    assert replayed.reads_s > 5 * dead.reads_s


def test_a_late_answer_is_a_sign_of_life_once() -> None:
    """A satellite that is late is no dead one; but what it said once may be said again by others."""
    by, here = authority(), SKY.centre
    sim = HauntedConstellation(SKY, 64 << 20, None, lambda one, other: 0.004, authority=by)
    machine: ClientMachine = sim.connect(ClientConfig(7, expected_rtt_s=0.008, authority=by)).machine
    machine.ask(Op.PING, b"", here, 0.0, once=True)
    (request, _), *_ = machine.datagrams_to_send(0.0)
    sim.satellites[here].receive_batch(request.datagrams()[0], 65_000, ("ground", 7), 0.5)
    ((answer, _),) = sim.satellites[here].datagrams_to_send(0.5)
    machine._peers.suspects.add(here, 1.0)
    machine.handle_timer(2.0)
    assert 1 not in machine._in_flight.by_id, "it is given up"
    for heard in (True, False):
        machine.receive_batch(answer.datagrams()[0], 65_000, 2.5)
        assert (here not in machine._peers.suspects) == heard
        machine._peers.suspects.add(here, 2.5)


def test_a_refusal_that_a_stranger_has_got_from_another_satellite_ends_nothing() -> None:
    """He sends a living one what looks like the request that he received in a dead one's place."""
    by, dead, living = authority(), SKY.centre, SatelliteId(1, 9)
    sim = HauntedConstellation(SKY, 64 << 20, None, lambda one, other: 0.004, authority=by)
    machine: ClientMachine = sim.connect(ClientConfig(7, expected_rtt_s=0.008, authority=by)).machine
    number = machine.ask(Op.HAS, pack_keys([bytes(32)]), dead, 100.0)
    (request, _), *_ = machine.datagrams_to_send(100.0)
    asked = SkyHeader.unpack(memoryview(request.datagrams()[0]), 8)
    refused = asked._replace(destination=Address(*living), source=Address(*living, GROUND_SHELL), flags=0, key_id=0)
    sim.satellites[living].receive_batch(build_packet(refused, b"", 0, 100.0), 65_000, ("stranger", 1), 100.0)
    ((answer, _),) = sim.satellites[living].datagrams_to_send(100.0)
    machine.receive_batch(answer.datagrams()[0], 65_000, 100.0)
    assert machine.counters.get("packets_refused") == 0 and machine.counters.get("packets_unexpected") == 1
    assert machine.next_event() is None and number in machine._operations


def test_a_notice_is_taken_once() -> None:
    by, here = authority(), SKY.centre
    machine = ClientMachine(ClientConfig(7, authority=by), SKY, MoveClock())
    for number, taken in ((5, 1), (6, 1), (6, 0), (5, 0), (7, 1)):
        header = SkyHeader(Op.GONE, Address(*here, GROUND_SHELL), Address(*here), 7, 0)
        plain = single(build_packet(header, pack_dead([(bytes([number]) * 32, bytes(12))]), number, 100.0))
        machine.receive_batch(by.sign(plain, 100.0).headers, 65_000, 100.0)
        assert len(machine.take_gone()) == taken


class Conversation:
    """A read or a write of one satellite's chunks, cut off after its first packets."""

    def __init__(self, writes: bool) -> None:
        by = authority()
        self.sim = HauntedConstellation(SKY, 64 << 20, None, lambda one, other: 0.004, authority=by, offload=False)
        self.machine: ClientMachine = self.sim.connect(ClientConfig(7, expected_rtt_s=0.008, authority=by)).machine
        key, value = bytes(32), bytes(range(250)) * 400
        number, info = self.machine.put(key, value, Striping(2000, 3, 1), 0.0)
        self.heard: list[bytes] = []
        if not writes:
            self._run_until(lambda: self.machine.next_event() is not None)
            number = self.machine.get(info, memoryview(bytearray(len(value))), self.sim.now_s)
        self.number, original = number, self.machine.receive_batch

        def receive(data: bytes, segment_bytes: int, now_s: float) -> None:
            self.heard.append(bytes(data))
            original(data, segment_bytes, now_s)

        self.machine.receive_batch = receive  # type: ignore[method-assign, assignment]
        self._run_until(lambda: any(map(self._is_part, self.heard)))
        for satellite in list(self.sim.satellites):
            self.sim.kill(satellite)
        self.sim._arrivals.clear()
        self.machine.receive_batch = original  # type: ignore[method-assign]

    def _is_part(self, answer: bytes) -> bool:
        return answer[TELEMETRY_BYTES + 1] in (Op.ACK, Op.DATA)

    def _run_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            assert self.sim.step(self.sim.now_s + 1.0)

    def ends_after_s(self, replay_every_s: float) -> float:
        """When it is given up, while what was heard is sent again and again."""
        began_s = self.sim.now_s
        while (event := self.machine.next_event()) is None:
            assert self.sim.now_s < began_s + 60.0, "replays keep it waiting without a limit"
            self.sim.settle(self.sim.now_s + replay_every_s)
            for answer in self.heard:
                self.machine.receive_batch(answer, len(answer), self.sim.now_s)
                self.sim._touched["ground", 7] = None
        assert event.number == self.number and not event.ok
        return self.sim.now_s - began_s


@pytest.mark.parametrize("writes", [True, False], ids=["write", "read"])
def test_replays_of_the_first_part_of_an_answer_postpone_no_deadline(writes: bool) -> None:
    alone, haunted = Conversation(writes), Conversation(writes)
    silent_s = alone.ends_after_s(0.01) if not alone.heard.clear() else 0.0  # type: ignore[func-returns-value]
    assert haunted.heard and haunted.ends_after_s(0.01) <= 2 * silent_s
