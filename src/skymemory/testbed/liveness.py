"""Progress of starting processes (by Linux' ``/proc``, else log and time), and a guard that ends them with this
process.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from skymemory.errors import SkyMemoryError

SHARE = 0.3
"""Share of the time that a busy process ran or waited to run."""
IDLE_S, MOST_S = 60.0, 1800.0
_LOOK_S = 0.5
_READ_BYTES_PER_S = 1 << 20
_GUARD = 'read -r _; kill -s TERM -- "-$0"; sleep 10; kill -s KILL -- "-$0"'
"""Shell that ends a process group when its own input ends."""


def wanted_s(pid: int) -> float | None:
    """Return the seconds that a process has run or, with schedstat, waited for a CPU."""
    try:
        ran_ns, waited_ns, _ = map(int, Path(f"/proc/{pid}/schedstat").read_text("ascii").split())
        if ran_ns:
            return (ran_ns + waited_ns) / 1e9
        return _used_s(_stat(pid))
    except (OSError, ValueError, IndexError):
        return None


def _stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, group, session, …"""
    return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()


def _used_s(stat: list[str]) -> float:
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def is_runnable(pid: int) -> bool:
    try:
        return _stat(pid)[0] == "R"
    except (OSError, IndexError):
        return False


class Demand:
    """Detector of processes that run or wait for a CPU: late but not hung."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        now_s = time.monotonic()
        self._seen = {name: (now_s, wanted_s(pid)) for name, pid in pids.items()}

    def busy(self) -> set[str]:
        """Return the names of processes that were busy since the last call."""
        busy_names = set()
        now_s = time.monotonic()
        for name, pid in self._pids.items():
            since_s, before_s = self._seen[name]
            wanted = wanted_s(pid)
            self._seen[name] = now_s, wanted
            grew_s = wanted - before_s if wanted is not None and before_s is not None else 0.0
            # A wait counts only when it ends, and may have lasted since the last call.
            if grew_s >= SHARE * (now_s - since_s) > 0 or is_runnable(pid):
                busy_names.add(name)
        return busy_names


@dataclass(frozen=True, slots=True)
class Activity:
    processor_s: float
    read_bytes: int
    log: str
    runnable: bool


def activity(pid: int, log: str) -> Activity:
    """Sum the activity of the session that ``pid`` leads, else of ``pid``."""
    processor_s, read_bytes, runnable = 0.0, 0, False
    for number in _session(pid):
        try:
            stat = _stat(number)
            # Its own time, plus that of reaped children, which have left the session.
            processor_s += max(wanted_s(number) or 0.0, _used_s(stat)) + (int(stat[13]) + int(stat[14])) / os.sysconf(
                "SC_CLK_TCK"
            )
            runnable |= stat[0] == "R"
            io = dict(line.split(": ") for line in Path(f"/proc/{number}/io").read_text("ascii").splitlines())
            read_bytes += int(io["rchar"]) + int(io["read_bytes"])
        except (OSError, ValueError, IndexError, KeyError):
            continue
    return Activity(processor_s, read_bytes, log, runnable)


def _session(pid: int) -> list[int]:
    try:
        numbers = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    except OSError:
        return [pid]
    members = []
    for number in numbers:
        try:
            if number == pid or int(_stat(number)[3]) == pid:
                members.append(number)
        except (OSError, ValueError, IndexError):
            continue
    return members


class StartWait:
    """Wait for a process to be ready: over ``idle_s`` after its last progress, or ``most_s`` after its start.

    The process should lead a session, so that its children count.
    """

    def __init__(
        self,
        what: str,
        pid: int,
        log: Callable[[], str] = str,
        *,
        idle_s: float = IDLE_S,
        most_s: float = MOST_S,
    ) -> None:
        self._what = what
        self._pid = pid
        self._log = log
        self._idle_s = idle_s
        self._most_s = most_s
        self._began_s = self._progress_s = self._look_s = time.monotonic()
        self._seen = activity(pid, log())
        self._did = "nothing"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def last_line(self) -> str:
        lines = self._log().strip().splitlines()
        return lines[-1].strip() if lines else ""

    def is_over(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._look_s >= _LOOK_S:
            self._check_progress(now_s)
        return now_s - self._progress_s >= self._idle_s or now_s - self._began_s >= self._most_s

    def check(self) -> None:
        if self.is_over():
            raise self.error()

    def error(self) -> SkyMemoryError:
        now_s = time.monotonic()
        idle_s = now_s - self._progress_s
        limit = (
            f"no progress for {idle_s:.0f} s (limit {self._idle_s:g} s)"
            if idle_s >= self._idle_s
            else f"not ready after {now_s - self._began_s:.0f} s (limit {self._most_s:g} s), though it made progress"
        )
        return SkyMemoryError(
            f"{self._what} did not start: {limit}; last seen: {self._did} {idle_s:.0f} s ago; {self._printed()}; "
            "look for what it waits for, such as a lock, a network or memory, or end what keeps this computer busy"
        )

    def on_exit(self, code: int) -> SkyMemoryError:
        words = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return SkyMemoryError(
            f"{self._what} did not start: it ended after {self.seconds:.0f} s, {words}; {self._printed()}"
        )

    def _printed(self) -> str:
        return f"it printed last: {self.last_line}" if self.last_line else "it printed nothing"

    def _check_progress(self, now_s: float) -> None:
        elapsed_s, before = now_s - self._look_s, self._seen
        self._look_s, self._seen = now_s, activity(self._pid, self._log())
        current = self._seen
        did = ""
        if current.log != before.log:
            did = "it printed"
        elif current.processor_s - before.processor_s >= SHARE * elapsed_s:
            did = "it used a processor"
        elif current.read_bytes - before.read_bytes >= _READ_BYTES_PER_S * elapsed_s:
            did = "it read files"
        elif current.runnable:  # a wait for a processor counts only when it ends
            did = "it waited for a processor"
        if did:
            self._progress_s, self._did = now_s, did


def guard(pid: int) -> subprocess.Popen[bytes]:
    """End the process group ``pid`` when this process ends in any way."""
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
