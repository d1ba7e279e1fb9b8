"""A door's queue with a clock: requests that wait until a server has room, in the order that the queue says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from skymemory.conductor.admission.base import Refusal
from skymemory.conductor.request import Request
from skymemory.router.queue import Entry, RequestQueue, Waits, work_of

LOOK_S = 0.25
"""Between two looks for room while something waits, beside those when requests end: servers come back, reports come."""


class Guest(Protocol):
    """Whoever asked for a request, while it waits. It is called once, or turned away once, or leaves."""

    def called(self, now_s: float) -> None:
        """A server has room for it: it takes it now."""
        ...

    def turned_away(self, refusal: Refusal) -> None: ...


class WaitingRoom:
    """Lives in one event loop."""

    def __init__(
        self,
        queue: RequestQueue,
        has_room: Callable[[Request, frozenset[str] | None], bool],
        loop: asyncio.AbstractEventLoop,
        settle: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            has_room: whether a server that could serve a request, of a subset if there is one, has room for it.
            settle: makes the entries in the books that were put off; until then a server has room for who was called.
        """
        self.queue = queue
        self._has_room = has_room
        self._loop = loop
        self._settle = settle
        self._clock = clock
        self._looking = False
        self._timer: asyncio.TimerHandle | None = None

    def is_open_to(self, request: Request, among: frozenset[str] | None = None) -> bool:
        """Whether it need not wait: nobody does, and a server has room."""
        return not len(self.queue) and self._has_room(request, among)

    def wait(
        self, guest: Guest, request: Request, size_bytes: int, among: frozenset[str] | None = None
    ) -> Entry | Refusal:
        """Let it wait. It may be called before this returns. ``among``: the servers it may go to, if not to all."""
        now_s = self._clock()
        entry = Entry(
            request,
            work_of(request),
            size_bytes,
            now_s,
            request.slo,
            group=(request.model, request.adapter, among),
            item=guest,
        )
        said = self.queue.offer(entry, now_s)
        if isinstance(said, Waits):
            for other, refusal in said.turned_away:
                _guest(other).turned_away(refusal)
        else:
            return said
        self.look()
        return entry

    def leave(self, entry: Entry) -> None:
        """Nobody waits for its answer any more."""
        self.queue.cancel(entry)

    def look(self) -> None:
        """Call who can go, and turn away whose time is over."""
        queue = self.queue
        if self._looking or (not len(queue) and self._timer is None):
            return
        self._looking = True
        try:
            now_s = self._clock()
            for entry, refusal in queue.expire(now_s):
                _guest(entry).turned_away(refusal)
            while (entry_ := queue.next(now_s, self._fits)) is not None:
                _guest(entry_).called(now_s)
                self._settle()
        finally:
            self._looking = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if len(queue):
            wait_s = min(LOOK_S, max(0.0, queue.next_deadline_s - self._clock()))
            self._timer = self._loop.call_later(wait_s, self._due)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> None:
        self._timer = None
        if len(self.queue):
            self.look()

    def _fits(self, entry: Entry) -> bool:
        among: frozenset[str] | None = entry.group[2]  # type: ignore[index]
        return self._has_room(entry.request, among)


def _guest(entry: Entry) -> Guest:
    guest: Guest = entry.item  # type: ignore[assignment]
    return guest


class QueueFigures(Collector):
    """What waits and waited, for Prometheus. Tenants are those that the settings name, ``other`` and ``unknown``."""

    def __init__(self, queue: RequestQueue, prefix: str) -> None:
        self._queue = queue
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        labels = ["priority", "tenant"]
        waiting = GaugeMetricFamily(f"{self._prefix}_queue_requests", "Requests that wait for a server", labels=labels)
        size = GaugeMetricFamily(f"{self._prefix}_queue_bytes", "Of their bodies", labels=labels)
        served = CounterMetricFamily(f"{self._prefix}_queue_served", "Requests that waited and went", labels=labels)
        waited = CounterMetricFamily(
            f"{self._prefix}_queue_waited_seconds", "For how long those waited, together", labels=labels
        )
        gone = CounterMetricFamily(
            f"{self._prefix}_queue_cancelled", "Requests whose client left while they waited", labels=labels
        )
        refused = CounterMetricFamily(
            f"{self._prefix}_queue_refused", "Requests that left unserved, by why", labels=[*labels, "reason"]
        )
        for (priority, tenant), figures in self._queue.figures().items():
            names = [str(priority), tenant]
            waiting.add_metric(names, figures.requests)
            size.add_metric(names, figures.size_bytes)
            served.add_metric(names, figures.served)
            waited.add_metric(names, figures.waited_s)
            gone.add_metric(names, figures.cancelled)
            for reason, count in figures.refused.items():
                refused.add_metric([*names, reason], count)
        yield from (waiting, size, served, waited, gone, refused)
