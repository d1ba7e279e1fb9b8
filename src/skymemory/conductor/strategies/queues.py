"""How long a request would wait at each server: the prefills we sent there, and how far they must have come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from skymemory.conductor.fleet import Server
from skymemory.conductor.strategies.loads import STALE_S


@dataclass(slots=True, eq=False)
class Prefill:
    """One that was sent: ``work_s`` is what it was estimated to take, alone."""

    work_s: float
    routed_s: float


@dataclass(slots=True)
class _Queue:
    waiting: dict[Prefill, None] = field(default_factory=dict)
    """In the order of sending; the first is the one being computed."""
    work_s: float = 0.0
    """Of all of them."""
    since_s: float = 0.0
    """When the first began."""
    ended: deque[tuple[float, float]] = field(default_factory=deque)
    """Of those that ended lately, when they were sent and when they ended."""


class PrefillQueues:
    """One queue per slot, first come first served.

    ``overdue``: one that takes longer than estimated is believed to need at least this part of its time so far, so that
    a server which hangs repels more and more.
    """

    def __init__(self, overdue: float) -> None:
        self._overdue = overdue
        self._queues: dict[int, _Queue] = {}
        self._usual_s = 0.0
        """What one takes, lately, at any server: for requests that others sent."""

    def waits_s(self, servers: Sequence[Server], now_s: float) -> list[float]:
        """Seconds until each server could begin with a request that is sent now."""
        queues, overdue = self._queues, self._overdue
        waits = []
        for server in servers:
            queue = queues.get(server.slot)
            wait = 0.0
            if queue is not None and queue.waiting:
                first_s = next(iter(queue.waiting)).work_s
                elapsed = now_s - queue.since_s
                left = first_s - elapsed
                wait = queue.work_s - first_s + (left if left > elapsed * overdue else elapsed * overdue)
            report = server.reported
            if report is not None and report.waiting and now_s - report.at_s <= STALE_S:
                wait += self._of_others(queue, report.waiting, report.at_s)
            waits.append(wait)
        return waits

    def add(self, slot: int, work_s: float, now_s: float) -> Prefill:
        queue = self._queues.setdefault(slot, _Queue())
        if not queue.waiting:
            queue.since_s, queue.work_s = now_s, 0.0
        prefill = Prefill(work_s, now_s)
        queue.waiting[prefill] = None
        queue.work_s += work_s
        self._usual_s += (work_s - self._usual_s) * (0.1 if self._usual_s else 1.0)
        return prefill

    def remove(self, slot: int, prefill: Prefill, now_s: float) -> float:
        """It is done, or failed. Seconds that the server had for it: since it was sent, or since the last one ended."""
        queue = self._queues.get(slot)
        if queue is None or prefill not in queue.waiting:
            return 0.0
        first = next(iter(queue.waiting)) is prefill
        last_s = queue.ended[-1][1] if queue.ended else prefill.routed_s
        del queue.waiting[prefill]
        queue.work_s = queue.work_s - prefill.work_s if queue.waiting else 0.0
        if first:
            queue.since_s = now_s
        queue.ended.append((prefill.routed_s, now_s))
        while queue.ended[0][1] < now_s - STALE_S and len(queue.ended) > 1:
            queue.ended.popleft()
        return now_s - max(prefill.routed_s, last_s)

    def forget(self, slot: int) -> None:
        self._queues.pop(slot, None)

    def _of_others(self, queue: _Queue | None, waiting: int, at_s: float) -> float:
        """Work of requests that wait there, by the server's report, and that we did not send."""
        ours = 0
        if queue is not None:
            ours = sum(prefill.routed_s <= at_s for prefill in queue.waiting)
            ours += sum(routed_s <= at_s < ended_s for routed_s, ended_s in queue.ended)
        return max(0, waiting - ours) * self._usual_s
