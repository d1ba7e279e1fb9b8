"""What a client machine has to send goes out whole, together or one by one, also where the kernel takes only part."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from skymemory import native
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.wire import Op, SegmentBatch, Slices, parse_packet
from skymemory.transport.udp_client import UdpClient
from skymemory.transport.udp_socket import BatchSocket

ONE, TWO = SatelliteId(0, 0), SatelliteId(0, 1)
VALUE = memoryview(bytes(range(100)))


def single(text: bytes) -> SegmentBatch:
    return SegmentBatch(text, len(text))


GROUPS = [
    [(single(b"first"), ONE), (single(b"second"), TWO), (single(b"third"), ONE)],
    [(SegmentBatch(b"head", 4, [b"and payload"]), ONE), (SegmentBatch(b"head", 4, Slices(VALUE, 9, range(1, 2))), TWO)],
    [(single(b"lone"), TWO)],
    [(SegmentBatch(b"aabbc", 2), ONE), (single(b"after"), ONE)],
    [(SegmentBatch(b"a1a2a3", 2, Slices(VALUE, 9, range(0, 9, 4))), ONE), (single(b"end"), TWO)],
]


class Saying:
    """A machine that has these groups to send."""

    def bursts_to_send(self, now_s: float) -> Iterator[list[tuple[SegmentBatch, SatelliteId]]]:
        yield from GROUPS


@pytest.fixture
def sockets() -> Iterator[tuple[UdpClient, BatchSocket, BatchSocket]]:
    with BatchSocket() as one, BatchSocket() as two:
        sky = SkyMap(Torus(3, 3), SatelliteId(1, 1))
        client = UdpClient(ClientConfig(7), sky, MoveClock(), {ONE: one.address, TWO: two.address})
        client.machine = Saying()  # type: ignore[assignment]
        yield client, one, two
        client.close()


def test_requests_are_numbered_as_a_stranger_cannot_guess() -> None:
    sky, firsts = SkyMap(Torus(3, 3), SatelliteId(1, 1)), set()
    for _ in range(3):
        client = UdpClient(ClientConfig(7), sky, MoveClock(), {})
        client.machine.ask(Op.PING, b"", ONE, client.now_s())
        ((batch, _),) = client.machine.datagrams_to_send(client.now_s())
        (packet,) = batch.datagrams()
        firsts.add(parse_packet(packet).header.request_id)
        client.close()
    assert len(firsts) == 3


def received(sock: BatchSocket) -> list[bytes]:
    found: list[bytes] = []
    while runs := sock.receive():
        for view, segment_bytes, _ in runs:
            found += [bytes(view[at : at + segment_bytes]) for at in range(0, len(view), segment_bytes)]
    return found


def expected(to: SatelliteId) -> list[bytes]:
    return [packet for group in GROUPS for batch, beam in group if beam == to for packet in batch.datagrams()]


def test_everything_goes_out_whole_and_in_order(sockets: tuple[UdpClient, BatchSocket, BatchSocket]) -> None:
    client, one, two = sockets
    client._send()
    assert received(one) == expected(ONE) and received(two) == expected(TWO)


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_what_the_kernel_does_not_take_waits_its_turn(
    sockets: tuple[UdpClient, BatchSocket, BatchSocket], monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    client, one, two = sockets
    with monkeypatch.context() as full:
        real = native.send_each
        full.setattr(native, "send_each", lambda fd, packets, first: real(fd, packets[:taken], first))
        full.setattr(native, "send_batch", lambda *_: 0)
        full.setattr(native, "send_slices", lambda *_: 0)
        client._send()
        assert len(received(one)) + len(received(two)) == taken
    assert client._backlog
    client.machine = type("Silent", (), {"bursts_to_send": lambda *_: iter(())})()  # type: ignore[assignment]
    client._send()
    assert not client._backlog
    rest = [packet for to in (ONE, TWO) for packet in expected(to)]
    sent = [packet for batch, _ in GROUPS[0][:taken] for packet in batch.datagrams()]
    assert sorted(received(one) + received(two) + sent) == sorted(rest)
