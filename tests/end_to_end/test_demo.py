"""The demo as a user runs it, in its quick form, and what it says of bad input."""

from __future__ import annotations

import json
import os
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
    for row in report["rows"]:
        assert (row["tokens_from_sky"], row["prompt_tokens"], row["satellites"]) == (512, 524, 10)
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
    assert demo.stdout is not None and "constellation up" in demo.stdout.readline()
    demo.kill()
    demo.communicate(timeout=30)
    deadline_s = time.monotonic() + 30
    while processes_of(tmp_path) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert processes_of(tmp_path) == []


@pytest.mark.brief("options1")
@pytest.mark.parametrize("options", [["--tokens", "128"], ["--model", "no-such-folder"]])
def test_bad_options_are_refused_before_anything_is_started(options: list[str]) -> None:
    answer = subprocess.run([*DEMO, *options], capture_output=True, text=True, timeout=280)
    assert answer.returncode == 2 and options[1] in answer.stderr and answer.stdout == ""


@pytest.mark.parametrize(("content", "words"), [(b"\xff\xfe\x00binary", "not UTF-8"), (b"a few words", "at least 129")])
def test_a_document_that_is_no_text_or_too_short_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    document = tmp_path / "document"
    document.write_bytes(content)
    answer = subprocess.run([*DEMO, "--document", str(document)], capture_output=True, text=True, timeout=280)
    assert answer.returncode == 2 and words in answer.stderr
    assert "Traceback" not in answer.stderr
