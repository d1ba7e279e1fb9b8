"""Figures 3, 11 and 12 of the SkyMemory paper, drawn from running objects."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from skymemory.constellation.orbit import Shell
from skymemory.constellation.presets import PRESETS
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.constellation.visibility import DEFAULT_MASK_DEG
from skymemory.index.radix import BlockInfo, RadixIndex
from skymemory.kv.block import hash_blocks
from skymemory.kv.context import CacheContext
from skymemory.placement.locate import Placement
from skymemory.units import EARTH_RADIUS_M
from skymemory_lab.view.drawing import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    ORANGES,
    PAPER,
    RED,
    WIDE_IN,
    Exhibit,
    Numbers,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ELEVATION_DEG, _AZIMUTH_DEG = 50, -154
GRID, GRID_CENTRE = Torus(5, 7), SatelliteId(2, 3)


def draw_grid() -> Figure:
    """Draw figure 3: the +GRID as a map, and closed to a torus."""
    figure = new_figure(WIDE_IN, 3.1)
    flat = figure.add_subplot(1, 2, 1)
    ring: Any = figure.add_subplot(1, 2, 2, projection="3d")  # mplot3d has no types
    linked = GRID.neighbours(GRID_CENTRE)
    for satellite in GRID.satellites():
        # The links to the east and south of each satellite are all links, once.
        for neighbour in (GRID.east(satellite), GRID.south(satellite)):
            plus = GRID_CENTRE in (satellite, neighbour)
            colour, width = (AMBER, 2.2) if plus else (GREY, 0.8)
            dx, dy = neighbour.slot - satellite.slot, neighbour.plane - satellite.plane
            if abs(dx) + abs(dy) == 1:
                flat.plot(
                    [satellite.slot, neighbour.slot],
                    [satellite.plane, neighbour.plane],
                    color=colour,
                    linewidth=width,
                    zorder=1,
                )
            else:  # around the ring: leaves at one edge and returns at the other
                half = 0.42 if dy == 0 else 0.0, 0.42 if dx == 0 else 0.0
                for end, sign in ((satellite, 1), (neighbour, -1)):
                    xs = [end.slot, end.slot + sign * half[0]]
                    ys = [end.plane, end.plane + sign * half[1]]
                    flat.plot(xs, ys, ":", color=GREY, linewidth=1.1, zorder=1)
            points = _arc(satellite, neighbour)
            ring.plot(*zip(*points, strict=True), color=colour, linewidth=width, alpha=_alpha(points[4]))
        colour = GREEN if satellite == GRID_CENTRE else AMBER if satellite in linked else PAPER
        flat.plot(satellite.slot, satellite.plane, "o", color=colour, markeredgecolor=INK, markersize=6.5, zorder=2)
        at = _on_ring(satellite.plane, satellite.slot)
        ring.plot(*at, "o", color=colour, markeredgecolor=INK, markersize=4, alpha=_alpha(at))
    flat.set_xlim(-0.6, GRID.slots_per_plane - 0.4)
    flat.set_ylim(GRID.planes - 0.4, -0.6)
    flat.set_xticks(range(GRID.slots_per_plane), [str(slot + 1) for slot in range(GRID.slots_per_plane)])
    flat.set_yticks(range(GRID.planes), [str(plane + 1) for plane in range(GRID.planes)])
    flat.tick_params(length=0)
    flat.grid(visible=False)
    flat.set_aspect("equal")
    for spine in flat.spines.values():
        spine.set_visible(False)
    flat.set_xlabel("satellite   (motion →)")
    flat.set_ylabel("orbital plane")
    flat.set_title("(a) four links each; dotted ones wrap around")
    ring.set_axis_off()
    ring.set_box_aspect((1, 1, 0.5), zoom=1.45)
    ring.view_init(elev=_ELEVATION_DEG, azim=_AZIMUTH_DEG)
    ring.set_title("(b) the same satellites and links, closed", y=1.0)
    figure.suptitle("Figure 3. +GRID: every satellite is linked to its neighbours in two rings", color=INK)
    return figure


def _on_ring(plane: float, slot: float) -> tuple[float, float, float]:
    # Return the point of a satellite on the drawn torus.
    around, across = 2 * math.pi * slot / GRID.slots_per_plane, 2 * math.pi * plane / GRID.planes
    radius = 1 + 0.42 * math.cos(across)
    return radius * math.cos(around), radius * math.sin(around), 0.42 * math.sin(across)


def _alpha(point: tuple[float, float, float]) -> float:
    # Return the opacity of a point: less on the torus's far side.
    up, around = math.radians(_ELEVATION_DEG), math.radians(_AZIMUTH_DEG)
    towards = math.cos(up) * math.cos(around), math.cos(up) * math.sin(around), math.sin(up)
    near = sum(a * b for a, b in zip(point, towards, strict=True)) / 1.42
    return 0.18 + 0.82 * max(0.0, min(1.0, 0.5 + near))


def _arc(source: SatelliteId, target: SatelliteId) -> list[tuple[float, float, float]]:
    d_slot, d_plane = GRID.delta(source, target)
    return [_on_ring(source.plane + d_plane * step / 8, source.slot + d_slot * step / 8) for step in range(9)]


def _grid_numbers() -> Numbers:
    rows = []
    for satellite in GRID.satellites():
        for direction, neighbour in zip(("north", "east", "south", "west"), GRID.neighbours(satellite), strict=True):
            wraps = abs(neighbour.slot - satellite.slot) + abs(neighbour.plane - satellite.plane) > 1
            rows.append(
                (
                    satellite.slot + 1,
                    satellite.plane + 1,
                    direction,
                    neighbour.slot + 1,
                    neighbour.plane + 1,
                    int(wraps),
                )
            )
    return Numbers(("satellite", "plane", "link", "to_satellite", "to_plane", "wraps_around"), rows)


BLOCK_TOKENS, LOOKED_UP_BLOCKS, KNOWN_BLOCKS = 128, 4, 3
# Bytes of a chunk, and of a block of TinyLlama-1.1B in 16 bit.
_CHUNK_BYTES, _BLOCK_BYTES = 6144, 2_883_584
_ROTATIONS = 1


class _LookUp:
    """A lookup: three of a prompt's four blocks were stored a rotation ago."""

    def __init__(self) -> None:
        self.prompt = "".join(
            f"Clause {number}: what was computed once is kept in the sky. " for number in range(1, 12)
        )
        self.tokens = list(self.prompt.encode())
        context = CacheContext("TinyLlama-1.1B", "revision", "bytes", "bfloat16", "layout")
        self.hashes = hash_blocks(context.digest(), self.tokens, BLOCK_TOKENS)
        chunks = -(-_BLOCK_BYTES // _CHUNK_BYTES)
        info = BlockInfo(chunks, _BLOCK_BYTES, 0, 0.0, 0, 0, "rotation_hop", 9, context.digest(), _CHUNK_BYTES)
        index = RadixIndex()
        index.add(self.hashes[:KNOWN_BLOCKS], [replace(info, value_crc=at) for at in range(KNOWN_BLOCKS)])
        self.found = index.longest_prefix(self.hashes)
        entry = index.get(self.hashes[self.found - 1])
        assert entry is not None
        self.entry = entry
        placement = Placement.of("rotation_hop", entry.servers, GRID, GRID_CENTRE)
        self.now = placement.locate_all((entry.slot_moves, entry.plane_moves), (_ROTATIONS, 0))

    def chunks_on(self, server: int) -> int:
        return len(range(server, self.entry.chunks, self.entry.servers))


@lru_cache(maxsize=1)
def _looked_up() -> _LookUp:
    return _LookUp()


def draw_look_up() -> Figure:
    query = _looked_up()
    figure = new_figure(WIDE_IN, 5.0)
    axes = figure.add_subplot()
    axes.set_xlim(0, 100.4)
    axes.set_ylim(66, 0)
    axes.axis("off")
    left_edge, wide = 18.0, 81.8

    def stage(y: float, name: str, what: str) -> None:
        axes.text(0, y, name, fontsize=8, fontweight="bold", va="center")
        axes.text(0, y + 2.8, what, fontsize=7, va="center", color="#5b6b78")

    stage(3.0, "prompt", f"{len(query.prompt)} characters")
    words = query.prompt[:96].rstrip() + " …"
    _box(axes, (left_edge, 0.5), (wide, 6.5), words, ORANGES[5])
    stage(16.0, "blocks", f"{BLOCK_TOKENS} tokens each")
    cells, gap = LOOKED_UP_BLOCKS + 1, 1.5
    size = (wide - gap * (cells - 1)) / cells
    for block in range(cells):
        x = left_edge + block * (size + gap)
        full = block < len(query.hashes)
        first, last = block * BLOCK_TOKENS, min((block + 1) * BLOCK_TOKENS, len(query.tokens)) - 1
        _box(axes, (x, 13.5), (size, 6.5), f"tokens {first}–{last}", ORANGES[4] if full else PAPER)
        if not full:
            axes.text(x + size, 24.0, "not full: computed", ha="right", va="center", fontsize=7)
            continue
        is_known = block < query.found
        _box(axes, (x, 27.0), (size, 6.5), query.hashes[block][:4].hex(), "#d8ecdf" if is_known else PAPER)
        _arrow(axes, x + size / 2, 20.0, x + size / 2, 27.0)
        if block:
            _arrow(axes, x - gap - 0.2, 30.2, x + 0.2, 30.2)
    stage(29.5, "hashes", "each of all before")
    stage(42.0, "radix index", "on the ground")
    info = query.entry
    text = (
        f"longest prefix: {query.found} of {len(query.hashes)} blocks → {info.chunks} chunks of {_CHUNK_BYTES:,} bytes"
        f" on {info.servers} servers, {info.strategy}, set at {info.slot_moves} rotations"
    )
    _box(axes, (left_edge, 39.5), (wide, 6.5), text, "#d8ecdf")
    x = left_edge + (query.found - 1) * (size + gap) + size / 2
    _arrow(axes, x, 33.5, x, 39.5)
    stage(56.0, "chunks", "(satellite, plane)")
    axes.text(0, 61.6, "one rotation later", fontsize=7, va="center", color="#5b6b78")
    _arrow(axes, left_edge + wide / 2, 46.0, left_edge + wide / 2, 52.0)
    small = (wide - 0.8 * (info.servers - 1)) / info.servers
    for server, satellite in enumerate(query.now):
        at = left_edge + server * (small + 0.8)
        words = f"server {server + 1}\n({satellite.slot + 1},{satellite.plane + 1})\n{query.chunks_on(server)} chunks"
        _box(axes, (at, 52.0), (small, 13.0), words, ORANGES[3] if server == 0 else ORANGES[5])
    figure.suptitle("Figure 11. From a prompt to its chunks: one lookup, with the values that it computes", color=INK)
    return figure


def _box(axes: Axes, corner: tuple[float, float], size: tuple[float, float], words: str, colour: str) -> None:
    from matplotlib.patches import Rectangle

    (x, y), (width, height) = corner, size
    axes.add_patch(Rectangle(corner, width, height, facecolor=colour, edgecolor=INK, linewidth=0.7))
    axes.text(x + width / 2, y + height / 2, words, ha="center", va="center", fontsize=7, linespacing=1.35)


def _arrow(axes: Axes, x0: float, y0: float, x1: float, y1: float) -> None:
    arrow = {"arrowstyle": "-|>,head_length=0.3,head_width=0.15", "color": "#5b6b78", "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=(x1, y1), xytext=(x0, y0), arrowprops=arrow)


def _look_up_numbers() -> Numbers:
    query = _looked_up()
    rows: list[tuple[object, ...]] = [
        ("block", at + 1, key.hex(), int(at < query.found), "", "", "") for at, key in enumerate(query.hashes)
    ]
    rows += [
        ("server", server + 1, "", "", satellite.slot + 1, satellite.plane + 1, query.chunks_on(server))
        for server, satellite in enumerate(query.now)
    ]
    return Numbers(("what", "number", "hash", "in_index", "satellite", "plane", "chunks"), rows)


def _paper_shell() -> Shell:
    shell = PRESETS["starlink-a"].shell
    return Shell(shell.planes, shell.slots_per_plane, shell.altitude_m, shell.inclination_deg)


_SEEN_SLOTS = 2


def _geometry_numbers() -> Numbers:
    shell = _paper_shell()
    rows = []
    for d_plane in range(-4, 5):
        for d_slot in range(-_SEEN_SLOTS, _SEEN_SLOTS + 1):
            flat_m = math.hypot(shell.d_m_m() * d_slot, shell.d_n_max_m() * d_plane)
            paper_m, exact_m = (shell.slant_m(d_slot, d_plane, model=model) for model in ("paper", "exact"))
            rows.append((d_slot, d_plane, flat_m / 1e3, paper_m / 1e3, exact_m / 1e3, _elevation_deg(shell, exact_m)))
    return Numbers(("d_slot", "d_plane", "d_km", "x_paper_km", "x_exact_km", "elevation_deg"), rows)


def _elevation_deg(shell: Shell, slant_m: float) -> float:
    r, e = shell.radius_m, EARTH_RADIUS_M
    return math.degrees(math.asin((r * r - e * e - slant_m * slant_m) / (2 * e * slant_m)))


def draw_geometry() -> Figure:
    """Draw figure 12: the paper's triangle, and the same over a round Earth."""
    shell = _paper_shell()
    figure = new_figure(WIDE_IN, 4.9)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.35, 1.0))
    _box_above(figure.add_subplot(grid[0, 0]), shell)
    _triangle(figure.add_subplot(grid[0, 1]), shell)
    _round_earth(figure.add_subplot(grid[1, :]), shell)
    figure.suptitle("Figure 12. Geometry of line of sight, with Starlink A's lengths", color=INK)
    return figure


