"""What the reads of one geometry share is what each of them would work out by itself."""

from __future__ import annotations

import itertools
import random
from collections import deque
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput
from skymemory.placement.locate import Moves
from skymemory.protocol.client.liveness import Suspects
from skymemory.protocol.client.transfer import Absence, Burst, ReadTransfer, StandIns, ValueInfo
from skymemory.protocol.clock import PROOF_S
from skymemory.protocol.messages import MAX_SELECTION_BITS, Selection, pack_steps
from skymemory.reasons import Miss

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


def absence(slot: int, nearby: list[Moves], **but: Any) -> Absence:
    """``slot`` says at once, settled and by our count, that it has nothing."""
    lacking = Absence(SatelliteId(0, slot), nearby, lambda: nearby, True, nearby[0], asked_s=1.0, now_s=1.01)
    return lacking._replace(**but)


def test_a_chunk_that_moves_while_it_is_looked_for_is_looked_for_where_it_was_again() -> None:
    """It may be handed over to who was asked first while the second is asked."""
    read, nearby = moving_read(), [(5, 0), (4, 0), (6, 0)]
    assert asked(read) == [0]
    ways: list[int] = []
    while len(ways) < 3:
        assert read.absent([0], absence(ways[-1] if ways else 5, nearby)) is None
        ways += asked(read)
    assert ways == [4, 6, 5]


def test_when_the_box_moves_on_the_search_restarts_but_not_forever() -> None:
    """The box moves while all places are asked, again and again."""
    read, moves, found, why = moving_read(), 0, set[int](), None
    waiting = asked(read)
    for turn in range(100):
        slot = waiting.pop(0)
        found.add(slot)
        moves += 10 * (len(waiting) > 0)
        nearby = [(moves, 0), (moves + 1, 0)]
        if why := read.absent([0], absence(slot, nearby, asked_s=float(turn), now_s=turn + 0.5)):
            break
        waiting += asked(read)
    assert why == "under way" and {11, 21} <= found and moves <= 60


EVERYWHERE: list[Moves] = [(5, 0), (4, 0), (2, 0)]


def looking_everywhere() -> ReadTransfer:
    """All likely places have said no; now all are asked at once."""
    read = moving_read()
    asked(read)
    for slot in (5, 4, 5):
        assert read.absent([0], absence(slot, EVERYWHERE[:2], everywhere=lambda: EVERYWHERE)) is None
        slots = asked(read)
    assert sorted(slots) == [2, 4, 5]
    return read


def outcome(**second: Any) -> str:
    """Of a look everywhere in which all but the second satellite say at once that they have nothing."""
    read = looking_everywhere()
    assert read.absent([0], absence(5, EVERYWHERE, now_s=1.1, asked_s=1.02)) is None
    assert read.absent([0], absence(4, EVERYWHERE, **{"now_s": 1.1, "asked_s": 1.02} | second)) is None
    return read.absent([0], absence(2, EVERYWHERE, now_s=second.get("now_s", 1.1), asked_s=1.02))


def test_a_loss_is_proved_by_all_at_once_and_by_nothing_less() -> None:
    assert outcome() == "missing"
    assert outcome(settled=False) == "under way", "a handover of it is under way there"
    assert outcome(counted=(4, 0)) == "under way", "it counts other moves"
    assert outcome(now_s=1.01 + PROOF_S + 0.01) == "under way", "a chunk may have passed behind our back meanwhile"
    assert outcome(asked_s=0.5) is None, "that is the answer to an earlier question: we wait for the other"


def test_a_silent_satellite_leaves_a_loss_unproved() -> None:
    read = looking_everywhere()
    assert read.absent([0], absence(5, EVERYWHERE, now_s=1.1, asked_s=1.02)) is None
    assert read.redirect([0], SatelliteId(0, 4), Miss.TIMEOUT), "another may still have it"
    assert read.absent([0], absence(2, EVERYWHERE, now_s=1.1, asked_s=1.02)) == "under way"
    last = looking_everywhere()
    assert last.absent([0], absence(5, EVERYWHERE, now_s=1.1, asked_s=1.02)) is None
    assert last.absent([0], absence(4, EVERYWHERE, now_s=1.1, asked_s=1.02)) is None
    assert not last.redirect([0], SatelliteId(0, 2), Miss.TIMEOUT), "no satellite is left: it ends as silent"


def two_servers() -> tuple[ReadTransfer, StandIns]:
    """Chunks 0 and 2 on one satellite, 1 and 3 on another; each has one stand-in."""

    def where(moves: Moves) -> tuple[SatelliteId, ...]:
        return SatelliteId(0, moves[0]), SatelliteId(1, moves[0])

    info = ValueInfo(KEY, 4, 4, 16, 0, 1, 2, (0, 0))
    read = ReadTransfer(info, memoryview(bytearray(16)), where, (0, 0), burst_chunks=2)
    return read, StandIns(lambda: [(0, 0), (1, 0)], lambda _: False)


