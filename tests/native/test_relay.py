"""Packets in transit: what passes natively leaves the bytes, links and counts of the machine's own way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.native.test_serve import HERE, KEYS, MEMORY_BYTES, SKY, get_batch, set_batch

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.keys import first_ring
from skymemory.native import SLOT_BYTES
from skymemory.native.twin import backend
from skymemory.protocol.auth import Authority
from skymemory.protocol.clock import MoveClock
from skymemory.protocol.messages import Selection
from skymemory.protocol.satellite.machine import SatelliteConfig, SatelliteMachine
from skymemory.protocol.satellite.routing import Declaration
from skymemory.protocol.wire import GROUND_SHELL, Address, Op, SegmentBatch, SkyHeader, build_packet, bulk_batch
from skymemory.transport.udp_socket import BatchSocket

NOW_S = 1000.25
NORTH, WEST = SatelliteId(2, 10), SatelliteId(1, 9)
NEIGHBOURS = SKY.torus.neighbours(HERE)
MINE, OTHER = Authority(first_ring(bytes(range(32)))), Authority(first_ring(bytes(32)))
PLACES = [HERE, NORTH, WEST, SatelliteId(2, 7), SatelliteId(3, 10), SatelliteId(0, 9), SatelliteId(6, 0)]
"""The last is off the torus."""


def run_of(
    op: Op,
    there: Address,
    by: Address,
    sizes: list[int],
    ground: int = 7,
    limit: int = 64,
    hops: int = 0,
    number: int = 1,
) -> list[bytes]:
    """Packets with chunks of these sizes, or (of other operations) control packets, one for each."""
    header = SkyHeader(op, there, by, ground, number, hop_limit=limit, hop_count=hops)
    if op not in (Op.SET, Op.MIGRATE, Op.DATA):
        body = Selection.of(KEYS[0], [1], 1).pack()
        return [build_packet(header, body, at, 1.0) for at, _ in enumerate(sizes)]
    payloads = [bytes([at % 251]) * size for at, size in enumerate(sizes)]
    refs = b"".join(
        KEYS[0]
        + b"".join(value.to_bytes(4, "big") for value in (at + 1, 64, len(payload), backend.crc32(payload), 4096, 5))
        + bytes(16)
        for at, payload in enumerate(payloads)
    )
    return bulk_batch(header, refs, payloads, 3, 1.0).datagrams()


def batches_of(packets: list[bytes]) -> list[SegmentBatch]:
    """As few sends as offload permits: equal sizes, the last of each maybe shorter."""
    runs: list[list[bytes]] = []
    for packet in packets:
        last = runs[-1] if runs else []
        if last and len(last[-1]) == len(last[0]) >= len(packet):
            last.append(packet)
        else:
            runs.append([packet])
    return [SegmentBatch(b"".join(run), len(run[0])) for run in runs]


@dataclass
class Crossing:
    """A satellite between four neighbours and two ground hosts, its packets in transit passed on by one implementation
    of ``native.serve``, or (None) by the machine alone. ``near``: neighbours on the same host.
    """

    impl: ModuleType | None
    authority: Authority | None = None
    near: tuple[SatelliteId, ...] = ()
    ip: str = "127.0.0.1"
    passed: int = 0
    served: int = 0
    handed: list[tuple[SatelliteId, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = SatelliteConfig(HERE, MEMORY_BYTES, authority=self.authority)
        self.machine = SatelliteMachine(config, SKY, MoveClock(), 1000.0)
        self.sock = BatchSocket(self.ip)
        self.ends: dict[object, BatchSocket] = {name: BatchSocket(self.ip) for name in (*NEIGHBOURS, "A", "B")}
        self.names = {self.ends[name].address: name for name in NEIGHBOURS}
        self.endpoints = {name: self.ends[name].address for name in NEIGHBOURS if name not in self.near}

    def close(self) -> None:
        for end in (self.sock, *self.ends.values()):
            end.close()

    def hear(self, sent: list[tuple[object, SegmentBatch]]) -> dict[object, list[bytes]]:
        """What leaves by each link when these batches have come, each by its link, and wait together."""
        for source, batch in sent:
            assert self.ends[source].send(batch, self.sock.address) is None
        scratch = memoryview(bytearray(16 * SLOT_BYTES))
        while arrivals := self._take(scratch):
            for at, size, segment_bytes, host, port in arrivals:
                self._process([(scratch[at : at + size], segment_bytes)], self.names.get((host, port), (host, port)))
        return self.left()

    def _take(self, scratch: memoryview) -> list[native.Arrival]:
        fd, arrivals, served = self.sock.fileno(), list[native.Arrival](), list[native.Served]()
        while not arrivals:
            requests, routes = self.machine.plain_requests(NOW_S), self.machine.routes(NOW_S)
            if self.impl is None or requests is None or routes is None:
                return native.recv_batch(fd, scratch, 16)
            transit = (*routes, self.endpoints)
            arrivals, served, errors, passed = self.impl.serve(fd, scratch, 16, self.names, requests, transit)
            assert errors == 0
            self._carried(scratch, served, passed)
            if not served and not passed:
                break
        return arrivals

    def hand(self, source: SatelliteId, batches: list[SegmentBatch]) -> dict[object, list[bytes]]:
        """The same of packets that a neighbour hands over in memory."""
        assert self.impl is not None
        scratch, runs = memoryview(bytearray(16 * SLOT_BYTES)), []
        for number, batch in enumerate(batches):
            data, at = b"".join(batch.datagrams()), number * SLOT_BYTES + number
            scratch[at : at + len(data)] = data
            runs.append((at, len(data), batch.header_bytes))
        requests, routes = self.machine.plain_requests(NOW_S), self.machine.routes(NOW_S)
        assert requests is not None and routes is not None
        transit = (*routes, self.endpoints)
        kept, served, errors, passed = self.impl.serve_runs(
            self.sock.fileno(), scratch, runs, source, requests, transit
        )
        assert errors == 0
        self._carried(scratch, served, passed)
        for at, size, segment_bytes in kept:
            self._process([(scratch[at : at + size], segment_bytes)], source)
        return self.left()

    def _carried(self, scratch: memoryview, served: list[native.Served], passed: list[native.Passed]) -> None:
        self.machine.record_passed(passed, NOW_S)
        self.machine.record_served(served, NOW_S)
        for _, _, link, _, left in passed:
            assert bool(left) == (link in self.near)
            self.handed += [(link, bytes(scratch[at : at + size])) for at, size, _ in left]
        self.passed += sum(run[3] for run in passed)
        self.served += len(served)

    def _process(self, runs: list[native.Run], source: object) -> None:
        self.machine.receive_runs(runs, source, NOW_S)
        for batch, link in self.machine.datagrams_to_send(NOW_S):
            to = self.ends[link].address if isinstance(link, SatelliteId) else link
            assert self.sock.send(batch, to) is None

    def left(self) -> dict[object, list[bytes]]:
        """What has come to each end since, without LINKS; in no order, since what passes overtakes what is kept."""
        found = {}
        for name, end in self.ends.items():
            packets: list[bytes] = []
            while runs := end.receive():
                packets += [bytes(view[at : at + size]) for view, size, _ in runs for at in range(0, len(view), size)]
            found[name] = sorted(packet for packet in packets if packet[9] != Op.LINKS)
        return found

    def books(self) -> tuple[object, ...]:
        counters = {name: count for name, count in self.machine.counters.as_dict().items() if count}
        heard = [neighbour.heard_s for neighbour in self.machine.neighbours._neighbours.values()]
        return counters, sorted(self.machine._router._ground_links), sorted(self.machine.store.items()), heard


def ground(gateway: SatelliteId) -> Address:
    return Address(*gateway, GROUND_SHELL)


@pytest.fixture(params=["fast", "twin"])
def pair(request: pytest.FixtureRequest, loopback: str) -> Iterator[tuple[Crossing, Crossing]]:
    impl = request.getfixturevalue("fast") if request.param == "fast" else backend
    crossings = Crossing(impl, ip=loopback), Crossing(None, ip=loopback)
    yield crossings
    for crossing in crossings:
        crossing.close()


def test_runs_pass_as_they_came_with_a_hop_more(pair: tuple[Crossing, Crossing]) -> None:
    """A write up and a read down, and what a third satellite sends a fourth; the first of each shows the route."""
    quick, slow = pair
    up = run_of(Op.SET, Address(2, 7), ground(HERE), [900] * 9 + [300])
    down = run_of(Op.DATA, ground(HERE), Address(2, 7), [1200] * 20 + [1])
    across = run_of(Op.MIGRATE, Address(*WEST), Address(*NORTH), [700] * 3, ground=0)
    traffic = [("A", up), (NEIGHBOURS[1], down), (NORTH, across)]
    for number in range(3):
        sent = [(source, batch) for source, packets in traffic for batch in batches_of(packets)]
        left = quick.hear(sent)
        assert left == slow.hear(sent) and quick.books() == slow.books()
        assert len(left[SatelliteId(2, 8)]) == len(up) and len(left["A"]) == len(down) and len(left[WEST]) == 3
        assert left["A"] == sorted(down), "a beam is no hop"
        assert quick.passed == number * (len(up) + len(down) + len(across))
    for packet in left[WEST]:
        assert packet in [bytes((*p[:28], 63, 1, *p[30:])) for p in across]


def test_requests_that_come_by_links_are_served_and_answered_by_links(pair: tuple[Crossing, Crossing]) -> None:
    quick, slow = pair
    gateway = SatelliteId(2, 11)
    rounds = [
        [set_batch(KEYS[0], [0, 1], 1, 1, gateway)],
        [set_batch(KEYS[0], [0, 1, 2], 2, 1, gateway)],
        [get_batch(KEYS[0], [0, 2], 3, gateway)],
        [get_batch(KEYS[0], [4], 4, gateway)],  # a MISS, from the machine
    ]
    for number, batches in enumerate(rounds):
        sent = [(NORTH, batch) for batch in batches]
        left = quick.hear(sent)
        assert left == slow.hear(sent) and quick.books() == slow.books() and left[NORTH]
        assert quick.served == min(number, 2)


@pytest.mark.parametrize("limit", [0, 1])
def test_hop_limits_at_their_edge(pair: tuple[Crossing, Crossing], limit: int) -> None:
    quick, slow = pair
    far = Address(2, 7)
    for crossing in pair:
        crossing.hear([("A", batch) for batch in batches_of(run_of(Op.SET, far, ground(HERE), [9]))])
    packets = run_of(Op.SET, far, ground(HERE), [50, 50]) + run_of(Op.SET, far, ground(HERE), [50], limit=limit)
    sent = [("A", SegmentBatch(b"".join(packets), len(packets[0])))]
    assert quick.hear(sent) == slow.hear(sent) and quick.books() == slow.books()
    assert quick.passed == 3 * limit


def test_what_only_the_machine_can_decide_is_left_to_it(pair: tuple[Crossing, Crossing]) -> None:
    quick, slow = pair
    far = Address(2, 7)
    warm = [
        ("A", run_of(Op.SET, far, ground(HERE), [9])),
        (NORTH, run_of(Op.SET, far, ground(NORTH), [9])),
    ]
    bad = run_of(Op.SET, far, ground(HERE), [60, 60, 60])
    bent, wrong = bytearray(bad[1]), bytearray(bad[1])
    bent[-1] ^= 1
    wrong[40] ^= 1
    mixed = [*run_of(Op.SET, far, ground(NORTH), [60]), *run_of(Op.SET, far, ground(NORTH), [60], ground=8)]
    left_over = [
        ("A", [bad[0], bytes(bent), bad[2]]),
        ("A", [bad[0], bytes(wrong), bad[2]]),
        ("A", run_of(Op.DATA, far, ground(HERE), [60])),  # no command
        ("A", run_of(Op.SET, Address(6, 0), ground(HERE), [60])),  # off the torus
        ("A", run_of(Op.SET, Address(*HERE, 5), ground(HERE), [60])),
        (NORTH, run_of(Op.DATA, ground(HERE), far, [60], ground=99)),  # a ground host unheard of
        (NORTH, mixed),
        (NORTH, [bad[0], bad[1][:50]]),  # the last without a whole header
    ]
    for source, packets in warm * 2 + left_over:
        sent = [(source, SegmentBatch(b"".join(packets), len(packets[0])))]
        assert quick.hear(sent) == slow.hear(sent) and quick.books() == slow.books()
    assert quick.passed == len(warm)


def test_what_stands_before_it_does_not_hold_it_up(pair: tuple[Crossing, Crossing]) -> None:
    """Of two hosts' packets that wait together, one needs the machine."""
    quick, slow = pair
    far = Address(2, 7)
    through = [("A", batch) for batch in batches_of(run_of(Op.SET, far, ground(HERE), [9]))]
    pinged = [("B", SegmentBatch(packet, 200)) for packet in run_of(Op.HAS, Address(*HERE), ground(HERE), [0])]
    for number in range(2):
        assert quick.hear(pinged + through) == slow.hear(pinged + through)
        assert quick.books() == slow.books() and quick.passed == number


