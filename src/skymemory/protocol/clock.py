"""How far the box has moved: a pure function of the clock, the same for satellites and clients.

Slot moves count how often the overhead point passed to the next slot, plane moves how often to the next plane
(the Earth turning under the orbits). Both are counted from the epoch and may be pushed by an operator (ADVANCE).
"""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections import deque
from dataclasses import dataclass, replace

from skymemory.constellation.ground_track import Track
from skymemory.constellation.sight import Sight
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput
from skymemory.metrics import Counters
from skymemory.placement.layout import Strategy
from skymemory.placement.locate import Moves, Placement

PROOF_S = 0.8
"""All that say that a chunk is gone must have said so within this time. A copy outlives its handover by the grace
(1 s): so a chunk that is anywhere cannot have gone from one of them to another behind the back of who asks.
"""

STRATEGY_CODES: dict[Strategy, int] = {"rotation": 1, "hop": 2, "rotation_hop": 3, "cost": 4, "baseline": 5}
"""Numbers on the wire; frozen."""
_ROUNDING_STEPS = 1 << 12
"""How far behind an edge, in roundings of the clock, it is looked for whether it was crossed."""
_MOST_EARLIER = 256
"""Moves that ``moves_since`` looks back at one by one: at ``time_scale`` 60 a quarter of an hour, at 1 half a day."""
_FIRST_SPAN_S, _LONGEST_SPAN_S = 600.0, 1e8
"""How far back earlier moves are looked for: so long as satellites fly at first, then twice as long, and so on."""
STRATEGY_NAMES = {code: name for name, code in STRATEGY_CODES.items()}


@dataclass(frozen=True, slots=True)
class MoveClock:
    """Moves at a time. ``time_scale`` 0 stands still, 1 is real, 60 an hour a minute.

    ``slot_period_s`` and ``plane_period_s`` are the real times between moves (260 s and 19.7 min on Starlink A), for a
    grid that is over nobody in particular. With a ``track`` the moves are those of its anchor and periods do not count.
    """

    epoch_s: float = 0.0
    slot_period_s: float = math.inf
    plane_period_s: float = math.inf
    time_scale: float = 0.0
    pushed: Moves = (0, 0)
    track: Track | None = None

    def sky_s(self, now_s: float) -> float:
        """Seconds since the epoch as the satellites fly: what the geometry is asked with."""
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

        Never a rounding too early: a timer set to it finds that there is something to do.
        """
        if self.time_scale <= 0:
            return None
        moves, time_s = self.moves(now_s), now_s
        while (time_s := self._next_edge_s(time_s)) < math.inf:
            step_s = math.ulp(max(abs(time_s), abs(self.epoch_s)))
            most_s = time_s + _ROUNDING_STEPS * step_s
            while time_s < most_s:
                if self.moves(time_s) != moves:
                    return time_s
                time_s += step_s
                step_s *= 2
        return None

    def moves_before(self, now_s: float, most: int) -> list[Moves]:
        """The counts of moves that held before the one of now, the latest first: ``most`` of them at most. A track that
        turns back has some of them twice.
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
        """Counts of moves by which ``placement`` names every satellite where a chunk that was set at ``set_moves`` can
        have been left: those since then, the latest first. Where too many are, or operators have pushed the box, so
        that nobody knows all of them, those of every satellite where it can ever be.
        """
        known = [self.moves(now_s), *self.moves_before(now_s, _MOST_EARLIER)]
        if set_moves not in known or any(self.pushed):
            return [known[0], *placement.moves_of_all_places(set_moves)]
        while known[-1] != set_moves:
            known.pop()
        return list(dict.fromkeys(known))

    def _next_edge_s(self, now_s: float) -> float:
        """When a cell's edge is next reached, to within rounding; a track may turn back at it and not cross."""
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


class SkyMap:
    """Where every server of every box is: the torus, the centre at no moves, and placements made once each.

    ``slot_link_s`` and ``plane_link_s`` are one-way delays of a link; only the ``cost`` strategy looks at them.
    ``sight`` is what a host sees of it all; None where nothing is known of orbits and masks.
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
        """Raises ``InvalidInput`` for an unknown strategy code or more servers than satellites."""
        found = self._placements.get((strategy, servers))
        if found is None:
            if len(self._placements) > 256:
                self._placements.clear()
            name = STRATEGY_NAMES.get(strategy)
            if name is None:
                raise InvalidInput(f"placement strategy {strategy}: expected one of {STRATEGY_NAMES}")
            found = Placement.of(name, servers, self.torus, self.centre, *self._links_s)
            self._placements[strategy, servers] = found
        return found

    def servers_at(
        self, strategy: int, servers: int, set_moves: Moves, now_moves: Moves, replica: int = 0
    ) -> tuple[SatelliteId, ...]:
        """The satellite of each server, now, of a value set at ``set_moves``."""
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

    def centre_at(self, moves: Moves) -> SatelliteId:
        """The satellite at the box's centre after these moves."""
        return self.torus.wrap(self.centre.plane + moves[1], self.centre.slot - moves[0])


# A ground host's count of moves: its own clock, corrected by what most satellites say of theirs.
#
# No single satellite is believed, for its clock may be the wrong one. Its word is remembered, and one place more
# where a
# chunk may be; the count follows when most of the satellites that spoke last agree. A clock that is off by less than a
# move (on Starlink A, 260 s) makes a difference of one step, which readers look for anyway; what is further from the
# majority is counted as ``clocks_beyond_bound``.


