"""Clients' connections, of which the process can have as many as its files allow: which one is closed for a newcomer.

A seat is what a connection has here, with its holder (the client's address) and its state. When the table is full, the
first seat of this order pays, in each state that of the address with the most seats in it, the longest there first:

1. ``HEAD`` for ``LATE_S``: no complete head yet, also in a TLS handshake, or not one byte;
2. ``IDLE``: between two requests, and has had only one;
3. ``KEPT``: idle after several requests: its client uses it;
4. ``UNREAD`` for ``LATE_S``: its client does not read the response;
5. ``BODY`` for ``LATE_S``: the rest of a body is missing;
6. any other ``HEAD``, ``BODY``, ``UNREAD``.

``BUSY`` seats, whose requests are at servers, are never closed.

A kept connection changes between busy and idle with every request, so these changes only set fields of its seat
(``is_busy``, ``since_s``); ``victim`` sets its queue right where it meets the seat. So all steps take constant time, a
search for a victim averaged over the requests before it.
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
    HEAD = 0
    IDLE = 1
    KEPT = 2
    UNREAD = 3
    BODY = 4
    BUSY = 5


_KEPT = State.KEPT
_ORDER = (
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
    owner: Owner
    holder: Hashable
    state: State = State.HEAD
    has_served: bool = False
    """It has had a request."""
    is_busy: bool = False
    """Its request is at a server, whatever queue it still stands in."""
    since_s: float = 0.0
    """Since when it is idle."""


class _Queues(Generic[Owner]):
    """Seats in one state, by holder, with the time since which each is in it."""

    __slots__ = ("_by_holder", "_shares")

    def __init__(self) -> None:
        self._by_holder: dict[Hashable, dict[Seat[Owner], float]] = {}
        self._shares: Shares[Hashable] = Shares()

    def add(self, seat: Seat[Owner], now_s: float) -> None:
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
        heaviest = self._shares.heaviest()
        return None if heaviest is None else next(iter(self._by_holder[heaviest].items()))


class ConnectionTable(Generic[Owner]):
    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        self._queues: list[_Queues[Owner]] = [_Queues() for _ in range(State.BUSY)]

    def open(self, owner: Owner, holder: Hashable, now_s: float) -> Seat[Owner]:
        """Seat a new connection; where the table is over-full, ``victim`` says whose turn it is."""
        seat = Seat(owner, holder)
        self.count += 1
        self._queues[State.HEAD].add(seat, now_s)
        return seat

    def move(self, seat: Seat[Owner], to: State, now_s: float) -> None:
        """Change a seat's state."""
        state = seat.state
        seat.is_busy = False
        if state is to:
            return
        if state is not State.BUSY:
            self._queues[state].remove(seat)
        seat.state = to
        if to is not State.BUSY:
            self._queues[to].add(seat, now_s)

    def rest(self, seat: Seat[Owner], now_s: float) -> None:
        """A seat is idle from now on."""
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
        """The seat to close for a newcomer; None: all are busy."""
        for state, least_s in _ORDER:
            found = self._first(state)
            if found is not None and now_s - found[1] >= least_s:
                return found[0]
        return None

    def _first(self, state: State) -> tuple[Seat[Owner], float] | None:
        queue = self._queues[state]
        while (found := queue.first()) is not None:
            seat, since_s = found
            if seat.is_busy:
                queue.remove(seat)
                seat.state = State.BUSY
            elif seat.since_s > since_s and state in (State.IDLE, State.KEPT):
                queue.remove(seat)
                queue.add(seat, seat.since_s)
            else:
                return found
        return None

    def slow_reader(self, now_s: float) -> Seat[Owner] | None:
        """The seat whose client has not read for longest, if that is ``LATE_S``."""
        found = self._first(State.UNREAD)
        return found[0] if found is not None and now_s - found[1] >= LATE_S else None
