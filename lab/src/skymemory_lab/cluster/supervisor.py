"""Supervisor of a cluster's services as processes of this computer.

Until all services have been healthy at once, a service that ends fails the start; later it is restarted, with growing
pauses. Services end with the supervisor, however it ends: this project's by their closed standard input, others by a
guard process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.files import read_bounded, write_private
from skymemory.pacing import Backoff
from skymemory.testbed.liveness import guard
from skymemory.testbed.run_directory import ProcessRecord, process_start
from skymemory_lab.cluster.services import HOST, KINDS, Service

STATE_NAME = "cluster-state.json"
PLAN_NAME = "cluster-plan.json"
ROUTER_FILE, SOCKET = "router.toml", "store.sock"
STORE_CERTIFICATE, STORE_KEY, STORE_PASSWORD = "store.pem", "store.key", "store.password"
RUN_FILES = (STATE_NAME, PLAN_NAME, ROUTER_FILE, SOCKET, STORE_CERTIFICATE, STORE_KEY, STORE_PASSWORD)
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 30.0
LASTING_S = 30.0
"""Healthy time after which the pause is the first again."""
GRACE_S = 10.0
_LOOK_S = 0.1
_CHECK_S = 1.0
_CHECK_TIMEOUT_S = 3.0
_MISSES = 3  # failed checks that make a service unhealthy. It may be busy, so it is not ended.
_TAIL_BYTES = 4096


@dataclass(slots=True)
class ServiceState:
    name: str
    kind: str
    role: str
    engine: str
    model: str
    address: str
    state: str = "waiting"
    """One of waiting, starting, healthy, unhealthy, restarting, ended."""
    pid: int | None = None
    start: str = ""  # start time of ``pid``, which may be reused
    restarts: int = 0
    last_end: str = ""  # exit code or signal of the last process


@dataclass(slots=True)
class ClusterState:
    """State of a cluster, which its supervisor writes to a file."""

    name: str
    pid: int  # of the supervisor
    start: str  # start time of ``pid``
    ready: bool = False
    """True once all services were healthy at once."""
    failure: str = ""
    services: list[ServiceState] = field(default_factory=list)

    @property
    def supervised(self) -> bool:
        return ProcessRecord(self.pid, self.start).alive


@dataclass(frozen=True, slots=True)
class RayPlan:
    """Description of a cluster to run on Ray."""

    file: str
    address: str
    """Address; ``auto``: RAY_ADDRESS, or the cluster of this computer."""


@dataclass(frozen=True, slots=True)
class SupervisionPlan:
    """Work of a supervisor process, passed in a file."""

    name: str
    services: tuple[Service, ...]
    constellation: str = ""
    """Run directory of a constellation started with the cluster."""
    ray: RayPlan | None = None


def write_plan(directory: Path, plan: SupervisionPlan) -> None:
    write_private(directory / PLAN_NAME, json.dumps(asdict(plan)))


def read_plan(directory: Path) -> SupervisionPlan | None:
    return _read(directory / PLAN_NAME, SupervisionPlan)


def read_state(directory: Path) -> ClusterState | None:
    return _read(directory / STATE_NAME, ClusterState)


def write_failure(directory: Path, name: str, failure: str) -> None:
    """Write the state of a cluster that was not started."""
    pid = os.getpid()
    state = ClusterState(name, pid, process_start(pid) or "", failure=failure)
    write_private(directory / STATE_NAME, json.dumps(asdict(state)))


Kind = TypeVar("Kind", SupervisionPlan, ClusterState)


def _read(path: Path, kind: type[Kind]) -> Kind | None:
    try:
        return msgspec.json.decode(read_bounded(path), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise InvalidInput(f"{path} is damaged: {error}; end its processes, then delete the file") from error


def log_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.log"


def log_tail(directory: Path, name: str, size_bytes: int = _TAIL_BYTES) -> str:
    try:
        with log_path(directory, name).open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - size_bytes))
            tail = log.read(size_bytes)
    except FileNotFoundError:
        return ""
    if size > size_bytes:
        tail = tail[tail.find(b"\n") + 1 :]
    return tail.decode("utf-8", "replace").strip()


class Supervisor:
    """Supervisor that starts the store, then instances, then the router, and writes the cluster's state."""

    def __init__(self, directory: Path, plan: SupervisionPlan, make: Callable[..., Any] | None = None) -> None:
        self._directory = directory
        self._asked_to_stop = False
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        pid = os.getpid()
        self.state = ClusterState(plan.name, pid, process_start(pid) or "")
        self._supervised: list[Supervised] = [
            (make or Supervised)(service, directory, self._changed, self._stopping) for service in plan.services
        ]
        self.state.services = [supervised.state for supervised in self._supervised]
        self._changed()

    def stop(self) -> None:
        """Request the end of ``run``; takes no lock, so that a signal handler may call it."""
        self._asked_to_stop = True

    def run(self) -> bool:
        """Run until ``stop`` or a failed start; return True if all services were healthy at once."""
        # Engines connect to their store when they start; a router that finds no engine would wait before it retries.
        stages = [[supervised for supervised in self._supervised if supervised.service.kind == kind] for kind in KINDS]
        threads: list[threading.Thread] = []
        try:
            for stage in stages:
                for supervised in stage:
                    threads.append(threading.Thread(target=supervised.run, name=supervised.service.name, daemon=True))
                    threads[-1].start()
                if not self._await_healthy(stage):
                    return False
            for supervised in self._supervised:
                supervised.restarts = True
            if not self._await_healthy(self._supervised):  # a service may have ended just before
                return False
            self.state.ready = True
            self._changed()
            while not self._pause():
                pass
            return True
        finally:
            self._stopping.set()
            for thread in threads:
                thread.join()
            self._changed()

    def _await_healthy(self, services: Sequence[Supervised]) -> bool:
        # Return True once all are healthy, False if a service ended or ``stop`` was called.
        while not all(supervised.state.state == "healthy" for supervised in services):
            failed = next((supervised for supervised in self._supervised if supervised.state.state == "ended"), None)
            if failed is not None:
                name = failed.service.name
                tail = log_tail(self._directory, name)
                log = f"; its log ends with:\n{tail}" if tail else "; its log is empty"
                self.state.failure = f"{name} did not start ({failed.state.last_end}){log}"
            if failed is not None or self._pause():
                return False
        return True

    def _pause(self) -> bool:
        time.sleep(_LOOK_S)
        return self._asked_to_stop

    def _changed(self) -> None:
        with self._lock:
            write_private(self._directory / STATE_NAME, json.dumps(asdict(self.state)))


