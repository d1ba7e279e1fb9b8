"""The shortest way where packets carry MACs: the same answers as the machine's own, and the same refusals."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.native.test_serve import HERE, MEMORY_BYTES, SKY, Satellite, get_batch, set_batch
from tests.protocol.exchanged import exchanged

from skymemory import native
from skymemory.keys import first_ring
from skymemory.native.twin import backend
from skymemory.protocol.auth import Authority
from skymemory.protocol.clock import MoveClock
from skymemory.protocol.satellite.machine import SatelliteConfig, SatelliteMachine
from skymemory.protocol.wire import Op, SegmentBatch, Status, parse_packet

NOW_S = 1000.25
KEY = bytes(range(32))
MINE, OTHER = Authority(first_ring(bytes(range(32)))), Authority(first_ring(bytes(32)))


class Guarded(Satellite):
    signed_answers = False

    def __post_init__(self) -> None:
        super().__post_init__()
        config = SatelliteConfig(HERE, MEMORY_BYTES, authority=self.peer(MINE))
        self.machine = SatelliteMachine(config, SKY, MoveClock(), 1000.0)

    def peer(self, of: Authority) -> Authority:
        """One with these keys that signs as this satellite's constellation does."""
        return Authority(of.ring, signed_answers=self.signed_answers)

    def hear(self, batches: list[SegmentBatch]) -> list[bytes]:
        answers = super().hear(batches)
        for answer in answers:
            signed = self.signed_answers and parse_packet(answer).header.op is not Op.DATA
            assert native.check_macs(answer, len(answer), 16, MINE.mac_keys, 0, 0) == [0 if signed else None]
        return answers


class Signing(Guarded):
    signed_answers = True


@pytest.fixture(params=["fast", "twin", "fast and signing", "twin and signing"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Guarded, Guarded]]:
    impl = request.getfixturevalue("fast") if request.param.startswith("fast") else backend
    kind = Signing if request.param.endswith("signing") else Guarded
    satellites = kind(impl), kind(None)
    yield satellites
    for satellite in satellites:
        satellite.close()


def signed(batch: SegmentBatch, by: Authority = MINE, late_s: float = 0.0) -> SegmentBatch:
    return by.sign(batch, NOW_S - late_s)


def test_both_ways_answer_alike_and_refuse_alike(pair: tuple[Guarded, Guarded]) -> None:
    mine, other = pair[0].peer(MINE), pair[0].peer(OTHER)
    get = signed(get_batch(KEY, [0, 1, 2], 2))
    steps = [
        ([signed(set_batch(KEY, [0, 1, 2, 3], 1, 5), mine, late_s=0.01)], [Op.ACK]),
        ([get], [Op.DATA] * 3),
        ([get], []),  # replayed
        ([signed(get_batch(KEY, [0, 1, 2], 2), late_s=0.02)], [Op.DATA] * 3),  # repeated by who asked
        ([get_batch(KEY, [0], 3)], [Op.UNREACHABLE]),  # no MAC
        ([signed(get_batch(KEY, [0], 4), other)], [Op.UNREACHABLE]),  # another key
        ([signed(get_batch(KEY, [0], 5), late_s=31)], [Op.UNREACHABLE]),  # stale
        ([signed(get_batch(KEY, [0, 7], 6), late_s=0.03)], [Op.DATA, Op.MISS]),  # not all is here, and not a replay
        ([signed(get_batch(KEY, [3], 7), late_s=0.04)], [Op.DATA]),
    ]
    for batches, wanted in steps:
        answers = [satellite.hear(batches) for satellite in pair]
        assert answers[0] == answers[1]
        headers = [parse_packet(answer).header for answer in answers[0]]
        assert [header.op for header in headers] == wanted
        assert all(header.status is Status.REFUSED for header in headers if header.op is Op.UNREACHABLE)
    assert pair[0].memory() == pair[1].memory() and pair[0].served == 3
    assert [pair[0].machine.counters.get(name) for name in ("packets_refused", "packets_replayed")] == [3, 1]