_TARGET = (1, 3)


def _box_above(axes: Axes, shell: Shell) -> None:
    d_m, d_n = shell.d_m_m() / 1e3, shell.d_n_max_m() / 1e3
    for plane in range(5):
        for slot in range(3):
            axes.plot(slot * d_m, plane * d_n, "o", color=PAPER, markeredgecolor=GREY, markersize=5)
    x, y = _TARGET[0] * d_m, _TARGET[1] * d_n
    axes.plot([0, x], [0, 0], color=BLUE)
    axes.plot([x, x], [0, y], color=RED)
    axes.plot([0, x], [0, y], "--", color=INK)
    axes.plot(0, 0, "o", color=GREEN, markersize=6)
    axes.plot(x, y, "o", color=AMBER, markersize=6)
    flat_km = math.hypot(x, y)
    axes.annotate(
        f"Δs · $D_M$ = {x:,.0f} km", (x / 2, 0), (0, -11), textcoords="offset points", ha="center", color=BLUE
    )
    axes.annotate(f"Δo · $D_N$ = {y:,.0f} km", (x, y / 2), (5, 0), textcoords="offset points", va="center", color=RED)
    axes.annotate(f"D = {flat_km:,.0f} km", (x / 2, y / 2), (-6, 6), textcoords="offset points", ha="right")
    axes.set_xlim(-500, 2 * d_m + 500)
    axes.set_ylim(-520, 4 * d_n + 250)
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_title("(a) from above: D² = ($D_M$ Δs)² + ($D_N$ Δo)²")


