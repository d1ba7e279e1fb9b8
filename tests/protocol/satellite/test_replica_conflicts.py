"""Copies of one chunk that come together on one satellite, when the box moves far at once: none is lost by it."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.protocol.conftest import World, key_of

from skymemory.constellation.torus import SatelliteId
from skymemory.placement.locate import Moves
from skymemory.protocol.client.transfer import Striping, ValueInfo
from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.protocol.satellite.handover import ChunkHandover
from skymemory.protocol.satellite.memory import as_copy
from skymemory.protocol.wire import REPLICA_OFFSET
from skymemory.transport.faults import FaultInjector

COPIES, SERVERS = 3, 10
"""In a box of 4 by 3: some copies are three planes from where others were, on the torus of five."""


def put(sky: World, value: bytes) -> ValueInfo:
    number, info = sky.host.machine.put(
        key_of("v"), value, Striping(50, STRATEGY_CODES["rotation_hop"], SERVERS, COPIES), sky.now_s
    )
    assert sky.host.run([number])[number].ok
    return info


def copies(sky: World, info: ValueInfo) -> dict[tuple[int, int], set[SatelliteId]]:
    """Of each chunk and copy who has it, as the references there say."""
    found: dict[tuple[int, int], set[SatelliteId]] = {}
    for here, machine in sky.sim.satellites.items():
        for index, (ref, _) in machine.store.shares.get(info.key, {}).items():
            found.setdefault((index, ref[REPLICA_OFFSET]), set()).add(here)
    return found


def homes(sky: World, info: ValueInfo, moves: Moves) -> dict[tuple[int, int], set[SatelliteId]]:
    places = [sky.sky.servers_at(info.strategy, SERVERS, info.set_moves, moves, replica) for replica in range(COPIES)]
    return {
        (index, replica): {places[replica][index % SERVERS]}
        for index in range(info.chunks)
        for replica in range(COPIES)
    }


@pytest.mark.brief("jumps3")
@pytest.mark.parametrize("jumps", [[(0, -3)], [(0, 3)], [(1, 3)], [(0, 3), (0, 6), (0, 3), (0, 0)], [(0, -3), (2, -6)]])
def test_no_copy_is_lost_where_two_meet(world, value_of, jumps):
    sky = world()
    info = put(sky, value_of(80_000))
    assert copies(sky, info) == homes(sky, info, (0, 0))
    for moves in jumps:
        sky.host.run(sky.begin_advance(*moves))
        sky.settle(0.02)
    sky.settle(60.0)
    assert copies(sky, info) == homes(sky, info, jumps[-1])
    assert all(machine.handover.at_rest for machine in sky.sim.satellites.values())


@pytest.mark.brief()
@given(
    st.lists(st.tuples(st.integers(-6, 6), st.integers(-6, 6)), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.05, 1.5]),
    st.integers(0, 9),
    st.sampled_from([0.0, 0.1]),
)
@example([(-2, 0), (0, 4), (0, 0)], 1.5, 0, 0.1)  # a copy is on its way for so long that the box is back before it
@settings(max_examples=12, deadline=None)
def test_copies_are_where_they_belong_after_any_jumps(jumps, pause_s, seed, loss):
    sky = World()
    info = put(sky, bytes(range(256)) * 24)
    sky.sim._faults = FaultInjector(loss=loss, seed=seed)
    for moves in jumps:
        sky.host.run(sky.begin_advance(*moves))
        sky.settle(pause_s)
    sky.sim._faults = None
    sky.host.run(sky.begin_advance(*jumps[-1]))
    sky.settle(400.0)
    assert copies(sky, info) == homes(sky, info, jumps[-1])


def test_what_leaves_as_another_copy_is_not_deleted_here():
    handover = ChunkHandover(window_bursts=1, timeout_s=0.1, grace_s=1.0)
    there, key = SatelliteId(1, 1), b"k" * 32
    handover.enqueue(there, [(key, 0), (key, 1)])
    handover.enqueue(there, [(b"l" * 32, 0)])
    (burst,) = handover.bursts_to_send(0.0)
    handover.leave_as((key, 1), 2)
    handover.leave_as((b"l" * 32, 0), 2)
    assert burst.names == [(key, 0), (key, 1, 2)]
    assert handover.acknowledged(burst.request_id, [(key, 0), (key, 1)], 0.5) == 2
    assert handover.bursts_to_send(0.5)[0].names == [(b"l" * 32, 0, 2)]
    handover.leave_as((key, 0), 1)  # it has arrived: nothing is left to send, and the new one is not to be deleted
    assert handover.to_delete(9.0) == [] and not handover.strays_due(9.0)


def test_what_is_still_to_leave_as_another_copy_is_kept_for_that():
    handover = ChunkHandover(window_bursts=4, timeout_s=0.1, grace_s=1.0)
    there, elsewhere, key = SatelliteId(1, 1), SatelliteId(2, 2), b"k" * 32
    handover.enqueue(there, [(key, 0)])
    handover.bursts_to_send(0.0)
    handover.leave_as((key, 0), 2)  # as copy 2 it is on its way; in its place is another copy, which leaves as well
    handover.enqueue(elsewhere, [(key, 0)])
    (burst,) = [burst for burst in handover.bursts_to_send(0.05) if burst.destination == elsewhere]
    assert handover.acknowledged(burst.request_id, [(key, 0)], 0.1) == 1
    assert handover.to_delete(1.2) == [] and handover.next_timer_s() is not None
    (late,) = handover.bursts_to_send(1.3)
    assert late.names == [(key, 0, 2)]
    assert handover.acknowledged(late.request_id, [(key, 0)], 1.4) == 1
    assert handover.to_delete(2.5) == [(key, 0)]


def test_what_is_on_its_way_as_another_copy_is_replanned_when_the_box_moves(world, value_of):
    handover = ChunkHandover(window_bursts=4, timeout_s=0.1, grace_s=1.0)
    there, key = SatelliteId(1, 1), b"k" * 32
    handover.enqueue(there, [(key, 0), (key, 1)])
    (burst,) = handover.bursts_to_send(0.0)
    handover.leave_as((key, 0), 2)
    store = next(iter(world().sim.satellites.values())).store
    assert handover.plan(store, lambda tag: there, there) == [(key, 0, 2)]
    assert burst.names == [(key, 1)], "its destination may no longer be a place of the box"


def test_as_copy_changes_the_number_of_the_copy_only():
    ref = bytes(range(72))
    other = as_copy(ref, 9)
    assert other[REPLICA_OFFSET] == 9 and as_copy(other, REPLICA_OFFSET) == ref
