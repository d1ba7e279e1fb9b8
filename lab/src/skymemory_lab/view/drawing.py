"""Common drawing code: matplotlib without a display, deterministic files.

Text has at least 7 points in print; figures are at most ``WIDE_IN`` wide.
"""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput, missing_extra
from skymemory_lab.view.layout_map import LayoutMap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
PRINT_DPI, SCREEN_DPI = 300, 110
WIDE_IN = 7.0
INK, FAINT, GONE, GREEN, PAPER = "#22303c", "#c3ccd4", "#93a1ad", "#1f8a4c", "#ffffff"
ORANGES = ("#f5a94e", "#f8bb70", "#facb91", "#fcd9ae", "#fde5c8", "#feefdc")
"""Tints of the box by hops from the centre; the last for all further hops."""
RED, BLUE, GREY, AMBER = "#d1495b", "#2e6f95", "#93a1ad", "#f5a94e"
SERIES = {
    "rotation": (RED, "s", "rotation"),
    "hop": (BLUE, "^", "hop (on board)"),
    "rotation_hop": (GREEN, "o", "rotation + hop"),
}

_STYLE: dict[str, Any] = {
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.axisbelow": True,
    "axes.labelsize": 8,
    "axes.titlesize": 8.5,
    "figure.titlesize": 9.5,
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.06,
    "mathtext.fontset": "dejavusans",
    "grid.color": "#e8ecef",
    "grid.linewidth": 0.6,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    # Type 42: the letters of a PDF can be searched, and journals reject type 3.
    "pdf.fonttype": 42,
    # Text stays text: searchable, and in small files.
    "svg.fonttype": "none",
    # Ids in an SVG are hashed with a salt that is random by default, so files would differ at every run.
    "svg.hashsalt": "skymemory",
    "text.color": INK,
    "xtick.color": INK,
    "xtick.labelsize": 7.5,
    "ytick.color": INK,
    "ytick.labelsize": 7.5,
}


def new_figure(width_in: float, height_in: float) -> Figure:
    """Return an empty figure in the common style.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
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
    """Return ``path``.

    Raises:
        InvalidInput: the suffix is not in ``FORMATS``.
    """
    if path.suffix.lower().removeprefix(".") not in FORMATS:
        raise InvalidInput(f"{path}: expected the suffix {', '.join('.' + name for name in FORMATS)}")
    return path


def save(figure: Figure, path: Path, dpi: int = SCREEN_DPI) -> Path:
    """Write the figure in its suffix's format, without dates, so files are deterministic."""
    kind = drawing_path(path).suffix.lower().removeprefix(".")
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata: dict[str, None] = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    figure.savefig(path, format=kind, dpi=dpi, facecolor=PAPER, metadata=metadata)
    return path


def save_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as stream:
        lines = csv.writer(stream, lineterminator="\n")
        lines.writerow(header)
        lines.writerows([f"{value:.9g}" if isinstance(value, float) else value for value in row] for row in rows)
    return path


class Numbers(NamedTuple):
    header: tuple[str, ...]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True, slots=True)
class Exhibit:
    """Figure or table of a document, with its numbers."""

    stem: str
    title: str
    draw: Callable[[], Figure]
    numbers: Callable[[], Numbers]
    table: bool = False

    def write(self, folder: Path, formats: Sequence[str] = ("png", "svg"), dpi: int = PRINT_DPI) -> list[Path]:
        """Write the drawing in each format, the numbers as CSV, and a table as Markdown."""
        figure = self.draw()
        written = [save(figure, folder / f"{self.stem}.{ending}", dpi) for ending in formats]
        header, rows = self.numbers()
        written.append(save_csv(folder / f"{self.stem}.csv", header, rows))
        if self.table:
            written.append(folder / f"{self.stem}.md")
            written[-1].write_text(as_markdown(header, rows), "utf-8")
        return written


def cell(value: object) -> str:
    """Format a value for a table: four digits, separated thousands, "–" for None."""
    if value is None or value == "":
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def as_markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    listed = [list(row) for row in rows]
    lines = [f"| {' | '.join(header)} |", f"| {' | '.join('---:' if right else '---' for right in _right(listed))} |"]
    lines += [f"| {' | '.join(cell(value).replace('|', chr(92) + '|') for value in row)} |" for row in listed]
    return "\n".join(lines) + "\n"


def _right(rows: Sequence[Sequence[object]]) -> list[bool]:
    return [all(isinstance(value, int | float | None) for value in column) for column in zip(*rows, strict=True)]


ROW_IN = 0.235


