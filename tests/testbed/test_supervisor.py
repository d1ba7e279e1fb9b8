"""The supervisor with stand-ins for host processes: whatever they do, all run or none does."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from skymemory.errors import ConstellationError, NoConstellation
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.testbed import run_directory, supervisor
from skymemory.testbed.plan import ConstellationPlan, HostShare, Ports, local_hosts, make_plan
from skymemory.testbed.plan_file import load_plan, save_plan
from skymemory.testbed.run_directory import RunDirectory, check_ports, free_ports
from skymemory.testbed.supervisor import SignalGate

STAND_IN = """
import json, os, signal, socket, sys, time
fd, pid_file, behaviour = int(sys.argv[1]), sys.argv[2], sys.argv[3]
stat = open("/proc/self/stat").read().rpartition(")")[2].split()
boot = open("/proc/sys/kernel/random/boot_id").read().strip()
json.dump({"pid": os.getpid(), "start": f"{boot}/{stat[19]}"}, open(pid_file, "w"))
line = socket.socket(fileno=fd)
if behaviour == "tidies up":
    signal.signal(signal.SIGTERM, lambda *_: (os.unlink(pid_file), os._exit(0)))
if behaviour == "fails":
    sys.exit("cannot bind: the sky is full")
if behaviour == "hangs":
    time.sleep(60)
line.send(b"ready\\n")
if line.recv(5) != b"stay\\n":
    sys.exit(0)
time.sleep(60)
"""
Behaviours = dict[str, str]


@pytest.fixture
def plan() -> ConstellationPlan:
    return make_plan(hosts=local_hosts("testbed-19x5", 3, free_ports(95)))


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    made = RunDirectory(tmp_path / "run")
    yield made
    supervisor.stop(made)


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Behaviours:
    """What each host's stand-in does: serves, unless a test says otherwise."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN, "utf-8")
    behaviours: Behaviours = {}

    def command(host: HostShare, plan_path: Path, directory: RunDirectory, line_fd: int) -> list[str]:
        pid_file = str(directory.pid_path(host.name))
        return [sys.executable, "-S", str(script), str(line_fd), pid_file, behaviours.get(host.name, "serves")]

    monkeypatch.setattr(supervisor, "host_command", command)
    return behaviours


def _gone(directory: RunDirectory) -> bool:
    return not directory.path.exists()


def _eventually(holds: Callable[[], bool], patience_s: float = 60.0) -> bool:
    deadline_s = time.monotonic() + patience_s
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return holds()


def test_up_then_down(behave: Behaviours, directory: RunDirectory, plan: ConstellationPlan) -> None:
    confirmed: list[ConstellationPlan] = []
    started = supervisor.start(directory, plan, confirm=lambda plan, busy: confirmed.append(plan))
    assert started.children == [] and confirmed == [plan]
    assert directory.running_plan() == plan
    states = supervisor.inspect(directory)
    assert [state.state for state in states] == ["running"] * 3
    assert all(state.memory_bytes and state.memory_bytes > 1e6 for state in states)
    assert supervisor.stop(directory) == (3, 0)
    assert _gone(directory)
    assert supervisor.stop(directory) == (0, 0)
    with pytest.raises(NoConstellation):
        supervisor.inspect(directory)


def test_what_is_in_the_run_directory_is_for_its_owner_only(
    behave: Behaviours, directory: RunDirectory, plan: ConstellationPlan
) -> None:
    before = os.umask(0)
    try:
        supervisor.start(directory, replace(plan, auth="on", keys_file=str(directory.keys_path)))
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.path.iterdir() if path.suffix != ".pid"}
    assert modes.keys() >= {"constellation.json", "keys", "index", "host-0.log", "lock"}
    assert set(modes.values()) == {0o600}, modes


def test_up_twice_is_reported_and_changes_nothing(
    behave: Behaviours, directory: RunDirectory, plan: ConstellationPlan
) -> None:
    supervisor.start(directory, plan)
    before = directory.living()
    with pytest.raises(supervisor.AlreadyRunning, match=r"already running: testbed-19x5, 3 of 3 hosts alive"):
        supervisor.start(directory, plan)
    assert directory.living() == before


def test_one_host_that_fails_stops_all(behave: Behaviours, directory: RunDirectory, plan: ConstellationPlan) -> None:
    behave["host-1"] = "fails"
    with pytest.raises(ConstellationError, match=r"host-1 did not start \(exit code 1\)[^$]*the sky is full"):
        supervisor.start(directory, plan)
    assert _gone(directory)