def test_routes_end_when_a_link_does(pair: tuple[Crossing, Crossing]) -> None:
    quick, slow = pair
    sent = [("A", batch) for batch in batches_of(run_of(Op.SET, Address(2, 7), ground(HERE), [9, 9]))]
    for _ in range(2):
        assert quick.hear(sent) == slow.hear(sent)
    assert quick.passed == 2
    declared = Declaration(SatelliteId(2, 8), 0xF, int(NOW_S * 1e3))
    assert quick.machine.neighbours.links.learn(declared, NOW_S) and slow.machine.neighbours.links.learn(
        declared, NOW_S
    )
    left = quick.hear(sent)
    assert left == slow.hear(sent) and not left[SatelliteId(2, 8)] and quick.passed == 2
    assert quick.hear(sent) == slow.hear(sent) == left and quick.passed == 4


def test_an_overloaded_satellite_passes_nothing_by_itself(pair: tuple[Crossing, Crossing]) -> None:
    quick, _ = pair
    assert quick.machine.routes(NOW_S) is not None
    quick.machine.lateness.measured(0.4, NOW_S - 0.4)
    assert quick.machine.routes(NOW_S) is None


def test_satellites_of_one_host_are_handed_what_goes_there(fast: ModuleType) -> None:
    far, down = run_of(Op.SET, Address(2, 7), ground(HERE), [80] * 3), run_of(Op.SET, Address(1, 9), ground(HERE), [80])
    for impl in (fast, backend):
        crossing, plain = Crossing(impl, near=(SatelliteId(2, 8),)), Crossing(None)
        try:
            sent = [("A", batch) for run in (down, far, down) for batch in batches_of(run)]
            crossing.hear(sent), plain.hear(sent)
            left, wanted = crossing.hear(sent), plain.hear(sent)
            assert crossing.handed == [(SatelliteId(2, 8), b"".join(wanted.pop(SatelliteId(2, 8))))]
            assert not left.pop(SatelliteId(2, 8)) and left == wanted and crossing.passed == 5
        finally:
            crossing.close()
            plain.close()


