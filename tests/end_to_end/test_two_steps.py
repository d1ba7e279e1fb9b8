"""Engines that prefill and engines that decode, as processes behind the router: answers as of one plain engine."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="an engine needs skymemory[hf]")
pytest.importorskip("aiohttp", reason="serving needs skymemory[router]")
pytest.importorskip("redis", reason="the store daemon's clients need skymemory[redis]")
pytest.importorskip("skymemory_lab", reason="the laboratory is not installed")

from tests.end_to_end.test_serve import PATIENCE_S
from tests.end_to_end.test_serve import serving as engine_process
from tests.router.processes import Process
from tests.router.processes import router as route

from skymemory.cli.main import build_parser

pytestmark = [pytest.mark.engine, pytest.mark.slow]
HEADER = "x-prefiller-host-port"


def hands_over() -> bool:
    """Whether the engine takes the two steps: it then has a role."""
    try:
        build_parser(["serve"]).parse_args(["serve", "--role", "producer"])
    except SystemExit:
        return False
    return True


@pytest.fixture
def store() -> Iterator[str]:
    folder = Path(tempfile.mkdtemp())
    address = f"unix://{folder}/s"
    words = [sys.executable, "-m", "skymemory", "store", "serve", "memory://256MiB", "--listen", address]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and "is served at" in process.stdout.readline()
        yield address
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)
        shutil.rmtree(folder)


@contextmanager
def router(*words: str, settings: str = "") -> Iterator[tuple[Process, str]]:
    with route(*words, settings=f"log_requests = true\n{settings}") as (process, port):
        yield process, f"http://127.0.0.1:{port}"


def ask(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> str:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        if not body.get("stream"):
            return str(json.load(answer)["choices"][0]["text"])
        events = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: {")]
        return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def metrics(url: str, begins: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(begins))


def mixed(count: int, seed: int) -> list[dict[str, Any]]:
    """Long and short prompts, some with a common beginning, streamed or not."""
    dice = random.Random(seed)
    begin = [dice.randrange(3, 8000) for _ in range(400)]
    made = []
    for number in range(count):
        ids = [
            *begin[: dice.choice([0, 100, 400])],
            *(dice.randrange(3, 8000) for _ in range(dice.choice([3, 60, 300]))),
        ]
        body = {"prompt": ids, "max_tokens": dice.randrange(2, 16), "temperature": 0, "ignore_eos": True}
        made.append({**body, "stream": number % 2 == 0, "min_tokens": 2})
    return made


@pytest.mark.skipif(not hands_over(), reason="`skymemory serve` has no --role")
def test_an_engine_that_prefills_and_one_that_decodes_answer_as_a_plain_one(store: str) -> None:
    with ExitStack() as stack:
        plain = stack.enter_context(engine_process())[1]
        killed, prefill = stack.enter_context(engine_process("--store", store, "--role", "producer"))
        decode = stack.enter_context(engine_process("--store", store, "--role", "consumer"))[1]
        pair, handed_over = (
            ("--prefill", prefill, "--decode", decode),
            'skymemory_router_prefills_total{outcome="handed-over"',
        )
        for handover, seed in (("after", 7), ("overlap", 8)):
            steps = f'[disaggregation]\nsplit_from = 0\nhandover = "{handover}"'
            with router(*pair, settings=steps) as (process, url), ThreadPoolExecutor(3) as pool:
                requests = mixed(8, seed)
                wanted = list(pool.map(lambda body: ask(plain, body), requests))
                assert list(pool.map(lambda body, url=url: ask(url, body), requests)) == wanted
                outcomes = metrics(url, "skymemory_router_prefills_total")
                assert outcomes == 8 and metrics(url, handed_over) >= (8 if handover == "after" else 1)
                assert metrics(url, "skymemory_router_server_in_flight") == 0
                if handover == "after":
                    whole = {**requests[0], "stream": False, "n": 2}
                    assert ask(url, whole) == wanted[0]
                    assert metrics(url, 'skymemory_router_alone_total{reason="whole"}') == 1
                assert not any("Traceback" in line for line in process.said)
        sidecar = f'[sidecar]\nengine = "{decode}"\nprefillers = ["127.0.0.1"]'
        with router(settings=sidecar) as (process, url):
            header = {HEADER: prefill.removeprefix("http://")}
            for body in mixed(3, 9):
                assert ask(url, body, header) == ask(plain, body)
            assert metrics(f"{url}/sidecar", handed_over) == 3
            killed.kill()
            for body in mixed(3, 10):
                assert ask(url, body, header) == ask(plain, body), "the decode engine computes it all"
            assert metrics(f"{url}/sidecar", 'skymemory_router_alone_total{reason="prefill-failed"}') == 3
            assert not any("Traceback" in line for line in process.said)


@pytest.mark.skipif(not hands_over(), reason="`skymemory serve` has no --role")
def test_short_prompts_and_next_turns_go_to_the_decode_engine_alone(store: str) -> None:
    """Conversations of three turns and short prompts: answers as of a plain engine, and what each engine computed."""
    computed = "vllm:request_prefill_kv_computed_tokens_sum"
    with ExitStack() as stack:
        plain = stack.enter_context(engine_process())[1]
        killed, prefill = stack.enter_context(engine_process("--store", store, "--role", "producer"))
        # The router counts on no more than the engine says that its memory holds: here, all three conversations.
        decode = stack.enter_context(engine_process("--store", store, "--role", "consumer", "--cache", "16MiB"))[1]
        process, url = stack.enter_context(router("--prefill", prefill, "--decode", decode))
        dice = random.Random(30)
        more = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
        talks = [[dice.randrange(3, 8000) for _ in range(300)] for _ in range(3)]
        for turn in range(3):
            for number, talk in enumerate(talks):
                body = {**more, "prompt": talk, "stream": number % 2 == 0}
                assert ask(url, body) == ask(plain, body), (turn, number)
                talk.extend(dice.randrange(3, 8000) for _ in range(24))
        for length in (1, 20, 63):
            body = {**more, "prompt": [dice.randrange(3, 8000) for _ in range(length)]}
            assert ask(url, body) == ask(plain, body)
        few = 'skymemory_router_alone_total{reason="few-tokens"}'
        assert (metrics(url, "skymemory_router_two_steps_total"), metrics(url, few)) == (3, 9)
        assert metrics(prefill, computed) == 3 * 300
        # Of the prompts' ends at most a block more than is new: blocks of 16 tokens are found whole.
        assert metrics(decode, computed) <= 3 * 16 + 6 * (24 + 16) + 1 + 20 + 63
        killed.kill()
        for talk in talks:
            body = {**more, "prompt": talk}
            assert ask(url, body) == ask(plain, body), "it needs no prefill engine"
        assert metrics(url, few) == 12 and metrics(url, "skymemory_router_server_in_flight") == 0
        assert not any("Traceback" in line for line in process.said)
