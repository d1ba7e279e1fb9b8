"""One prompt's loader among threads: the engine's thread asks for steps, the workers' threads bring chunks.

The scheduler (``cache.loader``) knows no threads; here every word to it is said under one lock. A chunk's place in the
engine's memory is written by one side at a time: while a chunk is computed its load waits for the end of the step, and
while it is put in place the step waits, and is dropped where the chunk is there then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from skymemory.cache.loader import BidirectionalLoader
from skymemory.cache.loader_actions import ComputeStep, LoaderResult
from skymemory.cache.prompt_chunks import PromptChunk
from skymemory.cache.tier_workers import Call, TierWorkers


class FetchedChunk(Protocol):
    """A chunk's bytes, here but not yet in their place."""

    def place(self) -> bool:
        """Verify, decode and put them in place. False: they are not what was asked for."""

    def release(self) -> None:
        """They are not needed any more."""


class ChunkSource(Protocol):
    """Where chunks come from. Called from several threads at once."""

    def fetch(self, index: int) -> FetchedChunk | None:
        """Wait for a chunk; None where it does not come whole. Raises nothing that a broken tier raises."""


class LoadingSession:
    """Drives ``loader`` over ``chunks``. Times are those of ``clock``, in seconds.

    ``on_settled`` is called with the index and the origin of each chunk that is there, in whichever thread it came;
    ``on_late`` with the bytes and seconds of a fetch that came when nobody wanted it any more.
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
    ) -> None:
        self._loader = loader
        self._source: ChunkSource | None = source
        self._workers = workers
        self._clock = clock
        self._on_settled = on_settled
        self._on_late = on_late
        self._sizes = [chunk.size_bytes for chunk in chunks]
        self._changed = threading.Condition()
        self._ready: ComputeStep | None = None  # asked for by the loader, not yet taken by the engine
        self._stepping = range(0)  # chunks that the engine computes
        self._wanted: set[int] = set()
        self._asked: deque[int] = deque()
        self._link = threading.Lock()  # one fetch at a time, in order; meanwhile others are put in their place
        self._placing: set[int] = set()
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
        with self._changed:
            return self._loader.done

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
                if self._loader.done:
                    return None
                waits_s = [at_s - self._clock() for at_s in (self._wake_s, ends_s) if at_s is not None]
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
            self._source = None  # a worker that is held up must not keep the engine's memory
            self._changed.notify_all()
            while self._placing:
                self._changed.wait()

    # The workers' side

    def _fetch_next(self) -> None:
        """Fetch what was asked for first. Two fetches at once would each have half of the link, and the first, which
        is wanted sooner, would come as late as the second.
        """
        fetched, error = None, None
        with self._link:
            with self._changed:
                while self._asked and self._asked[0] not in self._wanted:
                    self._asked.popleft()
                if not self._asked or self._source is None:
                    return
                index, source = self._asked.popleft(), self._source
            began_s = self._clock()
            try:
                fetched = source.fetch(index)
                if fetched is not None and index not in self._wanted and self._on_late is not None:
                    self._on_late(self._sizes[index], self._clock() - began_s)
            except BaseException as raised:  # a programming error: raised in the engine's thread
                error = raised
        placed = False
        try:
            if error is not None:
                raise error
            if fetched is not None:
                try:
                    placed = self._claim(index) and fetched.place()
                finally:
                    fetched.release()
        except BaseException as raised:
            with self._changed:
                self._error = raised
        with self._changed:
            self._placing.discard(index)
            if index in self._wanted:
                self._wanted.discard(index)
                began_s = time.perf_counter()
                (self._loader.chunk_loaded if placed else self._loader.load_failed)(index, self._clock())
                self.scheduling_s += time.perf_counter() - began_s
                self._turn()
            else:
                placed = False
            self._changed.notify_all()
        if placed:
            self._tell(index, "loaded")

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
        for index in actions.fetch:
            self._wanted.add(index)
            self._asked.append(index)
            if not self._workers.submit(Call(self._fetch_next)):
                self._wanted.discard(index)
                self._asked.remove(index)
                self._loader.load_failed(index, self._clock())

    def _tell(self, index: int, origin: str) -> None:
        if self._on_settled is not None and self.origin(index) == origin:
            self._on_settled(index, origin)
