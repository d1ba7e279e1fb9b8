"""The run directory: who is alive, whose number was recycled, and that two starters never meet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymemory.errors import ConstellationError, InvalidInput, NoConstellation
from skymemory.testbed import supervisor
from skymemory.testbed.plan import make_plan
from skymemory.testbed.run_directory import ProcessRecord, RunDirectory, default_run_directory, process_start
from skymemory.testbed.supervisor import end_processes, stop


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.create()
    return made


def test_the_default_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYMEMORY_RUN_DIR", "/somewhere")
    assert default_run_directory() == Path("/somewhere")
    monkeypatch.delenv("SKYMEMORY_RUN_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_run_directory() == Path("/run/user/7/skymemory")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_run_directory().name == f"skymemory-{os.getuid()}"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_directory_that_others_may_write_in_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(InvalidInput, match="chmod 700"):
        RunDirectory(tmp_path).create()


@pytest.mark.brief()
def test_a_record_distinguishes_the_living_from_the_dead(
    directory: RunDirectory, sleeper: subprocess.Popen[bytes]
) -> None:
    directory.write_record("host-0", sleeper.pid)
    record = directory.read_record("host-0")
    assert record is not None and record.alive
    assert directory.living() == {"host-0": record}
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not record.alive, "a zombie is dead"
    sleeper.wait()
    assert not record.alive
    assert directory.living() == {}
    with pytest.raises(ConstellationError, match="has already ended"):
        directory.write_record("host-0", sleeper.pid)


def test_a_recycled_number_is_another_process_and_is_never_touched(
    directory: RunDirectory, sleeper: subprocess.Popen[bytes]
) -> None:
    directory.pid_path("host-0").write_text(json.dumps({"pid": sleeper.pid, "start": "boot/1"}), "utf-8")
    record = directory.read_record("host-0")
    assert record is not None and not record.alive
    record.send_signal(signal.SIGKILL)
    assert end_processes([record]) == 0
    assert sleeper.poll() is None
    assert process_start(sleeper.pid) is not None


@pytest.mark.parametrize(
    "text", ["", "12", "{", '{"pid": 1, "start": "x"}', '{"pid": -5, "start": "x"}', '{"pid": "7"}', "[]", "null"]
)
def test_a_damaged_pid_file_names_no_process(directory: RunDirectory, text: str) -> None:
    directory.pid_path("host-0").write_text(text, "utf-8")
    assert directory.read_record("host-0") is None
    assert directory.living() == {}


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="processes are found by /proc")
@pytest.mark.parametrize("damage", [b"", b"\xff\xfe\x00", b'{"pid": "7"}', None])
def test_a_host_whose_pid_file_is_damaged_or_gone_is_found_and_stopped(
    directory: RunDirectory, damage: bytes | None
) -> None:
    """It would run forever, and `down` had removed the last trace of it."""
    words = ["satellite", "--plan", "x", "--host", "host-1", "--run-dir"]
    wait = [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(60)", *words]
    with (
        subprocess.Popen([*wait, str(directory.path)], stdout=subprocess.PIPE) as ours,
        subprocess.Popen([*wait, f"{directory.path}2"], stdout=subprocess.PIPE) as others,
    ):
        try:
            assert ours.stdout and others.stdout and ours.stdout.readline() == others.stdout.readline() == b"up\n"
            start = process_start(ours.pid)
            assert start is not None and directory.running() == {"host-1": ProcessRecord(ours.pid, start)}
            if damage is not None:
                directory.pid_path("host-1").write_bytes(damage)
                assert directory.living() == {"host-1": ProcessRecord(ours.pid, start)}
            assert stop(directory) == (1, 0)
            assert ours.wait(60) == -signal.SIGTERM and others.poll() is None
        finally:
            ours.kill()
            others.kill()


def test_ending_asks_first_and_then_insists(directory: RunDirectory) -> None:
    deaf = (
        "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"deaf\n"
        start = process_start(process.pid)
        assert start is not None
        assert end_processes([ProcessRecord(process.pid, start)], grace_s=0.1) == 1
        assert process.wait() == -signal.SIGKILL


def test_only_one_may_start_or_stop(directory: RunDirectory) -> None:
    other = RunDirectory(directory.path).locked()
    with directory.locked(), pytest.raises(ConstellationError, match="starting or stopping"), other:
        pytest.fail("two hold the lock")
    assert not directory.path.exists(), "nothing is left behind"
    directory.create()
    directory.write_plan(make_plan())
    with directory.locked():
        pass
    assert sorted(path.name for path in directory.path.iterdir()) == ["clock.json", "constellation.json", "lock"]
    with directory.locked():
        pass


def test_clearing_leaves_what_is_not_ours(directory: RunDirectory) -> None:
    mine = directory.path / "notes.txt"
    mine.write_text("keep", "utf-8")
    directory.write_plan(make_plan())
    directory.log_path("host-0").write_text("x", "utf-8")
    for left_by_the_killed in (".constellation.json.17", ".host-0.pid.17", ".keys.x1_y2", ".outages.json.x1"):
        (directory.path / left_by_the_killed).write_text("x", "utf-8")
    with directory.locked():
        directory.sweep()
    assert sorted(directory.path.iterdir()) == sorted([mine, directory.path / "lock"])


def test_no_plan_is_no_constellation_and_a_dead_one_neither(
    directory: RunDirectory, sleeper: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(NoConstellation, match="constellation up"):
        directory.running_plan()
    directory.write_plan(make_plan())
    assert directory.running_plan() == make_plan(), "a plan without processes here runs elsewhere"
    directory.write_record("host-0", sleeper.pid)
    assert directory.running_plan() == make_plan()
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(NoConstellation, match="have died"):
        directory.running_plan()


def test_log_tails_are_short(directory: RunDirectory) -> None:
    assert directory.log_tail("host-0") == ""
    directory.log_path("host-0").write_text("\n".join(f"line {n}" for n in range(10_000)) + "\n", "utf-8")
    assert directory.log_tail("host-0", lines=2) == "line 9998\nline 9999"


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", "utf-8")
    with pytest.raises(InvalidInput, match="run directory"):
        RunDirectory(tmp_path / "file" / "run").create()


_ENDS = {
    "computes": "until = time.monotonic() + 1.5\nwhile time.monotonic() < until: pass\n"
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])\ntime.sleep(60)",
    "is stopped": "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])\nos.kill(os.getpid(), signal.SIGSTOP)\n"
    "time.sleep(60)",
    "hangs": "time.sleep(60)",
    "spins": "while True: pass",
}


@pytest.mark.brief("is stopped-0", "hangs-1")
@pytest.mark.parametrize(
    ("behaviour", "forced"),
    [("computes", 0), ("is stopped", 0), ("hangs", 1), pytest.param("spins", 1, marks=pytest.mark.slow)],
)
def test_who_is_busy_is_given_time_to_end_and_who_hangs_is_not(
    behaviour: str, forced: int, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host in overload sees its signal late: three seconds were too few, and it was killed."""
    monkeypatch.setattr(supervisor, "MOST_GRACE_S", 6.0)
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\nprint(flush=True)\n"
    code = f"import os, signal, time\n{block}{_ENDS[behaviour]}"
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        if behaviour == "is stopped":
            os.waitpid(process.pid, os.WUNTRACED)
        directory.write_record("host-0", process.pid)
        assert end_processes(directory.living().values(), grace_s=0.6) == forced
        assert process.wait(60) == -(signal.SIGKILL if forced else signal.SIGTERM)
    finally:
        process.kill()
