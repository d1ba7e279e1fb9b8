"""Plan of a satellite's handover: copy, switch, delete.

After a move of the box, chunks that belong elsewhere are sent there; the local copy stays for a grace period, for
readers who still look here. All follows from the clock. A leaving chunk is

1. *queued*, in bursts of a key and destination (``plan``, ``enqueue``);
2. *in flight*, retransmitted after a timeout (``bursts_to_send``);
3. *copied*: acknowledged, to be deleted after the grace period (``acknowledged``, ``to_delete``).

A *stray* belongs elsewhere in none of these states: its writer missed the last move, its sender's clock is ahead, or
its destination refused it. It is examined again only when due, or satellites that disagree would send it to and fro. A
chunk that leaves *as another copy* is only copied.

As background traffic, bursts in flight become fewer when answers are late (LEDBAT, RFC 6817) or missing.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.congestion import RoundTrip, Throttle
from skymemory.protocol.satellite.memory import ChunkName, ChunkStore, names_by_tag
from skymemory.protocol.satellite.overload import LATE_S, Lateness

AsCopy = tuple[bytes, int, int]
"""Key, 0-based index and replica as which a chunk leaves."""
Leaving = ChunkName | AsCopy
BURST_CHUNKS = 10
SPREAD_S = 0.2
"""Seconds after a move by which the last burst should leave."""
SPREAD_SHARE = 0.8
_MOST_ATTEMPTS = 12
_MOST_BACKOFF = 4
_RETRY_S = 10.0
_MOST_RETRY_S = 160.0
_DELETED_TOGETHER_S = 0.05
_SLOW = 2.0
_MOST_TIMEOUT_S = 2.0
_MOST_QUEUED = 1 << 20
_TARGET_DELAY_S = 0.5
_MOST_DECREASE = 16.0
_LEAST_BURSTS = 2.0
_REMEMBERED_TRIPS = 1024
_REMEMBERED_RETRIES = 1 << 16
_MOST_GAP_S = 0.010
_GROUP_S = 0.008
_MOST_GROUPED = 4
_ROUNDING = 1e-9
_GOLDEN = 0.6180339887498949


@dataclass(slots=True, eq=False)
class MigrateBurst:
    """MIGRATE request in flight: chunks of a key."""

    request_id: int
    destination: SatelliteId
    names: list[Leaving]
    # An overdue burst of an earlier plan is not sent again: its chunks become strays. Answers to it still count.
    plan: int
    """Number of the plan, which each move increments."""
    sent_s: float
    deadline_s: float
    last_sent_s: float
    attempts: int = 1
    answered: bool = False
    spared: bool = False
    """True if its deadline was extended for the own host's lateness."""


MOST_REQUEST_ID = 0x3FFFFFFF


