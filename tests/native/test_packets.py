"""Small packets: made, sent and read alike by both implementations, and as the protocol's own code has them."""

from __future__ import annotations

import errno
import socket
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skymemory.native.twin import backend
from skymemory.protocol.messages import Selection
from skymemory.protocol.wire import Address, Op, SkyHeader, Status, build_packet, bulk_prefix, parse_packet
from skymemory.transport.udp_socket import udp_socket

KEY = bytes(range(32))
_settings = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=250)
_words = st.integers(0, 2**32 - 1)


def headers(destination: Address, source: Address, request_id: int) -> SkyHeader:
    return SkyHeader(Op.GET, destination, source, 7, request_id, timestamp_us=5, slot_moves=-2, plane_moves=1, credit=3)


def test_packets_are_those_that_the_protocol_builds(impl: ModuleType) -> None:
    said = [(Address(1, n), Address(4095, n, 0xFF), 2**32 - 1 - n, bytes([n]) * n * 50) for n in range(5)]
    prefix = bulk_prefix(headers(*said[0][:3]), 0.0)
    rows = [(to.pack(), source.pack(), request, body) for to, source, request, body in said]
    made = impl.command_packets(prefix, 0x3FFE, rows)
    assert made == [
        build_packet(headers(to, source, request), body, 0x3FFE + n, 0.0)
        for n, (to, source, request, body) in enumerate(said)
    ]
    assert all(type(packet) is bytes for packet in made)
    assert impl.command_packets(prefix, 0, []) == []


def test_packets_that_cannot_be_are_refused(impl: ModuleType) -> None:
    row = (1, 2, 3, b"body")
    for prefix, sequence in ((bytes(51), 0), (bytes(53), 0), (bytes(52), -1)):
        with pytest.raises(ValueError, match="a prefix of"):
            impl.command_packets(prefix, sequence, [row])
    with pytest.raises(ValueError, match="no packet carries"):
        impl.command_packets(bytes(52), 0, [row, (1, 2, 3, bytes(65_456))])
    assert len(impl.command_packets(bytes(52), 0, [(1, 2, 3, bytes(65_455))])[0]) == 65_507
    for bad in ("row", (1, 2, 3), (1, 2, "3", b""), (1, 2, 3, "text")):
        with pytest.raises((TypeError, ValueError)):
            impl.command_packets(bytes(52), 0, [bad])


@_settings
@given(
    st.binary(min_size=52, max_size=52),
    st.integers(0, 2**20),
    st.lists(st.tuples(_words, _words, _words, st.binary(max_size=200)), max_size=4),
)
def test_any_packets_are_made_alike(fast: ModuleType, prefix: bytes, sequence: int, rows: list) -> None:
    assert fast.command_packets(prefix, sequence, rows) == backend.command_packets(prefix, sequence, rows)


def test_sequence_counts_go_round_at_the_end_of_all_numbers(impl: ModuleType) -> None:
    rows = [(1, 2, 3, b""), (1, 2, 3, b"")]
    counts = [packet[2:4].hex() for packet in impl.command_packets(bytes(52), 2**63 - 1, rows)]
    assert counts == ["ffff", "c000"]
    burst = impl.bulk_headers(bytes(60), bytes(144), 2**63 - 1, 16)
    assert [burst[at + 2 : at + 4].hex() for at in (0, 132)] == counts


def ack(body: bytes, status: Status = Status.OK, op: Op = Op.ACK, **changes: int) -> bytes:
    said = {"timestamp_us": 5, "slot_moves": -2, "plane_moves": 1, "credit": 300} | changes
    header = SkyHeader(op, Address(1, 2, 0xFF), Address(3, 4), 7, 9, status, **said)
    return build_packet(header, body, 5, 12.5)


def test_a_plain_ack_is_read(impl: ModuleType) -> None:
    for count in (1, 7, 8, 9, 48, 64, 500):
        body = Selection.of(KEY, range(3, 3 + 10 * count, 10), 10).pack()
        assert impl.open_ack(memoryview(ack(body))) == (9, 7, 5, -2, 1, 300, KEY, 3, 10, count)


