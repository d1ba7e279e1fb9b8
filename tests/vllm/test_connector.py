"""vLLM with the connector answers as vLLM without it, token by token, and loads what another process has saved."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tests.serving.resp.test_daemon import serving
from tests.vllm.server import MODEL, PYTHON, ROOT, an_adapter

from skymemory.store.base import LoadTicket
from skymemory.store.memory import MemoryStore

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-vllm does it"),
    pytest.mark.timeout(1200),
]

ENGINE = {"model": str(MODEL), "max_model_len": 1024, "num_gpu_blocks_override": 64, "max_num_batched_tokens": 256}
ENGINE |= {"max_num_seqs": 8, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "enable_prefix_caching": True}
BLOCK = 32


def transfer(store: str, **more: Any) -> dict[str, Any]:
    return {
        "kv_connector": "SkyMemoryConnector",
        "kv_connector_module_path": "skymemory.engine.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store, **more},
    }


def run(folder: Path, rounds: Sequence[Sequence[dict[str, Any]]], how: dict[str, Any] | None, **more: Any) -> Any:
    """The result of ``offline``; RuntimeError with the end of its log where it fails."""
    engine = ENGINE | more.pop("engine", {})
    (folder / "job.json").write_text(json.dumps({"engine": engine, "transfer": how, "rounds": rounds, **more}))
    (folder / "result.json").unlink(missing_ok=True)
    command = [str(PYTHON), str(ROOT / "tests/vllm/offline.py"), str(folder / "job.json"), str(folder / "result.json")]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with (folder / "log").open("w") as log:
        # The keeper stops vLLM and its children when this process is gone, or its input ends.
        keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.keeper", *command],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            keeper.wait(900)
        finally:
            assert keeper.stdin is not None
            keeper.stdin.close()
            keeper.wait(30)
    if not (folder / "result.json").exists():
        raise RuntimeError(f"vLLM failed:\n{(folder / 'log').read_text()[-6000:]}")
    return json.loads((folder / "result.json").read_text())


def requests(count: int, seed: int, adapter: str) -> list[dict[str, Any]]:
    """Prompts of 1 to 700 tokens that share prefixes; some by an adapter, some of tenants."""
    dice = random.Random(seed)
    shared = [[dice.randrange(5, 500) for _ in range(600)] for _ in range(3)]
    made = []
    for _ in range(count):
        prefix = dice.choice(shared)[: dice.choice([0, 33, 128, 300, 600])]
        made.append(
            {
                "tokens": prefix + [dice.randrange(5, 500) for _ in range(dice.randrange(1, 100))],
                "salt": dice.choice([None, None, "a", "b"]),
                "adapter": dice.choice(["", "", adapter]),
                "max_tokens": dice.choice([1, 8, 40]),
            }
        )
    return made


def answers(result: Any) -> list[list[list[int]]]:
    return [one["tokens"] for one in result]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="sky-") as name:
        an_adapter(Path(name) / "sql")
        yield Path(name)


@pytest.fixture(scope="module")
def asked(folder: Path) -> list[dict[str, Any]]:
    return requests(200, 1, str(folder / "sql"))


@pytest.fixture(scope="module")
def plain(folder: Path, asked: list[dict[str, Any]]) -> list[list[int]]:
    """What vLLM answers without the connector."""
    (result,) = run(folder, [asked], None)
    assert result["preemptions"] > 0, "the engine is meant to be short of blocks"
    return answers([result])[0]


class Faulty(MemoryStore):
    """Loses and damages a share of what is read, with a seed."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self._dice = random.Random(3)
        self.spoilt = 0

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        return [self._spoilt(value) for value in super().complete_load(ticket)]

    def _spoilt(self, value: memoryview | None) -> memoryview | None:
        chance = self._dice.random()
        if value is None or chance > 0.1:
            return value
        self.spoilt += 1
        if chance > 0.05:
            return None
        damaged = bytearray(value)
        damaged[self._dice.randrange(len(damaged))] ^= 4
        return memoryview(bytes(damaged))


