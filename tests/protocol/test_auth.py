"""MACs, the replay window and the gate: what passes, what is refused, and that nothing behind it notices."""

from __future__ import annotations

import hashlib
import hmac
import random
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.conftest import World, key_of
from tests.protocol.datagrams import receive_datagram
from tests.protocol.exchanged import PayloadExchanger, exchanged

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput, ValueTooLarge
from skymemory.keys import KeyRing, SecretKey, first_ring
from skymemory.native.twin import backend
from skymemory.protocol import messages
from skymemory.protocol.auth import (
    MAX_FORGOTTEN,
    MAX_SENDERS,
    MAX_SIGNED_CHUNK_BYTES,
    MAX_SKEW_S,
    REFUSALS_PER_S,
    REMEMBERED,
    Authority,
    ClientGate,
    ReplayWindow,
    kept_runs,
    stamp,
)
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.clock import MoveClock
from skymemory.protocol.satellite.machine import SatelliteConfig, SatelliteMachine
from skymemory.protocol.satellite.routing import LinksBody
from skymemory.protocol.wire import (
    CHUNK_REF_BYTES,
    MAX_CHUNK_BYTES,
    Address,
    ChunkRef,
    Op,
    PlacementTag,
    SkyHeader,
    build_packet,
    bulk_batch,
    parse_packet,
    single,
)
from skymemory.transport.faults import FaultInjector
from skymemory.transport.simulated import SimulatedConstellation

OLD, NEW, OTHER = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
HERE = SatelliteId(2, 9)
NOW_S = 1_700_000_000.25
KEY = bytes(range(100, 132))
GROUND = ("ground", 7)


LEVELS = {"on": (False, False), "answers": (False, True), "every": (True, False)}


def authority(secret: bytes = OLD, every_packet: bool = False, signed_answers: bool = False) -> Authority:
    return Authority(first_ring(secret), every_packet, signed_answers)


def header(op: Op, ground: int = 7, request_id: int = 1, now_s: float = NOW_S) -> SkyHeader:
    return SkyHeader(
        op, Address(2, 9), Address(2, 9, 0xFF), ground, request_id, timestamp_us=int(now_s * 1e6) & 0xFFFFFFFF
    )


def command(op: Op, body: bytes, by: Authority | None = None, sequence: int = 0, now_s: float = NOW_S) -> bytes:
    batch = single(build_packet(header(op, now_s=now_s), body, sequence, now_s))
    return bytes((by or authority()).sign(batch, now_s).headers)


def sets(count: int, by: Authority, payload_bytes: int = 100, sequence: int = 0) -> list[bytes]:
    rng = random.Random(1)
    payloads = [rng.randbytes(payload_bytes) for _ in range(count)]
    refs = b"".join(
        ChunkRef(
            KEY, i, count, payload_bytes, native.crc32(payload), count * payload_bytes, 0, PlacementTag(1, 1, 0, 0, 0)
        ).pack()
        for i, payload in enumerate(payloads)
    )
    return by.sign(bulk_batch(header(Op.SET), refs, payloads, sequence, NOW_S), NOW_S).datagrams()


def satellite(world: World, by: Authority | None = None, now_s: float = NOW_S) -> SatelliteMachine:
    config = SatelliteConfig(HERE, 1 << 20, authority=by or authority())
    return SatelliteMachine(config, world.sky, MoveClock(), now_s)


def counted(machine: SatelliteMachine) -> tuple[int, int, int]:
    return tuple(machine.counters.get(name) for name in ("packets_refused", "packets_replayed", "packets_malformed"))


def test_the_mac_is_what_the_reference_says() -> None:
    """Worked out with the standard library alone, from docs/reference/wire.md."""
    packet = command(Op.EVICT, messages.pack_keys([KEY]), sequence=5)
    assert packet[10] == 1 and packet[46:48] == b"\0\1" and int.from_bytes(packet[4:6], "big") == len(packet) - 7
    covered = bytearray(packet[:-16])
    covered[28:32] = covered[48:52] = bytes(4)
    key = hmac.new(OLD, b"skymemory packets 1", hashlib.sha256).digest()
    time_high = (int(NOW_S * 1e6) >> 32).to_bytes(4, "big")
    assert hmac.new(key, time_high + covered, hashlib.sha256).digest()[:16] == packet[-16:]
    for implementation in (native, backend):
        assert implementation.verify_segments(packet, len(packet)) == b"\0"


def test_in_a_set_the_mac_stands_between_reference_and_payload_and_does_not_cover_it() -> None:
    for packet in sets(3, authority()):
        covered = bytearray(packet[:124])
        covered[28:32] = covered[48:52] = bytes(4)
        key = hmac.new(OLD, b"skymemory packets 1", hashlib.sha256).digest()
        time_high = (int(NOW_S * 1e6) >> 32).to_bytes(4, "big")
        assert hmac.new(key, time_high + covered, hashlib.sha256).digest()[:16] == packet[124:140]
        for implementation in (native, backend):
            assert implementation.verify_segments(packet, len(packet)) == b"\0"
            damaged = packet[:-1] + bytes([packet[-1] ^ 1])
            assert implementation.verify_segments(damaged, len(packet)) == b"\3"
            assert implementation.open_runs([(memoryview(packet), len(packet))], 0) is None


