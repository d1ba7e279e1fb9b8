"""How far the box has moved, and which satellite is which server then: pure functions of the clock.

Slot moves count how often the overhead point passed to the next slot, plane moves how often to the next plane
(the Earth turning under the orbits). Both are counted from the epoch and may be pushed by an operator (ADVANCE).

``MoveClock`` counts moves, ``SkyMap`` places servers. ``Locator`` is a satellite's use of both, ``FollowedClock`` a
client's.
"""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections import deque
from collections.abc import Container
from dataclasses import dataclass, replace
from itertools import chain

from skymemory.constellation.ground_track import Track
from skymemory.constellation.sight import Sight
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput
from skymemory.metrics import Counters
from skymemory.placement.layout import Strategy
from skymemory.placement.locate import Moves, Placement
from skymemory.protocol.congestion import Throttle
from skymemory.protocol.wire import TAG_BYTES, TAG_OFFSET

STRATEGY_CODES: dict[Strategy, int] = {"rotation": 1, "hop": 2, "rotation_hop": 3, "cost": 4, "baseline": 5}
"""Numbers on the wire; frozen."""
STRATEGY_NAMES = {code: name for name, code in STRATEGY_CODES.items()}
DISPLACEMENTS = (0, 1, -1, 2, -2, 3, -3, 5, -5, 8, -8, 12, -12, 18, -18)
"""How many planes south of the overhead point the centre of a value's box is, by the upper four bits of its strategy on
the wire (the lower four are the strategy): not 0 where satellites of the box were dead when it was written. Frozen.
"""
_DISPLACEMENT_BITS = 4
PROOF_S = 0.8
"""All answers that prove a chunk lost must arrive within this time. A copy outlives its handover by a grace period of
1 s, so a chunk that exists cannot move between two answers without being seen.
"""
HANDED_OVER_S = 0.3
"""For this long after a move by the clock readers look where chunks were before it. The copies there outlive the move
by the grace period of the handover (1 s), while those in the new place may still be on their way (``handover.SPREAD_S``
and the journey): a read then needs one round trip, not two.
"""
MOST_PUSHED_AT_ONCE = 10_000
"""Moves by which one ADVANCE may change what is added to the clock, in each direction."""
MOST_PUSHED = 1_000_000
"""Moves that may be added to the clock in all, in each direction: as many as a plan holds."""
LISTENERS = 5
"""The majority is taken of this many satellites, those heard last."""
TOLERATED_STEPS = 1
"""By how many moves on each axis a satellite's count may differ from the majority's."""

_ROUNDING_STEPS = 1 << 12
"""How far behind an edge, in roundings of the clock, to look for the crossing."""
_FINEST_AT_S = 1.0
"""Of the sky's time: a track's cells are no more exact at earlier times, however fine the clock is near 0."""
_MOST_EARLIER = 256
"""Moves that ``moves_since`` looks back one by one: a quarter of an hour at ``time_scale`` 60, half a day at 1."""
_FIRST_SPAN_S, _LONGEST_SPAN_S = 600.0, 1e8
"""How far back to look for earlier moves, in time as satellites fly: at first, doubled up to the longest."""
_PUSHES_AT_ONCE = 16
"""Pushes accepted without a pause, then one a second: each may cause a handover of all chunks."""
_REMEMBERED_TAGS = 65_536
_REMEMBERED_MOVES = 4
_LEAST_AGREEING = 2
_REPORT_KEPT_S = 30.0
"""How long a satellite's reported moves count towards the majority."""


