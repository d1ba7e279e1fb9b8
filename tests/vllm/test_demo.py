"""`skymemory demo vllm`: a real owner of shared memory, or satellites, three real vLLM servers, the openai client."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.vllm.server import PYTHON, ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-vllm does it"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize(
    "more", [[], ["--windows", "--store", "constellation"]], ids=["shared memory", "windows, constellation"]
)
def test_the_second_server_loads_what_the_first_one_stored(more: list[str]) -> None:
    command = [sys.executable, "-m", "skymemory", "demo", "vllm", "--python", str(PYTHON), "--json", *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout)
    plain, first, second = (answers[name] for name in ("plain", "first", "second"))
    assert plain[0]["cached_tokens"] == first[0]["cached_tokens"] == first[0]["store_tokens"] == 0
    assert second[0]["cached_tokens"] == second[0]["store_tokens"] > 0.8 * second[0]["prompt_tokens"]
    assert second[0]["ttft_s"] < min(plain[0]["ttft_s"], first[0]["ttft_s"])
    assert [one["text"] for one in plain] == [one["text"] for one in first] == [one["text"] for one in second]
    left = subprocess.run(["pgrep", "-f", "store serve (constellation|host)://.*/sky-"], capture_output=True, text=True)
    assert left.stdout == "" and not list(Path("/dev/shm").glob("skymemory-demo-*"))
