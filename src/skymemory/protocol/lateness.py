"""How late a host is with its own work: measured by whoever runs its machines, and never taken for the death of others.

A process that was stopped, or that has less processor than it needs, hears everything late: also the answers of those
who are alive. So its satellites wait longer for others while they are late themselves, and put off what nobody waits
for. What is measured is how long things waited before they were looked at, and overloaded is a host whose *shortest*
wait is long (CoDel, RFC 8289): one long wait alone is a hiccup, which a queue is there for.
"""

from __future__ import annotations

import math

LATE_S = 0.05
"""A wait beyond this is late."""
_PERSISTS_S = 0.25
"""With nothing on time for so long a host is overloaded: its background work yields to answers."""
_FADES_S = 0.5
"""The worst wait counts for less and less: a third of it is left after so long."""


class Lateness:
    """Of one host; shared by the machines that it runs."""

    def __init__(self) -> None:
        self._worst_s = 0.0
        self._worst_at_s = -math.inf
        self._on_time_s = math.inf
        """When something was last on time: nothing has been late yet."""

    def measured(self, late_s: float, now_s: float) -> None:
        """Something was looked at ``late_s`` after its time, ``now_s``. What is on time must be told as well."""
        if late_s <= LATE_S:
            self._on_time_s = now_s
        elif self._on_time_s == math.inf:
            self._on_time_s = now_s - late_s
        if late_s > 0.0 and late_s >= self.at(now_s):
            self._worst_s, self._worst_at_s = late_s, now_s

    def at(self, now_s: float) -> float:
        """How late it has been of late: the worst, fading."""
        if not self._worst_s:
            return 0.0
        return self._worst_s * math.exp(-max(0.0, now_s - self._worst_at_s) / _FADES_S)

    def is_late(self, now_s: float) -> bool:
        """Whether it is overloaded."""
        return now_s - self._on_time_s > _PERSISTS_S
