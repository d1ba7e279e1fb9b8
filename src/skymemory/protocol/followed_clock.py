"""A ground host's count of moves: its own clock, corrected by what satellites say of theirs."""

from __future__ import annotations

from collections import deque

from skymemory.placement.locate import Moves
from skymemory.protocol.motion import MoveClock

_REMEMBERED = 4


class FollowedClock:
    """Starts from a ``MoveClock``, which an operator's push makes wrong; remembers where the box has lately been."""

    def __init__(self, clock: MoveClock) -> None:
        self._clock = clock
        self._latest: Moves | None = None
        self._before: deque[Moves] = deque(maxlen=_REMEMBERED)

    def moves(self, now_s: float) -> Moves:
        moves = self._clock.moves(now_s)
        if moves != self._latest:
            if moves in self._before:
                self._before.remove(moves)
            if self._latest is not None:
                self._before.appendleft(self._latest)
            self._latest = moves
        return moves

    def at(self, time_s: float) -> Moves:
        """The moves at another time, as far as is known now; nothing is remembered of it."""
        return self._clock.moves(time_s)

    def told(self, moves: Moves, round_trip_s: float, now_s: float) -> None:
        """A satellite counted ``moves`` when it answered; what was right a round trip ago is only late, not wrong."""
        ours = self.moves(now_s)
        if moves != ours and moves != self._clock.moves(now_s - round_trip_s):
            self._clock = self._clock.push(moves[0] - ours[0], moves[1] - ours[1])
            self.moves(now_s)

    def nearby(self, now_s: float) -> list[Moves]:
        """Counts of moves at which a chunk may have been left or already be awaited: now first, then what was lately
        true here, then one step back and one ahead on each axis.
        """
        r, p = self.moves(now_s)
        return list(dict.fromkeys([(r, p), *self._before, (r - 1, p), (r, p - 1), (r + 1, p), (r, p + 1)]))
