"""Options of the engine that change how blocks are cut, scheduled or computed: answers are plain vLLM's with each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.vllm.server import PYTHON, an_adapter
from tests.vllm.test_connector import daemon, requests, run, transfer

from skymemory.store.memory import MemoryStore

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-vllm does it"),
    pytest.mark.timeout(1800),
]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "blocks of 64": {"block_size": 64},
    "blocks of 128": {"block_size": 128},
    "ngram": {"speculative_config": NGRAM},
    "by priority": {"scheduling_policy": "priority"},
    "steps ahead": {"async_scheduling": True},
    "without vLLM's prefix cache": {"enable_prefix_caching": False},
    "compiled": {"enforce_eager": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_the_engine(name: str, tmp_path: Path) -> None:
    engine = {"enable_lora": False, **OPTIONS[name]}
    asked = [one | {"adapter": "", "priority": at % 3} for at, one in enumerate(requests(40, 8, ""))]
    (plain,) = run(tmp_path, [asked], None, engine=engine, one_process=True)
    with MemoryStore(1 << 30) as store, daemon(store, tmp_path) as address:
        cold, warm = run(tmp_path, [asked, asked], transfer(address), engine=engine, one_process=True)
        assert [cold["tokens"], warm["tokens"]] == [plain["tokens"]] * 2
        assert warm["external"] > 0
        (second,) = run(tmp_path, [asked], transfer(address), engine=engine, one_process=True)
        assert second["tokens"] == plain["tokens"] and second["external"] > 0


def test_one_adapter_alone(tmp_path: Path) -> None:
    adapter = str(an_adapter(tmp_path / "sql"))
    asked = [one | {"adapter": adapter} for one in requests(40, 8, adapter)]
    engine = {"max_loras": 1}
    (plain,) = run(tmp_path, [asked], None, engine=engine, one_process=True)
    with MemoryStore(1 << 30) as store, daemon(store, tmp_path) as address:
        cold, warm = run(tmp_path, [asked, asked], transfer(address), engine=engine, one_process=True)
        assert [cold["tokens"], warm["tokens"]] == [plain["tokens"]] * 2 and warm["external"] > 0
