"""The figures and tables of the SkyMemory paper and of the disclosure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.constellation.orbit import Shell, neighbour_chord_m
from skymemory.constellation.presets import PRESETS
from skymemory.errors import InvalidInput
from skymemory.placement.layout import Strategy
from skymemory.placement.locate import Placement
from skymemory.units import SPEED_OF_LIGHT_M_S
from skymemory_lab.sim.latency import PAPER_CENTRE, PAPER_STRATEGIES, PAPER_TORUS, SWEEPS, Parameter, figure_16
from skymemory_lab.view.diagrams import DIAGRAMS
from skymemory_lab.view.drawing import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    RED,
    ROW_IN,
    SERIES,
    WIDE_IN,
    Exhibit,
    Numbers,
    draw_map,
    draw_table,
    fill_table,
    new_figure,
)
from skymemory_lab.view.layout_map import PAPER_MAPS, LayoutMap, layout_map, paper_map, title
from skymemory_lab.view.protocol_sequence import SEQUENCES

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
    "altitude_m": ("(a) altitude", "altitude, km", 1e-3, range(160, 2000, 440)),
    "servers": ("(b) servers", "servers", 1.0, (9, 25, 49, 81)),
    "kvc_bytes": ("(c) size of the KV cache", "KV cache, MiB", 2.0**-20, range(1, 22, 4)),
    "processing_s": ("(d) processing time of a chunk", "processing of a chunk, ms", 1e3, range(2, 21, 6)),
}


def link_delays_ms() -> Iterator[tuple[int, int, float]]:
    """Yield satellites in a plane, altitude (km), light time to the neighbour (ms, equation 1)."""
    for count in SATELLITE_COUNTS:
        for altitude_km in ALTITUDES_KM:
            yield count, altitude_km, neighbour_chord_m(count, altitude_km * 1e3) / SPEED_OF_LIGHT_M_S * 1e3


def _link_delay_numbers() -> Numbers:
    return Numbers(("satellites_per_plane", "altitude_km", "one_way_ms"), list(link_delays_ms()))


def draw_link_delay_surface() -> Figure:
    import numpy as np

    figure = new_figure(5.2, 3.6)
    axes: Any = figure.add_subplot(projection="3d")  # mplot3d has no types
    altitude_km, count = np.meshgrid(ALTITUDES_KM, SATELLITE_COUNTS)
    delay_ms = np.array([delay for _, _, delay in link_delays_ms()]).reshape(count.shape)
    axes.plot_surface(altitude_km, count, delay_ms, cmap="YlOrBr", rcount=31, ccount=24, rasterized=True)
    axes.set_xlabel("altitude h, km", labelpad=2)
    axes.set_ylabel("satellites in a plane, M", labelpad=2)
    axes.set_zlabel("delay of a link, ms", labelpad=0)
    axes.tick_params(pad=0)
    figure.suptitle("Figure 1. One-way delay between neighbours in a plane", color=INK)
    axes.view_init(elev=24, azim=48)
    axes.set_xticks(range(500, 2001, 500))
    axes.set_yticks(range(20, 101, 20))
    axes.set_box_aspect((1.4, 1.4, 0.9), zoom=1.02)
    return figure


def draw_link_delay_contours() -> Figure:
    """Draw figure 2: contours with the paper's 2 ms line."""
    import numpy as np

    figure = new_figure(5.2, 3.5)
    axes = figure.add_subplot()
    altitude_km, count = np.meshgrid(ALTITUDES_KM, SATELLITE_COUNTS)
    delay_ms = np.array([delay for _, _, delay in link_delays_ms()]).reshape(count.shape)
    shades = axes.contourf(altitude_km, count, delay_ms, levels=[1, 1.5, 2, 3, 4, 6, 8, 12, 18], cmap="YlOrBr")
    levels = [1.5, 2, 3, 4, 6, 8, 12]
    lines = axes.contour(altitude_km, count, delay_ms, levels=levels, colors=INK, linewidths=0.8)
    # On a vertical line, because an automatic label may fall on the paper's line. A label of 12 ms would be dark on
    # dark.
    places = [(260, 93), *((1450, m) for m in (82, 55, 41, 27.3, 20.5))]
    axes.clabel(lines, levels[:-1], fmt=lambda delay: f"{delay:g} ms", fontsize=7, manual=places)
    figure.colorbar(shades, ax=axes, label="delay of a link, ms")
    axes.set_xlabel("altitude h, km")
    axes.set_ylabel("satellites in a plane, M")
    axes.set_title("Figure 2. Under 2 ms takes 73 satellites in a plane at 550 km")
    # The paper says that 50 satellites give 2 ms; by its own equation 1 it takes 73 at 550 km.
    axes.plot([550], [73], "o", color=INK, markersize=4.5)
    axes.annotate("73 at 550 km", (550, 73), (4, -11), textcoords="offset points", fontsize=7)
    axes.axhline(50, color=INK, linewidth=0.8, linestyle=":")
    axes.annotate("the paper's 50", (165, 50), (3, 3), textcoords="offset points", fontsize=7)
    axes.grid(False)
    return figure


