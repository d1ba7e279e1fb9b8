"""One host process as its supervisor sees it: started with a line to it, told apart from strangers, stopped
for good.

The line is a socket pair. The child says ``ready`` once its satellites listen; the supervisor says ``stay``
when it leaves the constellation running in the background. A child whose line ends before it was told to
stay stops: so a supervisor that dies in the middle of starting, or in the foreground, leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from skymemory.testbed.plan import HostShare
from skymemory.testbed.run_directory import ProcessRecord, RunDirectory

READY = b"ready\n"
STAY = b"stay\n"
POLL_S = 0.01


@dataclass(slots=True)
class Child:
    """A host process just started, and our end of the line to it."""

    host: HostShare
    process: subprocess.Popen[bytes]
    line: socket.socket

    def release(self) -> None:
        """Let it outlive us."""
        self.line.sendall(STAY)
        self.line.close()

    def exit_words(self) -> str:
        """How it ended, for people."""
        try:
            code = self.process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            return "closed its line but runs on"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def host_command(host: HostShare, plan_path: Path, directory: RunDirectory, line_fd: int) -> list[str]:
    """How to run one host: the very command that a person would type, with the line added."""
    return [
        sys.executable, "-m", "skymemory.cli.main", "satellite",
        "--plan", str(plan_path), "--host", host.name,
        "--run-dir", str(directory.path), "--supervisor-fd", str(line_fd),
    ]  # fmt: skip


def spawn(host: HostShare, plan_path: Path, directory: RunDirectory) -> Child:
    """Start the process of ``host`` in its own session, its output in its log, its line open."""
    ours, theirs = socket.socketpair()
    # A linear algebra library would otherwise start a thread per core, with its buffers, in every process.
    environment = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    try:
        with directory.open_log(host.name) as log:
            process = subprocess.Popen(
                host_command(host, plan_path, directory, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={**os.environ, **environment},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return Child(host, process, ours)


def send_signal(record: ProcessRecord, number: signal.Signals) -> None:
    """Signal exactly the process of ``record``; one that has ended, or another by its number, is left alone."""
    try:
        handle = os.pidfd_open(record.pid) if hasattr(os, "pidfd_open") else None
    except ProcessLookupError:
        return
    try:
        if not record.alive:
            return
        # With a handle opened before the check, the number cannot come to name another process in between.
        if handle is not None:
            signal.pidfd_send_signal(handle, number)
        else:
            os.kill(record.pid, number)
    except ProcessLookupError:
        return
    finally:
        if handle is not None:
            os.close(handle)


def end_processes(records: Iterable[ProcessRecord], grace_s: float = 3.0) -> int:
    """Ask these processes to end, and end those that do not within ``grace_s``. Returns how many needed
    that.
    """
    remaining = [record for record in records if record.alive]
    for record in remaining:
        send_signal(record, signal.SIGTERM)
    remaining = _await_end(remaining, grace_s)
    for record in remaining:
        send_signal(record, signal.SIGKILL)
    _await_end(remaining, 2.0)
    return len(remaining)


def _await_end(records: list[ProcessRecord], patience_s: float) -> list[ProcessRecord]:
    deadline_s = time.monotonic() + patience_s
    while (records := [record for record in records if record.alive]) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return records


def end_children(children: Iterable[Child], grace_s: float = 3.0) -> None:
    """End children that we started, and collect them."""
    started = list(children)
    for child in started:
        child.line.close()
        if child.process.poll() is None:
            child.process.terminate()
    deadline_s = time.monotonic() + grace_s
    for child in started:
        try:
            child.process.wait(timeout=max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
