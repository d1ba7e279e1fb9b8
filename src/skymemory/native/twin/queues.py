"""Work in progress at servers: ``PrefillQueues`` estimates a request's wait; ``UnderWay`` knows which prompts are
computed.

A *queue* has the requests sent to a slot without a first byte. A prefill is *unseen* unless its answer streams: its end
is assumed when its estimated work is done, the server reports fewer waiting requests, or its own or a later answer
comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer


STALE_S = 5.0


class Report(Protocol):
    @property
    def at_s(self) -> float: ...
    @property
    def waiting(self) -> int: ...


class Server(Protocol):
    @property
    def slot(self) -> int: ...
    @property
    def reported(self) -> Report | None: ...


@dataclass(slots=True, eq=False)
class _Prefill:
    """Sent prefill; ``work_s`` is its estimated duration, alone."""

    work_s: float
    routed_s: float
    drain_s: float
    """Pipeline of machines: the next begins after ``work_s``; this ends ``drain_s`` later."""
    unseen: bool


@dataclass(slots=True)
class _Queue:
    """Prefills sent to a server and not known to have ended, by ticket; the first is being computed since ``since_s``.

    ``first_s`` and ``rest_s``: work of the first and of all others. ``others``: time of a report, and requests of other
    routers in it.
    """

    waiting: dict[int, _Prefill] = field(default_factory=dict)
    rest_s: float = 0.0
    first_s: float = 0.0
    drain_s: float = 0.0
    since_s: float = 0.0
    others: tuple[float, float] = (-1.0, 0.0)
    ended: deque[tuple[float, float]] = field(default_factory=deque)
    """Times of sending and ending of recent prefills."""
    guessed: bool = False
    """True if the last end was assumed, not seen."""
    unseen: int = 0
    believed_s: float = -1.0


class PrefillQueues:
    """Queues of prefills, by slot. A prefill beyond its estimate needs at least ``overdue`` of its time so far: a
    hanging server gets ever longer estimates.
    """

    def __init__(self, overdue: float) -> None:
        self._overdue = overdue
        self._queues: dict[int, _Queue] = {}
        self._tickets = 0
        self._usual_s = 0.0

    @property
    def usual_s(self) -> float:
        """Return the recent duration of a prefill at any server."""
        return self._usual_s

    def waits_s(self, servers: Sequence[Server], now_s: float) -> list[float]:
        """Return each server's wait before a new prefill, in seconds."""
        queues, overdue = self._queues, self._overdue
        waits = []
        for server in servers:
            check_slot(server.slot)
            # Our own requests: the remaining time of the first, and the work of the others. An overdue first prefill
            # needs at least a share of its time so far. Then the requests of other routers, by the server's report.
            queue = queues.get(server.slot)
            wait = 0.0
            if queue is not None and queue.unseen:
                _pass_unseen(queue, server.reported, now_s)
            if queue is not None and queue.waiting:
                elapsed = now_s - queue.since_s
                remaining_s, least = queue.first_s - elapsed, elapsed * overdue
                if queue.drain_s:  # a pipeline: later prefills may have begun before its own work is done
                    least = least if remaining_s < -queue.drain_s else -queue.drain_s
                    wait = max(0.0, queue.rest_s + max(remaining_s, least))
                else:
                    wait = queue.rest_s + (remaining_s if remaining_s > least else least)
            report = server.reported
            if report is not None and report.waiting and now_s - report.at_s <= STALE_S:
                other_requests = float(report.waiting) if queue is None else _of_others(queue, report)
                wait += other_requests * self._usual_s
            waits.append(wait)
        return waits

    def add(self, slot: int, work_s: float, now_s: float, drain_s: float = 0.0, unseen: bool = False) -> int:
        """Add a sent prefill; return a ticket, never 0."""
        check_slot(slot)
        queue = self._queues.setdefault(slot, _Queue())
        if queue.unseen:
            _pass_unseen(queue, None, now_s)
        queue.unseen += unseen
        if queue.waiting:
            queue.rest_s += work_s
        else:
            queue.first_s, queue.rest_s, queue.since_s, queue.drain_s = work_s, 0.0, now_s, drain_s
        self._tickets += 1
        queue.waiting[self._tickets] = _Prefill(work_s, now_s, drain_s, unseen)
        self._usual_s += (work_s - self._usual_s) * (0.1 if self._usual_s else 1.0)
        return self._tickets

    def remove(self, slot: int, ticket: int, now_s: float) -> float | None:
        """Remove an ended prefill. Return the seconds that the server had for it; None if its begin or end is
        uncertain.
        """
        check_slot(slot)
        queue = self._queues.get(slot)
        prefill = None if queue is None else queue.waiting.get(ticket)
        if queue is None or prefill is None:
            return None
        if queue.unseen:
            _pass_unseen(queue, None, now_s)
            while ticket in queue.waiting and (first := next(iter(queue.waiting))) != ticket:
                if not queue.waiting[first].unseen:
                    break
                _end(queue, first, now_s, guessed=True)  # a later prefill cannot end before an earlier one
            if ticket not in queue.waiting:
                return None
        last_s = queue.ended[-1][1] if queue.ended else prefill.routed_s
        is_visible = not prefill.unseen and not (queue.guessed and last_s > prefill.routed_s)
        _end(queue, ticket, now_s, guessed=prefill.unseen)
        return now_s - max(prefill.routed_s, last_s) if is_visible else None

    def forget(self, slot: int) -> None:
        check_slot(slot)
        self._queues.pop(slot, None)


