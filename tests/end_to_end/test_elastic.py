"""Engines whose roles follow the load, as processes over one store: roles move, and no answer is another one's.

The mix of the load changes from long prompts with short answers to short prompts with long answers, and back, while one
engine is killed as it drains.
"""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from typing import Any

import pytest

pytest.importorskip("transformers", reason="an engine needs skymemory[hf]")
pytest.importorskip("aiohttp", reason="serving needs skymemory[router]")
pytest.importorskip("redis", reason="the store daemon's clients need skymemory[redis]")

from tests.end_to_end.test_serve import PATIENCE_S
from tests.end_to_end.test_serve import serving as engine_process
from tests.end_to_end.test_two_steps import ask, metrics, router, store

__all__ = ["store"]
pytestmark = [pytest.mark.engine, pytest.mark.slow]
QUICK = """
[elastic]
every = "{every}"
smoothing = "2s"
settle = "1s"
[health]
every = "300ms"
metrics_every = "{every}"
failures = 2
[admission]
ttft = "500ms"
tbt = "400ms"
"""
BATCH = 3
"""Requests that an engine runs at a time: with more it has some that wait, and its pool is overloaded."""
WAIT_S = 150.0

Answered = tuple[dict[str, Any], Future[str]]


def bodies(seed: int, prompt: int, answer: int) -> Iterator[dict[str, Any]]:
    """Prompts of about ``prompt`` tokens that differ from the first token on."""
    dice = random.Random(seed)
    for number in range(10_000):
        ids = [dice.randrange(3, 8000) for _ in range(dice.randrange(prompt // 2, prompt))]
        fixed = {"max_tokens": answer, "min_tokens": answer, "temperature": 0, "ignore_eos": True}
        yield {"prompt": ids, "stream": number % 3 > 0, **fixed}


def servers(url: str) -> dict[str, dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/ready", timeout=PATIENCE_S) as answer:
        return {one["name"]: one for one in json.load(answer)["servers"]}


def split(url: str) -> tuple[int, int]:
    roles = [one["role"] for one in servers(url).values() if one["state"] == "serving"]
    return roles.count("prefill"), roles.count("decode")


def load_until(
    url: str, pool: ThreadPoolExecutor, width: int, asked: Iterator[dict[str, Any]], true: Callable[[], bool]
) -> list[Answered]:
    """Requests, ``width`` of them at a time, until it is true."""
    sent: list[Answered] = []
    ends_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < ends_s, servers(url)
        while sum(not answer.done() for _, answer in sent) < width:
            body = next(asked)
            sent.append((body, pool.submit(ask, url, body)))
        time.sleep(0.05)
    return sent


def check(sent: list[Answered], plain: str, *, may_fail: bool = False) -> int:
    """Each answer is that of one plain engine; how many have failed."""
    failed = 0
    for body, answer in sent:
        try:
            text = answer.result(PATIENCE_S)
        except (OSError, http.client.HTTPException, KeyError):  # a stream that was cut, or ends with an error event
            failed += 1
            continue
        assert text == ask(plain, body)
    assert may_fail or not failed
    return failed


Engines = list[tuple[subprocess.Popen[str], str]]


@pytest.fixture
def engines(store: str) -> Iterator[Engines]:
    """A plain one, and three that can do both."""
    with ExitStack() as stack:
        words = ("--store", store, "--role", "both", "--running", str(BATCH))
        yield [stack.enter_context(engine_process(*(words if number else ()))) for number in range(4)]


def elastic(engines: Engines, every: str) -> str:
    """Return a router's settings, with one engine that prefills and two that decode."""
    roles = zip(engines[1:], ("prefill", "decode", "decode"), strict=True)
    servers = (f'[[backends]]\nurl = "{url}"\nrole = "{role}"\nelastic = true\n' for (_, url), role in roles)
    return "".join(servers) + QUICK.format(every=every)


def test_roles_follow_the_load_and_every_answer_is_a_plain_engine_s(engines: Engines) -> None:
    plain = engines[0][1]
    with router(settings=elastic(engines, "200ms")) as (process, url), ThreadPoolExecutor(32) as pool:
        assert split(url) == (1, 2)
        check(load_until(url, pool, 8, bodies(1, 900, 3), lambda: split(url) == (2, 1)), plain)
        check(load_until(url, pool, 12, bodies(2, 24, 60), lambda: split(url) == (1, 2)), plain)
        assert metrics(url, "skymemory_router_role_changes_total{") >= 2
        assert metrics(url, "skymemory_router_server_in_flight") == 0
        lines = [line for line in process.said if "drains to get the role" in line]
        assert len(lines) >= 2 and "of its objective; " in lines[0]
        assert not any("Traceback" in line for line in process.said)


def test_one_that_is_killed_as_it_drains_takes_only_its_own_answers_along(engines: Engines) -> None:
    plain = engines[0][1]
    # Looking so often the router never sees enough tokens to learn how fast one is alone, which other work on the same
    # processors would lengthen: decode engines then count as nearly idle, though they write long answers.
    with router(settings=elastic(engines, "20ms")) as (process, url), ThreadPoolExecutor(32) as pool:
        slow = islice((body for body in bodies(3, 24, 1500) if body["stream"]), 2)
        writing = [(body, pool.submit(ask, url, body)) for body in slow]  # one at each
        draining: list[str] = []

        def drains() -> bool:
            draining[:] = [one["name"] for one in servers(url).values() if one["state"] == "draining"]
            return bool(draining)

        prompts = load_until(url, pool, 8, bodies(4, 900, 3), drains)
        (killed,) = (engine for engine, its in engines if its.endswith(draining[0]))
        killed.kill()
        assert check(writing, plain, may_fail=True) == 1, "that of the other engine is whole"
        check(prompts, plain)
        ends_s = time.monotonic() + WAIT_S
        while split(url) != (1, 1):
            assert time.monotonic() < ends_s, servers(url)
            time.sleep(0.1)
        check([(body, pool.submit(ask, url, body)) for body in islice(bodies(5, 24, 60), 6)], plain)
        assert metrics(url, "skymemory_router_server_in_flight") == 0
        assert not any("Traceback" in line for line in process.said)
