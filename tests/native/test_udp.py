"""Batched datagrams over loopback: what goes out in one call comes in whole, cut where it was cut."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from types import ModuleType

import pytest

from skymemory.native import SLOT_BYTES
from skymemory.native.twin.sockets import SOL_UDP, UDP_GRO, UDP_SEGMENT, runs
from skymemory.transport.udp_socket import udp_socket

SO_NO_CHECK = 11
UDP_NO_CHECK6_TX, UDP_NO_CHECK6_RX = 101, 102


@pytest.fixture(params=["offload", "plain"])
def receiver(request: pytest.FixtureRequest, loopback: str) -> Iterator[socket.socket]:
    with udp_socket(loopback) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * 2**20)
        if request.param == "offload":
            sock.setsockopt(SOL_UDP, UDP_GRO, 1)
        sock.bind((loopback, 0))
        yield sock


@pytest.fixture
def sender(loopback: str) -> Iterator[socket.socket]:
    with udp_socket(loopback) as sock:
        sock.bind((loopback, 0))
        sock.setblocking(False)
        yield sock


def drain(impl: ModuleType, sock: socket.socket, slots: int = 8) -> list[tuple[bytes, str, int]]:
    """Every datagram that waits, by itself."""
    scratch = bytearray(slots * SLOT_BYTES)
    found = []
    while arrivals := impl.recv_batch(sock.fileno(), scratch, slots):
        for at, size, segment, host, port in arrivals:
            assert at % SLOT_BYTES == 0 and 0 <= size <= SLOT_BYTES and segment >= 1
            for start in range(at, at + max(size, 1), segment):
                found.append((bytes(scratch[start : min(start + segment, at + size)]), host, port))
    return found


def check(impl: ModuleType, sender: socket.socket, receiver: socket.socket, expected: list[bytes], sent: int) -> None:
    assert sent == len(expected)
    found = drain(impl, receiver)
    assert [data for data, _, _ in found] == expected
    assert {(host, port) for _, host, port in found} <= {sender.getsockname()[:2]}


@pytest.mark.parametrize(
    "sizes",
    [
        [6144] * 25,
        [6144] * 24 + [5],
        [6144, 5, 6144],
        [5, 6144],
        [0, 0, 7, 7, 0],
        [1] * 200,
        [65_000, 65_000],
        [9],
        [],
        [30_000, 30_000, 30_000],
        [100] * 10 + [200] * 10 + [100],
    ],
)
def test_headers_and_payloads_arrive_joined(
    impl: ModuleType, sender: socket.socket, receiver: socket.socket, sizes: list[int]
) -> None:
    headers = b"".join(b"header %05d" % n for n in range(len(sizes)))
    payloads = [bytes([n % 251]) * size for n, size in enumerate(sizes)]
    expected = [headers[12 * n : 12 * n + 12] + payload for n, payload in enumerate(payloads)]
    kinds = [memoryview(p) if n % 3 == 0 else bytearray(p) if n % 3 == 1 else p for n, p in enumerate(payloads)]
    sent = impl.send_batch(sender.fileno(), *receiver.getsockname()[:2], headers, 12, kinds)
    check(impl, sender, receiver, expected, sent)


@pytest.mark.brief(every=5)
@pytest.mark.parametrize(
    ("value_bytes", "chunk", "first", "step", "count"),
    [
        (480 * 600, 600, 0, 10, 48),
        (480 * 600 - 1, 600, 9, 10, 48),
        (100, 7, 14, 3, 1),
        (100, 7, 0, 1, 15),
        (98, 7, 14, 1, 1),
        (0, 6144, 0, 1, 1),
        (0, 6144, 0, 5, 0),
        (10, 60_000, 0, 2**40, 1),
    ],
)
def test_chunks_are_sent_from_where_they_lie(
    impl: ModuleType,
    sender: socket.socket,
    receiver: socket.socket,
    value_bytes: int,
    chunk: int,
    first: int,
    step: int,
    count: int,
) -> None:
    value = bytes(n * 31 % 251 for n in range(value_bytes))
    headers = b"".join(b"header %05d" % n for n in range(count))
    starts = [(first + n * step) * chunk for n in range(count)]
    expected = [headers[12 * n : 12 * n + 12] + value[at : at + chunk] for n, at in enumerate(starts)]
    host, port = receiver.getsockname()[:2]
    sent = impl.send_slices(sender.fileno(), host, port, headers, 12, (memoryview(value), chunk, first, step))
    check(impl, sender, receiver, expected, sent)


@pytest.mark.parametrize(
    ("headers", "width", "value_bytes", "chunk", "first", "step"),
    [
        (24, 0, 100, 10, 0, 1),
        (24, -1, 100, 10, 0, 1),
        (25, 12, 100, 10, 0, 1),
        (24, 12, 100, 0, 0, 1),
        (24, 12, 100, -10, 0, 1),
        (24, 12, 100, 10, -1, 1),
        (24, 12, 100, 10, 0, 0),
        (24, 12, 100, 10, 10, 1),
        (24, 12, 100, 10, 11, 1),
        (24, 12, 100, 10, 0, 2**62),
        (24, 12, 100, 10, 2**62, 1),
        (24, 12, 100, 65_496, 0, 1),
        (24, 12, 2**17, 65_496, 0, 1),
    ],
)
def test_chunks_beyond_the_value_are_refused(
    impl: ModuleType,
    sender: socket.socket,
    headers: int,
    width: int,
    value_bytes: int,
    chunk: int,
    first: int,
    step: int,
) -> None:
    with pytest.raises(ValueError):
        impl.send_slices(
            sender.fileno(), "127.0.0.1", 9, bytes(headers), width, (bytes(value_bytes), chunk, first, step)
        )
    with pytest.raises(ValueError):
        impl.send_slices(sender.fileno(), "no", 9, bytes(12), 12, (bytes(20), 10, 0, 1))
    with pytest.raises(OverflowError):
        impl.send_slices(sender.fileno(), "127.0.0.1", 65_536, bytes(12), 12, (bytes(20), 10, 0, 1))


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("total", [0, 1, 999, 1000, 1001, 64_000, 64_001, 150_500])
def test_a_run_of_whole_segments_with_an_odd_last(
    impl: ModuleType, sender: socket.socket, receiver: socket.socket, total: int
) -> None:
    run = bytes(n * 31 % 256 for n in range(total))
    sent = impl.send_batch(sender.fileno(), *receiver.getsockname()[:2], run, 1000, None)
    check(impl, sender, receiver, [run[at : at + 1000] for at in range(0, total, 1000)], sent)


def test_nothing_there_is_an_empty_list(impl: ModuleType, receiver: socket.socket) -> None:
    receiver.setblocking(True)  # the call never waits, whatever the socket does
    assert impl.recv_batch(receiver.fileno(), bytearray(SLOT_BYTES), 1) == []


def test_no_more_runs_than_slots(impl: ModuleType, sender: socket.socket, receiver: socket.socket) -> None:
    for n in range(5):
        sender.sendto(bytes([n]), receiver.getsockname())
    scratch = bytearray(3 * SLOT_BYTES)
    first = impl.recv_batch(receiver.fileno(), scratch, 2)
    assert [arrival[0] for arrival in first] == [0, SLOT_BYTES] and not any(scratch[2 * SLOT_BYTES :])
    rest = [data for data, _, _ in drain(impl, receiver)]
    assert [scratch[0:1], scratch[SLOT_BYTES : SLOT_BYTES + 1], *rest] == [bytes([n]) for n in range(5)]


def test_where_offload_is_refused_segments_go_one_by_one(
    impl: ModuleType, loopback: str, receiver: socket.socket
) -> None:
    """Without checksums the kernel refuses UDP_SEGMENT, as a device that cannot split would."""
    with udp_socket(loopback) as sender:
        if ":" in loopback:
            sender.setsockopt(socket.IPPROTO_UDP, UDP_NO_CHECK6_TX, 1)
            receiver.setsockopt(socket.IPPROTO_UDP, UDP_NO_CHECK6_RX, 1)
        sender.setsockopt(socket.SOL_SOCKET, SO_NO_CHECK, 1)
        with pytest.raises(OSError, match="Invalid argument"):
            sender.sendmsg([bytes(20)], [(SOL_UDP, UDP_SEGMENT, struct.pack("=H", 10))], 0, receiver.getsockname())
        payloads = [bytes([n]) * 500 for n in range(6)]
        sent = impl.send_batch(sender.fileno(), *receiver.getsockname()[:2], bytes(12), 2, payloads)
        assert sent == 6
        assert [data for data, _, _ in drain(impl, receiver)] == [bytes(2) + part for part in payloads]


def test_arguments_without_sense_are_refused(impl: ModuleType, sender: socket.socket) -> None:
    fd = sender.fileno()
    for host in ("localhost", "", "[::1]", "::1%lo", ":::", "1.2.3.4.5", "127.1", "300.1.1.1"):
        with pytest.raises(ValueError):
            impl.send_batch(fd, host, 9, b"abc", 3, None)
    with pytest.raises(ValueError):
        impl.send_batch(fd, "127.0.0.1", 9, b"abc", 0, None)
    with pytest.raises(ValueError):
        impl.send_batch(fd, "127.0.0.1", 9, b"abcd", 2, [b"only one"])
    with pytest.raises(ValueError):
        impl.send_batch(fd, "127.0.0.1", 9, b"abc", 2, [b"", b""])
    with pytest.raises(ValueError):
        impl.send_batch(fd, "127.0.0.1", 9, bytes(65_508), 65_508, None)
    with pytest.raises(ValueError):
        impl.send_batch(fd, "127.0.0.1", 9, b"ab", 1, [b"", bytes(65_507)])
    with pytest.raises(OverflowError):
        impl.send_batch(fd, "127.0.0.1", 65_536, b"abc", 3, None)
    with pytest.raises(TypeError):
        impl.send_batch(fd, "127.0.0.1", 9, b"ab", 1, [b"", "text"])
    for slots in (0, -1, 2):
        with pytest.raises(ValueError):
            impl.recv_batch(fd, bytearray(SLOT_BYTES), slots)
    with pytest.raises((TypeError, BufferError)):
        impl.recv_batch(fd, bytes(SLOT_BYTES), 1)


def test_the_other_family_is_an_error_of_the_network(impl: ModuleType, sender: socket.socket, loopback: str) -> None:
    other = "127.0.0.1" if ":" in loopback else "::1"
    for call in (
        lambda: impl.send_batch(sender.fileno(), other, 9, b"abc", 3, None),
        lambda: impl.send_slices(sender.fileno(), other, 9, bytes(12), 12, (bytes(20), 10, 0, 1)),
        lambda: impl.send_each(sender.fileno(), [(b"x", other, 9)], 0),
    ):
        with pytest.raises(OSError):
            call()


def test_a_descriptor_that_is_no_socket_is_an_error(impl: ModuleType) -> None:
    with open("/dev/null", "rb") as file:
        for call in (
            lambda: impl.recv_batch(file.fileno(), bytearray(SLOT_BYTES), 1),
            lambda: impl.send_batch(file.fileno(), "127.0.0.1", 9, b"abc", 3, None),
        ):
            with pytest.raises(OSError) as caught:
                call()
            assert caught.value.errno == errno.ENOTSOCK


def test_an_answer_by_icmp_is_an_error_once(impl: ModuleType) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as gone:
        gone.bind(("127.0.0.1", 0))
        address = gone.getsockname()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(address)
        sock.send(b"x")
        with pytest.raises(ConnectionRefusedError):
            impl.recv_batch(sock.fileno(), bytearray(SLOT_BYTES), 1)
        assert impl.recv_batch(sock.fileno(), bytearray(SLOT_BYTES), 1) == []


def test_runs_keep_to_the_kernels_rules() -> None:
    sizes = [500] * 70 + [499, 500, 0, 30_000, 30_000, 30_000]
    cut = list(runs(sizes, offload=True))
    assert cut == [(0, 64), (64, 71), (71, 72), (72, 73), (73, 75), (75, 76)]
    assert list(runs(sizes, offload=False)) == [(n, n + 1) for n in range(len(sizes))]
