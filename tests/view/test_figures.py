"""Figures are drawn, the same twice, with their numbers beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from skymemory.errors import InvalidInput, MissingExtra
from skymemory.view.drawing import drawing_path
from skymemory.view.figures import FIGURES, write_figure


def test_the_papers_figures_with_our_numbers() -> None:
    assert sorted(FIGURES) == [1, 2, 4, 5, 6, 7, 8, 13, 14, 15, 16]
    with pytest.raises(InvalidInput, match="figure 3"):
        write_figure(3, Path("unused"))


@pytest.mark.brief("2")
@pytest.mark.parametrize("number", [2, 8, 14, 16])
def test_a_figure_is_a_png_an_svg_and_its_numbers(number: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = write_figure(number, tmp_path / "new" / "folder")
    endings = [path.suffix for path in written]
    assert endings == ([".png", ".svg"] if number == 8 else [".png", ".svg", ".csv"])
    png, svg = written[0].read_bytes(), written[1].read_text(encoding="utf-8")
    assert png.startswith(b"\x89PNG") and 5_000 < len(png) < 150_000
    assert f"Figure {number}." in svg
    assert "Date" not in svg


def test_the_same_figure_is_the_same_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = (write_figure(7, tmp_path / name) for name in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_the_csv_of_figure_16_has_132_points_and_is_the_one_in_the_docs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = write_figure(16, tmp_path)[-1].read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines[0] == "parameter,value,strategy,worst_s" and len(lines) == 1 + 132
    assert "servers,9,rotation_hop,4.00640427" in lines
    kept = Path(__file__).parents[2] / "docs" / "figures" / "figure-16.csv"
    assert kept.read_text(encoding="utf-8") == text


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("matplotlib", "mpl_toolkits")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for number in FIGURES:
        with pytest.raises(MissingExtra, match=r"skymemory\[figures\]"):
            write_figure(number, tmp_path)
    assert not list(tmp_path.iterdir())


def test_unknown_formats_are_refused() -> None:
    assert drawing_path(Path("map.SVG")) == Path("map.SVG")
    with pytest.raises(InvalidInput, match=r"\.png, \.svg, \.pdf"):
        drawing_path(Path("map.jpg"))
