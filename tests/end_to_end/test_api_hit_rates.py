"""Prompts by Responses and Messages are found in real engines' caches as often as those of chats."""

from __future__ import annotations

import json
import random
import urllib.request
from typing import Any

import pytest

pytest.importorskip("transformers", reason="an engine needs skymemory[hf]")
pytest.importorskip("aiohttp", reason="the router needs skymemory[router]")

from tests.end_to_end.real_door import real_engines
from tests.router.processes import PATIENCE_S, router

pytestmark = [pytest.mark.slow, pytest.mark.engine]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SYSTEMS, REQUESTS = 6, 48


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return dict(json.load(answer))


def bodies(path: str, seed: int = 11) -> list[dict[str, Any]]:
    """Requests of assistants with long instructions, in random order, with several turns each."""
    draw = random.Random(seed)
    words = ["the", "file", "system", "can", "be", "read", "by", "every", "user", "that", "has", "the", "right", "to"]
    systems = [f"Assistant {at}: " + " ".join(draw.choices(words, k=120)) for at in range(SYSTEMS)]
    found = []
    for _ in range(REQUESTS):
        system, turns = draw.choice(systems), []
        for at in range(draw.choice((1, 3))):
            role = "assistant" if at % 2 else "user"
            turns.append({"role": role, "content": " ".join(draw.choices(words, k=12))})
        shared = {"model": "small", "temperature": 0}
        if path == CHAT:
            found.append({**shared, "messages": [{"role": "system", "content": system}, *turns], "max_tokens": 2})
        elif path == RESPONSES:
            found.append({**shared, "instructions": system, "input": turns, "max_output_tokens": 2})
        else:
            found.append({**shared, "system": system, "messages": turns, "max_tokens": 2})
    return found


def hit_rate(engines: list[str], path: str) -> float:
    for engine in engines:
        post(f"{engine}/reset_prefix_cache", {})
    words = [word for engine in engines for word in ("--backend", engine)]
    cached = prompt = 0
    with router("--strategy", "approximate", *words) as (_, port):
        for body in bodies(path):
            usage = post(f"http://127.0.0.1:{port}{path}", body)["usage"]
            if path == CHAT:
                cached += usage["prompt_tokens_details"]["cached_tokens"]
                prompt += usage["prompt_tokens"]
            elif path == RESPONSES:
                cached += usage["input_tokens_details"]["cached_tokens"]
                prompt += usage["input_tokens"]
            else:
                cached += usage["cache_read_input_tokens"]
                prompt += usage["input_tokens"] + usage["cache_read_input_tokens"]
    return cached / prompt


def test_as_much_is_cached_as_of_chats() -> None:
    with real_engines(2) as engines:
        rates = {path: hit_rate(engines, path) for path in (CHAT, RESPONSES, MESSAGES)}
    assert rates[CHAT] > 0.6
    assert rates[RESPONSES] == pytest.approx(rates[CHAT], abs=0.01)
    assert rates[MESSAGES] == pytest.approx(rates[CHAT], abs=0.01)
