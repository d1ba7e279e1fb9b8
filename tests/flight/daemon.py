"""The satellite in C, built for tests: its library and its daemon."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED_BY = "needs a C compiler and make"


@contextmanager
def build_lock() -> Iterator[None]:
    """Only one process compiles in ``build`` at a time: the processes of one test run share its object files."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(sanitized: bool = False) -> Path:
    """The folder with library and daemon, brought up to date. Skips where there is no compiler."""
    if shutil.which(os.environ.get("CC", "cc")) is None or shutil.which("make") is None:
        pytest.skip(NEEDED_BY)
    folder = ROOT / "build" / ("flight-sanitized" if sanitized else "flight")
    with build_lock():
        command = ["make", "-s", "-j2", "-C", str(ROOT / "flight"), *(["SANITIZE=1"] if sanitized else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder
