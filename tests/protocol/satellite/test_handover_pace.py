"""A handover's pace: never more than its rate, all sent in time where the rate allows, no key starved."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.clock import HANDED_OVER_S
from skymemory.protocol.satellite.handover import BURST_CHUNKS, SPREAD_S, SPREAD_SHARE, ChunkHandover, Pacer, phase_of

GAP_S = 0.002
KEY, THERE = bytes(32), SatelliteId(0, 1)


def send(pacer: Pacer, bursts: int, now_s: float, late_s: list[float], until_s: float = float("inf")) -> list[float]:
    """When each of so many leaves, if the alarm comes as late as ``late_s`` says, in turn."""
    times: list[float] = []
    while len(times) < bursts:
        now_s = max(now_s, pacer.next_s) + late_s[len(times) % len(late_s)]
        if now_s > until_s:
            break
        while len(times) < bursts and now_s >= pacer.next_s:
            pacer.sent(now_s)
            times.append(now_s)
    return times


moves = st.tuples(st.integers(1, 400), st.floats(0.01, 300.0), st.booleans())
lateness = st.lists(st.floats(0.0, 0.05), min_size=1, max_size=5)


@settings(deadline=None)  # a busy computer makes one example late
@given(moves, lateness, st.floats(0.0, 1.0))
def test_no_window_holds_more_than_the_rate_and_two_groups(move, late_s, phase):
    bursts, interval_s, urgent = move
    pacer = Pacer(GAP_S, phase)
    pacer.spread(bursts, 5.0, interval_s, urgent)
    times = send(pacer, bursts, 5.0, late_s)
    for first, begin_s in enumerate(times):
        for last in range(first, len(times)):
            assert last - first + 1 <= ((times[last] - begin_s) / pacer.step_s + 2) * pacer.group + 1e-6


@given(moves, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_all_is_sent_before_the_box_moves_again_however_much_it_is(move, lateness, phase):
    """As long as alarms are late by less than the time between two groups."""
    bursts, interval_s, urgent = move
    pacer = Pacer(GAP_S, phase)
    pacer.spread(bursts, 5.0, interval_s, urgent)
    late_s = lateness * pacer.step_s
    times = send(pacer, bursts, 5.0, [late_s])
    assert times[-1] - 5.0 <= SPREAD_SHARE * interval_s + late_s + 1e-9
    if bursts * GAP_S <= SPREAD_S:
        assert times[-1] - 5.0 <= SPREAD_S + late_s + 1e-9 < HANDED_OVER_S, "before readers look there"


@given(st.integers(1, 400), st.floats(1.0, 300.0))
def test_links_are_loaded_with_the_usual_pace_where_the_box_leaves_time(bursts, interval_s):
    pacer = Pacer(GAP_S)
    pacer.spread(bursts, 0.0, interval_s)
    assert pacer.gap_s >= min(GAP_S, SPREAD_SHARE * interval_s / bursts) and pacer.gap_s <= 0.010
    pacer.spread(bursts, 0.0, interval_s, urgent=True)
    assert pacer.gap_s == min(GAP_S, SPREAD_SHARE * interval_s / bursts)


@given(st.lists(st.tuples(st.floats(0.001, 0.3), st.integers(0, 60)), min_size=2, max_size=30))
def test_a_box_that_moves_on_early_starves_no_key(steps):
    """Given the mean of the next two intervals, some of which are very short: what is left then goes with the next."""
    pacer, now_s, left = Pacer(GAP_S, 0.9), 0.0, 0
    for (interval_s, bursts), (following_s, _) in zip(steps, [*steps[1:], (1.0, 0)], strict=True):
        left += bursts
        pacer.spread(left, now_s, (interval_s + following_s) / 2)
        left -= len(send(pacer, left, now_s, [0.0], now_s + interval_s))
        now_s += interval_s
    pacer.spread(left, now_s, 1.0)
    assert len(send(pacer, left, now_s, [0.0], now_s + 1.0)) == left


def test_neighbours_of_a_row_or_column_begin_apart():
    for line in ([SatelliteId(plane, 3) for plane in range(5)], [SatelliteId(2, slot) for slot in range(5)]):
        phases = sorted(map(phase_of, line))
        gaps = [after - before for before, after in zip(phases, [*phases[1:], phases[0] + 1], strict=True)]
        assert min(gaps) > 0.1, phases


def test_without_a_pace_all_goes_at_once():
    pacer = Pacer()
    pacer.spread(100, 7.0, 0.1)
    assert send(pacer, 100, 7.0, [0.0]) == [7.0] * 100


def test_strays_after_a_handover_go_at_the_usual_pace():
    pacer = Pacer(GAP_S)
    pacer.spread(3, 0.0, 100.0)
    assert pacer.gap_s > GAP_S
    pacer.relax()
    assert send(pacer, 5, 1.0, [0.0])[-1] <= 1.0 + 5 * GAP_S


def names(bursts: int) -> list[tuple[bytes, int]]:
    return [(KEY, index) for index in range(bursts * BURST_CHUNKS)]


def test_a_handover_leaves_at_its_pace_and_is_waited_for():
    pacer = Pacer(GAP_S)
    handover = ChunkHandover(32, 0.1, 1.0, pacer)
    handover.enqueue(THERE, names(20))
    pacer.spread(20, 0.0, 0.1)
    sent: list[float] = []
    while (due_s := handover.next_timer_s()) is not None and due_s < 0.1:
        sent += [due_s] * len(handover.bursts_to_send(due_s))
    assert len(sent) == 20 and 0.06 <= sent[-1] <= 0.08 and max(map(sent.count, sent)) <= 4


def test_what_comes_again_keeps_the_pace_too():
    """Nothing was acknowledged: hosts are busy, and a second copy of everything at once would keep them so."""
    handover = ChunkHandover(32, 0.1, 1.0, Pacer(GAP_S))
    handover.enqueue(THERE, names(20))
    sent: list[float] = []
    while (due_s := handover.next_timer_s()) is not None and due_s < 0.3:
        sent += [due_s] * len(handover.bursts_to_send(due_s))
    again = sent[20:]
    assert len(again) >= 20 and handover.retransmitted == len(again) * BURST_CHUNKS
    assert max(map(sent.count, sent)) <= 2 and again[19] - again[0] >= 18 * GAP_S


def test_answers_that_come_late_are_given_more_time():
    handover = ChunkHandover(4, 0.1, 1.0)
    for now_s in (0.0, 1.0, 2.0):
        handover.enqueue(THERE, names(1))
        (burst,) = handover.bursts_to_send(now_s)
        handover.acknowledged(burst.request_id, burst.names, now_s + 0.09 * (1 + now_s))
    handover.enqueue(THERE, names(1))
    (burst,) = handover.bursts_to_send(3.0)
    assert 0.2 < burst.deadline_s - 3.0 < 0.54
    handover.acknowledged(burst.request_id, burst.names, 90.0)
    assert handover._burst_timeout_s() == pytest.approx(2.0), "but not forever"
