"""Two real vLLMs behind ``skymemory route``, which goes by their events: a prompt goes where its cache is."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.server import BLOCK_TOKENS, MODEL, PYTHON, ROOT, Vllm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-vllm does it"),
]
WORDS = tuple("the sea and a ship with no wind under stars that men of old had named".split())  # noqa: SIM905


class Routed:
    """The command, and what it answers."""

    def __init__(self, folder: Path, servers: tuple[Vllm, Vllm]) -> None:
        lines = ['listen = "127.0.0.1:0"', 'strategy = "precise"', "[prompts]", f"tokenizer = {json.dumps(str(MODEL))}"]
        lines.append(f"block_tokens = {BLOCK_TOKENS}")
        for each in servers:
            lines += ["[[backends]]", f'name = "{each.name}"', f'url = "{each.url}"', f'events = "{each.endpoint}"']
            lines.append(f'replay = "{each.replay_endpoint}"')
        settings = folder / "router.toml"
        settings.write_text("\n".join(lines))
        command = [sys.executable, "-m", "skymemory", "route", "--settings", str(settings)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().split()[2].rstrip(":")

    def complete(self, text: str, max_tokens: int = 1, **more: Any) -> tuple[dict[str, Any], str, int]:
        """The decision, what was said, and prompt tokens that the server had cached."""
        body = {
            "model": "small",
            "prompt": text,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }
        headers = {"Content-Type": "application/json", "x-skymemory-decision": "1"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body | more).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            decision = json.loads(answer.headers["x-skymemory-decision"])
            read = json.loads(answer.read())
        details = read["usage"].get("prompt_tokens_details") or {}
        return decision, read["choices"][0]["text"], details.get("cached_tokens") or 0

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    def batches(self) -> str:
        lines = self.metrics().splitlines()
        return "".join(line for line in lines if line.startswith("skymemory_router_server_events_batches_total"))

    def stop(self) -> int:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(20)
        finally:
            self._process.kill()


@pytest.fixture
def routed(tmp_path: Path, servers: tuple[Vllm, Vllm]) -> Iterator[Routed]:
    router = Routed(tmp_path, servers)
    try:
        end_s = time.monotonic() + 30
        while router.metrics().count("skymemory_router_server_events_blocks{") < 2:
            assert time.monotonic() < end_s, "it does not follow both servers' events"
            time.sleep(0.1)
        yield router
    finally:
        assert router.stop() == 0


def a_text(number: int, words: int) -> str:
    dice = random.Random(number)
    return " ".join(dice.choice(WORDS) for _ in range(words))


def settle(routed: Routed) -> None:
    """Until no events come any more."""
    before, now = "", routed.batches()
    while now != before:
        time.sleep(1.0)
        before, now = now, routed.batches()


def test_a_prompt_goes_to_the_server_that_has_it_whichever_router_sent_it_there(
    routed: Routed, servers: tuple[Vllm, Vllm]
) -> None:
    for number, server in enumerate((*servers, *reversed(servers))):
        text = a_text(1000 + number, 150)
        decision, _, cached = routed.complete(text)
        # No server had it. Then another client sends it to one of them, past the router.
        assert decision["matched_tokens"] == cached == 0
        text = a_text(2000 + number, 150)
        server.post("/v1/completions", {"model": "small", "prompt": text, "max_tokens": 1})
        settle(routed)
        decision, _, cached = routed.complete(text)
        assert decision["server"] == server.name, decision
        assert cached == decision["matched_tokens"] >= 4 * BLOCK_TOKENS


def test_second_turns_go_where_the_first_were_and_find_their_cache(routed: Routed) -> None:
    turns = {}
    for number in range(4):
        text = a_text(3000 + number, 90 + 20 * number)
        decision, said, cached = routed.complete(text, max_tokens=60)
        assert cached == decision["matched_tokens"] == 0
        turns[text + said] = decision["server"]
        settle(routed)
    for text, server in turns.items():
        decision, _, cached = routed.complete(f"{text} {a_text(5, 30)}")
        settle(routed)
        assert decision["server"] == server, decision
        # What was said is text by now, and may be cut into other tokens where it was cut off.
        assert cached == decision["matched_tokens"] > 2 * BLOCK_TOKENS


def test_salts_do_not_meet(routed: Routed) -> None:
    text = a_text(4000, 120)
    for salt in ("A", "B"):
        decision, _, cached = routed.complete(text, cache_salt=salt)
        settle(routed)
        assert cached == decision["matched_tokens"] == 0
    decision, _, cached = routed.complete(text, cache_salt="A")
    assert cached == decision["matched_tokens"] > 0


def test_an_adapter_goes_to_who_has_it_and_finds_its_own_cache(routed: Routed) -> None:
    text = a_text(5000, 120)
    for model in ("small", "sql"):
        decision, _, cached = routed.complete(text, model=model)
        settle(routed)
        assert cached == decision["matched_tokens"] == 0
    decision, _, cached = routed.complete(text, model="sql")
    assert decision["server"] == "one" and cached == decision["matched_tokens"] > 0