@pytest.mark.parametrize("first", [Miss.TIMEOUT, Miss.UNREACHABLE])
@pytest.mark.parametrize("last", [Miss.TIMEOUT, Miss.UNREACHABLE])
def test_stand_ins_that_fail_leave_the_reason_for_which_they_were_asked(first: Miss, last: Miss) -> None:
    read, others = two_servers()
    assert read.redirect([0, 2], SatelliteId(0, 0), first, others)
    assert not read.redirect([0, 2], SatelliteId(0, 1), last, others)
    assert read.why_ended([0, 2], last) == first


@pytest.mark.parametrize("reasons", itertools.permutations([Miss.TIMEOUT, Miss.UNREACHABLE]))
@pytest.mark.parametrize("arrived", ["", "the first", "the second"])
def test_the_most_certain_reason_among_the_missing_chunks_wins(reasons: tuple[Miss, Miss], arrived: str) -> None:
    """In whichever order the two satellites fail, and whichever of them ends the read."""
    read, others = two_servers()
    for server, reason in enumerate(reasons):
        assert read.redirect([server, server + 2], SatelliteId(server, 0), reason, others)
    if arrived:
        at = 0 if arrived == "the first" else 1
        read.arrived[at] = read.arrived[at + 2] = 1
    ends = 0 if arrived == "the second" else 1
    assert not read.redirect([ends, ends + 2], SatelliteId(ends, 1), Miss.TIMEOUT, others)
    assert read.why_ended([ends, ends + 2], Miss.TIMEOUT) == (reasons[ends] if arrived else Miss.UNREACHABLE)


def test_a_satellite_that_was_silent_in_time_is_not_unreachable_for_its_other_chunks() -> None:
    """It is a suspect from then on, but by this read's own wait."""
    read, others = two_servers()
    assert read.redirect([0], SatelliteId(0, 0), Miss.TIMEOUT, others)
    assert read.redirect([2], SatelliteId(0, 0), Miss.UNREACHABLE, others)
    assert not read.redirect([0], SatelliteId(0, 1), Miss.TIMEOUT, others)
    assert read.why_ended([0], Miss.TIMEOUT) == Miss.TIMEOUT


@pytest.mark.parametrize(("first", "second"), itertools.product([Miss.TIMEOUT, Miss.UNREACHABLE], repeat=2))
def test_a_satellite_without_stand_ins_counts_as_well(first: Miss, second: Miss) -> None:
    read, others = two_servers()
    assert read.redirect([0], SatelliteId(0, 0), first, others)
    assert not read.redirect([1], SatelliteId(1, 0), second)
    assert read.why_ended([1], second) == (Miss.UNREACHABLE if Miss.UNREACHABLE in (first, second) else Miss.TIMEOUT)


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


@settings(max_examples=300)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(1, 3), st.integers(1, 3), st.integers(0, 999))
@example([5, 2, 5, 5, 5], 3, 1, 860)
@example([1, 0, 4], 2, 1, 718)
@example([5, 2, 2, 1, 0, 0, 2, 4], 2, 2, 381)
def test_a_read_never_waits_for_what_was_not_requested(silent: list[int], servers: int, window: int, seed: int) -> None:
    """Satellites fall silent, have chunks or not, as it comes: with nothing under way it has ended, or all is here."""
    dice = random.Random(seed)

    def where(moves: Moves) -> tuple[SatelliteId, ...]:
        return tuple(SatelliteId(server, moves[0]) for server in range(servers))

    chunks = 2 * servers
    info = ValueInfo(KEY, chunks, 4, 4 * chunks, 0, 1, servers, (0, 0))
    read = ReadTransfer(info, memoryview(bytearray(4 * chunks)), where, (0, 0), burst_chunks=1)
    suspects, everywhere, under_way, now_s = Suspects(), [(0, 0), (1, 0), (2, 0)], deque[Burst](), 0.0
    others = StandIns(lambda: everywhere, suspects.__contains__)
    falls_silent = deque(SatelliteId(one % servers, one // servers % 3) for one in silent)
    while read.missing:
        now_s += 0.01
        if falls_silent and dice.random() < 0.4:
            suspects.add(falls_silent.popleft(), now_s)
        if read.checked_suspects != suspects.added:
            some = any(one.satellite in suspects and not read.is_one_of_many(one.indices) for one in read.pending)
            if some and not read.avoid(suspects, others):
                return
            read.checked_suspects = suspects.added
        while read.pending and len(under_way) < window:
            burst = read.pending.popleft()
            if burst.satellite not in suspects:
                under_way.append(burst)
            elif not read.redirect(burst.indices, burst.satellite, Miss.UNREACHABLE, others):
                return
        assert under_way, "no satellite is asked for what is missing"
        burst = under_way.popleft()
        wanted = [index for index in burst.indices if not read.arrived[index]]
        if burst.satellite in suspects:
            if not read.redirect(wanted, burst.satellite, Miss.TIMEOUT, others):
                return
        elif dice.random() < 0.5:
            for index in wanted:
                read.arrived[index] = 1
            read.on_chunks_placed(len(wanted), 0, 0)
        else:
            moves = dice.choice(everywhere)
            nearby = [moves, *(other for other in everywhere if other != moves)]
            answer = Absence(burst.satellite, nearby, lambda: everywhere, True, moves, now_s - 0.005, now_s)
            if read.absent(wanted, answer):
                return
