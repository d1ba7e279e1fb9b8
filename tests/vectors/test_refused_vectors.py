"""Packets that must be refused (``refused.json``): whatever the wire page drops or refuses, byte for byte.

Each entry is a packet ``from`` a link of satellite (plane 2, slot 9) of 5 planes of 19 slots, which began a minute
before ``NOW_S`` and was sent the packets of ``before``; unless ``auth`` is off it has the key of
``authenticated.json``. It counts exactly ``counts`` of what is below, and its answer, if any, has operation and status
``answer``. Other implementations may run the file, too; here three do: Python, C, and a host over UDP with the native
helper. Entries ``from`` a satellite are for ground host 7, whose SET with request 0x01020304 has not been answered.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.flight.machine import FlightMachine, compiler
from tests.protocol.conftest import World
from tests.protocol.datagrams import receive_datagram
from tests.protocol.exchanged import exchanged
from tests.vectors.test_authenticated_vectors import COVERING, SIGNER
from tests.vectors.test_authenticated_vectors import VECTORS as SIGNED
from tests.vectors.test_wire_vectors import BEAM, HERE, KEY, NOW_S, SEQUENCE, VALUE, header

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.keys import KeyRing, SecretKey
from skymemory.protocol import messages
from skymemory.protocol.auth import Authority
from skymemory.protocol.client.machine import ClientConfig, ClientMachine
from skymemory.protocol.client.transfer import Striping
from skymemory.protocol.clock import MoveClock
from skymemory.protocol.messages import Selection
from skymemory.protocol.satellite.machine import SatelliteConfig, SatelliteMachine
from skymemory.protocol.satellite.routing import LinksBody
from skymemory.protocol.wire import (
    Address,
    ChunkRef,
    Op,
    PlacementTag,
    SegmentBatch,
    Status,
    build_packet,
    bulk_batch,
    parse_packet,
    sealed,
    single,
)
from skymemory.testbed.connect import host_spec
from skymemory.testbed.plan import local_hosts, make_plan
from skymemory.testbed.run_directory import free_ports
from skymemory.transport.udp_host import UdpHost
from skymemory.transport.unix_clock import UnixClock

FILE = Path(__file__).with_name("refused.json")
BEGAN_S = NOW_S - 60.0
COUNTERS = ("packets_malformed", "packets_refused", "packets_replayed", "packets_unroutable", "pushes_refused")
NEIGHBOUR = SatelliteId(2, 10)
MALFORMED, REFUSED, REPLAYED = ({f"packets_{name}": 1} for name in ("malformed", "refused", "replayed"))
TURNED_AWAY = "UNREACHABLE REFUSED"
PAYLOAD_AT = 8 + 44 + 72


def changed(packet: bytes, at: int, value: int, *, seal: bool = True) -> bytes:
    """With another byte, and the header CRC that belongs to it if there is no payload."""
    wrong = bytearray(packet)
    wrong[at] = value
    return sealed(bytes(wrong), 8 if packet[0] & 0x10 else 16) if seal else bytes(wrong)


def control(op: Op, body: bytes = b"", **fields: Any) -> bytes:
    return build_packet(header(op)._replace(**fields), body, SEQUENCE, NOW_S)


def chunk(op: Op = Op.SET, payload: bytes = VALUE[16:32], **fields: Any) -> bytes:
    """Chunk 2 of 3, with these fields of its reference different."""
    tag = PlacementTag(
        **{"strategy": 3, "servers": 10, "server": 1, "slot_moves": -2, "plane_moves": 1}
        | {name: fields.pop(name) for name in ("strategy", "servers", "server", "replica") if name in fields}
    )
    about = {"index": 1, "chunks": 3, "length_bytes": 16, "crc": native.crc32(payload), "value_bytes": len(VALUE)}
    ref = ChunkRef(key=KEY, value_crc=native.crc32(VALUE), tag=tag, **about | fields)
    return bulk_batch(header(op), ref.pack(), [payload], SEQUENCE, NOW_S).datagrams()[0]


def signed(packet: bytes, by: Authority = SIGNER, at_s: float = NOW_S) -> bytes:
    if packet[9] in (Op.SET, Op.MIGRATE):
        batch = SegmentBatch(packet[:PAYLOAD_AT], PAYLOAD_AT, [packet[PAYLOAD_AT:]])
        return by.sign(batch, at_s).datagrams()[0]
    return bytes(by.sign(single(packet), at_s).headers)


def signed_answer(packet: bytes, ring: KeyRing = SIGNER.ring) -> bytes:
    return bytes(Authority(ring, signed_answers=True).sign(single(packet), NOW_S).headers)


SIGNED_DATA = SIGNED["data"]


def with_exchanged_payload(packet: bytes) -> bytes:
    return packet[: PAYLOAD_AT + 16] + exchanged(packet[PAYLOAD_AT + 16 :], 3)


def wrong_length(packet: bytes) -> bytes:
    """A right MAC over a wrong length."""
    lies = bytearray(packet)
    lies[4:6] = (int.from_bytes(lies[4:6], "big") + 1).to_bytes(2, "big")
    return signed(sealed(bytes(lies), 8))


PING = control(Op.PING)
PONG = control(Op.PONG, messages.pack_housekeeping({}), destination=HERE, source=BEAM)
ADVANCE = messages.pack_moves
STRANGER = Authority(KeyRing((SecretKey(0x0102, bytes(32)),)))
FROM_NEIGHBOUR = {"source": Address(*NEIGHBOUR), "ground": 0}
UNKNOWN_KEY = Authority(KeyRing((SecretKey(0x0103, bytes(range(64, 96))),)))
KEYS_181 = (181).to_bytes(2, "big") + bytes(2) + bytes(32) * 181
SELECTION = Selection.of(KEY, [1, 11, 31], 10).pack()
ELSEWHERE = Address(2, 12)


def selection(first: int = 1, stride: int = 10, count: int = 4, bits: bytes = b"\x0b") -> bytes:
    return KEY + b"".join(number.to_bytes(4, "big") for number in (first, stride, count)) + bits


Case = tuple[str, bytes, dict[str, int], str]
# What it is, the packet, what is counted, and the answer.
PLAIN_FROM_GROUND: list[Case] = [
    ("no bytes but one", PING[:1], MALFORMED, ""),
    ("shorter than its headers", PING[:51], MALFORMED, ""),
    ("a length one too large", changed(PING, 5, PING[5] + 1), MALFORMED, ""),
    ("bytes behind its length", PING + b"\0", MALFORMED, ""),
    ("another packet version", changed(PING, 0, PING[0] | 0x20), MALFORMED, ""),
    ("another APID", changed(PING, 1, 0xC1), MALFORMED, ""),
    ("a first segment of several", changed(PING, 2, PING[2] & 0x7F), MALFORMED, ""),
    ("no secondary header", changed(PING, 0, PING[0] & ~0x08), MALFORMED, ""),
    ("another SKY version", changed(PING, 8, 2), MALFORMED, ""),
    ("an unknown status", changed(PING, 11, 5), MALFORMED, ""),
    ("an unknown telemetry operation", changed(PONG, 17, 0x7F), MALFORMED, ""),
    ("a command's operation in telemetry", changed(PONG, 17, Op.PING), MALFORMED, ""),
    ("telemetry's operation in a command", changed(PING, 9, Op.PONG), MALFORMED, ""),
    ("a wrong header CRC", changed(PING, 48, PING[48] ^ 1, seal=False), MALFORMED, ""),
    ("a header changed in transit", changed(PING, 24, 9, seal=False), MALFORMED, ""),
    ("a MAC where none is asked for", signed(PING), MALFORMED, ""),
    ("slot moves beyond 2^30", control(Op.PING, slot_moves=(1 << 30) + 1), MALFORMED, ""),
    ("plane moves beyond -2^30", control(Op.PING, plane_moves=-(1 << 30) - 1), MALFORMED, ""),
    ("a chunk number beyond its chunks", chunk(index=3), MALFORMED, ""),
    ("a server that is not the chunk's", chunk(server=2), MALFORMED, ""),
    ("no servers", chunk(servers=0), MALFORMED, ""),
    ("more chunks than bytes", chunk(chunks=35), MALFORMED, ""),
    ("a chunk longer than its value", chunk(value_bytes=15), MALFORMED, ""),
    ("a payload shorter than its length", chunk(length_bytes=17), MALFORMED, ""),
    ("a payload longer than its length", chunk(length_bytes=15), MALFORMED, ""),
    ("a payload of another CRC", chunk(crc=1), MALFORMED, ""),
    ("an unknown strategy", chunk(strategy=9), MALFORMED, ""),
    ("more servers than satellites", chunk(servers=96), MALFORMED, ""),
    ("a copy too many", chunk(replica=12), MALFORMED, ""),
    ("a key list of no keys", control(Op.HAS, bytes(4)), MALFORMED, ""),
    ("a key list that ends early", control(Op.EVICT, b"\0\2\0\0" + KEY), MALFORMED, ""),
    ("more than 180 keys", control(Op.HAS, KEYS_181), MALFORMED, ""),
    ("a selection of nothing", control(Op.GET, selection(bits=b"\0")), MALFORMED, ""),
    ("a selection of no steps", control(Op.GET, selection(count=0, bits=b"")), MALFORMED, ""),
    ("a selection of too many steps", control(Op.GET, selection(count=65_537, bits=bytes([1] * 8_193))), MALFORMED, ""),
    ("a selection with a stride of 0", control(Op.GET, selection(stride=0)), MALFORMED, ""),
    ("a selection from chunk 0", control(Op.GET, selection(first=0)), MALFORMED, ""),
    ("a selection beyond 2^32 - 1", control(Op.GET, selection(first=0xFFFFFFFF, stride=1)), MALFORMED, ""),
    ("a selection whose bitmap is short", control(Op.GET, selection(count=9)), MALFORMED, ""),
    ("moves that end early", control(Op.ADVANCE, bytes(7)), MALFORMED, ""),
    ("moves beyond 2^30", control(Op.ADVANCE, ADVANCE((1 << 30) + 1, 0)), MALFORMED, ""),
    ("a list that ends early", control(Op.LIST, bytes(35)), MALFORMED, ""),
    ("an unknown RETAIN", control(Op.RETAIN, b"\0\1\5\0" + bytes(8) + KEY), MALFORMED, ""),
    ("a CHECK of nothing", control(Op.CHECK, bytes(4)), MALFORMED, ""),
    ("a FORGET of nothing", control(Op.FORGET, bytes(4)), MALFORMED, ""),
    ("10,001 moves at once", control(Op.ADVANCE, ADVANCE(10_001, 0)), {"pushes_refused": 1}, TURNED_AWAY),
    ("to an address off the torus", control(Op.PING, destination=Address(5, 0)), {"packets_unroutable": 1},
     "UNREACHABLE NO_ROUTE"),
    ("out of hops on its way", control(Op.PING, destination=ELSEWHERE, hop_limit=0), {"packets_unroutable": 1},
     "UNREACHABLE HOP_LIMIT"),
    ("LINKS from the ground", control(Op.LINKS, LinksBody(True, (0, 0), 0, []).pack()), MALFORMED, ""),
]  # fmt: skip
SIGNED_FROM_GROUND: list[Case] = [
    ("no MAC", PING, REFUSED, TURNED_AWAY),
    ("a wrong MAC", changed(signed(PING), 60, signed(PING)[60] ^ 1), REFUSED, TURNED_AWAY),
    ("a MAC by another key", signed(PING, STRANGER), REFUSED, TURNED_AWAY),
    ("an unknown key", signed(PING, UNKNOWN_KEY), REFUSED, TURNED_AWAY),
    ("31 s old", signed(PING, at_s=NOW_S - 31), REFUSED, TURNED_AWAY),
    ("31 s ahead", signed(PING, at_s=NOW_S + 31), REFUSED, TURNED_AWAY),
    ("71.6 minutes old: the same low half of the time", signed(PING, at_s=NOW_S - 2**32 / 1e6), REFUSED, TURNED_AWAY),
    ("a right MAC and a wrong header CRC", changed(signed(PING), 48, signed(PING)[48] ^ 1, seal=False), MALFORMED, ""),
    ("a right MAC and a wrong length", wrong_length(PING), MALFORMED, ""),
    ("a SET of a right MAC and a wrong header CRC", changed(signed(chunk()), 48, signed(chunk())[48] ^ 1, seal=False),
     MALFORMED, ""),
    ("a SET of a right MAC and a payload of another CRC", signed(chunk())[:-1] + b"?", MALFORMED, ""),
    ("a SET without a MAC", chunk(), REFUSED, TURNED_AWAY),
    ("made for another satellite's beam", signed(control(Op.PING, source=Address(2, 10, 0xFF))), REFUSED, TURNED_AWAY),
    ("telemetry from the ground", signed(PONG), REFUSED, ""),
]  # fmt: skip
SIGNED_FROM_NEIGHBOUR: list[Case] = [
    ("a neighbour's command without a MAC", control(Op.PING, source=Address(*NEIGHBOUR), ground=0), REFUSED, ""),
    ("a neighbour's command with a right MAC and a wrong header CRC",
     changed(signed(control(Op.PING, source=Address(*NEIGHBOUR), ground=0)), 48, 0x5A, seal=False), MALFORMED, ""),
]  # fmt: skip
ACK = control(Op.ACK, Selection.of(KEY, [0, 1, 2]).pack())
SIGNED_ACK = signed_answer(ACK)
SIGNED_ACK_BEFORE = signed_answer(control(Op.ACK, Selection.of(KEY, [0, 1, 2]).pack(), request_id=0x01020303))
UNSIGNED = {
    Op.PONG: messages.pack_housekeeping({}),
    Op.GONE: messages.pack_dead([(KEY, bytes(12))]),
    Op.BUSY: SELECTION,
    Op.MISS: SELECTION,
}
ANSWERS: list[Case] = [
    ("an ACK without a MAC", ACK, REFUSED, ""),
    ("an ACK with a wrong MAC", changed(SIGNED_ACK, len(ACK), SIGNED_ACK[len(ACK)] ^ 1), REFUSED, ""),
    ("an ACK by another key", signed_answer(ACK, STRANGER.ring), REFUSED, ""),
    ("an ACK by an unknown key", signed_answer(ACK, UNKNOWN_KEY.ring), REFUSED, ""),
    ("an ACK of another request", changed(SIGNED_ACK_BEFORE, 35, 0x04), REFUSED, ""),
    ("an ACK of one chunk more", changed(SIGNED_ACK, len(ACK) - 1, 0x0F), REFUSED, ""),
    ("an ACK of a right MAC and a wrong header CRC", changed(SIGNED_ACK, 56, SIGNED_ACK[56] ^ 1, seal=False), MALFORMED,
     ""),
    ("a refusal without a MAC", control(Op.UNREACHABLE, status=Status.REFUSED), REFUSED, ""),
    *((f"a {op.name} without a MAC", control(op, body), REFUSED, "") for op, body in UNSIGNED.items()),
    ("DATA with a MAC", SIGNED_DATA, MALFORMED, ""),
    ("a command", signed(PING), REFUSED, ""),
]  # fmt: skip
MIGRATE = bulk_batch(
    header(Op.MIGRATE)._replace(**FROM_NEIGHBOUR), chunk()[52:PAYLOAD_AT], [VALUE[16:32]], SEQUENCE, NOW_S
).datagrams()[0]
PAYLOADS_FROM_GROUND: list[Case] = [
    ("a SET whose payload was exchanged for another of its CRC", with_exchanged_payload(signed(chunk(), COVERING)),
     REFUSED, ""),
    ("a SET whose MAC does not cover its payload", signed(chunk()), REFUSED, ""),
    ("a SET whose payload was damaged", signed(chunk(), COVERING)[:-1] + b"?", MALFORMED, ""),
    ("a SET by an unknown key", signed(chunk(), Authority(UNKNOWN_KEY.ring, signed_answers=True)), REFUSED,
     TURNED_AWAY),
    ("a SET that is 31 s old", signed(chunk(), COVERING, NOW_S - 31), REFUSED, TURNED_AWAY),
    ("a SET without a MAC where payloads are covered", chunk(), REFUSED, TURNED_AWAY),
]  # fmt: skip
PAYLOADS_FROM_NEIGHBOUR: list[Case] = [
    ("a MIGRATE whose payload was exchanged for another of its CRC", with_exchanged_payload(signed(MIGRATE, COVERING)),
     REFUSED, ""),
    ("a MIGRATE whose MAC does not cover its payload", signed(MIGRATE), REFUSED, ""),
]  # fmt: skip
COVERED_SET_AGAIN: Case = ("a SET with a covered payload seen before", signed(chunk(), COVERING), REPLAYED, "")
REPLAYS: list[Case] = [
    ("seen before", signed(PING), REPLAYED, ""),
    ("a SET seen before", signed(chunk()), REPLAYED, ""),
]


def entry(case: Case, auth: str, link: str, before: tuple[bytes, ...] = ()) -> dict[str, Any]:
    name, packet, counts, answer = case
    return {
        "name": name,
        "auth": auth,
        "from": link,
        "before": [sent.hex() for sent in before],
        "hex": packet.hex(),
        "counts": counts,
        "answer": answer,
    }


BUILT = [
    *(entry(case, "off", "ground") for case in PLAIN_FROM_GROUND),
    *(entry(case, "on", "ground") for case in SIGNED_FROM_GROUND),
    *(entry(case, "on", "neighbour") for case in SIGNED_FROM_NEIGHBOUR),
    *(entry(case, "on", "ground", (case[1],)) for case in REPLAYS),
    *(entry(case, "answers", "ground") for case in PAYLOADS_FROM_GROUND),
    *(entry(case, "answers", "neighbour") for case in PAYLOADS_FROM_NEIGHBOUR),
    entry(COVERED_SET_AGAIN, "answers", "ground", (COVERED_SET_AGAIN[1],)),
    *(entry(case, "answers", "satellite") for case in ANSWERS),
]
VECTORS: list[dict[str, Any]] = json.loads(FILE.read_text("utf-8"))
of_satellites = [vector for vector in VECTORS if vector["from"] != "satellite"]
by_name = pytest.mark.parametrize("vector", of_satellites, ids=lambda vector: vector["name"])


def test_the_file_has_every_packet_byte_for_byte() -> None:
    assert VECTORS == BUILT


def expected(vector: dict[str, Any]) -> tuple[dict[str, int], str]:
    return {name: vector["counts"].get(name, 0) for name in COUNTERS}, vector["answer"]


def answer_words(packet: bytes) -> str:
    found = parse_packet(packet).header
    return f"{found.op.name} {found.status.name}"


def authority_of(auth: str) -> Authority | None:
    return None if auth == "off" else Authority(SIGNER.ring, signed_answers=auth == "answers")


def outcome(begin: Callable[..., Any], vector: dict[str, Any], auth: str = "") -> tuple[dict[str, int], str]:
    authority = authority_of(auth or vector["auth"])
    here = SatelliteId(HERE.plane, HERE.slot)
    machine = begin(SatelliteConfig(here, 1 << 20, authority=authority), World().sky, MoveClock(), BEGAN_S)
    link = ("10.0.0.7", 5_000) if vector["from"] == "ground" else NEIGHBOUR
    for packet in vector["before"]:
        receive_datagram(machine, bytes.fromhex(packet), link, NOW_S)
    machine.datagrams_to_send(NOW_S)
    before = {name: machine.counters.get(name) for name in COUNTERS}
    receive_datagram(machine, bytes.fromhex(vector["hex"]), link, NOW_S)
    answers = [
        answer_words(packet)
        for batch, to in machine.datagrams_to_send(NOW_S)
        for packet in batch.datagrams()
        if to == link and vector["from"] == "ground"
    ]
    return {name: machine.counters.get(name) - before[name] for name in COUNTERS}, " ".join(answers)


@pytest.mark.brief(every=5)
@by_name
def test_a_satellite_in_python_refuses_it(vector: dict[str, Any]) -> None:
    assert outcome(SatelliteMachine, vector) == expected(vector)


@pytest.mark.brief(every=5)
@by_name
def test_a_satellite_in_c_refuses_it(vector: dict[str, Any]) -> None:
    compiler()
    assert outcome(FlightMachine, vector) == expected(vector)


@pytest.mark.brief()
@pytest.mark.parametrize("begin", [SatelliteMachine, FlightMachine])
def test_where_answers_are_signed_the_same_commands_are_refused(begin: Callable[..., Any]) -> None:
    compiler()
    without_payload = (vector for vector in of_satellites if bytes.fromhex(vector["hex"])[9:10] != bytes([Op.SET]))
    for vector in without_payload:
        auth = "off" if vector["auth"] == "off" else "answers"
        assert outcome(begin, vector, auth) == expected(vector), vector["name"]


@pytest.mark.brief(every=5)
@pytest.mark.parametrize(
    "vector", [vector for vector in VECTORS if vector["from"] == "satellite"], ids=lambda v: v["name"]
)
def test_a_client_refuses_it_and_waits_on(vector: dict[str, Any]) -> None:
    config = ClientConfig(7, authority=Authority(SIGNER.ring, signed_answers=True))
    client = ClientMachine(config, World().sky, MoveClock())
    client._in_flight._next_request_id = 0x01020304
    number, _ = client.put(KEY, VALUE, Striping(16, 3, 1), NOW_S)
    assert len(client.datagrams_to_send(NOW_S)) == 1
    receive_datagram(client, bytes.fromhex(vector["hex"]), NOW_S)
    assert {name: client.counters.get(name) for name in COUNTERS} == expected(vector)[0]
    assert client.next_event() is None and not client.take_gone()
    receive_datagram(client, SIGNED["ack"], NOW_S)
    event = client.next_event()
    assert event is not None and event.ok and event.number == number


@pytest.mark.parametrize("auth", ["off", "on", "answers"])
def test_a_host_over_udp_refuses_all_of_them(auth: str) -> None:
    """By the native helper, which serves plain reads and writes by itself."""

    async def scenario() -> None:
        plan = make_plan(hosts=local_hosts("testbed-19x5", 1, free_ports(95)), delay_scale=0.0)
        spec = host_spec(plan, plan.hosts[0], None, authority_of(auth))
        host = UdpHost(spec, asyncio.get_running_loop())
        try:
            host._clock = UnixClock(lambda: BEGAN_S, lambda: 0.0)
            satellite = host._satellites[SatelliteId(HERE.plane, HERE.slot)]
            counters = satellite.machine.counters
            for vector in (vector for vector in VECTORS if vector["from"] == "ground" and vector["auth"] == auth):
                host.set_dead([satellite.machine.config.address])  # a new satellite for each
                host._clock = UnixClock(lambda: BEGAN_S, lambda: 0.0)
                host.set_dead(())
                host._clock = UnixClock(lambda: NOW_S, lambda: 0.0)
                satellite = host._satellites[satellite.machine.config.address]
                counters = satellite.machine.counters
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ground:
                    before: dict[str, int] = {}
                    for packet in (*vector["before"], vector["hex"]):
                        received = counters.get("packets_received")
                        before = {name: counters.get(name) for name in COUNTERS}
                        ground.sendto(bytes.fromhex(packet), satellite.sock.address)
                        async with asyncio.timeout(60):
                            while counters.get("packets_received") == received:
                                await asyncio.sleep(0.001)
                    assert {name: counters.get(name) - before[name] for name in COUNTERS} == expected(vector)[0], vector
        finally:
            host.close()

    asyncio.run(scenario())