def payload_hash(secret: bytes, payload: bytes) -> bytes:
    """Worked out word by word."""
    key = b"".join(hmac.digest(secret, b"skymemory payloads 1" + bytes([n]), "sha256") for n in range(33))

    def sum_of(block: bytes, n: int, shift: int) -> int:
        return int.from_bytes(block[4 * n :][:4], "little") + int.from_bytes(key[4 * (n + shift) :][:4], "little")

    hashes = b""
    for begin in range(0, len(payload), 1024):
        block = payload[begin : begin + 1024]
        block += bytes(-len(block) % 32)
        pairs = [(group + lane, group + lane + 4) for group in range(0, len(block) // 4, 8) for lane in range(4)]
        for shift in (0, 4):
            products = ((sum_of(block, i, shift) % 2**32) * (sum_of(block, j, shift) % 2**32) for i, j in pairs)
            hashes += (sum(products) % 2**64).to_bytes(8, "little")
    return hashes


@pytest.mark.parametrize("payload_bytes", [0, 1, 31, 32, 1023, 1024, 1025, 6144])
def test_where_answers_are_signed_the_mac_of_a_set_covers_its_payload(payload_bytes: int) -> None:
    """Also worked out from docs/reference/wire.md."""
    (packet,) = sets(1, authority(OLD, *LEVELS["answers"]), payload_bytes)
    covered = bytearray(packet[:124])
    covered[28:32] = covered[48:52] = bytes(4)
    key = hmac.digest(OLD, b"skymemory packets 1", "sha256")
    time_high = (int(NOW_S * 1e6) >> 32).to_bytes(4, "big")
    signed = time_high + covered + payload_hash(OLD, packet[140:])
    assert hmac.digest(key, signed, "sha256")[:16] == packet[124:140]


def test_what_is_signed_comes_in_and_is_answered_as_ever(world: type[World]) -> None:
    machine, by = satellite(world()), authority()
    run = sets(4, by)
    machine.receive_batch(b"".join(run), len(run[0]), GROUND, NOW_S)
    assert machine.counters.get("chunks_set") == 4 and machine.counters.get("packets_received") == 4
    ((ack, link),) = machine.datagrams_to_send(NOW_S)
    assert link == GROUND and parse_packet(ack.datagrams()[0]).header.op is Op.ACK
    receive_datagram(machine, command(Op.EVICT, messages.pack_keys([KEY]), sequence=9), GROUND, NOW_S)
    assert machine.counters.get("chunks_deleted") == 4 and counted(machine) == (0, 0, 0)
    assert satellite(world(), authority(every_packet=True)).plain_requests(NOW_S) is None
    signer = authority(signed_answers=True)
    requests = satellite(world(), signer).plain_requests(NOW_S)
    assert requests is not None and requests[5] is not None and requests[5][4] == signer.signing_key_id(NOW_S)


@pytest.mark.brief(every=5)
@pytest.mark.parametrize(
    "by", [None, authority(OTHER), Authority(KeyRing((SecretKey(9, OLD),)))], ids=["none", "wrong", "unknown id"]
)
@pytest.mark.parametrize("op", [Op.EVICT, Op.MIGRATE, Op.ADVANCE, Op.PING])
def test_a_sender_without_a_key_is_refused_counted_and_notified(
    world: type[World], by: Authority | None, op: Op
) -> None:
    machine = satellite(world())
    run = sets(4, authority())
    machine.receive_batch(b"".join(run), len(run[0]), GROUND, NOW_S)
    machine.datagrams_to_send(NOW_S)
    body = {Op.EVICT: messages.pack_keys([KEY]), Op.ADVANCE: messages.pack_moves(5, 5), Op.PING: b""}.get(op)
    if body is None:
        ref = ChunkRef(KEY, 0, 1, 3, native.crc32(b"new"), 3, 0, PlacementTag(1, 1, 0, 0, 0)).pack()
        plain = bulk_batch(header(op), ref, [b"new"], 9, NOW_S)
        forged = (plain if by is None else by.sign(plain, NOW_S)).datagrams()[0]
    else:
        plain = single(build_packet(header(op), body, 9, NOW_S))
        forged = (plain if by is None else by.sign(plain, NOW_S)).datagrams()[0]
    receive_datagram(machine, forged, ("ground", 66), NOW_S)
    assert counted(machine) == (1, 0, 0)
    assert len(machine.store) == 4 and machine.moves == (0, 0)
    ((answer, link),) = machine.datagrams_to_send(NOW_S)
    refusal = parse_packet(answer.datagrams()[0]).header
    assert link == ("ground", 66) and (refusal.op.name, refusal.status.name) == ("UNREACHABLE", "REFUSED")


def test_a_replayed_packet_does_nothing_and_a_retransmission_passes(world: type[World]) -> None:
    machine, body = satellite(world()), messages.pack_keys([KEY])
    evict = command(Op.EVICT, body, sequence=3)
    receive_datagram(machine, evict, GROUND, NOW_S)
    run = sets(2, authority(), sequence=10)
    machine.receive_batch(b"".join(run), len(run[0]), GROUND, NOW_S)
    machine.datagrams_to_send(NOW_S)
    receive_datagram(machine, evict, GROUND, NOW_S + 1)
    assert len(machine.store) == 2 and counted(machine) == (0, 1, 0) and not machine.datagrams_to_send(NOW_S)
    again = command(Op.EVICT, body, sequence=4, now_s=NOW_S + 1)
    receive_datagram(machine, again, GROUND, NOW_S + 1)
    assert len(machine.store) == 0 and counted(machine) == (0, 1, 0)


@pytest.mark.parametrize("later_s", [MAX_SKEW_S + 1, -MAX_SKEW_S - 1, 2**32 / 1e6, 600.0])
def test_an_old_packet_is_refused_even_where_the_clock_of_32_bits_has_come_round(
    world: type[World], later_s: float
) -> None:
    machine = satellite(world(), now_s=NOW_S - 100)
    receive_datagram(machine, command(Op.PING, b""), GROUND, NOW_S + later_s)
    assert counted(machine) == (1, 0, 0)


def test_a_satellite_that_starts_again_takes_nothing_from_before(world: type[World]) -> None:
    machine = satellite(world(), now_s=NOW_S + 1.1)
    receive_datagram(machine, command(Op.EVICT, messages.pack_keys([KEY])), GROUND, NOW_S + 2)
    assert counted(machine) == (0, 1, 0)


@pytest.mark.slow
@pytest.mark.seeded
@given(bit=st.integers(0, 8 * 124 - 1))
def test_any_changed_bit_that_the_mac_covers_is_refused_even_with_a_right_checksum(bit: int) -> None:
    machine = satellite(World())
    packet = bytearray(sets(1, authority())[0])
    packet[bit // 8] ^= 1 << bit % 8
    head = packet[:140]
    native.seal_headers(head, 140, 8)
    packet[:140] = head
    receive_datagram(machine, bytes(packet), GROUND, NOW_S)
    assert (len(machine.store) == 1) == (28 <= bit // 8 < 32 or 48 <= bit // 8 < 52)


def test_damage_is_not_taken_for_an_attack(world: type[World]) -> None:
    machine = satellite(world())
    packet = bytearray(command(Op.PING, b""))
    packet[20] ^= 1
    receive_datagram(machine, bytes(packet), GROUND, NOW_S)
    run = sets(2, authority())
    receive_datagram(machine, run[0][:-1] + bytes([run[0][-1] ^ 1]), GROUND, NOW_S)
    assert counted(machine) == (0, 0, 2) and not machine.datagrams_to_send(NOW_S)


def test_rotation_old_and_new_are_accepted_and_then_the_old_is_not(world: type[World]) -> None:
    ring = first_ring(OLD)
    machine_keys = Authority(ring)
    machine = satellite(world(), machine_keys)
    both = ring.with_key(NEW, from_s=NOW_S + 10)
    assert both.active(NOW_S).key_id == 1 and both.active(NOW_S + 10).key_id == 2
    old, new = Authority(ring), Authority(KeyRing((SecretKey(2, NEW),)))
    receive_datagram(machine, command(Op.PING, b"", new, 0), GROUND, NOW_S)
    assert counted(machine) == (1, 0, 0)
    machine_keys.ring = both
    for sequence, by in enumerate((new, old, Authority(both)), 1):
        receive_datagram(machine, command(Op.PING, b"", by, sequence), GROUND, NOW_S)
    assert counted(machine) == (1, 0, 0)
    machine_keys.ring = both.without({1}, NOW_S + 11)
    receive_datagram(machine, command(Op.PING, b"", old, 7), GROUND, NOW_S)
    assert counted(machine) == (2, 0, 0)
    receive_datagram(machine, command(Op.PING, b"", new, 8), GROUND, NOW_S)
    assert counted(machine) == (2, 0, 0)


def test_a_new_key_takes_a_number_that_is_free():
    ring = first_ring(bytes(32))
    for number in (2, 3, 4):
        ring = ring.with_key(bytes([number]) * 32, float(number))
        assert [key.key_id for key in ring.keys] == list(range(1, number + 1))
    last = KeyRing((SecretKey(1, bytes(32)), SecretKey(0xFFFF, bytes(32), 1.0)))
    assert [key.key_id for key in last.with_key(bytes(32), 2.0).keys] == [1, 0xFFFF, 2]


def test_a_ring_refuses_what_makes_no_sense() -> None:
    ring = first_ring(OLD)
    with pytest.raises(InvalidInput, match="in use"):
        ring.without({1}, NOW_S)
    with pytest.raises(InvalidInput, match="no key 7"):
        ring.with_key(NEW, 0).without({7}, NOW_S)
    with pytest.raises(InvalidInput, match="32"):
        SecretKey(1, b"short")
    with pytest.raises(InvalidInput, match="share an id"):
        KeyRing((SecretKey(1, OLD), SecretKey(1, NEW)))
    assert [key.key_id for key in KeyRing((SecretKey(0xFFFF, OLD),)).with_key(NEW, 0).keys] == [0xFFFF, 1]
    assert OLD.hex() not in repr(ring) and repr(OLD) not in repr(ring)


def test_a_flood_is_counted_and_gets_no_more_answers_than_a_few(world: type[World]) -> None:
    """Answers cost more than the check does, and go to whatever address the flood was sent from."""
    machine, forged = satellite(world()), command(Op.PING, b"", authority(OTHER))
    answers = []
    for number in range(2000):
        receive_datagram(machine, forged, ("stranger", number), NOW_S + number * 1e-6)
        answers.append(len(machine.datagrams_to_send(NOW_S + number * 1e-6)))
    assert counted(machine) == (2000, 0, 0) and sum(answers) in (REFUSALS_PER_S - 1, REFUSALS_PER_S)
    assert sum(answers[:50]) == 50, "a sender that merely has the wrong key is notified at once"
    for second in (2, 3):
        receive_datagram(machine, forged, ("stranger", 0), NOW_S + second)
        assert len(machine.datagrams_to_send(NOW_S + second)) == 1


# --- who is at the other end ---


def test_a_ground_hosts_telemetry_is_refused_and_diverts_no_answer(world: type[World]) -> None:
    machine, run = satellite(world()), sets(4, authority())
    machine.receive_batch(b"".join(run), len(run[0]), GROUND, NOW_S)
    spoken = SkyHeader(Op.ACK, Address(2, 9), Address(2, 8, 0xFF), 7, 1)
    onward = SkyHeader(Op.PRESENCE, Address(0, 3), Address(2, 8), 0, 0x80000000)
    for header_of_it in (spoken, onward):
        receive_datagram(machine, build_packet(header_of_it, b"", 0, NOW_S), ("stranger", 66), NOW_S)
    ((ack, link),) = machine.datagrams_to_send(NOW_S)
    assert link == GROUND and parse_packet(ack.datagrams()[0]).header.op is Op.ACK
    assert counted(machine) == (2, 0, 0) and machine.counters.get("packets_forwarded") == 0


def test_a_command_for_another_beam_is_refused_from_any_sender(world: type[World]) -> None:
    """Sound, authentic, never seen here: but it names the beam it was made for, and the answers would go by ours."""
    machine, by, run = satellite(world()), authority(), sets(4, authority())
    machine.receive_batch(b"".join(run), len(run[0]), GROUND, NOW_S)
    there = SkyHeader(Op.EVICT, Address(2, 8), Address(2, 8, 0xFF), 7, 9, timestamp_us=int(NOW_S * 1e6) & 0xFFFFFFFF)
    packet = build_packet(there, messages.pack_keys([KEY]), 3, NOW_S)
    signed = bytes(by.sign(single(packet), NOW_S).headers)
    ours = command(Op.PING, bytes(len(messages.pack_keys([KEY]))), sequence=4)
    machine.receive_batch(signed, len(signed), ("stranger", 66), NOW_S)
    machine.receive_batch(signed + ours, len(signed), ("stranger", 66), NOW_S)
    links = {link for _, link in machine.datagrams_to_send(NOW_S)}
    assert counted(machine)[0] == 2 and machine.counters.get("packets_forwarded") == 0
    assert SatelliteId(2, 8) not in links


@pytest.mark.parametrize("by", [None, authority(OTHER), authority()], ids=["no key", "wrong key", "the key"])
def test_only_what_is_authentic_is_a_sign_of_a_neighbours_life(world: type[World], by: Authority | None) -> None:
    """Its address can be borrowed: then a dead neighbour would be sent everything that should go round it."""
    machine, neighbour = satellite(world()), SatelliteId(2, 10)
    now_s = NOW_S
    for step in range(40):
        now_s = NOW_S + 0.1 * step
        machine.neighbours.on_packet_sent(neighbour, now_s)
        if (due_s := machine.next_timer_s()) is not None and due_s <= now_s:
            machine.handle_timer(now_s)
        machine.datagrams_to_send(now_s)
        spoken = SkyHeader(Op.LINKS, Address(2, 9), Address(2, 10), 0, 0)
        packet = single(build_packet(spoken, LinksBody(False, (0, 0), 0).pack(), step, now_s))
        batch = packet if by is None else by.sign(packet, now_s)
        receive_datagram(machine, bytes(batch.headers), neighbour, now_s)
    alive = by is not None and by.ring == authority().ring
    assert machine.neighbours.links.is_up(HERE, neighbour) == alive


def test_each_of_a_run_is_judged_and_counted_by_itself(world: type[World]) -> None:
    machine = satellite(world())
    right, wrong = sets(3, authority()), sets(3, authority(OTHER), sequence=9)
    machine.receive_batch(b"".join(wrong), len(wrong[0]), GROUND, NOW_S)
    assert counted(machine) == (3, 0, 0)
    machine.receive_batch(right[0] + wrong[1] + right[2], len(right[0]), GROUND, NOW_S)
    assert counted(machine) == (4, 0, 0) and machine.counters.get("chunks_set") == 2
    gate = ClientGate(authority(signed_answers=True), machine.counters)
    answer = build_packet(SkyHeader(Op.PONG, Address(2, 9, 0xFF), Address(2, 9), 7, 1), b"", 0, NOW_S)
    assert gate.admit([(memoryview(answer * 3), len(answer))]) == [] and counted(machine) == (7, 0, 0)


def test_what_is_passed_on_of_a_run_are_whole_packets() -> None:
    run = memoryview(b"".join(bytes([number]) * 80 for number in range(5)))
    kept = kept_runs(run, 80, b"\1\0\1\1\0")
    assert [(bytes(view), size) for view, size in kept] == [(bytes([number]) * 80, 80) for number in (0, 2, 3)]


def test_a_run_that_is_kept_whole_stays_one_run() -> None:
    run = memoryview(bytes(160))
    assert kept_runs(run, 80, b"\1\1") == [(run, 80)]


def test_packets_of_a_run_that_go_elsewhere_are_passed_on(world: type[World]) -> None:
    """Joined behind one that is for this satellite, or before it."""
    by, body = authority(), messages.pack_keys([KEY])
    there = SkyHeader(Op.EVICT, Address(2, 8), Address(2, 9, 0xFF), 7, 9, timestamp_us=int(NOW_S * 1e6) & 0xFFFFFFFF)
    for number, ours_first in enumerate((True, False)):
        machine = satellite(world())
        elsewhere = bytes(by.sign(single(build_packet(there, body, 3, NOW_S)), NOW_S).headers)
        ours = command(Op.EVICT, body, sequence=4)
        joined = (ours, elsewhere) if ours_first else (elsewhere, ours)
        machine.receive_batch(b"".join(joined), len(ours), GROUND, NOW_S)
        assert machine.counters.get("packets_forwarded") == 1, number
        assert machine.counters.get("packets_received") == 2 and counted(machine) == (0, 0, 0)


def test_each_key_has_its_own_numbers(world: type[World]) -> None:
    """Two tenants whose hosts have one number count by themselves."""
    both = first_ring(OLD).with_key(NEW, from_s=NOW_S - 10)
    machine = satellite(world(), Authority(both))
    for by in (Authority(both), authority(OLD)):
        receive_datagram(machine, command(Op.PING, b"", by, 1), GROUND, NOW_S)
    assert counted(machine) == (0, 0, 0)
    receive_datagram(machine, command(Op.PING, b"", Authority(both), 1), GROUND, NOW_S)
    assert counted(machine) == (0, 1, 0)


@pytest.mark.parametrize("level", ["answers", "every"])
def test_a_packet_too_short_for_an_answer_is_malformed(world: type[World], level: str) -> None:
    counters = satellite(world()).counters
    gate = ClientGate(authority(OLD, *LEVELS[level]), counters)
    for data in (b"", b"\x08", bytes(19), b"\x08\x60" + bytes(15)):
        assert gate.admit([(memoryview(data), len(data))]) == [(memoryview(data), len(data))]
    assert counters.get("packets_refused") == 0


# --- the window ---


@given(st.lists(st.lists(st.integers(0, 200), max_size=6), max_size=60))
def test_a_run_passes_whole_or_not_at_all(runs: list[list[int]]) -> None:
    window, judge, seen = ReplayWindow(0), ReplayWindow(0), set[int]()
    for run in runs:
        new = bool(run) and len(set(run)) == len(run) and not seen & set(run)
        assert window.all_first((1, 7, 0), [stamp(number, 0) for number in run]) == new
        if new:
            seen |= set(run)
            assert all(judge.first((1, 7, 0), stamp(number, 0)) for number in run)
    for number in range(201):
        assert window.first((1, 7, 0), stamp(number, 0)) == judge.first((1, 7, 0), stamp(number, 0))


@given(st.lists(st.integers(0, 300), max_size=300))
def test_within_the_window_each_number_passes_once(numbers: list[int]) -> None:
    window, seen = ReplayWindow(0), set()
    for number in numbers:
        assert window.first((1, 7, 0), stamp(number, 0)) == (number not in seen)
        seen.add(number)


def test_the_window_is_bounded_and_forgets_only_what_it_then_refuses() -> None:
    window = ReplayWindow(0)
    count = 5 * REMEMBERED
    order = list(range(count))
    rng = random.Random(3)
    for at in range(0, count, 64):  # reordered a little, as networks do
        order[at : at + 64] = rng.sample(order[at : at + 64], len(order[at : at + 64]))
    assert all(window.first((1, 7, 0), stamp(number, 1)) for number in order)
    assert not any(window.first((1, 7, 0), stamp(number, 1)) for number in order)
    (seen,) = window._senders.values()
    assert len(seen.recent) + len(seen.earlier) <= 2 * REMEMBERED


@pytest.mark.parametrize("behind_s", [0.5, 3.0, 25.0])
def test_a_host_whose_clock_is_behind_is_served_among_any_number_of_others(behind_s: float) -> None:
    """Hosts that speak in turn, more than are remembered whole: none is new, and none refused for what others sent."""
    window, hosts = ReplayWindow(0), MAX_SENDERS + 44
    for turn in range(4):
        for ground in range(1, hosts + 1):
            time_s = 100.0 + turn + ground / hosts - behind_s * (ground == hosts)
            number = stamp(int(time_s * 1e6), turn)
            assert window.first((1, ground, 0), number), (turn, ground)
            assert not window.first((1, ground, 0), number)


def test_what_is_remembered_of_senders_is_bounded_and_old_ones_go_first() -> None:
    window = ReplayWindow(0)
    for ground in range(1, MAX_SENDERS + MAX_FORGOTTEN + 1001):
        assert window.first((1, ground, 0), stamp(ground, 0))
    assert len(window._forgotten) == MAX_FORGOTTEN
    assert not any(window.first((1, ground, 0), stamp(ground, 0)) for ground in range(1, 1001))
    later_us = int(3 * MAX_SKEW_S * 1e6)
    for ground in range(2 * MAX_SENDERS):
        assert window.first((2, ground, 0), stamp(later_us, ground % 2))
    assert len(window._forgotten) < MAX_FORGOTTEN, "nothing so old passes the check of its time"


def test_forgotten_senders_cannot_be_replayed() -> None:
    window = ReplayWindow(0)
    for ground in range(1, 3 * MAX_SENDERS):
        assert window.first((1, ground, 0), stamp(ground, 0))
    assert len(window._senders) <= MAX_SENDERS
    assert not any(window.first((1, ground, 0), stamp(ground, 0)) for ground in range(1, 3 * MAX_SENDERS))


# --- whole constellations ---


def guarded(by: Authority, access: str = "los", **kwargs) -> tuple[World, SimulatedConstellation]:
    world = World(access=access)
    world.sim = SimulatedConstellation(world.sky, 64 << 20, None, lambda a, b: 0.004, authority=by, **kwargs)
    world.host = world.sim.connect(ClientConfig(7, access, expected_rtt_s=0.008, authority=by))
    return world, world.sim


@pytest.mark.brief("on-los-True", "every-gateway-False", "every-los-False", "answers-gateway-True")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("access", ["los", "gateway"])
@pytest.mark.parametrize("offload", [True, False])
def test_values_come_back_through_a_guarded_constellation(level, access, offload, value_of) -> None:
    world, _ = guarded(authority(OLD, *LEVELS[level]), access, offload=offload)
    value = value_of(300_000)
    done, info = world.put("guarded", value)
    assert done.ok and world.get(info)[1] == value
    world.advance(1)  # and migrates: satellites command each other by the same ring
    world.settle()
    assert world.counted("chunks_migrated_in") > 0 and world.get(info)[1] == value
    assert world.counted("packets_refused") == world.counted("packets_replayed") == 0
    assert world.counted("packets_malformed") == 0
    missing = world.host.machine.get(
        info.__class__(key_of("else"), *[getattr(info, n) for n in info.__slots__[1:]]),
        memoryview(bytearray(300_000)),
        world.now_s,
    )
    assert world.host.run([missing])[missing].report.failure == "missing"


@pytest.mark.parametrize("level", LEVELS)
def test_loss_duplication_and_reordering_are_survived_and_duplicates_counted(level, value_of) -> None:
    faults = FaultInjector(loss=0.05, duplicate=0.1, reorder=0.1, corrupt=0.02, seed=4)
    world, _ = guarded(authority(OLD, *LEVELS[level]), faults=faults)
    for number in range(5):
        value = value_of(100_000, number)
        done, info = world.put(f"lossy {number}", value)
        assert done.ok, done.report
        finished, got = world.get(info)
        assert finished.ok and got == value
    assert world.counted("packets_replayed") > 0 and world.counted("packets_refused") == 0


@pytest.mark.parametrize("offload", [True, False])
def test_payloads_that_were_exchanged_are_refused_and_sent_again(offload: bool, value_of) -> None:
    """With MACs on answers those of SETs and MIGRATEs cover payloads, whose CRC-32 an attacker can keep."""
    exchanger = PayloadExchanger(0.2)
    world, _ = guarded(authority(OLD, *LEVELS["answers"]), offload=offload, faults=exchanger)
    written = []
    for number in range(3):
        value = value_of(100_000, number)
        done, info = world.put(f"exchanged {number}", value)
        assert done.ok, done.report
        written.append((info, value))
    sets = exchanger.count[Op.SET]
    assert sets > 0 and world.counted("packets_refused") == sets
    world.advance(1)
    world.settle()
    assert exchanger.count[Op.MIGRATE] > 0 and world.counted("packets_refused") == exchanger.count.total()
    for info, value in written:
        assert world.get(info) == (ANY, value)
    assert world.counted("packets_malformed") == world.counted("packets_replayed") == 0


def test_with_macs_on_commands_alone_an_exchanged_payload_is_read_as_sound(value_of) -> None:
    """What docs/reference/wire.md admits of `on`."""
    world, _ = guarded(authority(), faults=PayloadExchanger(1.0))
    value = value_of(10_000)
    done, info = world.put("exchanged", value)
    finished, got = world.get(info)
    assert done.ok and finished.ok and got != value and native.crc32(got) == native.crc32(value)


@pytest.mark.parametrize("which", range(4))
def test_of_a_run_only_the_set_whose_payload_was_exchanged_is_refused(world: type[World], which: int) -> None:
    by = authority(OLD, *LEVELS["answers"])
    machine, run = satellite(world(), by), sets(4, by)
    body = len(run[0]) - 100
    forged = run[which][:body] + exchanged(run[which][body:], 40)
    machine.receive_batch(b"".join([*run[:which], forged, *run[which + 1 :]]), len(run[0]), GROUND, NOW_S)
    assert counted(machine) == (1, 0, 0) and machine.counters.get("packets_received") == 4
    assert set(machine.store.shares[KEY]) == set(range(4)) - {which}
    ((ack, _),) = machine.datagrams_to_send(NOW_S)
    assert parse_packet(ack.datagrams()[0]).header.op is Op.ACK, "and no refusal, which would end the put"
    machine.receive_batch(sets(4, by, sequence=9)[which], len(run[0]), GROUND, NOW_S)
    assert len(machine.store) == 4 and counted(machine) == (1, 0, 0)


def test_the_largest_set_whose_payload_was_exchanged_gets_no_refusal_either(world: type[World]) -> None:
    by = authority(OLD, *LEVELS["answers"])
    machine, (packet,) = satellite(world(), by), sets(1, by, MAX_SIGNED_CHUNK_BYTES)
    body = len(packet) - MAX_SIGNED_CHUNK_BYTES
    forged = packet[:body] + exchanged(packet[body:], 40)
    machine.receive_batch(forged, len(forged), GROUND, NOW_S)
    assert counted(machine) == (1, 0, 0) and not machine.datagrams_to_send(NOW_S)


@pytest.mark.parametrize("by", [None, authority(OTHER)])
def test_a_client_without_the_key_fails_at_once_and_says_why(by: Authority | None, value_of) -> None:
    world, sim = guarded(authority())
    stranger = sim.connect(ClientConfig(8, expected_rtt_s=0.008, authority=by))
    began_s = world.now_s
    done, _ = world.put("stranger", value_of(100_000), host=stranger)
    assert not done.ok and done.report.failure == "refused" and world.now_s - began_s < 0.1
    assert world.counted("chunks_set") == 0 and world.counted("packets_refused") > 0


@pytest.mark.parametrize("level", ["answers", "every"])
def test_a_client_ignores_answers_without_a_mac_where_they_have_one(level, value_of) -> None:
    by = authority(OLD, *LEVELS[level])
    world, _ = guarded(by)
    _, info = world.put("answers", value_of(10_000))
    machine = world.host.machine
    out = bytearray(10_000)
    number = machine.get(info, memoryview(out), world.now_s)
    (batch, _), *_ = machine.datagrams_to_send(world.now_s)
    asked = parse_packet(batch.datagrams()[0]).header
    forged = SkyHeader(Op.UNREACHABLE, asked.source, asked.destination, 7, asked.request_id)
    receive_datagram(machine, build_packet(forged, b"", 0, 0.0), world.now_s)
    receive_datagram(
        machine, authority(OTHER, True).sign(single(build_packet(forged, b"", 0, 0.0)), 0.0).headers, world.now_s
    )
    assert machine.next_event() is None and machine.counters.get("packets_refused") == 2
    assert world.get(info)[0].ok and number not in {event.number for event in iter(machine.next_event, None)}


def test_a_forged_answer_ends_an_operation_where_answers_carry_none(value_of) -> None:
    """What docs/guide/security.md admits: a miss, never wrong bytes."""
    world, _ = guarded(authority())
    _, info = world.put("answers", value_of(10_000))
    machine = world.host.machine
    number = machine.get(info, memoryview(bytearray(10_000)), world.now_s)
    (batch, _), *_ = machine.datagrams_to_send(world.now_s)
    asked = parse_packet(batch.datagrams()[0]).header
    forged = SkyHeader(Op.UNREACHABLE, asked.source, asked.destination, 7, asked.request_id)
    receive_datagram(machine, build_packet(forged, b"", 0, 0.0), world.now_s)
    event = machine.next_event()
    assert event is not None and event.number == number and not event.ok


def answered_get(level: str, value_of) -> tuple[World, int, bytes]:
    """A client that waits for a value of one chunk, its operation, and the MISS that its satellite has made."""
    world, sim = guarded(authority(OLD, *LEVELS[level]))
    _, info = world.put("answers", value_of(3_000))
    (holder,) = (here for here, machine in sim.satellites.items() if len(machine.store))
    sim.satellites[holder].store.remove_key(info.key)
    machine = world.host.machine
    number = machine.get(info, memoryview(bytearray(3_000)), world.now_s)
    ((request, _),) = machine.datagrams_to_send(world.now_s)
    receive_datagram(sim.satellites[holder], request.datagrams()[0], ("ground", 7), world.now_s)
    ((answer, _),) = sim.satellites[holder].datagrams_to_send(world.now_s)
    (miss,) = answer.datagrams()
    return world, number, miss


@pytest.mark.parametrize("level", ["answers", "every"])
def test_a_changed_answer_is_refused_and_counted_and_the_operation_goes_on(level: str, value_of) -> None:
    """Each bit of a MISS that its MAC covers, with right checksums: another request, key id, flag or chunk; and the
    request's own answer without its MAC.
    """
    world, number, miss = answered_get(level, value_of)
    machine, changed = world.host.machine, list[bytes]()
    for bit in range(8 * len(miss)):
        packet = bytearray(miss)
        packet[bit // 8] ^= 1 << bit % 8
        native.seal_headers(packet, len(packet), 16)
        uncovered = bit // 8 in (*range(36, 40), *range(56, 60))  # what forwarders change, and the checksum
        if native.verify_segments(packet, len(packet)) == b"\0" and not uncovered:
            changed.append(bytes(packet))
    assert len(changed) > 400
    plain = native.strip_macs(miss, len(miss), 16, b"\1")
    for count, packet in enumerate([*changed, bytes(plain)], 1):
        receive_datagram(machine, packet, world.now_s)
        assert machine.counters.get("packets_refused") + machine.counters.get("packets_malformed") == count
    assert machine.next_event() is None and machine.counters.get("packets_refused") > 400
    assert machine.counters.get("packets_unexpected") == 0
    receive_datagram(machine, miss, world.now_s)
    assert machine.wants_to_send, "the answer itself is believed: others are asked"
    assert world.host.run([number])[number].report.failure == "under way", "it was SET just now"


@pytest.mark.parametrize("level", ["answers", "every"])
def test_what_lies_behind_another_packet_in_a_run_is_checked_too(level: str, value_of) -> None:
    """Receive offload joins what comes from one port: the first of a run may be anything."""
    world, number, miss = answered_get(level, value_of)
    plain = bytes(native.strip_macs(miss, len(miss), 16, b"\1"))
    command_first = bytes([0x18]) + plain[1:]
    data_first = plain[:17] + bytes([Op.DATA]) + plain[18:]
    for first in (command_first, data_first, bytes(len(plain))):
        world.host.machine.receive_batch(first + plain, len(plain), world.now_s)
    assert world.host.machine.counters.get("packets_refused") >= 3
    assert world.host.machine.next_event() is None and number in world.host.machine._operations


@pytest.mark.parametrize("level", ["answers", "every"])
def test_a_command_that_looks_like_data_is_refused(level: str, value_of) -> None:
    """Its bytes are those of DATA for the request that is awaited, if one overlooks that it is a command."""
    world, number, miss = answered_get(level, value_of)
    request_id = parse_packet(native.strip_macs(miss, len(miss), 16, b"\1")).header.request_id
    source = Address(Op.DATA << 4, 9)
    for op in (Op.PING, Op.EVICT):
        packet = build_packet(SkyHeader(op, Address(2, 9), source, 7, 1, timestamp_us=request_id), bytes(80), 0, 0.0)
        assert packet[17] == Op.DATA and packet[32:36] == request_id.to_bytes(4, "big")
        world.host.machine.receive_batch(packet, len(packet), world.now_s)
    assert world.host.machine.next_event() is None and number in world.host.machine._operations
    assert world.host.machine.counters.get("packets_refused") == 2


def test_where_data_carries_no_mac_data_with_one_is_dropped(value_of) -> None:
    world, _ = guarded(authority(signed_answers=True))
    _, info = world.put("answers", value_of(3_000))
    machine = world.host.machine
    machine.get(info, memoryview(bytearray(3_000)), world.now_s)
    (batch, _), *_ = machine.datagrams_to_send(world.now_s)
    asked = parse_packet(batch.datagrams()[0]).header
    answer = SkyHeader(Op.DATA, asked.source, asked.destination, 7, asked.request_id)
    ref = ChunkRef(
        info.key, 0, 1, 3_000, native.crc32(bytes(3_000)), 3_000, info.value_crc, PlacementTag(3, 10, 0, 0, 0)
    )
    plain = bulk_batch(answer, ref.pack(), [bytes(3_000)], 0, 0.0)
    for by in (authority(every_packet=True), authority(OTHER, True)):
        machine.receive_batch(by.sign(plain, 0.0).datagrams()[0], 65_000, world.now_s)
    assert machine.next_event() is None and world.get(info)[0].ok


def test_the_largest_chunk_leaves_room_for_a_mac() -> None:
    by = authority(every_packet=True)
    (packet,) = sets(1, by, MAX_SIGNED_CHUNK_BYTES)
    assert native.verify_segments(packet, len(packet)) == b"\0"
    with pytest.raises(ValueTooLarge, match=str(MAX_SIGNED_CHUNK_BYTES)):
        sets(1, by, MAX_CHUNK_BYTES)


def test_a_larger_chunk_than_an_answer_can_sign_is_refused(world: type[World]) -> None:
    by = authority()
    machine = satellite(world(), by)
    (packet,) = sets(1, by, MAX_SIGNED_CHUNK_BYTES + 8)
    receive_datagram(machine, packet, GROUND, NOW_S)
    assert len(machine.store) == 0 and counted(machine) == (1, 0, 0)


@pytest.mark.slow
@pytest.mark.seeded
@given(st.binary(max_size=400), st.integers(-1, 300))
def test_garbage_at_the_gate_raises_nothing(data: bytes, segment_bytes: int) -> None:
    machine = satellite(World())
    for source in (GROUND, SatelliteId(2, 8)):
        machine.receive_batch(data, segment_bytes, source, NOW_S)
    assert machine.counters.get("chunks_set") == 0


@pytest.mark.slow
@pytest.mark.seeded
@given(st.data())
def test_mutilated_authentic_packets_raise_nothing(data) -> None:
    machine = satellite(World(), authority(every_packet=True))
    run = b"".join(sets(3, authority()))
    cut = data.draw(st.integers(1, len(run)))
    packet = bytearray(run[:cut])
    for _ in range(data.draw(st.integers(0, 3))):
        packet[data.draw(st.integers(0, cut - 1))] = data.draw(st.integers(0, 255))
    machine.receive_batch(bytes(packet), data.draw(st.integers(1, 260)), GROUND, NOW_S)
    assert CHUNK_REF_BYTES and len(machine.store) <= 3


def test_a_satellite_that_asks_for_no_macs_drops_packets_that_carry_one(world: type[World]) -> None:
    """As every peer does that knows only version 1 without keys; a SET must not be stored with its MAC for payload."""
    machine = SatelliteMachine(SatelliteConfig(HERE, 1 << 20), world().sky, MoveClock(), NOW_S)
    run = sets(3, authority())
    machine.receive_batch(b"".join(run), len(run[0]), GROUND, NOW_S)
    receive_datagram(machine, command(Op.EVICT, messages.pack_keys([KEY])), GROUND, NOW_S)
    assert len(machine.store) == 0 and counted(machine) == (0, 0, 4) and not machine.datagrams_to_send(NOW_S)


def test_a_client_that_asks_for_no_macs_drops_answers_that_carry_one(value_of) -> None:
    world, _ = guarded(authority())
    _, info = world.put("answers", value_of(10_000))
    machine = world.host.machine
    number = machine.get(info, memoryview(bytearray(10_000)), world.now_s)
    (batch, _), *_ = machine.datagrams_to_send(world.now_s)
    asked = parse_packet(batch.datagrams()[0]).header
    answer = SkyHeader(Op.UNREACHABLE, asked.source, asked.destination, 7, asked.request_id)
    signed = authority(every_packet=True).sign(single(build_packet(answer, b"", 0, 0.0)), 0.0)
    receive_datagram(machine, signed.headers, world.now_s)
    assert machine.next_event() is None and machine.counters.get("packets_malformed") == 1
    assert world.get(info)[0].ok and number not in {event.number for event in iter(machine.next_event, None)}