class Supervised:
    """Service's process: ``run`` starts and watches it, and restarts it if ``restarts``."""

    def __init__(
        self, service: Service, directory: Path, on_changed: Callable[[], None], stopping: threading.Event
    ) -> None:
        self.service = service
        self.restarts = False
        self.state = ServiceState(
            service.name, service.kind, service.role, service.engine, service.model, service.address
        )
        self._directory = directory
        self._changed = on_changed
        self._stopping = stopping
        self._guard: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        pauses = Backoff(FIRST_PAUSE_S, LAST_PAUSE_S)
        while not self._stopping.is_set():
            try:
                process = self._spawn()
            except OSError as error:
                lasted_s, self.state.last_end = 0.0, f"{self.service.words[0]}: {error.strerror}"
            else:
                lasted_s = self._watch(process)
                stopped = self._stopping.is_set()
                code = _end(process) if stopped else process.wait()
                _end_group(process.pid)
                if self._guard is not None:
                    self._guard.kill()
                    self._guard.communicate()
                self.state.last_end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                self.state.pid = None
                if stopped:
                    break
            if not self.restarts:
                break
            if lasted_s >= LASTING_S:
                pauses.failures = 0
            self._set("restarting")
            if self._stopping.wait(pauses.next_s()):
                break
            self.state.restarts += 1
        self._set("ended")

    def _spawn(self) -> subprocess.Popen[bytes]:
        path = log_path(self._directory, self.service.name)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab") as log:
            process = subprocess.Popen(
                self.service.words,
                stdin=subprocess.PIPE if self.service.ends_with_stdin else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.service.environment},
                # Ctrl-C goes to a terminal's whole process group, but the supervisor ends its services itself. The
                # session also allows to kill the processes that a service has started.
                start_new_session=True,
            )
        self._guard = None if self.service.ends_with_stdin else guard(process.pid)
        self.state.pid, self.state.start = process.pid, process_start(process.pid) or ""
        self._set("starting")
        return process

    def _watch(self, process: subprocess.Popen[bytes]) -> float:
        """Watch the process; return its seconds since it was first healthy."""
        healthy_s: float | None = None
        misses, check_s = 0, time.monotonic()
        while process.poll() is None and not self._stopping.wait(_LOOK_S):
            if time.monotonic() < check_s:
                continue
            if is_healthy(self.service):
                misses = 0
                healthy_s = time.monotonic() if healthy_s is None else healthy_s
                self._set("healthy")
            else:
                misses += 1
                if healthy_s is not None and misses >= _MISSES:
                    self._set("unhealthy")
            check_s = time.monotonic() + (_LOOK_S if healthy_s is None else _CHECK_S)
        return 0.0 if healthy_s is None else time.monotonic() - healthy_s

    def _set(self, state: str) -> None:
        if self.state.state != state:
            self.state.state = state
            self._changed()


def is_healthy(service: Service) -> bool:
    try:
        health = service.health or service.address
        if not health.startswith("unix://"):
            with urllib.request.urlopen(health, timeout=_CHECK_TIMEOUT_S) as answer:
                return bool(answer.status == 200)
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(_CHECK_TIMEOUT_S)
            client.connect(health.removeprefix("unix://"))
            return True
    except (OSError, urllib.error.URLError, ValueError):
        return False


def _end(process: subprocess.Popen[bytes]) -> int:
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    process.terminate()
    try:
        return process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def free_ports(count: int, host: str = HOST) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(address_family(host))) for _ in range(count)]
        for listener in sockets:
            listener.bind((host, 0))
        return [int(listener.getsockname()[1]) for listener in sockets]


def address_family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _end_group(pid: int) -> None:
    """Kill the session's processes: vLLM's engine processes outlive their parent."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def end_orphans(state: ClusterState) -> int:
    """Kill services whose supervisor is gone; return their number."""
    alive = [
        service
        for service in state.services
        if service.pid is not None and ProcessRecord(service.pid, service.start).alive
    ]
    for service in alive:
        assert service.pid is not None
        ProcessRecord(service.pid, service.start).send_signal(signal.SIGKILL)
        _end_group(service.pid)
    return len(alive)


def end_supervisor(state: ClusterState, patience_s: float) -> None:
    """End the supervisor and all services."""
    record = ProcessRecord(state.pid, state.start)
    record.send_signal(signal.SIGTERM)
    deadline_s = time.monotonic() + patience_s
    while record.alive:
        if time.monotonic() > deadline_s:
            raise SkyMemoryError(f"the supervisor (pid {state.pid}) has not ended after {patience_s:g} s")
        time.sleep(_LOOK_S / 2)


def as_object(state: ClusterState) -> dict[str, Any]:
    return {**asdict(state), "supervised": state.supervised}
