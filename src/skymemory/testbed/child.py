"""Host processes as seen by their supervisor: spawning, signals, termination, CPU demand.

Supervisor and child share a socket pair. The child sends ``ready`` once its satellites listen; the supervisor sends
``stay`` to leave the constellation running in the background. A child whose socket closes before ``stay`` stops: a
supervisor that dies while starting, or in the foreground, leaves nothing running.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from skymemory.testbed.plan import HostShare
from skymemory.testbed.run_directory import ProcessRecord, RunDirectory

READY = b"ready\n"
STAY = b"stay\n"
POLL_S = 0.01
GRACE_S = 3.0
MOST_GRACE_S = 60.0
_LOOK_S = 0.5


@dataclass(slots=True)
class Child:
    """A host process and our end of its socket pair."""

    host: HostShare
    process: subprocess.Popen[bytes]
    line: socket.socket

    def release(self) -> None:
        """Lets it run on without us."""
        self.line.sendall(STAY)
        self.line.close()

    def exit_words(self) -> str:
        """How it ended, as text."""
        try:
            code = self.process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            return "closed its socket but still runs"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def host_command(host: HostShare, plan_path: Path, directory: RunDirectory, line_fd: int) -> list[str]:
    """The ``skymemory satellite`` command of one host, with its end of the socket pair."""
    return [
        sys.executable,
        "-m",
        "skymemory.cli.main",
        "satellite",
        "--plan",
        str(plan_path),
        "--host",
        host.name,
        "--run-dir",
        str(directory.path),
        "--supervisor-fd",
        str(line_fd),
    ]


def spawn(host: HostShare, plan_path: Path, directory: RunDirectory) -> Child:
    """Starts the process of ``host`` in its own session, logging to its log file."""
    ours, theirs = socket.socketpair()
    # Otherwise BLAS starts a thread per core, with buffers, in every process.
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
    """Signals the process of ``record``, and no other process that reuses its pid."""
    try:
        handle = os.pidfd_open(record.pid) if hasattr(os, "pidfd_open") else None
    except ProcessLookupError:
        return
    try:
        if not record.alive:
            return
        # The handle was opened before the check, so the pid cannot be reused in between.
        if handle is not None:
            signal.pidfd_send_signal(handle, number)
        else:
            os.kill(record.pid, number)
    except ProcessLookupError:
        return
    finally:
        if handle is not None:
            os.close(handle)


def end_processes(records: Iterable[ProcessRecord], grace_s: float = GRACE_S) -> int:
    """Terminates these processes, and kills those that do not end. Returns how many were killed.

    The grace period restarts while a process is busy: a busy one will handle the signal, a hung one will not.
    """
    asked = [record for record in records if record.alive]
    for record in asked:
        send_signal(record, signal.SIGTERM)
        send_signal(record, signal.SIGCONT)  # a stopped process would not handle SIGTERM
    _await_end(lambda: {str(record.pid): record.pid for record in asked if record.alive}, grace_s)
    remaining = [record for record in asked if record.alive]
    for record in remaining:
        send_signal(record, signal.SIGKILL)
    _await_end(lambda: {str(record.pid): record.pid for record in remaining if record.alive}, 2.0)
    return len(remaining)


def _await_end(living: Callable[[], dict[str, int]], grace_s: float) -> None:
    """Waits until none of them (pids by name) lives. The grace period restarts while one is busy, up to
    ``MOST_GRACE_S``.
    """
    began_s = progress_s = look_s = time.monotonic()
    demand, every_s = Demand(living()), min(_LOOK_S, grace_s / 2)
    while left := living():
        now_s = time.monotonic()
        if now_s > look_s + every_s:
            look_s = now_s
            progress_s = now_s if demand.busy() & left.keys() else progress_s
        if now_s > min(progress_s + grace_s, began_s + MOST_GRACE_S):
            return
        time.sleep(POLL_S)


def end_children(children: Iterable[Child], grace_s: float = GRACE_S) -> None:
    """As ``end_processes``, for our own children; reaps them."""
    started = list(children)
    for child in started:
        child.line.close()
        if child.process.poll() is None:
            child.process.terminate()
            child.process.send_signal(signal.SIGCONT)
    _await_end(lambda: {one.host.name: one.process.pid for one in started if one.process.poll() is None}, grace_s)
    for child in started:
        if child.process.poll() is None:
            child.process.kill()
        child.process.wait()


SHARE = 0.3
"""Share of the time since the last check that a busy process ran or waited to run."""


def wanted_s(pid: int) -> float | None:
    """Seconds that a process has run or waited for a CPU since its start; None if unknown.

    From schedstat; on kernels without it only the time it ran.
    """
    try:
        ran_ns, waited_ns, _ = map(int, Path(f"/proc/{pid}/schedstat").read_text("ascii").split())
        if ran_ns:
            return (ran_ns + waited_ns) / 1e9
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def _is_runnable(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):
        return False


class Demand:
    """Detects which processes are busy: running or waiting for a CPU, so late but not hung."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        now_s = time.monotonic()
        self._seen = {name: (now_s, wanted_s(pid)) for name, pid in pids.items()}

    def busy(self) -> set[str]:
        """Processes that were busy since the last call."""
        found = set()
        now_s = time.monotonic()
        for name, pid in self._pids.items():
            since_s, before_s = self._seen[name]
            wanted = wanted_s(pid)
            self._seen[name] = now_s, wanted
            grew_s = wanted - before_s if wanted is not None and before_s is not None else 0.0
            # A wait counts only when it ends, and may have lasted since the last call.
            if grew_s >= SHARE * (now_s - since_s) > 0 or _is_runnable(pid):
                found.add(name)
        return found
