"""The paper's figures, computed by our code: 1 and 2 (link delays), 4 to 8 and 13 to 15 (layouts), 16 (latency).

Each is written as PNG and SVG, and figures with numbers as CSV too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.constellation.orbit import neighbour_chord_m
from skymemory.errors import InvalidInput
from skymemory.placement.layout import Strategy
from skymemory.placement.locate import Placement
from skymemory.sim.latency import PAPER_CENTRE, PAPER_STRATEGIES, PAPER_TORUS, Parameter, figure_16
from skymemory.units import SPEED_OF_LIGHT_M_S
from skymemory.view.drawing import FAINT, INK, SERIES, draw_map, new_figure, save, save_csv
from skymemory.view.layout_map import PAPER_MAPS, LayoutMap, layout_map, paper_map, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYOUT_SIZES = (9, 25, 49, 81)
LAYOUT_FIGURES: dict[int, tuple[Strategy, str]] = {
    13: ("rotation", "Rotation-aware"),
    14: ("hop", "Hop-aware"),
    15: ("rotation_hop", "Rotation- and hop-aware"),
}
# The ranges of the paper's axes.
SATELLITE_COUNTS = tuple(range(10, 101))
ALTITUDES_KM = tuple(range(160, 2001, 40))
_PANELS: dict[Parameter, tuple[str, str, float, Sequence[int]]] = {
    "altitude_m": ("(a) altitude", "km", 1e-3, range(160, 2000, 440)),
    "servers": ("(b) servers", "servers", 1.0, (9, 25, 49, 81)),
    "kvc_bytes": ("(c) size of the KV cache", "MiB", 2.0**-20, range(1, 22, 4)),
    "processing_s": ("(d) processing time of a chunk", "ms", 1e3, range(2, 21, 6)),
}


def link_delays_ms() -> Iterator[tuple[int, int, float]]:
    """Satellites in a plane, altitude in km, one-way light time to the neighbour in ms (equation 1)."""
    for count in SATELLITE_COUNTS:
        for altitude_km in ALTITUDES_KM:
            yield count, altitude_km, neighbour_chord_m(count, altitude_km * 1e3) / SPEED_OF_LIGHT_M_S * 1e3


def draw_link_delay_surface() -> Figure:
    """Figure 1: link delay over altitude and satellites in a plane."""
    import numpy as np

    figure = new_figure(6.6, 4.8)
    axes: Any = figure.add_subplot(projection="3d")  # mplot3d has no types
    altitude_km, count = np.meshgrid(ALTITUDES_KM, SATELLITE_COUNTS)
    delay_ms = np.array([delay for _, _, delay in link_delays_ms()]).reshape(count.shape)
    axes.plot_surface(altitude_km, count, delay_ms, cmap="YlOrBr", rcount=31, ccount=24)
    axes.set_xlabel("altitude h, km")
    axes.set_ylabel("satellites in a plane, M")
    axes.set_zlabel("delay of a link, ms")
    figure.suptitle("Figure 1. One-way delay between neighbours in a plane", color=INK)
    axes.view_init(elev=24, azim=48)
    axes.set_xticks(range(500, 2001, 500))
    axes.set_box_aspect((1.4, 1.4, 0.9), zoom=0.98)
    return figure


def draw_link_delay_contours() -> Figure:
    """Figure 2: the same as contours, with the paper's 2 ms line at 50 satellites."""
    import numpy as np

    figure = new_figure(7.0, 4.6)
    axes = figure.add_subplot()
    altitude_km, count = np.meshgrid(ALTITUDES_KM, SATELLITE_COUNTS)
    delay_ms = np.array([delay for _, _, delay in link_delays_ms()]).reshape(count.shape)
    shades = axes.contourf(altitude_km, count, delay_ms, levels=[1, 1.5, 2, 3, 4, 6, 8, 12, 18], cmap="YlOrBr")
    lines = axes.contour(altitude_km, count, delay_ms, levels=[1.5, 2, 3, 4, 6, 8, 12], colors=INK, linewidths=0.8)
    axes.clabel(lines, fmt=lambda delay: f"{delay:g} ms", fontsize=8)
    figure.colorbar(shades, ax=axes, label="delay of a link, ms")
    axes.set_xlabel("altitude h, km")
    axes.set_ylabel("satellites in a plane, M")
    axes.set_title("Figure 2. Under 2 ms takes 73 satellites in a plane at 550 km")
    # The paper says 50 satellites give 2 ms; by its own equation 1 it takes 73 at 550 km.
    axes.plot([550], [73], "o", color=INK, markersize=5)
    axes.axhline(50, color=INK, linewidth=0.8, linestyle=":")
    axes.annotate("the paper's 50", (165, 50), (3, 3), textcoords="offset points", fontsize=8)
    axes.grid(False)
    return figure


def draw_paper_map(number: int) -> Figure:
    """Figure 4, 5, 6, 7 or 8."""
    figure = draw_layout(paper_map(number))
    figure.axes[0].set_title(f"Figure {number}. {PAPER_MAPS[number].caption.capitalize()}")
    return figure


