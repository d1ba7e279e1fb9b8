"""Engines with a real model, killed while they stream: the router's client gets the answer of one that stays up."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("transformers", reason="an engine needs skymemory[hf]")
pytest.importorskip("aiohttp", reason="serving needs skymemory[router]")

from tests.end_to_end.test_serve import PATIENCE_S
from tests.end_to_end.test_serve import serving as engine_process
from tests.end_to_end.test_two_steps import router

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]
PROMPT = "The git command shows the differences between two commits of a repository, or between"
TOKENS = 120
KILLED_AT = 18
TOTALS = ("completion_tokens", "total_tokens")
COMPLETION = ("/v1/completions", {"prompt": PROMPT})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]})


def events_of(url: str, path: str, body: dict[str, Any]) -> Iterator[tuple[dict[str, Any] | None, str]]:
    """Each chunk of a stream (None: its end), and the server that the router has chosen."""
    whole = {**body, "max_tokens": TOKENS, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"Content-Type": "application/json", "x-skymemory-decision": "1"}
    request = urllib.request.Request(url + path, json.dumps(whole).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        server = json.loads(answer.headers["x-skymemory-decision"])["server"]
        for line in answer:
            if line.startswith(b"data: "):
                yield (None if line.startswith(b"data: [DONE]") else json.loads(line[6:])), server


def text_of(chunk: dict[str, Any]) -> str:
    choices = chunk["choices"]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def test_engines_that_are_killed_in_the_middle_of_their_streams() -> None:
    with ExitStack() as stack:
        engines = [stack.enter_context(engine_process()) for _ in range(3)]
        words = [word for _, url in engines for word in ("--backend", url)]
        _, routed = stack.enter_context(router(*words, "--strategy", "least-load"))
        for path, body in (COMPLETION, CHAT):
            expected = [chunk for chunk, _ in events_of(routed, path, body) if chunk is not None]
            received: list[dict[str, Any]] = []
            ended, killed = False, 0
            for chunk, server in events_of(routed, path, body):
                if chunk is None:
                    ended = True
                    continue
                received.append(chunk)
                if len(received) == KILLED_AT:
                    killed = next(process.pid for process, url in engines if server in url)
                    os.kill(killed, signal.SIGKILL)
            assert ended and killed, path
            assert "".join(map(text_of, received)) == "".join(map(text_of, expected)), path
            assert len({(chunk["id"], chunk["created"]) for chunk in received}) == 1
            usage, wanted = received[-1]["usage"], expected[-1]["usage"]
            assert [usage[name] for name in TOTALS] == [wanted[name] for name in TOTALS]
