"""Which processes want the processor: one that computes, one that sleeps, one that is stopped or gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from skymemory.testbed.liveness import Demand, wanted_s


def test_who_computes_is_busy_and_who_sleeps_is_not() -> None:
    busy = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    idle = subprocess.Popen(["sleep", "60"])
    try:
        until_s = time.monotonic() + 30
        while not (wanted_s(busy.pid) or 0.0) > 0.2 and time.monotonic() < until_s:
            time.sleep(0.05)
        demand = Demand({"busy": busy.pid, "idle": idle.pid})
        time.sleep(0.5)
        assert demand.busy() == {"busy"}
        busy.send_signal(signal.SIGSTOP)
        os.waitpid(busy.pid, os.WUNTRACED)
        demand.busy()
        time.sleep(0.3)
        assert demand.busy() == set(), "who is stopped waits for no processor"
    finally:
        for process in (busy, idle):
            process.kill()
            process.wait()
    assert demand.busy() == set() and wanted_s(busy.pid) is None
