"""One bad server among good ones, through real sockets: how many requests reach it, what clients get, and how soon it
has its share again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.router.mock_engine import MockEngine
from tests.router.running import Running

Run = Callable[..., Running]
REQUESTS, CLIENTS = 200, 6
MOST = 3
"""Requests that may reach the bad server."""
KINDS: dict[str, dict[str, Any]] = {
    "500": {"status": 500},
    "429": {"status": 429},
    "hold": {"hold": True},  # its health is fine
    "hang": {},
}


def send(running: Running, number: int, stream: bool) -> int:
    return running.complete(prompt=f"{number % 23} " * 40, stream=stream).status


def drive(running: Running, requests: int, stream: bool, clients: int = CLIENTS) -> Counter[int]:
    with ThreadPoolExecutor(clients) as pool:
        return Counter(pool.map(lambda number: send(running, number, stream), range(requests)))


def make_bad(engine: MockEngine, kind: str) -> None:
    engine.mock = {"first_byte_s": 0.02, **KINDS[kind]} if kind == "hold" else {**KINDS[kind]}
    engine.hangs = kind == "hang"


def make_good(engine: MockEngine) -> None:
    engine.mock, engine.hangs = {"first_byte_s": 0.02}, False
    engine.release.set()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [None, "lmetric", "least-load"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("worked_before", [False, True])
def test_few_requests_reach_a_bad_server_and_clients_see_no_error(
    run: Run, kind: str, stream: bool, strategy: str | None, worked_before: bool
) -> None:
    running = run(3, **({} if strategy is None else {"strategy": strategy}), health={"every": 2.0})
    for engine in running.engines:
        make_good(engine)
        engine.release.clear()
    if worked_before:
        assert drive(running, 60, stream) == {200: 60}
    bad = running.engines[0]
    make_bad(bad, kind)
    bad.seen.clear()
    began_s = time.monotonic()
    assert drive(running, REQUESTS, stream) == {200: REQUESTS}
    took_s = time.monotonic() - began_s
    reached = len(bad.seen)
    assert reached <= MOST, f"{reached} of {REQUESTS} requests in {took_s:.1f} s"
    print(f"{kind} {stream} {strategy} {worked_before}: {reached} in {took_s:.1f}")