def test_what_the_network_refuses_is_counted_and_holds_up_nothing(impl: ModuleType) -> None:
    """No socket has port 0."""
    crossing = Crossing(impl)
    try:
        packets = run_of(Op.SET, Address(2, 7), ground(HERE), [80] * 3)
        other = run_of(Op.SET, Address(*WEST), ground(HERE), [80])
        sent = [("A", batch) for batch in batches_of(packets) + batches_of(other)]
        crossing.hear(sent)
        for source, batch in sent:
            assert crossing.ends[source].send(batch, crossing.sock.address) is None
        requests, routes = crossing.machine.plain_requests(NOW_S), crossing.machine.routes(NOW_S)
        assert requests is not None and routes is not None
        transit = (*routes, crossing.endpoints | {SatelliteId(2, 8): ("127.0.0.1", 0)})
        scratch, fd = bytearray(16 * SLOT_BYTES), crossing.sock.fileno()
        kept, _, errors, passed = impl.serve(fd, scratch, 16, crossing.names, requests, transit)
        assert (kept, errors) == ([], 1) and [run[3:] for run in passed] == [(3, []), (1, [])]
        assert len(crossing.left()[WEST]) == 1
    finally:
        crossing.close()


def test_what_is_handed_over_lies_in_the_buffer(impl: ModuleType) -> None:
    with BatchSocket() as sock:
        requests = (bytes(8), {}, set(), 0, (0, 0, 0, 0, 0, 0), None)
        for run in ((-1, 60, 60), (0, 0, 60), (0, 60, 0), (41, 60, 60), (2**62, 60, 60)):
            with pytest.raises(ValueError, match="a run of"):
                impl.serve_runs(sock.fileno(), bytearray(100), [run], HERE, requests)
        assert impl.serve_runs(sock.fileno(), bytearray(100), [(40, 60, 60)], HERE, requests)[0] == [(40, 60, 60)]
        with pytest.raises(ValueError, match="addresses"):
            impl.serve_runs(sock.fileno(), bytearray(100), [], HERE, (b"short", *requests[1:]))
        with pytest.raises(BufferError if impl is backend else TypeError):
            impl.serve_runs(sock.fileno(), bytes(100), [], HERE, requests)


