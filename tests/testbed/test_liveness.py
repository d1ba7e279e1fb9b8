"""The wait for a child to be ready, with real children: what is alive is waited for, and what is not is not."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skymemory.errors import SkyMemoryError
from skymemory.testbed import liveness
from skymemory.testbed.liveness import StartWait

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="without /proc only the log counts")

BURNS = "while True: pass"
BURNS_IN_A_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'while True: pass'])"
SLEEPS = "import time\nwhile True: time.sleep(1)"
LOGS = "import time\nwhile True: print('a line', flush=True); time.sleep(0.3)"
IDLE_S = 1.5


@contextmanager
def _child(code: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    with tempfile.NamedTemporaryFile() as log:
        child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=log, stderr=log, start_new_session=True)
        try:
            yield child, Path(log.name)
        finally:
            for number in liveness._session(child.pid):
                subprocess.run(["kill", "-KILL", str(number)], check=False, capture_output=True)
            child.wait()


def _wait(child: subprocess.Popen[bytes], log: Path, most_s: float) -> StartWait:
    return StartWait("the child", child.pid, log.read_text, idle_s=IDLE_S, most_s=most_s)


def _error_of(wait: StartWait) -> tuple[str, float]:
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        try:
            wait.check()
        except SkyMemoryError as error:
            return str(error), wait.seconds
        time.sleep(0.1)
    raise AssertionError("the wait has no end")


@pytest.mark.brief("burns-in-a-child")
@pytest.mark.parametrize("code", [BURNS, BURNS_IN_A_CHILD, LOGS], ids=["burns", "burns-in-a-child", "logs"])
def test_a_child_that_makes_progress_is_waited_for_up_to_the_last_limit(code: str) -> None:
    with _child(code) as (child, log):
        words, seconds = _error_of(_wait(child, log, most_s=3 * IDLE_S))
    assert seconds >= 3 * IDLE_S
    assert f"limit {3 * IDLE_S:g} s" in words and "made progress" in words


def test_a_child_that_sleeps_is_given_up_at_the_limit_which_the_error_names() -> None:
    with _child(SLEEPS) as (child, log):
        words, _ = _error_of(_wait(child, log, most_s=3600.0))
    assert f"no progress for {IDLE_S:.0f} s (limit {IDLE_S:g} s)" in words
    assert "it printed nothing" in words and "end what keeps this computer busy" in words


def test_the_error_of_a_child_that_stopped_logging_has_its_last_line() -> None:
    with _child("print('loads', flush=True)\n" + SLEEPS) as (child, log):
        words, _ = _error_of(_wait(child, log, most_s=3600.0))
    assert "it printed last: loads" in words


def test_the_error_of_a_dead_child_has_its_code_and_last_line() -> None:
    with _child("import sys; print('no such model', flush=True); sys.exit(3)") as (child, log):
        child.wait(60)
        words = str(_wait(child, log, most_s=9.0).on_exit(child.returncode))
    assert "the child did not start: it ended after" in words
    assert "exit code 3" in words and "it printed last: no such model" in words


@pytest.mark.slow
@pytest.mark.seeded
def test_without_proc_only_the_log_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> list[str]:
        raise FileNotFoundError

    monkeypatch.setattr(liveness.os, "listdir", refuse)
    monkeypatch.setattr(liveness, "_stat", refuse)
    monkeypatch.setattr(liveness, "wanted_s", lambda pid: None)
    with _child(BURNS) as (child, log):
        words, _ = _error_of(_wait(child, log, most_s=3600.0))
        assert "no progress" in words
    with _child(LOGS) as (child, log):
        words, seconds = _error_of(_wait(child, log, most_s=3 * IDLE_S))
        assert seconds >= 3 * IDLE_S
