"""Migration as one satellite does it: copy, switch, delete.

When the box moves, chunks whose server is now elsewhere are sent to that satellite, a window at a time, and sent again
until acknowledged. Only then does the copy here start to age; it is deleted a grace period later, so that a reader who
still looks here finds it. No table and no coordinator: each satellite computes all of it from the clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.chunk_store import ChunkName, ChunkStore

BURST_CHUNKS = 10
"""Chunks of one MIGRATE request: as many as one segmentation-offload send carries."""


@dataclass(slots=True)
class Burst:
    """One MIGRATE request in flight: chunks of one key for one satellite."""

    request_id: int
    destination: SatelliteId
    names: list[ChunkName]
    deadline_s: float
    attempts: int = 1


class Handover:
    """What leaves this satellite: queued, in flight, and copied but not yet deleted."""

    def __init__(self, window_bursts: int, timeout_s: float, grace_s: float) -> None:
        self._window_bursts = window_bursts
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._queue: deque[tuple[SatelliteId, list[ChunkName]]] = deque()
        self._in_flight: dict[int, Burst] = {}
        self._doomed: dict[ChunkName, float] = {}
        self._next_request_id = 1
        self.retransmitted = 0

    @property
    def idle(self) -> bool:
        """Nothing queued or in flight (copies may still await deletion)."""
        return not self._queue and not self._in_flight

    def plan(self, store: ChunkStore, where: Callable[[bytes], SatelliteId], here: SatelliteId) -> None:
        """Queue everything that ``where`` (packed tag → satellite) puts elsewhere; forget older plans."""
        self._queue.clear()
        on_its_way = {name for burst in self._in_flight.values() for name in burst.names}
        for tag in store.tags():
            destination = where(tag)
            if destination == here:
                for name in store.names_of_tag(tag):
                    self._doomed.pop(name, None)
            else:
                names = (
                    name for name in store.names_of_tag(tag) if name not in on_its_way and name not in self._doomed
                )
                self.enqueue(destination, names)

    def enqueue(self, destination: SatelliteId, names: Iterable[ChunkName]) -> None:
        """Queue chunks for a satellite, in bursts of one key each."""
        by_key: dict[bytes, list[ChunkName]] = {}
        for name in names:
            by_key.setdefault(name[0], []).append(name)
        for same_key in by_key.values():
            same_key.sort()
            for at in range(0, len(same_key), BURST_CHUNKS):
                self._queue.append((destination, same_key[at : at + BURST_CHUNKS]))

    def keep(self, name: ChunkName) -> None:
        """The chunk was stored here anew: it is not to be deleted any more."""
        self._doomed.pop(name, None)

    def bursts_to_send(self, now_s: float) -> list[Burst]:
        """Bursts that are due: fresh ones while the window is open, and those not acknowledged in time."""
        due = []
        for burst in self._in_flight.values():
            if burst.deadline_s <= now_s:
                burst.attempts += 1
                burst.deadline_s = now_s + self._timeout_s * min(2**burst.attempts, 32)
                self.retransmitted += len(burst.names)
                due.append(burst)
        while self._queue and len(self._in_flight) < self._window_bursts:
            destination, names = self._queue.popleft()
            burst = Burst(self._next_request_id, destination, names, now_s + self._timeout_s)
            self._next_request_id = self._next_request_id % 0xFFFFFFFF + 1
            self._in_flight[burst.request_id] = burst
            due.append(burst)
        return due

    def forget(self, burst: Burst, gone: Iterable[ChunkName]) -> None:
        """Chunks that were evicted or deleted meanwhile need no journey."""
        absent = set(gone)
        burst.names = [name for name in burst.names if name not in absent]
        if not burst.names:
            self._in_flight.pop(burst.request_id, None)

    def acknowledged(self, request_id: int, names: Iterable[ChunkName], now_s: float) -> int:
        """The other satellite has these; how many of them we had been waiting for."""
        burst = self._in_flight.get(request_id)
        if burst is None:
            return 0
        done = set(names).intersection(burst.names)
        for name in done:
            self._doomed[name] = now_s + self._grace_s
        self.forget(burst, done)
        return len(done)

    def refused(self, request_id: int) -> None:
        """The other satellite cannot take the burst: what is there stays here until it is evicted or asked for."""
        self._in_flight.pop(request_id, None)

    def to_delete(self, now_s: float) -> list[ChunkName]:
        """Copied chunks whose grace is over; each is returned once."""
        due = []
        for name, deadline_s in self._doomed.items():
            if deadline_s > now_s:
                break
            due.append(name)
        for name in due:
            del self._doomed[name]
        return due

    def next_timer_s(self) -> float | None:
        times = [burst.deadline_s for burst in self._in_flight.values()]
        if self._doomed:
            times.append(next(iter(self._doomed.values())))
        return min(times) if times else None
