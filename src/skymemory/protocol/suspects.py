"""Satellites that did not answer: whoever needs one fails at once, and pings of our own find out when it is back.

No operation waits for a suspect again. It is asked every now and then, ever more rarely: after a quarter of the time
for which it has been silent, between ``_SOONEST_S`` and ``_LATEST_S``. The first word from it ends the suspicion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from skymemory.constellation.torus import SatelliteId

_SOONEST_S = 0.25
_LATEST_S = 4.0
MOST_SUSPECTS = 64
"""What is suspected beyond that replaces who has been silent the longest: so many are asked at most."""


@dataclass(slots=True)
class _Suspicion:
    since_s: float
    ask_s: float


class Suspects:
    """Who they are, and when to ask each. Its owner tells it who has been heard."""

    def __init__(self) -> None:
        self._suspicions: dict[SatelliteId, _Suspicion] = {}
        self._fresh: list[SatelliteId] = []
        self.next_s = math.inf
        """None is to be asked earlier, and nothing else has changed."""
        self.added = 0
        """How many were added so far: who has looked at all of them need not look again until this has changed."""

    def __len__(self) -> int:
        return len(self._suspicions)

    def __contains__(self, satellite: SatelliteId) -> bool:
        return satellite in self._suspicions

    def add(self, satellite: SatelliteId, now_s: float) -> None:
        """It has been silent for too long."""
        if satellite in self._suspicions:
            return
        if len(self._suspicions) >= MOST_SUSPECTS:
            del self._suspicions[next(iter(self._suspicions))]
        self._suspicions[satellite] = _Suspicion(now_s, now_s + _SOONEST_S)
        self.added += 1
        self._fresh.append(satellite)
        self.next_s = min(self.next_s, now_s)

    def heard(self, satellite: SatelliteId) -> None:
        """It is there after all."""
        if self._suspicions.pop(satellite, None) is not None:
            self._look()

    def due(self, now_s: float) -> list[SatelliteId]:
        """Whom to ask now."""
        if now_s < self.next_s:
            return []
        asked = [satellite for satellite, suspicion in self._suspicions.items() if suspicion.ask_s <= now_s]
        for satellite in asked:
            suspicion = self._suspicions[satellite]
            silent_s = now_s - suspicion.since_s
            suspicion.ask_s = now_s + min(max(silent_s / 4, _SOONEST_S), _LATEST_S)
        self._look()
        return asked

    def ask_all(self, now_s: float) -> None:
        """All are to be asked now: things have changed."""
        for suspicion in self._suspicions.values():
            suspicion.ask_s = now_s
        self._look()

    def take_fresh(self) -> list[SatelliteId]:
        """Those that became suspect since the last time, and still are."""
        fresh, self._fresh = self._fresh, []
        return [satellite for satellite in fresh if satellite in self._suspicions]

    def _look(self) -> None:
        self.next_s = min((suspicion.ask_s for suspicion in self._suspicions.values()), default=math.inf)
