"""An engine in this process with its door open on a free port, and a plain client of it."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from skymemory_lab.engine.http import make_runner
from skymemory_lab.engine.run import Engine, EngineSettings

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: Any


@dataclass
class Door:
    engine: Engine
    port: int

    def ask(self, path: str, body: Any = None, raw: bytes | None = None) -> Reply:
        """One request: POST if there is a body. JSON if the answer is."""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return self._reply(answer.status, dict(answer.headers), answer.read())
        except urllib.error.HTTPError as error:
            return self._reply(error.code, dict(error.headers), error.read())

    def complete(self, prompt: Any, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
        """A greedy completion's body."""
        reply = self.ask("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more})
        assert reply.status == 200, reply.body
        return dict(reply.body)

    def cached(self, prompt: Any, **more: Any) -> int:
        """Tokens that the cache supplied of ``prompt``, by the engine's own word."""
        return int(self.complete(prompt, 1, **more)["usage"]["prompt_tokens_details"]["cached_tokens"])

    def open_stream(self, path: str, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request("POST", path, json.dumps({**body, "stream": True}))
        return connection, connection.getresponse()

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All chunks of a stream, which must end as OpenAI's do."""
        connection, answer = self.open_stream(path, body)
        assert answer.status == 200 and answer.getheader("Content-Type").startswith("text/event-stream")
        events = answer.read().decode().split("\n\n")
        connection.close()
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples called ``name`` that have ``labels``."""
        text = self.ask("/metrics").body.decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        found = [sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items()]
        return sum(found)

    def until(self, what: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline_s, "it did not come to that"
            time.sleep(0.01)

    @staticmethod
    def _reply(status: int, headers: dict[str, str], content: bytes) -> Reply:
        is_json = headers.get("Content-Type", "").startswith("application/json")
        return Reply(status, headers, json.loads(content) if is_json else content)


@contextmanager
def open_door(settings: EngineSettings) -> Iterator[Door]:
    engine = Engine(settings)
    loop = asyncio.new_event_loop()
    runner = make_runner(engine.application(), 1)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def begin() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    try:
        yield Door(engine, asyncio.run_coroutine_threadsafe(begin(), loop).result(PATIENCE_S))
    finally:
        engine.close()
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()
