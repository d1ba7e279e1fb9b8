"""Loads and stores that have begun and not ended: each is completed once, and counts until it is done."""

from __future__ import annotations

import pytest

from skymemory.errors import InvalidInput
from skymemory.store.base import ABANDONED_S, OpenTickets, StoreTicket


def test_a_store_counts_until_its_end_and_no_longer_than_its_lease() -> None:
    tickets: OpenTickets[StoreTicket] = OpenTickets()
    ticket = StoreTicket((), 30.0)
    tickets.add(ticket, 0.0)
    assert tickets.holding(29.0) == [ticket] and tickets.holding(30.0) == []
    with tickets.ending(ticket):
        assert tickets.holding(29.0) == [ticket] and len(tickets) == 1
    assert tickets.holding(29.0) == [] and len(tickets) == 0
    with pytest.raises(InvalidInput, match="once"):
        tickets.take(ticket)


def test_uncompleted_tickets_are_dropped_long_after_their_lease_and_completed_once_all_the_same() -> None:
    """A clock that was set forward, or a computer that was suspended, made the time long."""
    tickets: OpenTickets[StoreTicket] = OpenTickets()
    old, late = StoreTicket((), 30.0), StoreTicket((), 31.0)
    for ticket in (old, late):
        tickets.add(ticket, 0.0)
    new = StoreTicket((), 900.0)
    tickets.add(new, 30.5 + ABANDONED_S)
    assert len(tickets) == 2 and set(tickets.holding(0.0)) == {late, new}
    tickets.take(old)
    for ticket in (old, StoreTicket((), 30.0)):
        with pytest.raises(InvalidInput, match="once"):
            tickets.take(ticket)
