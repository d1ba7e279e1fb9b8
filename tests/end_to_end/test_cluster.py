"""``skymemory cluster`` as a user runs it: up, asked, killed in parts, down; and nothing is left, however it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="an engine needs skymemory[hf]")
pytest.importorskip("aiohttp", reason="serving needs skymemory[router]")
pytest.importorskip("redis", reason="the store daemon's clients need skymemory[redis]")

from tests.end_to_end.test_handover import ask, ids_of, text, two_steps

pytestmark = [pytest.mark.engine, pytest.mark.slow]
CLUSTER = [sys.executable, "-m", "skymemory", "cluster"]
PATIENCE_S = 200.0
PAIR = """
[store]
serve = "memory://256MiB"
[[instances]]
role = "prefill"
options = ["--cache", "64MiB"]
[[instances]]
role = "decode"
options = ["--cache", "64MiB"]
"""


class Run:
    """A run directory with a short path, and the verb in it."""

    def __init__(self, folder: Path) -> None:
        self.directory, self.file = folder / "run", folder / "cluster.toml"

    def begin(self, action: str, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*CLUSTER, action, *words, "--run-dir", str(self.directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __call__(self, action: str, *words: str) -> tuple[int, str, str]:
        process = self.begin(action, *words)
        out, errors = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out, errors

    def up(self, content: str) -> dict[str, Any]:
        self.file.write_text(content, "utf-8")
        code, _, errors = self("up", str(self.file))
        assert code == 0, errors
        return self.status()

    def status(self) -> dict[str, Any]:
        state = json.loads(self("status", "--json")[1])
        return {**state, "services": {one["name"]: one for one in state["services"]}}

    def processes(self) -> list[str]:
        """Command lines of processes that have to do with this directory."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except OSError:
                continue
            if str(self.directory) in line:
                found.append(line)
        return found


@pytest.fixture
def run() -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as folder:
        made = Run(Path(folder))
        try:
            yield made
            assert made.processes() == []
        finally:
            made("down")


def until(what: Any) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline_s, "it did not come to that"
        time.sleep(0.1)


def test_up_serves_restarts_what_dies_and_down_leaves_nothing(run: Run) -> None:
    state = run.up(PAIR)
    assert state["ready"] and state["supervised"]
    assert {one["state"] for one in state["services"].values()} == {"healthy"}
    p, d = (state["services"][name]["address"] for name in ("prefill-1", "decode-1"))
    made, ids = {"p_url": p, "d_url": d}, ids_of(200, seed=1)
    answers = [two_steps(made, ids, overlap=True), two_steps(made, ids, overlap=False)]
    assert [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in answers] == [192, 192]
    code, _, errors = run("up", str(run.file))
    assert code == 1 and "runs already" in errors and run.status()["services"] == state["services"]

    os.kill(state["services"]["decode-1"]["pid"], signal.SIGKILL)
    until(lambda: run.status()["services"]["decode-1"]["restarts"] == 1)
    until(lambda: run("status")[0] == 0)
    again = run.status()["services"]["decode-1"]
    assert again["last_end"] == "killed by SIGKILL" and again["address"] == d
    assert text(ask(d, ids, 8)) == text(answers[0])
    code, log, _ = run("logs", "decode-1", "--lines", "3")
    assert code == 0 and "fetches blocks from" in log

    code, out, _ = run("down")
    assert code == 0 and "3 processes" in out and run.processes() == []
    assert run("status")[0] == 1


def test_a_failed_start_leaves_nothing_and_shows_the_log(run: Run) -> None:
    run.file.write_text(PAIR + '[[instances]]\nname = "odd"\noptions = ["--running", "0"]\n', "utf-8")
    code, _, errors = run("up", str(run.file))
    assert code == 1 and "odd-1 did not start (exit code 2)" in errors and "--running 0: expected" in errors
    assert run.processes() == [] and run("status")[0] == 1
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run.file.write_text(f"[[instances]]\nport = {port}\n", "utf-8")
        code, _, errors = run("up", str(run.file))
    assert code == 2 and f"both-1 cannot listen at http://127.0.0.1:{port}" in errors


def test_ctrl_c_while_it_starts_leaves_nothing(run: Run) -> None:
    run.file.write_text(PAIR, "utf-8")
    process = run.begin("up", str(run.file))
    until(lambda: len(run.processes()) >= 5)  # up, supervisor, store, two engines
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    process.communicate()
    assert run.processes() == []


def test_in_the_foreground_ctrl_c_ends_it(run: Run) -> None:
    run.file.write_text(PAIR, "utf-8")
    process = run.begin("up", str(run.file), "--foreground")
    assert process.stdout is not None
    until(lambda: "until Ctrl-C" in process.stdout.readline())  # type: ignore[union-attr]
    assert run("status")[0] == 0
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 0
    process.communicate()
    assert run.processes() == []


def test_down_ends_what_a_killed_supervisor_left(run: Run) -> None:
    state = run.up(PAIR)
    os.kill(state["pid"], signal.SIGKILL)
    # Our own processes end with it, as their standard input does.
    until(lambda: not run.processes())
    code, out, _ = run("status")
    assert code == 1 and "its supervisor is gone" in out
    assert run("down")[0] == 0 and run("status")[0] == 1


def test_a_router_in_front_of_two_instances_over_a_constellation(run: Run) -> None:
    content = """
[store]
constellation = ["--delay", "off"]
[[instances]]
count = 2
[router]
listen = "127.0.0.1:0"
"""
    state = run.up(content)
    url = state["services"]["router"]["address"]
    ids = ids_of(200, seed=2)
    answers = [ask(url, ids, 8, model="small") for _ in range(3)]
    assert len({text(one) for one in answers}) == 1
    assert run("down")[0] == 0 and run.processes() == []
