"""A prompt that many ask with: its load takes it to more engines. Each loads its blocks, and then holds them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="an engine needs skymemory[hf]")
pytest.importorskip("aiohttp", reason="serving needs skymemory[router]")
pytest.importorskip("redis", reason="the store daemon's clients need skymemory[redis]")

from tests.end_to_end.test_serve import PATIENCE_S
from tests.end_to_end.test_serve import serving as engine_process
from tests.end_to_end.test_two_steps import ask, metrics, router

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BLOCK = 32
HOT_TOKENS = 30 * BLOCK
ENGINES = 3
SAVED = "skymemory:store_saved_blocks_total"


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return dict(json.load(answer))


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def bodies(dice: random.Random, hot: list[int]) -> Iterator[dict[str, Any]]:
    while True:
        tail = [dice.randrange(3, 8000) for _ in range(dice.randrange(8, 40))]
        yield {"prompt": hot + tail, "max_tokens": 48, "min_tokens": 48, "temperature": 0, "ignore_eos": True}


def test_a_hot_prefix_is_held_by_as_many_engines_as_its_load_needs(tmp_path: Path) -> None:
    dice = random.Random(11)
    hot = [dice.randrange(3, 8000) for _ in range(HOT_TOKENS)]
    asked = bodies(dice, hot)
    address = f"unix://{tmp_path}/s"
    serve = [sys.executable, "-m", "skymemory", "store", "serve", "memory://256MiB", "--listen", address]
    words = ("--store", address, "--role", "both", "--running", "2", "--block-tokens", str(BLOCK), "--cache", "64MiB")
    with ExitStack() as stack:
        store = stack.enter_context(subprocess.Popen(serve, stdout=subprocess.PIPE, text=True))
        stack.callback(store.kill)
        assert store.stdout is not None and "is served at" in store.stdout.readline()
        plain = stack.enter_context(engine_process())[1]
        engines = [stack.enter_context(engine_process(*words))[1] for _ in range(ENGINES)]
        backends = [word for url in engines for word in ("--backend", url)]
        _, url = stack.enter_context(router(*backends, "--strategy", "least-ttft"))
        pool = stack.enter_context(ThreadPoolExecutor(16))
        assert cached(post(url, next(asked))) == 0, "one engine has computed it"
        ends_s = time.monotonic() + PATIENCE_S
        while sum(metrics(engine, SAVED) for engine in engines) < HOT_TOKENS // BLOCK:
            assert time.monotonic() < ends_s, "its blocks are not in the store"
            time.sleep(0.05)
        burst = [next(asked) for _ in range(16)]
        for body, answer in [(body, pool.submit(post, url, body)) for body in burst]:
            found = answer.result(PATIENCE_S)
            assert found["choices"][0]["text"] == ask(plain, body)
            assert cached(found) >= HOT_TOKENS, "no other engine computes it again: it is loaded"
        answered = 'skymemory_router_requests_total{outcome="answered",server="%s"}'
        holders = [engine for engine in engines if metrics(url, answered % engine.removeprefix("http://"))]
        assert len(holders) >= 2, "its load was more than one engine's"
        store.kill()
        store.wait(PATIENCE_S)
        for engine in engines:
            body = next(asked)
            found = post(engine, body)
            assert found["choices"][0]["text"] == ask(plain, body)
            held = cached(found)
            assert held >= HOT_TOKENS if engine in holders else held == 0, "who has had it holds it without the store"
