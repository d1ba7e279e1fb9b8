"""One frame of a constellation in motion, as text: the box on the grid, dead satellites, servers and holders of chunks.

Planes are rows and slots are columns; satellites fly east, so the box walks west over the grid. Numbers are 1-based.
"""

from __future__ import annotations

from dataclasses import dataclass

from skymemory.constellation.torus import SatelliteId
from skymemory.placement.locate import Moves, Placement

CELL_WIDTH = 4
LABEL_WIDTH = 3
_GREEN, _ORANGE, _PALE, _RED, _FAINT, _RESET = (
    "\x1b[48;5;114;30m",
    "\x1b[48;5;215;30m",
    "\x1b[48;5;230;30m",
    "\x1b[48;5;167;97m",
    "\x1b[2m",
    "\x1b[0m",
)
LEGEND = "n a server   (n) overhead   □ in the box, no server   + holds chunks   × dead   · empty"


@dataclass(frozen=True, slots=True)
class OrbitFrame:
    """State at one moment. ``set_moves``: moves at which the values with numbered servers were stored."""

    placement: Placement
    set_moves: Moves
    now_moves: Moves
    dead: frozenset[SatelliteId] = frozenset()
    holding: frozenset[SatelliteId] = frozenset()

    @property
    def centre(self) -> SatelliteId:
        """The satellite overhead."""
        return self.placement.centre_at(self.now_moves)

    def in_box(self, satellite: SatelliteId) -> bool:
        return self.placement.cell_of(satellite, self.centre) is not None

    def mark(self, satellite: SatelliteId) -> str:
        """Text of the satellite's cell."""
        if satellite in self.dead:
            mark = "×"
        elif (server := self.placement.server_at(satellite, self.set_moves, self.now_moves)) is not None:
            mark = str(server + 1)
        elif satellite in self.holding:
            mark = "+"
        else:
            mark = "□" if self.in_box(satellite) else "·"
        return f"({mark})" if satellite == self.centre else mark


def frame_width(slots_per_plane: int) -> int:
    """Terminal columns of a frame."""
    return LABEL_WIDTH + CELL_WIDTH * slots_per_plane


def render_frame(frame: OrbitFrame, colour: bool = False) -> list[str]:
    """The frame's lines: slots, then a line per plane. Number and width are constant for a torus."""
    torus = frame.placement.torus
    lines = ["".ljust(LABEL_WIDTH) + "".join(f"{slot + 1:^{CELL_WIDTH}}" for slot in range(torus.slots_per_plane))]
    for plane in range(torus.planes):
        cells = [_cell(frame, SatelliteId(plane, slot), colour) for slot in range(torus.slots_per_plane)]
        lines.append(f"{plane + 1:<{LABEL_WIDTH}}" + "".join(cells))
    return lines


def _cell(frame: OrbitFrame, satellite: SatelliteId, colour: bool) -> str:
    mark = frame.mark(satellite)
    text = f"{mark:^{CELL_WIDTH}}"
    if not colour:
        return text
    if satellite in frame.dead:
        tint = _RED
    elif satellite == frame.centre:
        tint = _GREEN
    elif frame.in_box(satellite):
        tint = _ORANGE
    else:
        tint = _PALE if mark == "+" else _FAINT
    return f"{tint}{text}{_RESET}"
