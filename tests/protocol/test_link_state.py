"""What satellites report to each other of dead links, and the ways round them: against a search of the whole torus."""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.protocol.satellite.routing import LIFETIME_S, MAX_DECLARATIONS, Declaration, LinksBody, LinkState, Router
from skymemory.protocol.wire import Address, Op, SkyHeader, Status, build_packet

SIZES = [(5, 19), (6, 6), (2, 7), (3, 3), (1, 9), (72, 22)]


def hops_around(torus: Torus, here: SatelliteId, there: SatelliteId, dead: set[SatelliteId]) -> int | None:
    """The naive judge: breadth-first over the living."""
    hops, queue = {here: 0}, deque([here])
    while queue:
        at = queue.popleft()
        if at == there:
            return hops[at]
        for neighbour in torus.neighbours(at):
            if neighbour not in hops and neighbour not in dead:
                hops[neighbour] = hops[at] + 1
                queue.append(neighbour)
    return None


def knowledge(torus: Torus, dead: set[SatelliteId]) -> LinkState:
    """What is known when all living neighbours of the dead have said so."""
    state = LinkState(torus)
    for here in torus.satellites():
        down = sum(1 << bit for bit, neighbour in enumerate(torus.neighbours(here)) if neighbour in dead)
        if here not in dead and down:
            assert state.learn(Declaration(here, down, 1), 0.0)
    return state


