"""The prepared measurement of the host tier on an accelerator runs, small and on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/accelerator.py"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--host-tier", "--dry-run", "--repeats", "1", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="/dev/shm is not here")
def test_the_script_compares_bytes_and_measures_copies_and_the_first_token(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text("utf-8"))["rows"]
    ways = {row["way"]: row for row in rows}
    assert ways["trial"]["wrong_bytes"] == 0
    for way in ("load, whole", "save, whole", "load, copies", "save, copies", "load, plain"):
        assert ways[way]["gb_per_s"] > 0
    assert ways["computed"]["ttft_s"] > 0 and ways["host"]["prefix_same_tokens"] == 8
    assert ways["host"]["prefix_cached_tokens"] == 256


@pytest.mark.slow
def test_at_the_time_limit_it_writes_what_it_has(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "rows.json"), "--limit-s", "0.3")
    assert done.returncode == 1 and "not done in 0.3 s" in done.stderr
    assert json.loads((tmp_path / "rows.json").read_text("utf-8"))["rows"][-1] == {"way": "time limit"}
