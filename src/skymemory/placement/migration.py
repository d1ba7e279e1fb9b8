"""Who hands its chunks to whom when the overhead point moves (SkyMemory paper §3.5 and figures 5 and 8).

All handovers of a slot move stay within their plane and those of a plane move within their slot, so they run
in parallel. A satellite knows the clock, computes its own line of this list and needs no command.
"""

from __future__ import annotations

from typing import NamedTuple

from skymemory.constellation.torus import SatelliteId
from skymemory.placement.layout import Cell
from skymemory.placement.locate import Moves, Placement


class Handover(NamedTuple):
    """Everything ``source`` holds in ``cell`` (a cell of the box before the move) goes to ``target``."""

    cell: Cell
    source: SatelliteId
    target: SatelliteId


class ServerHandover(NamedTuple):
    """What was set on ``server`` goes from ``source`` to ``target``."""

    server: int
    source: SatelliteId
    target: SatelliteId


def moves(placement: Placement, from_moves: Moves, to_moves: Moves) -> list[Handover]:
    """The handovers of the whole box, whenever its chunks were set, row by row; none if nothing migrates.

    The box is taken with its empty cells: what was set before earlier moves may be in any of them by now.
    """
    if not placement.migrates:
        return []
    torus = placement.torus
    before, after = placement.centre_at(from_moves), placement.centre_at(to_moves)
    handovers = []
    for cell in placement.box.cells:
        x, y = placement.cell_at(cell, from_moves, to_moves)
        source = torus.wrap(before.plane + cell[1], before.slot + cell[0])
        target = torus.wrap(after.plane + y, after.slot + x)
        if source != target:
            handovers.append(Handover(cell, source, target))
    return handovers


def server_moves(placement: Placement, set_moves: Moves, from_moves: Moves, to_moves: Moves) -> list[ServerHandover]:
    """The handovers of what was set at ``set_moves``, by server."""
    before = placement.locate_all(set_moves, from_moves)
    after = placement.locate_all(set_moves, to_moves)
    return [
        ServerHandover(server, source, target)
        for server, (source, target) in enumerate(zip(before, after, strict=True))
        if source != target
    ]


def handover_target(
    placement: Placement, satellite: SatelliteId, from_moves: Moves, to_moves: Moves
) -> SatelliteId | None:
    """To whom ``satellite`` hands everything it holds for this box; None when it keeps it or is not in the
    box. O(1).
    """
    if not placement.migrates:
        return None
    cell = placement.cell_of(satellite, placement.centre_at(from_moves))
    if cell is None:
        return None
    x, y = placement.cell_at(cell, from_moves, to_moves)
    after = placement.centre_at(to_moves)
    target = placement.torus.wrap(after.plane + y, after.slot + x)
    return None if target == satellite else target