def draw_table(title: str, numbers: Numbers, note: str = "", heads: Sequence[str] = ()) -> Figure:
    heads = heads or numbers.header
    lines = 1 + max(head.count("\n") for head in heads)
    rows = len(numbers.rows)
    height_in = ROW_IN * (rows + lines + (1.6 if note else 0.2)) + 0.5
    figure = new_figure(WIDE_IN, height_in)
    axes = figure.add_subplot()
    fill_table(axes, heads, numbers.rows)
    figure.suptitle(title, color=INK)
    if note:
        figure.supxlabel(textwrap.fill(note, 118), fontsize=7, color=INK)
    return figure


_NO_LETTERS = str.maketrans("", "", "$_")


def fill_table(axes: Axes, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Draw the table on ``axes``. Row ``i`` has its middle at ``y = i``."""
    texts = [[cell(value) for value in row] for row in rows]
    longest = [
        max(max(len(line.translate(_NO_LETTERS)) for line in head.split("\n")), *(len(row[at]) for row in texts))
        for at, head in enumerate(heads)
    ]
    right = _right(rows)
    lines = 1 + max(head.count("\n") for head in heads)
    column_x, gap = 0.0, 2.2  # in letters
    for at, head in enumerate(heads):
        x = column_x + (longest[at] if right[at] else 0)
        side = "right" if right[at] else "left"
        axes.text(x, -0.62, head, ha=side, va="bottom", fontsize=7.5, fontweight="bold", linespacing=1.15)
        for row, line in enumerate(texts):
            axes.text(x, row, line[at], ha=side, va="center", fontsize=7.5)
        column_x += longest[at] + gap
    top = -0.75 - 0.62 * lines
    for y, width in ((top, 1.1), (-0.55, 0.7), (len(rows) - 0.5, 1.1)):
        axes.plot([0, column_x - gap], [y, y], color=INK, linewidth=width, clip_on=False)
    axes.set_xlim(0, column_x - gap)
    axes.set_ylim(len(rows) - 0.4, top - 0.1)
    axes.axis("off")


def draw_map(axes: Axes, layout: LayoutMap, number_size: float = 9.0) -> None:
    """Draw a layout: orange in the box, a green circle around the satellite overhead, arrows at servers handed over."""
    from matplotlib.patches import Circle, Rectangle

    # Lines, not a square per satellite: 225 squares took seconds and made large files.
    wide, high = len(layout.columns), len(layout.rows)
    axes.hlines([row - 0.5 for row in range(high + 1)], -0.5, wide - 0.5, color=FAINT, linewidth=0.8, zorder=0)
    axes.vlines([column - 0.5 for column in range(wide + 1)], -0.5, high - 0.5, color=FAINT, linewidth=0.8, zorder=0)
    place = {
        SatelliteId(plane, slot): (column, row)
        for row, plane in enumerate(layout.rows)
        for column, slot in enumerate(layout.columns)
    }
    torus, centre = layout.placement.torus, layout.centre
    left_behind = {source: server for server, source, _ in layout.handovers}
    for satellite, (column, row) in place.items():
        if layout.in_box(satellite):
            tint = ORANGES[min(torus.hops(centre, satellite), len(ORANGES) - 1)]
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=tint, edgecolor=FAINT, linewidth=0.8))
        server = layout.server(satellite)
        if server is not None:
            axes.text(column, row, str(server + 1), ha="center", va="center", fontsize=number_size, color=INK)
        elif satellite in left_behind:
            number = str(left_behind[satellite] + 1)
            axes.text(column, row, number, ha="center", va="center", fontsize=number_size, color=GONE)
        if satellite == centre:
            axes.add_patch(Circle((column, row), 0.42, fill=False, edgecolor=GREEN, linewidth=2.0))
    for _, source, target in layout.handovers:
        if source in place and target in place:
            _arrow(axes, place[source], place[target])
    _map_axes(axes, layout)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    # Arrows along a row would lie over the squares between, so they are bent more.
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


def _map_axes(axes: Axes, layout: LayoutMap) -> None:
    axes.set_xlim(-0.53, len(layout.columns) - 0.47)
    axes.set_ylim(len(layout.rows) - 0.47, -0.53)
    axes.set_aspect("equal")
    axes.grid(False)
    axes.tick_params(length=0, labelsize=7)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xticks(range(len(layout.columns)), [str(slot + 1) for slot in layout.columns])
    axes.set_yticks(range(len(layout.rows)), [str(plane + 1) for plane in layout.rows])
    axes.set_xlabel("satellite   (motion →)")
    axes.set_ylabel("orbital plane")
