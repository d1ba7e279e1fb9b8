"""The loads, or the stores, of one store that have begun and not ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Generic, TypeVar

from skymemory.errors import InvalidInput
from skymemory.store.base import ABANDONED_S, LoadTicket, StoreTicket

_Ticket = TypeVar("_Ticket", LoadTicket, StoreTicket)


class OpenTickets(Generic[_Ticket]):
    """Tickets, each of which is taken once. May be used from any thread; takes no other lock."""

    def __init__(self) -> None:
        self._open: set[_Ticket] = set()
        self._ending: set[_Ticket] = set()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._open) + len(self._ending)

    def add(self, ticket: _Ticket, now_s: float) -> None:
        """It begins. Those that nobody has completed long after their lease are dropped: their values must not be kept
        for ever.
        """
        with self._lock:
            for abandoned in [one for one in self._open if one.expires_s + ABANDONED_S < now_s]:
                self._open.discard(abandoned)
            self._open.add(ticket)

    def take(self, ticket: _Ticket) -> None:
        """It is being completed, for the first and only time; else InvalidInput."""
        with self._lock:
            if ticket not in self._open:
                kind = "load" if isinstance(ticket, LoadTicket) else "store"
                raise InvalidInput(f"this {kind} ticket is not open: each is completed once, by its own store")
            self._open.discard(ticket)

    @contextmanager
    def ending(self, ticket: _Ticket) -> Iterator[None]:
        """``take`` it, but let it count until it is done."""
        with self._lock:
            self._ending.add(ticket)  # first: nobody may see it in neither
        try:
            self.take(ticket)
            yield
        finally:
            with self._lock:
                self._ending.discard(ticket)

    def discard(self, ticket: _Ticket) -> None:
        """It is given up, or was completed already."""
        with self._lock:
            self._open.discard(ticket)

    def holding(self, now_s: float) -> list[_Ticket]:
        """Those whose lease has not ended."""
        with self._lock:
            return [ticket for ticket in self._open | self._ending if ticket.expires_s > now_s]

    def clear(self) -> None:
        with self._lock:
            self._open.clear()
            self._ending.clear()
