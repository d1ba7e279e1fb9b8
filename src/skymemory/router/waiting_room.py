"""The request queue with a clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from skymemory.conductor.request import Request
from skymemory.conductor.scheduler import Refusal
from skymemory.router.queue import QueueEntry, RequestQueue, work_of

LOOK_S = 0.25
"""Period of checking for room; only a request's end triggers a check at once."""


class Waiter(Protocol):
    """Handler of a waiting request: called once, or turned away once, or it leaves."""

    def called(self, now_s: float) -> None: ...

    def turned_away(self, refusal: Refusal) -> None: ...


class WaitingRoom:
    def __init__(
        self,
        queue: RequestQueue,
        has_room: Callable[[Request, frozenset[str] | None], bool],
        loop: asyncio.AbstractEventLoop,
        settle: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the waiting room.

        Args:
            has_room: returns True if a server (of a subset, if not None) has room.
            settle: makes deferred entries, so that the room taken by a called request counts.
        """
        self.queue = queue
        self._has_room = has_room
        self._loop = loop
        self._settle = settle
        self._clock = clock
        self._looking = False
        self._timer: asyncio.TimerHandle | None = None

    def is_open_to(self, request: Request, among: frozenset[str] | None = None) -> bool:
        return not len(self.queue) and self._has_room(request, among)

    def wait(
        self, waiter: Waiter, request: Request, size_bytes: int, among: frozenset[str] | None = None
    ) -> QueueEntry | Refusal:
        """Queue a request; return its entry or refusal. It may be called before this returns.

        ``among``: servers it may go to; None: all.
        """
        now_s = self._clock()
        entry = QueueEntry(
            request,
            work_of(request),
            size_bytes,
            now_s,
            request.slo,
            group=(request.model, request.adapter, among),
            item=waiter,
        )
        offered = self.queue.offer(entry, now_s)
        if isinstance(offered, Refusal):
            return offered
        for other, refusal in offered:
            other.item.turned_away(refusal)
        self.poll()
        return entry

    def leave(self, entry: QueueEntry) -> None:
        self.queue.cancel(entry)

    def poll(self) -> None:
        """Refuse overdue requests, and call those for which a server has room."""
        queue = self.queue
        if self._looking or (not len(queue) and self._timer is None):
            return
        self._looking = True
        try:
            now_s = self._clock()
            for entry, refusal in queue.expire(now_s):
                entry.item.turned_away(refusal)
            while (following := queue.next(now_s, self._fits)) is not None:
                following.item.called(now_s)
                self._settle()
        finally:
            self._looking = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if len(queue):
            wait_s = min(LOOK_S, max(0.0, queue.next_deadline_s - self._clock()))
            self._timer = self._loop.call_later(wait_s, self._on_timer)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        if len(self.queue):
            self.poll()

    def _fits(self, entry: QueueEntry) -> bool:
        among: frozenset[str] | None = entry.group[2]  # type: ignore[index]
        return self._has_room(entry.request, among)
