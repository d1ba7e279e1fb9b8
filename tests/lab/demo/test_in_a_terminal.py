"""Each demo in terminals of two sizes: no row goes on in the next, nothing piles up, the terminal is as it was."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
from tests.terminal import Terminal

COMMAND = [sys.executable, "-m", "skymemory"]
ENGINE = (pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300))
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def case(words: str, head: str, end: str, *marks: pytest.MarkDecorator, rows: tuple[str, ...] = ()) -> object:
    """``head``: pattern of how one row of a frame begins; "" where nothing is drawn. ``end``: words of the last
    screen. ``rows``: patterns of whole rows of it, such as commands to copy.
    """
    return pytest.param(words.split(), head, end, rows, marks=marks, id="-".join(words.split()[1:2]) or "table-3")


DEMOS = [
    case("demo cells --settings cells.toml", "", "borders crossed"),
    case("demo motion --seconds 6", "n a server", "done; the constellation is down again", pytest.mark.slow),
    case("demo conductor --quick", "scheduler        in line", "from where", pytest.mark.slow),
    case("demo cake --quick --tokens 2560", "compute █", "every way the same next token", *ENGINE),
    case("demo route --quick --requests 24", "strategy +answered", "every request was answered", *ENGINE),
    case(
        "demo disagg --engine own --requests 2 --burst 4",
        "",
        "the prefill engine had",
        *ENGINE,
        rows=(r"request  .*  between", r" +2  .* ms"),
    ),
    case(
        "demo --quick",
        "",
        "the constellation is down again",
        *ENGINE,
        rows=(r"  (\S+/)?skymemory kv get README\.md -o copy\.md", r"  (\S+/)?skymemory layout --rotations 1( .*)?"),
    ),
]


def words_of(terminal: Terminal) -> str:
    return " ".join(terminal.text.split())


@pytest.mark.brief("cells-60x20")
@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (60, 20)], ids=["80x24", "60x20"])
@pytest.mark.parametrize(("words", "head", "end", "rows_at_end"), DEMOS)
def test_a_demo_fits_the_terminal(
    tmp_path: Path, words: list[str], head: str, end: str, rows_at_end: tuple[str, ...], columns: int, rows: int
) -> None:
    cells = tmp_path / "cells.toml"
    cells.write_text('grid = "12x12"\nlegs = 1\n')
    words = [str(cells) if word == cells.name else word for word in words]
    terminal = Terminal([*COMMAND, *words], columns, rows, TMPDIR=str(tmp_path), **ONE_THREAD)
    assert terminal.finish(280) == 0, terminal.text
    terminal.check()
    assert end in words_of(terminal), terminal.text
    for pattern in rows_at_end:
        assert any(re.fullmatch(pattern, row) for row in terminal.rows), terminal.text
    if head:
        drawn = [sum(bool(re.match(head, row)) for row in frame) for frame in terminal.frames]
        assert drawn.count(1) > 0 and max(drawn) == 1, "one frame at a time, and no header left behind"


@pytest.mark.slow
@pytest.mark.parametrize("words", ["demo motion", "demo conductor --quick"])
def test_ctrl_c_in_a_resized_terminal_gives_it_back(tmp_path: Path, words: str) -> None:
    terminal = Terminal([*COMMAND, *words.split()], TMPDIR=str(tmp_path))
    drawn = "overhead:" if "motion" in words else "as fast as it would be"
    assert terminal.until(lambda text: drawn in text, 60)
    terminal.resize(60, 20)
    terminal.until(lambda _: False, 1.5)
    terminal.screen.wrapped.clear()  # the frame that was on its way when the size changed
    assert drawn in words_of(terminal)
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.finish(60) == 130
    terminal.check()
    assert drawn in words_of(terminal) and "interrupted" in terminal.text