def draw_layout(shown: LayoutMap) -> Figure:
    """Any layout, sized by its map."""
    width_in = max(4.2, min(16.0, 0.52 * len(shown.columns) + 0.9))
    height_in = max(2.6, min(16.0, 0.52 * len(shown.rows) + 1.1))
    figure = new_figure(width_in, height_in)
    axes = figure.add_subplot()
    draw_map(axes, shown, number_size=11 if shown.placement.servers < 100 else 8)
    axes.set_title(title(shown), fontsize=10, wrap=True)
    return figure


def draw_layouts(number: int) -> Figure:
    """Figures 13 to 15: 3×3, 5×5, 7×7 and 9×9 servers on 15 planes of 15 satellites."""
    strategy, name = LAYOUT_FIGURES[number]
    figure = new_figure(9.0, 9.4)
    for panel, servers in zip(figure.subplots(2, 2).flat, LAYOUT_SIZES, strict=True):
        placement = Placement.of(strategy, servers, PAPER_TORUS, PAPER_CENTRE)
        draw_map(panel, layout_map(placement), number_size=7.5)
        panel.set_title(f"{servers} servers")
    figure.suptitle(f"Figure {number}. {name} layout", color=INK)
    return figure


def layout_rows(number: int) -> Iterator[tuple[str, int, int, int, int]]:
    """Data of figures 13 to 15, all 1-based: strategy, servers, server, satellite, plane."""
    strategy, _ = LAYOUT_FIGURES[number]
    for servers in LAYOUT_SIZES:
        placement = Placement.of(strategy, servers, PAPER_TORUS, PAPER_CENTRE)
        for server, satellite in enumerate(placement.locate_all()):
            yield strategy, servers, server + 1, satellite.slot + 1, satellite.plane + 1


def draw_latency() -> Figure:
    """Figure 16: the worst server's latency against altitude, servers, KV cache size and processing time."""
    points = figure_16()
    figure = new_figure(9.0, 6.6)
    panels = figure.subplots(2, 2)
    for axes, (parameter, (name, unit, scale, ticks)) in zip(panels.flat, _PANELS.items(), strict=True):
        for strategy in PAPER_STRATEGIES:
            colour, marker, label = SERIES[strategy]
            line = [point for point in points if point.parameter == parameter and point.strategy == strategy]
            axes.plot(
                [point.value * scale for point in line],
                [point.worst_s for point in line],
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=1.4,
                label=label,
            )
        axes.set_title(name)
        axes.set_xlabel(unit)
        axes.set_ylabel("worst latency, s")
        axes.set_xticks(ticks)
        if parameter != "altitude_m":
            axes.set_ylim(bottom=0)
        axes.spines[["left", "bottom"]].set_color(FAINT)
    figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle("Figure 16. Worst latency: 21 MiB, 81 servers, 20 ms a chunk, 1920 km unless varied", color=INK)
    return figure


def _write_link_delays(draw: Callable[[], Figure]) -> Callable[[int, Path], list[Path]]:
    def write(number: int, folder: Path) -> list[Path]:
        written = _write_drawing(draw(), number, folder)
        header = ("satellites_per_plane", "altitude_km", "one_way_ms")
        return [*written, save_csv(folder / f"figure-{number:02d}.csv", header, link_delays_ms())]

    return write


def _write_drawing(figure: Figure, number: int, folder: Path) -> list[Path]:
    return [save(figure, folder / f"figure-{number:02d}.{ending}") for ending in ("png", "svg")]


def _write_paper_map(number: int, folder: Path) -> list[Path]:
    return _write_drawing(draw_paper_map(number), number, folder)


def _write_layouts(number: int, folder: Path) -> list[Path]:
    written = _write_drawing(draw_layouts(number), number, folder)
    header = ("strategy", "servers", "server", "satellite", "plane")
    return [*written, save_csv(folder / f"figure-{number:02d}.csv", header, layout_rows(number))]


def _write_latency(number: int, folder: Path) -> list[Path]:
    written = _write_drawing(draw_latency(), number, folder)
    header = ("parameter", "value", "strategy", "worst_s")
    return [*written, save_csv(folder / f"figure-{number:02d}.csv", header, figure_16())]


FIGURES: dict[int, Callable[[int, Path], list[Path]]] = {
    1: _write_link_delays(draw_link_delay_surface),
    2: _write_link_delays(draw_link_delay_contours),
    **dict.fromkeys(PAPER_MAPS, _write_paper_map),
    **dict.fromkeys(LAYOUT_FIGURES, _write_layouts),
    16: _write_latency,
}
"""The available figures, by the paper's numbers."""


def check_figure(number: int) -> None:
    """Raises InvalidInput for an unknown figure."""
    if number not in FIGURES:
        known = ", ".join(map(str, sorted(FIGURES)))
        raise InvalidInput(f"figure {number} is not available; expected one of {known}")


def write_figure(number: int, folder: Path) -> list[Path]:
    """Draws one of the paper's figures into ``folder``; returns the files written."""
    check_figure(number)
    return FIGURES[number](number, folder)
