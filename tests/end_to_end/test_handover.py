"""Prefill and decode engines as processes over one store: whatever is killed, answers are those of one engine."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="an engine needs skymemory[hf]")
pytest.importorskip("aiohttp", reason="serving needs skymemory[router]")
pytest.importorskip("redis", reason="the store daemon's clients need skymemory[redis]")

from tests.end_to_end.test_serve import PATIENCE_S
from tests.end_to_end.test_serve import serving as engine_process
from tests.settings_file import settings_file

pytestmark = [pytest.mark.engine, pytest.mark.slow]
LONG = 900


def ask(url: str, ids: list[int], max_tokens: int, **more: object) -> dict[str, Any]:
    body = {"prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
    with urllib.request.urlopen(f"{url}/v1/completions", json.dumps(body).encode(), timeout=PATIENCE_S) as answer:
        return dict(json.load(answer))


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def ids_of(count: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, 8000) for _ in range(count)]


def prompts(count: int, seed: int) -> list[list[int]]:
    """Mixed: short and long, new ones and some that begin as earlier ones do."""
    dice = random.Random(seed)
    made: list[list[int]] = []
    for number in range(count):
        start = dice.choice(made)[: dice.randrange(1, 400)] if made and dice.random() < 0.5 else []
        made.append([*start, *ids_of(dice.choice([3, 40, 130, 300, 600]), seed=1000 * seed + number)])
    return made


@contextmanager
def store_process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    address = f"unix://{folder}/s"
    words = [sys.executable, "-m", "skymemory", "store", "serve", "memory://512MiB", "--listen", address]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and "is served at" in process.stdout.readline()
        yield process, address
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def short() -> Iterator[Path]:
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp())
    yield folder
    shutil.rmtree(folder)


@contextmanager
def cluster(folder: Path, wait: str = "10s") -> Iterator[dict[str, Any]]:
    """Store, prefill engine, decode engine, and one that is alone, each a process; their addresses."""
    with (
        store_process(folder) as (store, address),
        settings_file(f"wait = '{wait}'") as more,
        engine_process("--cache", "64MiB", "--store", address, "--role", "producer", *more) as (p, p_url),
        engine_process("--cache", "64MiB", "--store", address, "--role", "consumer", *more) as (d, d_url),
        engine_process("--cache", "64MiB") as (_, alone),
    ):
        yield {"store": store, "p": p, "d": d, "p_url": p_url, "d_url": d_url, "alone": alone}


def two_steps(made: dict[str, Any], ids: list[int], overlap: bool, new: int = 8) -> dict[str, Any]:
    first = {"kv_transfer_params": {"do_remote_decode": True}}
    if not overlap:
        params = ask(made["p_url"], ids, 1, **first)["kv_transfer_params"]
        return ask(made["d_url"], ids, new, kv_transfer_params=params)
    with ThreadPoolExecutor() as pool:
        step = pool.submit(ask, made["p_url"], ids, 1, **first)
        answer = ask(made["d_url"], ids, new, kv_transfer_params={"do_remote_prefill": True})
        step.result()
        return answer


def test_mixed_prompts_are_answered_as_by_one_engine(short: Path) -> None:
    with cluster(short) as made, ThreadPoolExecutor(4) as pool:
        some = prompts(60, seed=1)
        answers = list(pool.map(lambda pair: two_steps(made, pair[1], bool(pair[0] % 2)), enumerate(some)))
        for ids, answer in zip(some, answers, strict=True):
            assert text(answer) == text(ask(made["alone"], ids, 8))
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == min(len(ids) // 16 * 16, len(ids) - 1)
        assert metric(made["d_url"], "skymemory:remote_prefill_requests_total") == 60
        assert metric(made["d_url"], "skymemory:remote_prefill_given_up_total") == 0


def test_a_store_killed_in_the_middle_costs_no_answer(short: Path) -> None:
    with cluster(short, wait="1s") as made, ThreadPoolExecutor(2) as pool:
        some = [ids_of(LONG, seed=number) for number in range(12)]
        going = [pool.submit(two_steps, made, ids, bool(at % 2)) for at, ids in enumerate(some)]
        while sum(one.done() for one in going) < 3:
            time.sleep(0.01)
        made["store"].kill()
        for ids, answer in zip(some, going, strict=True):
            assert text(answer.result(PATIENCE_S)) == text(ask(made["alone"], ids, 8))
        # Without a store P says that nothing is stored, and D does not wait for it.
        began_s = time.monotonic()
        params = ask(made["p_url"], ids_of(40, seed=99), 1, kv_transfer_params={"do_remote_decode": True})
        assert params["kv_transfer_params"]["sky_tokens"] == 0 and time.monotonic() - began_s < 10


def test_a_prefill_engine_killed_in_the_middle_is_waited_for_until_the_deadline(short: Path) -> None:
    with cluster(short, wait="500ms") as made, ThreadPoolExecutor(2) as pool:
        ids = ids_of(1900, seed=5)
        ask(made["d_url"], ids_of(20, seed=1), 2)
        answer = pool.submit(ask, made["d_url"], ids, 8, kv_transfer_params={"do_remote_prefill": True})
        step = pool.submit(ask, made["p_url"], ids, 1, kv_transfer_params={"do_remote_decode": True})
        while not metric(made["d_url"], "skymemory:store_fetched_blocks_total") and not answer.done():
            made["p"].send_signal(signal.SIGCONT)
            time.sleep(0.02)
            made["p"].send_signal(signal.SIGSTOP)  # so that it does not end before it is seen to have begun
            time.sleep(0.02)
        made["p"].kill()
        with pytest.raises((OSError, urllib.error.URLError, json.JSONDecodeError, ConnectionError)):
            step.result(PATIENCE_S)
        assert text(answer.result(PATIENCE_S)) == text(ask(made["alone"], ids, 8))
        cached = answer.result()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 0 < cached < 1900 // 16 * 16
        assert metric(made["d_url"], "skymemory:remote_prefill_given_up_total") == 1


def test_both_at_once_share_and_a_signal_saves_what_waits(short: Path) -> None:
    with store_process(short) as (_, address), engine_process("--cache", "64MiB", "--store", address) as (one, url):
        ids = ids_of(300, seed=3)
        said = ask(url, ids, 4)
        one.send_signal(signal.SIGINT)
        assert one.wait(PATIENCE_S) == 0
        with engine_process("--cache", "64MiB", "--store", address) as (_, other):
            again = ask(other, ids, 4)  # no parameters: what is stored is used
            assert text(again) == text(said)
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 288


def test_over_a_constellation(short: Path) -> None:
    run = short / "run"
    words = [sys.executable, "-m", "skymemory", "constellation"]
    env = {**os.environ, "SKYMEMORY_RUN_DIR": str(run)}
    subprocess.run([*words, "up", "--delay", "off"], env=env, check=True, capture_output=True, timeout=120)
    try:
        address = f"constellation://{run}"
        with (
            engine_process("--cache", "64MiB", "--store", address, "--role", "producer") as (_, p_url),
            engine_process("--cache", "64MiB", "--store", address, "--role", "consumer") as (_, d_url),
            engine_process("--cache", "64MiB") as (_, alone),
        ):
            made = {"p_url": p_url, "d_url": d_url}
            for at, ids in enumerate(prompts(8, seed=2)):
                answer = two_steps(made, ids, bool(at % 2))
                assert text(answer) == text(ask(alone, ids, 8))
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= min(
                    len(ids) // 16 * 16, len(ids) - 1
                )
    finally:
        subprocess.run([*words, "down"], env=env, check=True, capture_output=True, timeout=60)
