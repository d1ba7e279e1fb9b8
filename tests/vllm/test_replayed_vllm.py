"""``skymemory replay`` and ``skymemory fit`` against a real vLLM: its own counts are the referee."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.settings_file import settings_file
from tests.vllm.server import MODEL, PYTHON, Vllm

from skymemory.cli.main import main
from skymemory.router.settings import read_cost

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-vllm does it"),
]


@pytest.mark.parametrize("unit", ["tokens", "ids"])
def test_what_answers_say_is_what_vllm_counts(vllm: Vllm, capsys: pytest.CaptureFixture[str], unit: str) -> None:
    words = ("--workload", "tenants", "--requests", "12", "--rate", "2", "--scale-lengths", "0.02", "--max-tokens", "3")
    how = ("--prompt-unit", unit, "--model", "small")  # the first of the servers lists an adapter beside it
    code = main(["replay", "--url", vllm.url, "--metrics", vllm.url, *words, *how, "--json"])
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == 0 and printed["completed"] == 12 and not printed["faults"]
    counted = printed["engines"]
    assert counted["requests"] == 12
    assert counted["prompt_tokens"] == printed["prompt_tokens"]
    assert counted["cached_tokens"] == printed["cached_tokens"]
    assert counted["output_tokens"] == printed["output_tokens"] and printed["short"] == 0
    assert abs(printed["length_errors"]["mean"]) < (0.02 if unit == "ids" else 0.08)


def test_what_it_refuses_is_reported_in_its_own_words(vllm: Vllm, capsys: pytest.CaptureFixture[str]) -> None:
    """The small model has no chat template, and vLLM makes up none."""
    words = ("--workload", "tenants", "--requests", "2", "--scale-lengths", "0.02", "--model", "small")
    with settings_file("api = 'chat'") as more:
        assert main(["replay", "--url", vllm.url, *words, *more]) == 1
    said = capsys.readouterr().err
    assert "status 400" in said and "chat template" in said and said.count("\n") == 1


def test_its_prefills_are_measured_and_written(vllm: Vllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No figure is asked for: vLLM and the tests share this computer's processors."""
    out = tmp_path / "cost.json"
    words = ("--url", vllm.url, "--shape", str(MODEL / "config.json"), "--out", str(out))
    with settings_file("lengths = [64, 1024]\nshares = [0, 0.5]\nrepeats = 2\ndecode = false\nmodel = 'small'") as more:
        assert main(["fit", *words, *more, "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert max(one["cached"] for one in printed["prefills"]) >= 448
    assert read_cost(out).prefill_s(512) > read_cost(out).prefill_s(128) > 0
