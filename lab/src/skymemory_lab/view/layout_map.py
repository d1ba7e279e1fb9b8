"""Text maps of a torus: placements like the paper's figures 4 to 8, and frames in motion.

Planes are rows, north at the top. Satellites fly east. Numbers are 1-based.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput
from skymemory.placement.layout import Strategy
from skymemory.placement.locate import Moves, Placement, ServerHandover, server_moves
from skymemory.text import flowed, wrapped

WHOLE_MAP = 24
"""Planes and slots up to which the whole torus is shown."""
SURROUNDINGS = 2
LISTED_HANDOVERS = 12

# Terminal colours: the box, the satellite overhead, holders of chunks, dead satellites, everything else.
_ORANGE, _GREEN, _PALE, _RED = "\x1b[48;5;215;30m", "\x1b[48;5;114;30m", "\x1b[48;5;230;30m", "\x1b[48;5;167;97m"
_FAINT, _RESET = "\x1b[2m", "\x1b[0m"

CELL_WIDTH, LABEL_WIDTH = 4, 3
LEGEND = ("n a server", "(n) overhead", "□ in the box, no server", "+ holds chunks", "× dead", "· empty")


@dataclass(frozen=True, slots=True)
class LayoutMap:
    """Servers placed at moves (0, 0), their positions at ``now_moves``, and the shown part of the torus."""

    placement: Placement
    now_moves: Moves
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def centre(self) -> SatelliteId:
        return self.placement.centre_at(self.now_moves)

    @property
    def handovers(self) -> list[ServerHandover]:
        return server_moves(self.placement, (0, 0), (0, 0), self.now_moves)

    def server(self, satellite: SatelliteId) -> int | None:
        return self.placement.server_at(satellite, (0, 0), self.now_moves)

    def in_box(self, satellite: SatelliteId) -> bool:
        """Return True if in the box overhead; with ``hop`` that is its servers alone."""
        if self.placement.strategy == "hop":
            return self.server(satellite) is not None
        centre = self.placement.centre_of((0, 0), self.now_moves)
        return self.placement.cell_of(satellite, centre) is not None


@dataclass(frozen=True, slots=True)
class PaperMap:
    strategy: Strategy
    servers: int
    slot_moves: int
    caption: str

    def map(self) -> LayoutMap:
        """Return the map, with satellite 4 of plane 3 overhead at first."""
        placement = Placement.of(self.strategy, self.servers, Torus(5, 7), SatelliteId(2, 3))
        return layout_map(placement, (self.slot_moves, 0))


PAPER_MAPS: dict[int, PaperMap] = {
    4: PaperMap("rotation", 9, 0, "rotation-aware"),
    5: PaperMap("rotation", 9, 1, "rotation-aware, one rotation later"),
    6: PaperMap("hop", 13, 0, "hop-aware"),
    7: PaperMap("rotation_hop", 9, 0, "rotation- and hop-aware"),
    8: PaperMap("rotation_hop", 9, 1, "rotation- and hop-aware, one rotation later"),
}


def paper_map(figure: int) -> LayoutMap:
    """Return the map of figure 4, 5, 6, 7 or 8."""
    if figure not in PAPER_MAPS:
        raise InvalidInput(f"figure {figure} is not a layout; expected one of {', '.join(map(str, PAPER_MAPS))}")
    return PAPER_MAPS[figure].map()


def layout_map(placement: Placement, now_moves: Moves = (0, 0)) -> LayoutMap:
    """Return the map of a whole small torus, else of the box and its surroundings."""
    torus, box = placement.torus, placement.box
    if max(torus.planes, torus.slots_per_plane) <= WHOLE_MAP:
        return LayoutMap(placement, now_moves, tuple(range(torus.planes)), tuple(range(torus.slots_per_plane)))
    centre = placement.centre_of((0, 0), now_moves)
    north, south = box.rows[0] - SURROUNDINGS, box.rows[-1] + SURROUNDINGS
    west, east = box.columns[0] - SURROUNDINGS, box.columns[-1] + SURROUNDINGS
    # Planes and slots wrap around. The range is fixed before indices are taken modulo the torus, so a box at the seam
    # is shown completely; there are never more rows than planes.
    rows = range(centre.plane + north, centre.plane + min(south, north + torus.planes - 1) + 1)
    columns = range(centre.slot + west, centre.slot + min(east, west + torus.slots_per_plane - 1) + 1)
    return LayoutMap(
        placement,
        now_moves,
        tuple(row % torus.planes for row in rows),
        tuple(column % torus.slots_per_plane for column in columns),
    )


def title(layout: LayoutMap) -> str:
    placement, torus = layout.placement, layout.placement.torus
    text = f"{placement.strategy}: {_count(placement.servers, 'server')}"
    if placement.strategy != "hop":
        text += f" in a box of {placement.box.width} × {placement.box.height}"
    text += f", on {_count(torus.planes, 'plane')} of {_count(torus.slots_per_plane, 'satellite')}"
    slot_moves, plane_moves = layout.now_moves
    if slot_moves:
        text += f", after {_count(slot_moves, 'rotation')}"
    if plane_moves:
        text += f"{' and' if slot_moves else ', after'} {_count(plane_moves, 'plane move')}"
    return text


def render(layout: LayoutMap, colour: bool = False, columns: int = 10_000) -> str:
    torus = layout.placement.torus
    # Wide enough for the largest number in parentheses, and a space if there is room.
    width = max(len(str(max(torus.slots_per_plane, layout.placement.servers))), 2) + 3
    label_width = len(f"orb {torus.planes} ")
    if label_width + width * len(layout.columns) > columns:
        width, label_width = width - 1, max(len("sat "), len(f"{torus.planes} "))
    labelled = "orb " if label_width > len("sat ") else ""
    slots = _slots_shown(layout, max(1, (columns - label_width) // width))
    lines = [*wrapped(title(layout), columns, 2), ""]
    numbers = "".join(f"{slot + 1:^{width}}" for slot in slots)
    head = f"{'sat':>{label_width - 1}} {numbers}"
    motion = "motion →"
    fits = len(head) + 1 + len(motion) <= columns
    lines.append(f"{head} {motion}".rstrip() if fits else head.rstrip())
    for plane in layout.rows:
        cells = (_cell(layout, SatelliteId(plane, slot), width, colour) for slot in slots)
        label = f"{labelled}{plane + 1}"
        lines.append(f"{label:<{label_width}}{''.join(cells)}".rstrip())
    legend = [f"(n) overhead: {layout.centre.label}", *_legend(layout)]
    if not fits:
        legend.append(motion)
    if len(slots) < len(layout.columns):
        legend.append(f"{len(slots)} of {len(layout.columns)} satellites of each plane shown")
    lines += ["", *flowed(legend, columns)]
    handovers = layout.handovers
    if handovers:
        lines += ["", *wrapped(f"handed over since they were set: {_count(len(handovers), 'server')}", columns)]
        lines += [
            f"  {server + 1:>{width - 2}}:  {_figure_style(source)} → {_figure_style(target)}"
            for server, source, target in handovers[:LISTED_HANDOVERS]
        ]
        if len(handovers) > LISTED_HANDOVERS:
            lines.append(f"  … and {len(handovers) - LISTED_HANDOVERS} more (--json lists them all)")
    return "\n".join(lines)


def _slots_shown(layout: LayoutMap, most: int) -> Sequence[int]:
    if len(layout.columns) <= most:
        return layout.columns
    middle = (
        layout.columns.index(layout.centre.slot) if layout.centre.slot in layout.columns else len(layout.columns) // 2
    )
    first = min(max(0, middle - most // 2), len(layout.columns) - most)
    return layout.columns[first : first + most]


def _legend(layout: LayoutMap) -> list[str]:
    empty = layout.placement.strategy != "hop" and len(layout.placement.box.cells) > layout.placement.servers
    return ["□ in the box, no server"] * empty + ["· outside"]


def _cell(layout: LayoutMap, satellite: SatelliteId, width: int, colour: bool) -> str:
    server = layout.server(satellite)
    mark = str(server + 1) if server is not None else "□" if layout.in_box(satellite) else "·"
    overhead = satellite == layout.centre
    text = f"{f'({mark})' if overhead else mark:^{width}}"
    if not colour:
        return text
    tint = _GREEN if overhead else _ORANGE if layout.in_box(satellite) else _FAINT
    return f"{tint}{text}{_RESET}"


def _figure_style(satellite: SatelliteId) -> str:
    return f"({satellite.slot + 1},{satellite.plane + 1})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if abs(number) == 1 else f"{number} {noun}s"


@dataclass(frozen=True, slots=True)
class OrbitFrame:
    """State at one moment. ``set_moves`` are the moves at which the numbered values were stored."""

    placement: Placement
    set_moves: Moves
    now_moves: Moves
    dead: frozenset[SatelliteId] = frozenset()
    holding: frozenset[SatelliteId] = frozenset()

    @property
    def centre(self) -> SatelliteId:
        return self.placement.centre_at(self.now_moves)

    def in_box(self, satellite: SatelliteId) -> bool:
        return self.placement.cell_of(satellite, self.centre) is not None

    def mark(self, satellite: SatelliteId) -> str:
        if satellite in self.dead:
            mark = "×"
        elif (server := self.placement.server_at(satellite, self.set_moves, self.now_moves)) is not None:
            mark = str(server + 1)
        elif satellite in self.holding:
            mark = "+"
        else:
            mark = "□" if self.in_box(satellite) else "·"
        return f"({mark})" if satellite == self.centre else mark


def render_frame(frame: OrbitFrame, colour: bool = False, width: int = 10_000) -> list[str]:
    """Return slots, then a line per plane, equal in number and width for a torus and ``width``."""
    torus = frame.placement.torus
    slots = _slots_around(frame.centre.slot, torus, max(1, (width - LABEL_WIDTH) // CELL_WIDTH))
    lines = ["".ljust(LABEL_WIDTH) + "".join(f"{slot + 1:^{CELL_WIDTH}}" for slot in slots)]
    for plane in range(torus.planes):
        cells = [_frame_cell(frame, SatelliteId(plane, slot), colour) for slot in slots]
        lines.append(f"{plane + 1:<{LABEL_WIDTH}}" + "".join(cells))
    return lines


def _slots_around(centre: int, torus: Torus, most: int) -> list[int]:
    if torus.slots_per_plane <= most:
        return list(range(torus.slots_per_plane))
    return [(centre - most // 2 + at) % torus.slots_per_plane for at in range(most)]


def _frame_cell(frame: OrbitFrame, satellite: SatelliteId, colour: bool) -> str:
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
