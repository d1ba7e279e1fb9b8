"""Verbs in a terminal of 80 columns: no row goes on in the next one, no word is broken, no column is lost."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.terminal import Terminal

from skymemory.testbed.key_file import new_keys

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


NARROW = [
    "layout --rotations 3",
    "layout --figure 6",
    "layout --preset starlink-a --servers 81",
    "passes --lat 1 --lon 1 --hours 2",
    "simulate --list",
    "breakeven --board 300 --tokens 512",
    "demo cells --settings cells.toml",
    "kv put val --store memory://1MiB",
    "kv get val --store memory://1MiB",
    "kv list --store memory://1MiB",
    "kv list",
    "kv put val",
    "route --backend http://127.0.0.1:1 --check",
    "route --check --settings nowhere.toml",
    "constellation status",
    "constellation down",
    "constellation plan --out plan.json --host a=127.0.0.1:9000 --host b=127.0.0.1:9100",
    "cluster status",
    "cluster down",
    "keys new fresh",
    "keys show keys",
    "keys rotate keys",
    "keys retire keys 1",
    "shells val",
    "prefetch val",
    "replay val --url http://127.0.0.1:1",
    "fit --url http://127.0.0.1:1 --shape val",
    "serve --model nowhere",
    "epp --endpoint 127.0.0.1:1 --settings nowhere",
    "demo vllm --python nowhere",
    "simulate empty.toml",
]
"""Quick command lines whose output is prose and tables: no JSON, no keys, no command to copy, which stay in one row."""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose path is short: paths are not broken, so that they can be copied."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        monkeypatch.chdir(place)
        monkeypatch.setenv("SKYMEMORY_RUN_DIR", "run")
        (place / "val").write_text("a value")
        (place / "empty.toml").touch()
        (place / "cells.toml").write_text('grid = "12x12"\nlegs = 1\n')
        new_keys(place / "keys")
        yield place
        monkeypatch.chdir("/")


@pytest.mark.brief("passes --lat 1 --lon 1 --hours 2-40", "kv put val --store memory://1MiB-40")
@pytest.mark.parametrize("columns", [40, 60])
@pytest.mark.parametrize("words", NARROW)
def test_a_quick_verb_fits_a_narrow_terminal(words: str, columns: int, place: Path) -> None:
    terminal = Terminal([sys.executable, "-m", "skymemory", *words.split()], columns, 10)
    assert terminal.finish(60) in (0, 1, 2), terminal.text
    terminal.check()
    assert terminal.written


@pytest.mark.brief()
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
