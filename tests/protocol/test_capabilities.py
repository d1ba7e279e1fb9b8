"""Releases side by side: what a satellite understands is said in its PONG, and an unknown operation is answered.

The older satellites here are today's machines without what came later: they drop an operation, as every release before
UNSUPPORTED did, and their PONG ends before the word.
"""

from __future__ import annotations

import struct

import pytest
from tests.protocol.datagrams import receive_datagram

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import MalformedPacket
from skymemory.keys import first_ring
from skymemory.protocol import messages
from skymemory.protocol.auth import Authority, check_answers
from skymemory.protocol.clock import MoveClock
from skymemory.protocol.messages import ASK_AGAIN_S, CODEC_IDS, OURS, UNSTATED, Capabilities, Retain, pack_retain
from skymemory.protocol.satellite.machine import SatelliteConfig, SatelliteMachine
from skymemory.protocol.wire import COMMAND_BYTES, Address, Op, SkyHeader, build_packet, parse_packet, sealed, single
from skymemory.transport.faults import FaultInjector

FIELDS_OF_VERSION_1 = 36
LATER_OP = 0x2A
HERE = SatelliteId(2, 9)
NEIGHBOUR = SatelliteId(2, 8)
GROUND = ("ground", 7)


def make_older(machine: SatelliteMachine, *dropped: Op) -> None:
    """It drops these operations, and its PONG has the fields that there were before the word."""
    for op in dropped:
        del machine._handlers[op]

    def pong(packet, now_s):
        fields = messages.pack_housekeeping(machine.housekeeping())[4 : 4 + 8 * FIELDS_OF_VERSION_1]
        machine._outbox.reply(packet.header, Op.PONG, struct.pack(">HH", FIELDS_OF_VERSION_1, 0) + fields, now_s)

    machine._handlers[Op.PING] = pong


def older_world(world, *dropped: Op, **options):
    sky = world(**options)
    for machine in sky.sim.satellites.values():
        make_older(machine, *dropped)
    return sky


def ask_for_pins(sky, keys) -> list:
    """RETAIN to every satellite, at once; what came of each."""
    body = pack_retain(Retain.PIN, sky.now_s + 60.0, keys)
    numbers = [sky.host.machine.ask(Op.RETAIN, body, here, sky.now_s) for here in sky.torus.satellites()]
    return list(sky.host.run(numbers).values())


def later_command(by: Authority | None = None, now_s: float = 0.0, ground: int = 7) -> bytes:
    """A sound command of an operation that this release does not know, with a body of its own."""
    source = Address(2, 9, 0xFF) if ground else Address(*NEIGHBOUR)
    header = SkyHeader(Op.PING, Address(*HERE), source, ground, 77, timestamp_us=int(now_s * 1e6) & 0xFFFFFFFF)
    packet = bytearray(build_packet(header, b"whatever", 0, now_s))
    packet[6] = packet[COMMAND_BYTES + 1] = LATER_OP
    batch = single(sealed(bytes(packet), COMMAND_BYTES))
    return bytes((by.sign(batch, now_s) if by else batch).headers)


@pytest.mark.brief()
@pytest.mark.parametrize(("access", "most_s"), [("los", 0.3), ("gateway", 1.0)])
def test_a_question_that_older_satellites_drop_raises_no_suspicion(world, value_of, access, most_s):
    sky = older_world(world, Op.RETAIN, access=access)
    infos = [sky.put(f"v{i}", value_of(60_000, i))[1] for i in range(20)]
    began_s = sky.now_s
    answers = ask_for_pins(sky, [info.key for info in infos])
    assert {answer.report.failure for answer in answers} == {"unsupported"}
    assert sky.now_s - began_s < most_s  # by a gateway the furthest are 0.1 s away, which was not known
    assert not sky.host.machine._peers.suspects
    assert [sky.get(info)[0].ok for info in infos] == [True] * 20

    began_s, packets = sky.now_s, sky.sim.datagrams_sent
    assert {answer.report.failure for answer in ask_for_pins(sky, [infos[0].key])} == {"unsupported"}
    assert (sky.now_s, sky.sim.datagrams_sent) == (began_s, packets)  # remembered: nothing is sent
    sky.settle(ASK_AGAIN_S)
    for machine in sky.sim.satellites.values():  # replaced by this release meanwhile
        machine._handlers[Op.RETAIN] = machine._retention.receive
    assert all(answer.ok for answer in ask_for_pins(sky, [infos[0].key]))


