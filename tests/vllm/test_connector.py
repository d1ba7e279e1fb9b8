"""vLLM with the connector answers as vLLM without it, token by token, and loads what another process has saved."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tests.store.real_redis import RedisServer
from tests.store.redis_server.test_daemon import serving
from tests.vllm.server import MODEL, PYTHON, ROOT, Vllm, an_adapter
from tools.vllm_interface import CLASSES, PAGE, WHAT, methods

from skymemory.store.base import LoadTicket, Store, StoreTicket
from skymemory.store.memory import MemoryStore
from skymemory.testbed.open_store import open_store

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
    job = {name: value for name, value in more.items() if name != "one_process"}
    (folder / "job.json").write_text(json.dumps({"engine": engine, "transfer": how, "rounds": rounds, **job}))
    (folder / "result.json").unlink(missing_ok=True)
    command = [str(PYTHON), str(ROOT / "tests/vllm/offline.py"), str(folder / "job.json"), str(folder / "result.json")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    if more.get("one_process"):  # it starts in a third of the time
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
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


def test_after_weights_were_changed_in_place_nothing_of_before_is_loaded(folder: Path) -> None:
    asked = [one | {"adapter": ""} for one in requests(40, 4, "")]
    engine = {"enable_lora": False}
    before, after = run(folder, [asked, asked], None, engine=engine, changed=[1])
    assert before["tokens"] != after["tokens"]
    with MemoryStore(4 << 30) as store, daemon(store, folder) as address:
        found = run(folder, [asked] * 4, transfer(address), engine=engine, changed=[2])
        assert answers(found) == [before["tokens"]] * 2 + [after["tokens"]] * 2
        assert found[1]["external"] > 0 and found[3]["external"] > 0, "what came after the change is loaded"
        (other,) = run(folder, [asked], transfer(address), engine=engine)
        assert other["tokens"] == before["tokens"] and other["external"] > 0


def test_two_of_it_below_a_multi_connector_answer_as_one(folder: Path) -> None:
    asked = [one | {"adapter": ""} for one in requests(40, 5, "")]
    engine = {"enable_lora": False}
    (plain,) = run(folder, [asked], None, engine=engine)
    (folder / "one").mkdir()
    (folder / "two").mkdir()
    with (
        MemoryStore(4 << 30) as one, daemon(one, folder / "one") as first,
        MemoryStore(4 << 30) as two, daemon(two, folder / "two") as second,
    ):  # fmt: skip
        both = {"connectors": [transfer(first), transfer(second)]}
        how = transfer(first) | {"kv_connector": "MultiConnector", "kv_connector_extra_config": both}
        del how["kv_connector_module_path"]
        assert answers(run(folder, [asked, asked], how, engine=engine)) == [plain["tokens"]] * 2
        (warm,) = run(folder, [asked], how, engine=engine)
        assert warm["tokens"] == plain["tokens"] and warm["external"] > 0
        assert one.stats()["stored_total"] == two.stats()["stored_total"] > 0


def test_the_page_has_every_method_of_this_vllm(folder: Path) -> None:
    (base,) = PYTHON.parents[1].glob("lib/*/site-packages/vllm/distributed/kv_transfer/kv_connector/v1/base.py")
    named = {line.split("`")[1] for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")}
    assert methods(base, CLASSES) <= named <= set(WHAT)


class Slow(MemoryStore):
    """Each value takes a while, as over a link."""

    delay_s = 0.0

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        time.sleep(self.delay_s * len(ticket.keys))
        return super().complete_load(ticket)


SCHEDULERS = {
    "vLLM's": {},
    "ours": {"scheduler_cls": "skymemory.engine.vllm.CakeScheduler"},
    "reset": {"scheduler_cls": "tests.vllm.resetting.ResettingScheduler"},
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_cake_meets_in_the_middle_and_changes_no_token(
    folder: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four prompts of 1,900 tokens, one by one, over a link that is about as fast as this model computes."""
    dice = random.Random(5)
    asked = [
        {"tokens": [dice.randrange(5, 500) for _ in range(1900)], "max_tokens": 16, "adapter": ""} for _ in range(4)
    ]
    engine = {"max_model_len": 2048, "num_gpu_blocks_override": 200, "enable_lora": False}
    monkeypatch.setenv("SKY_TEST_RESETS", str(folder / "resets"))
    plain, again = run(folder, [asked, asked], None, engine=engine, one_by_one=True)
    assert again["tokens"] == plain["tokens"]
    with Slow(4 << 30) as store, daemon(store, folder) as address:
        (cold,) = run(folder, [asked], transfer(address), engine=engine, one_by_one=True)
        assert cold["tokens"] == plain["tokens"] and cold["external"] == 0
        store.delay_s = statistics.median(plain["ttft_s"]) / 15
        warm = run(folder, [asked, asked], transfer(address), engine=engine | SCHEDULERS[scheduler], one_by_one=True)
        assert answers(warm) == [plain["tokens"]] * 2
        met = [cached for one in warm for cached in one["cached"] if 0 < cached < 1800]
        assert met, [one["cached"] for one in warm]
        assert (folder / "resets").exists() is (scheduler == "reset")


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


