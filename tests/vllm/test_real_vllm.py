"""A real vLLM: its metrics and its events say what it does, and what we believe of it is what it then reports.

``make test-vllm`` installs vLLM into ``.venv-vllm`` and runs these; without that they are skipped.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import aiohttp
import numpy as np
import pytest
from tests.vllm.server import BLOCK_TOKENS, BLOCKS, PYTHON, Vllm

from skymemory import native
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.request import seed
from skymemory.router.engines.engine_metrics import EngineMetrics, fetch, fetch_metrics
from skymemory.router.engines.events import KvEvents
from skymemory.router.engines.feed import Feed, FeedState
from skymemory.router.engines.follower import EventSource, ReplayTimeouts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-vllm does it"),
]
SLOT = 0


def a_prompt(number: int, tokens: int) -> list[int]:
    dice = random.Random(number)
    return [dice.randrange(10, 8000) for _ in range(tokens)]


def ours(tokens: list[int], adapter: str = "", salt: str = "") -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    data = np.asarray(tokens, dtype="<u4").tobytes()
    return native.chain_hashes(data, 4 * BLOCK_TOKENS, seed("small", adapter, salt))


def metrics(vllm: Vllm) -> EngineMetrics:
    async def read() -> EngineMetrics:
        async with aiohttp.ClientSession() as session:
            return await fetch_metrics(partial(fetch, session), vllm.metrics_url)

    return asyncio.run(read())


async def until(true: Callable[[], bool], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.01)


class Listening:
    """A precise index that hears the server; ``cached`` serves a prompt and waits until its events are in."""

    def __init__(self, vllm: Vllm) -> None:
        self.vllm = vllm
        self.index = PreciseIndex(BLOCK_TOKENS)

    async def __aenter__(self) -> Listening:
        self.events = KvEvents(self.index, ReplayTimeouts(probe_s=0.3))
        self.feed: Feed = self.events.follow(
            "one", SLOT, EventSource(self.vllm.endpoint, self.vllm.replay_endpoint), model="small"
        )
        await until(lambda: (self.feed.connected and self.feed.state is not FeedState.WAITING) or not self.feed.errors)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.events.close()

    async def serve(self, tokens: list[int], model: str = "small", **more: object) -> int:
        """Prompt tokens that vLLM had cached; its events have come when this returns."""
        loop = asyncio.get_running_loop()
        cached = await loop.run_in_executor(None, lambda: self.vllm.complete(tokens, model, **more))
        adapter, salt = "" if model == "small" else model, str(more.get("cache_salt", ""))
        with suppress(TimeoutError):
            await until(lambda: self.matched(tokens, adapter, salt) == len(tokens) // BLOCK_TOKENS)
        await self.settled()
        return cached

    async def settled(self) -> None:
        """Until no events come any more: longer than a batch takes, and than the next probe."""
        heard = -1
        while heard != self.feed.counts.batches:
            heard = self.feed.counts.batches
            await asyncio.sleep(0.7)

    def matched(self, tokens: list[int], adapter: str = "", salt: str = "") -> int:
        return self.index.match(ours(tokens, adapter, salt), [SLOT])[0]


def listening(vllm: Vllm, scene: Callable[[Listening], Awaitable[None]]) -> None:
    async def play() -> None:
        async with Listening(vllm) as ears:
            await scene(ears)

    asyncio.run(play())


def usable(tokens: int) -> int:
    """Whole blocks of a prompt that vLLM takes from its cache: it computes the last token in any case."""
    return (tokens - 1) // BLOCK_TOKENS


def test_metrics_are_read_rightly(vllm: Vllm) -> None:
    idle = metrics(vllm)
    assert (idle.dialect, idle.missing) == ("vllm", ())
    report = idle.report
    assert (report.cache_blocks, report.block_tokens) == (BLOCKS, BLOCK_TOKENS)
    assert (report.waiting, report.running, report.kv_usage) == (0, 0, 0.0)
    with ThreadPoolExecutor(3) as pool:
        # One runs at a time (--max-num-seqs 1), so two of three wait.
        sent = [pool.submit(vllm.complete, a_prompt(n, 700), max_tokens=150, ignore_eos=True) for n in range(3)]
        seen = []
        while not all(each.done() for each in sent):
            seen.append(metrics(vllm).report)
    # Of adapters it says nothing before its first step.
    assert metrics(vllm).report.max_adapters == 2
    assert max(report.waiting for report in seen) == 2 and max(report.running for report in seen) == 1
    assert 700 / BLOCK_TOKENS / BLOCKS <= max(report.kv_usage for report in seen) <= 900 / BLOCK_TOKENS / BLOCKS


def test_what_is_matched_is_what_vllm_then_reports_as_cached(vllm: Vllm) -> None:
    async def scene(ears: Listening) -> None:
        first = a_prompt(10, 10 * BLOCK_TOKENS + 7)
        assert ears.matched(first) == 0
        assert await ears.serve(first) == 0
        assert ears.matched(first) == 10
        prompts = [
            first,
            first[: 4 * BLOCK_TOKENS] + a_prompt(11, 3 * BLOCK_TOKENS),
            first[: 4 * BLOCK_TOKENS + 5] + a_prompt(12, 90),
            first + a_prompt(13, 100),
            first[: 6 * BLOCK_TOKENS],
            a_prompt(14, 200),
        ]
        for prompt in prompts:
            believed = ears.matched(prompt)
            assert await ears.serve(prompt) == min(believed, usable(len(prompt))) * BLOCK_TOKENS, prompt[:4]
            assert ears.matched(prompt) == len(prompt) // BLOCK_TOKENS
        assert ears.feed.state is FeedState.WHOLE and not ears.feed.errors
        assert ears.feed.counts.unknown_events == ears.feed.counts.unusable_events == 0

    listening(vllm, scene)


def test_what_is_generated_is_matched_too(vllm: Vllm) -> None:
    async def scene(ears: Listening) -> None:
        prompt = a_prompt(20, BLOCK_TOKENS)
        body = {"model": "small", "prompt": prompt, "max_tokens": 80, "temperature": 0, "ignore_eos": True}
        body["return_token_ids"] = True
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(None, lambda: ears.vllm.post("/v1/completions", body))
        await ears.settled()
        said = answer["choices"][0]["token_ids"]
        turn = prompt + said + a_prompt(21, 50)
        believed = ears.matched(turn)
        assert len(said) == 80 and believed == (BLOCK_TOKENS + 79) // BLOCK_TOKENS
        assert await ears.serve(turn) == believed * BLOCK_TOKENS

    listening(vllm, scene)


def test_salts_and_adapters_share_nothing(vllm: Vllm) -> None:
    async def scene(ears: Listening) -> None:
        prompt = a_prompt(30, 5 * BLOCK_TOKENS + 3)
        whole = 5 * BLOCK_TOKENS
        kinds: list[dict[str, str]] = [
            {},
            {"salt": "A"},
            {"salt": "B"},
            {"adapter": "sql"},
            {"adapter": "sql", "salt": "A"},
        ]
        for kind in kinds:
            more = {"cache_salt": kind["salt"]} if "salt" in kind else {}
            model = kind.get("adapter", "small")
            assert ears.matched(prompt, **kind) == 0, kind
            assert await ears.serve(prompt, model, **more) == 0
            assert ears.matched(prompt, **kind) == 5, kind
            assert await ears.serve(prompt, model, **more) == whole
        read = await asyncio.get_running_loop().run_in_executor(None, metrics, vllm)
        assert read.report.adapters <= {"sql"} and read.report.max_adapters == 2

    listening(vllm, scene)


def test_what_is_evicted_is_believed_no_more(vllm: Vllm) -> None:
    async def scene(ears: Listening) -> None:
        # More than its 96 blocks, and served twice in a row: of a prompt of whole blocks that it holds, vLLM computes
        # the last block again, and has that twice from then on.
        prompts = [a_prompt(100 + n, 20 * BLOCK_TOKENS) for n in range(8)]
        for prompt in prompts:
            assert await ears.serve(prompt) == 0
            assert await ears.serve(prompt) == 19 * BLOCK_TOKENS
        believed = [ears.matched(prompt) for prompt in prompts]
        assert believed[-1] == 20 and believed[0] == 0 and ears.index.blocks_of(SLOT) <= BLOCKS
        dice = random.Random(1)
        for number in dice.choices(range(8), k=16):
            believing = min(ears.matched(prompts[number]), usable(20 * BLOCK_TOKENS))
            assert await ears.serve(prompts[number]) == believing * BLOCK_TOKENS
        assert ears.index.blocks_of(SLOT) <= BLOCKS

    listening(vllm, scene)


def test_a_cache_that_is_reset_is_believed_to_be_empty(vllm: Vllm) -> None:
    async def scene(ears: Listening) -> None:
        prompt = a_prompt(40, 3 * BLOCK_TOKENS + 1)
        await ears.serve(prompt)
        assert ears.matched(prompt) == 3
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, lambda: ears.vllm.post("/reset_prefix_cache"))
        # vLLM publishes with the next step, not before.
        await ears.serve(a_prompt(41, 5))
        await until(lambda: ears.matched(prompt) == 0)
        assert ears.index.blocks_of(SLOT) == 0
        assert await ears.serve(prompt) == 0

    listening(vllm, scene)


def test_who_begins_to_listen_late_knows_what_was_before(vllm: Vllm) -> None:
    async def scene(ears: Listening) -> None:
        prompt = a_prompt(50, 7 * BLOCK_TOKENS + 1)
        await ears.serve(prompt)
        async with Listening(vllm) as late:
            await until(lambda: late.matched(prompt) == 7)
            assert late.feed.counts.replayed and late.index.blocks_of(SLOT) == ears.index.blocks_of(SLOT)

    listening(vllm, scene)


def test_a_restarted_vllm_is_believed_to_hold_nothing(vllm: Vllm) -> None:
    async def scene(ears: Listening) -> None:
        prompt = a_prompt(60, 6 * BLOCK_TOKENS + 1)
        await ears.serve(prompt)
        assert ears.matched(prompt) == 6
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, vllm.stop)
        await until(lambda: ears.feed.state is FeedState.LOST)
        vllm.start()
        await loop.run_in_executor(None, vllm.wait)
        await until(lambda: ears.feed.connected and ears.matched(prompt) == 0, within_s=20)
        assert ears.feed.counts.restarts + ears.feed.counts.losses == 1
        assert await ears.serve(prompt) == 0
        assert ears.matched(prompt) == 6
        assert await ears.serve(prompt) == 6 * BLOCK_TOKENS

    listening(vllm, scene)
