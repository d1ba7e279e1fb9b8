"""What the reads of one geometry share is what each of them would work out by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput
from skymemory.protocol.selection import MAX_SELECTION_BITS, Selection, pack_steps
from skymemory.protocol.transfer import ReadTransfer, ValueInfo

KEY = bytes(range(32))


def read_of(chunks: int, servers: int, burst_chunks: int) -> ReadTransfer:
    satellites = tuple(SatelliteId(3, slot) for slot in range(servers))
    info = ValueInfo(KEY, chunks, 4, 4 * chunks, 0, 1, servers, (0, 0))
    return ReadTransfer(info, memoryview(bytearray(4 * chunks)), lambda moves: satellites, (0, 0), burst_chunks)


@given(st.integers(0, 1 << 20), st.integers(1, 300), st.integers(1, 70))
def test_packed_steps_are_the_end_of_the_packed_selection(first: int, stride: int, count: int) -> None:
    indices = range(first, first + stride * count, stride)
    assert KEY + pack_steps(indices) == Selection.of(KEY, list(indices), stride).pack()


@pytest.mark.parametrize("count", [0, MAX_SELECTION_BITS + 1])
def test_steps_that_no_selection_holds_are_refused(count: int) -> None:
    with pytest.raises(InvalidInput, match="steps"):
        pack_steps(range(0, 3 * count, 3))


@given(st.integers(1, 500), st.integers(1, 12), st.integers(1, 64))
def test_the_bursts_of_a_read_are_its_chunks_each_once(chunks: int, servers: int, burst_chunks: int) -> None:
    read = read_of(chunks, servers, burst_chunks)
    assert sorted(index for burst in read.pending for index in burst.indices) == list(range(chunks))
    assert read.report.satellites == min(servers, chunks)
    for burst in read.pending:
        assert len(burst.indices) <= burst_chunks
        assert {index % servers for index in burst.indices} == {burst.satellite.slot}
        assert Selection.unpack(KEY + burst.steps).indices() == list(burst.indices)


def moving_read() -> ReadTransfer:
    """One chunk, on the satellite whose slot is the count of moves."""
    info = ValueInfo(KEY, 1, 4, 4, 0, 1, 1, (0, 0))
    return ReadTransfer(
        info, memoryview(bytearray(4)), lambda moves: (SatelliteId(0, moves[0]),), (0, 0), burst_chunks=1
    )


def asked(read: ReadTransfer) -> list[int]:
    """The slots of those to be asked now; they have been asked then."""
    slots = [burst.satellite.slot for burst in read.pending]
    read.pending.clear()
    return slots


def test_a_chunk_that_moves_while_it_is_looked_for_is_looked_for_where_it_was_again() -> None:
    """It may be handed over to who was asked first while the second is asked."""
    read, nearby = moving_read(), [(5, 0), (4, 0), (6, 0)]
    assert asked(read) == [0]
    ways = []
    while read.absent([0], SatelliteId(0, ways[-1] if ways else 5), nearby):
        ways += asked(read)
    assert ways == [4, 6, 5]


def test_when_the_box_moves_on_the_search_begins_anew_but_not_for_ever() -> None:
    read, moves, found = moving_read(), 0, []
    while read.absent([0], SatelliteId(0, moves), [(moves, 0), (moves + 1, 0)]):
        found += asked(read)
        if found[-1] == moves:  # all places of this count of moves have been asked
            moves += 10
    assert 11 in found and 21 in found and moves == 40


def test_a_read_that_takes_its_bursts_leaves_those_of_the_next_alone() -> None:
    one = read_of(40, 3, 8)
    wanted = list(one.pending)
    one.pending.clear()
    assert list(read_of(40, 3, 8).pending) == wanted


@given(st.integers(1, 60), st.integers(1, 7), st.data())
def test_has_says_the_same_of_a_range_and_of_a_list(chunks: int, servers: int, data: st.DataObject) -> None:
    read = read_of(chunks, servers, 64)
    read.arrived[:] = bytes(data.draw(st.lists(st.sampled_from([0, 1, 1, 1]), min_size=chunks, max_size=chunks)))
    for burst in read.pending:
        assert isinstance(burst.indices, range)
        here = all(read.arrived[index] for index in burst.indices)
        assert read.has(burst.indices) == read.has(list(burst.indices)) == here
