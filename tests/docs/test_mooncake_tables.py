"""The tables of the reproduction of Mooncake are those of the run whose CSV files lie beside them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from skymemory.cli._reproduce_mooncake import _cell
from skymemory.sim.mooncake.experiments import EXPERIMENTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reproduce.md").read_text("utf-8")
FILES = sorted(ROOT.glob("docs/figures/mooncake-*.csv"))


def shown(text: str) -> str:
    """A cell of the file as the page has it."""
    if not text:
        return "-"
    try:
        return _cell(float(text) if not text.lstrip("-").isdigit() else int(text))
    except ValueError:
        return text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_table_is_that_of_the_run(path: Path) -> None:
    with path.open(encoding="utf-8", newline="") as stream:
        header, *rows = csv.reader(stream)
    assert f"| {' | '.join(header)} |".replace("_", " ") in PAGE
    assert rows
    for row in rows:
        assert f"| {' | '.join(map(shown, row))} |" in PAGE


def test_every_experiment_has_its_section() -> None:
    for name in EXPERIMENTS:
        assert f"\n`{name}`; published as " in PAGE
        assert (ROOT / f"docs/figures/mooncake-{name}.csv") in FILES
