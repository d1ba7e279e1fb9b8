"""A prompt prefilled by one engine and answered by another: the tokens are one engine's, whatever the store does."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("redis", reason="the store daemon's clients need skymemory[redis]")

from tests.lab.door import Door, open_door
from tests.lab.engine.test_http import some_ids
from tests.store.redis_server.daemons import serving

from skymemory.store.base import Buffer, Places, Presence
from skymemory.store.memory import MemoryStore
from skymemory_lab.engine.generation import Generation
from skymemory_lab.engine.handover import BlockFetcher, BlockSaver, Outgoing
from skymemory_lab.engine.metrics import PublishedMetrics
from skymemory_lab.engine.run import EngineSettings

pytestmark = pytest.mark.engine
BLOCK = 16
LONG = 600
"""Tokens of a prompt that takes three prefill steps."""
PREFILL = {"kv_transfer_params": {"do_remote_decode": True}}


def decode(**more: object) -> dict[str, object]:
    return {"kv_transfer_params": {"do_remote_prefill": True, **more}}


class Wayward(MemoryStore):
    """A store of which tests say what it takes, and how long that takes."""

    def __init__(self) -> None:
        super().__init__(256 << 20)
        self.pass_on = threading.Semaphore(0)
        self.held = False
        """Each put waits for a permit."""
        self.held_by_value = False
        """Each value of it does, and is there then: how many a put has depends on how quickly they come."""
        self.lost = False
        """It has nothing, and takes nothing."""
        self.damages = False

    def put_many(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> list[bool]:
        if self.held_by_value and len(items) > 1:
            return [self.put_many([item], places)[0] for item in items]
        if self.held:
            self.pass_on.acquire(timeout=120)
        if self.lost:
            return [False] * len(items)
        if self.damages:
            items = [(key, bytes(value)[:-1] + bytes([bytes(value)[-1] ^ 1])) for key, value in items]
        return super().put_many(items, places)

    def lookup(self, keys: Sequence[bytes]) -> list[Any]:
        return [Presence.MISS] * len(keys) if self.lost else super().lookup(keys)

    def sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        return [None] * len(keys) if self.lost else super().sizes(keys)


@contextmanager
def over(store: MemoryStore) -> Iterator[str]:
    """The address of a daemon over it."""
    folder = Path(tempfile.mkdtemp())
    try:
        with serving(store, folder) as (path, _, _):
            yield f"unix://{path}"
    finally:
        shutil.rmtree(folder)


class Pair:
    """An engine that prefills, one that decodes, one that knows of neither, and their store."""

    def __init__(self, store: Wayward, prefill: Door, decode: Door, alone: Door) -> None:
        self.store, self.prefill, self.decode, self.alone = store, prefill, decode, alone

    def forget(self) -> None:
        self.store.held = self.store.held_by_value = self.store.lost = self.store.damages = False
        self.store.pass_on = threading.Semaphore(0)
        for door in (self.prefill, self.decode, self.alone):
            assert door.ask("/reset_prefix_cache", {}).status == 200

    def given_up(self) -> float:
        return self.decode.metric("skymemory:remote_prefill_given_up_total")


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    store = Wayward()
    with over(store) as address:
        base = {"cache_bytes": 32 << 20, "max_running": 4, "store": address}
        with (
            open_door(EngineSettings(**base, role="producer")) as prefill,
            open_door(EngineSettings(**base, role="consumer", wait_s=5.0)) as decode_door,
            open_door(EngineSettings(cache_bytes=32 << 20)) as alone,
        ):
            yield Pair(store, prefill, decode_door, alone)


@pytest.fixture
def pair(engines: Pair) -> Pair:
    engines.forget()
    return engines


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


@pytest.mark.brief("80")
@pytest.mark.parametrize("tokens", [5, 5 * BLOCK, LONG])
def test_one_after_the_other_gives_the_tokens_of_one_engine(pair: Pair, tokens: int) -> None:
    ids = some_ids(tokens, seed=tokens)
    first = pair.prefill.complete(ids, 1, **PREFILL)
    assert first["kv_transfer_params"] == {"do_remote_prefill": True, "sky_tokens": tokens // BLOCK * BLOCK}
    answer = pair.decode.complete(ids, 12, kv_transfer_params=first["kv_transfer_params"])
    assert "kv_transfer_params" not in answer
    assert text(answer) == text(pair.alone.complete(ids, 12))
    assert cached(answer) == min(tokens // BLOCK * BLOCK, tokens - 1)
    assert pair.given_up() == 0


@pytest.mark.slow
@pytest.mark.seeded
def test_at_the_same_time_blocks_are_fetched_while_the_prompt_is_computed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = some_ids(LONG, seed=77)
    pair.store.held = pair.store.held_by_value = True
    saver, offered = pair.prefill.engine.saver, []
    assert saver is not None
    offer = saver.offer
    monkeypatch.setattr(saver, "offer", lambda chains, to: (offered.append(len(chains[0])), offer(chains, to)))
    before = pair.decode.metric("skymemory:store_fetched_blocks_total")

    def fetched() -> float:
        return pair.decode.metric("skymemory:store_fetched_blocks_total") - before

    with ThreadPoolExecutor() as pool:
        answer = pool.submit(pair.decode.complete, ids, 12, **decode(sky_wait_ms=120_000))
        pair.decode.until(lambda: pair.decode.metric("vllm:num_requests_waiting") == 1)
        other = pair.decode.complete(some_ids(40, seed=3), 4)  # is not held up by the one that waits
        assert other["usage"]["completion_tokens"] == 4
        first = pool.submit(pair.prefill.complete, ids, 1, **PREFILL)
        for blocks in (16, 32):  # a prefill step has 256 tokens
            pair.store.pass_on.release(16)
            pair.decode.until(lambda blocks=blocks: fetched() == blocks)  # type: ignore[misc]
            assert not answer.done() and not first.done()
        pair.store.held = pair.store.held_by_value = False
        pair.store.pass_on.release(16)
        assert first.result(60)["kv_transfer_params"]["sky_tokens"] == LONG // BLOCK * BLOCK
        assert text(answer.result(60)) == text(pair.alone.complete(ids, 12))
        assert cached(answer.result()) == LONG // BLOCK * BLOCK
    assert offered[:2] == [16, 32]  # by prefill steps, not at the end


def test_blocks_that_keep_coming_are_waited_for_longer_than_one_deadline(pair: Pair) -> None:
    ids = some_ids(100, seed=78)
    pair.store.held = pair.store.held_by_value = True
    before = pair.given_up()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(pair.prefill.complete, ids, 1, **PREFILL)
        answer = pool.submit(pair.decode.complete, ids, 4, **decode(sky_wait_ms=1000))
        for _ in range(6):
            time.sleep(0.4)  # together far more than a deadline, also if the answer is asked for late
            pair.store.pass_on.release()
        assert first.result(60) and cached(answer.result(60)) == 96
    assert pair.given_up() == before


def test_a_chat_streamed_is_the_chat_of_one_engine(pair: Pair) -> None:
    body = {"messages": [{"role": "user", "content": "What is git? " * 30}], "temperature": 0, "ignore_eos": True}
    path = "/v1/chat/completions"
    first = pair.prefill.ask(path, {**body, "max_tokens": 1, **PREFILL}).body
    ask = {**body, "max_tokens": 12, "stream_options": {"include_usage": True}}
    got = pair.decode.stream(path, {**ask, "kv_transfer_params": first["kv_transfer_params"]})
    expected = pair.alone.stream(path, ask)

    def words(chunks: list[dict[str, Any]]) -> str:
        return "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks if chunk["choices"])

    assert words(got) == words(expected) != ""
    assert cached(got[-1]) == first["kv_transfer_params"]["sky_tokens"] > 0


def test_what_does_not_come_in_time_is_computed_and_counted(pair: Pair) -> None:
    ids = some_ids(100, seed=5)
    before = pair.given_up()
    began_s = time.monotonic()
    answer = pair.decode.complete(ids, 12, **decode(sky_wait_ms=150))
    assert time.monotonic() - began_s >= 0.15
    assert text(answer) == text(pair.alone.complete(ids, 12)) and cached(answer) == 0
    assert pair.given_up() == before + 1
    assert pair.decode.metric("skymemory:remote_prefill_wait_seconds_total") >= 0.15


@pytest.mark.brief()
def test_a_store_that_loses_all_of_it_costs_time_and_no_token(pair: Pair) -> None:
    ids = some_ids(100, seed=6)
    first = pair.prefill.complete(ids, 1, **PREFILL)["kv_transfer_params"]
    pair.store.lost = True
    answer = pair.decode.complete(ids, 12, kv_transfer_params={**first, "sky_wait_ms": 50})
    assert text(answer) == text(pair.alone.complete(ids, 12)) and cached(answer) == 0
    # And one that takes nothing is said to have nothing: no engine waits for it.
    first = pair.prefill.complete(some_ids(100, seed=7), 1, **PREFILL)["kv_transfer_params"]
    assert first["sky_tokens"] == 0
    before = pair.given_up()
    pair.decode.complete(some_ids(100, seed=7), 4, kv_transfer_params=first)
    assert pair.given_up() == before


def test_what_was_stored_and_is_gone_is_not_waited_for_long(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    ids = some_ids(100, seed=16)
    first = pair.prefill.complete(ids, 1, **PREFILL)["kv_transfer_params"]
    assert first["sky_tokens"] == 96
    pair.store.lost = True
    answer = pair.decode.complete(ids, 12, kv_transfer_params=first)
    assert "6 of 6 blocks did not come within 0.5 s" in caplog.text, "the engine's setting is 5 s"
    assert text(answer) == text(pair.alone.complete(ids, 12)) and cached(answer) == 0


def test_a_damaged_block_is_computed_and_deleted(pair: Pair) -> None:
    ids = some_ids(100, seed=8)
    pair.store.damages = True
    pair.prefill.complete(ids, 1, **PREFILL)
    pair.store.damages = False
    entries = pair.store.stats()["entries"]
    answer = pair.decode.complete(ids, 12, **decode(sky_wait_ms=0))
    assert text(answer) == text(pair.alone.complete(ids, 12)) and cached(answer) == 0
    assert pair.store.stats()["entries"] == entries - 6


def test_a_block_damaged_where_nothing_else_checks_it_is_not_taken_over(pair: Pair) -> None:
    ids, memory = np.asarray(some_ids(100, seed=10), np.int64), MemoryStore(32 << 20)
    pair.prefill.complete(ids.tolist(), 1)
    one, other = pair.prefill.engine, pair.decode.engine
    chains, held = one.thread.call(lambda: one.caches.find_cached_blocks("", ids)).result(60)
    values = [bytes(value) for value in one.caches.store.get_now(chains[0]) if value is not None]
    assert held == len(values) == 6
    values[3] = values[3][:-1] + bytes([values[3][-1] ^ 1])
    memory.put_many(list(zip(chains[0], values, strict=True)))
    fetcher = BlockFetcher(memory, other.thread, other.caches, PublishedMetrics("x"), 1.0)
    asyncio.run(fetcher.load_blocks(Generation(ids, 4)))
    fetcher.close()
    assert other.thread.call(lambda: other.caches.find_cached_blocks("", ids)).result(60)[1] == 3
    assert memory.lookup(chains[0][2:5]) == [Presence.HIT, Presence.MISS, Presence.HIT]


def test_a_client_that_leaves_while_waiting_leaves_nothing(pair: Pair) -> None:
    body = {"prompt": some_ids(100, seed=9), "max_tokens": 4, **decode(sky_wait_ms=60_000)}
    connection = http.client.HTTPConnection("127.0.0.1", pair.decode.port, timeout=20)
    connection.request("POST", "/v1/completions", json.dumps(body))
    pair.decode.until(lambda: pair.decode.metric("vllm:num_requests_waiting") == 1)
    connection.close()
    pair.decode.until(lambda: pair.decode.metric("vllm:num_requests_waiting") == 0)
    assert pair.decode.metric("vllm:num_requests_running") == 0


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([1], "Expected `object`"),
        ({"do_remote_prefill": "yes"}, "do_remote_prefill"),
        ({"do_remote_prefill": True, "remote_block_ids": [1, 2]}, "unknown field 'remote_block_ids'"),
        ({"do_remote_prefill": True, "sky_tokens": -1}, "sky_tokens"),
        ({"do_remote_prefill": True, "sky_wait_ms": 1e9}, "sky_wait_ms"),
        ({"do_remote_prefill": True, "do_remote_decode": True}, "both steps"),
        ({"sky_tokens": 16}, "go with 'do_remote_prefill'"),
        ({"do_remote_decode": True}, "--role producer or both"),
    ],
)
def test_malformed_parameters_are_refused(pair: Pair, params: object, words: str) -> None:
    reply = pair.decode.ask("/v1/completions", {"prompt": "git", "kv_transfer_params": params})
    assert reply.status == 400 and words in reply.body["error"]["message"]
    assert reply.body["error"]["param"] == "kv_transfer_params"


def test_who_has_no_store_or_another_role_refuses(pair: Pair) -> None:
    for door, params in ((pair.alone, PREFILL), (pair.alone, decode()), (pair.prefill, decode())):
        reply = door.ask("/v1/completions", {"prompt": "git", **params})
        assert reply.status == 400 and "--store ADDRESS" in reply.body["error"]["message"]
    reply = pair.prefill.ask("/v1/completions", {"prompt": "git", "stream": True, **PREFILL})
    assert reply.status == 400 and "answered whole" in reply.body["error"]["message"]
    # Fields of other connectors that say nothing, as vLLM's proxies send them.
    nothing = {"do_remote_decode": False, "do_remote_prefill": False, "remote_engine_id": None}
    assert pair.alone.ask("/v1/completions", {"prompt": "git", "kv_transfer_params": nothing}).status == 200


def test_blocks_of_a_store_that_fails_are_counted_as_unsaved() -> None:
    class Failing(MemoryStore):
        def put_many(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> list[bool]:
            raise ConnectionError("gone")

    cache, metrics, outgoing = MemoryStore(1 << 20), PublishedMetrics("m"), Outgoing()
    keys = [bytes([number]) * 32 for number in range(3)]
    assert all(cache.put_many([(key, b"value") for key in keys]))
    saver = BlockSaver(Failing(1 << 20), cache, 5, metrics)
    saver.offer([keys], outgoing)
    saver.end(outgoing)
    assert outgoing.ended.result(60) == 0, "nothing is promised"
    saver.close(0.0)
    assert 'skymemory:store_unsaved_blocks_total{engine="0",model_name="m"} 3.0' in metrics.text().decode()
