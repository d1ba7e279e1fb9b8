"""How often something may be done that others cause: soon while it is seldom, once a second while it goes on.

As routers damp the computation of routes (SPF throttling, RFC 8405): a failure is acted on without delay, also one that
comes in pieces (a plane that dies is found out satellite by satellite); a storm costs no more than a steady rate.
"""

from __future__ import annotations

import math

SHORT_HOLD_S = 0.02
LONG_HOLD_S = 1.0
_AT_ONCE = 64
"""A plane that dies makes some forty declarations, within two seconds."""


class Throttle:
    """At once, then ``short_hold_s`` apart; in any ``t`` seconds at most ``t / LONG_HOLD_S + at_once`` times."""

    def __init__(self, at_once: int = _AT_ONCE, short_hold_s: float = SHORT_HOLD_S) -> None:
        self._burst_s = (at_once - 1) * LONG_HOLD_S
        self._short_hold_s = short_hold_s
        self.open_s = 0.0
        """From when on it may be done (again)."""
        self._earned_s = -math.inf
        """Up to when the long holds of all times so far reach."""

    def is_open(self, now_s: float) -> bool:
        return now_s >= self.open_s

    def done(self, now_s: float) -> None:
        """It is being done."""
        self._earned_s = max(self._earned_s, now_s - self._burst_s) + LONG_HOLD_S
        self.open_s = max(now_s + self._short_hold_s, self._earned_s)
