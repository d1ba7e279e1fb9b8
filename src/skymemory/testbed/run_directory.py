"""Run directory of a constellation: plan, lock, a pid file (with start time) and a log per host process; free UDP
ports.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Literal

from skymemory.errors import ConstellationError, InvalidInput, NoConstellation
from skymemory.files import read_bounded, write_private
from skymemory.testbed.key_file import new_keys
from skymemory.testbed.plan import DEFAULT_BASE_PORT, MAX_PORT, ConstellationPlan, HostShare, Ports
from skymemory.testbed.plan_file import CLOCK_NAME, load_plan, save_plan, write_clock
from skymemory.transport.udp_socket import udp_socket
from skymemory.transport.unix_clock import running_s, wall_s

PLAN_NAME = "constellation.json"
INDEX_NAME = "index"
OUTAGES_NAME = "outages.json"
KINDS_NAME = "satellites.json"
KEYS_NAME = "keys"
LOG_TAIL_BYTES = 2048
Kind = Literal["python", "c"]
_MAX_PID_FILE_BYTES = 4096
_MAX_KINDS_BYTES = 1 << 20
_POLL_S = 0.02


def default_run_directory() -> Path:
    chosen = os.environ.get("SKYMEMORY_RUN_DIR")
    if chosen:
        return Path(chosen)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "skymemory"
    return Path(tempfile.gettempdir()) / f"skymemory-{os.getuid()}"


def process_start(pid: int) -> str | None:
    """Return a living process's start time as an opaque string."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _process_start_by_ps(pid)
    except (ProcessLookupError, PermissionError):
        return None
    # The command's name is in brackets and may contain anything: count fields after the last bracket.
    fields = line.rpartition(")")[2].split()
    state, start_ticks = fields[0], fields[19]
    return None if state in ("Z", "X") else f"{boot}/{start_ticks}"


_PS_S = 10.0


