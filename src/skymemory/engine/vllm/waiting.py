"""Loads of values that another engine still computes: times and threads of questions to the store."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

from skymemory.cache.tiers.workers import TierWorkers, WorkerCall
from skymemory.pacing import Backoff
from skymemory.reasons import Miss

NOT_YET = frozenset({Miss.ABSENT, Miss.UNCERTAIN, Miss.MISSING})
"""Reasons that pass while another engine stores the value."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
_MOST_VALUES = 16
_QUICK_S = 0.25  # limit for a question: after a slower question the next asks for fewer values


class PollInterval:
    """Adaptive questions for values that appear one by one: pauses, and number of ``values`` in the next question."""

    __slots__ = ("_pauses", "values")

    def __init__(self) -> None:
        self._pauses = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self.values = 1

    def on_values(self, values: int, seconds: float) -> float:
        """Record that ``values`` arrived within ``seconds``; returns the pause before the next question."""
        if not values:
            self.values = 1
            return self._pauses.next_s()
        all_came, self._pauses.failures = values >= self.values, 0
        if not all_came or seconds > _QUICK_S:
            self.values = max(1, self.values // 2)
        else:
            self.values = min(2 * self.values, _MOST_VALUES)
        return 0.0 if all_came else _FIRST_PAUSE_S


class DelayedCalls:
    """Calls that start after a delay, in one of a few threads: a waiting load holds none between its questions."""

    def __init__(self, name: str, threads: int, waiting: int) -> None:
        self._name = name
        self._workers = TierWorkers(name, threads, waiting)
        # A heap by time of start; the number decides between equal times.
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def call(self, work: Callable[[], None], after_s: float = 0.0) -> None:
        """Start ``work`` in ``after_s`` seconds, or later if all threads are busy."""
        if after_s <= 0 and not self._closed and self._workers.submit(WorkerCall(work)):
            return
        with self._changed:
            if self._closed:
                return
            due_s = time.monotonic() + max(after_s, _FIRST_PAUSE_S)
            heapq.heappush(self._later, (due_s, next(self._numbers), work))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"{self._name} timer", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Drop waiting calls."""
        with self._changed:
            self._closed = True
            self._later.clear()
            self._changed.notify()
        self._workers.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._later or self._later[0][0] > time.monotonic()):
                    self._changed.wait(self._later[0][0] - time.monotonic() if self._later else None)
                if self._closed:
                    return
                _, _, work = heapq.heappop(self._later)
            self.call(work)
