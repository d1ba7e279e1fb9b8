"""A proxy that goes by engines' events: requests go where an engine reported the cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.router.engines.test_events import BLOCK_TOKENS, Publisher, a_publisher
from tests.router.running import Running, until

from skymemory.engine.inputs import small_model_folder
from skymemory.errors import InvalidInput
from skymemory.router.http.proxy_server import ProxyServer
from skymemory.router.settings import settings_from

TRAINED = small_model_folder()
PRECISE = {"strategy": "precise", "prompts": {"tokenizer": str(TRAINED), "block_tokens": BLOCK_TOKENS}}


@pytest.fixture
def publishers() -> Iterator[list[Publisher]]:
    with ExitStack() as stack:
        yield [stack.enter_context(a_publisher(seed=seed, capacity=100)) for seed in range(2)]


def backends(running: Running, publishers: list[Publisher]) -> list[dict[str, Any]]:
    return [
        {"url": engine.url, "name": engine.name, "events": each.endpoint, "replay": each.replay_endpoint}
        for engine, each in zip(running.engines, publishers, strict=True)
    ]


def test_requests_go_where_events_say_that_their_prompt_is(
    run: Callable[..., Running], publishers: list[Publisher]
) -> None:
    running = run(2)
    running.close_server()
    running.restart(**PRECISE, backends=backends(running, publishers))
    held = [each.order(publish=30) for each in publishers]
    until(lambda: all(running.metric("server_events_batches_total", server=f"e{n}") == 30 for n in range(2)))
    for number, name in enumerate(("e0", "e1")):
        mine, others = ({block[8:] for block in held[which]} for which in (number, 1 - number))
        chain = max(mine - others, key=len)
        tokens = [digit for digit in chain for _ in range(BLOCK_TOKENS)]
        decided = running.complete({"x-skymemory-decision": "1"}, prompt=[*tokens, 1, 2])
        decision = json.loads(decided.headers["x-skymemory-decision"])
        assert (decision["server"], decision["matched_tokens"]) == (name, len(tokens))
        assert running.metric("server_events_whole", server=name) == 1
        assert running.metric("server_events_blocks", server=name) == len(held[number])


def test_who_leaves_is_heard_no_more_and_who_comes_is(run: Callable[..., Running], publishers: list[Publisher]) -> None:
    running = run(2)
    running.close_server()
    both = backends(running, publishers)
    table: dict[str, Any] = {"listen": "127.0.0.1:0", **PRECISE, "health": {"every": 0.1, "models_every": 0.2}}
    running.restart(**PRECISE, backends=both[:1])
    server = running.server
    assert server is not None
    until(lambda: list(server.events.feeds) == ["e0"])

    async def take_up() -> None:
        server.reset(settings_from({**table, "backends": both[1:]}))

    running.loop.run(take_up())
    until(lambda: list(server.events.feeds) == ["e1"])
    held = publishers[1].order(publish=5)
    until(lambda: running.metric("server_events_blocks", server="e1") == len(held))

    async def take_its_events_away() -> None:
        assert server is not None
        server.reset(settings_from({**table, "backends": [{**both[1], "events": ""}]}))

    running.loop.run(take_its_events_away())
    until(lambda: not server.events.feeds)


def test_a_server_without_events_is_named_once(run: Callable[..., Running], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "skymemory.router"):
        running = run(1, **PRECISE)
        until(lambda: "uses KV events" in caplog.text)
        running.close_server()
        running.restart(strategy="least-load", backends=[{"url": running.engines[0].url, "events": "ipc:///none"}])
        until(lambda: "does not use them" in caplog.text)
    assert caplog.text.count("uses KV events") == 1


def test_settings_that_could_never_match_are_refused() -> None:
    backend = {"backends": ["http://127.0.0.1:1"]}
    with pytest.raises(InvalidInput, match="engines' tokenizer"):
        ProxyServer(settings_from({**backend, "strategy": "precise"}))
    with pytest.raises(InvalidInput, match="block_tokens is 32, and prompts: block_tokens is 4"):
        ProxyServer(settings_from({**backend, **PRECISE, "options": {"block_tokens": 32}}))
    server = ProxyServer(settings_from({**backend, **PRECISE}))
    assert server.picker.scorer.index.block_tokens == BLOCK_TOKENS  # type: ignore[attr-defined]