@contextmanager
def daemon(store: MemoryStore, folder: Path) -> Iterator[str]:
    with serving(store, folder) as (path, _, _):
        yield f"unix://{path}"


def test_two_hundred_requests_are_answered_as_without_it_and_loaded_by_a_second_process(
    folder: Path, asked: list[dict[str, Any]], plain: list[list[int]]
) -> None:
    with MemoryStore(4 << 30) as store, daemon(store, folder) as address:
        (cold,) = run(folder, [asked], transfer(address))
        assert cold["tokens"] == plain
        second = run(folder, [asked, asked], transfer(address))
        assert answers(second) == [plain, plain]
        blocks = sum((len(one["tokens"]) - 1) // BLOCK for one in asked)
        values = sum((len(one["tokens"]) - 1) // 128 for one in asked) * 128 // BLOCK
        for result in second:
            assert (result["external"] + result["local"]) / BLOCK >= values, (blocks, values)
            assert result["external"] > 0


def test_values_that_are_lost_or_damaged_change_no_token(
    folder: Path, asked: list[dict[str, Any]], plain: list[list[int]]
) -> None:
    with Faulty(4 << 30) as store, daemon(store, folder) as address:
        result = run(folder, [asked, asked, asked], transfer(address))
        assert answers(result) == [plain] * 3
        assert store.spoilt > 20 and result[2]["external"] > 0


class Slow(MemoryStore):
    """Each value takes a while, as over a link."""

    delay_s = 0.0

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.loaded = 0

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        time.sleep(self.delay_s * len(ticket.keys))
        self.loaded += len(ticket.keys)
        return super().complete_load(ticket)


@pytest.mark.parametrize("scheduler", ["vLLM's", "ours"])
def test_cake_meets_in_the_middle_and_changes_no_token(folder: Path, scheduler: str) -> None:
    """Four prompts of 1,900 tokens, one by one, over a link that is about as fast as this model computes."""
    dice = random.Random(5)
    asked = [
        {"tokens": [dice.randrange(5, 500) for _ in range(1900)], "max_tokens": 16, "adapter": ""} for _ in range(4)
    ]
    engine = {"max_model_len": 2048, "num_gpu_blocks_override": 200, "enable_lora": False}
    ours = {"scheduler_cls": "skymemory.engine.vllm.CakeScheduler"} if scheduler == "ours" else {}
    plain, again = run(folder, [asked, asked], None, engine=engine, one_by_one=True)
    assert again["tokens"] == plain["tokens"]
    with Slow(4 << 30) as store, daemon(store, folder) as address:
        (cold,) = run(folder, [asked], transfer(address), engine=engine, one_by_one=True)
        assert cold["tokens"] == plain["tokens"] and store.loaded == 0
        store.delay_s = statistics.median(plain["ttft_s"]) / 15
        warm = run(folder, [asked, asked], transfer(address), engine=engine | ours, one_by_one=True)
        assert answers(warm) == [plain["tokens"]] * 2
        met = [cached for one in warm for cached in one["cached"] if 0 < cached < 1800]
        assert met, [one["cached"] for one in warm]


def test_two_ranks_answer_as_one_and_load_what_both_have_saved(folder: Path) -> None:
    """Tensor parallelism: each rank stores its heads' part of a value, under a key of its own."""
    asked = [one | {"adapter": ""} for one in requests(40, 2, "")]
    one_rank = {"enable_lora": False}
    two_ranks = one_rank | {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    (plain,) = run(folder, [asked], None, engine=one_rank)
    with MemoryStore(1 << 30) as store, daemon(store, folder) as address:
        (cold,) = run(folder, [asked], transfer(address), engine=two_ranks)
        assert cold["tokens"] == plain["tokens"]
        second = run(folder, [asked, asked], transfer(address), engine=two_ranks)
        assert answers(second) == [plain["tokens"]] * 2
        assert all(result["external"] > 0 for result in second)
        before = store.stats()["stored_total"]
        (other,) = run(folder, [asked], transfer(address), engine=one_rank)
        assert other["tokens"] == plain["tokens"]
        assert store.stats()["stored_total"] > before, "one rank shares no values with two"
