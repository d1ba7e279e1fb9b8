"""How far the box has moved: a pure function of the clock, the same for satellites and clients.

Slot moves count how often the overhead point passed to the next slot, plane moves how often to the next plane
(the Earth turning under the orbits). Both are counted from the epoch and may be pushed by an operator (ADVANCE).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from skymemory.constellation.sight import Sight
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.constellation.track import Track
from skymemory.errors import InvalidInput
from skymemory.placement.layout import Strategy
from skymemory.placement.locate import Moves, Placement

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
        self, torus: Torus, centre: SatelliteId, slot_link_s: float = 1.0, plane_link_s: float = 1.0,
        sight: Sight | None = None,
    ) -> None:  # fmt: skip
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
