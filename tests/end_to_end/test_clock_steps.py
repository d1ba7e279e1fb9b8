"""The wall clocks of real host processes and clients are set while values are read and written."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end.in_process import skymemory
from tests.flight.daemon import build_lock
from tests.soak.slept_host import DYNAMIC, FLIGHT
from tests.soak.walls import Walls

from skymemory.testbed.connect import open_constellation
from skymemory.testbed.control import host_clocks_s, hosts_of_another_time
from skymemory.testbed.flight import DAEMON_SETTING
from skymemory.testbed.plan_file import CLOCK_NAME, load_plan

DAY_S = 86_400.0
HOSTS = [f"host-{number}" for number in range(5)]
SERVED_WITHIN_S = 10.0
VALUE = os.urandom(60_000)


class Sky:
    """A constellation whose processes have wall clocks that ``walls`` sets."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.run_dir, self.count, self.walls = folder / "run", 0, Walls(folder, HOSTS)
        self.environment = os.environ | self.walls.environment
        if kind == "c":
            with build_lock():
                subprocess.run(["make", "-s", "-C", FLIGHT, "dynamic"], check=True)
            self.environment |= {DAEMON_SETTING: str(DYNAMIC)}
        self.file = folder / "value"
        self.file.write_bytes(VALUE)

    def __call__(self, *words: str) -> str:
        """A command in a process of its own, that starts by the wall clock of now."""
        at = ("--store", f"constellation://{self.run_dir}") if words[0] == "kv" else ("--run-dir", str(self.run_dir))
        command = [sys.executable, "-m", "skymemory.cli.main", *words, *at]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def serves_a_new_client(self) -> None:
        self.count += 1
        name = f"value {self.count}"
        self("kv", "put", str(self.file), "--key", name)
        self("kv", "get", name, "--out", str(self.file.with_name("copy")))
        assert self.file.with_name("copy").read_bytes() == VALUE


@pytest.fixture(params=["python", "c"])
def sky(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sky]:
    if shutil.which(os.environ.get("CC", "cc")) is None or not sys.platform.startswith("linux"):
        pytest.skip("a wall clock of one's own needs a C compiler and Linux")
    sky = Sky(tmp_path, request.param)
    try:
        sky("constellation", "up", "--base-port", "auto", "--delay", "off", "--satellite", request.param)
        yield sky
    finally:
        skymemory("constellation", "down", "--run-dir", str(sky.run_dir))


@pytest.mark.slow
def test_wall_clocks_that_are_set_lock_no_host_out(sky: Sky) -> None:
    with open_constellation(sky.run_dir) as store:

        def serves_the_old_client() -> None:
            sky.count += 1
            key, until_s = hashlib.sha256(str(sky.count).encode()).digest(), time.monotonic() + SERVED_WITHIN_S
            while not store.put_many([(key, VALUE)])[0]:
                assert time.monotonic() < until_s
            assert bytes(store.get_many([key])[0] or b"") == VALUE

        serves_the_old_client()
        sky.serves_a_new_client()
        for ahead_s in (-40.0, 40.0, -DAY_S, DAY_S):
            sky.walls.set(ahead_s)
            serves_the_old_client()
            sky.serves_a_new_client()
        sky.walls.set(0.0)
        for ahead_s in (-DAY_S, 40.0):
            sky.walls.set(ahead_s, "host-2")
            serves_the_old_client()
            sky.serves_a_new_client()
    assert "no host process is dead" in sky("constellation", "revive")
    # A host that was started by another clock than the others' is refused by them, and started again.
    clock = sky.run_dir / CLOCK_NAME
    right = clock.read_text("utf-8")
    wrong = json.loads(right)
    wrong["unix_at_boot_s"] += 3_600.0
    clock.write_text(json.dumps(wrong), "utf-8")
    os.kill(json.loads((sky.run_dir / "host-1.pid").read_text("utf-8"))["pid"], 9)
    until_s = time.monotonic() + 60
    while "host-1" not in sky("constellation", "revive"):
        assert time.monotonic() < until_s
    clock.write_text(right, "utf-8")
    plan = load_plan(sky.run_dir / "constellation.json")
    assert hosts_of_another_time(host_clocks_s(plan, 5.0)).keys() == {"host-1"}
    said = sky("constellation", "revive")
    assert re.search(r"the clock of host-1 is 3(600|599)\b", said) and "started again, empty: host-1" in said
    assert not hosts_of_another_time(host_clocks_s(plan, 5.0))
    sky.serves_a_new_client()
