"""`skymemory demo vllm`: real satellites, a real daemon, two real vLLM servers, the openai client."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.vllm.server import PYTHON, ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-vllm does it"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize("more", [[], ["--windows"]], ids=["full attention", "windows"])
def test_the_second_server_loads_what_the_first_one_stored(more: list[str]) -> None:
    command = [sys.executable, "-m", "skymemory", "demo", "vllm", "--python", str(PYTHON), "--json", *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout)
    first, second = answers["first"], answers["second"]
    assert first[0]["cached_tokens"] == 0 and second[0]["cached_tokens"] > 0.8 * second[0]["prompt_tokens"]
    assert second[0]["ttft_s"] < first[0]["ttft_s"]
    assert [one["text"] for one in first] == [one["text"] for one in second]
    left = subprocess.run(["pgrep", "-f", "skymemory store serve constellation"], capture_output=True, text=True)
    assert left.stdout == ""