@dataclass(frozen=True, slots=True)
class MoveClock:
    """Moves as a function of time. ``time_scale`` 0 stands still, 1 is real time, 60 is an hour a minute.

    ``slot_period_s`` and ``plane_period_s`` are the real times between moves (260 s and 19.7 min on Starlink A), for a
    grid that is not above any particular place. With a ``track`` the moves are those of its anchor; periods are unused.
    """

    epoch_s: float = 0.0
    slot_period_s: float = math.inf
    plane_period_s: float = math.inf
    time_scale: float = 0.0
    pushed: Moves = (0, 0)
    track: Track | None = None

    def sky_s(self, now_s: float) -> float:
        """Seconds since the epoch as the satellites fly: the time argument of the geometry."""
        return (now_s - self.epoch_s) * self.time_scale

    def moves(self, now_s: float) -> Moves:
        elapsed_s = (now_s - self.epoch_s) * self.time_scale
        if self.track is not None:
            slot_moves, plane_moves = self.track.moves(elapsed_s)
            return self.pushed[0] + slot_moves, self.pushed[1] + plane_moves
        return (
            self.pushed[0] + math.floor(elapsed_s / self.slot_period_s),
            self.pushed[1] + math.floor(elapsed_s / self.plane_period_s),
        )

    def next_move_s(self, now_s: float) -> float | None:
        """A time at which the moves have just changed; None if the clock stands still.

        Never a rounding error too early: a timer set to it finds the moves changed.
        """
        if self.time_scale <= 0:
            return None
        moves, time_s = self.moves(now_s), now_s
        least_s = 0.0 if self.track is None else _FINEST_AT_S / self.time_scale
        while (time_s := self._next_edge_s(time_s)) < math.inf:
            step_s = math.ulp(max(abs(time_s), abs(self.epoch_s), least_s))
            most_s = time_s + _ROUNDING_STEPS * step_s
            while time_s < most_s:
                if self.moves(time_s) != moves:
                    return time_s
                time_s += step_s
                step_s *= 2
        return None

    def moves_before(self, now_s: float, most: int) -> list[Moves]:
        """The counts of moves before the present one, the latest first, at most ``most``. A track that turns back has
        some of them twice.
        """
        if self.time_scale <= 0 or most <= 0:
            return []
        moves, span_s = self.moves(now_s), _FIRST_SPAN_S / self.time_scale
        while span_s < _LONGEST_SPAN_S:
            before = self.moves(now_s - span_s)
            if abs(moves[0] - before[0]) + abs(moves[1] - before[1]) >= most:
                break
            span_s *= 2
        time_s: float | None = now_s - span_s
        found: deque[Moves] = deque(maxlen=most + 1)
        while time_s is not None and time_s <= now_s:
            found.appendleft(self.moves(time_s))
            time_s = self.next_move_s(time_s)
        return list(found)[1:]

    def moves_since(self, set_moves: Moves, placement: Placement, now_s: float) -> list[Moves]:
        """Counts of moves that cover every satellite where a chunk set at ``set_moves`` can have been left.

        Those since then, the latest first. Where these are too many, or unknown because operators have pushed the box,
        those of every satellite where the chunk can ever be.
        """
        known = [self.moves(now_s), *self.moves_before(now_s, _MOST_EARLIER)]
        if set_moves not in known or any(self.pushed):
            return [known[0], *placement.moves_of_all_places(set_moves)]
        while known[-1] != set_moves:
            known.pop()
        return list(dict.fromkeys(known))

    def _next_edge_s(self, now_s: float) -> float:
        """When an edge of the cell is next reached, to within rounding; a track may turn back there without
        crossing.
        """
        elapsed_s = self.sky_s(now_s)
        if self.track is not None:
            next_s = self.track.next_crossing_s(elapsed_s)
        else:
            periods_s = [period_s for period_s in (self.slot_period_s, self.plane_period_s) if math.isfinite(period_s)]
            next_s = min(
                ((math.floor(elapsed_s / period_s) + 1) * period_s for period_s in periods_s), default=math.inf
            )
        return max(self.epoch_s + next_s / self.time_scale, math.nextafter(now_s, math.inf))

    def push(self, slot_moves: int, plane_moves: int) -> MoveClock:
        return replace(self, pushed=(self.pushed[0] + slot_moves, self.pushed[1] + plane_moves))