def test_a_ground_host_without_a_socket_gets_its_answers_from_the_caller(impl: ModuleType) -> None:
    """As in virtual time: requests by the satellite's own beam, commands that go on, answers that come down."""
    crossing = Crossing(None)
    try:
        machine, host = crossing.machine, ("ground", 1)
        sets = run_of(Op.SET, Address(2, 7), ground(HERE), [300, 300])
        down = run_of(Op.DATA, ground(HERE), Address(2, 7), [700, 700])
        machine.receive_runs([(memoryview(b"".join(sets)), len(sets[0]))], host, NOW_S)
        machine.datagrams_to_send(NOW_S)
        requests, routes = machine.plain_requests(NOW_S), machine.routes(NOW_S)
        assert requests is not None and routes is not None and host in routes[1].values()
        for packets, source, link in ((sets, host, SatelliteId(2, 8)), (down, NEIGHBOURS[1], host)):
            scratch = bytearray(b"".join(packets))
            run = 0, len(scratch), len(packets[0])
            kept, served, errors, passed = impl.serve_runs(-1, scratch, [run], source, requests, (*routes, {}))
            assert (kept, served, errors) == ([], [], 0)
            assert [(one[0], one[2:]) for one in passed] == [(source, (link, 2, [run]))]
    finally:
        crossing.close()