class ChunkHandover:
    def __init__(
        self,
        window_bursts: int,
        timeout_s: float,
        grace_s: float,
        pacer: Pacer | None = None,
        lateness: Lateness | None = None,
        first_request_id: int = 0,
    ) -> None:
        self.grace_s = grace_s
        self.fresh_from_s = 0.0
        """Time before which ``Sweep`` lets no new burst leave."""
        self.moved = False
        self.retransmitted = 0
        self.chunks_planned = 0
        self._lateness = lateness or Lateness()
        self._most_bursts = window_bursts
        self._window_bursts = float(window_bursts)
        self._heard_s = -math.inf
        self._window_halved_until_s = -math.inf
        self._shortest_round_trip_s: dict[SatelliteId, float] = {}
        self._timeout_s = timeout_s
        self._pacer = pacer or Pacer()
        self._round_trip = RoundTrip()
        self._bursts_to_leave: deque[tuple[SatelliteId, list[Leaving]]] = deque()
        self._queued_chunks: set[Leaving] = set()
        self._leaving_as_copy: dict[Leaving, AsCopy] = {}
        self._in_flight: dict[int, MigrateBurst] = {}
        self._deletion_s: dict[ChunkName, float] = {}
        self._stray_due_s: dict[Leaving, float] = {}
        self._stray_times: list[tuple[float, Leaving]] = []
        self._backoffs: dict[tuple[SatelliteId, bytes], tuple[float, float]] = {}
        """Time of the next try and wait, by destination and key."""
        self._unanswered: dict[Leaving, tuple[SatelliteId, bytes]] = {}
        """Strays whose destination was silent, with their entry of ``_backoffs``."""
        self._retry_throttle = Throttle()
        self._retry_waits = False
        self._plan_number = 0
        self._may_leave_as_copies = False
        self._next_request_id = first_request_id % MOST_REQUEST_ID + 1

    @property
    def idle(self) -> bool:
        return not (self.moved or self._bursts_to_leave or self._in_flight or self._stray_due_s)

    @property
    def at_rest(self) -> bool:
        return self.idle and not self._deletion_s

    def is_settled(self, key: bytes, indices: Iterable[int]) -> bool:
        """Return True if none of these chunks is leaving, or awaits deletion after it left."""
        if self.at_rest:
            return True
        if (
            self.moved
            or self._may_leave_as_copies
            or any(burst.names and burst.names[0][0] == key for burst in self._in_flight.values())
        ):
            return False
        names = [(key, index) for index in indices]
        return not any(
            name in waiting for waiting in (self._queued_chunks, self._stray_due_s, self._deletion_s) for name in names
        )

    # --- Plan and queue ---

    def plan(self, store: ChunkStore, where: Callable[[bytes], SatelliteId], own: SatelliteId) -> list[AsCopy]:
        """Replace the plan: queue every chunk that ``where`` (by packed tag) puts elsewhere.

        Return chunks that were to leave as another copy, whose new destination is not known here.
        """
        leaving_as_others = sorted(self._get_leaving_as_copies())
        if leaving_as_others:
            for burst in list(self._in_flight.values()):
                self.forget(burst, leaving_as_others)
        self.moved = False
        self._leaving_as_copy.clear()
        self._plan_number += 1
        self._bursts_to_leave.clear()
        self._queued_chunks.clear()
        self._stray_due_s.clear()
        self._stray_times.clear()
        self._backoffs.clear()
        self._unanswered.clear()
        in_flight = {name for burst in self._in_flight.values() for name in burst.names}
        leaving: dict[bytes, list[tuple[SatelliteId, ChunkName]]] = {}
        self.chunks_planned += len(store)
        for tag, names in names_by_tag(store.shares).items():
            destination = where(tag)
            if destination == own:
                for name in names if self._deletion_s else ():
                    self._deletion_s.pop(name, None)
            else:
                for name in names:
                    if name not in in_flight and name not in self._deletion_s:
                        leaving.setdefault(name[0], []).append((destination, name))
        # In the order of eviction, so that chunks have the same order at their destination.
        for key in store.order() if leaving else ():
            for destination in sorted({to for to, _ in leaving.get(key, ())}):
                self.enqueue(destination, (name for to, name in leaving[key] if to == destination))
        return leaving_as_others

    def spread(self, now_s: float, interval_s: float, urgent: bool = False) -> None:
        self._pacer.spread(len(self._bursts_to_leave), now_s, interval_s, urgent)

    def enqueue(self, destination: SatelliteId, names: Iterable[Leaving]) -> None:
        by_key: dict[bytes, list[Leaving]] = {}
        for name in names:
            self._may_leave_as_copies |= len(name) == 3
            if name not in self._queued_chunks and len(self._queued_chunks) < _MOST_QUEUED:
                self._queued_chunks.add(name)
                by_key.setdefault(name[0], []).append(name)
        for same_key in by_key.values():
            same_key.sort()
            for at in range(0, len(same_key), BURST_CHUNKS):
                self._bursts_to_leave.append((destination, same_key[at : at + BURST_CHUNKS]))

    def keep(self, key: bytes, indices: Iterable[int]) -> None:
        """Record chunks as stored again: earlier ACKs must not delete them."""
        if not (self._deletion_s or self._stray_due_s or self._in_flight):
            return
        of_key = [burst for burst in self._in_flight.values() if burst.names and burst.names[0][0] == key]
        for index in indices:
            name = (key, index)
            self._deletion_s.pop(name, None)
            self._stray_due_s.pop(name, None)
            self._unanswered.pop(name, None)
            for burst in of_key:
                if name in burst.names:
                    burst.names.remove(name)

    def leave_as(self, name: ChunkName, replica: int) -> None:
        """Let a chunk leave as copy ``replica``, unless it has arrived: another copy takes its place."""
        copy = (*name, replica)
        self._may_leave_as_copies = True
        if self._deletion_s.pop(name, None) is not None:
            return
        for burst in self._in_flight.values():
            if name in burst.names:
                burst.names[burst.names.index(name)] = copy
                return
        if name in self._queued_chunks and name not in self._leaving_as_copy:
            self._queued_chunks.discard(name)
            self._queued_chunks.add(copy)
            self._leaving_as_copy[name] = copy
        else:
            self.stray(copy, self._stray_due_s.pop(name, 0.0))

    # --- Strays ---

    def stray(self, name: Leaving, due_s: float) -> None:
        if name not in self._stray_due_s and name not in self._queued_chunks:
            self._may_leave_as_copies |= len(name) == 3
            self._stray_due_s[name] = due_s
            heapq.heappush(self._stray_times, (due_s, name))

    def strays_due(self, now_s: float) -> list[Leaving]:
        """Remove and return the strays to be examined again now."""
        if self._retry_waits:
            self.retry_unanswered(now_s)
        due_strays = []
        while self._stray_times and self._stray_times[0][0] <= now_s:
            time_s, name = heapq.heappop(self._stray_times)
            if self._stray_due_s.get(name) == time_s:
                del self._stray_due_s[name]
                self._unanswered.pop(name, None)
                due_strays.append(name)
        return due_strays

    # --- Bursts and their answers ---

    @property
    def window_bursts(self) -> int:
        return int(self._window_bursts)

    def bursts_to_send(self, now_s: float) -> list[MigrateBurst]:
        """Return overdue bursts, and new bursts while the window is open."""
        # 1. Retransmissions.
        to_send = []
        late_s = min(self._lateness.at(now_s), _MOST_TIMEOUT_S)
        for burst in [burst for burst in self._in_flight.values() if burst.deadline_s <= now_s]:
            if late_s > LATE_S and not burst.spared:  # its answer may wait in the own host's queue
                burst.spared, burst.deadline_s = True, now_s + late_s
                continue
            if burst.attempts == _MOST_ATTEMPTS or not burst.names:
                self.refused(burst.request_id, now_s)
                continue
            if burst.plan != self._plan_number:  # planned for the box before it moved
                del self._in_flight[burst.request_id]
                for name in burst.names:
                    self.stray(name, now_s)
                continue
            if now_s < self._pacer.next_s:
                burst.deadline_s = self._pacer.next_s
                continue
            self._pacer.sent(now_s)
            # No answer since it was sent.
            if self._heard_s < burst.last_sent_s and now_s >= self._window_halved_until_s:
                self._window_bursts = max(_LEAST_BURSTS, self._window_bursts / 2)
                self._window_halved_until_s = now_s + self._burst_timeout_s()
            burst.last_sent_s = now_s
            burst.deadline_s = now_s + self._burst_timeout_s() * min(2**burst.attempts, _MOST_BACKOFF) + 2 * late_s
            burst.spared = False
            burst.attempts += 1
            self.retransmitted += len(burst.names)
            to_send.append(burst)
        # 2. New bursts.
        fresh_from_s = self._get_next_burst_s()
        while self._bursts_to_leave and now_s >= fresh_from_s and len(self._in_flight) < int(self._window_bursts):
            destination, names = self._bursts_to_leave.popleft()
            if self._leaving_as_copy:
                names = [self._leaving_as_copy.pop(name, name) for name in names]
            self._queued_chunks.difference_update(names)
            deadline_s = now_s + self._burst_timeout_s() + 2 * late_s
            burst = MigrateBurst(self._next_request_id, destination, names, self._plan_number, now_s, deadline_s, now_s)
            self._next_request_id = self._next_request_id % MOST_REQUEST_ID + 1
            self._in_flight[burst.request_id] = burst
            to_send.append(burst)
            self._pacer.sent(now_s)
            fresh_from_s = self._get_next_burst_s()
        if not self._bursts_to_leave:
            self._pacer.relax()
        return to_send

    def _burst_timeout_s(self) -> float:
        return max(self._timeout_s, min(_SLOW * self._round_trip.smoothed_s, _MOST_TIMEOUT_S))

    def _get_next_burst_s(self) -> float:
        return max(self.fresh_from_s, self._pacer.next_s)

    def forget(self, burst: MigrateBurst, names: Iterable[Leaving]) -> None:
        absent = set(names)
        burst.names = [name for name in burst.names if name not in absent]
        if not burst.names:
            self._in_flight.pop(burst.request_id, None)

    def awaits(self, request_id: int, satellite: SatelliteId) -> bool:
        burst = self._in_flight.get(request_id)
        return burst is not None and burst.destination == satellite

    def acknowledged(self, request_id: int, names: Iterable[ChunkName], now_s: float, sent_s: float = 0.0) -> int:
        """Record an ACK of a transmission at ``sent_s``. Return how many chunks were awaited."""
        burst = self._in_flight.get(request_id)
        if burst is None:
            return 0
        self._heard_s = now_s
        round_trip_s = now_s - max(burst.sent_s, sent_s)  # the echo says which transmission was acknowledged
        self._round_trip.sample(round_trip_s)
        if not burst.answered:
            self._adjust_window(burst.destination, round_trip_s)
        burst.answered = True
        stored = set(names)
        acknowledged = [name for name in burst.names if name[:2] in stored]
        for name in acknowledged:
            if len(name) == 2:
                self._deletion_s.pop(name, None)
                self._deletion_s[name] = now_s + self.grace_s
        self.forget(burst, acknowledged)
        return len(acknowledged)

    def _adjust_window(self, destination: SatelliteId, round_trip_s: float) -> None:
        """Adapt the number of bursts in flight to the queueing delay: the round trip beyond the shortest."""
        if len(self._shortest_round_trip_s) > _REMEMBERED_TRIPS:
            self._shortest_round_trip_s.clear()
        shortest_s = min(self._shortest_round_trip_s.get(destination, math.inf), round_trip_s)
        self._shortest_round_trip_s[destination] = shortest_s
        # LEDBAT: grow by up to 1 burst per window without queueing delay, shrink in proportion to the delay beyond it.
        off = max(1.0 - (round_trip_s - shortest_s) / _TARGET_DELAY_S, -_MOST_DECREASE)
        self._window_bursts = min(
            max(_LEAST_BURSTS, self._window_bursts + off / self._window_bursts), float(self._most_bursts)
        )

    def retry_unanswered(self, now_s: float) -> None:
        """Make strays due whose destination was silent, and end their back-offs: the own host is on time again, or a
        link came up.
        """
        # While the throttle is closed, the retry waits: ``strays_due`` calls this again.
        self._retry_waits = bool(self._unanswered) and not self._retry_throttle.is_open(now_s)
        if self._retry_waits or not self._unanswered:
            return
        self._retry_throttle.done(now_s)
        for name, case in self._unanswered.items():  # a chunk; its destination and key, which have one back-off
            self._backoffs.pop(case, None)
            if name in self._stray_due_s:
                self._stray_due_s[name] = now_s
                heapq.heappush(self._stray_times, (now_s, name))
        self._unanswered.clear()

    def refused(self, request_id: int, now_s: float, full: bool = False) -> None:
        """Retry a burst after a back-off: its destination was ``full``, silent or without a route."""
        burst = self._in_flight.pop(request_id, None)
        if burst is None or not burst.names:
            return
        case = burst.destination, burst.names[0][0]
        due_s, wait_s = self._backoffs.get(case, (now_s, _RETRY_S / 2))
        if due_s <= now_s:
            if len(self._backoffs) >= _REMEMBERED_RETRIES:
                self._backoffs.clear()
            wait_s = min(2 * wait_s, _MOST_RETRY_S)
            due_s = now_s + wait_s
            self._backoffs[case] = due_s, wait_s
        for name in burst.names:
            self.stray(name, due_s)
            if not full:
                self._unanswered[name] = case

    # --- Deletions, timers ---

    def to_delete(self, now_s: float) -> list[ChunkName]:
        """Return copied chunks whose grace period is over, unless they must leave as another copy."""
        expired = []
        for name, deadline_s in self._deletion_s.items():  # in the order of deadlines: the grace period is constant
            if deadline_s > now_s:
                break
            expired.append(name)
        for name in expired:
            del self._deletion_s[name]
        if expired and (leaving_as_others := {name[:2] for name in self._get_leaving_as_copies()}):
            self._deletion_s.update((name, now_s + self.grace_s) for name in expired if name in leaving_as_others)
            expired = [name for name in expired if name not in leaving_as_others]
        return expired

    def _get_leaving_as_copies(self) -> set[AsCopy]:
        """Return chunks yet to leave as another copy than the stored copy."""
        if not self._may_leave_as_copies:
            return set()
        in_flight = [name for burst in self._in_flight.values() for name in burst.names]
        planned = (*self._queued_chunks, *self._stray_due_s, *in_flight)
        copies = {name for name in planned if len(name) == 3}
        self._may_leave_as_copies = bool(copies)
        return copies

    def next_deletion_s(self) -> float:
        return next(iter(self._deletion_s.values())) + _DELETED_TOGETHER_S if self._deletion_s else math.inf

    def next_timer_s(self) -> float | None:
        times = [burst.deadline_s for burst in self._in_flight.values()]
        if self._deletion_s:
            times.append(self.next_deletion_s())
        while self._stray_times and self._stray_due_s.get(self._stray_times[0][1]) != self._stray_times[0][0]:
            heapq.heappop(self._stray_times)  # it was stored again, or is due at another time
        if self._stray_times:
            times.append(self._stray_times[0][0])
        if self._retry_waits:
            times.append(self._retry_throttle.open_s)
        if self._bursts_to_leave and len(self._in_flight) < int(self._window_bursts):
            times.append(self._get_next_burst_s())
        return min(times) if times else None