def _triangle(axes: Axes, shell: Shell) -> None:
    flat_km = math.hypot(_TARGET[0] * shell.d_m_m(), _TARGET[1] * shell.d_n_max_m()) / 1e3
    height_km, slant_km = shell.altitude_m / 1e3, shell.slant_m(*_TARGET, model="paper") / 1e3
    exact_km = shell.slant_m(*_TARGET) / 1e3
    axes.plot([0, 0], [0, height_km], color=BLUE)
    axes.plot([0, flat_km], [height_km, height_km], "--", color=INK)
    axes.plot([0, flat_km], [0, height_km], color=RED)
    axes.plot([-200, flat_km + 200], [0, 0], color=FAINT, linewidth=2)
    axes.plot(0, height_km, "o", color=GREEN, markersize=6)
    axes.plot(flat_km, height_km, "o", color=AMBER, markersize=6)
    axes.plot(0, 0, "s", color=INK, markersize=5)
    offset: dict[str, Any] = {"textcoords": "offset points"}
    axes.annotate(
        f"h = {height_km:,.0f} km", (0, height_km / 2), (-5, 0), ha="right", va="center", color=BLUE, **offset
    )
    axes.annotate(f"D = {flat_km:,.0f} km", (flat_km / 2, height_km), (0, 5), ha="center", **offset)
    words = f"x = {slant_km:,.0f} km\n(round Earth: {exact_km:,.0f})"
    axes.annotate(words, (flat_km * 0.55, height_km * 0.55), (6, -6), va="top", color=RED, **offset)
    axes.annotate("LLM", (0, 0), (0, -12), ha="center", **offset)
    axes.set_xlim(-1_050, flat_km + 350)
    axes.set_ylim(-330, height_km + 330)
    axes.axis("off")
    axes.set_title("(b) from the side: x² = D² + h²")


