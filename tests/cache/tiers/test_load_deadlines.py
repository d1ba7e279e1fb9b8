"""Tiers that hang forever while a prompt is loaded: bounded, nothing written late or kept, and loading resumes."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.cache.cake.loading_room import Room, Source, chunks
from tests.cache.tiers.small_tiers import soon

from skymemory.cache.blocks import BlockCache, Part, Parts
from skymemory.cache.cake.cake import Cake, CakeLoad, CakeSettings
from skymemory.cache.cake.scheduler import BidirectionalLoader
from skymemory.cache.cake.session import LoadingSession
from skymemory.cache.tiers.workers import TierWorkers
from skymemory.errors import InvalidInput
from skymemory.kv.block import KVLayout
from skymemory.kv.context import CacheContext
from skymemory.store.base import LoadTicket, Presence, StoreTicket
from skymemory.store.memory import MemoryStore

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=2, block_tokens=4, dtype="float32")
CONTEXT = CacheContext("m", "w", "t", "float32", LAYOUT.describe(), True, 4)
TOKENS = np.arange(34)


def only_loading(source: Source, workers: TierWorkers, patience_s: float, count: int = 8) -> LoadingSession:
    loader = BidirectionalLoader(max_in_flight_bytes=3000, budget_tokens=10, computes=False)
    return LoadingSession(loader, chunks(count), source, workers, patience_s=lambda size_bytes: patience_s)


def drive(session: LoadingSession, room: Room) -> list[int]:
    """What was computed."""
    steps: list[int] = []
    while (step := session.next_step()) is not None:
        room.compute(step.indices, 0.0)
        steps += step.indices
        session.step_done()
    session.close()
    room.closed = True
    return steps


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_thread_waits_once_and_then_all_is_computed(threads: int) -> None:
    room = Room()
    source = Source(room, lambda: 0.0)
    source.gate.clear()
    workers = TierWorkers("test", threads, 1000)
    began_s = time.monotonic()
    session = only_loading(source, workers, 0.3)
    assert sorted(drive(session, room)) == list(range(8))
    assert 0.3 * threads <= time.monotonic() - began_s < 0.3 * threads + 10
    # Of two that are asked for at once, one may be given up before its thread, which started late, has begun it.
    assert source.given_up[0] == 7 and len(source.given_up) in (threads, threads + 1)
    assert session.result().failed_loads == 8
    # No tier is left to ask, so the next prompt does not wait at all.
    again = only_loading(source, workers, 100.0)
    assert sorted(drive(again, Room())) == list(range(8)) and source.fetched == []
    # What comes at last is given back and put nowhere; and then there is loading again.
    begun = source.at_once  # a thread that started late finds nothing to fetch any more
    source.gate.set()
    assert 1 <= begun <= threads and soon(lambda: source.released == begun and not workers.all_hung)
    assert room.late == 0 and room.clashes == 0
    third, fresh = Room(), Source(Room(), lambda: 0.0)
    assert drive(only_loading(fresh, workers, 1.0), third) == [] and len(fresh.fetched) == 8


def test_two_fetches_that_are_late_at_the_same_look_are_both_given_up() -> None:
    """As after a pause of the whole machine: the one behind, which no thread has taken up, goes with the first."""
    room, now_s = Room(), [0.0]
    source = Source(room, lambda: 0.0)
    source.gate.clear()
    workers = TierWorkers("test", 1, 1000)
    loader = BidirectionalLoader(max_in_flight_bytes=3000, budget_tokens=10, computes=False)
    session = LoadingSession(
        loader, chunks(8), source, workers, clock=lambda: now_s[0], patience_s=lambda size_bytes: 1.0
    )
    assert session.next_step(0.0) is None
    until_s = time.monotonic() + 30
    while not source.at_once and time.monotonic() < until_s:
        time.sleep(0.001)
    now_s[0] = 100.0
    assert sorted(drive(session, room)) == list(range(8)) and session.result().failed_loads == 8
    source.gate.set()


def test_one_chunk_that_never_comes_costs_one_thread_and_itself() -> None:
    room = Room()
    source = Source(room, lambda: 0.0)
    hangs = threading.Event()
    fetch = source.fetch

    def fetch_but_one(index: int) -> object:
        if index == 5:
            hangs.wait(20)
        return fetch(index)

    source.fetch = fetch_but_one  # type: ignore[method-assign, assignment]
    session = only_loading(source, TierWorkers("test", 2, 1000), 1.0)
    assert drive(session, room) == [5]
    assert source.given_up == [5] and [session.origin(at) for at in (4, 5, 6)] == ["loaded", "computed", "loaded"]
    hangs.set()


@pytest.mark.parametrize("seed", range(4))
def test_late_bytes_are_never_written_whenever_they_come(seed: int) -> None:
    """Fetches around the deadline: some are given up just before they end."""
    dice = random.Random(seed)
    workers = TierWorkers("test", 2, 1000)
    for _ in range(10):
        room = Room()
        source = Source(room, lambda: dice.choice((0.0, 0.004, 0.006)), 0.001)
        session = only_loading(source, workers, 0.005)
        steps = drive(session, room)
        assert all(session.is_resident(at) for at in range(8)) and room.clashes == 0
        assert {at for at in range(8) if session.origin(at) == "computed"} == set(steps)
        assert soon(lambda source=source: source.released == len(source.fetched))  # type: ignore[misc]
        assert room.late == 0


def test_the_last_chunk_is_reported_before_the_load_ends() -> None:
    room = Room()
    reported: list[int] = []

    def settled(index: int, origin: str) -> None:
        time.sleep(0.03)
        reported.append(index)

    loader = BidirectionalLoader(max_in_flight_bytes=3000, budget_tokens=10, computes=False)
    session = LoadingSession(loader, chunks(3), Source(room, lambda: 0.0), TierWorkers("test"), on_settled=settled)
    assert drive(session, room) == [] and sorted(reported) == [0, 1, 2]


def test_an_error_in_the_callback_is_raised_in_the_engines_thread() -> None:
    def settled(index: int, origin: str) -> None:
        raise TypeError("a programming error")

    loader = BidirectionalLoader(max_in_flight_bytes=3000, budget_tokens=10, computes=False)
    session = LoadingSession(loader, chunks(1), Source(Room(), lambda: 0.0), TierWorkers("t"), on_settled=settled)
    with pytest.raises(TypeError, match="a programming error"):
        session.next_step()
    assert not session.done
    session.close()


class Hanging(MemoryStore):
    """Calls of ``method`` do not come back until ``gate`` is set."""

    def __init__(self, name: str = "memory") -> None:
        super().__init__(1 << 20, name=name)
        self.method = ""
        self.gate = threading.Event()
        self.hung = 0

    def _hang(self, method: str) -> None:
        if self.method == method:
            self.hung += 1
            self.gate.wait(60)

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        self._hang("lookup")
        return super().lookup(keys)

    def prefix(self, keys: Sequence[bytes]) -> int:
        self._hang("prefix")
        return super().prefix(keys)

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        self._hang("complete_store")
        return super().complete_store(ticket)

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        self._hang("prepare_load")
        return super().prepare_load(keys)

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        self._hang("complete_load")
        return super().complete_load(ticket)

    def release(self, ticket: LoadTicket) -> None:
        self._hang("release")
        super().release(ticket)

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        self._hang("delete")
        return super().delete(keys)


class Sink:
    def __init__(self) -> None:
        self.placed: list[int] = []

    def place(self, index: int, block: memoryview) -> None:
        self.placed.append(index)

    def read(self, index: int, out: memoryview) -> None:
        out[:] = bytes([index % 256]) * len(out)


def stored() -> tuple[Hanging, Cake]:
    store = Hanging()
    blocks = BlockCache(CONTEXT, LAYOUT, store)
    blocks.save(blocks.hashes(TOKENS), range(8), Sink())
    return store, Cake(Parts([Part(blocks)]), CakeSettings(step_tokens=4, fetch_threads=2, deadline_s=0.1))


def loaded(cake: Cake, sink: Sink) -> tuple[CakeLoad, list[int]]:
    load = cake.open(TOKENS, [sink], limit_tokens=33, budget_tokens=4, sides="load")
    steps: list[int] = []
    while load.session is not None and (step := load.session.next_step()) is not None:
        steps += step.indices
        load.session.step_done()
    return load, steps


@pytest.mark.parametrize("method", ["prepare_load", "complete_load"])
def test_a_tier_that_hangs_is_a_deadline_missed_and_its_lease_is_given_back(method: str) -> None:
    store, cake = stored()
    store.method = method
    sink = Sink()
    began_s = time.monotonic()
    load, steps = loaded(cake, sink)
    result = load.finish()
    assert time.monotonic() - began_s < 15 and sorted(steps) == list(range(8)) and sink.placed == []
    assert result.failed_blocks == {"deadline": 2} and result.hit_tokens == {} and result.loaded_blocks == 0
    assert cake.blocks.counters.get("tier_failures_total", "memory") == 2
    # A thread that hangs keeps no memory of the engine's.
    watched = weakref.ref(sink)
    del sink
    gc.collect()
    assert watched() is None
    store.gate.set()
    until_s = time.monotonic() + 30
    while (store.stats()["open_leases"] or cake._workers.any_hung) and time.monotonic() < until_s:
        time.sleep(0.005)
    assert store.stats()["open_leases"] == 0 and not cake._workers.any_hung
    store.method = ""
    cake.settings = replace(cake.settings, deadline_s=20.0)
    after = Sink()
    assert loaded(cake, after)[0].finish().loaded_blocks == 8 and sorted(after.placed) == list(range(8))
    cake.close()


def test_a_look_up_that_hangs_is_nothing_found_and_is_not_waited_for_twice() -> None:
    store, cake = stored()
    store.method = "lookup"
    began_s = time.monotonic()
    for _ in range(5):
        assert loaded(cake, Sink())[0].finish().found_blocks == 0
    assert store.hung == 1 and 0.1 <= time.monotonic() - began_s < 15
    store.gate.set()
    until_s = time.monotonic() + 30
    while cake._lookups.all_hung and time.monotonic() < until_s:
        time.sleep(0.005)
    store.method = ""
    assert loaded(cake, Sink())[0].finish().loaded_blocks == 8
    cake.close()


@pytest.mark.parametrize("method", ["release", "delete"])
def test_release_and_remove_do_not_block(method: str) -> None:
    """The engine's memory is written by then; and a wrong block is removed from a tier that may hang just now."""
    store, cake = stored()
    first = cake.blocks.hashes(TOKENS)[0]
    (value,) = store.get_many([first])
    assert value is not None
    store.put_many([(first, bytes(value)[:-1] + b"?")])
    store.method = method
    began_s = time.monotonic()
    load, _ = loaded(cake, Sink())
    result = load.finish()
    assert time.monotonic() - began_s < 15 and result.found_blocks == 8
    store.gate.set()
    cake.close()


