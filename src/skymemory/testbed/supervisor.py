"""Supervisor of this computer's host processes: starts, watches and stops them.

Over a socket pair the child sends ``ready`` once its satellites listen; ``stay`` leaves it in the background. If its
socket closes before ``stay`` it stops, so a dead supervisor leaves nothing running.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from skymemory.errors import ConstellationError
from skymemory.store.sky.shared_index import create_journal
from skymemory.testbed.liveness import Demand
from skymemory.testbed.plan import ConstellationPlan, HostShare, Ports
from skymemory.testbed.run_directory import (
    Kind,
    PortTaken,
    ProcessRecord,
    RunDirectory,
    check_host_ports,
    check_ports,
    free_ports,
)

READY = b"ready\n"
STAY = b"stay\n"
_END_POLL_S = 0.01
GRACE_S = 3.0
MOST_GRACE_S = 60.0
_END_LOOK_S = 0.5
START_PATIENCE_S = 30.0
MOST_START_S = 600.0
POLL_S = 0.05
_LOOK_S = 1.0
FREE_PORT_ATTEMPTS = 5


Confirm = Callable[[ConstellationPlan, Callable[[], Collection[str]]], None]
"""Check of a started constellation; the function returns the busy hosts."""


class AlreadyRunning(ConstellationError): ...


@dataclass(frozen=True, slots=True)
class HostState:
    """State of a host process: ``running``, ``dead``, or ``elsewhere`` (not started here)."""

    name: str
    state: str
    pid: int | None
    memory_bytes: int | None
    log_tail: str
    kind: Kind | None = None


@dataclass(slots=True)
class Started:
    plan: ConstellationPlan
    seconds: float
    children: list[Child]


def resident_bytes(pid: int) -> int | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    resident_kib = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(resident_kib[0]) * 1024 if resident_kib else None


def _refuse_if_running(directory: RunDirectory) -> None:
    living = directory.living()
    if not living:
        return
    known = directory.read_plan() if directory.plan_path.exists() else None
    preset = known.preset if known else "unknown preset"
    total = len(known.hosts) if known else len(living)
    pids = ", ".join(f"{host} (pid {record.pid})" for host, record in living.items())
    raise AlreadyRunning(
        f"already running: {preset}, {len(living)} of {total} hosts alive in {directory.path}: {pids}; "
        "see `skymemory constellation status`, stop it with `skymemory constellation down`"
    )


def _failed(child: Child, plan: ConstellationPlan, directory: RunDirectory) -> ConstellationError:
    words = child.exit_words()
    try:
        check_host_ports(plan, child.host)
    except PortTaken as port_error:
        return port_error
    tail = directory.log_tail(child.host.name)
    log = f"; its log ends with:\n{tail}" if tail else "; its log is empty"
    return ConstellationError(f"{child.host.name} did not start ({words}); all that were started were stopped{log}")


def _await_ready(children: list[Child], plan: ConstellationPlan, directory: RunDirectory, gate: SignalGate) -> None:
    """Wait until all children listen; raise ``ConstellationError`` if a child ends, or is idle too long."""
    started_s = progress_s = look_s = time.monotonic()
    demand = Demand({child.host.name: child.process.pid for child in children})
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.line, selectors.EVENT_READ, child)
        while waiting := selector.get_map():
            gate.check()
            for key, _ in selector.select(POLL_S):
                child = key.data
                selector.unregister(child.line)
                if child.line.recv(len(READY)) != READY:
                    raise _failed(child, plan, directory)
                progress_s = time.monotonic()
            now_s = time.monotonic()
            late = [key.data.host.name for key in waiting.values()]
            if now_s > look_s + _LOOK_S:
                look_s = now_s
                progress_s = now_s if demand.busy().intersection(late) else progress_s
            if late and now_s > min(progress_s + START_PATIENCE_S, started_s + MOST_START_S):
                raise ConstellationError(
                    f"{', '.join(late)} not ready after {now_s - started_s:.0f} s: all that were started were stopped"
                )


def start(
    directory: RunDirectory,
    plan: ConstellationPlan,
    *,
    foreground: bool = False,
    confirm: Confirm | None = None,
    gate: SignalGate | None = None,
    kinds: Mapping[str, Kind] | None = None,
) -> Started:
    """Start every host of ``plan`` here, or none; return when all listen and ``confirm`` accepts.

    With ``foreground`` the children end with this process. A ``gate`` entered by the caller also covers the time until
    ``watch``.

    Raises:
        AlreadyRunning: a constellation runs in this directory.
        ConstellationError: a host does not start.
    """
    # All or nothing: an exception before ``pop_all`` ends the children first, then removes the files, in the reverse
    # order of ``undo``. The gate defers signals until ``check``, so that none arrives between a spawn and its record.
    started_s = time.monotonic()
    with directory.locked(), gate or SignalGate() as gate:
        _refuse_if_running(directory)
        check_ports(plan)
        children: list[Child] = []
        with ExitStack() as undo:
            undo.callback(directory.sweep)
            undo.callback(end_children, children)
            directory.sweep()
            directory.write_plan(plan)
            if kinds:
                directory.write_kinds(kinds)
            create_journal(directory.index_path)
            for host in plan.hosts:
                gate.check()
                children.append(spawn(host, directory.plan_path, directory))
            _await_ready(children, plan, directory, gate)
            if confirm is not None:
                confirm(plan, Demand({child.host.name: child.process.pid for child in children}).busy)
            gate.check()
            if not foreground:
                for child in children:
                    child.release()
            undo.pop_all()
    return Started(plan, time.monotonic() - started_s, children if foreground else [])


def revive(
    directory: RunDirectory,
    gate: SignalGate | None = None,
    attached_children: list[Child] | None = None,  # gets the children, which end with this process; None: they stay
    wrong: Collection[str] = (),  # names of running hosts to restart: for example, their clocks are wrong
) -> list[str]:
    """Restart this computer's dead and ``wrong`` hosts, all or none; return their names when all listen. They start
    empty, and learn moves from neighbours.
    """
    # ``wrong`` hosts are ended first. If a host then does not start, these and all started hosts are left ended.
    with directory.locked(), gate or SignalGate() as gate:
        plan = directory.read_plan()
        states = inspect(directory)
        wrong_hosts = [state.name for state in states if state.state == "running" and state.name in wrong]
        paths = [directory.pid_path(state.name) for state in states]
        records = {path: path.read_bytes() for path in paths if path.exists()}
        living = directory.living()
        end_processes([living[name] for name in wrong_hosts if name in living])
        dead = [plan.host_named(state.name) for state in states if state.state == "dead" or state.name in wrong_hosts]
        children: list[Child] = []
        with ExitStack() as undo:
            undo.callback(_restore_records, records)
            undo.callback(end_children, children)
            for host in dead:
                gate.check()
                check_host_ports(plan, host)
                children.append(spawn(host, directory.plan_path, directory))
            _await_ready(children, plan, directory, gate)
            if attached_children is None:
                for child in children:
                    child.release()
            else:
                attached_children.extend(children)
            undo.pop_all()
    return [host.name for host in dead]


def _restore_records(records: Mapping[Path, bytes]) -> None:
    """Write the records of ended hosts again: without one, a host with an address counts as another computer's."""
    for path, content in records.items():
        if not path.exists():
            path.write_bytes(content)