def _process_start_by_ps(pid: int) -> str | None:
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PS_S)
    except subprocess.TimeoutExpired:
        raise ConstellationError(f"`{' '.join(command)}` has not answered for {_PS_S:g} s: try again") from None
    state, _, start = answer.stdout.strip().partition(" ")
    return None if not start or state.startswith("Z") else start.strip()


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """Host process as recorded in its pid file; its start time distinguishes it from a later process with its pid."""

    pid: int
    start: str
    kind: Kind = "python"

    @property
    def alive(self) -> bool:
        return process_start(self.pid) == self.start

    def send_signal(self, number: signal.Signals) -> None:
        """Signal this process only, even if its pid was reused."""
        try:
            handle = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None
        except ProcessLookupError:
            return
        try:
            if not self.alive:
                return
            # The handle was opened before the check, so the pid cannot be reused in between.
            if handle is not None:
                signal.pidfd_send_signal(handle, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            return
        finally:
            if handle is not None:
                os.close(handle)


class RunDirectory:
    def __init__(self, path: Path | None = None) -> None:
        self.path = (path or default_run_directory()).absolute()
        self._locked_by: int | None = None

    @property
    def plan_path(self) -> Path:
        return self.path / PLAN_NAME

    @property
    def index_path(self) -> Path:
        return self.path / INDEX_NAME

    @property
    def outages_path(self) -> Path:
        return self.path / OUTAGES_NAME

    def write_kinds(self, kinds: Mapping[str, Kind]) -> None:
        write_private(self.path / KINDS_NAME, json.dumps(dict(kinds)) + "\n")

    def kind_of(self, host: str) -> Kind:
        try:
            kinds = json.loads(read_bounded(self.path / KINDS_NAME, _MAX_KINDS_BYTES))
        except FileNotFoundError:
            return "python"
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{self.path / KINDS_NAME}: not JSON: {error}") from error
        return "c" if isinstance(kinds, dict) and kinds.get(host) == "c" else "python"

    @property
    def keys_path(self) -> Path:
        return self.path / KEYS_NAME

    def log_path(self, host: str) -> Path:
        return self.path / f"{host}.log"

    def pid_path(self, host: str) -> Path:
        return self.path / f"{host}.pid"

    def create(self) -> None:
        """Create the directory; refuse another user's, or a directory writable by others: its files say which processes
        to kill.
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
                f"{self.path} is writable by others, and its files say which processes to stop: "
                f"run `chmod 700 {self.path}`, or choose another with --run-dir"
            )

    def open_log(self, host: str) -> BinaryIO:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(self.log_path(host), flags, 0o600), "ab")

    @contextmanager
    def locked(self, patience_s: float = 0.0) -> Iterator[None]:
        """Lock the directory; reentrant per thread and object.

        Raises:
            ConstellationError: locked for ``patience_s``.
        """
        if self._locked_by == threading.get_ident():
            yield
            return
        handle = self._lock(time.monotonic() + patience_s)
        self._locked_by = threading.get_ident()
        try:
            yield
        finally:
            self._locked_by = None
            # Remove a directory that contains only our lock.
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
                    f"another skymemory command is starting or stopping the constellation of {self.path}: "
                    "wait for it, or choose another --run-dir"
                ) from error
            # The previous holder may have removed the file that we opened: then it locks nothing.
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                return handle
            os.close(handle)

    def write_plan(self, plan: ConstellationPlan) -> None:
        if plan.keys_file == str(self.keys_path) and not self.keys_path.exists():
            new_keys(self.keys_path)
        save_plan(plan, self.plan_path)
        write_clock(self.path / CLOCK_NAME, wall_s() - running_s())

    def read_plan(self) -> ConstellationPlan:
        if not self.plan_path.exists():
            raise NoConstellation(f"no constellation in {self.path}: start one with `skymemory constellation up`")
        try:
            return load_plan(self.plan_path)
        except InvalidInput as error:
            raise InvalidInput(f"{error}; `skymemory constellation down` stops and removes what is there") from error

    def running_plan(self) -> ConstellationPlan:
        """Return a running constellation's plan; raise ``NoConstellation`` if all its processes here are dead."""
        plan = self.read_plan()
        if self.recorded_hosts() and not self.living():
            raise NoConstellation(
                f"all host processes of the constellation in {self.path} have died: see "
                "`skymemory constellation status`, start it again with `skymemory constellation up`"
            )
        return plan

    def write_record(self, host: str, pid: int, kind: Kind = "python") -> None:
        start = process_start(pid)
        if start is None:
            raise ConstellationError(f"process {pid} of {host} has already ended")
        write_private(self.pid_path(host), json.dumps({"pid": pid, "start": start, "kind": kind}) + "\n")

    def read_record(self, host: str) -> ProcessRecord | None:
        """Return the recorded process, alive or not; if the file is damaged, the running process."""
        try:
            record = json.loads(read_bounded(self.pid_path(host), _MAX_PID_FILE_BYTES))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            record = None
        match record:
            case {"pid": int(pid), "start": str(start)} if pid > 1:
                return ProcessRecord(pid, start, "c" if record.get("kind") == "c" else "python")
        return self.running().get(host)

    def running(self) -> dict[str, ProcessRecord]:
        """Return running host processes by command line."""
        # Pid files may be lost or damaged (a full disk, a user): the command line names host and directory.
        records = {}
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
                    records[host] = ProcessRecord(pid, start)
        return records

    def recorded_hosts(self) -> list[str]:
        return sorted(path.stem for path in self.path.glob("*.pid")) if self.path.is_dir() else []

    def living(self) -> dict[str, ProcessRecord]:
        records = {host: self.read_record(host) for host in self.recorded_hosts()}
        return {host: record for host, record in records.items() if record is not None and record.alive}

    def forget(self, host: str) -> None:
        self.pid_path(host).unlink(missing_ok=True)

    def log_tail(self, host: str, lines: int = 8) -> str:
        try:
            with self.log_path(host).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                text = log.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.strip().splitlines()[-lines:])

    def sweep(self) -> None:
        """Remove plan, pid files, index and logs. Requires the lock."""
        patterns = (
            "*.pid",
            "*.log",
            ".*.pid.*",
            PLAN_NAME,
            f".{PLAN_NAME}.*",
            INDEX_NAME,
            f"{INDEX_NAME}.new",
            OUTAGES_NAME,
            f".{OUTAGES_NAME}.*",
            KINDS_NAME,
            f".{KINDS_NAME}.*",
            KEYS_NAME,
            f".{KEYS_NAME}.*",
            CLOCK_NAME,
            f".{CLOCK_NAME}.*",
        )
        for pattern in patterns:
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)