def test_a_satellite_that_states_an_operation_is_asked_again_whatever_is_lost(world, value_of):
    """At 30 % of loss each way no question of 300 is taken for one that satellites do not know."""
    sky = world(faults=FaultInjector(loss=0.3, seed=5))
    for _ in range(3):
        answers = ask_for_pins(sky, [bytes(32)])
        assert "unsupported" not in {answer.report.failure for answer in answers}


def test_the_silent_are_suspected_as_ever(world):
    sky = world()
    sky.sim.kill(HERE)
    number = sky.host.machine.ask(Op.HAS, messages.pack_keys([bytes(32)]), HERE, sky.now_s)
    assert sky.host.run([number])[number].report.failure == "timeout"
    assert sky.now_s == pytest.approx(0.8, abs=0.05)
    assert HERE in sky.host.machine._peers.suspects


def test_a_pong_states_versions_operations_and_codecs(world):
    sky = world()
    figures = messages.unpack_housekeeping(sky.ask(Op.PING, b"", HERE).body)
    said = Capabilities.of_figures(figures)
    assert said == OURS and said.stated and (said.lowest_version, said.highest_version) == (1, 1)
    assert [op for op in range(64) if said.operations >> op & 1] == [op for op in Op if op.is_command]
    assert [codec for codec in range(64) if said.codecs >> codec & 1] == [0, 8, 9, 10]
    assert sky.host.machine._peers.peer(HERE).capabilities == OURS


@pytest.mark.parametrize("figures", [{}, {"memory_used_bytes": 5}, {"protocol_versions": 0, "operations": -1}])
def test_no_word_means_version_1(figures):
    known = Capabilities.of_figures(figures)
    assert known is UNSTATED and (known.lowest_version, known.highest_version, known.codecs) == (1, 1, 0)
    assert [op for op in Op if op.is_command and not known.serves(op)] == [Op.FORGET], "which came after the word"


def test_a_word_goes_through_a_pong_whole():
    every = Capabilities(1, 255, (1 << 64) - 1, 1 << 63)
    body = messages.pack_housekeeping(every.figures())
    assert Capabilities.of_figures(messages.unpack_housekeeping(body)) == every


def test_an_operation_that_a_pong_does_not_name_is_not_asked(world, value_of):
    sky = world()
    lacking = Capabilities(1, 1, OURS.operations & ~(1 << Op.RETAIN), OURS.codecs)
    for machine in sky.sim.satellites.values():
        housekeeping = machine.housekeeping
        machine.housekeeping = lambda housekeeping=housekeeping: housekeeping() | lacking.figures()
    sky.ask(Op.PING, b"", HERE)
    packets = sky.sim.datagrams_sent
    body = pack_retain(Retain.PIN, sky.now_s + 60.0, [bytes(32)])
    assert sky.ask(Op.RETAIN, body, HERE).report.failure == "unsupported"
    assert sky.sim.datagrams_sent == packets


def test_who_says_that_it_knows_nothing_is_asked_for_signs_of_life_all_the_same(world):
    sky = world()
    sky.host.machine._peers.peer(HERE).on_capabilities(Capabilities(1, 1, 0, 0), sky.now_s)
    assert sky.ask(Op.PING, b"", HERE).ok


@pytest.mark.parametrize(
    "by",
    [None, *(Authority(first_ring(bytes(32)), *level) for level in ((False, False), (True, False), (False, True)))],
)
def test_an_unknown_command_is_answered_and_signed_as_every_answer(world, by):
    machine = SatelliteMachine(SatelliteConfig(HERE, 1 << 20, authority=by), world().sky, MoveClock(), 1e9)
    receive_datagram(machine, later_command(by, 1e9), GROUND, 1e9)
    ((batch, link),) = machine.datagrams_to_send(1e9)
    (packet,) = batch.datagrams()
    if by is not None and by.proves_answers:
        assert check_answers(by, memoryview(packet), len(packet)) == (b"\1", [])
        packet = packet[:-16]  # the MAC is the end of the body; what it covered is as it was
        assert packet[17] == Op.UNSUPPORTED and packet[60:] == OURS.pack_unsupported(LATER_OP)
    else:
        answer = parse_packet(packet)
        assert (answer.header.op, answer.header.request_id, answer.header.ground) == (Op.UNSUPPORTED, 77, 7)
        assert Capabilities.unpack_unsupported(answer.body) == (LATER_OP, OURS)
    assert link == GROUND
    figures = machine.housekeeping()
    assert figures["packets_unsupported"] == 1 and machine.counters.get("packets_malformed") == 0


