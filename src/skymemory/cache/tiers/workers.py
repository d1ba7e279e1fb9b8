"""Worker threads of a tier: a tier that hangs blocks neither other tiers nor the exit of the process.

A thread's wait for a processor is this machine's load, not the tier's latency: it extends the timeout.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from typing import BinaryIO, Generic, TypeVar

Result = TypeVar("Result")

_MOST_LATE_S = 1.0
_LATE_STEP_S = 0.001


class WorkerCall(Generic[Result]):
    """Work for another thread. The caller sees its end (``wait``) or gives it up, never both."""

    def __init__(self, work: Callable[[], Result]) -> None:
        """``work`` runs in a copy of the caller's context variables."""
        self._work = work
        self._context = copy_context()
        self._lock = threading.Lock()
        self._running = threading.Lock()  # held until it ends; an Event is three times as slow to set and see
        self._running.acquire()
        self._ended = False
        self._on_late: Callable[[Result | None], object] | None = None
        self.begun = False
        self.dropped = False  # given up before it began
        self.overdue = False  # did not end in time
        self._submitted_s = time.monotonic()
        self._thread = 0
        self._starved_before_s = 0.0
        self.started_s = 0.0  # when the caller began to wait, by its clock
        self.result: Result | None = None
        self.error: BaseException | None = None

    def run(self, schedstat: BinaryIO | None = None) -> None:
        """Do the work, unless given up. ``schedstat``: the thread's figures, opened once."""
        self.dropped = self._on_late is not None
        result = error = None
        if not self.dropped and schedstat is not None:
            self._starved_before_s = _starved_now_s(schedstat)
            self._thread = threading.get_native_id()
        self.begun = True
        if not self.dropped:
            try:
                result = self._context.run(self._work)
            except BaseException as raised:  # raised by the caller
                error = raised
        with self._lock:
            self.result, self.error = result, error
            on_late = self._on_late
            self._ended = True
            self._running.release()
        if on_late is not None:
            on_late(result)

    def wait(self, timeout_s: float) -> bool:
        if not self._ended and self._running.acquire(timeout=min(max(0.0, timeout_s), threading.TIMEOUT_MAX)):
            self._running.release()  # for the next waiter
        return self._ended

    @property
    def starved_s(self) -> float:
        """Seconds that its thread has waited for a processor."""
        if not self.begun:
            return time.monotonic() - self._submitted_s
        return _starved_s(self._thread) - self._starved_before_s if self._thread else 0.0

    @property
    def given_up(self) -> bool:
        return self._on_late is not None

    def give_up(self, on_late: Callable[[Result | None], object] = lambda result: None) -> bool:
        """Stop waiting; ``on_late(result or None)`` is called at the end. False: it has ended."""
        with self._lock:
            if self._ended:
                return False
            self._on_late = on_late
            return True


class TierWorkers:
    """Pool of at most ``threads`` threads with a queue of ``waiting`` calls."""

    def __init__(self, name: str, threads: int = 2, waiting: int = 64) -> None:
        self._name = name
        self._threads = threads
        self._waiting = waiting
        self._calls: queue.SimpleQueue[WorkerCall[object] | None] = queue.SimpleQueue()
        self._started = 0
        self._open = 0
        self._running: set[WorkerCall[object]] = set()
        self._lock = threading.Lock()

    def submit(self, call: WorkerCall[object]) -> bool:
        """Queue a call, with a new thread if needed; False if full."""
        with self._lock:
            if self._calls.qsize() >= self._waiting:
                return False
            self._open += 1
            if self._started < min(self._open, self._threads):
                self._started += 1
                threading.Thread(target=self._work, name=f"tier {self._name}", daemon=True).start()
            self._calls.put(call)
        return True

    def wait(self, call: WorkerCall[Result], timeout_s: float) -> bool:
        """Return True if it ended within ``timeout_s``, extended while its thread lacked a processor."""
        excused_s = 0.0
        while not call.wait(timeout_s):
            if not call.begun and self.all_busy:
                return False
            late_s = min(call.starved_s, _MOST_LATE_S)
            if (timeout_s := late_s - excused_s) < _LATE_STEP_S:
                return False
            excused_s = late_s
        return True

    @property
    def all_busy(self) -> bool:
        with self._lock:
            return len(self._running) >= self._threads

    @property
    def all_hung(self) -> bool:
        """True if every thread is stuck in a given-up call."""
        with self._lock:
            return sum(call.given_up for call in self._running) >= self._threads

    @property
    def any_hung(self) -> bool:
        with self._lock:
            return any(call.overdue for call in self._running)

    def _work(self) -> None:
        with _schedstat_of(threading.get_native_id()) as schedstat:
            while True:
                call = self._calls.get()
                if call is None:
                    self._calls.put(None)  # for the next thread
                    return
                with self._lock:
                    self._running.add(call)
                call.run(schedstat)
                with self._lock:
                    self._running.discard(call)
                    self._open -= 1

    def close(self) -> None:
        self._calls.put(None)  # ends the threads after the queued calls


def _schedstat_of(thread: int) -> AbstractContextManager[BinaryIO | None]:
    try:
        return open(f"/proc/self/task/{thread}/schedstat", "rb", buffering=0)
    except OSError:
        return nullcontext()


def _starved_now_s(schedstat: BinaryIO) -> float:
    """Return the seconds runnable but not running; 0 if unknown."""
    try:
        numbers = os.pread(schedstat.fileno(), 64, 0).split()
    except OSError:
        return 0.0
    return int(numbers[1]) / 1e9 if len(numbers) > 1 and numbers[1].isdigit() else 0.0


def _starved_s(thread: int) -> float:
    with _schedstat_of(thread) as schedstat:
        return 0.0 if schedstat is None else _starved_now_s(schedstat)
