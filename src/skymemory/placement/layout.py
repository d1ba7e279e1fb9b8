"""The five layouts: the assignment of cells around the centre to servers (SkyMemory paper §3.4 to §3.7).

A cell ``(x, y)`` is the satellite ``x`` slots east and ``y`` planes south of the centre. A box of w columns and h rows
has an even side's extra column in the west, where satellites rise, and its extra row in the south.

- ``rotation``      row by row from the north-west corner of the box.
- ``hop``           breadth-first from the centre, neighbours in the order north, east, south, west; no box.
- ``rotation_hop``  the same walk confined to the box.
- ``cost``          by delay instead of hops, in the smallest box with the least worst delay.
- ``baseline``      a fixed list, row by row, that never moves.

A new one has its name in ``Strategy``, a case in ``_layout``, a code in ``protocol.clock.STRATEGY_CODES`` and a twin in
``flight/core/placement``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Literal, assert_never, get_args

from skymemory.config import suggestion
from skymemory.constellation.torus import Torus
from skymemory.errors import InvalidInput

Strategy = Literal["rotation", "hop", "rotation_hop", "cost", "baseline"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
Cell = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Box:
    """Rectangle of cells: columns ``-west … width-1-west`` by rows ``-north … height-1-north`` around the centre."""

    width: int
    height: int
    west: int
    north: int

    @classmethod
    def centred(cls, width: int, height: int) -> Box:
        return cls(width, height, west=width // 2, north=(height - 1) // 2)

    @property
    def columns(self) -> range:
        return range(-self.west, self.width - self.west)

    @property
    def rows(self) -> range:
        return range(-self.north, self.height - self.north)

    @property
    def cells(self) -> list[Cell]:
        return [(x, y) for y in self.rows for x in self.columns]

    def __contains__(self, cell: object) -> bool:
        match cell:
            case (int(x), int(y)):
                return x in self.columns and y in self.rows
            case _:
                return False


@dataclass(frozen=True, slots=True)
class Layout:
    """Assignment of cells around the centre to servers: server ``s`` is in ``cells[s]``."""

    strategy: Strategy
    servers: int
    torus: Torus
    slot_link_s: float
    plane_link_s: float
    box: Box = field(compare=False)
    cells: tuple[Cell, ...] = field(compare=False, repr=False)
    server_of: dict[Cell, int] = field(compare=False, repr=False)

    @property
    def worst_path_s(self) -> float:
        return max(abs(x) * self.slot_link_s + abs(y) * self.plane_link_s for x, y in self.cells)


def parse_strategy(name: str) -> Strategy:
    wanted = name.lower().replace("-", "_")
    for strategy in STRATEGIES:
        if strategy == wanted:
            return strategy
    raise InvalidInput(f"unknown strategy {name!r}; {suggestion(wanted, STRATEGIES)}")


def box_shape(servers: int, torus: Torus) -> tuple[int, int]:
    check_servers(servers, torus)
    root = math.isqrt(servers - 1) + 1
    width = min(torus.slots_per_plane, max(root, -(-servers // torus.planes)))
    return width, -(-servers // width)


def check_servers(servers: int, torus: Torus) -> None:
    if not 1 <= servers <= torus.size:
        raise InvalidInput(
            f"{servers} servers on {torus.planes} planes of {torus.slots_per_plane} satellites: "
            f"expected 1 to {torus.size}, since each server is a different satellite"
        )


def layout(
    strategy: Strategy, servers: int, torus: Torus, slot_link_s: float = 1.0, plane_link_s: float = 1.0
) -> Layout:
    """Return a layout; only ``cost`` and ``worst_path_s`` use the delays. InvalidInput for too many servers, or no
    delay.
    """
    check_servers(servers, torus)
    if slot_link_s <= 0 or plane_link_s <= 0:
        raise InvalidInput(f"link delays of {slot_link_s} s and {plane_link_s} s: expected more than 0")
    return _layout(parse_strategy(strategy), servers, torus, slot_link_s, plane_link_s)


@lru_cache(maxsize=256)
def _layout(strategy: Strategy, servers: int, torus: Torus, slot_link_s: float, plane_link_s: float) -> Layout:
    """Do ``layout``, cached."""
    box = Box.centred(*box_shape(servers, torus))
    match strategy:
        case "rotation" | "baseline":
            cells = tuple(box.cells[:servers])
        case "rotation_hop":
            cells = _walk(torus, box)[:servers]
        case "hop":
            cells = _walk(torus, _torus_box(torus))[:servers]
            box = _around(cells)
        case "cost":
            box, cells = _cheapest(servers, torus, slot_link_s, plane_link_s)
        case _:
            assert_never(strategy)
    server_of = {cell: server for server, cell in enumerate(cells)}
    return Layout(strategy, servers, torus, slot_link_s, plane_link_s, box, cells, server_of)


def _torus_box(torus: Torus) -> Box:
    return Box.centred(torus.slots_per_plane, torus.planes)


def _around(cells: tuple[Cell, ...]) -> Box:
    xs, ys = [x for x, _ in cells], [y for _, y in cells]
    return Box(max(xs) - min(xs) + 1, max(ys) - min(ys) + 1, west=-min(xs), north=-min(ys))


@lru_cache(maxsize=256)
def _walk(torus: Torus, box: Box) -> tuple[Cell, ...]:
    """Return the cells of a box, breadth first from the centre."""
    visited: set[Cell] = {(0, 0)}
    order: list[Cell] = []
    queue: deque[Cell] = deque(visited)
    while queue:
        x, y = queue.popleft()
        order.append((x, y))
        for dx, dy in ((0, -1), (1, 0), (0, 1), (-1, 0)):
            column = (x + dx + box.west) % torus.slots_per_plane - box.west
            row = (y + dy + box.north) % torus.planes - box.north
            cell = column, row
            if cell not in visited and column < box.width - box.west and row < box.height - box.north:
                visited.add(cell)
                queue.append(cell)
    return tuple(order)


@lru_cache(maxsize=16)
def _by_delay(torus: Torus, slot_link_ps: int, plane_link_ps: int) -> tuple[tuple[Cell, int], ...]:
    """Return every cell with its delay, nearest first. Whole picoseconds break ties alike on every machine."""
    priced = [((x, y), abs(x) * slot_link_ps + abs(y) * plane_link_ps) for x, y in _walk(torus, _torus_box(torus))]
    return tuple(sorted(priced, key=lambda cell_and_delay: cell_and_delay[1]))


def _cheapest(servers: int, torus: Torus, slot_link_s: float, plane_link_s: float) -> tuple[Box, tuple[Cell, ...]]:
    """Return the smallest box with ``servers`` cells within the least worst delay, and these cells."""
    priced = _by_delay(torus, max(1, round(slot_link_s * 1e12)), max(1, round(plane_link_s * 1e12)))
    worst_ps = priced[servers - 1][1]
    near = [cell for cell, delay_ps in priced if delay_ps <= worst_ps]
    # Boxes grow west, east, west … and south, north, south …, so a box of w columns and h rows holds just the cells
    # whose ranks in that order are below w and h.
    per_column = [0] * torus.slots_per_plane
    rows: list[list[int]] = [[] for _ in range(torus.planes)]
    for x, y in near:
        rows[2 * y - 1 if y > 0 else -2 * y].append(-2 * x - 1 if x < 0 else 2 * x)
    shapes = []
    for height, row in enumerate(rows, start=1):
        for column in row:
            per_column[column] += 1
        width = bisect_left(list(accumulate(per_column)), servers) + 1
        if width <= torus.slots_per_plane:
            shapes.append((width, height))
    width, height = min(shapes, key=lambda shape: (shape[0] * shape[1], abs(shape[0] - shape[1]), shape[0]))
    box = Box.centred(width, height)
    return box, tuple(cell for cell in near if cell in box)[:servers]
