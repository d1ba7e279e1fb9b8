"""Plain requests served in one call: the bytes and the memory of the machine's own way, in both implementations."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.protocol.refs import pack_refs
from tests.protocol.satellite.ledgers import unaccounted_bytes

from skymemory import native
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.native import SLOT_BYTES
from skymemory.native.twin import backend
from skymemory.native.twin.sockets import SOL_UDP, UDP_GRO
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.messages import Selection
from skymemory.protocol.satellite.machine import SatelliteConfig, SatelliteMachine
from skymemory.protocol.wire import (
    Address,
    Op,
    SegmentBatch,
    SkyHeader,
    build_packet,
    bulk_batch,
    parse_packet,
)
from skymemory.transport.udp_socket import BatchSocket, udp_socket

HERE = SatelliteId(2, 9)
SKY = SkyMap(Torus(5, 19), HERE)
KEYS = [bytes([number]) * 32 for number in range(3)]
CHUNK_BYTES, SERVERS, CHUNKS, STRATEGY = 40, 10, 60, 1
SERVER = SKY.placement(STRATEGY, SERVERS).locate_all().index(HERE)
"""Which server HERE is, while the box stands still."""
MEMORY_BYTES = 16 * (CHUNK_BYTES + 72)


def header(op: Op, request_id: int, ground: int = 7, gateway: SatelliteId = HERE) -> SkyHeader:
    there = Address(HERE.plane, HERE.slot)
    return SkyHeader(op, there, Address(gateway.plane, gateway.slot, 0xFF), ground, request_id, timestamp_us=99)


def set_batch(key: bytes, steps: list[int], request_id: int, seed: int, gateway: SatelliteId = HERE) -> SegmentBatch:
    """SETs of the chunks that our server holds, those at ``steps`` of its share."""
    value = random.Random(seed).randbytes(CHUNKS * CHUNK_BYTES - 7)
    indices = [SERVER + SERVERS * step for step in steps]
    payloads = [value[index * CHUNK_BYTES :][:CHUNK_BYTES] for index in indices]
    crcs = np.zeros(CHUNKS, np.uint32)
    crcs[indices] = [backend.crc32(payload) for payload in payloads]
    refs = pack_refs(key, indices, crcs, CHUNK_BYTES, len(value), 5, SERVERS, STRATEGY, (0, 0))
    return bulk_batch(header(Op.SET, request_id, gateway=gateway), refs, payloads, 3, 1.0)


def get_batch(key: bytes, steps: list[int], request_id: int, gateway: SatelliteId = HERE) -> SegmentBatch:
    body = Selection.of(key, [SERVER + SERVERS * step for step in steps], SERVERS).pack()
    packet = build_packet(header(Op.GET, request_id, gateway=gateway), body, 3, 1.0)
    return SegmentBatch(packet, len(packet))


@dataclass
class Satellite:
    """A machine and its socket, served by one implementation of ``native.serve``, or (None) by the machine alone."""

    impl: ModuleType | None
    ip: str = "127.0.0.1"

    def __post_init__(self) -> None:
        self.machine = SatelliteMachine(SatelliteConfig(HERE, MEMORY_BYTES), SKY, MoveClock(), 1000.0)
        self.sock = BatchSocket(self.ip)
        self.client = udp_socket(self.ip)
        self.client.bind((self.ip, 0))
        self.client.setblocking(False)
        self.served = 0

    def close(self) -> None:
        self.sock.close()
        self.client.close()

    def hear(self, batches: list[SegmentBatch]) -> list[bytes]:
        """What it answers to batches that wait at its socket together."""
        for batch in batches:
            host, port = self.sock.address
            backend.send_batch(self.client.fileno(), host, port, batch.headers, batch.header_bytes, batch.payloads)
        scratch, passed_on = bytearray(16 * SLOT_BYTES), list[bytes]()
        while True:
            fd = self.sock.fileno()
            if self.impl is None:
                arrivals, served = native.recv_batch(fd, scratch, 16), []
            else:
                requests = self.machine.plain_requests(1000.25)
                assert requests is not None
                near = {("127.0.0.9", 1): 0}
                arrivals, served, errors, passed = self.impl.serve(fd, scratch, 16, near, requests)
                assert errors == 0 and passed == [] and all(entry[-1] is None for entry in served)
                self.machine.record_served(served, 1000.25)
                self.served += len(served)
            if not arrivals and not served:
                return self._answers(passed_on)
            runs = [(memoryview(scratch)[at : at + size], segment) for at, size, segment, _, _ in arrivals]
            self.machine.receive_runs(runs, self.client.getsockname()[:2], 1000.25)
            for answer, to in self.machine.datagrams_to_send(1000.25):
                if to == self.client.getsockname()[:2]:
                    for datagram in answer.datagrams():
                        self.client.sendto(datagram, to)
                else:
                    passed_on += answer.datagrams()

    def _answers(self, answers: list[bytes]) -> list[bytes]:
        while True:
            try:
                answers.append(self.client.recv(65_536))
            except BlockingIOError:
                return answers

    def memory(self) -> tuple[object, ...]:
        store = self.machine.store
        books = store.ledger.figures()
        assert unaccounted_bytes(books | {"memory_used_bytes": store.used_bytes}) == 0
        return [*store.items()], books, len(store), list(store.shares), self.machine.counters.as_dict()


@pytest.fixture(params=["fast", "twin"])
def pair(request: pytest.FixtureRequest, loopback: str) -> Iterator[tuple[Satellite, Satellite]]:
    impl = request.getfixturevalue("fast") if request.param == "fast" else backend
    satellites = Satellite(impl, loopback), Satellite(None, loopback)
    yield satellites
    for satellite in satellites:
        satellite.close()


def test_sets_and_gets_are_served_as_the_machine_would(pair: tuple[Satellite, Satellite]) -> None:
    quick, slow = pair
    first = [set_batch(KEYS[0], [0], 1, 1)]
    assert quick.hear(first) == slow.hear(first) and quick.served == 0, "this placement has yet to be looked at"
    rounds = [
        [set_batch(KEYS[0], [0, 1, 2, 3], 2, 1)],
        [get_batch(KEYS[0], [0, 2], 3)],
        [set_batch(KEYS[1], [5], 4, 2)],
        [get_batch(KEYS[1], [5], 5)],
        [set_batch(KEYS[0], [1, 3], 6, 9)],
        [get_batch(KEYS[0], [1], 7)],
    ]
    for number, batches in enumerate(rounds, 1):
        assert quick.hear(batches) == slow.hear(batches) != []
        assert quick.memory() == slow.memory()
        assert quick.served == number


def test_what_is_not_plain_is_left_to_the_machine(pair: tuple[Satellite, Satellite]) -> None:
    quick, slow = pair
    settle = [set_batch(KEYS[0], [0, 1, 2, 3], 1, 1)]
    assert quick.hear(settle) == slow.hear(settle)
    bent = bytearray(set_batch(KEYS[0], [4], 2, 1).datagrams()[0])
    bent[-1] ^= 1
    for batch in (
        set_batch(KEYS[0], [0, 1, 3], 3, 1),
        set_batch(KEYS[1], list(range(6)), 4, 1, SatelliteId(2, 8)),
        get_batch(KEYS[0], [5], 5),
        get_batch(KEYS[2], [0], 6),
        get_batch(KEYS[0], [0], 7, SatelliteId(2, 8)),
        SegmentBatch(bent, len(bent)),
        SegmentBatch(bytes(30), 30),
        SegmentBatch(build_packet(header(Op.PING, 8), b"", 0, 0.0), 99),
    ):
        assert quick.hear([batch]) == slow.hear([batch])
        assert quick.memory() == slow.memory() and quick.served == 0, batch
    full = [set_batch(key, list(range(6)), 10 + number, number) for number, key in enumerate(KEYS)]
    for batch in full:
        assert quick.hear([batch]) == slow.hear([batch])
        assert quick.memory() == slow.memory()
    assert quick.served == 1, "only what needs no eviction"


def test_requests_that_wait_together_share_the_room_that_is_left(pair: tuple[Satellite, Satellite]) -> None:
    """Each alone would fit: the second is left to the machine, which evicts for it."""
    quick, slow = pair
    first = [set_batch(KEYS[0], [0], 1, 1)]
    assert quick.hear(first) == slow.hear(first)
    limit_bytes = 5 * (CHUNK_BYTES + 72)
    for satellite in pair:
        satellite.machine.store.limit_bytes = limit_bytes
    batches = [set_batch(KEYS[1], [0, 1, 2], 2, 2), set_batch(KEYS[2], [0, 1, 2], 3, 3)]
    assert quick.hear(batches) == slow.hear(batches) and quick.served == 1
    assert quick.machine.store.used_bytes <= limit_bytes and quick.memory()[0] == slow.memory()[0]


def test_what_another_sends_is_another_request_whatever_it_says(pair: tuple[Satellite, Satellite]) -> None:
    quick, _ = pair
    quick.hear([set_batch(KEYS[0], [0], 1, 1)])
    with udp_socket(quick.ip) as other:
        other.bind((quick.ip, 0))
        other.settimeout(5.0)
        for sock, steps in ((quick.client, [0, 1]), (other, [2, 3])):
            for datagram in set_batch(KEYS[0], steps, 2, 1).datagrams():
                sock.sendto(datagram, quick.sock.address)
        answers = [*quick.hear([]), other.recv(65_536)]
    selections = [Selection.unpack(parse_packet(answer).body).indices() for answer in answers]
    assert selections == [[SERVER + SERVERS * step for step in steps] for steps in ([0, 1], [2, 3])]


def test_neighbours_and_impossible_arguments(fast: ModuleType) -> None:
    for impl in (fast, backend):
        satellite = Satellite(impl)
        try:
            satellite.hear([set_batch(KEYS[0], [0, 1], 1, 1)])
            requests = satellite.machine.plain_requests(1.0) or pytest.fail("not now")
            batch = get_batch(KEYS[0], [0], 2)
            satellite.client.sendto(batch.datagrams()[0], satellite.sock.address)
            scratch, fd = bytearray(SLOT_BYTES), satellite.sock.fileno()
            known = {satellite.client.getsockname()[:2]: HERE}
            arrivals, served, *_ = impl.serve(fd, scratch, 1, known, requests)
            assert len(arrivals) == 1 and served == []
            for slots, bad in ((2, requests), (0, requests), (1, (b"short", *requests[1:]))):
                with pytest.raises(ValueError, match="expected"):
                    impl.serve(fd, scratch, slots, known, bad)
            with pytest.raises(OSError, match="file descriptor"):
                impl.serve(-1, scratch, 1, known, requests)
        finally:
            satellite.close()


def test_what_the_kernel_does_not_take_is_handed_back(fast: ModuleType) -> None:
    """Loopback takes all it can; what no datagram carries stops it in the middle, as a full buffer would."""
    satellite = Satellite(fast)
    try:
        payloads = [b"a" * 40, b"b" * 40, b"c" * 65_400, b"d" * 40]
        indices = [SERVER + SERVERS * step for step in range(4)]
        shares = {KEYS[0]: {index: (bytes(72), payload) for index, payload in zip(indices, payloads, strict=True)}}
        satellite.client.sendto(get_batch(KEYS[0], [0, 1, 2, 3], 1).datagrams()[0], satellite.sock.address)
        addresses, _, *others = satellite.machine.plain_requests(1.0) or pytest.fail("not now")
        scratch, fd = bytearray(SLOT_BYTES), satellite.sock.fileno()
        _, (entry,), errors, _ = fast.serve(fd, scratch, 1, {}, (addresses, shares, *others))
        assert errors == 0 and entry[5] == 4
        headers, rest = entry[-1]
        assert rest == payloads[2:] and len(headers) == 2 * 132
        assert [len(answer) for answer in satellite._answers([])] == [172, 172]
        assert headers[2] << 8 | headers[3] == 3 << 14 | (others[2][5] + 2) & 0x3FFF, "the sequence goes on"
    finally:
        satellite.close()


requests_of = st.lists(
    st.one_of(
        st.builds(
            set_batch,
            st.sampled_from(KEYS),
            st.lists(st.integers(0, 5), min_size=1, unique=True).map(sorted),
            st.integers(1, 3),
            st.integers(0, 1),
        ),
        st.builds(
            get_batch,
            st.sampled_from(KEYS),
            st.lists(st.integers(0, 5), min_size=1, unique=True).map(sorted),
            st.integers(1, 3),
        ),
    ),
    min_size=1,
    max_size=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(st.lists(requests_of, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_any_traffic_leaves_the_same_memory(
    fast: ModuleType, rounds: list[list[SegmentBatch]], dice: random.Random
) -> None:
    satellites = [Satellite(fast), Satellite(backend), Satellite(None)]
    try:
        for batches in rounds:
            heard = []
            for batch in batches:
                data = [bytearray(datagram) for datagram in batch.datagrams()]
                if dice.random() < 0.2:
                    victim = dice.choice(data)
                    victim[dice.randrange(len(victim))] ^= 1 << dice.randrange(8)
                heard += [SegmentBatch(bytes(datagram), len(datagram)) for datagram in data]
            answers = [satellite.hear(heard) for satellite in satellites]
            assert answers[0] == answers[1]
            assert len({repr(satellite.memory()) for satellite in satellites[:2]}) == 1
            stores = [satellite.memory()[:3] for satellite in satellites]
            assert stores[0] == stores[2]
    finally:
        for satellite in satellites:
            satellite.close()


def test_receive_offload_is_on_where_it_exists() -> None:
    """Without it a burst would be many messages: the runs above would not be tested."""
    with BatchSocket() as sock, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.setsockopt(SOL_UDP, UDP_GRO, 1)
        except OSError:
            pytest.skip("this kernel has no receive offload")
        assert sock.offload
