"""Memory budget that clients share: bytes of values in transfer, and of commands queued for EXEC.

Clients wait in order of arrival. To let the first proceed, a client gives way:

1. the largest overdue client, whose next bytes took longer than ``SLOW_S`` plus their time at
   ``LEAST_SHARED_BYTES_PER_S``;
2. after ``fair_s``, unless the first wants more than a share (the limit divided by the clients that hold memory or
   wait): the largest in a transfer that holds more;
3. if all holders are waiting themselves: the largest.

It loses its connection (1, 2) or receives BUSY (3).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from skymemory.pacing import ByteBudget

BRIEF_BYTES = 64 << 10
"""Size up to which values do not wait: slow large transfers cannot block them."""
SLOW_S = 1.0
LEAST_SHARED_BYTES_PER_S = 1 << 20
_LOOK_AGAIN_S = 0.1


@dataclass(slots=True, eq=False)
class MemoryClaim:
    """Memory that a client holds. Any thread may call ``end``, which disconnects it."""

    end: Callable[[], object]
    held_bytes: int = 0
    due_s: float = math.inf
    waits: bool = False
    is_ended: bool = False


@dataclass(slots=True, eq=False)
class BudgetWaiter:
    claim: MemoryClaim
    size_bytes: int
    since_s: float
    is_refused: bool = False


@dataclass(slots=True)
class Room:
    """Policy: who gets memory, and who gives way. Not thread-safe."""

    bytes: ByteBudget
    fair_s: float
    holders: dict[MemoryClaim, None] = field(default_factory=dict)
    waiting: list[BudgetWaiter] = field(default_factory=list)

    def change(self, claim: MemoryClaim, by_bytes: int) -> None:
        self.bytes.change(by_bytes)
        claim.held_bytes += by_bytes
        if claim.held_bytes:
            self.holders[claim] = None
        else:
            self.holders.pop(claim, None)

    def payer(self, now_s: float) -> MemoryClaim | None:
        """Return the client that must give way; None if memory is about to be freed, or no client is at fault."""
        first = self.waiting[0]
        if any(claim.is_ended for claim in self.holders):
            return None
        moving = [claim for claim in self.holders if not claim.waits]
        if not moving:
            return _largest(self.holders)
        overdue = _largest(claim for claim in moving if claim.due_s <= now_s)
        if overdue is not None or now_s - first.since_s < self.fair_s:
            return overdue
        share_bytes = self.bytes.limit_bytes / len(self.holders.keys() | {waiter.claim for waiter in self.waiting})
        if first.size_bytes > share_bytes:
            return None
        return _largest(claim for claim in moving if claim.due_s < math.inf and claim.held_bytes > share_bytes)


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
        """Wait for memory, about ``timeout_s``. Up to ``brief_bytes`` are admitted at once."""
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
        room, claim = self._room, waiter.claim
        deadline_s = waiter.since_s + timeout_s
        room.waiting.append(waiter)
        claim.waits = True
        try:
            while not (room.waiting[0] is waiter and room.bytes.has_room(waiter.size_bytes)):
                now_s = self._clock()
                if now_s >= deadline_s or waiter.is_refused or claim.is_ended:
                    return False
                if room.waiting[0] is waiter and (payer := room.payer(now_s)) is not None:
                    self._charge(payer)
                self._freed.wait(_LOOK_AGAIN_S)
            return True
        finally:
            claim.waits = False
            room.waiting.remove(waiter)
            self._freed.notify_all()

    def _charge(self, payer: MemoryClaim) -> None:
        if payer.waits:
            for waiter in self._room.waiting:
                waiter.is_refused |= waiter.claim is payer
            self._freed.notify_all()
            return
        payer.is_ended = True
        self.ended_clients += 1
        payer.end()


def due_s(size_bytes: int) -> float:
    return time.monotonic() + SLOW_S + size_bytes / LEAST_SHARED_BYTES_PER_S