def _pass_unseen(queue: _Queue, report: Report | None, now_s: float) -> None:
    """End unseen prefills at the head of a queue that must have ended by now."""
    # Two signs end an unseen prefill: its estimated work is over, or the server reports fewer waiting requests than
    # are counted here. A report is used once (``believed_s``); otherwise each call would end another prefill by it.
    surplus = 0.0
    if report is not None and queue.believed_s != report.at_s:
        queue.believed_s = report.at_s
        ours = sum(prefill.routed_s <= report.at_s for prefill in queue.waiting.values())
        surplus = ours - 1 - report.waiting  # one of ours may be the request being computed
    while queue.waiting:
        ticket, first = next(iter(queue.waiting.items()))
        end_s = queue.since_s + first.work_s
        if not first.unseen:
            return
        if end_s <= now_s:
            _end(queue, ticket, end_s, guessed=True)
        elif surplus > 0 and report is not None:
            _end(queue, ticket, max(report.at_s, queue.since_s), guessed=True)
        else:
            return
        surplus -= 1


def _end(queue: _Queue, ticket: int, at_s: float, guessed: bool) -> None:
    """Remove a prefill; the next becomes the first. ``guessed``: its end was not seen."""
    first = next(iter(queue.waiting)) == ticket
    prefill = queue.waiting.pop(ticket)
    queue.unseen -= prefill.unseen
    if not first:
        queue.rest_s -= prefill.work_s
    elif queue.waiting:
        following = next(iter(queue.waiting.values()))
        queue.first_s, queue.drain_s = following.work_s, following.drain_s
        queue.since_s = max(following.routed_s, at_s - prefill.drain_s)
        queue.rest_s -= queue.first_s
    queue.guessed = guessed
    queue.ended.append((prefill.routed_s, at_s))
    while queue.ended[0][1] < at_s - STALE_S and len(queue.ended) > 1:
        queue.ended.popleft()


def _of_others(queue: _Queue, report: Report) -> float:
    """Return the reported waiting requests that this router has not sent."""
    at_s = report.at_s
    if queue.others[0] != at_s:
        ours = sum(prefill.routed_s <= at_s for prefill in queue.waiting.values())
        ours += sum(routed_s <= at_s < ended_s for routed_s, ended_s in queue.ended)
        queue.others = (at_s, max(0.0, float(report.waiting - ours)))
    return queue.others[1]


