"""Round trips, timeouts, windows, and which satellite is under suspicion."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.client.liveness import Peers
from skymemory.protocol.client.requests import InFlight, Operation
from skymemory.protocol.client.transfer import TransferReport
from skymemory.protocol.congestion import RTO_CEILING_S, RTO_FLOOR_S, SENDERS_PERIOD_S, Credit, RoundTrip, Window
from skymemory.protocol.wire import Op

HERE = SatelliteId(1, 2)


def test_the_timeout_follows_the_round_trip():
    trip = RoundTrip(expected_s=0.008)
    assert trip.timeout_s() == pytest.approx(0.066)
    for _ in range(100):
        trip.sample(0.010)
    assert trip.smoothed_s == pytest.approx(0.010)
    assert trip.timeout_s() == pytest.approx(0.010 + RTO_FLOOR_S)
    for jitter_s in (0.01, 0.09) * 50:
        trip.sample(jitter_s)
    assert 0.1 < trip.timeout_s() < 0.4
    trip.sample(60.0)
    assert trip.timeout_s() == RTO_CEILING_S


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_the_smoothed_round_trip_is_among_the_samples(samples):
    trip = RoundTrip()
    for sample in samples:
        trip.sample(sample)
    assert min(samples) - 1e-9 <= trip.smoothed_s <= max(samples) + 1e-9
    assert RTO_FLOOR_S <= trip.timeout_s() <= RTO_CEILING_S


def test_loss_halves_the_window_once_a_round_trip_and_answers_open_it():
    window = Window(1_000_000, 64_000)
    window.sent(500_000)
    window.lost(1.0, 0.05)
    window.lost(1.02, 0.05)
    assert window.size_bytes == 500_000
    window.lost(1.06, 0.05)
    assert window.size_bytes == 250_000 and not window.admits(1)
    for turn in range(10):
        window.lost(2.0 + turn, 0.05)
    assert window.size_bytes == 64_000
    window.answered(500_000)
    assert window.size_bytes == 314_000 and window.in_flight_bytes == 0
    window.sent(2_000_000)
    window.answered(2_000_000)
    assert window.size_bytes == window.limit_bytes == 1_000_000


def test_credit_bounds_the_window():
    window = Window(100_000, 64_000)
    window.offer(4_000_000)
    assert window.size_bytes == 4_000_000
    window.lost(0.0, 0.01)
    window.offer(1_000_000)
    assert window.size_bytes == 1_000_000
    window.offer(0)
    assert window.size_bytes == window.limit_bytes == 64_000


@given(st.lists(st.tuples(st.sampled_from(["sent", "answered", "given_up", "offer", "lost"]), st.integers(0, 10**7))))
def test_a_window_never_closes_for_good(steps):
    window = Window(1 << 20, 1 << 16)
    for at, (verb, size) in enumerate(steps):
        if verb == "lost":
            window.lost(float(at), 0.1)
        else:
            getattr(window, verb)(size)
        assert window.in_flight_bytes >= 0 and window.size_bytes >= 1 << 16
        assert window.size_bytes <= max(window.limit_bytes, 1 << 16)
    window.given_up(window.in_flight_bytes)
    assert window.admits(10**9)


def test_suspicion_ends_with_a_word():
    peers = Peers(1 << 20, 1 << 20, 0.008)
    assert HERE not in peers.suspects
    peers.suspects.add(HERE, 5.0)
    assert HERE in peers.suspects
    peers.peer(HERE).on_answer(None, 7.1)
    assert HERE not in peers.suspects
    assert peers.silent_since_s(HERE, 6.0) == 7.1 and peers.silent_since_s(HERE, 8.0) == 8.0


def test_another_way_may_take_as_long_as_any_way_has():
    trip = RoundTrip(0.03)
    for _ in range(50):
        trip.sample(0.03)
    assert trip.timeout_s() < 0.06
    trip.sample(0.2)
    for _ in range(50):
        trip.sample(0.03)
    assert trip.timeout_s() < 0.06
    trip.rerouted()
    assert trip.timeout_s() >= 0.2, "the long way may be back"
    trip.sample(0.03)
    assert trip.smoothed_s == 0.03, "and is forgotten with the first answer"


def test_how_slow_a_satellite_was_long_ago_does_not_make_us_patient_now():
    """An overload has passed, and the box comes round to it again: what is lost now is asked for again at once."""
    peers = Peers(1 << 20, 1 << 20, expected_rtt_s=0.008)
    in_flight = InFlight(peers, None, give_up_s=0.8, ground=7)
    peer = peers.peer(HERE)
    for number in range(20):
        peer.on_answer(1.5, 0.1 * number)
    operation = Operation(1, Op.PING, None, 2.0, TransferReport())
    busy = in_flight.begin(operation, HERE, [], (0, 0), 2.0)
    assert busy.deadline_s == 2.8
    rested = in_flight.begin(operation, HERE, [], (0, 0), 20.0)
    assert rested.deadline_s == pytest.approx(20.066)


def test_a_receive_buffer_is_divided_among_those_that_send_lately():
    credit = Credit(1000, 100)
    assert credit.each_bytes == 1000
    credit.record_sender(1, 0.0)
    credit.record_sender(1, 0.1)
    assert credit.each_bytes == 1000
    for sender in range(4):
        credit.record_sender(sender, 0.2)
    assert credit.each_bytes == 250
    credit.record_sender(1, 0.2 + SENDERS_PERIOD_S)
    assert credit.each_bytes == 250, "as many as in the period before, which has just ended"
    credit.record_sender(1, 0.3 + 2 * SENDERS_PERIOD_S)
    assert credit.each_bytes == 1000, "the others have not been heard for a period"
    for sender in range(50):
        credit.record_sender(sender, 0.4 + 2 * SENDERS_PERIOD_S)
    assert credit.each_bytes == 100, "never less than the least"
    credit.record_sender(2, 10.0)
    assert credit.each_bytes == 1000
    assert Credit(50, 100).each_bytes == 50