def draw_paper_map(number: int) -> Figure:
    figure = draw_layout(paper_map(number))
    figure.axes[0].set_title(f"Figure {number}. {PAPER_MAPS[number].caption.capitalize()}")
    return figure


def _map_numbers(number: int) -> Numbers:
    """Return the map's numbers, 1-based; ``from``: a moved server's earlier place."""
    shown_map = paper_map(number)
    sources = {server: source for server, source, _ in shown_map.handovers}
    rows = []
    for server in range(shown_map.placement.servers):
        satellite = shown_map.placement.locate(server, (0, 0), shown_map.now_moves)
        source = sources.get(server)
        before = ("", "") if source is None else (source.slot + 1, source.plane + 1)
        rows.append((server + 1, satellite.slot + 1, satellite.plane + 1, *before))
    return Numbers(("server", "satellite", "plane", "from_satellite", "from_plane"), rows)


def draw_layout(layout: LayoutMap) -> Figure:
    width_in = max(3.4, min(16.0, 0.42 * len(layout.columns) + 0.8))
    height_in = max(2.1, min(16.0, 0.42 * len(layout.rows) + 0.95))
    figure = new_figure(width_in, height_in)
    axes = figure.add_subplot()
    draw_map(axes, layout, number_size=9 if layout.placement.servers < 100 else 7)
    axes.set_title(title(layout), fontsize=8.5, wrap=True)
    return figure


def draw_layouts(number: int) -> Figure:
    strategy, name = LAYOUT_FIGURES[number]
    figure = new_figure(WIDE_IN, 7.4)
    for panel, servers, letter in zip(figure.subplots(2, 2).flat, LAYOUT_SIZES, "abcd", strict=True):
        placement = Placement.of(strategy, servers, PAPER_TORUS, PAPER_CENTRE)
        draw_map(panel, layout_map(placement), number_size=7)
        panel.set_title(f"({letter}) {servers} servers")
    figure.suptitle(f"Figure {number}. {name} layout", color=INK)
    return figure


