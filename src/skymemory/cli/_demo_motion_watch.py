"""What the satellites say of themselves during the moving demo, added up over restarts."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable

from skymemory.constellation.torus import SatelliteId
from skymemory.testbed.control import Housekeeping, ping_all
from skymemory.testbed.plan import ConstellationPlan

_COUNTED = ("chunks_migrated_out", "chunks_served", "chunks_set", "chunks_evicted", "migrations_retransmitted")
_PATIENCE_S = 0.4
_EVERY_S = 0.6


class Watch(threading.Thread):
    """Asks every satellite now and then. Counters of one that died and came back go on from where they were."""

    def __init__(self, plan: ConstellationPlan) -> None:
        super().__init__(name="watch", daemon=True)
        self._plan = plan
        self._latest: dict[SatelliteId, Housekeeping] = {}
        self._earlier: defaultdict[str, int] = defaultdict(int)
        self._asking = threading.Lock()
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            self.ask()

    def stop(self) -> None:
        self._stopping.set()
        if self.is_alive():
            self.join()

    def ask(self) -> int:
        """Ask all satellites now; how many answered."""
        with self._asking:
            answers = ping_all(self._plan, _PATIENCE_S)
            for satellite, found in answers.items():
                if found is not None:
                    before = self._latest.get(satellite)
                    if before is not None and any(found[name] < before[name] for name in _COUNTED):
                        self._keep(before)
                    self._latest[satellite] = found
            return sum(found is not None for found in answers.values())

    def died(self, satellites: Iterable[SatelliteId]) -> tuple[int, int]:
        """These are dead: ``(chunks, bytes)`` that they held when they last spoke."""
        with self._asking:
            gone = [found for satellite in satellites if (found := self._latest.pop(satellite, None)) is not None]
            for found in gone:
                self._keep(found)
        return sum(found["chunks_held"] for found in gone), sum(found["memory_used_bytes"] for found in gone)

    def _keep(self, found: Housekeeping) -> None:
        for name in _COUNTED:
            self._earlier[name] += found[name]

    def total(self, name: str) -> int:
        """Sum of a counter over all satellites since the start."""
        return self._earlier[name] + sum(found[name] for found in list(self._latest.values()))

    @property
    def holding(self) -> frozenset[SatelliteId]:
        """Satellites that held chunks when they last spoke."""
        return frozenset(satellite for satellite, found in list(self._latest.items()) if found["chunks_held"])


def wait_for_answers(watch: Watch, satellites: int, patience_s: float) -> int:
    """How many satellites answer, as soon as all do or ``patience_s`` is over."""
    deadline_s = time.monotonic() + patience_s
    while (answering := watch.ask()) < satellites and time.monotonic() < deadline_s:
        time.sleep(_EVERY_S / 4)
    return answering