_REMEMBERED = 4
LISTENERS = 5
"""So many satellites, those that spoke last, are asked for the majority."""
_LEAST_AGREEING = 2
_WORD_KEPT_S = 30.0
"""What was said before that counts no more."""
HANDED_OVER_S = 0.3
"""So long after a move by the clock readers look where chunks were before it. The copies there outlive the move by
the grace of the handover (1 s), those elsewhere may be on their way (for ``pacer.SPREAD_S`` and the journey): a read
then needs one round trip, not two.
"""
TOLERATED_STEPS = 1
"""A satellite's count may differ by so many moves on each axis from what most say."""


class FollowedClock:
    """Starts from a ``MoveClock``, which an operator's push makes wrong; remembers where the box has lately been."""

    def __init__(self, clock: MoveClock, counters: Counters | None = None) -> None:
        self._base = clock
        self._clock = clock
        self._counters = counters if counters is not None else Counters()
        self._latest: Moves | None = None
        self._since: dict[tuple[Moves, str, int], list[Moves]] = {}
        self._since_at: tuple[MoveClock, Moves] | None = None
        """Moves since settings that were asked for, and the clock and moves for which they hold."""
        self._before: deque[Moves] = deque(maxlen=_REMEMBERED)
        self._words: dict[SatelliteId, tuple[Moves, float]] = {}
        """Of the satellites that spoke last, latest last: what they add to our own clock, and when they said so."""

    def moves(self, now_s: float) -> Moves:
        moves = self._clock.moves(now_s)
        if moves != self._latest:
            if self._latest is None:  # what held before we came is known from the clock
                self._before.extend(dict.fromkeys(self._clock.moves_before(now_s, _REMEMBERED)))
            if moves in self._before:
                self._before.remove(moves)
            if self._latest is not None:
                self._before.appendleft(self._latest)
            self._latest = moves
        return moves

    def to_read_at(self, set_moves: Moves, now_s: float) -> Moves:
        """The moves by which to look first for a value that was set at ``set_moves``: those of a little while ago, when
        what they ask for has been handed over for certain, but not of a time before the value was set.
        """
        moves, looked_at_s = self.moves(now_s), now_s - HANDED_OVER_S
        before = self._clock.moves(looked_at_s)
        while any((now - then) * (its - then) > 0 for now, then, its in zip(moves, before, set_moves, strict=True)):
            next_s = self._clock.next_move_s(looked_at_s)
            if next_s is None or next_s >= now_s:
                return moves
            looked_at_s, before = next_s, self._clock.moves(next_s)
        return before

    def at(self, time_s: float) -> Moves:
        """The moves at another time, as far as is known now; nothing is remembered of it."""
        return self._clock.moves(time_s)

    def sky_s(self, now_s: float) -> float:
        """Seconds since the epoch as the satellites fly."""
        return self._clock.sky_s(now_s)

    def told(self, satellite: SatelliteId, moves: Moves, round_trip_s: float, now_s: float) -> None:
        """A satellite counted ``moves`` when it answered; what was right a round trip ago is only late, not wrong."""
        ours = self.moves(now_s)
        if moves == ours or moves == self._clock.moves(now_s - round_trip_s):
            added = self._added
        else:
            base = self._base.moves(now_s)
            added = moves[0] - base[0], moves[1] - base[1]
        self._words.pop(satellite, None)
        self._words[satellite] = added, now_s
        if len(self._words) > LISTENERS:
            del self._words[next(iter(self._words))]
        if added != self._added:
            self._reconsider(now_s)
            agreed = self.moves(now_s)
            if max(abs(moves[0] - agreed[0]), abs(moves[1] - agreed[1])) > TOLERATED_STEPS:
                self._counters.add("clocks_beyond_bound")

    @property
    def _added(self) -> Moves:
        """What we add to our own clock by now."""
        now, base = self._clock.pushed, self._base.pushed
        return now[0] - base[0], now[1] - base[1]

    def _reconsider(self, now_s: float) -> None:
        """Follow what most of those say that spoke last."""
        words = [added for added, said_s in self._words.values() if said_s >= now_s - _WORD_KEPT_S]
        added, count = Tally(words).most_common(1)[0]
        if added != self._added and count >= _LEAST_AGREEING and 2 * count > len(words):
            self._clock = self._base.push(*added)
            self._counters.add("clock_corrected")
            self.moves(now_s)

    def nearby(self, now_s: float) -> list[Moves]:
        """Counts of moves at which a chunk may have been left or already be awaited: now first, then what was lately
        true here, what satellites say that we do not believe (yet), and one step back and one ahead on each axis.
        """
        r, p = self.moves(now_s)
        base = self._base.moves(now_s)
        said = [(base[0] + slots, base[1] + planes) for (slots, planes), _ in reversed(self._words.values())]
        return list(dict.fromkeys([(r, p), *self._before, *said, (r - 1, p), (r, p - 1), (r + 1, p), (r, p + 1)]))

    def everywhere(self, now_s: float, set_moves: Moves, placement: Placement) -> list[Moves]:
        """Counts of moves that name every satellite where a chunk that was set at ``set_moves`` may have been left:
        those ``nearby``, and all since it was set.
        """
        name = set_moves, placement.strategy, placement.servers
        if self._since_at != (self._clock, self.moves(now_s)):
            self._since, self._since_at = {}, (self._clock, self.moves(now_s))
        if name not in self._since:
            self._since[name] = self._clock.moves_since(set_moves, placement, now_s)
        return list(dict.fromkeys([*self.nearby(now_s), *self._since[name]]))
