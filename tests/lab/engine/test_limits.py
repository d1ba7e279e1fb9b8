"""What is bounded: the cache's memory, the line of those who wait, and the work done for clients who went away."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator

import pytest
from tests.lab.door import PATIENCE_S, Door, open_door
from tests.lab.engine.test_http import some_ids

from skymemory.errors import InvalidInput
from skymemory_lab.engine.run import EngineSettings

pytestmark = pytest.mark.engine
BLOCK = 16
BLOCK_BYTES = 6 * 2 * 2 * 64 * 4 * BLOCK
"""Of the small model in float32: layers, keys and values, heads, numbers of a head, bytes of a number, tokens."""
LONG = {"prompt": [5] * 20, "max_tokens": 8000, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def tight() -> Iterator[Door]:
    """Ten blocks of cache, one request at a time, two in line."""
    settings = EngineSettings(cache_bytes=10 * (BLOCK_BYTES + 128) + 5, max_running=1, max_waiting=2)
    with open_door(settings) as door:
        yield door


@pytest.mark.brief()
def test_the_cache_keeps_to_its_budget_and_lets_ends_of_prompts_go_first(tight: Door) -> None:
    assert tight.ask("/reset_prefix_cache", {}).status == 200
    caches = tight.engine.caches
    assert caches.capacity_blocks == 10
    older, newer = some_ids(6 * BLOCK + 1, seed=1), some_ids(7 * BLOCK + 1, seed=2)
    tight.cached(older)
    assert caches.held_blocks == 6
    before = caches.evicted_blocks
    tight.cached(newer)
    tight.until(lambda: caches.held_blocks == 10)
    assert caches.evicted_blocks - before == 3
    # Asking the older one again would evict what the next line asks for: ask with a prompt of its first blocks only.
    assert tight.cached(older[: 3 * BLOCK + 1]) == 3 * BLOCK
    assert tight.cached(newer) == 7 * BLOCK
    assert tight.cached(some_ids(40 * BLOCK, seed=3)) == 0  # larger than all of it, and answered
    tight.until(lambda: caches.held_blocks <= 10)
    assert tight.metric("vllm:cache_config_info", num_gpu_blocks="10") == 1


@pytest.mark.brief()
def test_without_room_for_a_block_nothing_is_cached(tight: Door) -> None:
    with open_door(EngineSettings(cache_bytes=0)) as door:
        ids = some_ids(50)
        assert [door.cached(ids), door.cached(ids)] == [0, 0]
        assert door.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_who_goes_away_is_not_computed_for(tight: Door, stream: bool) -> None:
    aborted = tight.metric("vllm:request_success_total", finished_reason="abort")
    connection = http.client.HTTPConnection("127.0.0.1", tight.port, timeout=PATIENCE_S)
    connection.request("POST", "/v1/completions", json.dumps({**LONG, "stream": stream}))
    if stream:
        answer = connection.getresponse()
        assert answer.read(6) == b"data: "
        answer.close()
    tight.until(lambda: tight.metric("vllm:num_requests_running") == 1)
    connection.close()
    tight.until(lambda: tight.metric("vllm:num_requests_running") == 0)
    assert tight.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1
    assert tight.complete([5] * 20, 2)["usage"]["completion_tokens"] == 2


def test_a_line_that_is_full_says_when_to_come_again(tight: Door) -> None:
    connections = []
    try:
        for number in range(3):  # one is computed, two wait
            connection = _sent(tight)
            connections.append(connection)
            tight.until(
                lambda number=number: (
                    tight.metric("vllm:num_requests_running") + tight.metric("vllm:num_requests_waiting") > number
                )
            )
        reply = tight.ask("/v1/completions", {"prompt": "a"})
        assert (reply.status, reply.headers["Retry-After"]) == (429, "1")
        assert (reply.body["error"]["type"], reply.body["error"]["code"]) == ("requests", "rate_limit_exceeded")
        assert tight.metric("vllm:num_requests_waiting") == 2 and tight.metric("vllm:kv_cache_usage_perc") > 0
        assert tight.ask("/health").status == 200
    finally:
        for connection in connections:
            connection.close()
    tight.until(lambda: tight.metric("vllm:num_requests_running") + tight.metric("vllm:num_requests_waiting") == 0)


def test_an_engine_that_stops_says_so_to_those_who_wait() -> None:
    with open_door(EngineSettings(cache_bytes=1 << 20, max_running=1)) as door:
        replies: list[int] = []

        def ask() -> None:
            replies.append(door.ask("/v1/completions", LONG).status)

        waiting = [threading.Thread(target=ask) for _ in range(3)]
        for one in waiting:
            one.start()
        door.until(lambda: door.metric("vllm:num_requests_waiting") == 2)
        door.engine.close()
        for one in waiting:
            one.join(PATIENCE_S)
        assert replies == [503, 503, 503] and door.ask("/health").status == 503
        # And to those who come later: nothing would answer them.
        assert [door.ask("/v1/completions", LONG).status, door.ask("/reset_prefix_cache", {}).status] == [503, 503]


def test_one_request_that_fails_does_not_end_the_engine(tight: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patched:
        patched.setattr(tight.engine.caches, "open", broken)
        reply = tight.ask("/v1/completions", {"prompt": "a"})
    assert reply.status == 500 and "out of luck" in reply.body["error"]["message"]
    with monkeypatch.context() as patched:
        patched.setattr("skymemory_lab.engine.thread.Sequence.decode", broken)
        assert tight.ask("/v1/completions", {"prompt": "a"}).status == 500
    assert tight.complete("a", 2)["usage"]["completion_tokens"] == 2


def test_a_context_longer_than_the_models_is_refused() -> None:
    with pytest.raises(InvalidInput, match="8192"), open_door(EngineSettings(context_tokens=9000)):
        pass


def _sent(door: Door) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=PATIENCE_S)
    connection.request("POST", "/v1/completions", json.dumps(LONG))
    return connection
