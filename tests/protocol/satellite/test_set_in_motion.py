"""A key is set again or deleted while an earlier value of it is being handed over: the later word counts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.conftest import World, key_of
from tests.protocol.satellite import ledgers

from skymemory.protocol import messages
from skymemory.protocol.wire import Op
from skymemory.transport.faults import FaultInjector

steps = st.one_of(
    st.tuples(st.just("put"), st.sampled_from("ab"), st.sampled_from([1, 900, 1600, 6000])),
    st.tuples(st.just("delete"), st.sampled_from("ab")),
    st.tuples(st.just("move"), st.integers(0, 1), st.integers(0, 1)),
    st.tuples(st.just("wait"), st.sampled_from([0.001, 0.02, 0.2, 1.1])),
)


def only_holder(sky, info):
    (holder,) = sky.holders(info)[0]
    return holder


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("chunks", [1, 7])
@pytest.mark.parametrize("move", [(1, 0), (0, 1), (-1, 0), (0, -1)])
def test_a_late_handover_does_not_replace_what_was_set_since(world, value_of, move, chunks):
    sky = world()
    _, old = sky.put("v", value_of(chunks * 900), 900, servers=1)
    here, there = only_holder(sky, old), sky.homes(old, move)[0][0]
    sky.sim.cut(here, there)
    sky.advance(*move)
    sky.settle(0.05)
    value = value_of(chunks * 900, 1)
    stored, new = sky.put("v", value, 900, servers=1)
    assert stored.ok
    sky.sim.mend(here, there)
    sky.settle()
    read, out = sky.get(new)
    assert read.ok and out == value
    assert only_holder(sky, new) == there
    assert ledgers.open_books({at: machine.housekeeping() for at, machine in sky.sim.satellites.items()}) == {}


def test_a_late_handover_does_not_replace_what_was_set_since_and_handed_over(world, value_of):
    """Neither of the two was set by the count of moves of now: the one of more moves is the later."""
    sky = world()
    _, old = sky.put("v", value_of(900), 900, servers=1)
    here = only_holder(sky, old)
    for neighbour in sky.torus.neighbours(here):
        sky.sim.cut(here, neighbour)
    sky.advance(1)
    sky.settle(0.05)
    value = value_of(900, 1)
    stored, new = sky.put("v", value, 900, servers=1)
    sky.advance(2)
    sky.settle(0.5)
    there = sky.homes(new, (2, 0))[0][0]
    assert stored.ok and sky.sim.satellites[there].store.peek((new.key, 0)).payload == value
    for neighbour in sky.torus.neighbours(here):
        sky.sim.mend(here, neighbour)
    sky.settle(60.0)
    read, out = sky.get(new)
    assert read.ok and out == value and only_holder(sky, new) == there
    assert ledgers.open_books({at: machine.housekeeping() for at, machine in sky.sim.satellites.items()}) == {}


def test_a_copy_that_comes_back_does_not_replace_what_was_set_since(world, value_of):
    """There and back within the time that a satellite keeps what it believes to be sent too early."""
    sky = world()
    _, old = sky.put("v", value_of(900), 900, servers=1)
    here = only_holder(sky, old)
    sky.advance(1)
    sky.settle(0.1)
    sky.sim.cut(here, sky.homes(old, (1, 0))[0][0])
    sky.advance(0)
    sky.settle(0.05)
    value = value_of(900, 1)
    stored, new = sky.put("v", value, 900, servers=1)
    assert stored.ok
    sky.sim.mend(here, sky.homes(old, (1, 0))[0][0])
    sky.settle(10)
    read, out = sky.get(new)
    assert read.ok and out == value and only_holder(sky, new) == here


def test_what_replaces_at_the_old_place_follows_what_was_handed_over(world, value_of):
    """The first value is at the new place already when a writer who has not heard of the move brings the second."""
    sky = world()
    late = sky.connect(8)
    late.machine.moves(0.0)
    _, old = sky.put("v", value_of(900), 900, servers=1)
    here, there = only_holder(sky, old), sky.homes(old, (1, 0))[0][0]
    sky.advance(1)
    sky.settle(0.1)
    assert there in sky.holders(old)[0]
    value = value_of(900, 1)
    number, new = sky.begin_put("v", value, 900, servers=1, host=late)
    assert new.set_moves == (0, 0) and late.run([number])[number].ok
    sky.settle(10)
    assert sky.holders(new)[0] == [there] != [here]
    read, out = sky.get(new)
    assert read.ok and out == value


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("at_s", [0.0, 0.002, 0.004, 0.006, 0.05])
def test_what_is_deleted_while_it_is_handed_over_stays_deleted(world, value_of, at_s):
    sky = world()
    _, info = sky.put("v", value_of(900), 900, servers=1)
    both = only_holder(sky, info), sky.homes(info, (1, 0))[0][0]
    begun = sky.begin_advance(1)
    sky.settle(at_s)
    body = messages.pack_keys([info.key])
    deleted = [sky.host.machine.ask(Op.EVICT, body, satellite, sky.now_s) for satellite in both]
    assert all(done.ok for done in sky.host.run([*begun, *deleted]).values())
    sky.settle(30)
    assert sky.holders(info) == {0: []}


def test_what_is_set_again_after_a_deletion_is_handed_over(world, value_of):
    """The next satellite knows of the deletion, and not of the new value before it comes."""
    sky = world()
    _, info = sky.put("v", value_of(900), 900, servers=1)
    here, there = only_holder(sky, info), sky.homes(info, (1, 0))[0][0]
    assert all(sky.ask(Op.EVICT, messages.pack_keys([info.key]), satellite).ok for satellite in (here, there))
    value = value_of(900, 1)
    _, new = sky.put("v", value, 900, servers=1)
    sky.advance(1)
    sky.settle(0.1)
    read, out = sky.get(new)
    assert read.ok and out == value
    sky.settle(4)
    assert only_holder(sky, new) == there


@pytest.mark.brief()
@settings(max_examples=60, deadline=None)
@given(
    st.lists(steps, min_size=4, max_size=30),
    st.sampled_from([1, 2, 4, 10]),
    st.sampled_from(["rotation", "rotation_hop", "cost"]),
    st.integers(0, 999),
)
def test_the_last_word_counts_whatever_links_between_satellites_do(script, servers, strategy, seed):
    """Handovers are lost, doubled, late and damaged; the box moves on, as it does under a host that stands still."""
    sky = World()
    torus = sky.torus
    links = [(here, there) for here in torus.satellites() for there in (torus.east(here), torus.south(here))]
    for number, link in enumerate(links):
        sky.sim.spoil(*link, FaultInjector(0.15, 0.1, 0.2, 0.02, seed * 1000 + number, reorder_delay_s=0.05))
    moves, last = (0, 0), {}
    for number, (verb, *rest) in enumerate(script):
        if verb == "put":
            name, size = rest
            value = bytes([number]) * size
            stored, info = sky.put(name, value, 400, strategy, servers)
            assert stored.ok
            last[name] = info, value
        elif verb == "delete":
            body = messages.pack_keys([key_of(rest[0])])
            begun = [sky.host.machine.ask(Op.EVICT, body, here, sky.now_s) for here in torus.satellites()]
            assert all(done.ok for done in sky.host.run(begun).values())
            last.pop(rest[0], None)
        elif verb == "move":
            moves = moves[0] + rest[0], moves[1] + rest[1]
            sky.advance(*moves)
        else:
            sky.settle(rest[0])
    for link in links:
        sky.sim.spoil(*link, None)
    sky.advance(*moves)
    sky.settle(40.0)
    for name in "ab":
        if name in last:
            info, value = last[name]
            read, out = sky.get(info)
            assert read.ok and out == value
        else:
            assert not any(machine.store.shares.get(key_of(name)) for machine in sky.sim.satellites.values())
    assert ledgers.open_books({at: machine.housekeeping() for at, machine in sky.sim.satellites.items()}) == {}
