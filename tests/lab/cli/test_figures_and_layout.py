"""``skymemory figures`` and ``skymemory layout`` as they are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skymemory.cli.main import build_parser
from skymemory.errors import InvalidInput, UnknownPreset
from skymemory_lab.cli import layout, reproduce


def call(*words: str) -> int:
    args = build_parser([words[0]]).parse_args(words)
    run = {"figures": reproduce.run, "layout": layout.run}[words[0]]
    return run(args)


def test_layout_prints_the_testbed_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("layout") == 0
    text = capsys.readouterr().out
    assert "rotation_hop: 10 servers in a box of 4 × 3, on 5 planes of 19 satellites" in text
    assert "\x1b" not in text


def test_layout_as_json_is_zero_based_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("layout", "--preset", "paper-15x15", "--servers", "9", "--rotations", "1", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["overhead"] == {"plane": 7, "slot": 6} and printed["indices"] == "0-based"
    assert len(printed["map"]) == 9 and printed["map"][0] == {"server": 0, "plane": 7, "slot": 7}
    assert {"server": 5, "from": {"plane": 6, "slot": 8}, "to": {"plane": 6, "slot": 5}} in printed["handovers"]
    assert printed["box"] == {"width": 3, "height": 3, "west": 1, "north": 1}


@pytest.mark.brief()
def test_layout_draws_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for name, words in {"any.png": ("--strategy", "cost", "--planes", "1"), "paper.svg": ("--figure", "5")}.items():
        assert call("layout", *words, "--out", str(tmp_path / name)) == 0
        assert capsys.readouterr().out == f"{tmp_path / name}\n"
        assert (tmp_path / name).stat().st_size > 4_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--servers", "96"), "expected 1 to 95"),
        (("--servers", "0"), "expected 1 to 95"),
        (("--strategy", "hops"), "did you mean 'hop'"),
        (("--figure", "9"), "expected one of 4"),
        (("--figure", "8", "--strategy", "hop"), "sets the layout"),
        (("--out", "map.jpg"), "expected the suffix"),
    ],
)
def test_layout_answers_wrong_input(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        call("layout", *words)


def test_an_unknown_preset_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownPreset, match="did you mean 'kuiper-"):
        call("layout", "--preset", "kuiper")


@pytest.mark.brief()
def test_figures_writes_and_prints_what_the_paper_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert call("figures", "16", "16", "--out", str(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [str(tmp_path / f"figure-16.{ending}") for ending in ("png", "svg", "csv")]
    assert sum("paper:" in line for line in lines) == sum("model:" in line for line in lines) == 4


def test_figures_refuses_a_number_before_drawing_anything(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="figure 99"):
        call("figures", "16", "99", "--out", str(tmp_path))
    assert not list(tmp_path.iterdir())
