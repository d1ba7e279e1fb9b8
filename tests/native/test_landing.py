"""What is awaited is placed alike by both implementations, from runs at hand and from a socket."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.native.test_runs import CHUNK, CHUNKS, KEY, VALUE, VALUE_BYTES, VALUE_CRC, hostile, packets

from skymemory.native import SLOT_BYTES
from skymemory.native.twin import backend
from skymemory.native.twin.sockets import SOL_UDP, UDP_GRO
from skymemory.protocol.wire import Op

_settings = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=250)


class Target:
    """Where a value is put together."""

    def __init__(self) -> None:
        self.out, self.arrived = bytearray(VALUE_BYTES), bytearray(CHUNKS)
        self.crcs = np.zeros(CHUNKS, dtype=np.uint32)

    @property
    def landing(self) -> tuple[object, ...]:
        return KEY, CHUNKS, CHUNK, VALUE_BYTES, VALUE_CRC, self.out, self.arrived, self.crcs

    def awaited(self, *requests: int) -> dict[int, tuple[object, ...]]:
        return dict.fromkeys(requests, self.landing)

    def state(self) -> tuple[bytes, bytes, bytes]:
        return bytes(self.out), bytes(self.arrived), self.crcs.tobytes()


def run(*parts: bytes) -> tuple[memoryview, int]:
    return memoryview(b"".join(parts)), len(parts[0])


def test_runs_of_awaited_requests_are_placed_and_tallied(impl: ModuleType) -> None:
    to, other = Target(), Target()
    awaited = to.awaited(8, 9) | other.awaited(10)
    runs = [
        run(*packets(Op.DATA, [9, 0])),
        run(*packets(Op.DATA, [0, 1, 2], 9, 100), *packets(Op.DATA, [3], 9, 100)),
        run(*packets(Op.DATA, [4, 4], 9, 200)),
        run(*packets(Op.DATA, [5], 8, 300)),
        run(*packets(Op.DATA, [5, 1], 10, 310)),
        run(*packets(Op.DATA, [6], 9, 400)),
        run(*packets(Op.DATA, [7], 77)),
        run(*packets(Op.DATA, [8])),
    ]
    assert impl.place_runs(runs, 1, awaited) == [
        (9, 400, 3, 6, 1, 0, 0),
        (8, 300, 1, 1, 0, 0, 0),
        (10, 310, 1, 2, 0, 0, 0),
    ]
    assert bytes(to.arrived) == b"\1\1\1\1\1\1\1\0\0\0\0"
    assert bytes(other.arrived) == b"\0\1\0\0\0\1\0\0\0\0\0"
    assert impl.place_runs(runs, 6, awaited) == []
    assert impl.place_runs(runs, 7, awaited) == [(9, 5, 1, 1, 0, 0, 0)]
    assert impl.place_runs(runs, 8, awaited) == impl.place_runs([], 0, {}) == []


def test_many_requests_have_a_tally_each(impl: ModuleType) -> None:
    to = Target()
    runs = [run(*packets(Op.DATA, [n % CHUNKS], 100 + n % 40)) for n in range(80)]
    tallies = impl.place_runs(runs, 0, to.awaited(*range(100, 140)))
    assert [tally[0] for tally in tallies] == list(range(100, 140))
    assert sum(tally[3] for tally in tallies) == CHUNKS and {tally[2] for tally in tallies} == {2}
    assert bytes(to.out) == VALUE


def test_what_does_not_answer_one_awaited_request_is_left_alone(impl: ModuleType) -> None:
    to, before = Target(), Target().state()
    one, two = packets(Op.DATA, [1])[0], packets(Op.DATA, [2], 8)[0]
    for data in (
        run(one, two),
        run(one, one[:20]),
        (memoryview(one[:59]), 200),
        (memoryview(one), 50),
        run(b"x"),
        (memoryview(b""), 200),
        (memoryview(one), 0),
        (memoryview(one), -5),
        run(packets(Op.SET, [1])[0]),
    ):
        assert impl.place_runs([data], 0, to.awaited(8, 9)) == []
    assert impl.place_runs([run(one)], 0, {}) == []
    assert to.state() == before


@pytest.mark.parametrize("bad", [[("x",)], ["no tuple"], [(b"x", "1")], [("x", 1)]])
def test_what_is_no_run_is_an_error(impl: ModuleType, bad: list[object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        impl.place_runs(bad, 0, Target().awaited(9))
    with pytest.raises(ValueError, match="first run"):
        impl.place_runs([], -1, {})


def test_what_is_no_landing_is_an_error(impl: ModuleType) -> None:
    runs, landing = [run(*packets(Op.DATA, [1]))], list(Target().landing)
    for at, bad in ((0, b"short"), (1, 12), (2, 0), (3, -1), (5, bytearray(3)), (6, bytearray(3)), (7, bytearray(3))):
        with pytest.raises(ValueError):
            impl.place_runs(runs, 0, {9: (*landing[:at], bad, *landing[at + 1 :])})
    with pytest.raises((TypeError, BufferError)):
        impl.place_runs(runs, 0, {9: (*landing[:5], bytes(VALUE_BYTES), *landing[6:])})
    for bad in (5, tuple(landing[:4])):
        with pytest.raises(TypeError):
            impl.place_runs(runs, 0, {9: bad})


@_settings
@given(st.lists(hostile(), min_size=1, max_size=4))
def test_hostile_runs_are_placed_alike(fast: ModuleType, runs: list[tuple[memoryview, int]]) -> None:
    one, other = Target(), Target()
    assert fast.place_runs(runs, 0, one.awaited(9)) == backend.place_runs(runs, 0, other.awaited(9))
    assert one.state() == other.state()
    for at, here in enumerate(one.arrived):  # bytes under another number are for the value's CRC to find
        chunk = bytes(one.out[at * CHUNK : (at + 1) * CHUNK])
        assert backend.crc32(chunk) == one.crcs[at] if here else not any(chunk)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
    ):
        receiver.setsockopt(SOL_UDP, UDP_GRO, 1)
        receiver.bind(("127.0.0.1", 0))
        sender.connect(receiver.getsockname())
        yield sender, receiver


def scratch(slots: int = 4) -> memoryview:
    return memoryview(bytearray(slots * SLOT_BYTES))


def test_what_arrives_goes_to_its_place(impl: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = pair
    to, room = Target(), scratch()
    for packet in packets(Op.DATA, list(range(7))):
        sender.send(packet)
    assert impl.recv_runs(receiver.fileno(), room, 4, 1, 0, to.awaited(9)) == ([(9, 5, 4, 4, 0, 0, 0)], [])
    assert impl.recv_runs(receiver.fileno(), room, 4, 64, 0, to.awaited(9)) == ([(9, 5, 3, 3, 0, 0, 0)], [])
    assert impl.recv_runs(receiver.fileno(), room, 4, 64, 0, to.awaited(9)) == ([], [])
    assert bytes(to.arrived) == bytes([1] * 7 + [0] * 4) and to.out[: 7 * CHUNK] == VALUE[: 7 * CHUNK]


def test_it_ends_where_something_else_arrives(impl: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = pair
    to, room = Target(), scratch()
    sent = [*packets(Op.DATA, [1]), b"", *packets(Op.DATA, [2]), b"else", *packets(Op.DATA, [3])]
    for packet in sent:
        sender.send(packet)
    tallies, others = impl.recv_runs(receiver.fileno(), room, 4, 64, 0, to.awaited(9))
    assert tallies == [(9, 5, 1, 1, 0, 0, 0)]
    assert [(bytes(view), segment) for view, segment in others] == [(b"", 1), (sent[2], len(sent[2])), (b"else", 4)]
    assert all(view.obj is room.obj for view, _ in others)
    assert impl.recv_runs(receiver.fileno(), room, 4, 64, 0, {}) == ([], [(room[: len(sent[4])], len(sent[4]))])
    assert sum(to.arrived) == 1


def test_it_ends_with_a_complete_value(impl: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = pair
    to = Target()
    for packet in packets(Op.DATA, list(range(CHUNKS))):
        sender.send(packet)
    began_s = time.monotonic()
    tallies, others = impl.recv_runs(receiver.fileno(), scratch(), 4, 64, 30_000_000, to.awaited(9))
    assert time.monotonic() - began_s < 20, "no patience once all is there"
    assert (tallies, others) == ([(9, 5, CHUNKS, CHUNKS, 0, 0, 0)], []) and bytes(to.out) == VALUE


def test_patience_is_waited_for_and_no_longer(impl: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    _, receiver = pair
    receiver.setblocking(True)  # the call never waits in the kernel, whatever the socket does
    for patience_us in (0, 20_000):
        began_s = time.monotonic()
        assert impl.recv_runs(receiver.fileno(), scratch(), 4, 64, patience_us, {}) == ([], [])
        assert patience_us * 1e-6 <= time.monotonic() - began_s < 10


def test_a_socket_in_trouble_is_an_error_once(impl: ModuleType) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as gone:
        gone.bind(("127.0.0.1", 0))
        address = gone.getsockname()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(address)
        sock.send(b"x")
        with pytest.raises(ConnectionRefusedError):
            impl.recv_runs(sock.fileno(), scratch(), 1, 1, 0, {})
        assert impl.recv_runs(sock.fileno(), scratch(), 1, 1, 0, {}) == ([], [])
    with open("/dev/null", "rb") as file, pytest.raises(OSError) as caught:
        impl.recv_runs(file.fileno(), scratch(), 1, 1, 0, {})
    assert caught.value.errno == errno.ENOTSOCK


def test_receiving_without_sense_is_refused(impl: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    fd = pair[1].fileno()
    for slots, calls in ((0, 1), (-1, 1), (5, 1), (4, 0), (4, -3)):
        with pytest.raises(ValueError):
            impl.recv_runs(fd, scratch(), slots, calls, 0, {})
    with pytest.raises((TypeError, BufferError)):
        impl.recv_runs(fd, memoryview(bytes(SLOT_BYTES)), 1, 1, 0, {})


@pytest.mark.brief()
@_settings
@given(st.lists(hostile(), min_size=1, max_size=4))
def test_hostile_arrivals_are_placed_alike(fast: ModuleType, runs: list[tuple[memoryview, int]]) -> None:
    found = []
    for impl in (fast, backend):
        to, room = Target(), scratch(8)
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        ):
            receiver.bind(("127.0.0.1", 0))
            sender.connect(receiver.getsockname())
            for data, _ in runs:
                sender.send(data)
            tallies, others = impl.recv_runs(receiver.fileno(), room, 8, 64, 0, to.awaited(9))
        found.append((tallies, [(bytes(view), segment) for view, segment in others], to.state()))
    assert found[0] == found[1]


def test_no_patience_is_longer_than_a_minute(impl: ModuleType) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, pytest.raises(ValueError, match="of patience"):
        impl.recv_runs(sock.fileno(), memoryview(bytearray(SLOT_BYTES)), 1, 1, 2**62, {})
