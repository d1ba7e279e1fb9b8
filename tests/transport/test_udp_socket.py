"""Batches over loopback sockets: buffers as large as granted, errors counted, the rest handed back."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence

import pytest

from skymemory import native
from skymemory.protocol.wire import SegmentBatch, Slices
from skymemory.transport.udp_socket import DEFAULT_BUFFER_BYTES, BatchSocket


def bound(ip: str) -> BatchSocket:
    try:
        return BatchSocket(ip)
    except OSError as error:
        pytest.skip(f"{ip} cannot be bound here: {error}")


def received(sock: BatchSocket) -> list[bytes]:
    """Every datagram that waits."""
    found: list[bytes] = []
    while runs := sock.receive():
        for view, segment_bytes, _ in runs:
            found += [bytes(view[at : at + segment_bytes]) for at in range(0, len(view), segment_bytes)]
    return found


@pytest.mark.parametrize("ip", ["127.0.0.1", "::1"])
def test_a_block_arrives_whole_and_in_few_pieces(ip: str) -> None:
    with bound(ip) as sender, bound(ip) as receiver:
        payloads = [bytes([n % 251]) * 6144 for n in range(479)] + [b"the odd last one"]
        headers = b"".join(b"%0132d" % n for n in range(480))
        batch = SegmentBatch(headers, 132, payloads)
        assert sender.send(batch, receiver.address) is None
        assert select.select([receiver], [], [], 5)[0]
        runs = receiver.receive()
        assert runs and all(endpoint == sender.address for _, _, endpoint in runs)
        if receiver.offload and sender.offload:
            assert all(segment == 6276 and len(view) == 62_760 for view, segment, _ in runs)
        found = [bytes(v[at : at + seg]) for v, seg, _ in runs for at in range(0, len(v), seg)] + received(receiver)
        assert found == batch.datagrams()
        assert receiver.dropped() == 0


def test_the_buffer_is_what_the_kernel_says() -> None:
    with BatchSocket() as sock, socket.socket(fileno=socket.dup(sock.fileno())) as again:
        granted = again.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        assert sock.receive_buffer_bytes == granted
        assert sock.send_buffer_bytes == again.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert (sock.shortfall == "") == (min(granted, sock.send_buffer_bytes) >= 2 * DEFAULT_BUFFER_BYTES)


def test_a_buffer_that_is_not_granted_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchSocket, "_set", lambda *_: False)
    with BatchSocket() as sock:
        assert not sock.offload
        assert "receive buffer of" in sock.shortfall and "where 4.0 MiB were requested" in sock.shortfall
        assert "net.core.rmem_max" in sock.shortfall


def test_what_the_buffer_cannot_hold_is_dropped_and_counted() -> None:
    with BatchSocket() as sender, BatchSocket(buffer_bytes=4096) as receiver:
        for n in range(64):
            sender.send(SegmentBatch(bytes([n]) * 1000, 1000), receiver.address)
        found = received(receiver)
        assert 0 < len(found) < 64
        assert receiver.dropped() == 64 - len(found)


def test_what_the_kernel_does_not_take_is_handed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [2, 0, 3]
    seen: list[tuple[bytes, int, Sequence[object] | None]] = []

    def stingy(
        fd: int, host: str, port: int, headers: bytes, header_bytes: int, payloads: Sequence[object] | None
    ) -> int:
        seen.append((bytes(headers), header_bytes, payloads))
        return taken.pop(0)

    monkeypatch.setattr(native, "send_batch", stingy)
    with BatchSocket() as sock:
        batch: SegmentBatch | None = SegmentBatch(b"aabbccddee", 2, [b"1", b"2", b"3", b"4", b"5"])
        for _ in range(3):
            assert batch is not None
            batch = sock.send(batch, ("127.0.0.1", 9))
        assert batch is None
        assert seen[1:] == [(b"ccddee", 2, [b"3", b"4", b"5"])] * 2
        taken.append(1)
        rest = sock.send(SegmentBatch(b"aaabbb", 3), ("127.0.0.1", 9))
        assert rest == SegmentBatch(b"bbb", 3, None)


def test_errors_of_the_network_are_counted_and_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise ConnectionRefusedError

    with BatchSocket() as sock:
        monkeypatch.setattr(native, "recv_batch", refused)
        monkeypatch.setattr(native, "recv_runs", refused)
        monkeypatch.setattr(native, "send_batch", refused)
        assert sock.receive() == []
        assert sock.receive_awaited({}, 1, 0) == ([], [])
        assert sock.send(SegmentBatch(b"x", 1), ("127.0.0.1", 9)) is None
        assert (sock.icmp_errors, sock.send_errors) == (2, 1)


def test_a_packet_that_is_refused_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with BatchSocket() as sender, BatchSocket() as receiver:
        fine, nowhere = (b"fine", *receiver.address), (b"lost", "255.255.255.255", 9)
        assert sender.send_each([nowhere, fine, nowhere, fine]) == 4
        assert sender.send_errors == 2 and received(receiver) == [b"fine", b"fine"]
        taken = [2, 0]
        monkeypatch.setattr(native, "send_each", lambda *_: taken.pop(0))
        assert sender.send_each([fine] * 5) == 2, "the kernel is full"


def test_chunks_of_a_value_are_sent_and_the_rest_handed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    value = memoryview(bytes(range(95)))
    batch = SegmentBatch(b"".join(b"%012d" % n for n in range(4)), 12, Slices(value, 10, range(0, 10, 3)))
    with BatchSocket() as sender, BatchSocket() as receiver:
        assert sender.send(batch, receiver.address) is None
        assert received(receiver) == batch.datagrams()
        assert batch.total_bytes == 48 + 35
        monkeypatch.setattr(native, "send_slices", lambda *_: 1)
        rest = sender.send(batch, receiver.address)
        assert rest is not None and rest.datagrams() == batch.datagrams()[1:]


def test_a_closed_socket_is_an_error_not_silence() -> None:
    sock = BatchSocket()
    sock.close()
    with pytest.raises(OSError):
        sock.receive()
    with pytest.raises(OSError):
        sock.receive_awaited({}, 1, 0)
    with pytest.raises(OSError):
        sock.send_each([(b"x", "127.0.0.1", 9)])
    with pytest.raises(OSError):
        sock.send(SegmentBatch(b"x", 1), ("127.0.0.1", 9))


def test_a_port_that_is_taken_is_an_error_and_leaves_nothing() -> None:
    with BatchSocket() as first:
        with pytest.raises(OSError):
            BatchSocket(*first.address)
        with pytest.raises((OSError, OverflowError)):
            BatchSocket("127.0.0.1", 70_000)


def test_all_addresses_of_ipv6_leave_the_port_of_ipv4() -> None:
    with bound("::") as six, BatchSocket("0.0.0.0", six.address[1]) as four:
        assert four.address[1] == six.address[1]
        with bound("::1") as sender:
            assert sender.send(SegmentBatch(b"x", 1), ("::1", six.address[1])) is None
            assert sender.send(SegmentBatch(b"x", 1), ("127.0.0.1", six.address[1])) is None
            assert sender.send_errors == 1
        assert select.select([six], [], [], 5)[0]
        assert [endpoint for _, _, endpoint in six.receive()] == [sender.address] and four.receive() == []


def test_nothing_there_is_an_empty_list() -> None:
    with BatchSocket() as sock:
        assert sock.receive() == []
