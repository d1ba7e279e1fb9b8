"""What the router learns of real engines, beside what they say of themselves, however their answers come."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAST, MOST = 0.25, 2.5
"""Of what it took of a processor, how little a token may be believed to take (whole answers alone may not show it, and
then what is believed at first stays), and how much of what it took of time, which other programs lengthen. Answers take
many times as long as their prompts here: a whole one taken for a prefill is off by more.
"""


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("metrics", "parts"), [("read", [0.0, 0.5, 1.0]), ("unread", [0.5, 1.0])])
def test_speeds_that_are_learnt_are_the_engines_own_however_answers_come(
    tmp_path: Path, metrics: str, parts: list[float]
) -> None:
    results = tmp_path / "results.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks/real_routing.py"),
        "--doors",
        "route",
        "--whole",
        *map(str, parts),
    ]
    command += ["--conversations", "6", "--turns", "5", "--answers", "40", "120", "--rate", "1.5"]
    command += ["--json", str(results), *(["--unread"] if metrics == "unread" else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(results.read_text())["rows"]
    assert [row["whole"] for row in rows] == parts
    for row in rows:
        assert row["cached_reported"] > 0.5 and abs(row["cached_believed"] - row["cached_reported"]) < 0.05
        for name, of in row["per_engine"].items():
            if of["learned_s"] is not None and of["engine_s"] is not None and of["requests"] >= 8:
                assert LEAST * of["processor_s"] < of["learned_s"] < MOST * of["engine_s"], (row["whole"], name, of)
