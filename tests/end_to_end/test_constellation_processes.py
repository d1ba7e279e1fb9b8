"""The constellation as real processes with real sockets: up, status, rotate, down, and everything that can
go wrong.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.in_process import skymemory
from tests.settings_file import settings_file

from skymemory.addresses import format_address
from skymemory.testbed import carrying, supervisor
from skymemory.testbed.plan import ConstellationPlan
from skymemory.testbed.run_directory import RunDirectory
from skymemory.transport.udp_socket import udp_socket

COMMAND = [sys.executable, "-m", "skymemory"]
Answer = subprocess.CompletedProcess[str]


class Sky:
    """The command with a run directory of its own."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.environment = {**os.environ, "SKYMEMORY_RUN_DIR": str(run_dir)}

    def __call__(self, *words: str) -> Answer:
        return subprocess.run(
            [*COMMAND, *words], env=self.environment, capture_output=True, text=True, timeout=240, check=False
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, *words], env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def up(self, *words: str) -> Answer:
        answer = self("constellation", "up", "--base-port", "auto", "--delay", "off", *words)
        assert answer.returncode == 0, answer.stderr
        return answer

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("constellation", "status", "--json", "--patience", "2s").stdout)
        return found

    def host_pids(self) -> dict[str, int]:
        return {path.stem: json.loads(path.read_text("utf-8"))["pid"] for path in self.run_dir.glob("*.pid")}

    def processes(self) -> list[int]:
        """Every process of this run directory, however it was started."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if b"satellite" in words and str(self.run_dir).encode() in words:
                found.append(int(path.parent.name))
        return found


def eventually(holds: Callable[[], object], patience_s: float = 60.0) -> bool:
    deadline_s = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def sky(tmp_path: Path) -> Iterator[Sky]:
    made = Sky(tmp_path / "run")
    yield made
    made("constellation", "down")
    assert made.processes() == []
    assert not made.run_dir.exists()


@pytest.mark.slow
@pytest.mark.seeded
def test_up_status_rotate_down(sky: Sky, tmp_path: Path) -> None:
    assert re.search(r"95 satellites in 5 host processes on ports \d+ to \d+", sky.up().stdout)
    status = sky.status()
    assert status["healthy"] and [host["answering"] for host in status["hosts"]] == [19] * 5
    assert sum(host["memory_bytes"] for host in status["hosts"]) < 300e6
    assert sorted(host["pid"] for host in status["hosts"]) == sorted(sky.host_pids().values())

    value = os.urandom(300_000)
    (tmp_path / "value.bin").write_bytes(value)
    assert sky("kv", "put", str(tmp_path / "value.bin")).returncode == 0
    assert sky.status()["totals"]["chunks_held"] == 49
    turned = json.loads(sky("constellation", "rotate", "--slots", "2", "--planes", "1", "--json").stdout)
    assert turned["complete"] and turned["moves_after"] == [2, 1] and turned["chunks_migrated"] > 0
    status = sky.status()
    assert (status["pushed_slot_moves"], status["pushed_plane_moves"]) == (2, 1)
    assert status["totals"]["chunks_held"] >= 49
    # planes alone move no slots; nothing said is one slot
    for words, moves in ((("--planes", "1"), [2, 2]), ((), [3, 2])):
        assert json.loads(sky("constellation", "rotate", *words, "--json").stdout)["moves_after"] == moves
    assert sky("kv", "get", "value.bin", "--out", str(tmp_path / "back.bin")).returncode == 0
    assert (tmp_path / "back.bin").read_bytes() == value

    down = sky("constellation", "down")
    assert (down.returncode, down.stdout) == (0, "stopped 5 host processes\n")
    assert sky.processes() == [] and not sky.run_dir.exists()
    again = sky("constellation", "status")
    assert again.returncode == 1 and "no constellation in" in again.stderr


@pytest.mark.slow
def test_delays_are_held(sky: Sky) -> None:
    """A ping to the far side of the torus and back takes light tens of milliseconds; with x3, three times
    that.
    """
    sky.up("--hosts", "1", "--delay", "x3")
    assert sky.status()["delay_scale"] == 3
    table = sky("constellation", "status")
    assert table.returncode == 0 and "delay x3" in table.stdout and "95 of 95" in table.stdout


def test_up_twice_is_answered_and_harmless(sky: Sky) -> None:
    sky.up("--hosts", "2")
    before = sky.host_pids()
    again = sky("constellation", "up", "--base-port", "auto")
    assert again.returncode == 1
    assert "already running: testbed-19x5, 2 of 2 hosts alive" in again.stderr
    assert sky.host_pids() == before and sky.status()["healthy"]


@pytest.mark.slow
@pytest.mark.seeded
def test_two_ups_at_once_make_one_constellation(sky: Sky) -> None:
    both = [sky.start("constellation", "up", "--base-port", "auto", "--hosts", "2") for _ in range(2)]
    errors = [process.communicate(timeout=100)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1]
    assert re.search("already running|starting or stopping", "".join(errors))
    assert len(sky.processes()) == 2 and sky.status()["healthy"]


def test_a_port_taken_is_named(sky: Sky) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        answer = sky("constellation", "up", "--base-port", str(port - 40))
    assert answer.returncode == 1
    assert f"UDP port {port} on 127.0.0.1 (host-2, plane 2, slot 2) is taken" in answer.stderr
    assert sky.processes() == [] and not sky.run_dir.exists()


@pytest.mark.slow
@pytest.mark.seeded
def test_a_dead_host_is_shown_and_down_still_works(sky: Sky) -> None:
    sky.up()
    victim = sky.host_pids()["host-3"]
    os.kill(victim, signal.SIGKILL)
    assert eventually(lambda: victim not in sky.processes())
    table = sky("constellation", "status", "--patience", "2s")
    assert table.returncode == 1 and "host-3 is dead" in table.stdout
    status = sky.status()
    assert not status["healthy"]
    assert {host["name"]: (host["state"], host["answering"]) for host in status["hosts"]} == {
        "host-0": ("running", 19),
        "host-1": ("running", 19),
        "host-2": ("running", 19),
        "host-3": ("dead", 0),
        "host-4": ("running", 19),
    }
    assert "4 of 5 hosts alive" in sky("constellation", "up", "--base-port", "auto").stderr
    assert sky("constellation", "down").stdout == "stopped 4 host processes\n"


@pytest.mark.slow
@pytest.mark.seeded
def test_a_host_whose_port_is_taken_between_check_and_start_stops_all(sky: Sky, tmp_path: Path) -> None:
    """One host started by hand on ports that another holds: it says so in one line and ends."""
    plan = tmp_path / "plan.json"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        assert sky("constellation", "plan", "--out", str(plan), "--host", f"127.0.0.1:{port}").returncode == 0
        answer = sky("satellite", "--plan", str(plan), "--host", "0")
    assert answer.returncode == 1
    assert str(port) in answer.stderr and "Traceback" not in answer.stderr


@pytest.mark.parametrize("begun", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_ctrl_c_in_the_middle_of_up_leaves_nothing(sky: Sky, begun: int) -> None:
    """A host that is held up keeps ``up`` in its middle, however fast the machine, until Ctrl-C has come."""
    starting = sky.start("constellation", "up", "--base-port", "auto")
    assert eventually(lambda: len(sky.processes()) >= begun, 30.0)
    held_up = sky.processes()[-1]
    os.kill(held_up, signal.SIGSTOP)
    starting.send_signal(signal.SIGINT)
    with suppress(ProcessLookupError):  # `up` may have ended it by now
        os.kill(held_up, signal.SIGCONT)
    starting.communicate(timeout=30)
    assert starting.returncode == 130
    assert sky.processes() == [] and not sky.run_dir.exists()


@pytest.mark.brief()
def test_a_supervisor_killed_in_the_middle_of_up_leaves_no_process(sky: Sky) -> None:
    starting = sky.start("constellation", "up", "--base-port", "auto")
    eventually(lambda: len(sky.processes()) >= 2 or starting.poll() is not None)
    starting.kill()
    starting.communicate(timeout=30)
    assert eventually(lambda: sky.processes() == [])


@pytest.mark.slow
@pytest.mark.seeded
def test_foreground_stops_with_ctrl_c_and_with_its_supervisor(sky: Sky) -> None:
    for number, code in ((signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)):
        foreground = sky.start("constellation", "up", "--base-port", "auto", "--hosts", "2", "--foreground")
        assert foreground.stdout is not None and "is up" in foreground.stdout.readline()
        assert len(sky.processes()) == 2
        foreground.send_signal(number)
        foreground.communicate(timeout=30)
        assert foreground.returncode == code
        assert eventually(lambda: sky.processes() == [])


@pytest.mark.slow
@pytest.mark.seeded
def test_a_run_directory_left_by_a_crash_is_no_obstacle_and_its_numbers_are_not_touched(sky: Sky) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        sky.run_dir.mkdir()
        record = json.dumps({"pid": bystander.pid, "start": "an earlier boot/1"})
        (sky.run_dir / "host-0.pid").write_text(record, "utf-8")
        (sky.run_dir / "host-9.pid").write_text("rubbish", "utf-8")
        assert sky("constellation", "status").returncode == 1
        sky.up("--hosts", "1")
        assert list(sky.host_pids()) == ["host-0"]
        assert sky("constellation", "down").returncode == 0
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.slow
@pytest.mark.parametrize("ip", ["127.0.0.1", "::1"])
def test_five_computers_share_a_plan(sky: Sky, tmp_path: Path, ip: str) -> None:
    """Five processes started by hand from one file, and a client that only has the file."""
    plan = tmp_path / "sky.json"
    try:
        with udp_socket(ip) as probe:
            probe.bind((ip, 0))
            base = 20_000 + probe.getsockname()[1] % 5_000
    except OSError as error:
        pytest.skip(f"{ip} cannot be bound here: {error}")
    hosts = [word for number in range(5) for word in ("--host", format_address(ip, base + 19 * number))]
    assert sky("constellation", "plan", "--out", str(plan), *hosts, "--delay", "off").returncode == 0
    computers = [sky.start("satellite", "--plan", str(plan), "--host", str(number)) for number in range(5)]
    try:
        for computer in computers:
            assert computer.stdout is not None and "19 satellites listen" in computer.stdout.readline()
        assert "95 satellites" in sky("constellation", "status", "--plan", str(plan)).stdout
        assert sky("constellation", "attach", str(plan)).returncode == 0
        (tmp_path / "value").write_bytes(b"five computers")
        assert sky("kv", "put", str(tmp_path / "value")).returncode == 0
        assert sky("kv", "get", "value", "--out", "-").stdout == "five computers"
        assert sky("constellation", "rotate").returncode == 0
        assert sky("kv", "get", "value", "--out", "-").stdout == "five computers"
    finally:
        for computer in computers:
            computer.send_signal(signal.SIGINT)
        endings = [computer.communicate(timeout=10)[1] for computer in computers]
    assert endings == [""] * 5
    assert [computer.returncode for computer in computers] == [0] * 5


@pytest.mark.slow
@pytest.mark.parametrize("access", ["hybrid", "onboard"])
def test_hosts_that_see_a_part_of_the_box_and_hosts_on_board(sky: Sky, tmp_path: Path, access: str) -> None:
    """Real delays, and a real orbit where it takes few satellites: 375 of them, five planes over the poles."""
    where = ("--preset", "starlink-b", "--hosts", "1", "--time-scale", "60")
    # A clock this fast is refused to a slow machine with more to move.
    with settings_file("memory_per_satellite = '4MiB'\n[ground]\nat = [50, 10]\nmask = 10") as words:
        started = sky("constellation", "up", "--base-port", "auto", "--access", access, *where, *words)
    assert started.returncode == 0, started.stderr
    status = sky.status()
    assert status["access"] == access and status["healthy"] and status["clocks_beyond_bound"] == 0
    assert status["strategy"] == ("hop" if access == "onboard" else "rotation_hop")
    value = os.urandom(200_000)
    (tmp_path / "value.bin").write_bytes(value)
    assert sky("kv", "put", str(tmp_path / "value.bin")).returncode == 0
    for _ in range(3):
        assert sky("kv", "get", "value.bin", "--out", str(tmp_path / "back.bin")).returncode == 0
        assert (tmp_path / "back.bin").read_bytes() == value
    mode = "los" if access == "onboard" else "onboard"
    other = sky("kv", "get", "value.bin", "--store", f"constellation?access={mode}")
    assert other.returncode == 2 and "its box moves differently" in other.stderr
    assert (sky("constellation", "rotate").returncode == 0) == (access == "hybrid")


@pytest.mark.slow
def test_a_down_while_an_up_is_still_measuring_waits_and_stops_what_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, stopped = RunDirectory(tmp_path / "run"), list[tuple[int, int]]()
    down = threading.Thread(target=lambda: stopped.append(supervisor.stop(RunDirectory(directory.path))))

    def measure(plan: ConstellationPlan) -> None:
        down.start()
        down.join(0.3)
        assert down.is_alive() and not stopped

    monkeypatch.setattr(carrying, "check_time_scale", measure)
    code, out, err = skymemory(
        "constellation", "up", "--hosts", "1", "--base-port", "auto", "--delay", "off", "--run-dir", str(directory.path)
    )
    assert code == 0 and "is up" in out, err
    down.join(60)
    assert stopped == [(1, 0)] and not directory.running() and not directory.path.exists()