def phase_of(satellite: SatelliteId) -> float:
    """Return a satellite's position in its gap, 0 … 1, which differs along a row or column."""
    return (satellite.plane * _GOLDEN + satellite.slot * _GOLDEN * _GOLDEN) % 1.0


class Pacer:
    """Departure times of bursts, evenly spread, so that readers need not wait for all: at most ``t / step_s + 2``
    groups in any ``t`` seconds. ``usual_gap_s``, which links and cores can bear, shrinks only if time is short; 0: no
    pacing.
    """

    def __init__(self, usual_gap_s: float = 0.0, phase: float = 0.0) -> None:
        self.next_s = 0.0
        self.gap_s = usual_gap_s
        self.group = 1
        self._left_in_group = 1
        self.step_s = usual_gap_s
        self._usual_gap_s = usual_gap_s
        self._phase = phase

    def spread(self, bursts: int, now_s: float, interval_s: float, urgent: bool = False) -> None:
        """Set the pace for ``bursts`` until the box moves again.

        ``urgent``: an operator moved it, and readers look in the new place at once.
        """
        if not self._usual_gap_s:
            return
        bursts, time_s = max(1, bursts), SPREAD_SHARE * interval_s
        spread_s = 0.0 if urgent else SPREAD_S
        self.gap_s = min(max(spread_s / bursts, self._usual_gap_s), time_s / bursts, _MOST_GAP_S)
        self._left_in_group = self.group = max(1, min(_MOST_GROUPED, int(_GROUP_S / self.gap_s + _ROUNDING)))
        self.step_s = self.gap_s * bursts / -(-bursts // self.group)
        self.next_s = now_s + self._phase * self.step_s

    def sent(self, now_s: float) -> None:
        """Record a departure: after each group, ``next_s`` advances by a step."""
        if not self.gap_s:
            return
        self._left_in_group -= 1
        if not self._left_in_group:
            self._left_in_group = self.group
            # A timer may be a millisecond or two late: the lost time is made up, but never by more than a group.
            self.next_s = max(self.next_s, now_s - self.step_s) + self.step_s

    def relax(self) -> None:
        if self.gap_s != self._usual_gap_s:
            self.gap_s = self.step_s = self._usual_gap_s
            self._left_in_group = self.group = 1
