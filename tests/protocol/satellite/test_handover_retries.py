"""What a satellite cannot take is offered again ever more rarely, until the box moves on."""

from __future__ import annotations

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.satellite.handover import ChunkHandover
from skymemory.protocol.satellite.memory import ChunkStore
from skymemory.protocol.wire import ChunkRef, PlacementTag

HERE, THERE = SatelliteId(2, 9), SatelliteId(2, 12)
KEY, OTHER = bytes(32), bytes([1]) * 32


def refuse_all(handover: ChunkHandover, now_s: float) -> None:
    while bursts := handover.bursts_to_send(now_s):
        for burst in bursts:
            handover.refused(burst.request_id, now_s)


def test_the_wait_doubles_up_to_a_limit_for_all_chunks_of_a_key_alike():
    handover, now_s, waits = ChunkHandover(4, 0.1, 1.0), 0.0, []
    names = [(KEY, index) for index in range(25)]
    handover.enqueue(THERE, names)
    for _ in range(7):
        refuse_all(handover, now_s)
        due_s = handover.next_timer_s()
        assert due_s is not None
        waits.append(due_s - now_s)
        now_s = due_s
        assert sorted(handover.strays_due(now_s)) == names, "three bursts, one wait"
        handover.enqueue(THERE, names)
    assert waits == [10.0, 20.0, 40.0, 80.0, 160.0, 160.0, 160.0]


def test_another_key_and_another_move_start_afresh():
    handover = ChunkHandover(4, 0.1, 1.0)
    for _ in range(2):
        handover.enqueue(THERE, [(KEY, 0)])
        refuse_all(handover, 0.0)
        handover.strays_due(10.0)
        handover.enqueue(THERE, [(KEY, 0)])
        refuse_all(handover, 10.0)
        handover.enqueue(THERE, [(OTHER, 0)])
        refuse_all(handover, 10.0)
        assert handover.strays_due(20.0) == [(OTHER, 0)] and handover.strays_due(30.0) == [(KEY, 0)]
        handover.plan(ChunkStore(1000), lambda tag: HERE, HERE)


def test_what_is_overdue_when_the_box_has_moved_on_is_not_sent_where_it_was_to_go():
    handover = ChunkHandover(window_bursts=4, timeout_s=0.1, grace_s=1.0)
    handover.enqueue(SatelliteId(1, 1), [(KEY, 0), (KEY, 1)])
    (burst,) = handover.bursts_to_send(0.0)
    handover.plan(ChunkStore(1 << 20), lambda tag: SatelliteId(2, 2), SatelliteId(0, 0))
    assert handover.bursts_to_send(0.05) == [] and not handover.idle, "its answer may still come"
    assert handover.bursts_to_send(0.2) == [] and handover.retransmitted == 0
    assert handover.next_timer_s() <= 0.2 and sorted(handover.strays_due(0.2)) == [(KEY, 0), (KEY, 1)]
    assert handover.acknowledged(burst.request_id, [(KEY, 0)], 0.3) == 0, "the satellite that took it sends it on"


def test_the_next_to_be_evicted_leaves_first_and_so_is_the_first_again_where_it_arrives():
    store, handover = ChunkStore(1 << 20), ChunkHandover(window_bursts=9, timeout_s=0.1, grace_s=1.0)
    keys = [bytes([number]) * 32 for number in range(4)]
    for number, key in enumerate(keys):  # of different placements: each in a group of its own
        tag = PlacementTag(0, 1, 0, slot_moves=3 - number, plane_moves=0)
        for index in (0, 1):
            store.put((key, index), ChunkRef(key, index, 2, 9, 0, 18, 0, tag).pack(), b"x" * 9)
    store.get_run(keys[0], [0])
    store.pin(keys[1])
    handover.plan(store, lambda tag: THERE, HERE)
    assert [burst.names[0][0] for burst in handover.bursts_to_send(0.0)] == [keys[2], keys[3], keys[0], keys[1]]
