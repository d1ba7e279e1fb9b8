"""The cake demo as a user runs it: its report, its bars on a terminal, and Ctrl-C in the middle."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("transformers", reason="the demo needs skymemory[hf]")
pytestmark = pytest.mark.engine

DEMO = [sys.executable, "-m", "skymemory", "demo", "cake", "--quick", "--tokens", "640"]


def environment() -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    return {**plain, "TERM": "xterm", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("share", ["1.0", "0.5"])
def test_three_ways_to_the_same_token(share: str) -> None:
    answer = subprocess.run(
        [*DEMO, "--share", share, "--json"], env=environment(), capture_output=True, text=True, timeout=280
    )
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report["sound"] is True and report["tokens"] == 640 and report["share"] == float(share)
    for row in report["rows"]:
        compute, load, both = row["compute"], row["load"], row["both"]
        assert compute["computed_tokens"] == load["loaded_tokens"] == 640
        assert both["computed_tokens"] + both["loaded_tokens"] == 640
        assert compute["first_token"] == load["first_token"] == both["first_token"]
    assert [row["ratio"] for row in report["rows"]] == sorted(row["ratio"] for row in report["rows"])
    assert 1.0 in [row["ratio"] for row in report["rows"]]
    printed = answer.stderr
    assert printed.index("compute █") < printed.index("load    ▒") < printed.index("both    ") and "\x1b" not in printed


@pytest.mark.slow
def test_on_a_terminal_bars_fill_in_place_and_ctrl_c_leaves_it_as_it_was() -> None:
    ours, theirs = pty.openpty()
    shape = {"COLUMNS": "100", "LINES": "40"}
    demo = subprocess.Popen(
        DEMO, env=environment() | shape, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    seen = b""
    deadline_s = time.monotonic() + 100
    while b"both" not in seen and time.monotonic() < deadline_s:
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
    assert "\x1b[38;5;215m█" in shown and "Traceback" not in shown


@pytest.mark.parametrize("options", [["--share", "0"], ["--share", "1.5"], ["--tokens", "10"], ["--tokens", "99999"]])
def test_what_cannot_be_shown_is_refused(options: list[str]) -> None:
    answer = subprocess.run([*DEMO[:5], *options], env=environment(), capture_output=True, text=True, timeout=240)
    assert answer.returncode == 2 and options[0] in answer.stderr
