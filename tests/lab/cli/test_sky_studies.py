"""``skymemory optimise`` and ``breakeven`` as commands: what they print and write, and how they refuse."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from skymemory.cli.main import main

OPTIMISE = ["optimise", "--preset", "kuiper-a", "--access", "gateway", "--servers", "4"]
BREAKEVEN = ["breakeven", "--preset", "kuiper-a", "--tokens", "512"]


def test_optimise_prints_the_choice_with_its_bound_and_writes_the_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*OPTIMISE, "--json", "--out", str(tmp_path / "curves.csv")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"]["of_bound"] >= 1 and found["chosen"]["bound_s"] <= found["chosen"]["seconds"]
    with (tmp_path / "curves.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert {row["parameter"] for row in rows} == set(found["curves"])
    assert float(rows[0]["get_bound_s"]) <= float(rows[0]["get_s"])


@pytest.mark.slow
def test_both_print_tables_and_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OPTIMISE, "--out", str(tmp_path / "o.svg")]) == 0
    out = capsys.readouterr().out
    assert "chosen  gateway" in out and "× the bound of" in out and "second " in out and "→ 4" in out
    (tmp_path / "even.toml").write_text('rates = ["1Gbit"]')
    words = ["--settings", str(tmp_path / "even.toml"), "--out", str(tmp_path / "b.png")]
    assert main([*BREAKEVEN, *words, "--access", "onboard"]) == 0
    assert "512 tokens: tokens/s down" in capsys.readouterr().out
    assert (tmp_path / "o.svg").stat().st_size > 10_000 and (tmp_path / "b.png").stat().st_size > 10_000


@pytest.mark.brief()
def test_breakeven_has_the_bound_beside_each_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "even.toml").write_text('rates = ["1Gbit"]')
    words = ["--settings", str(tmp_path / "even.toml"), "--out", str(tmp_path / "cells.csv")]
    assert main([*BREAKEVEN, *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(cell["load_bound_s"] <= cell["load_s"] for cell in found["cells"] + found["engines"])
    assert {cell["rate_bit_s"] for cell in found["cells"]} == {1e9}
    with (tmp_path / "cells.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == len(found["cells"])


@pytest.mark.brief()
def test_a_model_on_board_is_shown_with_its_energy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BREAKEVEN, "--board", "300"]) == 0
    out = capsys.readouterr().out
    assert "with the user's terminal;" in " ".join(out.split()) and "without idle machines" in out
    (row,) = {tuple(line.split()[-3:-1]) for line in out.splitlines() if line.split()[-1:] in (["ground"], ["board"])}
    assert row == ("10", "J")  # 64 MiB at 44 mW for a GiB, for an hour


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimise", "--settings", "up = 0"], "up: 0: expected a rate above 0"),
        (["optimise", "--settings", "down = '-1Gbit'"], "down: '-1Gbit' is not a rate"),
        (["optimise", "--value", "0"], "a value of 0 bytes"),
        (["optimise", "--servers", "99999"], "99999 servers on 72 planes"),
        (["optimise", "--preset", "kuiper-b", "--settings", "lat = 80"], "no satellite of kuiper-b is in sight of 80"),
        (["optimise", "--access", "radio"], "access 'radio'"),
        (["optimise", "--out", "x.txt"], "expected the suffix"),
        (["optimise", "--out", "x.csv", "--out", "y.csv"], "expected at most one .csv file"),
        (["breakeven", "--settings", "rates = ['none']"], "expected a list of rates"),
        (["breakeven", "--tokens", "0"], "0 tokens: expected more than 0"),
        (["breakeven", "--servers", "0"], "0 servers on 72 planes"),
        (["breakeven", "--access", "onboard", "--board", "300"], "a host on the ground"),
        (["breakeven", "--model", "gpt"], "no model is called 'gpt'"),
        (["breakeven", "--preset", "starlink-c"], "unknown constellation preset"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if "--settings" in words:
        (tmp_path / "study.toml").write_text(words[-1])
        words = [*words[:-1], str(tmp_path / "study.toml")]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1
