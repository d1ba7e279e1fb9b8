"""Cells on the ground in place of satellites: users move between them, and the cache follows (paper §6).

A base station is linked to the four around it, as a satellite is; rows are planes, columns are slots. What moves is not
the grid but its user, so his path takes the place of the orbit: each border he crosses is a move, and the same
placement and migration keep the cache around him. A grid has edges and the torus has none: the path must keep so far
from the edges that no box, and no shortest way inside one, crosses the seam.

One grid has one path: a train, a bus, or a user by himself. Users who part ways need a grid (a clock) each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.constellation.track import Knot, Track
from skymemory.errors import InvalidInput


class Stop(NamedTuple):
    """A user is here at a time, straight ways in between. Rows grow south and columns east, in cells; a whole number is
    the middle of a cell.
    """

    time_s: float
    row: float
    column: float


@dataclass(frozen=True, slots=True)
class CellGrid:
    """``rows`` by ``columns`` of base stations, each with its four neighbours."""

    rows: int
    columns: int

    @property
    def torus(self) -> Torus:
        """The grid as placement and routing see it: every cell has an address, opposite edges are never used as one."""
        return Torus(self.rows, self.columns)

    def track(self, path: Sequence[Stop], margin: int) -> Track:
        """The moves of a box around a user on this path, who stands still before its first stop and after its last.

        ``margin`` is how many cells the box reaches from its centre.

        Raises:
            InvalidInput: no stops, stops out of order, or one too near to the edge of the grid.
        """
        if not path:
            raise InvalidInput("a path without stops: expected at least one, where the user is")
        for number, stop in enumerate(path, start=1):
            if not all(math.isfinite(part) for part in stop):
                raise InvalidInput(f"stop {number} {tuple(stop)}: expected seconds, row and column")
            if number > 1 and stop.time_s <= path[number - 2].time_s:
                raise InvalidInput(f"stop {number} is at {stop.time_s:g} s: each must be later than the one before")
            for name, at, count in (("row", stop.row, self.rows), ("column", stop.column, self.columns)):
                lowest, highest = margin - 0.5, count - margin - 0.5
                if not lowest <= at < highest:
                    raise InvalidInput(
                        f"stop {number} is in {name} {at:g} of {count}: a box that reaches {margin} cells needs "
                        f"{lowest:g} to less than {highest:g}, so that it stays off the edge; use a larger grid"
                    )
        return Track(tuple(Knot(*stop) for stop in path))

    def centre(self, path: Sequence[Stop], margin: int) -> SatelliteId:
        """The cell the user is in at time 0."""
        return SatelliteId(*self.track(path, margin).cell_at(0.0))


def parse_grid(text: str) -> CellGrid:
    """``24x24``: rows and columns. Raises ``InvalidInput``."""
    rows, cross, columns = text.partition("x")
    if not (cross and rows.isascii() and columns.isascii() and rows.isdigit() and columns.isdigit()):
        raise InvalidInput(f"a grid of {text!r}: expected rows and columns, such as 24x24")
    if not (int(rows) <= 200 and int(columns) <= 200):
        raise InvalidInput(f"a grid of {text}: expected at most 200x200")
    return CellGrid(int(rows), int(columns))