@st.composite
def broken(draw):
    torus = Torus(*draw(st.sampled_from(SIZES[:-1])))
    everyone = torus.satellites()
    here, there = draw(st.sampled_from(everyone)), draw(st.sampled_from(everyone))
    dead = draw(st.sets(st.sampled_from(everyone), max_size=len(everyone) * 2 // 3)) - {here, there}
    return torus, here, there, dead


@pytest.mark.brief()
@given(broken(), st.sampled_from(["greedy", "alternate"]))
@settings(max_examples=300, deadline=None)
def test_packets_arrive_by_a_shortest_way_whenever_there_is_one(case, mode):
    torus, here, there, dead = case
    state, expected = knowledge(torus, dead), hops_around(torus, here, there, dead)
    header = SkyHeader(Op.PING, Address(*there), Address(0, 0, 0xFF), 7, 1)
    packet, at, hops = build_packet(header, b"", 0, 0.0), here, 0
    source: object = ("ground", 7)
    while at != there:
        router = Router(at, torus, mode, state)
        forwarded = router.forward(memoryview(packet), len(packet), Address(*there), source)
        if isinstance(forwarded, Status):
            break
        packet, source, at = bytes(forwarded[0].headers), at, forwarded[1]
        hops += 1
        assert hops <= 64
        if at in dead:
            break
    if expected is not None and expected <= 64:
        assert at == there and hops == expected
    else:
        assert at != there


@given(broken())
@settings(max_examples=100, deadline=None)
def test_without_knowledge_nothing_changes(case):
    torus, here, there, _ = case
    router, judge = Router(here, torus, "greedy"), torus.next_hop(here, there)
    if here != there:
        assert router.exit_for(Address(*there), b"") == judge


def test_stale_knowledge_is_no_reason_to_drop():
    """As long as our own link is up, a nearer satellite may know better."""
    torus = Torus(5, 19)
    there = SatelliteId(2, 9)
    state = knowledge(torus, {there})
    assert state.onward(SatelliteId(2, 6), there, SatelliteId(2, 7)) == SatelliteId(2, 7)
    assert state.onward(SatelliteId(2, 8), there, there) is None


def test_declarations_grow_old_and_newer_ones_replace_older():
    torus, here = Torus(5, 19), SatelliteId(1, 1)
    state = LinkState(torus)
    assert state.learn(Declaration(here, 1, 5_000), 5.0) and not state.clear
    assert not state.learn(Declaration(here, 2, 5_000), 5.0) and not state.learn(Declaration(here, 2, 4_999), 5.0)
    assert not state.is_up(here, torus.north(here)) and not state.is_up(torus.north(here), here)
    assert state.learn(Declaration(here, 0, 6_000), 6.0) and state.clear and len(state.declared()) == 1
    assert not state.learn(Declaration(SatelliteId(5, 0), 1, 6_000), 6.0)
    assert not state.learn(Declaration(SatelliteId(0, 0), 1, 70_001), 10.0)
    assert not state.learn(Declaration(SatelliteId(0, 0), 1, 1), LIFETIME_S + 1)
    assert state.learn(Declaration(here, 4, 7_000), 7.0)
    assert state.next_expiry_s == 7.0 + LIFETIME_S
    state.expire(7.0 + LIFETIME_S)
    assert state.clear and not state.declared() and state.next_expiry_s == math.inf


def test_a_link_that_one_end_declares_down_is_down_both_ways():
    torus, here = Torus(5, 19), SatelliteId(2, 9)
    for bit, neighbour in enumerate(torus.neighbours(here)):
        links = LinkState(torus)
        assert links.learn(Declaration(here, 1 << bit, 1_000_000), 1000.0)
        assert not links.is_up(here, neighbour) and not links.is_up(neighbour, here)
        assert links.learn(Declaration(here, 0, 1_000_001), 1000.0)
        assert links.is_up(here, neighbour) and links.is_up(neighbour, here)


def test_a_repeated_declaration_leaves_known_ways_known():
    """All are repeated each minute: the ways are searched for again only where something has changed."""
    torus, here, there = Torus(5, 19), SatelliteId(1, 1), SatelliteId(3, 4)
    state = LinkState(torus)
    state.learn(Declaration(here, 1, 5_000), 5.0)
    state.onward(SatelliteId(2, 2), there, SatelliteId(3, 2))
    assert state.learn(Declaration(here, 1, 6_000), 6.0) and state.trees_grown == 1
    assert state.next_expiry_s == 6.0 + LIFETIME_S
    assert state.learn(Declaration(here, 2, 7_000), 7.0) and not state._trees


def test_whatever_is_declared_the_table_holds_one_entry_a_satellite():
    torus = Torus(3, 4)
    state = LinkState(torus)
    for made_ms in range(1, 500):
        state.learn(Declaration(SatelliteId(made_ms % 5, made_ms % 6), 0xF, made_ms), 0.0)
        state.onward(SatelliteId(0, 0), SatelliteId(1, 1), SatelliteId(1, 0))
    assert len(state.declared()) == 12 and len(state._trees) == 1


declarations = st.lists(
    st.builds(
        Declaration,
        st.builds(SatelliteId, st.integers(0, 4095), st.integers(0, 4095)),
        st.integers(0, 15),
        st.integers(0, 2**64 - 1),
    ),
    max_size=20,
)


@given(st.booleans(), st.tuples(st.integers(-9, 9), st.integers(-9, 9)), st.integers(0, 2**64 - 1), declarations)
def test_bodies_are_read_back(answer_me, pushed, pushed_at_ms, reported):
    body = LinksBody(answer_me, pushed, pushed_at_ms, reported)
    assert LinksBody.unpack(body.pack()) == body


@given(st.binary(max_size=200))
def test_garbage_is_malformed_or_a_body(data):
    with suppress(MalformedPacket):
        LinksBody.unpack(data)


def test_bodies_have_a_limit():
    too_many = [Declaration(SatelliteId(0, 0), 0, 0)] * (MAX_DECLARATIONS + 1)
    with pytest.raises(InvalidInput, match="361 declarations"):
        LinksBody(False, (0, 0), 0, too_many).pack()
    for data in (b"", bytes(19), bytes(21), bytes(2) + bytes(2) + b"\x7f" + bytes(15)):
        with pytest.raises(MalformedPacket):
            LinksBody.unpack(data)
