"""How long a request would wait at each server: the prefills we sent there, and how far they must have come.

The end of a prefill shows where its answer streams. Where the answer comes whole it does not: such a one is *unseen*,
and believed to end when its estimated work is done, or when the server's report says that fewer wait than we thought,
or, at the latest, when its answer or that of one behind it is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from skymemory.conductor.fleet import LoadReport, Server
from skymemory.conductor.strategies.loads import STALE_S


@dataclass(slots=True, eq=False)
class Prefill:
    """One that was sent: ``work_s`` is what it was estimated to take, alone."""

    work_s: float
    routed_s: float
    drain_s: float = 0.0
    """After ``work_s`` the next begins, and so much later this one is done: in a pipeline of machines."""
    unseen: bool = False
    """Its end will not show."""


@dataclass(slots=True)
class _Queue:
    waiting: dict[Prefill, None] = field(default_factory=dict)
    """In the order of sending; the first is the one being computed."""
    rest_s: float = 0.0
    """Work of all but the first."""
    first_s: float = 0.0
    """Work of the first."""
    drain_s: float = 0.0
    """Of the first."""
    since_s: float = 0.0
    """When the first began."""
    others: tuple[float, int] = (-1.0, 0)
    """When a report was made, and how many requests that we did not send waited by it."""
    ended: deque[tuple[float, float]] = field(default_factory=deque)
    """Of those that ended lately, when they were sent and when they ended."""
    guessed: bool = False
    """Whether the last end is one that was believed, not seen."""
    unseen: int = 0
    """Of those that wait."""
    believed_s: float = -1.0
    """When the report was made that was last compared with who waits."""


class PrefillQueues:
    """One queue per slot, first come first served.

    ``overdue``: one that takes longer than estimated is believed to need at least this part of its time so far, so that
    a server which hangs repels more and more.
    """

    def __init__(self, overdue: float) -> None:
        self._overdue = overdue
        self._queues: dict[int, _Queue] = {}
        self.usual_s = 0.0
        """What one takes, lately, at any server: for requests that others sent."""

    def waits_s(self, servers: Sequence[Server], now_s: float) -> list[float]:
        """Seconds until each server could begin with a request that is sent now."""
        queues, overdue = self._queues, self._overdue
        waits = []
        for server in servers:
            queue = queues.get(server.slot)
            wait = 0.0
            if queue is not None and queue.unseen:
                _pass_unseen(queue, server.reported, now_s)
            if queue is not None and queue.waiting:
                elapsed = now_s - queue.since_s
                left, least = queue.first_s - elapsed, elapsed * overdue
                if queue.drain_s:  # Those behind it may have begun.
                    least = least if left < -queue.drain_s else -queue.drain_s
                    wait = max(0.0, queue.rest_s + max(left, least))
                else:
                    wait = queue.rest_s + (left if left > least else least)
            report = server.reported
            if report is not None and report.waiting and now_s - report.at_s <= STALE_S:
                others = report.waiting if queue is None else _of_others(queue, report)
                wait += others * self.usual_s
            waits.append(wait)
        return waits

    def add(self, slot: int, work_s: float, now_s: float, drain_s: float = 0.0, unseen: bool = False) -> Prefill:
        queue = self._queues.setdefault(slot, _Queue())
        if queue.unseen:
            _pass_unseen(queue, None, now_s)
        prefill = Prefill(work_s, now_s, drain_s, unseen)
        queue.unseen += unseen
        if queue.waiting:
            queue.rest_s += work_s
        else:
            queue.first_s, queue.rest_s, queue.since_s, queue.drain_s = work_s, 0.0, now_s, drain_s
        queue.waiting[prefill] = None
        self.usual_s += (work_s - self.usual_s) * (0.1 if self.usual_s else 1.0)
        return prefill

    def remove(self, slot: int, prefill: Prefill, now_s: float) -> float | None:
        """It is done, or failed. Seconds that the server had for it: since it was sent, or since the last one ended;
        None where that did not show.
        """
        queue = self._queues.get(slot)
        if queue is None or prefill not in queue.waiting:
            return None
        if queue.unseen:
            _pass_unseen(queue, None, now_s)
            while prefill in queue.waiting and (first := next(iter(queue.waiting))) is not prefill and first.unseen:
                _end(queue, first, now_s, guessed=True)  # who comes behind it is not done before it
            if prefill not in queue.waiting:
                return None
        last_s = queue.ended[-1][1] if queue.ended else prefill.routed_s
        shown = not prefill.unseen and not (queue.guessed and last_s > prefill.routed_s)
        _end(queue, prefill, now_s, guessed=prefill.unseen)
        return now_s - max(prefill.routed_s, last_s) if shown else None

    def forget(self, slot: int) -> None:
        self._queues.pop(slot, None)


def _pass_unseen(queue: _Queue, report: LoadReport | None, now_s: float) -> None:
    """End the first ones whose end does not show and whose time is over, or that do not wait any more by the report."""
    surplus = 0
    if report is not None and queue.believed_s != report.at_s:
        queue.believed_s = report.at_s
        ours = sum(prefill.routed_s <= report.at_s for prefill in queue.waiting)
        surplus = ours - 1 - report.waiting  # one of ours may be the one that is computed
    while queue.waiting:
        first = next(iter(queue.waiting))
        end_s = queue.since_s + first.work_s
        if not first.unseen:
            return
        if end_s <= now_s:
            _end(queue, first, end_s, guessed=True)
        elif surplus > 0 and report is not None:
            _end(queue, first, max(report.at_s, queue.since_s), guessed=True)
        else:
            return
        surplus -= 1


def _end(queue: _Queue, prefill: Prefill, at_s: float, guessed: bool) -> None:
    first = next(iter(queue.waiting)) is prefill
    del queue.waiting[prefill]
    queue.unseen -= prefill.unseen
    if not first:
        queue.rest_s -= prefill.work_s
    elif queue.waiting:
        following = next(iter(queue.waiting))
        queue.first_s, queue.drain_s = following.work_s, following.drain_s
        queue.since_s = max(following.routed_s, at_s - prefill.drain_s)
        queue.rest_s -= queue.first_s
    queue.guessed = guessed
    queue.ended.append((prefill.routed_s, at_s))
    while queue.ended[0][1] < at_s - STALE_S and len(queue.ended) > 1:
        queue.ended.popleft()


def _of_others(queue: _Queue, report: LoadReport) -> int:
    """Requests that wait there, by the server's report, and that we did not send: counted once per report."""
    at_s = report.at_s
    if queue.others[0] != at_s:
        ours = sum(prefill.routed_s <= at_s for prefill in queue.waiting)
        ours += sum(routed_s <= at_s < ended_s for routed_s, ended_s in queue.ended)
        queue.others = (at_s, max(0, report.waiting - ours))
    return queue.others[1]