def displaced(strategy: int, displacement: int) -> int:
    """The code of a strategy whose box is displaced, by a position in ``DISPLACEMENTS``."""
    return strategy & ((1 << _DISPLACEMENT_BITS) - 1) | displacement << _DISPLACEMENT_BITS


def placement_name(code: int) -> str:
    """``rotation_hop``; displaced by two planes to the south, ``rotation_hop+2``.

    Raises:
        KeyError: no such code.
    """
    planes = DISPLACEMENTS[_displacement_of(code)]
    return STRATEGY_NAMES[displaced(code, 0)] + (f"{planes:+d}" if planes else "")


def placement_code(name: str) -> int:
    """The inverse of ``placement_name``.

    Raises:
        KeyError, ValueError: no such name.
    """
    at = max(name.find("+"), name.find("-"))
    strategy, planes = (name, 0) if at < 0 else (name[:at], int(name[at:]))
    return displaced(STRATEGY_CODES[strategy], DISPLACEMENTS.index(planes))  # type: ignore[index]


def _displacement_of(code: int) -> int:
    """A position in ``DISPLACEMENTS``.

    Raises:
        KeyError: no such code.
    """
    found = code >> _DISPLACEMENT_BITS
    if not 0 <= found < len(DISPLACEMENTS):
        raise KeyError(code)
    return found


class SkyMap:
    """The satellite of every server of every placement, cached.

    ``centre`` is the centre of the box at zero moves. ``slot_link_s`` and ``plane_link_s`` are one-way delays of a
    link, for the ``cost`` strategy. ``sight`` computes which satellites a host sees; None without orbits and masks.
    """

    def __init__(
        self,
        torus: Torus,
        centre: SatelliteId,
        slot_link_s: float = 1.0,
        plane_link_s: float = 1.0,
        sight: Sight | None = None,
    ) -> None:
        self.torus = torus
        self.centre = centre
        self.sight = sight
        self._links_s = (slot_link_s, plane_link_s)
        self._placements: dict[tuple[int, int], Placement] = {}
        self._located: dict[tuple[int, int, Moves, Moves, int], tuple[SatelliteId, ...]] = {}

    def placement(self, strategy: int, servers: int) -> Placement:
        """By a strategy's code, of which the upper bits displace the box.

        Raises:
            InvalidInput: an unknown code, or more servers than satellites.
        """
        found = self._placements.get((strategy, servers))
        if found is None:
            if len(self._placements) > 256:
                self._placements.clear()
            try:
                name, planes = STRATEGY_NAMES[displaced(strategy, 0)], DISPLACEMENTS[_displacement_of(strategy)]
            except KeyError:
                raise InvalidInput(f"placement strategy {strategy}: expected one of {STRATEGY_NAMES}") from None
            centre = self.torus.wrap(self.centre.plane + planes, self.centre.slot)
            found = Placement.of(name, servers, self.torus, centre, *self._links_s)
            self._placements[strategy, servers] = found
        return found

    def servers_at(
        self, strategy: int, servers: int, set_moves: Moves, now_moves: Moves, replica: int = 0
    ) -> tuple[SatelliteId, ...]:
        """The satellites that hold the servers of a value set at ``set_moves``, at ``now_moves``."""
        wanted = (strategy, servers, set_moves, now_moves, replica)
        found = self._located.get(wanted)
        if found is None:
            if len(self._located) > 1024:
                self._located.clear()
            placement = self.placement(strategy, servers)
            found = (
                tuple(placement.locate(server, set_moves, now_moves, replica) for server in range(servers))
                if replica
                else placement.locate_all(set_moves, now_moves)
            )
            self._located[wanted] = found
        return found

    def displacement_around(
        self, strategy: int, servers: int, moves: Moves, chunks: int, replicas: int, dead: Container[SatelliteId]
    ) -> int:
        """The code of ``strategy`` with its box displaced by as few planes as leave each chunk a copy on a satellite
        that is not ``dead``; where no displacement does, ``strategy`` itself.
        """
        for displacement in range(len(DISPLACEMENTS)):
            code = displaced(strategy, displacement)
            copies = [self.servers_at(code, servers, moves, moves, replica) for replica in range(replicas)]
            if all(any(place not in dead for place in its) for its in list(zip(*copies, strict=True))[:chunks]):
                return code
        return strategy

    def displaced_boxes(self, strategy: int, servers: int, moves: Moves) -> list[SatelliteId]:
        """The satellites of the box at these moves, and of the boxes that are displaced by no more than its height."""
        height = self.placement(strategy, servers).box.height
        codes = [displaced(strategy, at) for at, planes in enumerate(DISPLACEMENTS) if abs(planes) <= height]
        boxes = (self.placement(code, servers).box_satellites(moves) for code in codes)
        return list(dict.fromkeys(chain.from_iterable(boxes)))

    def links_s(self, here: SatelliteId, there: SatelliteId) -> float:
        """One way over the links between two satellites."""
        slots, planes = self.torus.delta(here, there)
        return abs(slots) * self._links_s[0] + abs(planes) * self._links_s[1]

    def centre_at(self, moves: Moves) -> SatelliteId:
        """The satellite at the box's centre after these moves."""
        return self.torus.wrap(self.centre.plane + moves[1], self.centre.slot - moves[0])


