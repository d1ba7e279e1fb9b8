"""Satellites of one release and clients of another, as real processes, and satellites of both in one constellation."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.releases.conftest import Release

from skymemory.protocol.wire import Op
from skymemory.testbed.connect import control_client
from skymemory.testbed.plan_file import load_plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LATER_OP = 0x2A


def a_later_operation() -> Op:
    """A member that ``Op`` of this release lacks."""
    later = int.__new__(Op, LATER_OP)
    later._name_, later._value_ = "LATER", LATER_OP
    return later


VALUES = 4


class Sky:
    """One run directory that both releases use."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.started: list[subprocess.Popen[bytes]] = []

    def __call__(self, release: Release, *words: str) -> str:
        return release.run("-m", "skymemory", *words, SKYMEMORY_RUN_DIR=str(self.run_dir)).stdout

    def up(self, release: Release, *words: str) -> None:
        self(release, "constellation", "up", "--base-port", "auto", "--delay", "off", "--auth", "off", *words)

    def answering(self, release: Release) -> int:
        return sum(host["answering"] for host in self.status(release)["hosts"])

    def status(self, release: Release) -> dict[str, Any]:
        """Whether or not all are well."""
        asked = [sys.executable, "-m", "skymemory", "constellation", "status", "--json"]
        environment = release.environment(SKYMEMORY_RUN_DIR=str(self.run_dir))
        said = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=280, check=False)
        found: dict[str, Any] = json.loads(said.stdout)
        return found

    def replace_host(self, number: int, release: Release) -> None:
        """One host dies, and its satellites come back, empty, with another release."""
        pid = json.loads((self.run_dir / f"host-{number}.pid").read_text("utf-8"))["pid"]
        os.kill(pid, signal.SIGKILL)
        deadline_s = time.monotonic() + 30
        while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        command = ["-m", "skymemory", "satellite", "--plan", str(self.run_dir / "constellation.json")]
        words = [sys.executable, *command, "--host", str(number), "--run-dir", str(self.run_dir)]
        log = (self.run_dir.parent / f"host-{number}.log").open("wb")
        self.started.append(
            subprocess.Popen(words, env=release.environment(), cwd=release.sources.parent, stdout=log, stderr=log)
        )
        log.close()

    def stop(self, release: Release) -> None:
        for process in self.started:
            process.terminate()
        for process in self.started:
            process.wait(20)
        self(release, "constellation", "down")


@pytest.fixture
def sky(tmp_path: Path, newer: Release) -> Iterator[Sky]:
    made = Sky(tmp_path / "run")
    yield made
    made.stop(newer)


@pytest.fixture
def values(tmp_path: Path) -> dict[str, bytes]:
    found = {f"value-{number}": os.urandom(200_000 + number) for number in range(VALUES)}
    for name, value in found.items():
        (tmp_path / name).write_bytes(value)
    return found


def put(sky: Sky, release: Release, values: dict[str, bytes]) -> None:
    for name in values:
        sky(release, "kv", "put", str(sky.run_dir.parent / name))


def got(sky: Sky, release: Release, values: dict[str, bytes]) -> int:
    """How many come back right."""
    out = sky.run_dir.parent / "out"
    found = 0
    for name, value in values.items():
        sky(release, "kv", "get", name, "--out", str(out))
        found += out.read_bytes() == value
        out.unlink()
    return found


def until(holds: Callable[[], bool], patience_s: float = 30.0) -> bool:
    deadline_s = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.2)
    return True


@pytest.mark.parametrize("flown_by", ["older", "newer"])
def test_a_constellation_serves_clients_of_the_other_release(
    flown_by: str, sky: Sky, older: Release, newer: Release, values: dict[str, bytes]
) -> None:
    satellites, client = (older, newer) if flown_by == "older" else (newer, older)
    sky.up(satellites)
    assert sky.answering(client) == 95
    put(sky, client, values)
    assert got(sky, satellites, values) == got(sky, client, values) == VALUES
    assert set(re.findall(r"value-\d", sky(client, "kv", "list"))) == set(values)
    sky(client, "kv", "pin", "value-0", "--ttl", "60s")
    sky(client, "kv", "put", str(sky.run_dir.parent / "value-1"), "--key", "brief", "--ttl", "60s")
    sky(client, "constellation", "rotate", "--slots", "3", "--planes", "1")
    assert got(sky, client, values) == got(sky, satellites, values) == VALUES
    sky(client, "kv", "delete", "value-2")
    assert "value-2" not in sky(satellites, "kv", "list")


