"""The way of the overhead point over the grid of satellites, in straight pieces: where it is, how often it has
changed cell, when it will next.

A host that stands still has one piece that never ends: the anchor's closed form. A host that moves has a piece for
each quarter of a degree of its way, so that satellites and clients compute the same moves to the bit, and the next move
exactly. A user who walks through a grid of cells has a piece between any two places where he was.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from skymemory.constellation.orbit import Shell
from skymemory.constellation.trajectory import Place, Trajectory, host_at
from skymemory.constellation.visibility import nearest, overhead_cell, plane_move_period_s, slot_move_period_s

_PIECE_RAD = math.radians(0.25)
"""The cell of the overhead point is interpolated over so much of a moving host's way."""


class Knot(NamedTuple):
    """The overhead point at a time, in cells: real numbers that never wrap."""

    time_s: float
    plane: float
    slot: float


Rates = tuple[float, float]
"""Planes and slots per second."""
STILL: Rates = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Track:
    """Knots in ascending order of time, at least one; ``rates`` hold before the first and after the last."""

    knots: tuple[Knot, ...]
    rates: Rates = STILL
    _times: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _origin: tuple[int, int] = field(init=False, repr=False, compare=False)
    """The cell overhead at time 0."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_times", tuple(knot.time_s for knot in self.knots))
        object.__setattr__(self, "_origin", self.cell_at(0.0))

    def cell(self, time_s: float) -> tuple[float, float]:
        """``(plane, slot)`` of the overhead point, real numbers."""
        piece = bisect_right(self._times, time_s)
        at, plane, slot = self.knots[max(piece - 1, 0)]
        plane_rate, slot_rate = self._rates_of(piece)
        return plane + plane_rate * (time_s - at), slot + slot_rate * (time_s - at)

    def _rates_of(self, piece: int) -> Rates:
        """Of the piece that ends with knot ``piece``."""
        if not 0 < piece < len(self.knots):
            return self.rates
        before, after = self.knots[piece - 1], self.knots[piece]
        seconds = after.time_s - before.time_s
        return (after.plane - before.plane) / seconds, (after.slot - before.slot) / seconds

    def cell_at(self, time_s: float) -> tuple[int, int]:
        """``(plane, slot)`` of the cell overhead: the anchor, not wrapped."""
        plane, slot = self.cell(time_s)
        return nearest(plane), nearest(slot)

    def moves(self, time_s: float) -> tuple[int, int]:
        """Slot moves (each one slot west) and plane moves (each one plane south) since time 0."""
        plane0, slot0 = self._origin
        plane, slot = self.cell_at(time_s)
        return slot0 - slot, plane - plane0

    def next_crossing_s(self, time_s: float) -> float:
        """When the overhead point next comes to the edge of its cell, to within rounding; infinite if never."""
        piece = bisect_right(self._times, time_s)
        while True:
            end_s = self.knots[piece].time_s if piece < len(self.knots) else math.inf
            plane, slot = self.cell(time_s)
            plane_rate, slot_rate = self._rates_of(piece)
            crossing_s = time_s + min(_until_edge_s(plane, plane_rate), _until_edge_s(slot, slot_rate))
            if crossing_s <= end_s or end_s == math.inf:
                return crossing_s
            time_s = end_s
            piece += 1


def _until_edge_s(cell: float, rate: float) -> float:
    if rate == 0:
        return math.inf
    middle = nearest(cell)
    return (middle + 0.5 - cell) / rate if rate > 0 else (cell - (middle - 0.5)) / -rate


def track_over(shell: Shell, place: Place, epoch_unix_s: float) -> Track:
    """The track of the overhead point of ``place`` on the climbing branch (see ``visibility``), from the epoch on.

    For a moving host it is exact at its waypoints and every quarter of a degree between them.
    """
    rates = (1 / plane_move_period_s(shell), -1 / slot_move_period_s(shell))
    times = _knot_times(place) if isinstance(place, Trajectory) else [0.0]
    knots: list[Knot] = []
    for time_s in times:
        plane, slot = overhead_cell(shell, host_at(place, time_s), epoch_unix_s, time_s)
        if knots:
            # Longitudes wrap; the way does not. What turns with the Earth is known, the rest is the nearer way round.
            expected = knots[-1].plane + rates[0] * (time_s - knots[-1].time_s)
            plane += shell.planes * round((expected - plane) / shell.planes)
        knots.append(Knot(time_s, plane, slot))
    return Track(tuple(knots), rates)


def _knot_times(way: Trajectory) -> list[float]:
    times = [way.waypoints[0].time_s]
    for leg, (here, there) in enumerate(zip(way.waypoints, way.waypoints[1:], strict=False)):
        pieces = max(1, math.ceil(way.leg_rad(leg) / _PIECE_RAD))
        times += [here.time_s + (there.time_s - here.time_s) * piece / pieces for piece in range(1, pieces + 1)]
    return times
