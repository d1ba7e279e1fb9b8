"""vLLM over memory that several engines share."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.vllm.server import PYTHON
from tests.vllm.test_connector import answers, run, transfer

from skymemory.cache.tiers.store import TieredStore
from skymemory.cache.tiers.tier import TierSettings
from skymemory.store.host.server import ServedArena
from skymemory.store.memory import MemoryStore

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-vllm does it"),
    pytest.mark.timeout(900),
]
ENGINE = {"enable_lora": False, "num_gpu_blocks_override": 512}


@pytest.fixture
def shared() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="skymemory-test-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.mark.parametrize("one_process", [True, False], ids=["one process", "scheduler and workers"])
def test_other_engines_load_what_one_has_saved(tmp_path: Path, shared: Path, one_process: bool) -> None:
    dice = random.Random(5)
    head = [dice.randrange(5, 500) for _ in range(512)]
    asked = [
        {"tokens": head[: 128 * (1 + at % 4)] + [dice.randrange(5, 500) for _ in range(40)], "max_tokens": 12}
        for at in range(12)
    ]
    how = {"engine": ENGINE, "one_process": one_process}
    (plain,) = run(tmp_path, [asked], None, **how)
    arena, far = ServedArena(shared, 256 << 20), MemoryStore(256 << 20, name="far")
    with TieredStore([(arena, TierSettings(local=True)), (far, TierSettings())]) as tiers:
        saved, again = run(tmp_path, [asked, asked[:1]], transfer(f"host://{shared}"), **how)
        assert answers([saved]) == answers([plain])
        counts = again["counts"]  # what was saved after the last step of the first round is in it
        assert counts["saved_values"] == counts["saved_in_place"] == 4, "copied straight into the arena"
        assert arena.stats()["entries"] == 4 and tiers.flush(20)
        (second,) = run(tmp_path, [asked], transfer(f"host://{shared}"), **how)
        assert answers([second]) == answers([plain]) and second["external"] >= 512
        arena.delete(arena.stored_keys())  # the farther tier has them
        (third,) = run(tmp_path, [asked], transfer(f"host://{shared}"), **how)
        assert answers([third]) == answers([plain]) and third["external"] >= 512
        assert arena.stats()["clients"] == 1, "the arena's own"
