"""The moving demo as a user runs it: its report, its picture on a terminal, and Ctrl-C at any moment."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.end_to_end.processes import processes_of

DEMO = [sys.executable, "-m", "skymemory", "demo", "motion"]


def environment(folder: Path) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    return {**plain, "TMPDIR": str(folder), "TERM": "xterm"}


def nothing_is_left(folder: Path) -> bool:
    return processes_of(folder) == [] and list(folder.glob("skymemory-*")) == []


@pytest.mark.slow
def test_a_plane_dies_and_returns_and_no_byte_is_wrong(tmp_path: Path) -> None:
    answer = subprocess.run(
        [*DEMO, "--seconds", "6", "--json"], env=environment(tmp_path), capture_output=True, text=True, timeout=240
    )
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report["sound"] is True and report["wrong"] == 0
    one, two = report["reads"]
    assert (one["copies"], one["values"], two["copies"], two["values"]) == (1, 4, 2, 4)
    for kind in (one, two):
        (right, reads), (right_down, reads_down), (right_after, reads_after) = (
            kind["before"],
            kind["while_down"],
            kind["after"],
        )
        assert right + right_down + right_after == kind["right"] > 10
        assert reads + reads_down + reads_after == kind["right"] + kind["missed"]
        assert kind["missed"] == kind["recomputed"] + kind["recompute_refused"]
        assert reads >= right >= 0.9 * reads, "on a crowded machine a read may take longer than it is waited for"
        assert right_after > 0 and reads_down > 0
    assert one["recomputed"] >= 4, "what one copy lost is computed and stored again"
    assert two["while_down"][0] > one["while_down"][0], "two copies outlive a plane"
    assert report["slot_moves"] >= 3 and report["chunks_moved"] > 0
    assert report["chunks_lost"] > 0 and report["killed_host"].startswith("host-") and report["down_s"] > 1
    assert report["readable_at_end"] == report["values"] and report["satellites_at_end"] == 95
    printed = answer.stderr
    assert printed.index("killed") < printed.index("a value is missed") < printed.index("computed and stored again")
    assert printed.index("killed") < printed.index("is back"), (
        "a read that a crowded machine delays may be missed after it"
    )
    assert "×" in answer.stderr and "\x1b" not in answer.stderr
    assert nothing_is_left(tmp_path)


@pytest.mark.slow
def test_on_a_terminal_it_is_drawn_in_place_and_ctrl_c_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    shape = {"COLUMNS": "100", "LINES": "40"}
    demo = subprocess.Popen(
        DEMO, env=environment(tmp_path) | shape, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    seen = b""
    deadline_s = time.monotonic() + 30
    while seen.count(b"overhead:") < 6 and time.monotonic() < deadline_s:
        seen += os.read(ours, 65536)
    demo.send_signal(signal.SIGINT)
    while True:
        try:
            seen += os.read(ours, 65536)
        except OSError:  # the other end of a terminal is closed
            break
    os.close(ours)
    assert demo.wait(20) == 130
    shown = seen.decode()
    assert "\x1b[?25l" in shown and shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert "48;5;215" in shown and shown.count("\x1b[H") >= 2 and "Traceback" not in shown
    assert nothing_is_left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("moment_s", "number"), [(0.15, signal.SIGINT), (0.45, signal.SIGTERM), (1.2, signal.SIGINT)])
def test_a_signal_at_any_moment_leaves_nothing(tmp_path: Path, moment_s: float, number: signal.Signals) -> None:
    demo = subprocess.Popen(
        [*DEMO, "--seconds", "30"], env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline_s = time.monotonic() + 30
    while not processes_of(tmp_path) and demo.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    time.sleep(moment_s)
    demo.send_signal(number)
    _, printed = demo.communicate(timeout=30)
    assert demo.returncode == 130 and "Traceback" not in printed
    assert nothing_is_left(tmp_path)


@pytest.mark.brief("options1", "options2")
@pytest.mark.parametrize("options", [["--seconds", "1"], ["--seconds", "nan"], ["--seconds", "inf"], ["--speed", "0"]])
def test_what_cannot_be_shown_is_refused(tmp_path: Path, options: list[str]) -> None:
    answer = subprocess.run([*DEMO, *options], env=environment(tmp_path), capture_output=True, text=True, timeout=240)
    assert answer.returncode == 2 and options[0] in answer.stderr
    assert nothing_is_left(tmp_path)
