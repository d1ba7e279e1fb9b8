"""Clients' connections, limited by the process's open files.

A full table closes the first seat in this order; within a state, the oldest seat of the address with the most seats:

1. ``HEAD`` for ``LATE_S``; 2. ``IDLE``; 3. ``KEPT``; 4. ``UNREAD`` for ``LATE_S``; 5. ``BODY`` for ``LATE_S``;
6. any other ``HEAD``, ``BODY``, ``UNREAD``.

``BUSY`` seats are never closed. All steps take amortized constant time.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

from skymemory.router.limits.shares import Shares

Owner = TypeVar("Owner")
LATE_S = 1.0


class State(IntEnum):
    """State of a client's connection, which decides about its eviction."""

    HEAD = 0  # in the TLS handshake or a request's head, or closing
    IDLE = 1  # after a single request
    KEPT = 2  # idle after several requests
    UNREAD = 3  # the client does not read its response
    BODY = 4  # in a request's body
    BUSY = 5  # its request is at a server: it is never evicted


_KEPT = State.KEPT
_EVICTION_ORDER = (
    (State.HEAD, LATE_S),
    (State.IDLE, 0.0),
    (State.KEPT, 0.0),
    (State.UNREAD, LATE_S),
    (State.BODY, LATE_S),
    (State.HEAD, 0.0),
    (State.BODY, 0.0),
    (State.UNREAD, 0.0),
)


@dataclass(slots=True, eq=False)
class Seat(Generic[Owner]):
    """Entry of a connection in a ``ConnectionTable``, which evicts some."""

    owner: Owner  # the connection
    holder: Hashable  # the client's address, which has a share of the table
    state: State = State.HEAD
    has_served: bool = False  # it has answered a request
    is_busy: bool = False  # its request is at a server; `state` is corrected only when its queue is searched
    since_s: float = 0.0  # time at which it last became idle


class _Queues(Generic[Owner]):
    """Seats of one state: a queue per holder (address), with times of entry."""

    __slots__ = ("_by_holder", "_shares")

    def __init__(self) -> None:
        self._by_holder: dict[Hashable, dict[Seat[Owner], float]] = {}
        self._shares: Shares[Hashable] = Shares()

    def add(self, seat: Seat[Owner], now_s: float) -> None:
        # The seat must not be in the queue: it would count twice.
        queue = self._by_holder.get(seat.holder)
        if queue is None:
            queue = self._by_holder[seat.holder] = {}
        queue[seat] = now_s
        self._shares.change(seat.holder, 1)

    def remove(self, seat: Seat[Owner]) -> None:
        queue = self._by_holder[seat.holder]
        del queue[seat]
        self._shares.change(seat.holder, -1)
        if not queue:
            del self._by_holder[seat.holder]

    def first(self) -> tuple[Seat[Owner], float] | None:
        """Return the first seat of the holder with most seats, and its time of entry."""
        heaviest = self._shares.heaviest()
        return None if heaviest is None else next(iter(self._by_holder[heaviest].items()))


class ConnectionTable(Generic[Owner]):
    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        self._queues: list[_Queues[Owner]] = [_Queues() for _ in range(State.BUSY)]

    def open(self, owner: Owner, holder: Hashable, now_s: float) -> Seat[Owner]:
        """Seat a connection. Call ``victim`` while the table is over-full."""
        seat = Seat(owner, holder)
        self.count += 1
        self._queues[State.HEAD].add(seat, now_s)
        return seat

    def move(self, seat: Seat[Owner], to: State, now_s: float) -> None:
        """Put a seat at the end of the queue of another state; BUSY seats are in none."""
        state = seat.state
        seat.is_busy = False
        if state is to:
            return
        if state is not State.BUSY:
            self._queues[state].remove(seat)
        seat.state = to
        if to is not State.BUSY:
            self._queues[to].add(seat, now_s)

    def mark_idle(self, seat: Seat[Owner], now_s: float) -> None:
        seat.since_s, seat.is_busy = now_s, False
        if seat.state is not _KEPT:
            self.move(seat, State.KEPT if seat.has_served else State.IDLE, now_s)
            seat.has_served = True

    def close(self, seat: Seat[Owner]) -> None:
        self.count -= 1
        if seat.state is not State.BUSY:
            self._queues[seat.state].remove(seat)
            seat.state = State.BUSY

    @property
    def is_over(self) -> bool:
        return self.count > self.most

    def victim(self, now_s: float) -> Seat[Owner] | None:
        """Return the seat to close first; None: all are busy."""
        for state, least_s in _EVICTION_ORDER:
            first = self._get_first(state)
            if first is not None and now_s - first[1] >= least_s:
                return first[0]
        return None

    def _get_first(self, state: State) -> tuple[Seat[Owner], float] | None:
        """Return a state's first seat and since when it waits; correct outdated seats."""
        queue = self._queues[state]
        while (first := queue.first()) is not None:
            seat, since_s = first
            if seat.is_busy:
                queue.remove(seat)
                seat.state = State.BUSY
            elif seat.since_s > since_s and state in (State.IDLE, State.KEPT):
                queue.remove(seat)
                queue.add(seat, seat.since_s)
            else:
                return first
        return None

    def slow_reader(self, now_s: float) -> Seat[Owner] | None:
        """Return the seat whose client has not read for longest, at least ``LATE_S``."""
        first = self._get_first(State.UNREAD)
        return first[0] if first is not None and now_s - first[1] >= LATE_S else None
