"""The routing demo as a user runs it: its report, Ctrl-C in the middle, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the demo needs skymemory[hf]")
pytest.importorskip("aiohttp", reason="the demo needs skymemory[router]")

from skymemory.cli.main import main

pytestmark = pytest.mark.engine
DEMO = [sys.executable, "-m", "skymemory", "demo", "route"]
PLAIN = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}


def children_of(marker: str) -> list[int]:
    """Processes whose environment has ``marker``, the demo's own among them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_every_strategy_answers_everything_and_prefixes_are_found() -> None:
    answer = subprocess.run([*DEMO, "--quick", "--json", "--seed", "3"], capture_output=True, text=True, timeout=400)
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report["sound"] is True
    rows = {row["strategy"]: row for row in report["rows"]}
    assert set(rows) == {"random", "round-robin", "least-load", "approximate", "least-ttft"}
    for row in rows.values():
        assert row["answered"] == report["requests"] == sum(row["requests_by_server"]) and row["failed"] == 0
        assert row["prompt_tokens"] == report["prompt_tokens"]
        assert 0 < row["ttft_mean_s"] <= row["ttft_p99_s"] and row["ttft_p90_s"] <= row["ttft_p99_s"]
        assert row["hit_ratio"] <= report["best_hit_ratio"] + 0.01
    # The endpoint picker's score gives prefixes up where queues are long: it is only no worse than chance then.
    assert rows["least-ttft"]["hit_ratio"] > rows["random"]["hit_ratio"] + 0.03
    assert rows["approximate"]["hit_ratio"] > rows["random"]["hit_ratio"] - 0.02
    assert "\x1b" not in answer.stderr and "answered" in answer.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_precise_follows_the_engines_events() -> None:
    words = ["--strategies", "precise,random", "--requests", "24", "--quick", "--json", "--seed", "3"]
    answer = subprocess.run([*DEMO, *words], capture_output=True, text=True, timeout=280)
    assert answer.returncode == 0, answer.stderr
    rows = {row["strategy"]: row for row in json.loads(answer.stdout)["rows"]}
    assert rows["precise"]["hit_ratio"] > rows["random"]["hit_ratio"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_however_it_is_ended_nothing_is_left(number: signal.Signals) -> None:
    marker = f"SKYMEMORY_TEST_MARK={time.monotonic_ns()}"
    name, value = marker.split("=")
    demo = subprocess.Popen(
        [*DEMO, "--quick"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**PLAIN, name: value}
    )
    assert demo.stdout is not None
    for line in demo.stdout:
        if "tokens/s" in line:
            break
    time.sleep(1.5)  # in the middle of the first strategy
    assert len(children_of(marker)) == 7  # the demo, four engines and who forked them, the router
    demo.send_signal(number)
    _, errors = demo.communicate(timeout=30)
    assert demo.returncode == (130 if number != signal.SIGKILL else -signal.SIGKILL) and "Traceback" not in errors
    deadline_s = time.monotonic() + 20
    while children_of(marker) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert children_of(marker) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--requests", "3"], "10 to 5000"),
        (["--strategies", "luck"], "no routing strategy 'luck'"),
        (["--strategies", ","], "no strategy"),
        (["--workload", "other"], "tenants"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "route", *words]) == 2
    assert message in capsys.readouterr().err
