"""How late a host is with its own work, as its transport measures it: so that its own delay is not read as the death of
its neighbours.

A process that was stopped, or that has less processor than it needs, reads everything late, answers included. While it
is late its satellites wait longer for others and put off background work. What is measured is how long events waited
before they were handled. A host is overloaded when even the *shortest* wait has been long for a while (CoDel, RFC
8289): a single long wait is a burst, which queues are there to absorb.
"""

from __future__ import annotations

import math

LATE_S = 0.05
"""A wait beyond this is late."""
_PERSISTS_S = 0.25
"""A host that has handled nothing on time for so long is overloaded: its background work yields to answers."""
_FADES_S = 0.5
"""Time constant by which the worst wait decays."""


class Lateness:
    """Of one host; shared by the machines that it runs."""

    def __init__(self) -> None:
        self._worst_s = 0.0
        self._worst_at_s = -math.inf
        self._on_time_s = math.inf
        """When something was last on time; infinite: nothing has been late yet."""

    def measured(self, late_s: float, now_s: float) -> None:
        """Something was handled ``late_s`` after it was due, ``now_s``. To be called for what is on time, too."""
        if late_s <= LATE_S:
            self._on_time_s = now_s
        elif self._on_time_s == math.inf:
            self._on_time_s = now_s - late_s
        if late_s > 0.0 and late_s >= self.at(now_s):
            self._worst_s, self._worst_at_s = late_s, now_s

    def at(self, now_s: float) -> float:
        """The longest wait of the recent past in seconds, decaying."""
        if not self._worst_s:
            return 0.0
        return self._worst_s * math.exp(-max(0.0, now_s - self._worst_at_s) / _FADES_S)

    def is_late(self, now_s: float) -> bool:
        """Whether it is overloaded."""
        return now_s - self._on_time_s > _PERSISTS_S