places = st.sampled_from(PLACES)
addresses = st.one_of(
    st.builds(lambda place: Address(*place), places),
    st.builds(ground, places),
    st.builds(lambda place: Address(*place, 5), places),
)
traffic_of = st.lists(
    st.tuples(
        st.sampled_from([*NEIGHBOURS, "A", "B"]),
        st.builds(
            run_of,
            st.sampled_from([Op.SET, Op.SET, Op.DATA, Op.DATA, Op.MIGRATE, Op.GET, Op.MISS]),
            addresses,
            st.one_of(st.just(ground(HERE)), addresses),
            st.builds(
                lambda count, size, last: [size] * count + [min(last, size)],
                st.integers(0, 6),
                st.integers(0, 300),
                st.integers(0, 300),
            ),
            st.sampled_from([0, 7, 8]),
            st.sampled_from([0, 1, 2, 64, 255]),
            st.sampled_from([0, 254, 255]),
            st.integers(1, 3),
        ),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


def damaged(packets: list[bytes], data: st.DataObject) -> list[bytes]:
    victim = data.draw(st.integers(0, len(packets) - 1))
    bent = bytearray(packets[victim])
    bent[data.draw(st.integers(0, min(60, len(bent) - 1)))] ^= 1 << data.draw(st.integers(0, 7))
    return [*packets[:victim], bytes(bent), *packets[victim + 1 :]]


@pytest.mark.brief()
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=80)
@given(st.lists(traffic_of, min_size=1, max_size=3), st.booleans(), st.data())
def test_any_traffic_leaves_alike(
    fast: ModuleType, rounds: list[list[tuple[object, list[bytes], bool]]], keys: bool, data: st.DataObject
) -> None:
    """Native code, its twin and the machine; with keys and without. Sent one by one, so that the order is the same."""
    authority = MINE if keys else None
    crossings = [Crossing(impl, authority) for impl in (fast, backend, None)]
    try:
        for traffic in rounds * 2:  # the second time the routes are known
            for source, packets, bend in traffic:
                sent = damaged(packets, data) if bend else packets
                left = [crossing.hear([(source, batch) for batch in batches_of(sent)]) for crossing in crossings]
                assert left[0] == left[1] == left[2]
                assert crossings[0].books() == crossings[1].books() == crossings[2].books()
        assert crossings[0].passed == crossings[1].passed and crossings[0].served == crossings[1].served
    finally:
        for crossing in crossings:
            crossing.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.lists(traffic_of, min_size=1, max_size=2), st.sampled_from(NEIGHBOURS))
