"""A ground host's count of moves: its own clock, corrected by what most satellites say of theirs.

No single satellite is believed, for its clock may be the wrong one. Its word is remembered, and one place more where a
chunk may be; the count follows when most of the satellites that spoke last agree. A clock that is off by less than a
move (on Starlink A, 260 s) makes a difference of one step, which readers look for anyway; what is further from the
majority is counted as ``clocks_beyond_bound``.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections import deque

from skymemory.constellation.torus import SatelliteId
from skymemory.metrics import Counters
from skymemory.placement.locate import Moves, Placement
from skymemory.protocol.motion import MoveClock

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