def test_sets_with_macs_are_taken_on_the_short_way_and_refused_on_both(pair: tuple[Guarded, Guarded]) -> None:
    mine, covered = pair[0].peer(MINE), pair[0].signed_answers
    first = signed(set_batch(KEY, [0, 1, 2, 3], 1, 5), mine, late_s=0.2)
    again = signed(set_batch(KEY, [0, 1, 2, 3], 1, 5), mine, late_s=0.19)
    forged = signed(set_batch(KEY, [0, 1, 2, 3], 3, 9), pair[0].peer(OTHER))
    spoilt = signed(set_batch(KEY, [1, 2, 3], 4, 5), mine, late_s=0.17)
    rows = bytearray(spoilt.headers)
    rows[spoilt.header_bytes + 130] ^= 1  # the MAC of the second of them
    backend.seal_headers(rows, spoilt.header_bytes, 8)
    spoilt = SegmentBatch(rows, spoilt.header_bytes, spoilt.payloads)
    elsewhen = [signed(set_batch(KEY, [step], 5, 5), mine, late_s=0.01 * step) for step in (4, 5)]
    early, late = (signed(set_batch(KEY, [step], 5, 5), mine, late_s=0.001 * step) for step in (4, 5))
    in_one_run = SegmentBatch(
        bytes(early.headers + late.headers), early.header_bytes, [*early.payloads, *late.payloads]
    )
    whole = signed(set_batch(KEY, [2, 3], 10, 5), mine, late_s=0.003)
    assert whole.payloads is not None
    with_other = SegmentBatch(whole.headers, whole.header_bytes, [exchanged(whole.payloads[0]), whole.payloads[1]])
    steps = [
        ([first], [Op.ACK], 0),  # this placement has yet to be looked at
        ([again], [Op.ACK], 1),  # repeated by its writer
        ([again], [], 0),  # by another sender: replayed
        ([signed(set_batch(KEY, [4, 5], 6, 5), mine, late_s=0.16), again], [Op.ACK], 1),
        ([forged], [] if covered else [Op.UNREACHABLE], 0),  # its payload may have been exchanged
        ([set_batch(KEY, [1, 2], 7, 5)], [Op.UNREACHABLE], 0),  # no MAC
        ([signed(set_batch(KEY, [1, 2], 8, 5), mine, late_s=31)], [Op.UNREACHABLE], 0),
        ([spoilt], [Op.ACK] if covered else [Op.UNREACHABLE, Op.ACK], 0),  # the other two are taken
        (elsewhen, [Op.ACK], 0),  # of one request, but not made together: the machine's own way, which takes them
        ([in_one_run], [Op.ACK], 0),
        ([with_other], [Op.ACK], 0 if covered else 1),  # where payloads are covered the other is taken alone
        ([signed(set_batch(KEY, [1, 3], 9, 5), mine, late_s=0.0)], [Op.ACK], 1),
    ]
    for number, (batches, wanted, served) in enumerate(steps):
        before = pair[0].served
        answers = [satellite.hear(batches) for satellite in pair]
        assert answers[0] == answers[1], number
        assert [parse_packet(answer).header.op for answer in answers[0]] == wanted, number
        assert pair[0].served - before == served, number
    assert pair[0].memory() == pair[1].memory()
    assert len(pair[0].machine.store) == 6 and pair[0].machine.counters.get("packets_replayed") == 8


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.data())
def test_whatever_comes_with_macs_is_taken_as_the_machine_would(data: st.DataObject) -> None:
    impl = data.draw(st.sampled_from([backend, pytest.importorskip("skymemory.native._fast")]))
    kind, sent = data.draw(st.sampled_from([Guarded, Signing])), list[SegmentBatch]()
    pair = kind(impl), kind(None)
    try:
        for number in range(data.draw(st.integers(1, 12))):
            if sent and data.draw(st.integers(0, 3)) == 0:
                batch = data.draw(st.sampled_from(sent))
            else:
                steps = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True).map(sorted))
                plain = (
                    set_batch(KEY, steps, number + 1, 5)
                    if data.draw(st.booleans())
                    else get_batch(KEY, steps, number + 1)
                )
                by = pair[0].peer(data.draw(st.sampled_from([MINE, MINE, MINE, OTHER])))
                batch = signed(plain, by, 0.3 - 0.01 * number)
                sent.append(batch)
            if data.draw(st.integers(0, 5)) == 0:
                rows = bytearray(batch.headers)
                rows[data.draw(st.integers(0, len(rows) - 1))] ^= 1 << data.draw(st.integers(0, 7))
                batch = SegmentBatch(rows, batch.header_bytes, batch.payloads)
            if batch.payloads is not None and data.draw(st.integers(0, 5)) == 0:
                at = data.draw(st.integers(0, len(batch.payloads) - 1))
                payloads = [exchanged(each) if n == at else each for n, each in enumerate(batch.payloads)]
                batch = SegmentBatch(batch.headers, batch.header_bytes, payloads)
            answers = [satellite.hear([batch]) for satellite in pair]
            assert answers[0] == answers[1]
        assert pair[0].memory() == pair[1].memory()
    finally:
        for satellite in pair:
            satellite.close()


def test_without_a_library_all_is_left_to_the_machine(fast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sign_packets", "check_macs", "strip_macs"):
        monkeypatch.setattr(native, name, getattr(backend, name))
    fast.sha_select(False)
    satellites = Guarded(fast), Guarded(None)
    try:
        for late_s in (0.02, 0.01, 0.0):
            batch = signed(set_batch(KEY, [0, 1], 1, 5), late_s=late_s)
            answers = [satellite.hear([batch]) for satellite in satellites]
            assert answers[0] == answers[1] and [parse_packet(one).header.op for one in answers[0]] == [Op.ACK]
        assert satellites[0].served == 0 and satellites[0].memory() == satellites[1].memory()
    finally:
        fast.sha_select(True)
        for satellite in satellites:
            satellite.close()


def test_a_guard_that_signs_by_a_key_that_is_not_there_is_an_error(fast: ModuleType) -> None:
    for impl in (fast, backend):
        satellite = Guarded(impl)
        satellite.hear([signed(set_batch(KEY, [0], 1, 5), late_s=0.2)])  # this placement has yet to be looked at
        requests = satellite.machine.plain_requests(NOW_S)
        assert requests is not None and requests[5] is not None
        host, port = satellite.sock.address
        batch = signed(set_batch(KEY, [1], 2, 5), late_s=0.1)
        backend.send_batch(satellite.client.fileno(), host, port, batch.headers, batch.header_bytes, batch.payloads)
        *others, guard = requests
        with pytest.raises(KeyError, match="77"):
            impl.serve(satellite.sock.fileno(), bytearray(70_000), 1, {}, (*others, (*guard[:4], 77)))
        satellite.close()


def test_a_guard_that_is_none_is_refused(fast: object) -> None:
    with pytest.raises(TypeError, match="tuple"):
        fast.serve(0, bytearray(70_000), 1, {}, (bytes(8), {}, set(), 0, (0, 0, 0, 0, 0, 0), 5))  # type: ignore[attr-defined]