def test_by_memory_as_by_the_socket(
    fast: ModuleType, rounds: list[list[tuple[object, list[bytes], bool]]], source: SatelliteId
) -> None:
    by_socket, by_memory, by_twin = crossings = [Crossing(impl) for impl in (fast, fast, backend)]
    try:
        for traffic in rounds * 2:
            for _, packets, _ in traffic:
                batches = batches_of(packets)
                left = by_socket.hear([(source, batch) for batch in batches])
                assert left == by_memory.hand(source, batches) == by_twin.hand(source, batches)
                assert by_socket.books() == by_memory.books() == by_twin.books()
        assert by_socket.passed == by_memory.passed == by_twin.passed
    finally:
        for crossing in crossings:
            crossing.close()


def test_with_keys_only_what_is_authentic_and_new_passes_from_the_ground(fast: ModuleType) -> None:
    far = Address(2, 7)

    def signed(by: Authority, source: Address, late_s: float) -> list[tuple[object, SegmentBatch]]:
        header = SkyHeader(Op.SET, far, source, 7, 1)
        refs = (
            KEYS[0] + b"".join(n.to_bytes(4, "big") for n in (1, 1, 9, backend.crc32(b"123456789"), 9, 5)) + bytes(16)
        )
        batch = by.sign(bulk_batch(header, refs * 2, [b"123456789"] * 2, 3, 1.0), NOW_S - late_s)
        return [("A", batch)]

    steps = [
        (signed(MINE, ground(HERE), 0.3), 0),  # shows the route
        (signed(MINE, ground(HERE), 0.2), 2),
        (signed(MINE, ground(HERE), 0.2), 2),  # replayed
        (signed(OTHER, ground(HERE), 0.1), 2),
        (signed(MINE, ground(NORTH), 0.1), 2),  # overheard at another's beam
        (signed(MINE, ground(HERE), 31.0), 2),
        ([("A", batch) for batch in batches_of(run_of(Op.SET, far, ground(HERE), [9]))], 2),  # no MAC
        (signed(MINE, ground(HERE), 0.0), 4),
        ([(NORTH, batch) for batch in batches_of(run_of(Op.DATA, ground(HERE), far, [9]))], 5),  # no sign of life
    ]
    for impl in (fast, backend):
        quick, slow = Crossing(impl, MINE), Crossing(None, MINE)
        try:
            for sent, passed in steps:
                assert quick.hear(sent) == slow.hear(sent)
                assert quick.books() == slow.books() and quick.passed == passed
        finally:
            quick.close()
            slow.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(
    st.lists(st.binary(min_size=0, max_size=130), min_size=1, max_size=4),
    st.integers(1, 130),
    st.sampled_from([0x18, 0x08]),
)
def test_hops_and_journeys_of_any_bytes(fast: ModuleType, parts: list[bytes], segment_bytes: int, kind: int) -> None:
    data = b"".join(bytes((kind,)) + part for part in parts)
    for run in (data, data[:segment_bytes] * 3, data[:segment_bytes] * 3 + data[: segment_bytes - 1]):
        outcomes = []
        for impl in (fast, backend):
            try:
                counted = impl.count_hops(run, segment_bytes)
            except ValueError:
                counted = "refused"
            outcomes.append((impl.same_journey(run, segment_bytes), counted))
        assert outcomes[0] == outcomes[1]


def test_a_run_to_two_ground_hosts_is_no_journey(impl: ModuleType) -> None:
    """Receive offload may join what a satellite sends to two hosts behind us."""
    one, other = (run_of(Op.DATA, ground(HERE), Address(2, 7), [60], ground=host)[0] for host in (7, 8))
    assert impl.same_journey(one + one, len(one)) and not impl.same_journey(one + other, len(one))
    for bad in (0, -1):
        with pytest.raises(ValueError, match="expected 1 or more"):
            impl.same_journey(one, bad)
        with pytest.raises(ValueError, match="expected 1 or more"):
            impl.count_hops(one, bad)
