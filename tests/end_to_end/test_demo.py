"""The demo as a user runs it, in its quick form, and what it says of bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.end_to_end.processes import processes_of

pytest.importorskip("transformers", reason="the demo needs skymemory[hf]")
pytestmark = pytest.mark.engine

DEMO = [sys.executable, "-m", "skymemory", "demo", "--quick"]


@pytest.mark.slow
def test_the_quick_demo_serves_every_codec_from_the_sky_and_leaves_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    answer = subprocess.run([*DEMO, "--json"], env=environment, capture_output=True, text=True, timeout=280)
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report["identical"] is True
    assert [row["codec"] for row in report["rows"]] == ["raw", "quanto8", "hqq8"]
    size = report["size"]  # smaller where the computer is slow, or busy
    assert size["dtype"] in ("bfloat16", "float32") and report["estimate_s"] > 0
    for row in report["rows"]:
        assert row["prompt_tokens"] == size["tokens"] and row["tokens_from_sky"] == size["tokens"] - 12
        assert row["satellites"] == 10 and row["new_tokens"] == size["new_tokens"]
    raw, quanto, hqq = report["rows"]
    assert raw["rms_error"] == 0 and 0 < quanto["rms_error"] < 0.05 and 0 < hqq["rms_error"] < 0.05
    assert quanto["block_bytes"] < 0.6 * raw["block_bytes"] and hqq["block_bytes"] < 0.6 * raw["block_bytes"]
    assert report["rotation"]["chunks_migrated"] > 0 and report["rotation"]["settled"] is True
    assert processes_of(tmp_path) == [] and list(tmp_path.glob("skymemory-demo-*")) == []


def _started(folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(DEMO, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    demo = _started(tmp_path)
    deadline_s = time.monotonic() + 60
    while not processes_of(tmp_path) and demo.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert processes_of(tmp_path)
    demo.send_signal(number)
    demo.communicate(timeout=30)
    assert demo.returncode == 130
    assert processes_of(tmp_path) == [] and list(tmp_path.glob("skymemory-demo-*")) == []


@pytest.mark.slow
def test_a_killed_demo_leaves_no_process(tmp_path: Path) -> None:
    demo = _started(tmp_path)
    assert demo.stdout is not None and any("constellation up" in line for line in demo.stdout)
    demo.kill()
    demo.communicate(timeout=30)
    deadline_s = time.monotonic() + 30
    while processes_of(tmp_path) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert processes_of(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--tokens", "140", "--model", "small-random")], ids=["chosen", "asked-for"])
def test_it_is_never_silent_for_long_and_ends_with_its_estimate_and_its_time(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    began_s = last_s = time.monotonic()
    demo = subprocess.Popen([*DEMO, *options], env=environment, stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    silences, lines = [], []
    for line in demo.stdout:
        now_s = time.monotonic()
        silences.append(now_s - last_s)
        last_s = now_s
        lines.append(line)
    assert demo.wait(30) == 0
    text = "".join(lines)
    # A line after 3.5 s of silence; what a busy computer adds to that is no fault of the demo's.
    assert max(silences) < 8 and silences[0] < 8, (silences, text)
    estimate = re.search(r"estimate: about (\d+) s in all", text)
    took = re.search(r"took (\d+) s \(estimated (\d+) s\)", text)
    assert estimate and took and text.index("estimate:") < text.index("took ")
    assert abs(int(took[2]) - int(estimate[1])) <= 1
    assert abs(int(took[1]) - (last_s - began_s)) < 10


@pytest.mark.brief()
@pytest.mark.parametrize("options", [["--tokens", "128"], ["--model", "no-such-folder"]])
def test_bad_options_are_refused_before_anything_is_started(options: list[str]) -> None:
    answer = subprocess.run([*DEMO, *options], capture_output=True, text=True, timeout=280)
    assert answer.returncode == 2 and options[1] in answer.stderr and answer.stdout == ""


@pytest.mark.brief("UTF-16")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"\xff\xfe\x00binary", "UTF-16, expected UTF-8", id="UTF-16"),
        (b"\x80binary", "not UTF-8"),
        (b"a few words", "at least 129"),
    ],
)
def test_a_document_that_is_no_text_or_too_short_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    document = tmp_path / "document"
    document.write_bytes(content)
    answer = subprocess.run([*DEMO, "--document", str(document)], capture_output=True, text=True, timeout=280)
    assert answer.returncode == 2 and words in answer.stderr
    assert "Traceback" not in answer.stderr
