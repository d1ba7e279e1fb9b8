"""Current satellite of a server: a closed form of the clock (SkyMemory paper §3.4 to §3.8).

``Moves`` are the steps of the overhead point since the epoch: a slot move takes the centre one slot west (satellites
fly east under it), a plane move one plane south.

At a slot move the leaving east column hands its chunks to the entering west column; at a plane move the north row to
the south. So after r and p moves a server set at ``(x, y)`` is at ``(((x + r + west) mod w) − west, ((y − p + north)
mod h) − north)`` from the current centre. The mod runs over the full box, empty cells included: so the axes commute.
``Torus.living`` stands in for a gap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput
from skymemory.placement.layout import Box, Cell, Layout, Strategy, layout

if TYPE_CHECKING:
    from skymemory.constellation.presets import Preset


Moves = tuple[int, int]
"""Moves ``(slot_moves, plane_moves)`` since the epoch."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Layout around ``centre``, the satellite overhead at moves (0, 0), and its motion."""

    layout: Layout
    centre: SatelliteId

    def __post_init__(self) -> None:
        torus = self.layout.torus
        if torus.wrap(*self.centre) != self.centre:  # the satellite overhead may be a gap
            raise InvalidInput(
                f"centre {self.centre}: expected plane 0 … {torus.planes - 1} and slot 0 … {torus.slots_per_plane - 1}"
            )

    @classmethod
    def of(
        cls,
        strategy: Strategy,
        servers: int,
        torus: Torus,
        centre: SatelliteId,
        slot_link_s: float = 1.0,
        plane_link_s: float = 1.0,
    ) -> Placement:
        return cls(layout(strategy, servers, torus, slot_link_s, plane_link_s), centre)

    @classmethod
    def for_preset(cls, preset: Preset, strategy: Strategy | None = None, servers: int | None = None) -> Placement:
        return cls.of(
            strategy or preset.strategy,
            preset.servers if servers is None else servers,
            preset.torus,
            preset.centre,
            preset.shell.isl_one_way_s("slot"),
            preset.shell.isl_one_way_s("plane"),
        )

    @property
    def strategy(self) -> Strategy:
        return self.layout.strategy

    @property
    def servers(self) -> int:
        return self.layout.servers

    @property
    def torus(self) -> Torus:
        return self.layout.torus

    @property
    def box(self) -> Box:
        return self.layout.box

    @property
    def migrates(self) -> bool:
        """True if chunks follow the overhead point. ``hop`` stays where it was set, ``baseline`` never moves."""
        return self.layout.strategy not in ("hop", "baseline")

    def centre_at(self, now_moves: Moves) -> SatelliteId:
        return self.torus.wrap(self.centre.plane + now_moves[1], self.centre.slot - now_moves[0])

    def centre_of(self, set_moves: Moves, now_moves: Moves) -> SatelliteId:
        """Return the centre of the box that now holds what was set at ``set_moves``."""
        if self.migrates:
            return self.centre_at(now_moves)
        return self.centre_at(set_moves) if self.layout.strategy == "hop" else self.centre

    def cell_at(self, cell: Cell, set_moves: Moves, now_moves: Moves) -> Cell:
        """Return the cell, at ``now_moves``, of what was set in ``cell`` at ``set_moves``."""
        if not self.migrates:
            return cell
        box = self.layout.box
        return (
            (cell[0] + now_moves[0] - set_moves[0] + box.west) % box.width - box.west,
            (cell[1] - now_moves[1] + set_moves[1] + box.north) % box.height - box.north,
        )

    def replica_cell(self, cell: Cell, replica: int) -> Cell:
        """Return the cell of a copy. Replicas 0 (``cell``) to width · height − 1 are in different cells and, as long as
        rows are left, planes, wherever the box goes.
        """
        box = self.layout.box
        if not 0 <= replica < box.width * box.height:
            raise InvalidInput(f"replica {replica} in a box of {box.width} by {box.height}: too small for it")
        # Down the rows first, which are planes; each row is shifted by half the box, so that copies are apart in both
        # directions.
        across, down = divmod(replica, box.height)
        return (
            (cell[0] + across + down * (box.width // 2) + box.west) % box.width - box.west,
            (cell[1] + down + box.north) % box.height - box.north,
        )

    def locate(
        self, server: int, set_moves: Moves = (0, 0), now_moves: Moves = (0, 0), replica: int = 0
    ) -> SatelliteId:
        """Return the satellite that now holds what was set on ``server`` (0-based) at ``set_moves``."""
        if not 0 <= server < self.layout.servers:
            raise InvalidInput(f"server {server}: expected 0 … {self.layout.servers - 1}")
        cell = self.replica_cell(self.layout.cells[server], replica)
        x, y = self.cell_at(cell, set_moves, now_moves)
        centre = self.centre_of(set_moves, now_moves)
        return self.torus.living(self.torus.wrap(centre.plane + y, centre.slot + x))

    def locate_all(self, set_moves: Moves = (0, 0), now_moves: Moves = (0, 0)) -> tuple[SatelliteId, ...]:
        return _locate_all(self, set_moves, now_moves)

    def moves_of_all_places(self, set_moves: Moves) -> list[Moves]:
        """Return moves for which ``locate`` covers all satellites that can ever hold what was set."""
        if not self.migrates:
            return [set_moves]
        box, torus = self.layout.box, self.torus
        slot_steps = torus.slots_per_plane // math.gcd(box.width, torus.slots_per_plane)
        plane_steps = torus.planes // math.gcd(box.height, torus.planes)
        return [
            (set_moves[0] + across * box.width, set_moves[1] + down * box.height)
            for down in range(plane_steps)
            for across in range(slot_steps)
        ]

    def server_at(self, satellite: SatelliteId, set_moves: Moves = (0, 0), now_moves: Moves = (0, 0)) -> int | None:
        """Return the server that ``satellite`` is for what was set at ``set_moves``, if any."""
        cell = self.cell_of(satellite, self.centre_of(set_moves, now_moves))
        if cell is None:
            return None
        return self.layout.server_of.get(self.cell_at(cell, now_moves, set_moves))

    def cell_of(self, satellite: SatelliteId, centre: SatelliteId) -> Cell | None:
        """Return a satellite's cell around ``centre``; None if outside the box."""
        box = self.layout.box
        column = (satellite.slot - centre.slot + box.west) % self.torus.slots_per_plane
        row = (satellite.plane - centre.plane + box.north) % self.torus.planes
        if column >= box.width or row >= box.height:
            return None
        return column - box.west, row - box.north

    def box_satellites(self, now_moves: Moves = (0, 0)) -> list[SatelliteId]:
        """Return the box overhead, row by row from its north-west corner."""
        centre, torus = self.centre_of(now_moves, now_moves), self.torus
        return [torus.living(torus.wrap(centre.plane + y, centre.slot + x)) for x, y in self.layout.box.cells]


@lru_cache(maxsize=1024)
def _locate_all(placement: Placement, set_moves: Moves, now_moves: Moves) -> tuple[SatelliteId, ...]:
    centre = placement.centre_of(set_moves, now_moves)
    wrap, living = placement.torus.wrap, placement.torus.living
    cells = [placement.cell_at(cell, set_moves, now_moves) for cell in placement.layout.cells]
    return tuple(living(wrap(centre.plane + y, centre.slot + x)) for x, y in cells)


# --- Handovers when the overhead point moves (SkyMemory paper §3.5 and figures 5 and 8) ---
#
# All handovers of a slot move stay within their plane and those of a plane move within their slot, so they run in
# parallel. A satellite computes its own handovers from the clock and needs no command.


class CellHandover(NamedTuple):
    """Transfer of all that ``source`` holds in ``cell`` (before the move)."""

    cell: Cell
    source: SatelliteId
    target: SatelliteId


class ServerHandover(NamedTuple):
    server: int
    source: SatelliteId
    target: SatelliteId


def moves(placement: Placement, from_moves: Moves, to_moves: Moves) -> list[CellHandover]:
    """Return the handovers of the full box: earlier settings may be in its empty cells."""
    if not placement.migrates:
        return []
    torus = placement.torus
    before, after = placement.centre_at(from_moves), placement.centre_at(to_moves)
    handovers = []
    for cell in placement.box.cells:
        x, y = placement.cell_at(cell, from_moves, to_moves)
        source = torus.living(torus.wrap(before.plane + cell[1], before.slot + cell[0]))
        target = torus.living(torus.wrap(after.plane + y, after.slot + x))
        if source != target:
            handovers.append(CellHandover(cell, source, target))
    return handovers


def server_moves(placement: Placement, set_moves: Moves, from_moves: Moves, to_moves: Moves) -> list[ServerHandover]:
    """Return the servers whose satellite changes between these moves."""
    before = placement.locate_all(set_moves, from_moves)
    after = placement.locate_all(set_moves, to_moves)
    return [
        ServerHandover(server, source, target)
        for server, (source, target) in enumerate(zip(before, after, strict=True))
        if source != target
    ]
