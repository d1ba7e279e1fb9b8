"""A router and engines that tests talk to over real sockets, in one event loop in a thread beside the test."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tests.router.mock_engine import MockEngine

from skymemory.router.http.connection import HttpConnection
from skymemory.router.http.exchange import Exchange
from skymemory.router.http.proxy_server import ProxyServer
from skymemory.router.http.upstream import UpstreamConnection
from skymemory.router.settings import settings_from

T = TypeVar("T")
PATIENCE_S = 60.0


def until(true: Callable[[], bool]) -> None:
    """Wait for it."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline_s, "it did not come true"
        time.sleep(0.01)


def assert_no_cycles(ask: Callable[[], None]) -> None:
    """Assert that no request or connection is left to the garbage collector, which looks for cycles seldom, since each
    look would delay a request; until then they hold what clients sent, and the buffers of TLS.
    """

    def number(kind: type) -> int:
        return sum(issubclass(type(each), kind) for each in gc.get_objects())

    kinds = Exchange, HttpConnection, UpstreamConnection
    ask()
    gc.collect()
    gc.disable()
    try:
        before = [number(kind) for kind in kinds]
        for _ in range(5):
            ask()
        until(lambda: all(number(kind) <= count + 1 for kind, count in zip(kinds, before, strict=True)))
    finally:
        gc.enable()


try:
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop


class Loop:
    """An event loop in a thread: the one that `skymemory route` takes."""

    def __init__(self) -> None:
        self.loop = new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENCE_S)
        self.loop.close()


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Running:
    """A router in front of engines."""

    loop: Loop
    engines: list[MockEngine] = field(default_factory=list)
    server: ProxyServer | None = None

    def start(self, engines: int = 3, **settings: Any) -> Running:
        for number in range(engines):
            engine = MockEngine(f"e{number}")
            self.loop.run(engine.start())
            self.engines.append(engine)
        self.restart(**settings)
        return self

    def restart(self, **settings: Any) -> None:
        table: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "strategy": "least-load",
            "backends": [{"url": engine.url, "name": engine.name} for engine in self.engines],
            "health": {"every": 0.1, "metrics_every": 0.1, "models_every": 0.2, **settings.pop("health", {})},
            **settings,
        }

        async def starting() -> ProxyServer:
            server = ProxyServer(settings_from(table))
            await server.start()
            return server

        self.server = self.loop.run(starting())

    def close_server(self) -> None:
        if self.server is not None:
            self.loop.run(self.server.close())
            self.server = None

    def close(self) -> None:
        self.close_server()
        for engine in self.engines:
            self.loop.run(engine.die())

    @property
    def port(self) -> int:
        assert self.server is not None
        return self.server.port

    def open(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> http.client.HTTPResponse:
        """An answer whose body has not been read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        return connection.getresponse()

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        response = self.open(method, path, body, headers)
        try:
            return Answer(response.status, response.headers, response.read())
        finally:
            response.close()

    def complete(self, headers: dict[str, str] | None = None, **body: Any) -> Answer:
        return self.ask("POST", "/v1/completions", {"model": "small", "prompt": "abcd" * 40, **body}, headers)

    def metric(self, name: str, **labels: str) -> float:
        assert self.server is not None
        value = self.server.metrics.registry.get_sample_value(f"skymemory_router_{name}", labels or None)
        return 0.0 if value is None else value
