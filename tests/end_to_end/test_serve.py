"""``skymemory serve`` as a user runs it: it answers, says what is wrong, and ends at once on a signal."""

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
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="an engine needs skymemory[hf]")
pytest.importorskip("aiohttp", reason="serving needs skymemory[router]")

from skymemory.cli.main import main
from skymemory.errors import InvalidInput

pytest.importorskip("skymemory_lab", reason="the laboratory is not installed")

from skymemory_lab.engine.run import EngineSettings, run_engine, run_engines

pytestmark = pytest.mark.engine
SERVE = [sys.executable, "-m", "skymemory", "serve"]
PATIENCE_S = 60.0


@contextmanager
def serving(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [*SERVE, "--listen", "127.0.0.1:0", "--cache", "4MiB", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found is not None, line or process.communicate(timeout=PATIENCE_S)
        yield process, found[0]
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def test_it_answers_and_ctrl_c_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    answers: list[dict[str, Any]] = []

    def ask_and_interrupt() -> None:
        try:
            deadline_s = time.monotonic() + PATIENCE_S
            while not said and time.monotonic() < deadline_s:
                time.sleep(0.02)
            url = said[0].split(" at ")[1]
            body = json.dumps({"model": "mine", "prompt": "git is", "max_tokens": 4}).encode()
            with urllib.request.urlopen(f"{url}/completions", body, timeout=PATIENCE_S) as answer:
                answers.append(json.load(answer))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("skymemory_lab.cli.serve._say", said.append)
    client = threading.Thread(target=ask_and_interrupt)
    client.start()
    assert main(["serve", "--name", "mine", "--listen", "127.0.0.1:0", "--cache", "4MiB"]) == 0
    client.join()
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [4]
    assert said[0].startswith("mine at http://127.0.0.1:") and "prefix cache of 4.0 MiB" in said[1]


@pytest.mark.slow
def test_several_engines_stop_together_when_one_of_them_dies() -> None:
    with serving("--engines", "3") as (process, _):
        children = [int(word) for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        assert len(children) == 3
        os.kill(children[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1 and str(children[1]) in errors
        assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_several_engines_cannot_publish_at_one_address() -> None:
    with pytest.raises(InvalidInput, match="5557"):
        run_engines(EngineSettings(kv_events="tcp://127.0.0.1:5557"), 2, print)


def test_an_unavailable_address_is_reported_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for settings in (EngineSettings(port=port), EngineSettings(host="192.0.2.1", port=port)):
            with pytest.raises(InvalidInput, match=str(port)):
                run_engine(replace(settings, model="nowhere"), print)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--listen", "8000"], "HOST:PORT"),
        (["--listen", "127.0.0.1:70000"], "0 to 65535"),
        (["--model", "nowhere"], "no model 'nowhere'"),
        (["--cache", "much"], "size"),
        (["--block-tokens", "0"], "1 to 4096"),
        (["--running", "0"], "--running 0"),
        (["--settings", "policy = 'best'"], "policy: 'best': expected one of lru"),
        (["--settings", "waiting = 0"], "waiting: 0: expected 1"),
        (["--role", "producer"], "give its address by --store"),
        (["--role", "decoder"], "there is no 'decoder'"),
        (["--store", "memory://1GiB"], "skymemory store serve memory://1GiB"),
        (["--listen", "127.0.0.1:0", "--store", "nowhere://"], "redis://HOST"),
        (["--store", "redis://localhost", "--settings", "wait = 'soon'"], "wait: 'soon' is not a duration"),
    ],
)
def test_bad_input_is_refused_before_anything_is_loaded(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if "--settings" in words:
        (tmp_path / "engine.toml").write_text(words[-1])
        words = [*words[:-1], str(tmp_path / "engine.toml")]
    assert main(["serve", *words]) == 2
    assert message in capsys.readouterr().err
