"""The run directory: the plan of what runs here, a pid file and a log per host process, and one lock.

Default: ``$SKYMEMORY_RUN_DIR``, else ``$XDG_RUNTIME_DIR/skymemory``, else ``skymemory-<uid>`` among the
temporary files. A pid file holds the process id with the time the process started, so that a number which the
kernel has since given to another process is recognised as stale and that process is never touched.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from skymemory.errors import ConstellationError, InvalidInput, NoConstellation
from skymemory.files import read_bounded, write_private
from skymemory.testbed.key_file import new_keys
from skymemory.testbed.plan import ConstellationPlan
from skymemory.testbed.plan_file import load_plan, save_plan

PLAN_NAME = "constellation.json"
INDEX_NAME = "index"
OUTAGES_NAME = "outages.json"
KEYS_NAME = "keys"
LOG_TAIL_BYTES = 2048
_MAX_PID_FILE_BYTES = 4096
_POLL_S = 0.02


def default_run_directory() -> Path:
    """Where this user's constellation is, unless an option says otherwise."""
    chosen = os.environ.get("SKYMEMORY_RUN_DIR")
    if chosen:
        return Path(chosen)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "skymemory"
    return Path(tempfile.gettempdir()) / f"skymemory-{os.getuid()}"


def process_start(pid: int) -> str | None:
    """When process ``pid`` started, as an opaque word; None if there is no such process (or only its zombie).

    Clock ticks since boot with the boot's id from ``/proc``; where there is none, what ``ps`` says.
    """
    try:
        line = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _process_start_by_ps(pid)
    except (ProcessLookupError, PermissionError):
        return None
    # The command's name stands in brackets and may hold anything, so count the fields after its last bracket.
    fields = line.rpartition(")")[2].split()
    state, start_ticks = fields[0], fields[19]
    return None if state in ("Z", "X") else f"{boot}/{start_ticks}"


def _process_start_by_ps(pid: int) -> str | None:
    answer = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, start = answer.stdout.strip().partition(" ")
    return None if not start or state.startswith("Z") else start.strip()


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """What a pid file says: a process by its number and its start, which together name it for good."""

    pid: int
    start: str

    @property
    def alive(self) -> bool:
        return process_start(self.pid) == self.start