def start_on_free_ports(
    directory: RunDirectory,
    plan_at: Callable[[Ports], ConstellationPlan],
    satellites: int,
    *,
    foreground: bool = False,
    confirm: Confirm | None = None,
    gate: SignalGate | None = None,
    kinds: Mapping[str, Kind] | None = None,
) -> Started:
    """Run ``start`` on free ports; on others if these are taken first."""
    for attempt in range(FREE_PORT_ATTEMPTS):
        plan = plan_at(free_ports(satellites, attempt=attempt))
        try:
            return start(directory, plan, foreground=foreground, confirm=confirm, gate=gate, kinds=kinds)
        except PortTaken:
            if attempt == FREE_PORT_ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def watch(directory: RunDirectory, started: Started, say: Callable[[str], None], gate: SignalGate | None = None) -> int:
    """Watch a constellation until a signal (return 0) or the end of the last host (return 1); then stop it."""
    alive = list(started.children)
    with gate or SignalGate() as gate:
        while alive and not gate.closed:
            time.sleep(POLL_S)
            for child in [child for child in alive if child.process.poll() is not None]:
                alive.remove(child)
                say(f"{child.host.name} died ({child.exit_words()}); {directory.log_tail(child.host.name)}")
        with directory.locked(patience_s=START_PATIENCE_S):  # another command may be reviving or disabling
            end_children(started.children)
            end_processes(directory.living().values())  # revived hosts
            directory.sweep()
    return 0 if gate.closed else 1


def stop(directory: RunDirectory, grace_s: float = GRACE_S) -> tuple[int, int]:
    """Stop the host processes and remove their files; return the numbers of stopped and of killed processes."""
    if not directory.path.is_dir():
        return 0, 0
    # Find processes by command line (a pid file may be lost or damaged) and by pid file (a system may have no
    # /proc).
    with directory.locked(patience_s=START_PATIENCE_S), SignalGate():
        living = list({**directory.running(), **directory.living()}.values())
        forced = end_processes(living, grace_s)
        directory.sweep()
    return len(living), forced