def layout_rows(number: int) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield strategy, servers, server, satellite, plane, all 1-based."""
    strategy, _ = LAYOUT_FIGURES[number]
    for servers in LAYOUT_SIZES:
        placement = Placement.of(strategy, servers, PAPER_TORUS, PAPER_CENTRE)
        for server, satellite in enumerate(placement.locate_all()):
            yield strategy, servers, server + 1, satellite.slot + 1, satellite.plane + 1


def _layout_numbers(number: int) -> Numbers:
    return Numbers(("strategy", "servers", "server", "satellite", "plane"), list(layout_rows(number)))


def draw_latency() -> Figure:
    points = figure_16()
    figure = new_figure(WIDE_IN, 5.2)
    panels = figure.subplots(2, 2)
    for axes, (parameter, (name, unit, scale, ticks)) in zip(panels.flat, _PANELS.items(), strict=True):
        for strategy in PAPER_STRATEGIES:
            colour, marker, label = SERIES[strategy]
            line = [point for point in points if point.parameter == parameter and point.strategy == strategy]
            x, y = [point.value * scale for point in line], [point.worst_s for point in line]
            axes.plot(x, y, color=colour, marker=marker, label=label)
        axes.set_title(name)
        axes.set_xlabel(unit)
        axes.set_ylabel("worst latency, s")
        axes.set_xticks(ticks)
        if parameter != "altitude_m":
            axes.set_ylim(bottom=0)
        axes.spines[["left", "bottom"]].set_color(FAINT)
    figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle("Figure 16. Worst latency: 21 MiB, 81 servers, 20 ms a chunk, 1,920 km unless varied", color=INK)
    return figure


def _latency_numbers() -> Numbers:
    return Numbers(("parameter", "value", "strategy", "worst_s"), figure_16())


MEMORIES: dict[str, tuple[float, float, str]] = {
    "CPU": (10e-9, 15e-9, "10–15 ns"),
    "GPU": (50e-9, 100e-9, "50–100 ns"),
    "RDMA": (2e-6, 5e-6, "2–5 µs"),
    "SSD": (20e-6, 200e-6, "20–200 µs"),
    "HDD": (2e-3, 20e-3, "2–20 ms"),
    "NAS": (30e-3, 40e-3, "30–40 ms"),
    "LEO (current RF)": (20e-3, 50e-3, "20–50 ms"),
    "LEO (theoretical laser)": (2e-3, 4e-3, "2–4 ms"),
}
"""Table 1: least and most seconds, and the printed text."""


def draw_memories() -> Figure:
    figure = new_figure(WIDE_IN, ROW_IN * (len(MEMORIES) + 2.4) + 0.5)
    words, ranges = figure.subplots(1, 2, width_ratios=(1, 1.5))
    fill_table(words, ("Memory", "Latency (paper)"), [(name, text) for name, (_, _, text) in MEMORIES.items()])
    for row, (name, (least_s, most_s, _)) in enumerate(MEMORIES.items()):
        ranges.barh(row, most_s - least_s, left=least_s, height=0.55, color=AMBER if "LEO" in name else BLUE)
    ranges.set_xscale("log")
    ranges.set_xlim(5e-9, 0.2)
    ranges.set_xticks(
        [1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1],
        ["10 ns", "100 ns", "1 µs", "10 µs", "100 µs", "1 ms", "10 ms", "100 ms"],
    )
    ranges.minorticks_off()
    ranges.set_yticks([])
    ranges.set_ylim(words.get_ylim())
    ranges.spines["left"].set_visible(False)
    figure.suptitle("Table 1. Latency of kinds of memory, as the paper states them", color=INK)
    return figure


def _memory_numbers() -> Numbers:
    return Numbers(
        ("type", "latency", "least_s", "most_s"),
        [(name, text, least_s, most_s) for name, (least_s, most_s, text) in MEMORIES.items()],
    )


def _configuration() -> Numbers:
    """Return table 2, and the sweep of the authors' published script."""

    def swept(parameter: Parameter, scale: float, unit: str) -> str:
        values = [value * scale for value in SWEEPS[parameter]]
        steps = (
            f"{values[0]:g}, {values[1]:g} … {values[-1]:g}" if len(values) > 4 else ", ".join(f"{v:g}" for v in values)
        )
        return f"{steps} {unit}".rstrip()

    planes, slots = PAPER_TORUS.planes, PAPER_TORUS.slots_per_plane
    return Numbers(
        ("parameter", "paper", "run here"),
        [
            ("KVC_BYTES", "2..21 MB", swept("kvc_bytes", 2.0**-20, "MiB")),
            ("SERVERS", "9..81", swept("servers", 1, "")),
            ("CHUNK_PROCESSING_TIME", "0.002..0.02 s", swept("processing_s", 1, "s")),
            ("ALTITUDE", "160..2000 km", swept("altitude_m", 1e-3, "km")),
            ("MAX_SATELLITES", "15", str(slots)),
            ("MAX_ORBS", "15", str(planes)),
            ("CENTER_SATELLITE", "8", str(PAPER_CENTRE.slot + 1)),
            ("CENTER_ORB", "8", str(PAPER_CENTRE.plane + 1)),
        ],
    )


