"""Migration as one satellite does it: copy, switch, delete.

When the box moves, chunks whose server is now elsewhere are sent to that satellite, a window at a time, and sent again
until acknowledged. Only then does the copy here start to age; it is deleted a grace period later, so that a reader who
still looks here finds it. No table and no coordinator: each satellite computes all of it from the clock.

A *stray* is a chunk that is here although it belongs elsewhere: brought by a writer who did not know of the last move,
handed over by a satellite whose clock is ahead, or not taken by a satellite that is full or dead. Strays are looked at
again when their time has come; so two satellites that disagree about the moves do not toss chunks to and fro.

Where values have copies, a chunk may also leave *as another copy* than the one it is here. Then it is only copied, and
nothing here is deleted when it has arrived.

A handover is background traffic and takes what others leave: bursts in flight become fewer as their answers come later
than they can (LEDBAT, RFC 6817), and half as many when no answer comes at all. A single lost burst is no sign of
congestion: links lose some. What was put off because a satellite did not answer is tried again as soon as our host is
on time again or a link has come up.
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
"""(key, 0-based index, replica): the chunk, leaving as that copy."""
Leaving = ChunkName | AsCopy
BURST_CHUNKS = 10
"""Chunks of one MIGRATE request: as many as one segmentation-offload send carries."""
_MOST_ATTEMPTS = 12
_MOST_BACKOFF = 4
_RETRY_S = 10.0
"""After how long a satellite that was full or did not answer is tried again, at first."""
_MOST_RETRY_S = 160.0
"""It is tried half as often each time, down to this: else a value that does not fit crosses the links for ever."""
_DELETED_TOGETHER_S = 0.05
"""What may go within this time of each other goes at once: an alarm for every burst costs more than its deletion."""
_SLOW = 2.0
"""An answer may take so many mean round trips before its burst is sent again, and at most:"""
_MOST_PATIENCE_S = 2.0
_MOST_QUEUED = 1 << 20
_TARGET_DELAY_S = 0.5
"""How much longer than the shortest an answer may take because of queues: beyond, fewer bursts are sent at a time."""
_MOST_DECREASE = 16.0
"""By how many times as much the window shrinks for a very late answer as it grows for a prompt one."""
_LEAST_BURSTS = 2.0
_REMEMBERED_TRIPS = 1024
_REMEMBERED_RETRIES = 1 << 16


@dataclass(slots=True, eq=False)
class Burst:
    """One MIGRATE request in flight: chunks of one key for one satellite."""

    request_id: int
    destination: SatelliteId
    names: list[Leaving]
    plan: int
    """The number of the plan, one for each move of the box, by which ``destination`` is the place of its chunks."""
    sent_s: float
    """For the first time."""
    deadline_s: float
    last_sent_s: float
    attempts: int = 1
    answered: bool = False
    """Whether some of its chunks have arrived."""
    spared: bool = False
    """Whether its deadline was put off because our host was late."""


class Handover:
    """What leaves this satellite: strays, queued, in flight, and copied but not yet deleted."""

    def __init__(
        self,
        window_bursts: int,
        timeout_s: float,
        grace_s: float,
        pacer: Pacer | None = None,
        lateness: Lateness | None = None,
    ) -> None:
        """Fresh bursts leave as ``pacer`` lets them (default: at once) and as the window is open. ``lateness`` is our
        host's (default: never late).
        """
        self.grace_s = grace_s
        self.fresh_from_s = 0.0
        """Nothing is sent for the first time before then: it is not known yet whether it is worth it."""
        self.moved = False
        """The box has moved since the last plan."""
        self.retransmitted = 0
        self.chunks_planned = 0
        """Chunks looked at so far by plans: work that nothing sent or received shows."""
        self._lateness = lateness or Lateness()
        self._most_bursts = window_bursts
        self._window = float(window_bursts)
        self._heard_s = -math.inf
        self._cut_until_s = -math.inf
        self._shortest_s: dict[SatelliteId, float] = {}
        """Round trips to where chunks were handed over: the shortest that was seen."""
        self._timeout_s = timeout_s
        self._pacer = pacer or Pacer()
        self._round_trip = RoundTrip()
        self._queue: deque[tuple[SatelliteId, list[Leaving]]] = deque()
        self._queued: set[Leaving] = set()
        self._renamed: dict[Leaving, AsCopy] = {}
        """Of chunks queued: as which copy they are to leave, where another copy has taken their place here."""
        self._in_flight: dict[int, Burst] = {}
        self._doomed: dict[ChunkName, float] = {}
        self._strays: dict[Leaving, float] = {}
        self._stray_times: list[tuple[float, Leaving]] = []
        self._retries: dict[tuple[SatelliteId, bytes], tuple[float, float]] = {}
        """Where whose chunks were refused since the last move: when they are tried again, and after what wait."""
        self._unanswered: dict[Leaving, tuple[SatelliteId, bytes]] = {}
        """What is astray because of no answer or no way: which of ``_retries`` it waits for."""
        self._relief = Throttle()
        self._relief_waits = False
        """Whether there was reason for relief when it was not its time."""
        self._plans = 0
        self._some_leave_as_others = False
        """Whether any may: most satellites never see one, and need not look for them."""
        self._next_request_id = 1

    @property
    def idle(self) -> bool:
        """No plan to be made, nothing queued, in flight or astray (copies may still await deletion)."""
        return not (self.moved or self._queue or self._in_flight or self._strays)

    @property
    def at_rest(self) -> bool:
        """``idle``, and no copy awaits deletion: what is stored needs no look from here."""
        return self.idle and not self._doomed

    def rests(self, key: bytes, indices: Iterable[int]) -> bool:
        """Whether none of these chunks of a key, which are here, is to leave, leaves, or was copied and awaits
        deletion.
        """
        if self.at_rest:
            return True
        if (
            self.moved
            or self._some_leave_as_others
            or any(burst.names and burst.names[0][0] == key for burst in self._in_flight.values())
        ):
            return False
        names = [(key, index) for index in indices]
        return not any(name in waiting for waiting in (self._queued, self._strays, self._doomed) for name in names)

    def plan(self, store: ChunkStore, where: Callable[[bytes], SatelliteId], here: SatelliteId) -> list[AsCopy]:
        """Queue everything that ``where`` (packed tag → satellite) puts elsewhere; forget older plans.

        What was to leave as another copy is returned: whose place that is now is not known here.
        """
        others = sorted(self._leaving_as_others())
        if others:
            for burst in list(self._in_flight.values()):
                self.forget(burst, others)
        self.moved = False
        self._renamed.clear()
        self._plans += 1
        self._queue.clear()
        self._queued.clear()
        self._strays.clear()
        self._stray_times.clear()
        self._retries.clear()
        self._unanswered.clear()
        on_its_way = {name for burst in self._in_flight.values() for name in burst.names}
        leaving: dict[bytes, list[tuple[SatelliteId, ChunkName]]] = {}
        self.chunks_planned += len(store)
        for tag, names in names_by_tag(store.shares).items():
            destination = where(tag)
            if destination == here:
                for name in names if self._doomed else ():
                    self._doomed.pop(name, None)
            else:
                for name in names:
                    if name not in on_its_way and name not in self._doomed:
                        leaving.setdefault(name[0], []).append((destination, name))
        # What would be evicted first goes first, so that where it arrives it is the first again.
        for key in store.order() if leaving else ():
            for destination in dict.fromkeys(to for to, _ in leaving.get(key, ())):
                self.enqueue(destination, (name for to, name in leaving[key] if to == destination))
        return others

    def spread(self, now_s: float, interval_s: float, in_haste: bool = False) -> None:
        """Let what is queued leave at its pace from now on: the box moves again in ``interval_s``."""
        self._pacer.spread(len(self._queue), now_s, interval_s, in_haste)

    def enqueue(self, destination: SatelliteId, names: Iterable[Leaving]) -> None:
        """Queue chunks for a satellite, in bursts of one key each."""
        by_key: dict[bytes, list[Leaving]] = {}
        for name in names:
            self._some_leave_as_others |= len(name) == 3
            if name not in self._queued and len(self._queued) < _MOST_QUEUED:
                self._queued.add(name)
                by_key.setdefault(name[0], []).append(name)
        for same_key in by_key.values():
            same_key.sort()
            for at in range(0, len(same_key), BURST_CHUNKS):
                self._queue.append((destination, same_key[at : at + BURST_CHUNKS]))

    def keep(self, key: bytes, indices: Iterable[int]) -> None:
        """These chunks were stored here anew: what was acknowledged of earlier ones does not doom them."""
        if not (self._doomed or self._strays or self._in_flight):
            return
        of_key = [burst for burst in self._in_flight.values() if burst.names and burst.names[0][0] == key]
        for index in indices:
            name = (key, index)
            self._doomed.pop(name, None)
            self._strays.pop(name, None)
            self._unanswered.pop(name, None)
            for burst in of_key:
                if name in burst.names:
                    burst.names.remove(name)

    def leave_as(self, name: ChunkName, replica: int) -> None:
        """Another copy takes the place of this chunk: what was to leave under its name leaves as copy ``replica``,
        if it has not arrived already.
        """
        other = (*name, replica)
        self._some_leave_as_others = True
        if self._doomed.pop(name, None) is not None:
            return
        for burst in self._in_flight.values():
            if name in burst.names:
                burst.names[burst.names.index(name)] = other
                return
        if name in self._queued and name not in self._renamed:
            self._queued.discard(name)
            self._queued.add(other)
            self._renamed[name] = other
        else:
            self.stray(other, self._strays.pop(name, 0.0))

    def stray(self, name: Leaving, due_s: float) -> None:
        """The chunk is here and belongs elsewhere; look at it again at ``due_s``."""
        if name not in self._strays and name not in self._queued:
            self._some_leave_as_others |= len(name) == 3
            self._strays[name] = due_s
            heapq.heappush(self._stray_times, (due_s, name))

    def strays_due(self, now_s: float) -> list[Leaving]:
        """Each is returned once."""
        if self._relief_waits:
            self.relieved(now_s)
        due = []
        while self._stray_times and self._stray_times[0][0] <= now_s:
            time_s, name = heapq.heappop(self._stray_times)
            if self._strays.get(name) == time_s:
                del self._strays[name]
                self._unanswered.pop(name, None)
                due.append(name)
        return due

    @property
    def window_bursts(self) -> int:
        """So many may be in flight now."""
        return int(self._window)

    def bursts_to_send(self, now_s: float) -> list[Burst]:
        """Bursts that are due: fresh ones while the window is open, and those not acknowledged in time."""
        due = []
        late_s = min(self._lateness.at(now_s), _MOST_PATIENCE_S)
        for burst in [burst for burst in self._in_flight.values() if burst.deadline_s <= now_s]:
            if late_s > LATE_S and not burst.spared:  # its answer may wait here
                burst.spared, burst.deadline_s = True, now_s + late_s
                continue
            if burst.attempts == _MOST_ATTEMPTS or not burst.names:
                self.refused(burst.request_id, now_s)
                continue
            if burst.plan != self._plans:  # where it was to go is where the box was
                del self._in_flight[burst.request_id]
                for name in burst.names:
                    self.stray(name, now_s)
                continue
            if now_s < self._pacer.next_s:
                burst.deadline_s = self._pacer.next_s
                continue
            self._pacer.sent(now_s)
            if self._heard_s < burst.last_sent_s and now_s >= self._cut_until_s:  # nobody answers any more
                self._window, self._cut_until_s = max(_LEAST_BURSTS, self._window / 2), now_s + self._patience_s()
            burst.last_sent_s = now_s
            burst.deadline_s = now_s + self._patience_s() * min(2**burst.attempts, _MOST_BACKOFF) + 2 * late_s
            burst.spared = False
            burst.attempts += 1
            self.retransmitted += len(burst.names)
            due.append(burst)
        fresh_from_s = self._fresh_from_s()
        while self._queue and now_s >= fresh_from_s and len(self._in_flight) < int(self._window):
            destination, names = self._queue.popleft()
            if self._renamed:
                names = [self._renamed.pop(name, name) for name in names]
            self._queued.difference_update(names)
            deadline_s = now_s + self._patience_s() + 2 * late_s
            burst = Burst(self._next_request_id, destination, names, self._plans, now_s, deadline_s, now_s)
            self._next_request_id = self._next_request_id % 0xFFFFFFFF + 1
            self._in_flight[burst.request_id] = burst
            due.append(burst)
            self._pacer.sent(now_s)
            fresh_from_s = self._fresh_from_s()
        if not self._queue:
            self._pacer.relax()
        return due

    def _patience_s(self) -> float:
        """How long an answer may take: longer where answers came late. On busy hosts whole handovers would else be sent
        again and again, which keeps the hosts busy.
        """
        return max(self._timeout_s, min(_SLOW * self._round_trip.smoothed_s, _MOST_PATIENCE_S))

    def _fresh_from_s(self) -> float:
        return max(self.fresh_from_s, self._pacer.next_s)

    def forget(self, burst: Burst, gone: Iterable[Leaving]) -> None:
        """Chunks that have arrived, or were evicted or deleted meanwhile, need no journey."""
        absent = set(gone)
        burst.names = [name for name in burst.names if name not in absent]
        if not burst.names:
            self._in_flight.pop(burst.request_id, None)

    def acknowledged(self, request_id: int, names: Iterable[ChunkName], now_s: float, sent_s: float = 0.0) -> int:
        """The other satellite has these; how many of them we had been waiting for. ``sent_s``: when what it answers was
        sent (the first or a later time), if it says so.
        """
        burst = self._in_flight.get(request_id)
        if burst is None:
            return 0
        self._heard_s = now_s
        round_trip_s = now_s - max(burst.sent_s, sent_s)
        self._round_trip.sample(round_trip_s)
        if not burst.answered:
            self._adjust(burst.destination, round_trip_s)
        burst.answered = True
        there = set(names)
        done = [name for name in burst.names if name[:2] in there]
        for name in done:
            if len(name) == 2:
                self._doomed.pop(name, None)
                self._doomed[name] = now_s + self.grace_s
        self.forget(burst, done)
        return len(done)

    def _adjust(self, destination: SatelliteId, round_trip_s: float) -> None:
        """The window, by how long an answer waited in queues on the way."""
        if len(self._shortest_s) > _REMEMBERED_TRIPS:
            self._shortest_s.clear()
        shortest_s = min(self._shortest_s.get(destination, math.inf), round_trip_s)
        self._shortest_s[destination] = shortest_s
        off = max(1.0 - (round_trip_s - shortest_s) / _TARGET_DELAY_S, -_MOST_DECREASE)
        self._window = min(max(_LEAST_BURSTS, self._window + off / self._window), float(self._most_bursts))

    def relieved(self, now_s: float) -> None:
        """Satellites that did not answer may do so now: our host is on time again, or a link is up. Back-offs begin
        again from the shortest, and what was put off leaves as soon as the throttle allows.
        """
        self._relief_waits = bool(self._unanswered) and not self._relief.is_open(now_s)
        if self._relief_waits or not self._unanswered:
            return
        self._relief.done(now_s)
        for name, case in self._unanswered.items():
            self._retries.pop(case, None)
            if name in self._strays:
                self._strays[name] = now_s
                heapq.heappush(self._stray_times, (now_s, name))
        self._unanswered.clear()

    def refused(self, request_id: int, now_s: float, full: bool = False) -> None:
        """The other satellite cannot take the burst (it is ``full``, or there is no answer or no way): its chunks stay
        here, and it is tried again later.
        """
        burst = self._in_flight.pop(request_id, None)
        if burst is None or not burst.names:
            return
        case = burst.destination, burst.names[0][0]
        due_s, wait_s = self._retries.get(case, (now_s, _RETRY_S / 2))
        if due_s <= now_s:
            if len(self._retries) >= _REMEMBERED_RETRIES:
                self._retries.clear()
            wait_s = min(2 * wait_s, _MOST_RETRY_S)
            due_s = now_s + wait_s
            self._retries[case] = due_s, wait_s
        for name in burst.names:
            self.stray(name, due_s)
            if not full:
                self._unanswered[name] = case

    def to_delete(self, now_s: float) -> list[ChunkName]:
        """Copied chunks whose grace is over; each is returned once. What is still to leave as another copy stays."""
        due = []
        for name, deadline_s in self._doomed.items():
            if deadline_s > now_s:
                break
            due.append(name)
        for name in due:
            del self._doomed[name]
        if due and (others := {name[:2] for name in self._leaving_as_others()}):
            self._doomed.update((name, now_s + self.grace_s) for name in due if name in others)
            due = [name for name in due if name not in others]
        return due

    def _leaving_as_others(self) -> set[AsCopy]:
        """All that is to leave as another copy than it is here: queued, astray, or on its way."""
        if not self._some_leave_as_others:
            return set()
        on_its_way = [name for burst in self._in_flight.values() for name in burst.names]
        planned = (*self._queued, *self._strays, *on_its_way)
        others = {name for name in planned if len(name) == 3}
        self._some_leave_as_others = bool(others)
        return others

    def next_timer_s(self) -> float | None:
        times = [burst.deadline_s for burst in self._in_flight.values()]
        if self._doomed:
            times.append(next(iter(self._doomed.values())) + _DELETED_TOGETHER_S)
        if self._stray_times:
            times.append(self._stray_times[0][0])
        if self._relief_waits:
            times.append(self._relief.open_s)
        if self._queue and len(self._in_flight) < int(self._window):
            times.append(self._fresh_from_s())
        return min(times) if times else None


# When a satellite sends the next bursts of what it hands over: evenly, instead of all at once.
#
# All satellites see the box move in the same instant. If each sent what has to leave as fast as it could, whoever
# reads
# in that instant would wait behind all of it, on the links and in the host processes on the way. So it is spread over
# the
# time there is: until readers look for it in its new place, and until the box moves on.


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