class Locator:
    """One satellite's moves, and where chunks belong at them: the satellite of every placement tag, cached until the
    box moves.
    """

    def __init__(self, here: SatelliteId, sky: SkyMap, clock: MoveClock, now_s: float) -> None:
        self._here = here
        self._sky = sky
        self._clock = clock
        self._homes: dict[bytes, SatelliteId] = {}
        self.settled: set[bytes] = set()
        """Packed tags of chunks that belong to this satellite now, as far as looked up."""
        self.moves: Moves = clock.moves(now_s)
        self.before: Moves = self.moves
        """The moves before the last change."""
        self.next_move_s = clock.next_move_s(now_s)
        self._pushing = Throttle(_PUSHES_AT_ONCE, 0.0)

    @property
    def pushed(self) -> Moves:
        """The moves that operators have added to the clock."""
        return self._clock.pushed

    def may_push_to(self, pushed: Moves, now_s: float, most: int = MOST_PUSHED_AT_ONCE) -> bool:
        """Whether ``push_to`` may follow: not too far in all, not more than ``most`` at once, not too often.

        A push that changes nothing is always allowed.
        """
        if pushed == self.pushed:
            return True
        steps = (abs(new - old) for new, old in zip(pushed, self.pushed, strict=True))
        if max(map(abs, pushed)) > MOST_PUSHED or max(steps) > most or not self._pushing.is_open(now_s):
            return False
        self._pushing.done(now_s)
        return True

    def push_to(self, pushed: Moves) -> None:
        """Set the moves added to the clock (absolute: a repeat changes nothing). They count from the next
        ``follow``.
        """
        self._clock = self._clock.push(pushed[0] - self.pushed[0], pushed[1] - self.pushed[1])

    def follow(self, now_s: float) -> bool:
        """Bring the moves up to date; whether they changed."""
        self.next_move_s = self._clock.next_move_s(now_s)
        moves = self._clock.moves(now_s)
        if moves == self.moves:
            return False
        self.before, self.moves = self.moves, moves
        self._forget()
        return True

    def next_timer_s(self) -> float:
        """When the box moves next; infinity: never."""
        return math.inf if self.next_move_s is None else self.next_move_s

    def interval_s(self, now_s: float) -> float:
        """Time until the box moves again: the mean of the next two times. A slot move and a plane move may follow each
        other at once; the second plan then redirects what the first has not sent yet.
        """
        if self.next_move_s is None:
            return math.inf
        following_s = self._clock.next_move_s(self.next_move_s)
        return math.inf if following_s is None else (following_s - now_s) / 2

    def moves_since(self, set_moves: Moves, placement: Placement, now_s: float) -> list[Moves]:
        """Counts of moves that cover every satellite where a chunk set at ``set_moves`` can have been left."""
        return self._clock.moves_since(set_moves, placement, now_s)

    def is_past(self, moves: Moves) -> bool:
        """Whether a sender that counts these moves is behind this satellite. (If the box goes back, a sender that is
        ahead looks behind.)
        """
        return sum(moves) < sum(self.moves)

    def home(self, ref: bytes) -> SatelliteId:
        """The satellite where the chunk with this packed reference belongs now.

        Raises:
            InvalidInput: its placement is impossible here (unknown strategy, more servers than satellites).
        """
        return self.home_of_tag(ref[TAG_OFFSET : TAG_OFFSET + TAG_BYTES])

    def home_of_tag(self, tag: bytes) -> SatelliteId:
        found = self._homes.get(tag)
        if found is None:
            if len(self._homes) > _REMEMBERED_TAGS:
                self._forget()
            servers, number = int.from_bytes(tag[0:2], "big"), int.from_bytes(tag[2:4], "big")
            set_slot_moves = int.from_bytes(tag[8:12], "big", signed=True)
            set_plane_moves = int.from_bytes(tag[12:16], "big", signed=True)
            placement = self._sky.placement(tag[4], servers)
            found = placement.locate(number - 1, (set_slot_moves, set_plane_moves), self.moves, tag[5])
            self._homes[tag] = found
            if found == self._here:
                self.settled.add(tag)
        return found

    def _forget(self) -> None:
        self._homes.clear()
        self.settled.clear()