DISCLOSED = {"Starlink A": "starlink-a", "Starlink B": "starlink-b", "Kuiper A": "kuiper-a", "Kuiper B": "kuiper-b"}
_ORBIT_STEPS = 360


def disclosed_shell(name: str) -> Shell:
    """Return the shell of the disclosure's table: without phasing, for which its D_N(t) is exact."""
    shell = PRESETS[DISCLOSED[name]].shell
    return Shell(shell.planes, shell.slots_per_plane, shell.altitude_m, shell.inclination_deg)


def constellations() -> Numbers:
    """Return the disclosure's table 2, with the results of its equations."""
    rows: list[tuple[object, ...]] = []
    for name in DISCLOSED:
        shell = disclosed_shell(name)
        lengths_m = [shell.d_n_m(shell.period_s * step / _ORBIT_STEPS) for step in range(_ORBIT_STEPS)]
        blocked = sum(map(shell.link_blocked, lengths_m)) / _ORBIT_STEPS
        rows.append(
            (
                name,
                shell.planes,
                shell.slots_per_plane,
                round(shell.altitude_m / 1e3),
                shell.inclination_deg,
                round(shell.d_m_m() / 1e3, 1),
                round(shell.d_m_m() / SPEED_OF_LIGHT_M_S * 1e3, 3),
                round(min(lengths_m) / 1e3, 1),
                round(shell.d_n_max_m() / 1e3, 1),
                round(shell.d_n_max_m() / SPEED_OF_LIGHT_M_S * 1e3, 3),
                round(100 * blocked, 1),
            )
        )
    header = (
        "constellation",
        "planes_n",
        "satellites_m",
        "altitude_km",
        "inclination_deg",
        "d_m_km",
        "d_m_ms",
        "d_n_least_km",
        "d_n_most_km",
        "d_n_most_ms",
        "d_n_blocked_percent",
    )
    return Numbers(header, rows)


def draw_constellations() -> Figure:
    return draw_table(
        "Disclosure, table 2. Constellations, with the lengths and light times of their links",
        constellations(),
        "To the right of the inclination: ours, by the disclosure's equations. Blocked: share of an orbit in which the"
        " link to the next plane would pass below 80 km.",
        heads=(
            "",
            "N",
            "M",
            "altitude\nkm",
            "inclination\n°",
            "$D_M$\nkm",
            "$D_M$\nms",
            "$D_N$ least\nkm",
            "$D_N$ most\nkm",
            "$D_N$ most\nms",
            "blocked\n%",
        ),
    )


def _lengths_over_an_orbit() -> Numbers:
    rows = []
    for name in DISCLOSED:
        shell = disclosed_shell(name)
        for step in range(_ORBIT_STEPS + 1):
            now_s = shell.period_s * step / _ORBIT_STEPS
            length_m = shell.d_n_m(now_s)
            blocked = int(shell.link_blocked(length_m))
            rows.append((name, now_s / 60, length_m / 1e3, length_m / SPEED_OF_LIGHT_M_S * 1e3, blocked))
    return Numbers(("constellation", "minutes", "d_n_km", "one_way_ms", "blocked"), rows)


