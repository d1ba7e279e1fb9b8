"""Distrust: what servers hold by their own reports, and answers that do not come."""

from __future__ import annotations

import math
from collections import OrderedDict

MOST_DUE = 4096
"""Open answers per server that are watched."""


class HitTrust:
    """Part of the tokens believed at a server that it really has, by the cached tokens that its answers report."""

    DENIALS = 3
    """Denials in a row after which beliefs are scaled down."""
    DENIED = 0.5
    """Share of the believed tokens below which a report denies them."""
    STEP = 0.3
    """Weight of an answer in the trust of a server that is not trusted wholly."""

    def __init__(self) -> None:
        self._denials: dict[int, int] = {}
        self._trust: dict[int, float] = {}

    def of(self, slot: int) -> float:
        return self._trust.get(slot, 1.0)

    def reported(self, slot: int, believed_tokens: float, cached_tokens: float) -> bool:
        """Record an answer of a server at which tokens were believed; return True if all beliefs there are to be
        dropped: it has denied ``DENIALS`` in a row.
        """
        if believed_tokens <= 0:
            return False
        ratio = min(1.0, cached_tokens / believed_tokens)
        is_denied = ratio < self.DENIED
        denials = self._denials[slot] = self._denials.get(slot, 0) + 1 if is_denied else 0
        if slot in self._trust:
            trust = self._trust[slot] + (ratio - self._trust[slot]) * self.STEP
            if trust > 1.0 - self.STEP / 2:
                del self._trust[slot]
            else:
                self._trust[slot] = trust
        elif denials == self.DENIALS:
            self._trust[slot] = ratio
            return True
        return False

    def forget(self, slot: int) -> None:
        self._denials.pop(slot, None)
        self._trust.pop(slot, None)


class AnswersDue:
    """Times at which answers that are not streamed were to be there: a server that does not answer is late."""

    def __init__(self) -> None:
        self._due: dict[int, OrderedDict[int, float]] = {}
        self._tickets = 0

    def add(self, slot: int, due_s: float) -> int:
        """Add an answer; return a ticket, never 0."""
        self._tickets += 1
        due = self._due.setdefault(slot, OrderedDict())
        due[self._tickets] = due_s
        if len(due) > MOST_DUE:
            due.popitem(last=False)
        return self._tickets

    def drop(self, slot: int, ticket: int) -> None:
        if (due := self._due.get(slot)) is not None:
            due.pop(ticket, None)

    def first_s(self, slot: int) -> float:
        """Return when the first of a server's answers was or is due; infinite if none is open."""
        due = self._due.get(slot)
        return min(due.values()) if due else math.inf

    def forget(self, slot: int) -> None:
        self._due.pop(slot, None)
