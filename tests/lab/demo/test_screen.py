"""The demos' screen in emulated terminals: frames fit, nothing piles up, and the terminal is left as it was."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.terminal import Terminal

from skymemory.text import PIPED_WIDTH
from skymemory_lab.demo.screen import Screen

ROOT = Path(__file__).parents[3]
DRAWING = [sys.executable, "-m", "tests.lab.demo.drawing"]
HEAD = re.compile(r"^ {3,}\d+ .*\d$")


def heads(rows: list[str]) -> int:
    return sum(bool(HEAD.match(row)) for row in rows)


def frame_of(text: str) -> int:
    """Which is to be seen: a slow machine leaves some out."""
    found = re.search(r"frame (\d+)", text)
    return -1 if found is None else int(found[1])


def drawing(columns: int = 80, rows: int = 24, **variables: str) -> Terminal:
    return Terminal(DRAWING, columns, rows, PYTHONPATH=f"{ROOT}:{ROOT / 'src'}:{ROOT / 'lab/src'}", **variables)


@pytest.mark.brief("60-20")
@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (60, 20), (120, 50)])
def test_every_frame_fits_and_the_last_one_stays(columns: int, rows: int) -> None:
    terminal = drawing(columns, rows)
    assert terminal.finish(60) == 0
    terminal.check()
    drawn = [frame for frame in terminal.frames if heads(frame)]
    assert terminal.written.count(b"\x1b[H") > 5, "drawn over and over"
    assert drawn and all(heads(frame) == 1 for frame in drawn)
    assert "frame 39 of 40" in terminal.text and "frame 38" not in terminal.text
    assert terminal.rows.count("the end") == 1
    # What was reported while it was drawn is there afterwards, each event once.
    for number in (5, 15, 25, 35) if rows > 30 else (35,):
        assert terminal.text.count(f"event {number}:") == 1


@pytest.mark.brief()
def test_it_follows_a_terminal_that_is_resized_while_it_draws() -> None:
    terminal = drawing()
    assert terminal.until(lambda text: frame_of(text) >= 8, 30)
    terminal.resize(60, 20)
    assert terminal.until(lambda text: frame_of(text) >= 25, 30)
    assert heads(terminal.rows) == 1 and len(terminal.rows) == 20
    assert "· empty" in terminal.text, "the whole legend"
    terminal.screen.wrapped.clear()  # the frame that was on its way when the size changed
    terminal.resize(100, 40)
    assert terminal.finish(60) == 0
    terminal.check()
    assert heads(terminal.rows) == 1 and "frame 39 of 40" in terminal.text


def test_ctrl_c_gives_the_terminal_back() -> None:
    terminal = drawing()
    assert terminal.until(lambda text: frame_of(text) >= 8, 30)
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.finish(30) != 0
    assert terminal.screen.wrapped == [] or all("File" in row for row in terminal.screen.wrapped)
    assert not terminal.screen.cursor.hidden and not terminal.screen.alternate
    assert "KeyboardInterrupt" in terminal.text


@pytest.mark.brief()
@pytest.mark.parametrize(
    ("size", "variables"), [((36, 24), {}), ((80, 8), {}), ((80, 24), {"TERM": "dumb"})], ids=["narrow", "low", "dumb"]
)
def test_lines_where_no_frame_can_be_drawn(size: tuple[int, int], variables: dict[str, str]) -> None:
    terminal = drawing(*size, **variables)
    assert terminal.finish(60) == 0
    terminal.check()
    assert b"\x1b" not in terminal.written
    assert b"event 35: a value" in terminal.written.replace(b"\r\n" + b" " * 10, b" ")


BESIDE_A_BAR = """
import sys, time
from skymemory_lab.demo.screen import Screen
from skymemory.progress import Progress

progress = Progress(sys.stdout)
screen = Screen(sys.stdout, progress.began_s, progress=progress)
with progress.wait("a wait", 9.0):
    time.sleep(2.8)
    screen.say("an event " * 4)
"""


@pytest.mark.slow
def test_a_line_erases_the_bar_of_a_wait() -> None:
    terminal = Terminal(
        [sys.executable, "-c", BESIDE_A_BAR],
        60,
        8,
        PYTHONPATH=f"{ROOT / 'src'}:{ROOT / 'lab/src'}",
    )
    assert terminal.finish(60) == 0
    terminal.check()
    assert "a wait" in "".join(map("".join, terminal.frames)) and "a wait" not in terminal.text


@pytest.mark.brief()
def test_no_colour_is_obeyed_and_piped_lines_are_short() -> None:
    terminal = drawing(NO_COLOR="1")
    assert terminal.finish(60) == 0
    assert not re.search(rb"\x1b\[[0-9;]*m", terminal.written.replace(b"\x1b[0m", b""))
    done = subprocess.run(DRAWING, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= PIPED_WIDTH


def test_a_picture_is_printed_with_an_event_where_nothing_is_drawn() -> None:
    out = io.StringIO()
    screen = Screen(out, 0.0)
    screen.say("words " * 40, lambda width: ["picture", f"of {width}"])
    lines = out.getvalue().splitlines()
    assert lines[-2:] == ["  picture", f"  of {PIPED_WIDTH - 2}"] and max(map(len, lines)) <= PIPED_WIDTH
    assert all(line.startswith(" " * 10 + "words") for line in lines[1:-2])
