"""A tier's own few threads, so that a tier that hangs holds up nobody but itself.

Threads are daemons and started as needed: one that a dead tier never gives back must not keep the process alive.

What a thread waits for a processor is our own lateness, and not the tier's: it is not counted as waiting for the tier.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Generic, TypeVar

Result = TypeVar("Result")

_MOST_LATE_S = 1.0
_LATE_STEP_S = 0.001


class Call(Generic[Result]):
    """One piece of work on another thread. Whoever waits for it either gets its end or gives it up, never both."""

    def __init__(self, work: Callable[[], Result]) -> None:
        """It is done in the present context: what is true of the caller is true of it."""
        self._work = work
        self._context = copy_context()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._on_late: Callable[[Result | None], object] | None = None
        self.begun = False
        self.dropped = False
        """It was given up before any thread took it up, so the tier was not asked."""
        self.overdue = False
        """It was given up because it did not end in time."""
        self._submitted_s = time.monotonic()
        self._thread = 0
        self._starved_before_s = 0.0
        self.started_s = 0.0
        """When somebody began to wait, by that one's clock."""
        self.result: Result | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do the work; work given up before it began is not done at all."""
        self.dropped = self._on_late is not None
        result = error = None
        if not self.dropped:
            thread = threading.get_native_id()
            self._starved_before_s = _starved_s(thread)
            self._thread = thread
        self.begun = True
        if not self.dropped:
            try:
                result = self._context.run(self._work)
            except BaseException as raised:  # handed to the one who waits
                error = raised
        with self._lock:
            self.result, self.error = result, error
            on_late = self._on_late
            self._ended.set()
        if on_late is not None:
            on_late(result)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended."""
        return self._ended.wait(max(0.0, timeout_s))

    @property
    def starved_s(self) -> float:
        """How long it has waited for its thread to be given a processor."""
        if not self.begun:
            return time.monotonic() - self._submitted_s
        return _starved_s(self._thread) - self._starved_before_s if self._thread else 0.0

    @property
    def given_up(self) -> bool:
        return self._on_late is not None

    def give_up(self, on_late: Callable[[Result | None], object] = lambda result: None) -> bool:
        """Nobody waits any more: ``on_late(result or None)`` is called at its end. False: it has ended."""
        with self._lock:
            if self._ended.is_set():
                return False
            self._on_late = on_late
            return True


class TierWorkers:
    """At most ``threads`` threads, and ``waiting`` calls waiting for one of them."""

    def __init__(self, name: str, threads: int = 2, waiting: int = 64) -> None:
        self._name = name
        self._threads = threads
        self._calls: queue.Queue[Call[object] | None] = queue.Queue(waiting)
        self._started = 0
        self._idle = 0
        self._running: set[Call[object]] = set()
        self._lock = threading.Lock()

    def submit(self, call: Call[object]) -> bool:
        """Have it run. False: every thread is held up, and as many calls as may wait are waiting."""
        with self._lock:
            if self._idle <= self._calls.qsize() and self._started < self._threads:
                self._started += 1
                threading.Thread(target=self._work, name=f"tier {self._name}", daemon=True).start()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            return False
        return True

    def wait(self, call: Call[Result], timeout_s: float) -> bool:
        """Whether it has ended within ``timeout_s``, and what its thread was starved of the processor besides."""
        excused_s = 0.0
        while not call.wait(timeout_s):
            if not call.begun and self.busy:
                return False
            late_s = min(call.starved_s, _MOST_LATE_S)
            if (timeout_s := late_s - excused_s) < _LATE_STEP_S:
                return False
            excused_s = late_s
        return True

    @property
    def busy(self) -> bool:
        """Whether every thread is at a call: what is not begun waits for one of these."""
        with self._lock:
            return len(self._running) >= self._threads

    @property
    def held_up(self) -> bool:
        """Whether every thread is at a call that was given up: nobody knows when the next one would begin."""
        with self._lock:
            return sum(call.given_up for call in self._running) >= self._threads

    @property
    def awaited(self) -> bool:
        """Whether a call that was overdue has not come back yet."""
        with self._lock:
            return any(call.overdue for call in self._running)

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            call = self._calls.get()
            with self._lock:
                self._idle -= 1
                if call is not None:
                    self._running.add(call)
            if call is None:
                self._calls.put(None)  # for the next thread
                return
            call.run()
            with self._lock:
                self._running.discard(call)

    def close(self) -> None:
        """Threads end when the calls already there have ended; nobody waits for them."""
        try:
            self._calls.put_nowait(None)
        except queue.Full:
            threading.Thread(target=self._calls.put, args=(None,), daemon=True).start()


def _starved_s(thread: int) -> float:
    """How long this thread of ours was ready to run and was not run, in all; 0 where the kernel does not say."""
    try:
        with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


# Who may change what is stored under a key, now: a value on its way between tiers must not undo a put or a delete.
#
# Putting and deleting wait for their keys; moving (promotion, demotion, write-back) takes those that are free. A load
# notes the versions of its keys, so that what it read is promoted only if nobody has changed the key since.


_STRIPES = 4096
"""Versions are kept by stripe, not by key: two keys of one stripe cost a promotion now and then, nothing else."""


class KeyGuard:
    """May be used from any thread; not reentrant."""

    def __init__(self) -> None:
        self._freed = threading.Condition()
        self._busy: set[bytes] = set()
        self._versions = [0] * _STRIPES

    def versions(self, keys: Iterable[bytes]) -> dict[bytes, int]:
        with self._freed:
            return {key: self._versions[_stripe(key)] for key in keys}

    @contextmanager
    def changing(self, keys: Sequence[bytes], patience_s: float = math.inf) -> Iterator[bool]:
        """Hold all of ``keys``, once nobody else does, to put or delete; gives False, and holds none of them, where
        that is not so within ``patience_s``.
        """
        mine = set(keys)
        with self._freed:
            timeout_s = patience_s if patience_s < math.inf else None
            free = self._freed.wait_for(lambda: not self._busy & mine, timeout_s)
            if free:
                self._busy |= mine
        if not free:
            yield False
            return
        try:
            yield True
        finally:
            with self._freed:
                for key in mine:
                    self._versions[_stripe(key)] += 1
                self._busy -= mine
                self._freed.notify_all()

    @contextmanager
    def moving(self, keys: Iterable[bytes], versions: dict[bytes, int] | None = None) -> Iterator[set[bytes]]:
        """Hold those of ``keys`` that nobody holds, and that have still the given ``versions``; gives which."""
        with self._freed:
            mine = {
                key
                for key in keys
                if key not in self._busy and (versions is None or versions.get(key) == self._versions[_stripe(key)])
            }
            self._busy |= mine
        try:
            yield mine
        finally:
            with self._freed:
                self._busy -= mine
                self._freed.notify_all()


def _stripe(key: bytes) -> int:
    return int.from_bytes(key[:2], "big") % _STRIPES
