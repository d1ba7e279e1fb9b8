"""No engine outlives its test: not where the test ends, and not where it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from tests.vllm.server import ROOT

PARENT = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("end", ["its line ends", "its parent is killed"])
def test_the_whole_group_goes(end: str) -> None:
    command = [sys.executable, "-m", "tests.vllm.keeper", sys.executable, "-c", PARENT]
    if end == "its parent is killed":
        # A process in between holds the other end of the line, and is killed.
        words = f"import subprocess, time; subprocess.Popen({command!r}, stdin=subprocess.PIPE); time.sleep(60)"
        command = [sys.executable, "-c", words]
    outer = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert outer.stdout is not None and outer.stdin is not None
    grandchild = int(outer.stdout.readline())
    assert alive(grandchild)
    if end == "its line ends":
        outer.stdin.close()
    else:
        os.kill(outer.pid, signal.SIGKILL)
    end_s = time.monotonic() + 10
    while alive(grandchild):
        assert time.monotonic() < end_s, "it outlived its keeper"
        time.sleep(0.02)
    outer.wait(10)
    outer.stdout.close()
    outer.stdin.close()