def inspect(directory: RunDirectory) -> list[HostState]:
    states = []
    for host in directory.read_plan().hosts:
        record = directory.read_record(host.name)
        if record is not None and record.alive:
            states.append(HostState(host.name, "running", record.pid, resident_bytes(record.pid), "", record.kind))
        elif record is None and not host.is_loopback:
            states.append(HostState(host.name, "elsewhere", None, None, ""))
        else:
            pid = record.pid if record else None
            states.append(HostState(host.name, "dead", pid, None, directory.log_tail(host.name)))
    return states


def attach(directory: RunDirectory, plan: ConstellationPlan) -> None:
    with directory.locked():
        _refuse_if_running(directory)
        directory.sweep()
        directory.write_plan(plan)


_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalGate:
    """Context manager that defers SIGINT, SIGTERM and SIGHUP until ``check`` raises KeyboardInterrupt.

    Reentrant; without effect outside the main thread, which alone gets signals.
    """

    def __init__(self) -> None:
        self.closed = False
        self._depth = 0
        self._before: dict[signal.Signals, Any] = {}

    def _close(self, number: int, frame: FrameType | None) -> None:
        self.closed = True

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._close) for number in _STOPPING}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def check(self) -> None:
        if self.closed:
            raise KeyboardInterrupt


# --- Host processes: spawning, ending, and detecting busy processes ---


@dataclass(slots=True)
class Child:
    """Host process started here; ``line`` is our end of its socket."""

    host: HostShare
    process: subprocess.Popen[bytes]
    line: socket.socket

    def release(self) -> None:
        """Let the process outlive this supervisor."""
        self.line.sendall(STAY)
        self.line.close()

    def exit_words(self) -> str:
        try:
            code = self.process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            return "closed its socket but still runs"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def host_command(host: HostShare, plan_path: Path, directory: RunDirectory, line_fd: int) -> list[str]:
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
        *(("--satellite", "c") if directory.kind_of(host.name) == "c" else ()),
    ]


def spawn(host: HostShare, plan_path: Path, directory: RunDirectory) -> Child:
    ours, theirs = socket.socketpair()
    # Otherwise BLAS starts a thread per core, with buffers, in every process.
    environment = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONIOENCODING"] = "utf-8"  # encoding of its log, whose end we print
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


def end_processes(records: Iterable[ProcessRecord], grace_s: float = GRACE_S) -> int:
    """Terminate processes, kill those that do not end, and return their number.

    The grace period restarts while a process is busy.
    """
    targets = [record for record in records if record.alive]
    for record in targets:
        # A stopped process would not handle SIGTERM. SIGCONT comes first: later it would undo the stop by which
        # LeakSanitizer examines an ending process, which would then wait forever.
        record.send_signal(signal.SIGCONT)
        record.send_signal(signal.SIGTERM)
    _await_end(lambda: {str(record.pid): record.pid for record in targets if record.alive}, grace_s)
    remaining = [record for record in targets if record.alive]
    for record in remaining:
        record.send_signal(signal.SIGKILL)
    _await_end(lambda: {str(record.pid): record.pid for record in remaining if record.alive}, 2.0)
    return len(remaining)


def _await_end(living: Callable[[], dict[str, int]], grace_s: float) -> None:
    """Wait until ``living`` returns no process, at most ``grace_s`` after the last was busy."""
    started_s = progress_s = look_s = time.monotonic()
    demand, every_s = Demand(living()), min(_END_LOOK_S, grace_s / 2)
    while remaining := living():
        now_s = time.monotonic()
        if now_s > look_s + every_s:
            look_s = now_s
            progress_s = now_s if demand.busy() & remaining.keys() else progress_s
        # An overloaded host handles the signal late: while it runs or waits for a processor it is not hung.
        if now_s > min(progress_s + grace_s, started_s + MOST_GRACE_S):
            return
        time.sleep(_END_POLL_S)


def end_children(children: Iterable[Child], grace_s: float = GRACE_S) -> None:
    started = list(children)
    for child in started:
        child.line.close()
        if child.process.poll() is None:
            child.process.send_signal(signal.SIGCONT)  # see ``end_processes``
            child.process.terminate()
    _await_end(
        lambda: {child.host.name: child.process.pid for child in started if child.process.poll() is None}, grace_s
    )
    for child in started:
        if child.process.poll() is None:
            child.process.kill()
        child.process.wait()
