"""The loader among threads: every chunk comes once, one side writes at a time, and no wait is unnecessary."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
from tests.cache.cake.loading_room import Chunk, Room, Source, chunks

from skymemory.cache.cake.pace import SpeedEstimate
from skymemory.cache.cake.scheduler import BidirectionalLoader
from skymemory.cache.cake.session import LoadingSession
from skymemory.cache.tiers.workers import TierWorkers, WorkerCall


def session_of(
    source: Source, count: int = 8, budget: int = 10, threads: int = 2, pace: SpeedEstimate | None = None, **sides: bool
) -> LoadingSession:
    loader = BidirectionalLoader(max_in_flight_bytes=3000, budget_tokens=budget, pace=pace, **sides)
    return LoadingSession(loader, chunks(count), source, TierWorkers("test", threads, 1000))


def run(session: LoadingSession, room: Room, step_s: Callable[[], float]) -> list[int]:
    steps = []
    try:
        while (step := session.next_step()) is not None:
            steps.append(step.index)
            room.compute(step.indices, step_s())
            session.step_done()
    finally:
        session.close()
        room.closed = True
    return steps


def test_front_and_back_meet_and_all_is_there() -> None:
    room = Room()
    source = Source(room, lambda: 0.004)
    log: list[tuple[int, str]] = []
    loader = BidirectionalLoader(max_in_flight_bytes=3000, budget_tokens=10)
    session = LoadingSession(
        loader,
        chunks(12),
        source,
        TierWorkers("test", 1),
        on_settled=lambda index, origin: log.append((index, origin)),
    )
    steps = run(session, room, lambda: 0.004)
    result = session.result()
    assert steps[0] == 0 and source.fetched[0] == 11
    assert result.computed_tokens + result.loaded_tokens == 120 and min(result.computed_tokens, result.loaded_tokens)
    assert result.met_at_token is not None and not result.aborted
    assert sorted(index for index, _ in log) == list(range(12))
    assert dict(log) == {index: session.origin(index) for index in range(12)}
    assert all(session.is_resident(index) for index in range(12)) and session.done


@pytest.mark.parametrize("seed", range(6))
def test_one_side_writes_at_a_time_whatever_comes_when(seed: int) -> None:
    dice = random.Random(seed)
    pace = SpeedEstimate()
    for _ in range(12):
        room = Room()
        source = Source(room, lambda: dice.choice((0.0, 0.001, 0.004)), dice.choice((0.0, 0.003)))
        source.failing = {index for index in range(8) if dice.random() < 0.15}
        source.wrong = {index for index in range(8) if dice.random() < 0.15}
        # With 3, a chunk takes four steps, and a load may come in their midst; with 25, a step goes over three chunks.
        budget = dice.choice((3, 10, 25))
        session = session_of(source, budget=budget, pace=pace)
        run(session, room, lambda: dice.choice((0.0, 0.001, 0.003)))
        result = session.result()
        assert result.computed_tokens + result.loaded_tokens == 80
        bad = source.failing | source.wrong
        assert all(session.origin(index) == "computed" for index in bad)
        assert room.clashes == 0
        time.sleep(0.02)
        until_s = time.monotonic() + 30
        while source.released < len(set(source.fetched) - source.failing) and time.monotonic() < until_s:
            time.sleep(0.001)  # for a thread that is on its way out
        assert room.late == 0 and source.released == len([i for i in source.fetched if i not in source.failing])


def test_only_one_side_when_only_one_is_wanted() -> None:
    room = Room()
    source = Source(room, lambda: 0.0)
    assert run(session_of(source, computes=False), room, lambda: 0.0) == []
    assert run(session_of(source, loads=False), Room(), lambda: 0.0) == list(range(8))
    assert len(source.fetched) == 8


def test_a_source_that_hangs_costs_no_more_than_computing() -> None:
    room = Room()
    source = Source(room, lambda: 0.0)
    source.gate.clear()
    session = session_of(source)
    assert run(session, room, lambda: 0.002) == list(range(8))
    source.gate.set()
    time.sleep(0.05)
    assert room.late == 0, "what came after the end was not put in place"
    assert session.result().computed_tokens == 80


def test_what_is_being_put_in_place_is_waited_for_and_not_computed() -> None:
    room = Room()
    source = Source(room, lambda: 0.0, place_s=0.2)
    session = session_of(source, count=1, threads=1)
    while not room.writer:
        time.sleep(0.001)
    assert session.next_step() is None
    session.close()
    result = session.result()
    assert (result.loaded_tokens, result.computed_tokens, result.wasted_tokens) == (10, 0, 0)


def test_with_no_budget_computing_waits_until_there_is_some() -> None:
    room = Room()
    source = Source(room, lambda: 0.0)
    source.failing = {0, 1}
    session = session_of(source, budget=0)
    until_s = time.monotonic() + 30
    while sum(session.is_resident(index) for index in range(8)) < 6 and time.monotonic() < until_s:
        assert session.next_step(timeout_s=0.01) is None and not session.done
    assert not session.is_resident(0) and session.is_resident(2)
    threading.Timer(0.02, lambda: session.set_budget(10)).start()
    assert run(session, room, lambda: 0.0) == [0, 1]


def test_a_fault_of_a_source_is_raised_where_the_engine_is() -> None:
    source = Source(Room(), lambda: 0.0)
    source.error = TypeError("a programming error")
    session = session_of(source, computes=False)
    with pytest.raises(TypeError, match="a programming error"):
        session.next_step()
    session.close()
    assert session.result().aborted


def test_closed_in_the_midst_it_waits_for_writers_and_asks_for_nothing_more() -> None:
    room = Room()
    source = Source(room, lambda: 0.0, place_s=0.03)
    session = session_of(source, count=100, threads=1)
    assert session.next_step() is not None
    time.sleep(0.01)
    session.close()
    room.closed = True
    fetched = len(source.fetched)
    time.sleep(0.1)
    assert room.late == 0 and len(source.fetched) <= fetched + 1
    assert session.done and session.result().aborted


def test_who_closes_waits_for_a_chunk_that_is_being_put_in_its_place() -> None:
    """Afterwards the memory is another's."""
    placing, go_on = threading.Event(), threading.Event()

    class Held(Room):
        def write_all(self, indices: list[int], who: str, seconds: float) -> None:
            placing.set()
            go_on.wait(20.0)
            super().write_all(indices, who, seconds)

    room = Held()
    session = session_of(Source(room, lambda: 0.0), computes=False)
    assert placing.wait(20.0)
    closing = threading.Thread(target=session.close, daemon=True)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    go_on.set()
    closing.join(20.0)
    room.closed = True
    assert not closing.is_alive() and not room.late