class RunDirectory:
    """One run directory; files are made when first needed, readable by this user only."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = (path or default_run_directory()).absolute()

    @property
    def plan_path(self) -> Path:
        return self.path / PLAN_NAME

    @property
    def index_path(self) -> Path:
        """Where the ground keeps its index of what it has stored in this constellation."""
        return self.path / INDEX_NAME

    @property
    def outages_path(self) -> Path:
        """Which satellites operators have disabled."""
        return self.path / OUTAGES_NAME

    @property
    def keys_path(self) -> Path:
        """The keys of a constellation that was started here and not given any."""
        return self.path / KEYS_NAME

    def log_path(self, host: str) -> Path:
        return self.path / f"{host}.log"

    def pid_path(self, host: str) -> Path:
        return self.path / f"{host}.pid"

    def create(self) -> None:
        """Make the directory; one of another user, or that others may write in, is refused, for it decides what we
        would kill.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.path.stat()
        except OSError as error:
            raise InvalidInput(f"cannot use {self.path} as run directory: {error.strerror}") from error
        if status.st_uid != os.getuid():
            raise InvalidInput(f"{self.path} belongs to user {status.st_uid}: choose another with --run-dir")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise InvalidInput(
                f"others may write in {self.path}, and what is there says which processes we stop: "
                f"`chmod 700 {self.path}`, or choose another with --run-dir"
            )

    def open_log(self, host: str) -> BinaryIO:
        """A host's log, to be written on."""
        how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(self.log_path(host), how, 0o600), "ab")

    @contextmanager
    def locked(self, patience_s: float = 0.0) -> Iterator[None]:
        """Hold the directory while starting or stopping; a second starter is told so instead of waiting for longer
        than ``patience_s``.
        """
        handle = self._lock(time.monotonic() + patience_s)
        try:
            yield
        finally:
            # What we alone made, we remove: an empty directory would look like a constellation that was.
            if [path.name for path in self.path.glob("*")] == ["lock"]:
                (self.path / "lock").unlink()
                with suppress(OSError):
                    self.path.rmdir()
            os.close(handle)

    def _lock(self, deadline_s: float) -> int:
        path = self.path / "lock"
        while True:
            self.create()
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(handle)
                if time.monotonic() < deadline_s:
                    time.sleep(_POLL_S)
                    continue
                raise ConstellationError(
                    f"another skymemory is starting or stopping the constellation of {self.path}: "
                    "wait for it, or choose another --run-dir"
                ) from error
            # Whoever held it before may have removed the file that we opened: then ours locks nothing.
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                return handle
            os.close(handle)

    def write_plan(self, plan: ConstellationPlan) -> None:
        """Note what runs here, with new keys if it asks for them and was not given any."""
        if plan.keys_file == str(self.keys_path) and not self.keys_path.exists():
            new_keys(self.keys_path)
        save_plan(plan, self.plan_path)

    def read_plan(self) -> ConstellationPlan:
        """The plan of the constellation here. Raises ``NoConstellation`` when there is none."""
        if not self.plan_path.exists():
            raise NoConstellation(f"no constellation in {self.path}: start one with `skymemory constellation up`")
        try:
            return load_plan(self.plan_path)
        except InvalidInput as error:
            raise InvalidInput(f"{error}; `skymemory constellation down` stops and removes what is there") from error

    def running_plan(self) -> ConstellationPlan:
        """The plan of a constellation that can be asked: not one whose processes here have all died."""
        plan = self.read_plan()
        if self.recorded_hosts() and not self.living():
            raise NoConstellation(
                f"the constellation in {self.path} has died: see `skymemory constellation status`, "
                "start another with `skymemory constellation up`"
            )
        return plan

    def write_record(self, host: str, pid: int) -> None:
        """Note that process ``pid`` serves ``host``."""
        start = process_start(pid)
        if start is None:
            raise ConstellationError(f"process {pid} of {host} is gone already")
        write_private(self.pid_path(host), json.dumps({"pid": pid, "start": start}) + "\n")

    def read_record(self, host: str) -> ProcessRecord | None:
        """The process noted for ``host``, alive or not; None where none is noted. Where the file is damaged, the
        process that runs as this host, if there is one.
        """
        try:
            found = json.loads(read_bounded(self.pid_path(host), _MAX_PID_FILE_BYTES))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            found = None
        match found:
            case {"pid": int(pid), "start": str(start)} if pid > 1:
                return ProcessRecord(pid, start)
        return self.running().get(host)

    def running(self) -> dict[str, ProcessRecord]:
        """The host processes that were started for this directory and run, by host, whatever its files say: by their
        command lines. Empty where there is no ``/proc``.
        """
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                ours = folder.stat().st_uid == os.getuid()
            except OSError:
                continue
            options = dict(itertools.pairwise(words))
            pid, host = int(folder.name), os.fsdecode(options.get(b"--host", b""))
            if ours and b"satellite" in words and options.get(b"--run-dir") == os.fsencode(self.path):
                start = process_start(pid)
                if host and start is not None:
                    found[host] = ProcessRecord(pid, start)
        return found

    def recorded_hosts(self) -> list[str]:
        """Names of the hosts with a pid file, sorted."""
        return sorted(path.stem for path in self.path.glob("*.pid")) if self.path.is_dir() else []

    def living(self) -> dict[str, ProcessRecord]:
        """The host processes of this directory that run now, by host."""
        records = {host: self.read_record(host) for host in self.recorded_hosts()}
        return {host: record for host, record in records.items() if record is not None and record.alive}

    def forget(self, host: str) -> None:
        self.pid_path(host).unlink(missing_ok=True)

    def log_tail(self, host: str, lines: int = 8) -> str:
        """The last lines of a host's log, for error messages; empty if it wrote none."""
        try:
            with self.log_path(host).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                text = log.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.strip().splitlines()[-lines:])

    def sweep(self) -> None:
        """Remove what a constellation leaves: plan, pid files, index and logs. Call it with the lock held."""
        patterns = (
            "*.pid", "*.log", ".*.pid.*", PLAN_NAME, f".{PLAN_NAME}.*", INDEX_NAME, f"{INDEX_NAME}.new", OUTAGES_NAME,
            f".{OUTAGES_NAME}.*", KEYS_NAME, f".{KEYS_NAME}.*",
        )  # fmt: skip
        for pattern in patterns:
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)