def test_any_other_packet_is_not_read_as_a_plain_ack(impl: ModuleType) -> None:
    body = Selection.of(KEY, range(8)).pack()
    sound = ack(body)
    assert impl.open_ack(sound) is not None
    for packet in (
        b"",
        b"x",
        sound[:60],
        sound[:-1],
        sound + b"x",
        sound[:30] + b"\x77" + sound[31:],
        ack(body, Status.FULL),
        ack(body, op=Op.MISS),
        ack(body, op=Op.BUSY),
        ack(body, slot_moves=2**30 + 1),
        ack(body, plane_moves=-(2**30) - 1),
        ack(body[:-1] + b"\x7f"),
        ack(body + b"\xff"),
        ack(body[:-1]),
        ack(Selection.of(KEY, [0, 2]).pack()),
        ack(body[:43] + b"\x07" + body[44:]),
        ack(body[:32] + bytes(4) + body[36:]),
        ack(body[:36] + bytes(4) + body[40:]),
        ack(body[:40] + bytes(4)),
        ack(body[:36] + b"\xff" * 4 + body[40:]),
        build_packet(headers(Address(1, 2), Address(3, 4), 9), body, 0, 0),
    ):
        assert impl.open_ack(packet) is None, packet


@_settings
@given(st.data())
def test_acks_are_read_alike_and_as_the_protocol_reads_them(fast: ModuleType, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 70))
    first, stride = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.integers(1, 2**31))
    bits = (1 << count) - 1 if data.draw(st.booleans()) else data.draw(st.integers(0, 2**count - 1))
    body = bytearray(Selection(KEY, 0, 1, count, bits.to_bytes((count + 7) // 8, "little")).pack())
    body[32:40] = first.to_bytes(4, "big") + stride.to_bytes(4, "big")
    packet = bytearray(ack(bytes(body), data.draw(st.sampled_from([Status.OK, Status.OK, Status.FULL]))))
    for _ in range(data.draw(st.integers(0, 2))):
        packet[data.draw(st.integers(0, len(packet) - 1))] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        backend.seal_headers(packet, len(packet), 16)
    found = fast.open_ack(packet)
    assert found == backend.open_ack(packet)
    if found is not None:
        read = parse_packet(bytes(packet))
        request, ground, echo, slot_moves, plane_moves, credit, key, first, stride, count = found
        assert (read.header.op, read.header.status) == (Op.ACK, Status.OK)
        assert (request, ground, echo) == (read.header.request_id, read.header.ground, read.header.timestamp_us)
        assert (slot_moves, plane_moves, credit) == read.header[10:13]
        selection = Selection.unpack(read.body)
        assert (key, list(range(first, first + stride * count, stride))) == (selection.key, selection.indices())


def test_each_packet_reaches_its_own_address(impl: ModuleType, loopback: str) -> None:
    with udp_socket(loopback) as sender, udp_socket(loopback) as one, udp_socket(loopback) as two:
        for sock in (one, two):
            sock.bind((loopback, 0))
        packets = [(bytes([n]) * n, *(one, two)[n % 2].getsockname()[:2]) for n in range(70)]
        assert impl.send_each(sender.fileno(), packets, 66) == 4
        assert impl.send_each(sender.fileno(), packets, 70) == impl.send_each(sender.fileno(), [], 0) == 0
        assert impl.send_each(sender.fileno(), tuple(packets), 0) == 64
        for odd, sock in enumerate((one, two)):
            sent = [packets[n][0] for n in (*range(66, 70), *range(64)) if n % 2 == odd]
            assert [sock.recv(100) for _ in sent] == sent


def test_sending_without_sense_is_refused(impl: ModuleType) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        fine = (b"x", "127.0.0.1", 9)
        for bad, error in (
            ((b"x", "localhost", 9), ValueError),
            ((b"x", "[::1]", 9), ValueError),
            ((b"x", "127.0.0.1", 65_536), OverflowError),
            ((b"x", "127.0.0.1", -1), OverflowError),
            ((bytes(65_508), "127.0.0.1", 9), ValueError),
            (("text", "127.0.0.1", 9), TypeError),
            ("row", (TypeError, ValueError)),
            ((b"x", 9), (TypeError, ValueError)),
        ):
            with pytest.raises(error):
                impl.send_each(sender.fileno(), [fine, bad], 0)
        with pytest.raises(ValueError, match="first packet"):
            impl.send_each(sender.fileno(), [fine], -1)
        with pytest.raises(OSError) as caught:
            impl.send_each(sender.fileno(), [(b"x", "255.255.255.255", 9), fine], 0)
        assert caught.value.errno == errno.EACCES
        assert impl.send_each(sender.fileno(), [fine, (b"x", "255.255.255.255", 9), fine], 0) == 1