def test_at_most_two_chunks_come_at_a_time_and_all_of_them() -> None:
    room = Room()
    source = Source(room, lambda: random.choice((0.0, 0.003)), place_s=0.002)
    session = session_of(source, count=20, threads=4, computes=False)
    assert run(session, room, lambda: 0.0) == []
    assert sorted(source.fetched) == list(range(20)) and source.most_at_once <= 2


def test_a_fetch_overtaken_by_computing_still_reports_its_time() -> None:
    room, late, began_s = Room(), [], time.monotonic()
    source = Source(room, lambda: 0.05)
    loader = BidirectionalLoader(max_in_flight_bytes=9000, budget_tokens=10)
    session = LoadingSession(
        loader, chunks(2), source, TierWorkers("test"), on_late=lambda size, seconds: late.append((size, seconds))
    )
    until_s = time.monotonic() + 30
    while not source.at_once and time.monotonic() < until_s:
        time.sleep(0.001)  # one that no thread has taken up when all is computed is never made
    assert run(session, room, lambda: 0.0) == [0, 1]
    while not late and time.monotonic() < until_s:
        time.sleep(0.005)
    ((size_bytes, seconds),) = late
    assert size_bytes == 1000 and 0.05 <= seconds <= time.monotonic() - began_s


def test_workers_that_take_no_more_leave_it_to_compute() -> None:
    room = Room()
    source = Source(room, lambda: 0.0)
    workers = TierWorkers("test", 1, 1)
    gate, begun = threading.Event(), threading.Event()
    assert workers.submit(WorkerCall(lambda: (begun.set(), gate.wait(60)))) and begun.wait(60)
    assert workers.submit(WorkerCall(lambda: None))
    loader = BidirectionalLoader(max_in_flight_bytes=8000, budget_tokens=10, computes=False)
    session = LoadingSession(loader, chunks(8), source, workers)
    assert run(session, room, lambda: 0.0) == list(range(8))
    assert session.result().failed_loads == 8 and source.fetched == []
    gate.set()


def known(seconds_per_chunk: float) -> SpeedEstimate:
    """A link whose rate is known: 1,000 bytes in this many seconds."""
    pace = SpeedEstimate()
    for _ in range(8):
        pace.load_took(1000, seconds_per_chunk)
    return pace


class Link(Source):
    """A link whose loads end when the next one has been requested: requested later, it would be idle in between."""

    def __init__(self, room: Room, count: int) -> None:
        super().__init__(room, lambda: 0.0)
        self.requested = [threading.Event() for _ in range(count)]
        self.idle = 0

    def fetch(self, index: int) -> Chunk | None:
        self.requested[index].set()
        if index and not self.requested[index - 1].wait(20.0):
            self.idle += 1
        self.fetched.append(index)
        return Chunk(self, index)


def test_the_link_is_not_idle_between_two_fetches() -> None:
    room = Room()
    source = Link(room, count=24)
    session = session_of(source, count=24, threads=3, pace=known(0.015), computes=False)
    run(session, room, lambda: 0.0)
    assert source.idle == 0 and sorted(source.fetched) == list(range(24))


@pytest.mark.parametrize("pace", [None, known(0.5)], ids=["unknown", "slow"])
def test_a_fetch_that_takes_long_has_the_link_for_itself(pace: SpeedEstimate | None) -> None:
    room = Room()
    source = Source(room, lambda: 0.05)
    session = session_of(source, count=2 if pace is None else 6, threads=3, pace=pace, computes=False)
    run(session, room, lambda: 0.0)
    assert source.fetched[:2] in ([5, 4], [1, 0]) and source.most_at_once == 1


def test_a_load_that_came_while_its_chunk_was_computed_reports_its_time() -> None:
    room, now_s, gate = Room(), [0.0], threading.Event()
    late: list[tuple[int, float]] = []

    class Timed(Source):
        def fetch(self, index: int) -> Chunk | None:
            gate.wait(30)
            now_s[0] += 0.05
            return super().fetch(index)

    loader = BidirectionalLoader(max_in_flight_bytes=3000, budget_tokens=10)
    session = LoadingSession(
        loader,
        chunks(1),
        Timed(room, lambda: 0.0),
        TierWorkers("test", 3),
        clock=lambda: now_s[0],
        on_late=lambda *report: late.append(report),
    )
    # It is under way when the step begins, comes in its midst, and waits for its end: then it is not wanted any more.
    assert session.next_step() is not None
    gate.set()
    until_s = time.monotonic() + 30
    while session._fetches and time.monotonic() < until_s:
        time.sleep(0.005)
    now_s[0] += 0.6
    session.step_done()
    assert session.next_step() is None
    session.close()
    while not late and time.monotonic() < until_s:
        time.sleep(0.005)
    assert late == [(1000, pytest.approx(0.05))], "its own time, without the wait for the step"
