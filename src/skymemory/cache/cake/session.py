"""Threads of Cake's scheduler: the engine's thread takes steps, worker threads fetch and place chunks.

The scheduler is called under a lock. One side at a time writes a chunk's memory: its load waits for the end of its
step; a step waits while its chunk is placed, and is dropped if it then is. The chunk of a late fetch is computed.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from skymemory.cache.blocks import LoaderResult
from skymemory.cache.cake.scheduler import BidirectionalLoader, ComputeStep, PromptChunk
from skymemory.cache.tiers.workers import TierWorkers, WorkerCall


class FetchedChunk(Protocol):
    def place(self) -> bool:
        """Verify, decode and place the chunk. Must not call the tier: other threads wait."""

    def release(self) -> None: ...


class ChunkSource(Protocol):
    """Source of chunks; called from several threads."""

    def fetch(self, index: int) -> FetchedChunk | None:
        """Load a chunk; None if any of it fails."""

    def give_up(self, index: int) -> None:
        """Record a timeout, without calling the tier."""

    def close(self) -> None:
        """Place nothing from now on."""


_LEAD_PART = 0.1
_LEAD_S = 0.02


class TimedFetch:
    """Fetch of a chunk by a worker: begins at ``starts_s``, or when it is the oldest; given up at ``due_s``."""

    def __init__(self, index: int, starts_s: float, from_s: float, work: Callable[[TimedFetch], object]) -> None:
        """``from_s``: time of its beginning, at the latest."""
        self.index, self.starts_s, self.from_s = index, starts_s, from_s
        self.due_s = math.inf
        self.call: WorkerCall[object] = WorkerCall(lambda: work(self))

    def set_timeout(self, seconds: float) -> None:
        self.due_s = self.from_s + seconds


def starts_after(ahead: TimedFetch, takes_s: float | None, now_s: float) -> float:
    """Return the start time of the fetch after ``ahead``, which occupies the link for ``takes_s`` (None: unknown).

    Shortly before that fetch ends: earlier, each would get half of the link; later, the link would be idle.
    """
    if takes_s is None:
        return math.inf
    return min(ahead.starts_s, now_s) + takes_s - max(_LEAD_PART * takes_s, _LEAD_S)


class LoadingSession:
    """Session that drives ``loader``.

    ``on_settled`` gets index and origin of each chunk in place, in any thread; ``on_late`` bytes and seconds of a fetch
    that computing overtook.
    """

    def __init__(
        self,
        loader: BidirectionalLoader,
        chunks: Sequence[PromptChunk],
        source: ChunkSource,
        workers: TierWorkers,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_settled: Callable[[int, str], object] | None = None,
        on_late: Callable[[int, float], object] | None = None,
        patience_s: Callable[[int], float] = lambda size_bytes: math.inf,  # timeout of a fetch
    ) -> None:
        self._loader = loader
        self._source: ChunkSource | None = source
        self._workers = workers
        self._clock = clock
        self._on_settled = on_settled
        self._on_late = on_late
        self._patience_s = patience_s
        self._sizes = [chunk.size_bytes for chunk in chunks]
        self._changed = threading.Condition()
        self._ready: ComputeStep | None = None  # scheduled, not yet taken by the engine
        self._stepping = range(0)  # chunks that the engine is computing
        self._wanted: set[int] = set()  # chunks whose load the scheduler waits for
        self._asked: deque[int] = deque()  # chunks to fetch, in order
        self._fetches: list[TimedFetch] = []  # at most two
        self._abandoned = False  # a fetch timed out before a thread began it
        self._placing: set[int] = set()  # chunks being written into the engine's memory
        self._notifying = 0  # running callbacks of workers
        self._wake_s: float | None = None
        self._error: BaseException | None = None
        self.scheduling_s = 0.0
        self.turns = 0
        loader.push_seq(chunks, clock())
        with self._changed:
            self._turn()

    @property
    def done(self) -> bool:
        """True if all chunks are in place and reported."""
        with self._changed:
            return self._loader.done and not self._notifying and self._error is None

    def is_resident(self, index: int) -> bool:
        with self._changed:
            return self._loader.is_resident(index)

    def origin(self, index: int) -> str:
        with self._changed:
            return self._loader.origin(index)

    def result(self) -> LoaderResult:
        with self._changed:
            return self._loader.result()

    # --- engine thread ---

    def next_step(self, timeout_s: float | None = None) -> ComputeStep | None:
        """Return the next step; then call ``step_done``. None: all is in place, or timeout. Raises what a worker
        raised.
        """
        ends_s = None if timeout_s is None else self._clock() + timeout_s
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                self._turn()
                if (step := self._ready) is not None and self._placing.isdisjoint(step.indices):
                    self._ready = None
                    if not any(self._loader.is_resident(index) for index in step.indices):
                        self._stepping = step.indices
                        return step
                    self._loader.step_dropped()
                    continue
                if self._loader.done and not self._notifying:
                    return None
                due_s = min((fetch.due_s for fetch in self._fetches if fetch.due_s < math.inf), default=None)
                waits_s = [at_s - self._clock() for at_s in (self._wake_s, due_s, ends_s) if at_s is not None]
                if ends_s is not None and ends_s <= self._clock():
                    return None
                self._changed.wait(max(0.0, min(waits_s)) if waits_s else None)

    def step_done(self) -> None:
        with self._changed:
            indices, self._stepping = self._stepping, range(0)
            started_s = time.perf_counter()
            self._loader.chunk_computed(self._clock())
            self.scheduling_s += time.perf_counter() - started_s
            self._turn()
            self._changed.notify_all()
        for index in indices:
            self._notify(index, "computed")

    def set_budget(self, tokens: int) -> None:
        with self._changed:
            self._loader.budget_changed(tokens)
            self._turn()
            self._changed.notify_all()

    def close(self) -> None:
        """Abort the rest. On return no thread writes into the engine's memory."""
        with self._changed:
            if self._stepping or self._ready is not None:
                self._stepping, self._ready = range(0), None
                self._loader.step_dropped()
            self._loader.abort(self._clock())
            self._turn()
            self._wanted.clear()
            for fetch in self._fetches:
                fetch.call.give_up()
            self._fetches.clear()
            source, self._source = self._source, None
            self._changed.notify_all()
            while self._placing or self._notifying:
                self._changed.wait()
        if source is not None:
            source.close()

    # --- worker threads ---

    def _work(self, fetch: TimedFetch, source: ChunkSource) -> None:
        """Run a fetch: wait for its turn, load, start the next, claim the chunk's memory, place it, report, release."""
        index = fetch.index
        fetched: FetchedChunk | None = None
        self._await_turn(fetch)
        started_s = self._clock()
        with self._faults_kept():
            if index in self._wanted:
                fetched = source.fetch(index)
        took_s = self._clock() - started_s
        with self._changed:
            if fetch in self._fetches:
                self._fetches.remove(fetch)
                self._changed.notify_all()
                if not self._fetch_next():
                    self._turn()
        is_placed = False
        with self._faults_kept():
            if fetched is not None:
                is_claimed = self._claim(index)
                if not is_claimed and self._on_late is not None:
                    self._on_late(self._sizes[index], took_s)
                is_placed = is_claimed and fetched.place()
        with self._changed:
            self._placing.discard(index)
            is_placed = self._settle(index, is_placed)
            self._notifying += 1
            self._changed.notify_all()
        with self._faults_kept():
            if is_placed:
                self._notify(index, "loaded")
        with self._changed:
            self._notifying -= 1
            self._changed.notify_all()
        with self._faults_kept():
            if fetched is not None:
                fetched.release()

    def _await_turn(self, fetch: TimedFetch) -> None:
        with self._changed:
            while fetch in self._fetches and self._fetches[0] is not fetch and self._clock() < fetch.starts_s:
                left_s = fetch.starts_s - self._clock()
                self._changed.wait(left_s if left_s < math.inf else None)
            fetch.from_s = self._clock()
            fetch.set_timeout(self._patience_s(self._sizes[fetch.index]))

    @contextmanager
    def _faults_kept(self) -> Iterator[None]:
        """Keep an exception for the engine's thread to raise."""
        try:
            yield
        except BaseException as raised:
            with self._changed:
                self._error = self._error or raised
                self._changed.notify_all()

    def _settle(self, index: int, is_placed: bool) -> bool:
        """Notify the scheduler how a fetch ended; False if failed or no longer wanted."""
        if index not in self._wanted:
            return False
        self._wanted.discard(index)
        started_s = time.perf_counter()
        (self._loader.chunk_loaded if is_placed else self._loader.load_failed)(index, self._clock())
        self.scheduling_s += time.perf_counter() - started_s
        self._turn()
        return is_placed

    def _claim(self, index: int) -> bool:
        """Reserve a chunk's memory, after the step that computes it; False if no longer wanted."""
        with self._changed:
            while index in self._stepping and index in self._wanted:
                self._changed.wait()
            if index not in self._wanted:
                return False
            self._placing.add(index)
            return True

    # --- any thread, with the lock held ---

    def _turn(self) -> None:
        """Give up late fetches; do what the scheduler decides."""
        for fetch in self._fetches:
            fetch.set_timeout(self._patience_s(self._sizes[fetch.index]))  # the measured speeds may have changed
        while (late := next((fetch for fetch in self._fetches if self._clock() >= fetch.due_s), None)) is not None:
            self._give_up(late)  # may also drop the next fetch
        while True:
            started_s = time.perf_counter()
            actions = self._loader.poll(self._clock())
            self.scheduling_s += time.perf_counter() - started_s
            self.turns += 1
            if actions.compute is not None:
                self._ready = actions.compute
                self._changed.notify_all()
            self._wake_s = actions.wake_s
            self._wanted.difference_update(actions.cancel)
            if actions.cancel:
                self._changed.notify_all()
            self._wanted.update(actions.fetch)
            self._asked.extend(actions.fetch)
            if self._fetch_next():
                return

    def _give_up(self, fetch: TimedFetch) -> None:
        fetch.call.overdue = True
        fetch.call.give_up()
        self._fetches.remove(fetch)
        if self._fetches and not self._fetches[0].call.begun and self._workers.all_hung:
            next_fetch = self._fetches.pop()  # no thread will begin it: it fails with all requested fetches
            next_fetch.call.give_up()
            self._asked.appendleft(next_fetch.index)
        self._changed.notify_all()
        self._abandoned = self._abandoned or not fetch.call.begun
        if fetch.index in self._wanted:
            self._wanted.discard(fetch.index)
            self._loader.load_failed(fetch.index, self._clock())
            if self._source is not None:
                self._source.give_up(fetch.index)

    def _fetch_next(self) -> bool:
        """Start up to two fetches. False: without a thread, all requests failed."""
        while True:
            while self._asked and self._asked[0] not in self._wanted:
                self._asked.popleft()
            if len(self._fetches) > 1 or not self._asked or (source := self._source) is None:
                return True
            fetch = self._fetch_of(index := self._asked.popleft(), source)
            if self._abandoned or self._workers.all_hung or not self._workers.submit(fetch.call):
                break
            self._fetches.append(fetch)
        for failed in self._wanted.intersection((index, *self._asked)):
            self._wanted.discard(failed)
            self._loader.load_failed(failed, self._clock())
        self._asked.clear()
        return False

    def _fetch_of(self, index: int, source: ChunkSource) -> TimedFetch:
        """Create a fetch, to begin just before the fetch ahead ends."""
        starts_s = from_s = self._clock()
        for ahead in self._fetches:
            starts_s = starts_after(ahead, self._loader.link_takes_s(ahead.index), self._clock())
            from_s = max(from_s, ahead.due_s)
        fetch = TimedFetch(index, starts_s, from_s, lambda fetch: self._work(fetch, source))
        fetch.set_timeout(self._patience_s(self._sizes[index]))
        return fetch

    def _notify(self, index: int, origin: str) -> None:
        if self._on_settled is not None and self.origin(index) == origin:
            self._on_settled(index, origin)
