"""One prompt's loader among threads: the engine's thread asks for steps, the workers' threads bring chunks.

The scheduler (``cache.cake.scheduler``) knows no threads; here every word to it is said under one lock. A chunk's place
in the
engine's memory is written by one side at a time: while a chunk is computed its load waits for the end of the step, and
while it is put in place the step waits, and is dropped where the chunk is there then. A fetch that does not end in time
is given up: its chunk is computed, its thread counts as held up until it comes back, and what it brings is dropped.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from skymemory.cache.cake.scheduler import BidirectionalLoader, PromptChunk
from skymemory.cache.results import ComputeStep, LoaderResult
from skymemory.cache.tiers.workers import Call, TierWorkers


class LoadingSession:
    """Drives ``loader`` over ``chunks``. Times are those of ``clock``, in seconds.

    ``on_settled`` is called with index and origin of each chunk that is there, in whichever thread it came; ``on_late``
    with bytes and seconds of a fetch that nobody wanted any more; ``patience_s`` says how long one of so many may take.
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
        patience_s: Callable[[int], float] = lambda size_bytes: math.inf,
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
        self._ready: ComputeStep | None = None  # asked for by the loader, not yet taken by the engine
        self._stepping = range(0)  # chunks that the engine computes
        self._wanted: set[int] = set()
        self._asked: deque[int] = deque()
        self._fetches: list[Fetch] = []
        self._abandoned = False  # no thread has taken up a fetch for as long as one may take
        self._placing: set[int] = set()
        self._telling = 0
        self._wake_s: float | None = None
        self._error: BaseException | None = None
        self.scheduling_s = 0.0
        """What the scheduler itself has taken, over all threads."""
        self.turns = 0
        loader.push_seq(chunks, clock())
        with self._changed:
            self._turn()

    @property
    def done(self) -> bool:
        """All is there and told of; False after a fault, which ``next_step`` raises."""
        with self._changed:
            return self._loader.done and not self._telling and self._error is None

    def is_resident(self, index: int) -> bool:
        """Whether a chunk is in its place, wherever it came from."""
        with self._changed:
            return self._loader.is_resident(index)

    def origin(self, index: int) -> str:
        """Where a chunk came from, or ""."""
        with self._changed:
            return self._loader.origin(index)

    def result(self) -> LoaderResult:
        with self._changed:
            return self._loader.result()

    # The engine's side

    def next_step(self, timeout_s: float | None = None) -> ComputeStep | None:
        """What to compute now; answer with ``step_done``. None: all is there, or nothing came up within ``timeout_s``.

        Raises what a source or a worker raised by a fault of its own.
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
                if self._loader.done and not self._telling:
                    return None
                due_s = min((fetch.due_s for fetch in self._fetches if fetch.due_s < math.inf), default=None)
                waits_s = [at_s - self._clock() for at_s in (self._wake_s, due_s, ends_s) if at_s is not None]
                if ends_s is not None and ends_s <= self._clock():
                    return None
                self._changed.wait(max(0.0, min(waits_s)) if waits_s else None)

    def step_done(self) -> None:
        """The step has been computed, and its tokens are in their place."""
        with self._changed:
            indices, self._stepping = self._stepping, range(0)
            began_s = time.perf_counter()
            self._loader.chunk_computed(self._clock())
            self.scheduling_s += time.perf_counter() - began_s
            self._turn()
            self._changed.notify_all()
        for index in indices:
            self._tell(index, "computed")

    def set_budget(self, tokens: int) -> None:
        """Tokens of each step from now on that are ours; with 0 computing pauses and loading goes on."""
        with self._changed:
            self._loader.budget_changed(tokens)
            self._turn()
            self._changed.notify_all()

    def close(self) -> None:
        """Give up what is not done. When this returns, nobody writes into the engine's memory any more."""
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
            while self._placing or self._telling:
                self._changed.wait()
        if source is not None:
            source.close()

    # The workers' side

    def _work(self, fetch: Fetch, source: ChunkSource) -> None:
        """Bring the chunk of ``fetch``; then the next one may be fetched while this one is put in its place."""
        index = fetch.index
        fetched: FetchedChunk | None = None
        self._await_turn(fetch)
        began_s = self._clock()
        with self._faults_kept():
            if index in self._wanted:
                fetched = source.fetch(index)
        took_s = self._clock() - began_s
        with self._changed:
            if fetch in self._fetches:
                self._fetches.remove(fetch)
                self._changed.notify_all()
                if not self._fetch_next():
                    self._turn()
        placed = False
        with self._faults_kept():
            if fetched is not None:
                is_claimed = self._claim(index)
                if not is_claimed and self._on_late is not None:
                    self._on_late(self._sizes[index], took_s)
                placed = is_claimed and fetched.place()
        with self._changed:
            self._placing.discard(index)
            placed = self._settle(index, placed)
            self._telling += 1
            self._changed.notify_all()
        with self._faults_kept():
            if placed:
                self._tell(index, "loaded")
        with self._changed:
            self._telling -= 1
            self._changed.notify_all()
        with self._faults_kept():
            if fetched is not None:
                fetched.release()

    def _await_turn(self, fetch: Fetch) -> None:
        """Wait until the fetch before this one has ended, or nearly."""
        with self._changed:
            while fetch in self._fetches and self._fetches[0] is not fetch and self._clock() < fetch.starts_s:
                left_s = fetch.starts_s - self._clock()
                self._changed.wait(left_s if left_s < math.inf else None)
            fetch.from_s = self._clock()
            fetch.has(self._patience_s(self._sizes[fetch.index]))

    @contextmanager
    def _faults_kept(self) -> Iterator[None]:
        """A programming error is raised in the engine's thread, not in a worker's, where nobody would hear of it."""
        try:
            yield
        except BaseException as raised:
            with self._changed:
                self._error = self._error or raised
                self._changed.notify_all()

    def _settle(self, index: int, placed: bool) -> bool:
        """Tell the scheduler, if it still waits for the chunk; whether it is there by this."""
        if index not in self._wanted:
            return False
        self._wanted.discard(index)
        began_s = time.perf_counter()
        (self._loader.chunk_loaded if placed else self._loader.load_failed)(index, self._clock())
        self.scheduling_s += time.perf_counter() - began_s
        self._turn()
        return placed

    def _claim(self, index: int) -> bool:
        """Whether the chunk may be put in its place now; waits for a step that computes it."""
        with self._changed:
            while index in self._stepping and index in self._wanted:
                self._changed.wait()
            if index not in self._wanted:
                return False
            self._placing.add(index)
            return True

    def _turn(self) -> None:
        """Ask the loader what to do, and see to it. With the lock held."""
        for fetch in self._fetches:
            fetch.has(self._patience_s(self._sizes[fetch.index]))  # of which more may be known by now
        while (late := next((one for one in self._fetches if self._clock() >= one.due_s), None)) is not None:
            self._give_up(late)  # with which the one behind it may go
        while True:
            began_s = time.perf_counter()
            actions = self._loader.poll(self._clock())
            self.scheduling_s += time.perf_counter() - began_s
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

    def _give_up(self, fetch: Fetch) -> None:
        """It is late beyond patience. Its chunk is computed, and others may be fetched, if by another thread."""
        fetch.call.overdue = True
        fetch.call.give_up()
        self._fetches.remove(fetch)
        if self._fetches and not self._fetches[0].call.begun and self._workers.held_up:
            behind = self._fetches.pop()  # nobody will take it up: it fails with all that was asked for
            behind.call.give_up()
            self._asked.appendleft(behind.index)
        self._changed.notify_all()
        self._abandoned = self._abandoned or not fetch.call.begun
        if fetch.index in self._wanted:
            self._wanted.discard(fetch.index)
            self._loader.load_failed(fetch.index, self._clock())
            if self._source is not None:
                self._source.give_up(fetch.index)

    def _fetch_next(self) -> bool:
        """Have fetched what was asked for first. False: there is nobody to do it, and all that was asked for failed."""
        while True:
            while self._asked and self._asked[0] not in self._wanted:
                self._asked.popleft()
            if len(self._fetches) > 1 or not self._asked or (source := self._source) is None:
                return True
            fetch = self._fetch_of(index := self._asked.popleft(), source)
            if self._abandoned or self._workers.held_up or not self._workers.submit(fetch.call):
                break
            self._fetches.append(fetch)
        for failed in self._wanted.intersection((index, *self._asked)):
            self._wanted.discard(failed)
            self._loader.load_failed(failed, self._clock())
        self._asked.clear()
        return False

    def _fetch_of(self, index: int, source: ChunkSource) -> Fetch:
        starts_s = from_s = self._clock()
        for ahead in self._fetches:
            starts_s = starts_after(ahead, self._loader.link_takes_s(ahead.index), self._clock())
            from_s = max(from_s, ahead.due_s)
        fetch = Fetch(index, starts_s, from_s, lambda fetch: self._work(fetch, source))
        fetch.has(self._patience_s(self._sizes[index]))
        return fetch

    def _tell(self, index: int, origin: str) -> None:
        if self._on_settled is not None and self.origin(index) == origin:
            self._on_settled(index, origin)


