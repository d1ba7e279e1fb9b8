"""Common drawing code: matplotlib without a display, one palette, deterministic files."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput, missing_extra
from skymemory.view.layout_map import LayoutMap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
PNG_DPI = 110
INK, FAINT, GONE, GREEN, PAPER = "#22303c", "#c3ccd4", "#93a1ad", "#1f8a4c", "#ffffff"
ORANGES = ("#f5a94e", "#f8bb70", "#facb91", "#fcd9ae", "#fde5c8", "#feefdc")
"""Tints of the box by hops from the centre; the last also for all further hops."""
SERIES = {
    "rotation": ("#d1495b", "s", "rotation"),
    "hop": ("#2e6f95", "^", "hop (on board)"),
    "rotation_hop": ("#1f8a4c", "o", "rotation + hop"),
}
"""Colour, marker and name of a strategy."""

_STYLE: dict[str, Any] = {
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "grid.color": "#e8ecef",
    "legend.frameon": False,
    # Text stays text: searchable, and small files.
    "svg.fonttype": "none",
    # Ids in an SVG are hashes with a salt, random by default: files would differ at every run.
    "svg.hashsalt": "skymemory",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty figure in the common style, without a display. Raises ``MissingExtra`` without matplotlib."""
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as NewFigure
    except ImportError as error:
        raise missing_extra("drawing", "matplotlib", "figures") from error
    mpl.rcParams.update(_STYLE)
    figure = NewFigure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def drawing_path(path: Path) -> Path:
    """``path`` if its suffix is one of ``FORMATS``."""
    if path.suffix.lower().removeprefix(".") not in FORMATS:
        raise InvalidInput(f"{path}: expected the suffix {', '.join('.' + name for name in FORMATS)}")
    return path


def save(figure: Figure, path: Path) -> Path:
    """Writes the figure in the format of its suffix, without dates, so that files are deterministic."""
    kind = drawing_path(path).suffix.lower().removeprefix(".")
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata: dict[str, None] = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    figure.savefig(path, format=kind, dpi=PNG_DPI, facecolor=PAPER, metadata=metadata)
    return path


def save_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """Writes a figure's data as CSV; values with a comma are quoted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as stream:
        lines = csv.writer(stream, lineterminator="\n")
        lines.writerow(header)
        lines.writerows([f"{value:.9g}" if isinstance(value, float) else value for value in row] for row in rows)
    return path


def draw_map(axes: Axes, shown: LayoutMap, number_size: float = 9.0) -> None:
    """One layout on ``axes``: a square per satellite, orange in the box, the overhead one circled in green.

    Servers that were handed over leave a faint number behind and an arrow to where they are.
    """
    from matplotlib.patches import Circle, Rectangle

    place = {
        SatelliteId(plane, slot): (column, row)
        for row, plane in enumerate(shown.rows)
        for column, slot in enumerate(shown.columns)
    }
    torus, centre = shown.placement.torus, shown.centre
    left_behind = {source: server for server, source, _ in shown.handovers}
    for satellite, (column, row) in place.items():
        tint = PAPER
        if shown.in_box(satellite):
            tint = ORANGES[min(torus.hops(centre, satellite), len(ORANGES) - 1)]
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=tint, edgecolor=FAINT, linewidth=0.8))
        server = shown.server(satellite)
        if server is not None:
            axes.text(column, row, str(server + 1), ha="center", va="center", fontsize=number_size, color=INK)
        elif satellite in left_behind:
            number = str(left_behind[satellite] + 1)
            axes.text(column, row, number, ha="center", va="center", fontsize=number_size, color=GONE)
        if satellite == centre:
            axes.add_patch(Circle((column, row), 0.42, fill=False, edgecolor=GREEN, linewidth=2.0))
    for _, source, target in shown.handovers:
        if source in place and target in place:
            _arrow(axes, place[source], place[target])
    _map_axes(axes, shown)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    # Arrows along a row would lie over the squares between: they are bent more.
    bend = 0.22 if start[1] == end[1] else 0.1
    axes.annotate(
        "",
        xy=end,
        xytext=start,
        arrowprops={
            "arrowstyle": "-|>",
            "color": "#5b6b78",
            "linewidth": 1.1,
            "shrinkA": 9,
            "shrinkB": 9,
            "connectionstyle": f"arc3,rad={bend}",
        },
    )


def _map_axes(axes: Axes, shown: LayoutMap) -> None:
    axes.set_xlim(-0.53, len(shown.columns) - 0.47)
    axes.set_ylim(len(shown.rows) - 0.47, -0.53)
    axes.set_aspect("equal")
    axes.grid(False)
    axes.tick_params(length=0, labelsize=7.5)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xticks(range(len(shown.columns)), [str(slot + 1) for slot in shown.columns])
    axes.set_yticks(range(len(shown.rows)), [str(plane + 1) for plane in shown.rows])
    axes.set_xlabel("satellite   (motion →)")
    axes.set_ylabel("orbital plane")
