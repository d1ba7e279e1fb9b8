"""``skymemory reproduce`` as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skymemory.cli.main import main
from skymemory_lab.view.drawing import save_csv


def test_prints_paper_and_ours_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "cake", "--fig", "3"]) == 0
    text = capsys.readouterr().out
    assert "Figure 3." in text
    (line,) = [line for line in text.splitlines() if "10,000 tokens on an A100" in line]
    assert line.split("A100")[1].split()[:4] == ["1.00", "s", "0.95", "s"]


def test_json_has_the_numbers_behind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "cake", "--fig", "2", "--fig", "3", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [one["figure"] for one in printed] == [2, 3]
    assert printed[1]["rows"][0]["chunk"] == 0
    assert printed[1]["headlines"][0]["deviation"] == "-5.0 %"


@pytest.mark.slow
@pytest.mark.seeded
def test_draws_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["reproduce", "cake", "--fig", "5", "--fig", "7", "--out", str(tmp_path)]) == 0
    for number in (5, 7):
        assert (tmp_path / f"cake-{number:02d}.png").stat().st_size > 10_000
    assert str(tmp_path / "cake-05.csv") in capsys.readouterr().out


def test_without_matplotlib_there_is_csv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["reproduce", "cake", "--fig", "3", "--out", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["cake-03.csv"]
    assert (tmp_path / "cake-03.csv").read_text("utf-8").startswith("chunk,a100_ms,h100_ms,kv_gb\n0,")
    assert "[figures]" in capsys.readouterr().err


def test_answers_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "cake", "--fig", "9"]) == 2
    assert "figure 9" in capsys.readouterr().err
    assert main(["reproduce", "pie"]) == 2


@pytest.mark.brief()
def test_mooncake_says_where_requests_come_from(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["reproduce", "mooncake", "--fig", "7", "--fig", "6", "--quick", "--out", str(tmp_path)]) == 0
    heard = capsys.readouterr()
    assert "seeded generator" in heard.err
    assert "layer-wise (arXiv figure 7)" in heard.out
    assert (tmp_path / "mooncake-layer-wise.csv").read_text("utf-8").startswith("thousand_tokens,prefill_s,")
    pytest.importorskip("matplotlib")
    assert (tmp_path / "mooncake-popularity.png").stat().st_size > 10_000


def test_mooncake_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "mooncake", "--fig", "layer-wise", "--json"]) == 0
    (printed,) = json.loads(capsys.readouterr().out)
    assert printed["experiment"] == "layer-wise"
    assert printed["rows"][0]["thousand_tokens"] == 8
    assert printed["told"][0]["ours"] == 1.25  # words: keep


def test_a_name_with_a_comma_is_one_cell(tmp_path: Path) -> None:
    path = save_csv(tmp_path / "a.csv", ("name", "x, s"), [("coupled, chunked", 0.5), ("none", None)])
    assert path.read_text("utf-8") == 'name,"x, s"\n"coupled, chunked",0.5\nnone,\n'


def test_mooncake_as_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "mooncake", "--fig", "layer-wise", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "### Latency of storing KV: after the prefill, and layer by layer within it" in lines
    (row,) = [line for line in lines if line.startswith("| 128 |")]
    (head,) = [line for line in lines if line.startswith("| thousand tokens |")]
    assert row.count("|") == head.count("|") == 6


def test_mooncake_answers_wrong_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["reproduce", "mooncake", "--fig", "14"]) == 2
    assert "not reproduced" in capsys.readouterr().err
    assert main(["reproduce", "mooncake", "--trace", str(tmp_path / "none")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert main(["reproduce", "cake", "--fig", "swings"]) == 2
    assert "expected the number of a figure" in capsys.readouterr().err
