"""Every figure and table: drawn without labels that overlap, the same twice; its page is that of the code."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

from skymemory.cli.main import main
from skymemory.errors import InvalidInput
from skymemory_lab.reproduce.gallery import chosen, documents, formats_of, gallery_page
from skymemory_lab.reproduce.mooncake.base import CAPTIONS
from skymemory_lab.reproduce.mooncake.experiments import EXPERIMENTS
from skymemory_lab.reproduce.mooncake.figures import read_experiment, write_mooncake_csv
from skymemory_lab.view.drawing import Numbers, draw_table, new_figure

ROOT = Path(__file__).parents[3]
ALL = chosen([], everything=True)
QUICK = ("4", "10", "table-2")
"""Drawn by the default run: a map, a recorded sequence, a table."""

Corners = list[tuple[float, float]]


def drawn_texts(figure) -> list[tuple[str, Corners]]:
    """All texts that are drawn, with the corners of their (turned) boxes in pixels."""
    from matplotlib.text import Text

    found: dict[int, tuple[str, Corners]] = {}
    draw = Text.draw

    def noting(self, renderer, *args, **kwargs):
        if self.get_visible() and self.get_text().strip():
            found[id(self)] = (self.get_text(), corners(self, renderer))
        return draw(self, renderer, *args, **kwargs)

    Text.draw = noting
    try:
        figure.canvas.draw()
    finally:
        Text.draw = draw
    return list(found.values())


def corners(text, renderer) -> Corners:
    from matplotlib.text import Text

    # Of an annotation the box without its arrow. The middle of a turned box is that of its outline.
    outline = Text.get_window_extent(text, renderer)
    turn = text.get_rotation()
    text.set_rotation(0)
    flat = Text.get_window_extent(text, renderer)
    text.set_rotation(turn)
    x, y = (outline.x0 + outline.x1) / 2, (outline.y0 + outline.y1) / 2
    cos, sin = math.cos(math.radians(turn)), math.sin(math.radians(turn))
    wide, high = max(0.0, flat.width / 2 - 0.5), max(0.0, flat.height / 2 - 0.5)
    return [
        (x + cos * a * wide - sin * b * high, y + sin * a * wide + cos * b * high)
        for a, b in ((-1, -1), (1, -1), (1, 1), (-1, 1))
    ]


def overlap(one: Corners, other: Corners) -> bool:
    """Whether two rectangles have a common point: no side of either separates them."""
    for box in (one, other):
        for (x0, y0), (x1, y1) in zip(box, [*box[1:], box[0]], strict=True):
            across = (y1 - y0, x0 - x1)
            first, second = ([x * across[0] + y * across[1] for x, y in points] for points in (one, other))
            if max(first) <= min(second) or max(second) <= min(first):
                return False
    return True


def faults(figure) -> Iterator[str]:
    texts = drawn_texts(figure)
    for (one, here), (other, there) in combinations(texts, 2):
        if overlap(here, there):
            yield f"{one!r} lies over {other!r}"
    width, height = figure.bbox.width, figure.bbox.height
    for text, box in texts:
        if any(not (-1 <= x <= width + 1 and -1 <= y <= height + 1) for x, y in box):
            yield f"{text!r} lies outside of the page"


@pytest.mark.brief("table-2")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ALL], ids=str
)
def test_no_label_lies_over_another_or_off_the_page(name: str) -> None:
    pytest.importorskip("matplotlib")
    assert list(faults(ALL[name].draw())) == []


def test_labels_that_overlap_would_be_found() -> None:
    pytest.importorskip("matplotlib")
    figure = new_figure(3.0, 3.0)
    axes = figure.add_subplot()
    axes.text(0.5, 0.5, "turned by half a right angle", rotation=45)
    axes.text(0.5, 0.62, "across it")
    figure.text(0.95, 0.01, "far over the edge of the page")
    found = list(faults(figure))
    assert any("across it" in fault for fault in found)
    assert any("edge" in fault and "outside" in fault for fault in found)


@pytest.mark.parametrize(
    "name", ["table-2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("1", "9", "11", "mooncake-swings"))]
)
def test_two_runs_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = (ALL[name].write(tmp_path / run, ("svg", "pdf")) for run in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert "Date" not in first[0].read_text("utf-8") and b"CreationDate" not in first[1].read_bytes()


def test_every_figure_of_the_papers_is_there() -> None:
    paper, disclosure, cake, mooncake = (list(one.exhibits) for one in documents())
    assert paper == [*map(str, range(1, 17)), "table-1", "table-2", "table-3"]
    assert disclosure == ["disclosure-constellations", "disclosure-d-n"]
    assert cake == [f"cake-{number}" for number in range(1, 9)]
    assert mooncake == [f"mooncake-{name}" for name in EXPERIMENTS] and list(CAPTIONS) == list(EXPERIMENTS)


def test_the_gallery_is_that_of_the_code() -> None:
    assert (ROOT / "docs/figures.md").read_text("utf-8") == gallery_page()
    for exhibit in ALL.values():
        for ending in ("png", "svg"):
            assert (ROOT / f"docs/figures/{exhibit.stem}.{ending}").is_file(), exhibit.stem


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_mooncakes_csv_read_and_written_again_is_the_same(name: str, tmp_path: Path) -> None:
    kept = ROOT / "docs" / "figures"
    for path in write_mooncake_csv(read_experiment(name, kept), tmp_path):
        assert path.read_bytes() == (kept / path.name).read_bytes()
    with (kept / f"mooncake-{name}.csv").open(encoding="utf-8", newline="") as stream:
        assert tuple(next(csv.reader(stream))) == read_experiment(name, kept).header


def test_mooncake_without_a_checkout_says_how_to_compute_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="skymemory reproduce mooncake --fig real"):
        read_experiment("real", tmp_path)


def test_numbers_as_a_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["figures", "table-2", "--format", "svg", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table-2.csv", "table-2.md", "table-2.svg"]
    lines = (tmp_path / "table-2.md").read_text("utf-8").splitlines()
    assert lines[2] == "| KVC_BYTES | 2..21 MB | 1, 2 … 21 MiB |"
    assert "1, 2 … 21 MiB" in (tmp_path / "table-2.svg").read_text("utf-8")
    drawn_texts(draw_table("t", Numbers(("a", "b"), [("x", 1), ("y", None)]), "a note"))


def test_a_wrong_name_lists_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words, said in (
        (["17"], "Cake: cake-1"),
        (["cake-9"], "mooncake-swings"),
        (["16", "--format", "jpg"], "expected some of png, svg, pdf"),
        (["16", "all"], "either names, or all"),
    ):
        assert main(["figures", *words, "--out", str(tmp_path)]) == 2
        assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert formats_of("pdf, PNG,pdf") == ("pdf", "png")