def test_one_host_that_hangs_stops_all(
    behave: Behaviours, directory: RunDirectory, plan: ConstellationPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave["host-2"] = "hangs"
    monkeypatch.setattr(supervisor, "START_PATIENCE_S", 0.5)
    with pytest.raises(ConstellationError, match="host-2 not ready"):
        supervisor.start(directory, plan)
    assert _gone(directory)


def test_satellites_that_do_not_answer_stop_all(
    behave: Behaviours, directory: RunDirectory, plan: ConstellationPlan
) -> None:
    def refuse(plan: ConstellationPlan, busy: object) -> None:
        raise ConstellationError("host-0 does not answer")

    with pytest.raises(ConstellationError, match="does not answer"):
        supervisor.start(directory, plan, confirm=refuse)
    assert _gone(directory)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_in_the_middle_of_up_leaves_nothing(
    behave: Behaviours, directory: RunDirectory, plan: ConstellationPlan, number: signal.Signals
) -> None:
    behave["host-2"] = "hangs"
    handler = signal.getsignal(number)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), number))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        supervisor.start(directory, plan)
    assert _gone(directory)
    assert signal.getsignal(number) is handler


def test_a_supervisor_that_dies_in_the_middle_of_up_leaves_nothing(
    behave: Behaviours, directory: RunDirectory, plan: ConstellationPlan
) -> None:
    """The kernel closes a dead supervisor's ends of the lines: the same as closing them here."""
    directory.create()
    directory.write_plan(plan)
    children = [supervisor.spawn(host, directory.plan_path, directory) for host in plan.hosts]
    for started in children:
        assert started.line.recv(6) == supervisor.READY
        started.line.close()
    assert [started.process.wait(timeout=60) for started in children] == [0, 0, 0]


def test_a_dead_host_is_named_and_down_still_cleans(
    behave: Behaviours, directory: RunDirectory, plan: ConstellationPlan
) -> None:
    supervisor.start(directory, plan)
    victim = directory.living()["host-1"]
    os.kill(victim.pid, signal.SIGKILL)
    assert _eventually(
        lambda: [state.state for state in supervisor.inspect(directory)] == ["running", "dead", "running"]
    )
    with pytest.raises(supervisor.AlreadyRunning, match="2 of 3 hosts alive"):
        supervisor.start(directory, plan)
    assert supervisor.stop(directory) == (2, 0)
    assert _gone(directory)


def test_hosts_that_could_not_be_revived_are_still_known_as_this_computers(
    behave: Behaviours, directory: RunDirectory, plan: ConstellationPlan
) -> None:
    """Without a record, a host with an address counts as another computer's, and is not started again."""
    supervisor.start(directory, plan)
    for host in ("host-0", "host-1"):
        os.kill(directory.living()[host].pid, signal.SIGKILL)
    assert _eventually(lambda: len(directory.living()) == 1)
    behave |= {"host-0": "tidies up", "host-1": "fails"}
    with pytest.raises(ConstellationError, match=r"host-1 did not start .* all that were started were stopped"):
        supervisor.revive(directory)
    assert [state.state for state in supervisor.inspect(directory)] == ["dead", "dead", "running"]
    assert all(directory.pid_path(f"host-{number}").exists() for number in range(3))
    behave.clear()
    assert supervisor.revive(directory) == ["host-0", "host-1"]


def test_what_a_crash_left_behind_is_swept_by_the_next_up(
    behave: Behaviours, directory: RunDirectory, plan: ConstellationPlan
) -> None:
    directory.create()
    directory.write_plan(plan)
    directory.index_path.write_bytes(b"of chunks that are gone")
    directory.log_path("host-0").write_text("old words\n", "utf-8")
    for host in ("host-0", "host-77"):
        directory.pid_path(host).write_text(f'{{"pid": {os.getpid()}, "start": "another boot/1"}}', "utf-8")
    supervisor.start(directory, plan)
    assert sorted(directory.living()) == directory.recorded_hosts() == ["host-0", "host-1", "host-2"]
    assert SharedIndex(directory.index_path).journal_state.complete and len(SharedIndex(directory.index_path)) == 0
    assert "old words" not in directory.log_tail("host-0")


def test_foreground_stays_until_a_signal(behave: Behaviours, directory: RunDirectory, plan: ConstellationPlan) -> None:
    started = supervisor.start(directory, plan, foreground=True)
    said: list[str] = []
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert supervisor.watch(directory, started, said.append) == 0
    assert said == [] and _gone(directory)


def test_a_signal_between_start_and_watch_is_not_lost_and_leaves_nothing(
    behave: Behaviours, directory: RunDirectory, plan: ConstellationPlan
) -> None:
    said: list[str] = []
    handler = signal.getsignal(signal.SIGINT)
    with SignalGate() as gate:
        started = supervisor.start(directory, plan, foreground=True, gate=gate)
        os.kill(os.getpid(), signal.SIGINT)
        assert supervisor.watch(directory, started, said.append, gate) == 0
    assert said == [] and _gone(directory)
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_signal_while_the_directory_is_held_leaves_nothing(
    behave: Behaviours, directory: RunDirectory, plan: ConstellationPlan
) -> None:
    """As `disable` and `revive` do for seconds: what these revived was left running, with all its files."""
    started = supervisor.start(directory, plan, foreground=True)
    held, let_go = threading.Event(), threading.Event()

    def disable() -> None:
        with directory.locked():
            held.set()
            let_go.wait(60)

    holder = threading.Thread(target=disable)
    holder.start()
    assert held.wait(60)
    with SignalGate() as gate:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.3, let_go.set).start()
        assert supervisor.watch(directory, started, lambda words: None, gate) == 0
    holder.join()
    assert _gone(directory) and all(one.process.poll() is not None for one in started.children)


