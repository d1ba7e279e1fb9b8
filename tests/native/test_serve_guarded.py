"""The shortest way where packets carry MACs: the same answers as the machine's own, and the same refusals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.native.test_serve import HERE, MEMORY_BYTES, SKY, Satellite, get_batch, set_batch

from skymemory.keys import first_ring
from skymemory.native import twin
from skymemory.protocol.authentication import Authority
from skymemory.protocol.messages import parse_packet
from skymemory.protocol.motion import MoveClock
from skymemory.protocol.satellite import SatelliteConfig, SatelliteMachine
from skymemory.protocol.segments import SegmentBatch
from skymemory.protocol.wire import Op, Status

NOW_S = 1000.25
KEY = bytes(range(32))
MINE, OTHER = Authority(first_ring(bytes(range(32)))), Authority(first_ring(bytes(32)))


class Guarded(Satellite):
    def __post_init__(self) -> None:
        super().__post_init__()
        config = SatelliteConfig(HERE, MEMORY_BYTES, authority=Authority(first_ring(bytes(range(32)))))
        self.machine = SatelliteMachine(config, SKY, MoveClock(), 1000.0)


@pytest.fixture(params=["fast", "twin"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Guarded, Guarded]]:
    impl = request.getfixturevalue("fast") if request.param == "fast" else twin
    satellites = Guarded(impl), Guarded(None)
    yield satellites
    for satellite in satellites:
        satellite.close()


def signed(batch: SegmentBatch, by: Authority = MINE, late_s: float = 0.0) -> SegmentBatch:
    return by.sign(batch, NOW_S - late_s)


def test_both_ways_answer_alike_and_refuse_alike(pair: tuple[Guarded, Guarded]) -> None:
    get = signed(get_batch(KEY, [0, 1, 2], 2))
    steps = [
        ([signed(set_batch(KEY, [0, 1, 2, 3], 1, 5), late_s=0.01)], [Op.ACK]),
        ([get], [Op.DATA] * 3),
        ([get], []),  # replayed
        ([signed(get_batch(KEY, [0, 1, 2], 2), late_s=0.02)], [Op.DATA] * 3),  # repeated by who asked
        ([get_batch(KEY, [0], 3)], [Op.UNREACHABLE]),  # no MAC
        ([signed(get_batch(KEY, [0], 4), OTHER)], [Op.UNREACHABLE]),  # another key
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


def test_a_guard_that_is_none_is_refused(fast: object) -> None:
    with pytest.raises(TypeError, match="tuple"):
        fast.serve(0, bytearray(70_000), 1, bytes(8), {}, {}, set(), 0, (0, 0, 0, 0, 0, 0), 5)  # type: ignore[attr-defined]
