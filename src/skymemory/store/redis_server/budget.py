"""Memory budget that clients share: bytes of values in transfer, and of commands before EXEC.

Clients wait in order of arrival, but last those at addresses that lately had to free memory. For the first waiter

1. the largest overdue client is disconnected: its next bytes took longer than ``SLOW_S`` plus their time at
   ``LEAST_SHARED_BYTES_PER_S``, which each such client halves at its address, for ``BLAMED_S``;
2. after ``fair_s``, if the first wants no more than a share (the limit divided by the clients that hold memory or
   wait), so is the largest that holds more, and is in a transfer;
3. if all holders are waiting themselves, the largest receives BUSY.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from skymemory.pacing import ByteBudget

BRIEF_BYTES = 64 << 10
"""Size up to which values do not wait."""
SLOW_S = 1.0
LEAST_SHARED_BYTES_PER_S = 1 << 20
BLAMED_S = 60.0
_MOST_HALVED = 4
_LOOK_AGAIN_S = 0.02


@dataclass(slots=True, eq=False)
class MemoryClaim:
    """Memory that a client holds, and when its next bytes are due: a late client may be disconnected for others."""

    end: Callable[[], object]  # disconnects the client, from any thread
    held_bytes: int = 0
    due_s: float = math.inf  # infinite: no bytes are due
    waits: bool = False  # for more memory
    is_ended: bool = False  # disconnected, to free its memory
    address: str = ""
    allowed_s: float = 0.0  # time for the next bytes

    def expect(self, size_bytes: int) -> None:
        self.allowed_s = SLOW_S + size_bytes / LEAST_SHARED_BYTES_PER_S
        self.due_s = time.monotonic() + self.allowed_s

    def on_moved(self, size_bytes: int) -> None:
        more_s = size_bytes / LEAST_SHARED_BYTES_PER_S
        self.due_s = min(self.due_s + more_s, time.monotonic() + self.allowed_s)


@dataclass(slots=True, eq=False)
class BudgetWaiter:
    claim: MemoryClaim
    size_bytes: int
    since_s: float
    is_refused: bool = False


@dataclass(slots=True)
class Room:
    """Policy: who gets memory, and who must free it. Not thread-safe."""

    bytes: ByteBudget
    fair_s: float
    holders: dict[MemoryClaim, None] = field(default_factory=dict)
    waiting: list[BudgetWaiter] = field(default_factory=list)
    blamed: dict[str, tuple[int, float]] = field(default_factory=dict)  # by address: times blamed, and the last
    _first: BudgetWaiter | None = None
    _first_until_s: float = 0.0

    def change(self, claim: MemoryClaim, by_bytes: int) -> None:
        self.bytes.change(by_bytes)
        claim.held_bytes += by_bytes
        if claim.held_bytes:
            self.holders[claim] = None
        else:
            self.holders.pop(claim, None)

    def first(self, now_s: float) -> BudgetWaiter:
        if self._first is None or now_s >= self._first_until_s:
            self._first_until_s = now_s + _LOOK_AGAIN_S
            self._first = min(self.waiting, key=lambda waiter: self._times_blamed(waiter.claim, now_s) > 0)
        return self._first

    def add(self, waiter: BudgetWaiter) -> None:
        self.waiting.append(waiter)
        self._first = None

    def remove(self, waiter: BudgetWaiter) -> None:
        self.waiting.remove(waiter)
        self._first = None

    def blame(self, claim: MemoryClaim, now_s: float) -> None:
        """Record at its address that a client had to free memory because it was overdue."""
        if not self._is_overdue(claim, now_s):
            return
        self._first = None
        self.blamed = {address: one for address, one in self.blamed.items() if now_s - one[1] < BLAMED_S}
        self.blamed[claim.address] = self._times_blamed(claim, now_s) + 1, now_s

    def payer(self, now_s: float) -> MemoryClaim | None:
        """Return the client that must free memory for the first waiter; None if memory will soon be free, or no client
        is at fault.
        """
        first = self.first(now_s)
        if any(claim.is_ended for claim in self.holders):
            return None
        moving = [claim for claim in self.holders if not claim.waits]
        if not moving:
            return _largest(self.holders)
        overdue = _largest(claim for claim in moving if self._is_overdue(claim, now_s))
        if overdue is not None or now_s - first.since_s < self.fair_s:
            return overdue
        share_bytes = self.bytes.limit_bytes / len(self.holders.keys() | {waiter.claim for waiter in self.waiting})
        if first.size_bytes > share_bytes:
            return None
        return _largest(claim for claim in moving if claim.due_s < math.inf and claim.held_bytes > share_bytes)

    def _times_blamed(self, claim: MemoryClaim, now_s: float) -> int:
        times, at_s = self.blamed.get(claim.address, (0, -math.inf))
        return times if now_s - at_s < BLAMED_S else 0

    def _is_overdue(self, claim: MemoryClaim, now_s: float) -> bool:
        halvings = min(self._times_blamed(claim, now_s), _MOST_HALVED)
        return claim.due_s - claim.allowed_s * (1 - 0.5**halvings) <= now_s


def _largest(claims: Iterable[MemoryClaim]) -> MemoryClaim | None:
    return max(claims, key=lambda claim: claim.held_bytes, default=None)


class SharedBudget:
    """Thread-safe ``Room``."""

    def __init__(self, limit_bytes: int, fair_s: float = 15.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._room = Room(ByteBudget(limit_bytes), fair_s)
        self._clock = clock
        self._freed = threading.Condition()
        self.ended_clients = 0

    @property
    def used_bytes(self) -> int:
        return self._room.bytes.used_bytes

    def take(self, claim: MemoryClaim, size_bytes: int, timeout_s: float, *, brief_bytes: int = BRIEF_BYTES) -> bool:
        """Take memory, waiting for about ``timeout_s``; up to ``brief_bytes`` without waiting."""
        room = self._room
        with self._freed:
            at_once = size_bytes <= brief_bytes or (not room.waiting and room.bytes.has_room(size_bytes))
            if not at_once and not self._wait(BudgetWaiter(claim, size_bytes, self._clock()), timeout_s):
                return False
            room.change(claim, size_bytes)
            return True

    def give_back(self, claim: MemoryClaim, size_bytes: int) -> None:
        if size_bytes:
            with self._freed:
                self._room.change(claim, -size_bytes)
                self._freed.notify_all()

    def _wait(self, waiter: BudgetWaiter, timeout_s: float) -> bool:
        """Wait for memory; False on timeout, refused or disconnected. The first waiter makes others free memory."""
        room, claim = self._room, waiter.claim
        deadline_s = waiter.since_s + timeout_s
        room.add(waiter)
        claim.waits = True
        try:
            while True:
                now_s = self._clock()
                is_first = room.first(now_s) is waiter
                if is_first and room.bytes.has_room(waiter.size_bytes):
                    return True
                if now_s >= deadline_s or waiter.is_refused or claim.is_ended:
                    return False
                if is_first and (payer := room.payer(now_s)) is not None:
                    self._charge(payer, now_s)
                self._freed.wait(_LOOK_AGAIN_S)
        finally:
            claim.waits = False
            room.remove(waiter)
            self._freed.notify_all()

    def _charge(self, payer: MemoryClaim, now_s: float) -> None:
        """Make a client free memory: refuse it if it waits, else disconnect it."""
        if payer.waits:
            for waiter in self._room.waiting:
                waiter.is_refused |= waiter.claim is payer
            self._freed.notify_all()
            return
        payer.is_ended = True
        self._room.blame(payer, now_s)
        self.ended_clients += 1
        payer.end()
