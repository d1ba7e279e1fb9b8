"""Figures are drawn, the same twice, with their numbers beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput, MissingExtra
from skymemory_lab.view.drawing import drawing_path
from skymemory_lab.view.figures import DISCLOSURE, FIGURES, write_figure
from skymemory_lab.view.protocol_sequence import label, record


def test_the_papers_figures_with_our_numbers() -> None:
    assert list(FIGURES) == list(range(1, 17))
    with pytest.raises(InvalidInput, match="figure 17"):
        write_figure(17, Path("unused"))


@pytest.mark.brief("2")
@pytest.mark.parametrize("number", [2, 8, 14, 16])
def test_a_figure_is_a_png_an_svg_and_its_numbers(number: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = write_figure(number, tmp_path / "new" / "folder")
    endings = [path.suffix for path in written]
    assert endings == [".png", ".svg", ".csv"]
    png, svg = written[0].read_bytes(), written[1].read_text(encoding="utf-8")
    assert png.startswith(b"\x89PNG") and 5_000 < len(png) < 400_000
    assert f"Figure {number}." in svg
    assert "Date" not in svg


@pytest.mark.brief()
def test_the_same_figure_is_the_same_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = (write_figure(7, tmp_path / name) for name in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.brief()
def test_the_csv_of_figure_16_has_132_points_and_is_the_one_in_the_docs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = write_figure(16, tmp_path)[-1].read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines[0] == "parameter,value,strategy,worst_s" and len(lines) == 1 + 132
    assert "servers,9,rotation_hop,4.00640427" in lines
    kept = Path(__file__).parents[3] / "docs" / "figures" / "figure-16.csv"
    assert kept.read_text(encoding="utf-8") == text


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("matplotlib", "mpl_toolkits")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for number in FIGURES:
        with pytest.raises(MissingExtra, match=r"pip install .*\[figures\]"):
            write_figure(number, tmp_path)
    assert not list(tmp_path.iterdir())


def test_figure_8_by_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = write_figure(8, tmp_path)[-1].read_text("utf-8").splitlines()
    assert lines[0] == "server,satellite,plane,from_satellite,from_plane"
    assert {line for line in lines[1:] if not line.endswith(",,")} == {"6,2,2,5,2", "3,2,3,5,3", "8,2,4,5,4"}


def test_the_recorded_run_is_what_the_paper_says() -> None:
    """Nine packets out and nine back; at the rotation three chunks go over three links each; the bytes are right."""
    run = record()
    assert run.right and run.after.centre == SatelliteId(2, 2)
    assert [one.operation for one in run.set] == ["SET"] * 9 + ["ACK"] * 9
    assert sorted(one.operation for one in run.get) == ["DATA"] * 9 + ["GET"] * 9
    assert sum(one.operation == "MIGRATE" for one in run.move) == 9
    assert [(label(source), label(target)) for source, target in run.handed_over()] == [
        ("(5,2)", "(2,2)"),
        ("(5,3)", "(2,3)"),
        ("(5,4)", "(2,4)"),
    ]
    for one in (*run.set, *run.move, *run.get):
        assert one.arrived_s > one.sent_s >= 0.0
    held = {one.sender for one in run.get if one.operation == "DATA"}
    assert held == set(run.after.placement.locate_all((0, 0), (1, 0)))


def test_the_look_up_of_figure_11_finds_what_was_stored() -> None:
    rows = FIGURES[11].numbers().rows
    assert [row[3] for row in rows if row[0] == "block"] == [1, 1, 1, 0]
    servers = [row for row in rows if row[0] == "server"]
    assert sum(int(str(row[6])) for row in servers) == 470 and len({row[4:6] for row in servers}) == 9


def test_the_disclosures_constellations() -> None:
    of = {row[0]: row for row in DISCLOSURE["constellations"].numbers().rows}
    assert of["Starlink A"][1:5] == (72, 22, 550, 53.0)
    assert of["Starlink A"][5:10] == (1969.9, 6.571, 363.4, 603.8, 2.014)
    assert of["Starlink B"][7:9] == (1406.1, 8988.4) and 26 < of["Starlink B"][10] < 28
    curve = [row for row in DISCLOSURE["d-n"].numbers().rows if row[0] == "Starlink A"]
    assert max(row[2] for row in curve) == pytest.approx(603.78, abs=0.01)
    # Twice an orbit: the quarter and three quarters are shortest.
    assert curve[90][2] == pytest.approx(curve[270][2]) == pytest.approx(363.364, abs=0.01)


def test_unknown_formats_are_refused() -> None:
    assert drawing_path(Path("map.SVG")) == Path("map.SVG")
    with pytest.raises(InvalidInput, match=r"\.png, \.svg, \.pdf"):
        drawing_path(Path("map.jpg"))
