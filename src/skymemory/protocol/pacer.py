"""When a satellite sends the next bursts of what it hands over: evenly, instead of all at once.

All satellites see the box move in the same instant. If each sent what has to leave as fast as it could, whoever reads
in that instant would wait behind all of it, on the links and in the host processes on the way. So it is spread over the
time there is: until readers look for it in its new place, and until the box moves on.
"""

from __future__ import annotations

from skymemory.constellation.torus import SatelliteId

SPREAD_S = 0.2
"""So long after a move the last burst is sent, if that needs no more than the usual pace. What is sent then arrives
before readers look for it in its new place (``followed_clock.HANDED_OVER_S`` after the move).
"""
SPREAD_SHARE = 0.8
"""Of the time between moves: the rest is for the journey."""
_MOST_GAP_S = 0.010
"""A few bursts need not take all the time there is."""
_GROUP_S = 0.008
_MOST_GROUPED = 4
"""Where bursts would follow on each other faster than every ``_GROUP_S``, up to so many leave together: sent one by one
they cost every satellite on their way nearly twice the processor, and so few delay a reader by less than that.
"""
_GOLDEN = 0.6180339887498949


def phase_of(here: SatelliteId) -> float:
    """When in its gap a satellite begins, 0 … 1: those of one row or column lie apart whatever their number, as
    multiples of the golden ratio do.
    """
    return (here.plane * _GOLDEN + here.slot * _GOLDEN * _GOLDEN) % 1.0


class Pacer:
    """A token bucket of two groups of bursts: in any ``t`` seconds, at most ``t / step_s + 2`` of them leave.

    ``usual_gap_s`` is the pace that links and cores are loaded with. It is gone below only where the box would move on
    before all is sent. 0: no pace at all.
    """

    def __init__(self, usual_gap_s: float = 0.0, phase: float = 0.0) -> None:
        self.next_s = 0.0
        """When the next burst may leave."""
        self.gap_s = usual_gap_s
        """Seconds a burst, on average."""
        self.group = 1
        """Bursts that leave together."""
        self._left = 1
        self.step_s = usual_gap_s
        """Between groups."""
        self._usual_gap_s = usual_gap_s
        self._phase = phase

    def spread(self, bursts: int, now_s: float, interval_s: float, in_haste: bool = False) -> None:
        """The box has moved: so many bursts have to leave, and it moves again ``interval_s`` from now. ``in_haste``:
        an operator moved it, and readers, who had no clock to tell them, look in the new place at once.
        """
        if not self._usual_gap_s:
            return
        bursts, time_s = max(1, bursts), SPREAD_SHARE * interval_s
        spread_s = 0.0 if in_haste else SPREAD_S
        self.gap_s = min(max(spread_s / bursts, self._usual_gap_s), time_s / bursts, _MOST_GAP_S)
        self._left = self.group = max(1, min(_MOST_GROUPED, int(_GROUP_S / self.gap_s)))
        self.step_s = self.gap_s * bursts / -(-bursts // self.group)
        self.next_s = now_s + self._phase * self.step_s

    def sent(self, now_s: float) -> None:
        """A burst has left."""
        if not self.gap_s:
            return
        self._left -= 1
        if not self._left:
            self._left = self.group
            # An alarm may be late by a millisecond or two: what was missed is made up for, but never more than a group.
            self.next_s = max(self.next_s, now_s - self.step_s) + self.step_s

    def relax(self) -> None:
        """Nothing is left to send: what turns up later (strays) goes one by one at the usual pace."""
        if self.gap_s != self._usual_gap_s:
            self.gap_s = self.step_s = self._usual_gap_s
            self._left = self.group = 1
