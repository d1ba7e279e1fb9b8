"""Links by hand, and against a twin that moves every byte by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.errors import InvalidInput
from skymemory_lab.sim.cluster.pool import NetworkDirection, streamed_s, transfer_s


def test_two_transfers_on_one_link_go_one_after_the_other() -> None:
    link = NetworkDirection("a", 10.0)
    assert transfer_s([link], 50, 0.0, 0.25) == 5.25
    assert link.queue_s(2.0) == 3.0
    assert transfer_s([link], 20, 2.0) == 7.0
    assert transfer_s([link], 20, 100.0) == 102.0
    assert link.carried_bytes == 90


def test_a_slow_link_delays_no_transfer_on_the_fast_one_behind_it() -> None:
    slow, fast = NetworkDirection("sky", 1.0), NetworkDirection("node", 10.0)
    assert transfer_s([slow, fast], 20, 0.0) == 20.0
    assert fast.free_s == 2.0
    assert transfer_s([fast], 10, 0.0) == 3.0


def test_a_stream_ends_with_its_last_part() -> None:
    out, into = NetworkDirection("a", 10.0), NetworkDirection("b", 5.0)
    assert streamed_s([out, into], 10, 0.0, 0.5, over_s=8.0, parts=4) == 8.0 + 2.5 / 5 + 0.5
    assert streamed_s([out, into], 100, 0.0, 0.0, over_s=8.0, parts=4) == 2.0 + 20.0  # slower than what it carries
    assert streamed_s([out], 0, 1.0, 0.5, over_s=3.0, parts=4) == 4.0


def test_nothing_takes_no_time_and_a_link_has_a_rate() -> None:
    assert transfer_s([NetworkDirection("a", 1.0)], 0, 7.0, 0.5) == 7.0
    with pytest.raises(InvalidInput, match="expected above 0"):
        NetworkDirection("a", 0.0)


class Twin:
    """A link that carries whole bytes, a byte each so many ticks, in the order in which they were asked for."""

    def __init__(self, ticks_per_byte: int) -> None:
        self.ticks_per_byte = ticks_per_byte
        self.passed: list[int] = []
        """The tick at which each byte has passed."""

    def carry(self, size: int, now: int) -> int:
        for _ in range(size):
            begins = max(now, self.passed[-1] if self.passed else 0)
            self.passed.append(begins + self.ticks_per_byte)
        return self.passed[-1]


ASKS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 9), st.sampled_from([(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])),
    min_size=1,
    max_size=30,
)


@given(ASKS, st.tuples(*[st.integers(1, 5)] * 3))
def test_as_the_twin_that_moves_every_byte(
    asks: list[tuple[int, int, tuple[int, ...]]], paces: tuple[int, ...]
) -> None:
    links, twins = [NetworkDirection(str(pace), 1 / pace) for pace in paces], [Twin(pace) for pace in paces]
    now = 0
    for wait, size, way in asks:
        now += wait
        expected = max(twins[at].carry(size, now) for at in way)
        assert transfer_s([links[at] for at in way], size, now) == pytest.approx(expected)
    for link, twin, pace in zip(links, twins, paces, strict=True):
        assert link.carried_bytes == len(twin.passed)  # each byte once, on each link of its way
        for tick in range(0, 200, 7):
            assert sum(passed <= tick for passed in twin.passed) <= tick / pace  # never faster than its rate