# UDP ports are checked before processes are started, so that errors can name the port.


class PortTaken(ConstellationError): ...


_LAST_BASE_PORT = 32_768


def _bind_error(address: tuple[str, int]) -> int:
    try:
        with udp_socket(address[0]) as probe:
            probe.bind(address)
    except OSError as error:
        return error.errno or errno.EINVAL
    return 0


def check_ports(plan: ConstellationPlan) -> None:
    for host in plan.hosts:
        check_host_ports(plan, host)


def check_host_ports(plan: ConstellationPlan, host: HostShare, listen: str | None = None) -> None:
    for satellite, (planned_ip, port) in plan.addresses_of(host):
        ip = listen or planned_ip
        number = _bind_error((ip, port))
        if number == 0:
            continue
        where = f"UDP port {port} on {ip} ({host.name}, plane {satellite.plane}, slot {satellite.slot})"
        if number == errno.EADDRINUSE:
            raise PortTaken(
                f"{where} is taken by another process: stop it, or choose other ports "
                "with --base-port PORT or --base-port auto"
            )
        if number in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise ConstellationError(
                f"{ip} of {host.name} is not an address of this computer: run that host's share "
                "there with `skymemory satellite`"
            )
        raise ConstellationError(f"{where} cannot be used: {errno.errorcode.get(number, number)}")


def free_ports(count: int, ip: str = "127.0.0.1", attempt: int = 0) -> Ports:
    """Return free UDP ports: consecutive below the ephemeral range, else any. Parallel searches start at different
    ports.
    """
    starts = range(DEFAULT_BASE_PORT, _LAST_BASE_PORT - count, max(count, 50))
    first = (os.getpid() + attempt) % max(1, len(starts))
    for base_port in (*starts[first:], *starts[:first]):
        if all(_bind_error((ip, port)) == 0 for port in range(base_port, base_port + count)):
            return Ports(base_port)
    # No gap is wide enough. Try low ports first: clients may take ephemeral ports while we start.
    for candidates in (
        range(DEFAULT_BASE_PORT, _LAST_BASE_PORT),
        range(1024, _LAST_BASE_PORT),
        range(1024, MAX_PORT + 1),
    ):
        free = [port for port in candidates if _bind_error((ip, port)) == 0][:count]
        if len(free) == count:
            gaps = ((low + 1, high - 1) for low, high in pairwise(free) if high > low + 1)
            return Ports(free[0], tuple(gaps))
    raise ConstellationError(
        f"{len(free)} free UDP ports on {ip}, expected {count}: stop programs that use them, or start fewer satellites"
    )


PREFIX = "skymemory-demo-"
_HELD = "held"
_YOUNG_S = 60.0


@contextmanager
def temporary_run_directory(kind: str = "") -> Iterator[Path]:
    """Yield a temporary run directory; first remove those of killed demos."""
    remove_left_behind(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}"))
    handle = os.open(folder / _HELD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # No other process has it: the lock is released when this process ends.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def remove_left_behind(parent: Path, now_s: float | None = None) -> list[Path]:
    now_s = time.time() if now_s is None else now_s
    removed = []
    for folder in sorted(parent.glob(f"{PREFIX}*")):
        with suppress(OSError):
            if _is_left_behind(folder, now_s):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def _is_left_behind(folder: Path, now_s: float) -> bool:
    """Return True if a demo's folder is left of a killed process."""
    status = folder.lstat()
    # Three signs, the cheapest first: it is ours and not new, no satellite runs there, and its lock is free. The
    # system releases the lock when the demo ends in any way.
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_ours or now_s - status.st_mtime < _YOUNG_S or RunDirectory(folder).living():
        return False
    handle = os.open(folder / _HELD, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
