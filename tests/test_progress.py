"""Progress of waits: what is printed where, and when."""

from __future__ import annotations

import io
import os
import pty
import time

from skymemory.progress import Progress, Wait


def _lines(out: io.StringIO) -> list[str]:
    return out.getvalue().splitlines()


def test_a_silent_wait_prints_what_is_under_way_and_how_far_it_is() -> None:
    out = io.StringIO()
    progress = Progress(out, line_every_s=0.0)
    with progress.wait("the model loads", 40.0) as wait:
        wait.on_progress(0.5, "layer 11 of 22")
        while len(_lines(out)) < 2:
            time.sleep(0.02)
    first = _lines(out)[0]
    assert first.startswith("[") and "the model loads" in first
    assert "layer 11 of 22" in first and "of about 40 s" in first


def test_an_event_during_a_wait_delays_its_next_line() -> None:
    out = io.StringIO()
    progress = Progress(out, line_every_s=3600.0)
    with progress.wait("the model loads"):
        progress.say("an event")
        time.sleep(0.6)
    assert len(_lines(out)) == 1 and _lines(out)[0].endswith("an event")


def test_the_end_of_a_wait_ends_its_lines() -> None:
    out = io.StringIO()
    progress = Progress(out, line_every_s=0.0)
    with progress.wait("the model loads"):
        while not _lines(out):
            time.sleep(0.02)
    printed = len(_lines(out))
    time.sleep(0.6)
    assert len(_lines(out)) == printed


def test_a_wait_on_a_terminal_draws_a_bar_within_its_width_and_erases_it() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        progress = Progress(stream)
        with progress.wait("a wait whose words alone are wider than eighty columns can be, " * 2, 9.0) as wait:
            wait.began_s -= 3.0
            wait.on_progress(0.25, "layer 5 of 22")
            time.sleep(0.8)
            progress.say("an event")
        progress.say("the end")
        written = b""
        while b"the end\r\n" not in written:  # the system hands over in pieces what was written
            written += os.read(ours, 1 << 16)
    drawn = written.decode()
    os.close(ours)
    frames = drawn.split("\r\x1b[K")
    bars = [frame for frame in frames if "━" in frame]
    assert bars and all("\n" not in bar for bar in bars)
    assert any(frame.strip().endswith("an event") for frame in frames)
    # What stands behind the last erasure is the last line alone.
    assert "━" not in frames[-1] and frames[-1].strip().endswith("the end")


def test_a_share_that_is_only_expected_never_fills() -> None:
    wait = Wait("x", 10.0)
    wait.began_s -= 60.0
    assert wait.share == 0.99
    wait.on_progress(0.2)
    assert wait.share == 0.2