def test_a_neighbour_that_asks_for_what_is_unknown_is_answered_too(world):
    machine = SatelliteMachine(SatelliteConfig(HERE, 1 << 20), world().sky, MoveClock(), 0.0)
    receive_datagram(machine, later_command(ground=0), NEIGHBOUR, 0.0)
    ops = {parse_packet(batch.datagrams()[0]).header.op: link for batch, link in machine.datagrams_to_send(0.0)}
    assert ops[Op.UNSUPPORTED] == NEIGHBOUR


@pytest.mark.parametrize("wrong", ["telemetry", "moves", "version"])
def test_what_is_no_sound_command_gets_no_answer(world, wrong):
    """An unknown number below 0x40 in telemetry, and headers that no packet may have, are malformed as ever."""
    packet = bytearray(later_command())
    if wrong == "telemetry":
        header = SkyHeader(Op.PONG, Address(*HERE), Address(*NEIGHBOUR), 0, 77)
        packet = bytearray(build_packet(header, b"", 0, 0.0))
        packet[17] = LATER_OP
    elif wrong == "moves":
        packet[COMMAND_BYTES + 28] = 0x7F
    else:
        packet[COMMAND_BYTES] = 2
    start = 16 if wrong == "telemetry" else COMMAND_BYTES
    machine = SatelliteMachine(SatelliteConfig(HERE, 1 << 20), world().sky, MoveClock(), 0.0)
    receive_datagram(machine, sealed(bytes(packet), start), GROUND, 0.0)
    assert machine.datagrams_to_send(0.0) == []
    assert machine.counters.get("packets_malformed") == 1 and machine.counters.get("packets_unsupported") == 0


def test_a_client_takes_unsupported_for_an_answer(world):
    """Its satellite lacks RETAIN and says so: one round trip, no suspicion, not asked again."""
    sky = world()
    satellite = sky.sim.satellites[HERE]

    def refuse(packet, now_s):
        satellite._outbox.reply(packet.header, Op.UNSUPPORTED, OURS.pack_unsupported(Op.RETAIN), now_s)

    satellite._handlers[Op.RETAIN] = refuse
    body = pack_retain(Retain.PIN, 60.0, [bytes(32)])
    answer = sky.ask(Op.RETAIN, body, HERE)
    assert answer.report.failure == "unsupported" and answer.report.seconds == pytest.approx(2 * sky.link_s)
    packets = sky.sim.datagrams_sent
    assert sky.ask(Op.RETAIN, body, HERE).report.failure == "unsupported"
    assert sky.sim.datagrams_sent == packets


def test_a_promise_that_a_satellite_does_not_understand_is_not_repeated(world, value_of):
    """Pins move with their chunks; a satellite of another release that says UNSUPPORTED hears of each once."""
    sky = world()
    _, info = sky.put("v", value_of(60_000), strategy="rotation", servers=1)
    assert any(answer.ok for answer in ask_for_pins(sky, [info.key]))
    for satellite in sky.sim.satellites.values():
        satellite._handlers[Op.RETAIN] = lambda packet, now_s, satellite=satellite: satellite._outbox.reply(
            packet.header, Op.UNSUPPORTED, OURS.pack_unsupported(Op.RETAIN), now_s
        )
    sky.advance(1)
    sky.settle(10.0)
    assert not any(satellite._retention._transfers for satellite in sky.sim.satellites.values())
    assert sky.get(info)[0].ok


@pytest.mark.parametrize("size", [0, 19])
def test_a_short_unsupported_is_malformed(size):
    with pytest.raises(MalformedPacket, match="UNSUPPORTED"):
        Capabilities.unpack_unsupported(bytes(size))


def test_a_later_unsupported_may_be_longer():
    assert Capabilities.unpack_unsupported(OURS.pack_unsupported(5) + b"more") == (5, OURS)


def test_the_codecs_announced_are_those_there_are():
    from skymemory.engine.transformers.quantizers import CODECS  # imports torch

    assert sorted({codec.codec_id for codec in CODECS.values()}) == list(CODEC_IDS)
