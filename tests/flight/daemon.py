"""The daemon of satellites in C, built for tests."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED_BY = "needs a C compiler and make"


def build(sanitized: bool = False) -> Path:
    """The folder with library and daemon, brought up to date. Skips where there is no compiler."""
    if shutil.which(os.environ.get("CC", "cc")) is None or shutil.which("make") is None:
        pytest.skip(NEEDED_BY)
    folder = ROOT / "build" / ("flight-sanitized" if sanitized else "flight")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:  # the tests of several processes want it at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = ["make", "-s", "-j2", "-C", str(ROOT / "flight"), *(["SANITIZE=1"] if sanitized else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder
