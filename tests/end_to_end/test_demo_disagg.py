"""`skymemory demo disagg` with engines of our own: real satellites, a real daemon, two engines and the router."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="an engine needs skymemory[hf]")
pytest.importorskip("aiohttp", reason="serving needs skymemory[router]")
pytest.importorskip("redis", reason="the store daemon's clients need skymemory[redis]")

DEMO = [sys.executable, "-m", "skymemory", "demo", "disagg"]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_one_prefills_another_decodes_and_refused_requests_cost_nothing() -> None:
    words = ["--engine", "own", "--requests", "4", "--burst", "8", "--json"]
    done = subprocess.run([*DEMO, *words], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["same_words"] and len(shown["requests"]) == 4
    for row in shown["requests"]:
        assert row["moved"] + row["decode_computed"] == row["tokens"] and row["decode_computed"] < 16
    first, again = shown["requests"][:2]
    assert first["prefilled"] == first["tokens"] and again["prefilled"] < 64, "its document was prefilled before"
    burst = shown["burst"]
    assert burst["admitted"] + burst["refused"] == 8 and burst["failed"] == burst["without_retry_after"] == 0
    assert burst["prefills"] == burst["admitted"] and burst["kept"] == burst["admitted"]


def _heirs_of(folder: Path) -> list[str]:
    """Command lines of processes that were given ``folder`` as their place for temporary files."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={folder}\0".encode() in path.read_bytes():
                found.append((path.parent / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("started", [2, 7, 9])
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, number: signal.Signals, started: int) -> None:
    demo = subprocess.Popen(
        [*DEMO, "--engine", "own"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    ends_s = time.monotonic() + 60
    while len(_heirs_of(tmp_path)) < started and demo.poll() is None and time.monotonic() < ends_s:
        time.sleep(0.05)
    assert len(_heirs_of(tmp_path)) >= started
    demo.send_signal(number)
    _, said = demo.communicate(timeout=60)
    if number == signal.SIGKILL:
        while _heirs_of(tmp_path) and time.monotonic() < ends_s + 30:
            time.sleep(0.1)
    else:
        assert demo.returncode == 130, said
        assert list(tmp_path.iterdir()) == []
    assert _heirs_of(tmp_path) == []


@pytest.mark.parametrize("words", [["--requests", "0"], ["--burst", "1"], ["--python", "nowhere", "--engine", "vllm"]])
def test_refuses_what_it_cannot_run(words: list[str]) -> None:
    done = subprocess.run([*DEMO, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and words[0] in done.stderr