def _round_earth(axes: Axes, shell: Shell) -> None:
    import numpy as np

    r_km, e_km = shell.radius_m / 1e3, EARTH_RADIUS_M / 1e3
    angle = np.linspace(-0.72, 0.72, 200)
    axes.fill_between(e_km * np.sin(angle), e_km * np.cos(angle), e_km * math.cos(0.72), color="#e8ecef", linewidth=0)
    axes.plot(e_km * np.sin(angle), e_km * np.cos(angle), color=GREY, linewidth=1)
    axes.plot(r_km * np.sin(angle), r_km * np.cos(angle), ":", color=GREY, linewidth=0.8)
    axes.plot([-4_400, 4_400], [e_km, e_km], "--", color=GREY, linewidth=0.8)
    axes.annotate("horizon", (4_400, e_km), (3, 0), textcoords="offset points", va="center", fontsize=7)
    for d_slot in range(-_SEEN_SLOTS, _SEEN_SLOTS + 1):
        at = 2 * math.pi * d_slot / shell.slots_per_plane
        x, y = r_km * math.sin(at), r_km * math.cos(at)
        exact_m = shell.slant_m(d_slot, 0)
        elevation = _elevation_deg(shell, exact_m)
        colour = GREEN if elevation >= DEFAULT_MASK_DEG else AMBER if elevation >= 0 else RED
        axes.plot([0, x], [e_km, y], color=colour, linewidth=1.2)
        axes.plot(x, y, "o", color=colour, markersize=5)
        words = f"{exact_m / 1e3:,.0f} km, {elevation:.0f}°".replace("-", "−")
        axes.annotate(words, (x, y), (0, 7), textcoords="offset points", ha="center", fontsize=7)
    axes.plot(0, e_km, "s", color=INK, markersize=5)
    for colour, words in (
        (GREEN, f"above the mask of {DEFAULT_MASK_DEG:g}°"),
        (AMBER, "above the horizon"),
        (RED, "behind the Earth"),
    ):
        axes.plot([], [], color=colour, label=words)
    axes.legend(loc="lower center", ncols=3)
    axes.set_xlim(-5_300, 5_300)
    axes.set_ylim(e_km * math.cos(0.72) - 100, r_km + 500)
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_title("(c) to scale: satellites of the plane overhead, distance and elevation")


DIAGRAMS: dict[int, Exhibit] = {
    3: Exhibit("figure-03", "Figure 3. The +GRID", draw_grid, _grid_numbers),
    11: Exhibit("figure-11", "Figure 11. From a prompt to its chunks", draw_look_up, _look_up_numbers),
    12: Exhibit("figure-12", "Figure 12. Geometry of line of sight", draw_geometry, _geometry_numbers),
}