class FollowedClock:
    """A ground host's count of moves: its own clock, corrected by what most satellites report.

    An operator's push makes the own clock wrong. No single satellite is believed, since its clock may be the wrong one:
    its report only adds a place where a chunk may be. The count follows when a majority of the satellites heard last
    agree. A clock that is off by less than a move (on Starlink A, 260 s) is one step off, and readers look one step
    around anyway; a satellite further from the majority is counted as ``clocks_beyond_bound``.
    """

    def __init__(self, clock: MoveClock, counters: Counters | None = None) -> None:
        self._base = clock
        self._clock = clock
        self._counters = counters if counters is not None else Counters()
        self._latest: Moves | None = None
        self._same_from_s = self._same_until_s = math.inf
        """From when until when the moves are certainly the latest ones."""
        self._since: dict[tuple[Moves, str, int], list[Moves]] = {}
        self._since_at: tuple[MoveClock, Moves] | None = None
        """Cached results of ``everywhere``, and the clock and moves for which they hold."""
        self._before: deque[Moves] = deque(maxlen=_REMEMBERED_MOVES)
        self._reports: dict[SatelliteId, tuple[Moves, float]] = {}
        """Of the satellites heard last, latest last: their difference from our own clock, and when it was reported."""

    def moves(self, now_s: float) -> Moves:
        if self._latest is not None and self._same_from_s <= now_s < self._same_until_s:
            return self._latest
        moves = self._clock.moves(now_s)
        next_s = self._clock.next_move_s(now_s)
        self._same_from_s, self._same_until_s = now_s, math.inf if next_s is None else next_s
        if moves != self._latest:
            if self._latest is None:  # the moves before we started follow from the clock
                self._before.extend(dict.fromkeys(self._clock.moves_before(now_s, _REMEMBERED_MOVES)))
            if moves in self._before:
                self._before.remove(moves)
            if self._latest is not None:
                self._before.appendleft(self._latest)
            self._latest = moves
        return moves

    def to_read_at(self, set_moves: Moves, now_s: float) -> Moves:
        """The moves by which to look first for a value set at ``set_moves``: those of ``HANDED_OVER_S`` ago, for which
        handovers are certainly complete, but not from before the value was set.
        """
        moves, looked_at_s = self.moves(now_s), now_s - HANDED_OVER_S
        if looked_at_s >= self._same_from_s:
            return moves
        before = self._clock.moves(looked_at_s)
        while any((now - then) * (its - then) > 0 for now, then, its in zip(moves, before, set_moves, strict=True)):
            next_s = self._clock.next_move_s(looked_at_s)
            if next_s is None or next_s >= now_s:
                return moves
            looked_at_s, before = next_s, self._clock.moves(next_s)
        return before

    def at(self, time_s: float) -> Moves:
        """The moves at another time, as far as is known now; changes nothing."""
        return self._clock.moves(time_s)

    def moves_before(self, now_s: float, most: int) -> list[Moves]:
        """As ``MoveClock.moves_before``."""
        return self._clock.moves_before(now_s, most)

    def sky_s(self, now_s: float) -> float:
        """Seconds since the epoch as the satellites fly."""
        return self._clock.sky_s(now_s)

    def report(self, satellite: SatelliteId, moves: Moves, round_trip_s: float, now_s: float) -> None:
        """A satellite counted ``moves`` when it answered. A count that was right a round trip ago is not wrong."""
        ours = self.moves(now_s)
        if moves == ours or moves == self._clock.moves(now_s - round_trip_s):
            added = self._added
        else:
            base = self._base.moves(now_s)
            added = moves[0] - base[0], moves[1] - base[1]
        self._reports.pop(satellite, None)
        self._reports[satellite] = added, now_s
        if len(self._reports) > LISTENERS:
            del self._reports[next(iter(self._reports))]
        if added != self._added:
            self._reconsider(now_s)
            agreed = self.moves(now_s)
            if max(abs(moves[0] - agreed[0]), abs(moves[1] - agreed[1])) > TOLERATED_STEPS:
                self._counters.add("clocks_beyond_bound")

    @property
    def _added(self) -> Moves:
        """The correction of our own clock so far."""
        now, base = self._clock.pushed, self._base.pushed
        return now[0] - base[0], now[1] - base[1]

    def _reconsider(self, now_s: float) -> None:
        """Follow the majority of the satellites heard last."""
        reports = [added for added, said_s in self._reports.values() if said_s >= now_s - _REPORT_KEPT_S]
        added, count = Tally(reports).most_common(1)[0]
        if added != self._added and count >= _LEAST_AGREEING and 2 * count > len(reports):
            self._clock = self._base.push(*added)
            self._same_from_s = self._same_until_s = math.inf
            self._counters.add("clock_corrected")
            self.moves(now_s)

    def nearby(self, now_s: float) -> list[Moves]:
        """Counts of moves at which a chunk may have been left or already be expected: the present one, recent ones,
        those reported by satellites and not (yet) followed, and one step back and ahead on each axis.
        """
        r, p = self.moves(now_s)
        base = self._base.moves(now_s)
        said = [(base[0] + slots, base[1] + planes) for (slots, planes), _ in reversed(self._reports.values())]
        return list(dict.fromkeys([(r, p), *self._before, *said, (r - 1, p), (r, p - 1), (r + 1, p), (r, p + 1)]))

    def everywhere(self, now_s: float, set_moves: Moves, placement: Placement) -> list[Moves]:
        """Counts of moves that cover every satellite where a chunk set at ``set_moves`` may have been left: those
        ``nearby``, and all since it was set.
        """
        name = set_moves, placement.strategy, placement.servers
        if self._since_at != (self._clock, self.moves(now_s)):
            self._since, self._since_at = {}, (self._clock, self.moves(now_s))
        if name not in self._since:
            self._since[name] = self._clock.moves_since(set_moves, placement, now_s)
        return list(dict.fromkeys([*self.nearby(now_s), *self._since[name]]))