SHAPE: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-6}
SHAPE |= {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 3, "num_attention_heads": 8}
SHAPE |= {"num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 16384, "head_dim": 64}
"""A prompt of 2,000 tokens takes about a second to compute, and is 12 MB: loading pays from every store."""


class Across:
    """One engine has computed ``asked``, and its values are kept; others, in processes of their own, are asked again.

    Each of them also computes and saves ``new`` prompts, then loads those.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "model").mkdir()
        (folder / "model/config.json").write_text(json.dumps(SHAPE))
        dice = random.Random(7)
        prompts = [[dice.randrange(5, 4000) for _ in range(dice.randrange(1700, 2000))] for _ in range(4)]
        requests = [{"tokens": tokens, "max_tokens": 4} for tokens in prompts]
        self.asked, self.new = requests[:3], requests[3:]
        with MemoryStore(1 << 30) as store, daemon(store, folder) as address:
            (first,) = self._run([self.asked], address)
            assert first["external"] == 0
            self.plain = first["tokens"]
            self.values = list(store._values.items())
        assert len(self.values) >= sum(len(one["tokens"]) // 64 for one in self.asked)

    def fill(self, store: Store) -> None:
        for item in self.values:
            assert store.put_many([item]) == [True]

    def _run(self, rounds: list[list[dict[str, Any]]], address: str) -> Any:
        engine = {"model": str(self.folder / "model"), "load_format": "dummy", "skip_tokenizer_init": True}
        # One step computes all of a prompt: no Cake, which loads less than all by design.
        engine |= {"max_model_len": 2048, "num_gpu_blocks_override": 200, "max_num_batched_tokens": 2048}
        engine |= {"enable_lora": False}
        # What is less than a value at a prompt's end is not stored: of values of 128 tokens up to 7 % here.
        return run(
            self.folder,
            rounds,
            transfer(address, value_tokens=64),
            engine=engine,
            one_by_one=True,
            pause_s=4.0,
            one_process=True,
        )

    def check(self, address: str, source: str) -> None:
        """A second process: all of what the first one saved comes from outside, and so does what it saves itself."""
        found, computed, again = self._run([self.asked, self.new, self.new], address)
        assert found["tokens"] == self.plain and again["tokens"] == computed["tokens"]
        loaded_from_outside(found, self.asked, source)
        assert computed["external"] == 0 and again["counts"]["saved_values"] >= 26, again["counts"]
        loaded_from_outside(again, self.new, source)
        self.new_tokens = computed["tokens"]

    def check_restarted(self, address: str, source: str) -> None:
        (found,) = self._run([self.asked + self.new], address)
        assert found["tokens"] == self.plain + self.new_tokens
        loaded_from_outside(found, self.asked + self.new, source)


def loaded_from_outside(result: Any, asked: list[dict[str, Any]], source: str) -> None:
    """At least 95 % of the blocks that can be; vLLM counts what is announced, so nothing may have been recomputed."""
    blocks = sum((len(one["tokens"]) - 1) // BLOCK for one in asked)
    assert result["external"] / BLOCK >= 0.95 * blocks, (result["external"] / BLOCK, blocks, result["counts"])
    assert result["counts"]["recomputed_tokens"] == 0, result["counts"]
    assert result["sources"][source] >= result["external"], result["sources"]


@pytest.fixture(scope="module")
def across() -> Iterator[Across]:
    with TemporaryDirectory(prefix="sky-") as name:
        yield Across(Path(name))


def test_a_second_process_loads_from_a_daemon_over_memory(across: Across) -> None:
    with MemoryStore(1 << 30) as store, daemon(store, across.folder) as address:
        across.fill(store)
        across.check(address, "host")


@contextmanager
def daemon_over_disk(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "skymemory", "store", "serve", f"disk://{folder}/disk?budget=1GiB"]
    path = folder / "disk.sock"
    path.unlink(missing_ok=True)
    with subprocess.Popen([*command, "--listen", f"unix://{path}"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and "is served at" in process.stdout.readline()
            yield f"unix://{path}", process
        finally:
            process.kill()


def test_a_second_process_loads_from_a_daemon_over_disk_and_a_third_after_it_was_killed(across: Across) -> None:
    with daemon_over_disk(across.folder) as (address, process):
        with open_store(address) as store:
            across.fill(store)
        across.check(address, "disk")
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    with daemon_over_disk(across.folder) as (address, _):
        across.check_restarted(address, "disk")


def test_a_second_process_loads_from_redis(across: Across) -> None:
    server = RedisServer(across.folder)
    try:
        with open_store(server.url) as store:
            across.fill(store)
        across.check(server.url, "external_unspecified")
    finally:
        server.stop()


def test_a_second_process_loads_from_a_constellation_with_real_delays(across: Across) -> None:
    run_dir = across.folder / "run"
    command = [sys.executable, "-m", "skymemory", "constellation"]
    subprocess.run(
        [*command, "up", "--base-port", "auto", "--delay", "real", "--run-dir", str(run_dir)], check=True, timeout=120
    )
    try:
        with open_store(f"constellation://{run_dir}") as store:
            across.fill(store)
        across.check(f"constellation://{run_dir}", "external_unspecified")
    finally:
        subprocess.run([*command, "down", "--run-dir", str(run_dir)], check=True, timeout=120)


class SlowToStore(MemoryStore):
    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        time.sleep(0.4 * len(ticket.items))
        return super().complete_store(ticket)


def saved_values(vllm: Vllm) -> float:
    with urllib.request.urlopen(vllm.metrics_url) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:skymemory_saved_values_total"))


def test_a_server_counts_its_saves_without_requests_and_saves_what_waits_when_it_is_stopped(folder: Path) -> None:
    """Of a prompt of 1,900 tokens 14 values are stored, one after the other: 6 s."""
    dice = random.Random(9)
    one, two = ([dice.randrange(5, 8000) for _ in range(1900)] for _ in range(2))
    with SlowToStore(1 << 30) as store, daemon(store, folder) as address:
        how = json.dumps(transfer(address))
        vllm = Vllm(folder, "stopped", "--kv-transfer-config", how, "--shutdown-timeout", "30", ours=True)
        vllm.start()
        try:
            vllm.wait()
            vllm.complete(one)
            assert saved_values(vllm) < 14
            ends_s = time.monotonic() + 60
            while (saved := saved_values(vllm)) < 14:
                assert time.monotonic() < ends_s, f"{saved} of 14 values are counted"
                time.sleep(0.2)
            vllm.complete(two)
            assert store.stats()["entries"] < 28
            vllm.terminate(40)
        finally:
            vllm.stop()
        assert store.stats()["entries"] == 28


def test_behind_a_daemon_that_stood_still_the_next_prompt_is_loaded(folder: Path) -> None:
    """It is stopped between two prompts and, with a third, in the midst of a load."""
    dice = random.Random(13)
    prompt = [dice.randrange(5, 8000) for _ in range(1900)]

    def asked(vllm: Vllm) -> tuple[int, str]:
        vllm.post("/reset_prefix_cache")
        answer = vllm.post("/v1/completions", {"model": "small", "prompt": prompt, "max_tokens": 8, "temperature": 0})
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0, answer["choices"][0]["text"]

    with daemon_over_disk(folder) as (address, process):
        vllm = Vllm(folder, "stands-still", "--kv-transfer-config", json.dumps(transfer(address)), ours=True)
        vllm.start()
        try:
            vllm.wait()
            _, text = asked(vllm)
            ends_s = time.monotonic() + 60
            while (found := asked(vllm))[0] < 1700:
                assert time.monotonic() < ends_s, "never loaded"
            for delay_s in (0.0, 0.002, 0.005, 0.02):
                assert asked(vllm) == found == (found[0], text)
                stop = threading.Timer(delay_s, lambda: process.send_signal(signal.SIGSTOP))
                stop.start()
                for _ in range(3):
                    assert asked(vllm)[1] == text, "computed"
                stop.join()
                process.send_signal(signal.SIGCONT)
                time.sleep(0.5)
                assert asked(vllm) == found, delay_s
        finally:
            process.send_signal(signal.SIGCONT)
            vllm.stop()


def test_a_daemon_that_is_killed_costs_no_answer_and_is_used_again_when_it_is_back(folder: Path) -> None:
    """An engine that goes on meanwhile, and what it saves while there is no daemon is saved when it is asked again."""
    dice = random.Random(11)
    one, two = ([dice.randrange(5, 8000) for _ in range(1900)] for _ in range(2))

    def asked(tokens: list[int]) -> tuple[int, str]:
        vllm.post("/reset_prefix_cache")
        answer = vllm.post("/v1/completions", {"model": "small", "prompt": tokens, "max_tokens": 8, "temperature": 0})
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0, answer["choices"][0]["text"]

    def until_loaded(tokens: list[int]) -> str:
        ends_s = time.monotonic() + 60
        while not (found := asked(tokens))[0]:
            assert time.monotonic() < ends_s, "never loaded"
            time.sleep(1)
        assert found[0] >= 1700
        return found[1]

    with daemon_over_disk(folder) as (address, process):
        vllm = Vllm(folder, "recovers", "--kv-transfer-config", json.dumps(transfer(address)), ours=True)
        vllm.start()
        try:
            vllm.wait()
            cached, text = asked(one)
            assert cached == 0 and until_loaded(one) == text
            process.send_signal(signal.SIGKILL)
            process.wait(20)
            for _ in range(3):
                assert asked(one) == (0, text)
            cached, other = asked(two)
            assert cached == 0
            with daemon_over_disk(folder):
                assert until_loaded(one) == text and until_loaded(two) == other
        finally:
            vllm.stop()