Blocks: TypeAlias = "Buffer | NDArray[np.uint64]"

MAX_SLOTS = 65_536
_MASK = (1 << 64) - 1


class UnderWay:
    """Prompts that servers are computing: a chain of blocks is *under way* at a slot from ``add`` to ``drop``.

    Blocks beyond ``most_blocks`` are ignored. ``secret`` (odd): as in ``PrefixTable``.
    """

    def __init__(self, most_blocks: int, secret: int = 0x9E3779B97F4A7C15) -> None:
        if most_blocks < 0:
            raise ValueError(f"at most {most_blocks} blocks of a chain: expected 0 or more")
        if not 0 <= secret <= _MASK:
            raise OverflowError("the secret of a table has 64 bits")
        if not secret & 1:
            raise ValueError("the secret of a table must be odd")
        self.most_blocks = most_blocks
        self._open: dict[int, tuple[int, list[int]]] = {}
        self._chains: dict[int, dict[int, int]] = {}
        self._tickets = self._changes = 0

    def __len__(self) -> int:
        return len(self._open)

    def blocks(self) -> int:
        return len(self._chains)

    def changes(self) -> int:
        return self._changes

    def add(self, slot: int, blocks: Blocks) -> int:
        """Add a chain. Return its ticket, never 0."""
        check_slot(slot)
        self._changes += 1
        self._tickets += 1
        self._open[self._tickets] = slot, chain = slot, hashes_of(blocks)[: self.most_blocks]
        for block in chain:
            chains = self._chains.setdefault(block, {})
            chains[slot] = chains.get(slot, 0) + 1
        return self._tickets

    def drop(self, ticket: int) -> None:
        slot, chain = self._open.pop(ticket, (0, None))
        if chain is None:
            return
        self._changes += 1
        for block in chain:
            chains = self._chains[block]
            chains[slot] -= 1
            if not chains[slot]:
                del chains[slot]
                if not chains:
                    del self._chains[block]

    def forget(self, slot: int) -> None:
        check_slot(slot)
        for ticket in [ticket for ticket, (ticket_slot, _) in self._open.items() if ticket_slot == slot]:
            self.drop(ticket)

    def depths(self, blocks: Blocks, slots: Sequence[int]) -> list[int]:
        """Return the number of leading blocks under way at each slot; empty if none is."""
        for slot in slots:
            check_slot(slot)
        hashes = hashes_of(blocks)
        if not self._open:
            return []
        depth_of = dict.fromkeys(slots, 0)
        known, at = set(self._chains.get(hashes[0], ())) if hashes else set[int](), 0
        # The set of slots only shrinks along a chain, so equal counts at both ends mean equal slots in between: the
        # places where a slot drops out are found by bisection.
        while known:
            low, high = at, len(hashes) - 1
            while low < high:
                middle = (low + high + 1) >> 1
                if len(self._chains.get(hashes[middle], ())) == len(known):
                    low = middle
                else:
                    high = middle - 1
            at = low + 1
            next_known = set(self._chains.get(hashes[at], ())) if at < len(hashes) else set[int]()
            for slot in known - next_known:
                if slot in depth_of:
                    depth_of[slot] = at
            known = next_known
        return [depth_of[slot] for slot in slots]


def hashes_of(blocks: Blocks) -> list[int]:
    view = memoryview(cast("Buffer", blocks)).cast("B")
    if len(view) % 8:
        raise ValueError(f"{len(view)} bytes are not a whole number of 8-byte hashes")
    hashes: list[int] = view.cast("Q").tolist()
    return hashes


def check_slot(slot: int) -> None:
    if not 0 <= slot < MAX_SLOTS:
        raise ValueError(f"slot {slot}: expected 0 to {MAX_SLOTS - 1}")