def draw_lengths_over_an_orbit() -> Figure:
    """Draw the disclosure's D_N(t), dotted if the Earth or its air blocks the link."""
    figure = new_figure(WIDE_IN, 3.0)
    near, far = figure.subplots(1, 2)
    rows = _lengths_over_an_orbit().rows
    for name, colour in zip(DISCLOSED, (RED, BLUE, GREEN, AMBER), strict=True):
        axes = far if name == "Starlink B" else near
        mine = [row for row in rows if row[0] == name]
        for blocked, style in ((0, "-"), (1, ":")):
            label = f"{name}, blocked by the Earth" if blocked else name
            if any(row[4] == blocked for row in mine):
                lengths = [row[2] if row[4] == blocked else math.nan for row in mine]
                axes.plot([row[1] for row in mine], lengths, style, color=GREY if blocked else colour, label=label)
    for axes, letter in ((near, "(a) planes near each other"), (far, "(b) five planes")):
        axes.set_title(letter)
        axes.set_xlabel("minutes since the node, over one orbit")
        axes.set_ylabel("$D_N(t)$, km")
        axes.set_xlim(left=0)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.28)  # room for the legend
        axes.legend(loc="upper right", ncols=2 if axes is near else 1)
        light: Any = axes.secondary_yaxis("right", functions=(_km_to_ms, _ms_to_km))
        light.set_ylabel("light time, ms")
        light.spines["right"].set_visible(False)
    figure.suptitle("Disclosure, $D_N(t)$. Distance to the same slot of the next plane", color=INK)
    return figure


def _km_to_ms(km: Any) -> Any:
    return km / (SPEED_OF_LIGHT_M_S / 1e6)


def _ms_to_km(ms: Any) -> Any:
    return ms * (SPEED_OF_LIGHT_M_S / 1e6)


def _exhibit(number: int, about: str, draw: Callable[[], Figure], numbers: Callable[[], Numbers]) -> Exhibit:
    return Exhibit(f"figure-{number:02d}", f"Figure {number}. {about}", draw, numbers)


FIGURES: dict[int, Exhibit] = dict(
    sorted(
        {
            1: _exhibit(1, "Delay of a link, as a surface", draw_link_delay_surface, _link_delay_numbers),
            2: _exhibit(2, "Delay of a link, as contours", draw_link_delay_contours, _link_delay_numbers),
            **{
                number: _exhibit(
                    number, paper.caption.capitalize(), partial(draw_paper_map, number), partial(_map_numbers, number)
                )
                for number, paper in PAPER_MAPS.items()
            },
            **{
                number: _exhibit(
                    number, f"{name} layout", partial(draw_layouts, number), partial(_layout_numbers, number)
                )
                for number, (_, name) in LAYOUT_FIGURES.items()
            },
            16: _exhibit(16, "Worst latency", draw_latency, _latency_numbers),
            **DIAGRAMS,
            **SEQUENCES,
        }.items()
    )
)

TABLES: dict[str, Exhibit] = {
    "table-1": Exhibit("table-1", "Table 1. Latency of kinds of memory", draw_memories, _memory_numbers, table=True),
    "table-2": Exhibit(
        "table-2",
        "Table 2. Configuration of the simulation",
        lambda: draw_table(
            "Table 2. Configuration of the simulation: as printed, and as the authors' script sweeps it",
            _configuration(),
        ),
        _configuration,
        table=True,
    ),
}

DISCLOSURE: dict[str, Exhibit] = {
    "constellations": Exhibit(
        "disclosure-constellations", "Table 2. Constellations", draw_constellations, constellations, table=True
    ),
    "d-n": Exhibit("disclosure-d-n", "D_N(t) over an orbit", draw_lengths_over_an_orbit, _lengths_over_an_orbit),
}
"""The disclosure's own exhibits; its figures 1 to 9 are the paper's 1 to 11."""


def check_figure(number: int) -> None:
    if number not in FIGURES:
        known = ", ".join(map(str, sorted(FIGURES)))
        raise InvalidInput(f"figure {number} is not available; expected one of {known}")


def write_figure(number: int, folder: Path) -> list[Path]:
    check_figure(number)
    return FIGURES[number].write(folder)
