"""Whose answers count, and for what: not another's, not of other chunks, not of another conversation."""

from __future__ import annotations

import math

import pytest
from tests.protocol.conftest import key_of
from tests.protocol.datagrams import receive_datagram

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.protocol import messages
from skymemory.protocol.client.machine import ClientConfig, ClientMachine
from skymemory.protocol.client.transfer import Striping
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.messages import Selection
from skymemory.protocol.wire import GROUND_SHELL, Address, Op, SkyHeader, Status, build_packet
from skymemory.transport.simulated import SimulatedConstellation

GROUND = 7
KEY = key_of("v")
NOW_S = 100.0
LATER_S = 100.01


class Conversation:
    """A ground host that has begun to write or read seven chunks on two satellites, or asked one something."""

    def __init__(self, what: str) -> None:
        self.machine = ClientMachine(
            ClientConfig(GROUND, expected_rtt_s=0.008), SkyMap(Torus(5, 19), SatelliteId(2, 9)), MoveClock()
        )
        writing, info = self.machine.put(KEY, bytes(range(7)), Striping(1, 3, 2), NOW_S)
        if what != "write":
            self.machine.cancel(writing)
        if what == "read":
            self.machine.get(info, memoryview(bytearray(7)), NOW_S)
        elif what == "ask":
            self.machine.ask(Op.PING, b"", SatelliteId(2, 9), NOW_S)
        self.machine.datagrams_to_send(NOW_S)
        self.requests = list(self.machine._in_flight.by_id.values())
        self.first = self.requests[0]

    def hear(
        self,
        op: Op,
        body: bytes = b"",
        status: Status = Status.OK,
        ground: int = GROUND,
        echo_s: float = NOW_S,
        speaker: SatelliteId | None = None,
    ) -> None:
        """An answer to the first request, by the satellite that was asked unless another is named."""
        here = speaker or self.first.satellite
        header = SkyHeader(
            op,
            Address(*here, GROUND_SHELL),
            Address(*here),
            ground,
            self.first.request_id,
            status,
            timestamp_us=int(echo_s * 1e6) & 0xFFFFFFFF,
            credit=1024,
        )
        receive_datagram(self.machine, build_packet(header, body, 0, LATER_S), LATER_S)

    @property
    def is_as_before(self) -> bool:
        """Nothing has ended, nothing is to be sent, and all that was asked for is still awaited."""
        its = self.machine._in_flight.by_id.values()
        return (
            self.machine.next_event() is None
            and not self.machine.datagrams_to_send(LATER_S)
            and [list(request.indices) for request in its] == [list(request.indices) for request in self.requests]
            and all(
                not sum(request.operation.transfer.acknowledged) for request in its if request.operation.op is Op.SET
            )
        )


@pytest.mark.parametrize("status", [Status.OK, Status.FULL])
@pytest.mark.parametrize("indices", [[0, 2, 4, 6], [0, 6]], ids=["plain", "with a gap"])
def test_an_acknowledgement_of_another_key_counts_for_nothing(status, indices):
    conversation = Conversation("write")
    conversation.hear(Op.ACK, Selection.of(key_of("w"), indices, 2).pack(), status)
    assert conversation.is_as_before
    conversation.hear(Op.ACK, Selection.of(KEY, indices, 2).pack(), status)
    assert not conversation.is_as_before


@pytest.mark.parametrize(("key", "indices"), [(KEY, [1, 3]), (key_of("w"), [0, 2])])
def test_a_miss_of_what_was_not_asked_for_counts_for_nothing(key, indices):
    conversation = Conversation("read")
    conversation.hear(Op.MISS, Selection.of(key, indices, 2).pack())
    assert conversation.is_as_before
    conversation.hear(Op.MISS, Selection.of(KEY, [0, 2], 2).pack())
    assert not conversation.is_as_before


@pytest.mark.parametrize(
    ("what", "op", "body"),
    [
        ("read", Op.MISS, Selection.of(KEY, [0], 2).pack()),
        ("write", Op.ACK, Selection.of(KEY, [0, 2, 4, 6], 2).pack()),
        ("write", Op.ACK, Selection.of(KEY, [0, 6], 2).pack()),
        ("ask", Op.UNREACHABLE, b""),
    ],
)
def test_an_answer_to_another_ground_host_counts_for_nothing(what, op, body):
    conversation = Conversation(what)
    conversation.hear(op, body, ground=GROUND + 1)
    assert conversation.is_as_before and conversation.machine.counters.get("packets_unexpected") == 1
    conversation.hear(op, body)
    assert not conversation.is_as_before


def test_a_satellite_that_cannot_forward_says_nothing_of_the_destination():
    conversation, neighbour = Conversation("ask"), SatelliteId(2, 8)
    conversation.hear(Op.UNREACHABLE, status=Status.NO_ROUTE, speaker=neighbour)
    links = conversation.machine._peers
    assert links.peer(neighbour).heard_s == LATER_S and links.peer(conversation.first.satellite).heard_s == -math.inf
    assert conversation.machine.next_event().report.failure == "unreachable"


def test_a_read_says_unreachable_if_one_of_its_satellites_is_known_to_be() -> None:
    """One is silent for too long; then the path says of the other that it is dead. No stand-in answers."""
    machine = ClientMachine(
        ClientConfig(GROUND, expected_rtt_s=0.008), SkyMap(Torus(5, 19), SatelliteId(2, 9)), MoveClock(pushed=(3, 0))
    )
    writing, info = machine.put(KEY, bytes(range(7)), Striping(1, 3, 2), NOW_S, (0, 0))
    machine.cancel(writing)
    machine.get(info, memoryview(bytearray(7)), NOW_S)
    machine.datagrams_to_send(NOW_S)
    dead, silent = machine._in_flight.by_id.values()

    def says(op: Op, status: Status, speaker: SatelliteId, now_s: float) -> None:
        ends = Address(*speaker, GROUND_SHELL), Address(*speaker), GROUND, dead.request_id
        header = SkyHeader(op, *ends, status, timestamp_us=int(now_s * 1e6) - 8000 & 0xFFFFFFFF)
        receive_datagram(machine, build_packet(header, dead.body if op is Op.BUSY else b"", 0, now_s), now_s)

    def pass_time(until_s: float) -> None:
        while (timer_s := machine.next_timer_s()) is not None and timer_s <= until_s:
            machine.handle_timer(timer_s)
            machine.datagrams_to_send(timer_s)

    pass_time(NOW_S + 0.5)
    says(Op.BUSY, Status.OK, dead.satellite, NOW_S + 0.5)
    pass_time(NOW_S + 0.85)
    assert silent.satellite in machine._peers.suspects and machine.next_event() is None
    says(Op.UNREACHABLE, Status.NO_ROUTE, SatelliteId(2, 8), NOW_S + 0.85)
    pass_time(NOW_S + 10.0)
    ended = machine.next_event()
    assert ended is not None and ended.report.failure == "unreachable" and ended.report.seconds > 0.85


@pytest.mark.parametrize("echo_s", [NOW_S + 1.0, NOW_S - 100.0])
def test_an_echo_that_cannot_be_is_no_round_trip(echo_s):
    conversation = Conversation("ask")
    conversation.hear(Op.PONG, messages.pack_housekeeping({}), echo_s=echo_s)
    assert conversation.machine.next_event().ok
    peer = conversation.machine._peers.peer(conversation.first.satellite)
    assert peer.heard_s == LATER_S and peer.round_trip.smoothed_s == 0.008


@pytest.mark.brief()
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