# One chunk being fetched, and when the next one may be.


_LEAD_PART = 0.1
_LEAD_S = 0.02


class Fetch:
    """One of at most two fetches under way: from ``starts_s`` on, given up at ``due_s``. ``work`` is what it does."""

    def __init__(self, index: int, starts_s: float, from_s: float, work: Callable[[Fetch], object]) -> None:
        """``from_s``: when it begins at the latest, or has begun."""
        self.index, self.starts_s, self.from_s = index, starts_s, from_s
        self.due_s = math.inf
        self.call: Call[object] = Call(lambda: work(self))

    def has(self, seconds: float) -> None:
        """So long it may take."""
        self.due_s = self.from_s + seconds


def starts_after(ahead: Fetch, takes_s: float | None, now_s: float) -> float:
    """When the fetch behind ``ahead`` begins, which has begun or begins now and is expected to keep the link busy
    for ``takes_s`` (None: unknown).

    Shortly before the end of the one ahead, or the link would lie idle between them. Not at once: each would have half
    of the link, and the first, which is wanted sooner, would come as late as the second. So the first comes late by a
    twentieth of its time or ten milliseconds at most.
    """
    if takes_s is None:
        return math.inf
    return min(ahead.starts_s, now_s) + takes_s - max(_LEAD_PART * takes_s, _LEAD_S)


# Where the chunks of a prompt come from, as far as a loading session needs to know.


class FetchedChunk(Protocol):
    """A chunk's bytes, here but not yet in their place."""

    def place(self) -> bool:
        """Verify, decode and put them in place. False: they are not what was asked for. Asks no tier: others wait."""

    def release(self) -> None:
        """They are not needed any more."""


class ChunkSource(Protocol):
    """Called from several threads at once."""

    def fetch(self, index: int) -> FetchedChunk | None:
        """Wait for a chunk; None where it does not come whole. Raises nothing that a broken tier raises."""

    def give_up(self, index: int) -> None:
        """The fetch of this chunk did not end in time. Asks no tier."""

    def close(self) -> None:
        """Nothing is put in its place any more."""
