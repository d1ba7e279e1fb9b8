"""What leaves a satellite: bursts, repetitions, refusals, strays and deletions, by the clock."""

from __future__ import annotations

import pytest

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.satellite.handover import BURST_CHUNKS, ChunkHandover

KEY, OTHER = bytes(32), bytes([1]) * 32
THERE, ELSEWHERE = SatelliteId(0, 1), SatelliteId(0, 2)


def names(count: int, key: bytes = KEY) -> list[tuple[bytes, int]]:
    return [(key, index) for index in range(count)]


def drive(handover: ChunkHandover, until_s: float) -> list[tuple[float, list[int]]]:
    """Let every timer fire; when which bursts were sent."""
    sent = []
    while (due_s := handover.next_timer_s()) is not None and due_s <= until_s:
        bursts = handover.bursts_to_send(due_s)
        sent.append((due_s, [burst.request_id for burst in bursts]))
        handover.to_delete(due_s)
        handover.strays_due(due_s)
    return sent


def test_bursts_have_one_key_and_a_window():
    handover = ChunkHandover(window_bursts=2, timeout_s=0.1, grace_s=1.0)
    assert handover.idle and handover.next_timer_s() is None
    handover.enqueue(THERE, [*names(BURST_CHUNKS + 1), *names(3, OTHER)])
    handover.enqueue(THERE, names(BURST_CHUNKS + 1))
    first = handover.bursts_to_send(0.0)
    assert [len(burst.names) for burst in first] == [BURST_CHUNKS, 1]
    assert handover.bursts_to_send(0.0) == [] and not handover.idle
    assert handover.acknowledged(first[0].request_id, first[0].names[:4], 0.01) == 4
    assert handover.acknowledged(first[0].request_id, first[0].names, 0.01) == BURST_CHUNKS - 4
    (second,) = handover.bursts_to_send(0.01)
    assert second.names == names(3, OTHER) and second.destination == THERE


def test_after_a_billion_bursts_ids_begin_again() -> None:
    """Above them are those of other questions."""
    handover = ChunkHandover(window_bursts=4, timeout_s=0.1, grace_s=1.0, first_request_id=0x3FFFFFFD)
    for number in range(4):
        handover.enqueue(THERE, [(bytes([number]) * 32, 0)])
    assert [burst.request_id for burst in handover.bursts_to_send(0.0)] == [0x3FFFFFFE, 0x3FFFFFFF, 1, 2]


def test_an_ack_is_awaited_of_the_satellite_that_was_sent_the_burst() -> None:
    handover = ChunkHandover(window_bursts=4, timeout_s=0.1, grace_s=1.0)
    handover.enqueue(THERE, [(bytes(32), 0)])
    (burst,) = handover.bursts_to_send(0.0)
    assert handover.awaits(burst.request_id, THERE) and not handover.awaits(burst.request_id + 1, THERE)
    assert not handover.awaits(burst.request_id, SatelliteId(9, 9))


def test_what_is_not_acknowledged_is_sent_again_and_then_later():
    handover = ChunkHandover(2, 0.1, 1.0)
    handover.enqueue(THERE, names(3))
    (burst,) = handover.bursts_to_send(0.0)
    handover.acknowledged(burst.request_id, [(KEY, 1)], 0.05)
    times = [time_s for time_s, sent in drive(handover, 9.0) if sent]
    assert times[:3] == pytest.approx([0.1, 0.3, 0.7]) and len(times) == 11
    assert handover.retransmitted == 2 * 11
    assert not handover.idle and handover.bursts_to_send(9.0) == []
    assert sorted(handover.strays_due(60.0)) == [(KEY, 0), (KEY, 2)]
    assert handover.idle


def test_a_refused_burst_makes_way_and_is_tried_again_later():
    handover = ChunkHandover(1, 0.1, 1.0)
    handover.enqueue(THERE, names(2))
    handover.enqueue(ELSEWHERE, names(1, OTHER))
    (refused,) = handover.bursts_to_send(0.0)
    handover.refused(refused.request_id, 0.01)
    (following,) = handover.bursts_to_send(0.01)
    assert following.destination == ELSEWHERE
    handover.acknowledged(following.request_id, following.names, 0.02)
    assert handover.strays_due(5.0) == [] and handover.next_timer_s() is not None
    assert handover.strays_due(10.02) == names(2) and handover.strays_due(10.02) == []


def test_copies_are_deleted_after_the_grace_in_order():
    handover = ChunkHandover(4, 0.1, 1.0)
    handover.enqueue(THERE, names(2))
    (burst,) = handover.bursts_to_send(0.0)
    handover.acknowledged(burst.request_id, [(KEY, 1)], 0.1)
    handover.acknowledged(burst.request_id, [(KEY, 0)], 0.2)
    assert 1.1 < handover.next_timer_s() < 1.2, "some at once"
    assert handover.to_delete(1.0) == []
    assert handover.to_delete(1.15) == [(KEY, 1)]
    assert handover.to_delete(9.0) == [(KEY, 0)] and handover.next_timer_s() is None


def test_what_is_stored_again_is_not_doomed_by_an_older_acknowledgement():
    handover = ChunkHandover(4, 0.1, 1.0)
    handover.enqueue(THERE, names(3))
    (burst,) = handover.bursts_to_send(0.0)
    handover.acknowledged(burst.request_id, [(KEY, 0)], 0.01)
    handover.keep(KEY, [0, 1])
    assert handover.acknowledged(burst.request_id, names(3), 0.02) == 1
    assert handover.to_delete(9.0) == [(KEY, 2)]


def test_strays_are_looked_at_once_and_only_while_they_are_strays():
    handover = ChunkHandover(4, 0.1, 1.0)
    handover.stray((KEY, 0), 5.0)
    handover.stray((KEY, 0), 1.0)
    handover.stray((KEY, 1), 2.0)
    handover.keep(KEY, [1])
    assert handover.strays_due(3.0) == []
    handover.stray((KEY, 1), 4.0)
    assert handover.strays_due(6.0) == [(KEY, 1), (KEY, 0)]
    assert handover.idle and handover.next_timer_s() is None


def test_acknowledgements_of_nothing_change_nothing():
    handover = ChunkHandover(4, 0.1, 1.0)
    assert handover.acknowledged(7, names(3), 0.0) == 0
    handover.refused(7, 0.0)
    assert handover.idle and handover.next_timer_s() is None


def test_a_burst_whose_chunks_were_all_stored_again_keeps_no_other_key_from_resting():
    """It stays in flight, with no chunk left of it, until it is answered: a look at its first one raised IndexError."""
    handover = ChunkHandover(32, 0.1, 1.0)
    handover.enqueue(SatelliteId(0, 1), [(b"k" * 32, 0)])
    (burst,) = handover.bursts_to_send(0.0)
    handover.keep(b"k" * 32, [0])
    assert burst.names == []
    assert handover.is_settled(b"o" * 32, [0])