@pytest.mark.parametrize("flown_by", ["older", "newer"])
def test_macs_on_commands_alone_are_understood_both_ways(
    flown_by: str, sky: Sky, older: Release, newer: Release, values: dict[str, bytes]
) -> None:
    satellites, client = (older, newer) if flown_by == "older" else (newer, older)
    sky.up(satellites, "--auth", "on")
    put(sky, client, values)
    sky(client, "constellation", "rotate", "--slots", "1")
    assert got(sky, client, values) == got(sky, satellites, values) == VALUES


def test_an_older_release_refuses_a_plan_of_signed_answers(tmp_path: Path, older: Release, newer: Release) -> None:
    """Its clients would believe a stranger, and its satellites would sign nothing."""
    plan, hosts = tmp_path / "sky.json", ["--host", "127.0.0.1:26000"]
    newer.run("-m", "skymemory", "constellation", "plan", "--out", str(plan), *hosts)
    for words in (["satellite", "--host", "0", "--plan"], ["constellation", "attach"]):
        asked = [sys.executable, "-m", "skymemory", *words, str(plan)]
        environment = older.environment(SKYMEMORY_RUN_DIR=str(tmp_path / "run"))
        done = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2 and "auth 'answers': expected one of off, on, every" in done.stderr, done.stderr


def test_older_satellites_that_drop_a_question_go_on_serving(
    sky: Sky, older: Release, newer: Release, values: dict[str, bytes]
) -> None:
    """A later operation is asked of all 95, which know nothing of it and do not say so."""
    sky.up(older)
    put(sky, newer, values)
    client = control_client(load_plan(sky.run_dir / "constellation.json"), 10.0)
    try:
        with client.lock:
            later = a_later_operation()
            everyone = list(load_plan(sky.run_dir / "constellation.json").torus.satellites())
            asked = [client.machine.ask(later, b"whatever", here, client.now_s()) for here in everyone]
            answers = client.run(asked)
        assert {answer.report.failure for answer in answers.values()} == {"unsupported"}
        assert not client.machine._peers.suspects
        with client.lock:
            answers = client.run([client.machine.ask(Op.PING, b"", here, client.now_s()) for here in everyone])
        assert all(answer.ok for answer in answers.values())
    finally:
        client.close()
    assert got(sky, newer, values) == VALUES


def test_this_releases_satellites_say_that_they_do_not_know_an_operation(sky: Sky, newer: Release) -> None:
    sky.up(newer)
    plan = load_plan(sky.run_dir / "constellation.json")
    client = control_client(plan, 5.0)
    try:
        with client.lock:
            later = a_later_operation()
            everyone = plan.torus.satellites()
            answers = client.run([client.machine.ask(later, b"", here, client.now_s()) for here in everyone])
        assert {answer.report.failure for answer in answers.values()} == {"unsupported"}
        status = sky.status(newer)
        assert status["totals"]["packets_unsupported"] >= 95 and status["of_older_releases"] == 0
    finally:
        client.close()


def test_values_are_handed_over_between_satellites_of_both_releases(
    sky: Sky, older: Release, newer: Release, values: dict[str, bytes]
) -> None:
    """Two of five hosts are of the older release. The box moves through all slots and planes of all of them."""
    sky.up(newer)
    for number in (1, 3):
        sky.replace_host(number, older)
    assert until(lambda: sky.answering(newer) == 95)
    put(sky, newer, values)
    for step, release in enumerate((newer, older, newer, older, newer)):
        sky(release, "constellation", "rotate", "--slots", "4", "--planes", "1")
        assert got(sky, newer, values) == VALUES, step
    assert got(sky, older, values) == VALUES
    status = sky.status(newer)
    assert status["totals"]["chunks_migrated_out"] > VALUES * 30
    assert status["of_older_releases"] == 38 and "operations" not in status["totals"]