def test_foreground_ends_when_all_hosts_have_died(
    behave: Behaviours, directory: RunDirectory, plan: ConstellationPlan
) -> None:
    started = supervisor.start(directory, plan, foreground=True)
    for record in directory.living().values():
        os.kill(record.pid, signal.SIGKILL)
    said: list[str] = []
    assert supervisor.watch(directory, started, said.append) == 1
    assert len(said) == 3 and all("killed by SIGKILL" in words for words in said)
    assert _gone(directory)


def test_attached_plans_have_no_processes_here(directory: RunDirectory, plan: ConstellationPlan) -> None:
    remote = make_plan(hosts=(HostShare("far", "192.0.2.1", 26_000, (0, 1, 2, 3, 4)),))
    supervisor.attach(directory, remote)
    assert directory.running_plan() == remote
    assert [state.state for state in supervisor.inspect(directory)] == ["elsewhere"]
    supervisor.stop(directory)
    assert _gone(directory)


def test_a_taken_port_is_named_before_anything_starts(
    behave: Behaviours, directory: RunDirectory, plan: ConstellationPlan
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        port = plan.hosts[1].base_port + 20
        other.bind(("127.0.0.1", port))
        with pytest.raises(
            ConstellationError, match=rf"UDP port {port} on 127.0.0.1 \(host-1, plane 2, slot 1\) is taken"
        ):
            supervisor.start(directory, plan)
        assert directory.living() == {}
        assert free_ports(95).base_port != plan.hosts[0].base_port
    check_ports(plan)


def test_a_faster_process_on_the_same_ports_is_no_obstacle_when_any_will_do(
    behave: Behaviours, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered: list[Ports] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        taken, free = Ports(other.getsockname()[1] - 10), free_ports(95)
        monkeypatch.setattr(supervisor, "free_ports", lambda count, attempt: free if attempt == 2 else taken)

        def plan_at(ports: Ports) -> ConstellationPlan:
            offered.append(ports)
            return make_plan(hosts=local_hosts("testbed-19x5", 2, ports))

        started = supervisor.start_on_free_ports(directory, plan_at, 95)
    assert offered == [taken, taken, free]
    assert started.plan.hosts[0].base_port == free.base_port


def test_1584_ports_are_found_among_those_of_others(
    behave: Behaviours, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every 50th port is another program's, so there are nowhere 50 in a row."""
    bind_error = run_directory._bind_error
    monkeypatch.setattr(run_directory, "_bind_error", lambda address: errno.EADDRINUSE * (address[1] % 50 == 0))
    found = free_ports(1584)
    assert len(found.skipped) > 30 and all(port % 50 for port in found.first(1584))
    made = make_plan("starlink-a", hosts=local_hosts("starlink-a", 5, found))
    assert [port for _, port in made.addresses().values()] == found.first(1584)
    check_ports(made)
    save_plan(made, tmp_path / "plan")
    assert load_plan(tmp_path / "plan") == made
    monkeypatch.setattr(run_directory, "_bind_error", lambda address: errno.EADDRINUSE * (address[1] % 60 > 0))
    with pytest.raises(ConstellationError, match=r"1075 free UDP ports on 127.0.0.1, expected 1584"):
        free_ports(1584)
    monkeypatch.setattr(run_directory, "_bind_error", bind_error)
    assert free_ports(95).skipped == ()


def test_hosts_with_gaps_among_their_ports_start_beside_who_holds_them(
    behave: Behaviours, directory: RunDirectory
) -> None:
    first = free_ports(96).base_port  # one more than there are satellites
    taken = first + 3
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", taken))
        gapped = Ports(first, ((taken, taken),))
        started = supervisor.start(directory, make_plan(hosts=local_hosts("testbed-19x5", 3, gapped)))
    assert supervisor.inspect(directory)[0].state == "running"
    assert taken not in [port for _, port in started.plan.addresses().values()]


def test_hosts_of_other_computers_are_not_started_here(directory: RunDirectory) -> None:
    remote = make_plan(hosts=(HostShare("far", "192.0.2.1", 26_000, (0, 1, 2, 3, 4)),))
    with pytest.raises(ConstellationError, match="skymemory satellite"):
        supervisor.start(directory, remote)
