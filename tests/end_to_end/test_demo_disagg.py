"""`skymemory demo disagg` with engines of our own: real satellites, a real daemon, two engines and the router."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="an engine needs skymemory[hf]")
pytest.importorskip("aiohttp", reason="serving needs skymemory[router]")
pytest.importorskip("redis", reason="the store daemon's clients need skymemory[redis]")

DEMO = [sys.executable, "-m", "skymemory", "demo", "disagg"]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(300)
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


@pytest.mark.parametrize("words", [["--requests", "0"], ["--burst", "1"], ["--python", "nowhere", "--engine", "vllm"]])
def test_refuses_what_it_cannot_run(words: list[str]) -> None:
    done = subprocess.run([*DEMO, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and words[0] in done.stderr