@pytest.mark.parametrize("wrong", [{"deadline_s": 0.0}, {"deadline_s": -1.0}, {"least_bytes_per_s": 0.0}])
def test_deadlines_that_are_none_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match="must be above 0"):
        CakeSettings(step_tokens=4, **wrong).check(4)  # type: ignore[arg-type]


def test_a_slow_link_has_the_time_its_bytes_take() -> None:
    settings = CakeSettings(deadline_s=5.0, least_bytes_per_s=2e6)
    assert settings.patience_s(0) == 5.0 and settings.patience_s(20_000_000) == 15.0


def test_a_tier_that_hangs_is_left_alone_by_the_prompts_that_follow_though_threads_are_left() -> None:
    store, cake = stored()
    cake = Cake(cake.parts, replace(cake.settings, deadline_s=20.0, fetch_threads=20))
    cake.blocks.compute.record(1000, 1.0)
    store.method = "complete_load"
    began_s = time.monotonic()
    first = loaded(cake, Sink())[0].finish()
    assert first.found_blocks == 8 and first.loaded_blocks == 0
    assert [loaded(cake, Sink())[0].finish().found_blocks for _ in range(3)] == [0, 0, 0]
    assert time.monotonic() - began_s < 15
    store.method = ""
    store.gate.set()
    until_s = time.monotonic() + 30
    while cake._workers.any_hung and time.monotonic() < until_s:
        time.sleep(0.005)
    assert loaded(cake, Sink())[0].finish().found_blocks == 8
    cake.close()
