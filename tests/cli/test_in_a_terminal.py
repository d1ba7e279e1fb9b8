"""Verbs in a terminal of 80 columns: no row goes on in the next one, no word is broken, no column is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.terminal import Terminal

VERBS = [
    "layout --rotations 3",
    "layout --preset starlink-a --servers 81",
    "layout --figure 6",
    "passes --lat 50 --lon 8 --hours 1",
    "simulate --list",
    "breakeven --board 100 --tokens 512",
    "demo --help",
    pytest.param("optimise", marks=pytest.mark.slow),
    pytest.param("reproduce claims", marks=pytest.mark.slow),
    pytest.param("reproduce cake", marks=pytest.mark.slow),
    pytest.param("reproduce mooncake --quick --fig popularity", marks=pytest.mark.slow),
    pytest.param("doctor", marks=(pytest.mark.slow, pytest.mark.engine)),
]


@pytest.mark.brief("layout --preset starlink-a --servers 81", "passes --lat 50 --lon 8 --hours 1")
@pytest.mark.parametrize("words", VERBS)
def test_a_verb_fits_80_columns(words: str) -> None:
    terminal = Terminal([sys.executable, "-m", "skymemory", *words.split()], 80, 24)
    assert terminal.finish(200) == 0, terminal.text
    terminal.check()


@pytest.mark.parametrize("words", ["layout --planes x", "constellation status --run-dir nowhere", "no-such-verb"])
def test_an_error_fits_80_columns(words: str) -> None:
    terminal = Terminal([sys.executable, "-m", "skymemory", *words.split()], 80, 24)
    assert terminal.finish(60) not in (0, None), terminal.text
    terminal.check()
    assert "skymemory: " in terminal.text


@pytest.mark.slow
def test_a_running_constellation_fits_80_columns(tmp_path: Path) -> None:
    run = ["--run-dir", str(tmp_path / "run")]
    up = Terminal([sys.executable, "-m", "skymemory", "constellation", "up", "--base-port", "auto", *run])
    try:
        assert up.finish(60) == 0, up.text
        up.check()
        status = Terminal([sys.executable, "-m", "skymemory", "constellation", "status", *run])
        assert status.finish(60) == 0, status.text
        status.check()
        assert "19 of 19" in status.text
    finally:
        down = Terminal([sys.executable, "-m", "skymemory", "constellation", "down", *run])
        assert down.finish(60) == 0
        down.check()
