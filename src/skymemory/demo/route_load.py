"""Load of the routing demo: generated prompts, sent at their arrival times, and the answers."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from skymemory.engine.inputs import SMALL_MODEL_FOLDER
from skymemory.kv.block import hash_blocks
from skymemory.sim.workload import WORKLOADS, generate, render_text

BLOCK_TOKENS = 16
CHARACTERS_PER_BLOCK = 96
"""Of text for each 512 tokens of the generator: prompts of some 12,000 tokens become some 600 of the small model."""
MOST_TOKENS = 100_000
"""Of the generator; longer prompts are left out, as its own limit is."""
NEW_TOKENS = (4, 12)
TRACE_S_PER_REQUEST = 25.0
"""Time of the generator per request: conversations begin so seldom that a short run sees their later turns."""
PATIENCE_S = 120.0
_CONTEXT = bytes(32)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when, as a part of the whole run, what, and how much of an answer."""

    at: float
    prompt: str
    tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    asked: tuple[Asked, ...]
    tokens: int
    distinct_blocks: int
    """Blocks of 16 tokens that one cache needs to hold everything."""
    best_hits: float
    """Share of tokens that one such cache would supply."""


@dataclass(frozen=True, slots=True)
class Answer:
    """TTFT in seconds and the engine's token counts of the prompt; or the error."""

    ttft_s: float = math.nan
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


def make_load(workload: str, requests: int, seed: int) -> Load:
    """Requests with the statistics of ``workload``; equal arguments give equal requests."""
    kind = WORKLOADS[workload]
    span_s = requests * TRACE_S_PER_REQUEST
    rate = kind.conversations_per_s
    drawn: list[Any] = []
    kind = replace(kind, batch_s=0.0, most_tokens=MOST_TOKENS)
    for _ in range(8):  # the number of requests is drawn, too: ask for more conversations until there are enough
        drawn = generate(replace(kind, conversations_per_s=rate), span_s, seed)
        if requests <= len(drawn) <= 1.3 * requests:
            break
        rate *= 1.12 * requests / max(1, len(drawn))
    drawn = drawn[:requests]
    tokenizer = Tokenizer.from_file(str(Path(SMALL_MODEL_FOLDER) / "tokenizer.json"))
    dice = random.Random(seed)
    known: set[bytes] = set()
    asked, supplied = [], 0
    for request in drawn:
        prompt = render_text(request, CHARACTERS_PER_BLOCK)
        ids = tokenizer.encode(prompt).ids
        blocks = hash_blocks(_CONTEXT, ids, BLOCK_TOKENS)
        held = sum(block in known for block in blocks)
        supplied += min(held * BLOCK_TOKENS, len(ids) - 1)
        known.update(blocks)
        at = (request.at_s - drawn[0].at_s) / max(1e-9, drawn[-1].at_s - drawn[0].at_s)
        asked.append(Asked(at, prompt, len(ids), dice.randint(*NEW_TOKENS)))
    tokens = sum(one.tokens for one in asked)
    return Load(tuple(asked), tokens, len(known), supplied / tokens)


async def replay(
    client: aiohttp.ClientSession, url: str, load: Load, span_s: float, heard: Callable[[Answer], None]
) -> list[Answer]:
    """Send every request at its time within ``span_s``; all answers, in the order of the requests."""
    began_s = time.perf_counter()

    async def one(asked: Asked) -> Answer:
        await asyncio.sleep(max(0.0, began_s + asked.at * span_s - time.perf_counter()))
        answer = await ask(client, url, asked.prompt, asked.new_tokens)
        heard(answer)
        return answer

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(asked)) for asked in load.asked]
    return [task.result() for task in tasks]


async def ask(client: aiohttp.ClientSession, url: str, prompt: str, new_tokens: int) -> Answer:
    """One streamed completion, greedy, of exactly ``new_tokens``."""
    body = {
        "model": "small",
        "prompt": prompt,
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s, ttft_s, usage, done = time.perf_counter(), math.nan, None, False
    try:
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with client.post(f"{url}/v1/completions", json=body, timeout=timeout) as answer:
            if answer.status != 200:
                return Answer(error=f"{answer.status}: {(await answer.text())[:200]}")
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                if math.isnan(ttft_s):
                    ttft_s = time.perf_counter() - began_s
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif (found := json.loads(line[6:]).get("usage")) is not None:
                    usage = found
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return Answer(error=f"{type(error).__name__}: {error}")
    if usage is None or not done or usage["completion_tokens"] != new_tokens:
        return Answer(error="the answer is incomplete")
    return Answer(ttft_s, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


async def clear_caches(client: aiohttp.ClientSession, urls: Sequence[str]) -> None:
    for url in urls:
        async with client.post(f"{url}/reset_prefix_cache") as answer:
            answer.raise_for_status()


async def metrics(client: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """An engine's samples by name, over all labels."""
    async with client.get(f"{url}/metrics") as answer:
        text = await answer.text()
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
    return samples
