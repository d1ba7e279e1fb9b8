"""Models that pool: vectors are plain vLLM's, and prefixes are loaded where vLLM's own cache would serve them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.vllm.server import PYTHON
from tests.vllm.test_connector import daemon, run, transfer

from skymemory.store.memory import MemoryStore

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-vllm does it"),
    pytest.mark.timeout(1800),
]
POOLING = {"runner": "pooling", "convert": "embed", "enable_lora": False}


def asked() -> list[dict[str, Any]]:
    """Prompts of 1 to 700 tokens, many of which begin alike."""
    dice = random.Random(5)
    shared = [dice.randrange(5, 500) for _ in range(600)]
    lengths = [0, 128, 300, 600]
    drawn = [[dice.randrange(5, 500) for _ in range(dice.randrange(1, 100))] for _ in range(24)]
    return [{"tokens": shared[: lengths[at % 4]] + own} for at, own in enumerate(drawn)]


def equal(ours: list[Any], plain: list[Any]) -> bool:
    """Of one length 1, or one for each token; sums of other batches differ in the last bits."""
    return all(np.allclose(one, other, atol=1e-3) for one, other in zip(ours, plain, strict=True))


@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_vectors_are_those_of_plain_vllm(task: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"engine": POOLING | {"pooler_config": {"task": task}}, "one_process": True, "pooling": task}
    (plain,) = run(tmp_path, [asked()], None, **more)
    with MemoryStore(1 << 30) as store, daemon(store, tmp_path) as address:
        cold, warm = run(tmp_path, [asked(), asked()], transfer(address), **more)
        (second,) = run(tmp_path, [asked()], transfer(address), **more)
    assert all(equal(one["vectors"], plain["vectors"]) for one in (cold, warm, second))
    # Of each token a vector: vLLM's own cache is not read either.
    assert (sum(warm["cached"]) > 0) == (sum(second["cached"]) > sum(plain["cached"])) == (task == "embed")


def test_a_mean_over_all_tokens_is_refused_at_start(tmp_path: Path) -> None:
    engine = POOLING | {"pooler_config": {"pooling_type": "MEAN"}, "max_num_batched_tokens": 1024}
    engine["enable_prefix_caching"] = False
    refused = pytest.raises(RuntimeError, match="need all tokens of a prompt computed in one pass")
    with MemoryStore(1 << 30) as store, daemon(store, tmp_path) as address, refused:
        run(tmp_path, [asked()], transfer(address), engine=engine, one_process=True, pooling="embed")
