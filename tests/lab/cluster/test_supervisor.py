"""The supervisor over small processes of its own: starts, failures, restarts, ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="a cluster has a router")

from skymemory.errors import InvalidInput
from skymemory.testbed.run_directory import process_start
from skymemory_lab.cluster import supervisor as module
from skymemory_lab.cluster.services import Service
from skymemory_lab.cluster.supervisor import (
    RayPlan,
    ServiceState,
    SupervisionPlan,
    Supervisor,
    log_tail,
    read_plan,
    read_state,
    write_plan,
)

LISTENS = "import socket,sys,time; s=socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); "
"""A program that is healthy: its socket accepts."""


def service(name: str, folder: Path, then: str = "sys.stdin.read()", kind: str = "instance") -> Service:
    path = folder / f"{name}.s"
    code = f"import os; os.path.exists({str(path)!r}) and os.unlink({str(path)!r}); {LISTENS}{then}"
    return Service(name, kind, (sys.executable, "-S", "-c", code, str(path)), f"unix://{path}")


def until(what: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline_s, "it did not come to that"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FIRST_PAUSE_S", 0.05), ("_LOOK_S", 0.02), ("GRACE_S", 1.0)):
        monkeypatch.setattr(module, name, value)


class Running:
    def __init__(self, folder: Path, *services: Service) -> None:
        self.supervisor = Supervisor(folder, SupervisionPlan("small", services))
        self.went_well: list[bool] = []
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        self.went_well.append(self.supervisor.run())

    def of(self, name: str) -> ServiceState:
        return next(one for one in self.supervisor.state.services if one.name == name)

    def end(self) -> bool:
        self.supervisor.stop()
        self.thread.join(60)
        return self.went_well[0]


def test_all_are_started_and_ended_and_the_file_says_so(tmp_path: Path) -> None:
    one, two = service("store", tmp_path, kind="store"), service("one", tmp_path)
    running = Running(tmp_path, one, two)
    until(lambda: (state := read_state(tmp_path)) is not None and state.ready)
    state = read_state(tmp_path)
    assert state is not None and state.ready and state.supervised
    pids = [each.pid for each in state.services]
    assert [(each.name, each.state) for each in state.services] == [("store", "healthy"), ("one", "healthy")]
    assert running.end()
    state = read_state(tmp_path)
    assert state is not None and {each.state for each in state.services} == {"ended"}
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)


def test_what_does_not_start_fails_the_start_and_all_are_ended(tmp_path: Path) -> None:
    bad = Service(
        "bad", "instance", (sys.executable, "-S", "-c", "print('no room'); raise SystemExit(3)"), "unix:///no"
    )
    absent = Service("absent", "instance", ("/no/such/program",), "unix:///no")
    for failing, words in ((bad, ("bad did not start (exit code 3)", "no room")), (absent, ("/no/such/program: No",))):
        running = Running(tmp_path, service("good", tmp_path), failing)
        running.thread.join(60)
        assert running.went_well == [False]
        assert all(word in running.supervisor.state.failure for word in words)
        assert {each.state for each in running.supervisor.state.services} == {"ended"}
    assert log_tail(tmp_path, "bad") == "no room" and log_tail(tmp_path, "none") == ""


def test_what_ends_is_started_again_after_growing_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.3)
    running = Running(tmp_path, service("one", tmp_path))
    until(lambda: running.supervisor.state.ready)
    began_s = time.monotonic()
    for restarts in (1, 2, 3):
        pid = running.of("one").pid
        os.kill(pid or 0, signal.SIGKILL)
        until(lambda restarts=restarts: running.of("one").restarts == restarts)  # type: ignore[misc]
        until(lambda: running.of("one").state == "healthy")
    assert running.of("one").last_end == "killed by SIGKILL"
    assert time.monotonic() - began_s > 0.3 * (1 + 2 + 4)
    assert running.end()


def test_one_that_does_not_hear_is_killed(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    running = Running(tmp_path, service("deaf", tmp_path, deaf))
    until(lambda: running.supervisor.state.ready and log_tail(tmp_path, "deaf"))
    assert running.end() and running.of("deaf").last_end == "killed by SIGKILL"


def test_what_a_service_has_started_ends_with_it(tmp_path: Path) -> None:
    child = "import subprocess; p=subprocess.Popen(['sleep','60']); print(p.pid, flush=True); sys.stdin.read()"
    running = Running(tmp_path, service("parent", tmp_path, child))
    until(lambda: running.supervisor.state.ready and log_tail(tmp_path, "parent"))
    started = int(log_tail(tmp_path, "parent"))
    assert running.end()

    def gone() -> bool:
        try:
            return Path(f"/proc/{started}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    until(gone)


def test_one_that_ignores_its_input_ends_with_its_supervisor(tmp_path: Path) -> None:
    """As vLLM does: it has a guard, which outlives a killed supervisor."""
    deaf = "print(os.getpid(), flush=True); time.sleep(60)"
    program = (
        "import sys\nfrom pathlib import Path\nfrom skymemory_lab.cluster.services import Service\n"
        "from skymemory_lab.cluster.supervisor import SupervisionPlan, Supervisor\n"
        f"words = (sys.executable, '-S', '-c', {'import os, time; ' + deaf!r})\n"
        "one = Service('deaf', 'instance', words, 'unix:///no', ends_with_stdin=False)\n"
        f"Supervisor(Path({str(tmp_path)!r}), SupervisionPlan('small', (one,))).run()"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", program])
    try:
        until(lambda: log_tail(tmp_path, "deaf"))
        pid = int(log_tail(tmp_path, "deaf"))
        assert process_start(pid) is not None
    finally:
        supervisor.kill()
        supervisor.wait()
    until(lambda: process_start(pid) is None)


def test_files_are_read_as_written_and_damaged_ones_named(tmp_path: Path) -> None:
    plan = SupervisionPlan("small", (service("one", tmp_path),), "/run/sky")
    write_plan(tmp_path, plan)
    assert read_plan(tmp_path) == plan and read_state(tmp_path) is None
    write_plan(tmp_path, on_ray := SupervisionPlan("small", (), ray=RayPlan("/cluster.toml", "10.0.0.1:6379")))
    assert read_plan(tmp_path) == on_ray
    (tmp_path / module.STATE_NAME).write_text("{", "utf-8")
    with pytest.raises(InvalidInput, match="is damaged"):
        read_state(tmp_path)
