"""An engine that computes nothing and does what a test requests: answer, stream, wait, hang up, lie.

``python -m tests.router.mock_engine NAME`` runs one as a process and prints its port.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import socket
import ssl
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar

from skymemory.conductor.picker import PrefillTotals

METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="small"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{model_name="small"}} {waiting}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{model_name="small"}} 0.25
"""


@dataclass(eq=False)
class MockEngine:
    """What a request's own ``mock`` field says comes before what is set here.

    ``mock``: ``events`` of a stream (3), ``gap_s`` between them, ``first_byte_s`` before the first, ``status``,
    ``die`` ("before", "after-headers", "between-events", "in-event", "in-body"), ``open_end`` (no length, no chunks),
    ``body_bytes`` of an answer, ``more`` header lines of it, ``packed`` (a Content-Encoding), ``garbage`` (an answer
    that is no JSON), ``hold`` (it answers when ``release`` is set, and notices that its client leaves),
    ``refuses_params``.

    To ``do_remote_decode`` it answers with ``params``, as an engine that keeps what it computed for another one.
    """

    event_sources: ClassVar[list[dict[str, Any]] | None] = None
    """What vLLM's /kv_event_sources says; None: there is no such page."""
    name: str
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "small", "object": "model"}])
    healthy: bool = True
    metrics_delay_s: float = 0.0
    waiting: int = 0
    cached_tokens: int | None = 8
    prompt_tokens: int = 32
    prefills: PrefillTotals | None = None
    """What its metrics report."""
    mock: dict[str, Any] = field(default_factory=dict)
    seen: list[dict[str, Any]] = field(default_factory=list)
    """Requests with a body: path, headers by lower-case names, body."""
    params: dict[str, Any] | None = field(default_factory=lambda: {"do_remote_prefill": True, "sky_tokens": 32})
    release: asyncio.Event = field(default_factory=asyncio.Event)
    held: int = 0
    """Requests that wait for ``release``."""
    connections: int = 0
    abandoned: int = 0
    """Streams whose reader went away."""
    port: int = 0
    tls: ssl.SSLContext | None = None
    hangs: bool = False
    """It takes connections and requests, those for its health too, and answers none until ``release`` is set."""
    key: str = ""
    """Who does not show it gets 401, whatever is asked."""
    _holder: socket.socket | None = None
    """Bound to the port and never listening: while the engine is dead, connections are refused, and no other process is
    given its port.
    """
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    async def start(self) -> None:
        if self._holder is None:
            self._holder = self._bound()
            self.port = self._holder.getsockname()[1]
        self._server = await asyncio.start_server(
            self._connected, sock=self._bound(), limit=1 << 24, ssl=self.tls, backlog=1024
        )

    def _bound(self) -> socket.socket:
        bound = socket.socket()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(("127.0.0.1", self.port))
        return bound

    def refuse_connections(self) -> None:
        """Take no new ones; those that there are go on."""
        assert self._server is not None
        self._server.close()

    async def die(self) -> None:
        """At once, in the middle of whatever it does; ``start`` brings it back at the same port."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None or not self._server.is_serving():
            writer.transport.abort()  # it died between the kernel's accept and this
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self.connections -= 1
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = path.partition("?")[0]
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            self._reply(writer, 401, b"{}")
            return True
        if method == "POST":
            self.seen.append({"path": path, "headers": headers, "body": body})
        if self.hangs and not await self._is_released(reader):
            return False
        if method == "GET":
            await self._get(path, writer)
            return True
        asked = json.loads(body) if body[:1] == b"{" else {}
        mock = {**self.mock, **asked.get("mock", {})}
        if len(self.seen) <= mock.get("full_for", 0):
            mock["status"] = 429
        if mock.get("die") == "before":
            return False
        await asyncio.sleep(mock.get("first_byte_s", 0.0))
        if mock.get("hold") and not await self._is_released(reader):
            self.abandoned += 1
            return False
        kv = asked.get("kv_transfer_params") or {}
        if kv and mock.get("refuses_params"):
            self._reply(writer, 400, b'{"error":{"message":"no connector","param":"kv_transfer_params"}}')
            return True
        if asked.get("stream") and mock.get("status", 200) < 400:
            return await self._stream(writer, reader, mock)
        return self._answer(writer, mock, self.params if kv.get("do_remote_decode") else None)

    async def _is_released(self, reader: asyncio.StreamReader) -> bool:
        """False: the client left first."""
        waits = [asyncio.create_task(reader.read(1)), asyncio.create_task(self.release.wait())]
        self.held += 1
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return self.release.is_set()
        finally:
            self.held -= 1
            for each in waits:
                each.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _get(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/metrics":
            await asyncio.sleep(self.metrics_delay_s)
            text = METRICS.format(running=0, waiting=self.waiting) + self._prefills()
            self._reply(writer, 200, text.encode(), "text/plain; version=0.0.4")
        elif path == "/v1/models":
            self._reply(writer, 200, json.dumps({"object": "list", "data": self.models}).encode())
        elif path == "/kv_event_sources" and self.event_sources is not None:
            self._reply(writer, 200, json.dumps(self.event_sources).encode())
        else:
            self._reply(writer, 200 if self.healthy else 503, b"{}")

    def _reply(
        self, writer: asyncio.StreamWriter, status: int, body: bytes, kind: str = "application/json", more: str = ""
    ) -> None:
        writer.write(
            f"HTTP/1.1 {status} So\r\nContent-Type: {kind}\r\nX-Engine: {self.name}\r\n{more}"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )

    def _answer(self, writer: asyncio.StreamWriter, mock: dict[str, Any], params: dict[str, Any] | None) -> bool:
        answer: dict[str, Any] = {"object": "text_completion", "choices": [{"text": "x" * mock.get("body_bytes", 5)}]}
        answer["usage"] = self._usage()
        if params is not None:
            answer["kv_transfer_params"] = params
        body = b"<html>" if mock.get("garbage") else json.dumps(answer).encode()
        more = (
            mock.get("more", "")
            + "Set-Cookie: a=1\r\nSet-Cookie: b=2\r\n"
            + ("Content-Encoding: gzip\r\n" if mock.get("packed") else "")
        )
        if mock.get("die") == "in-body":
            writer.write(
                f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            )
            writer.write(body[: len(body) // 2])
            return False
        self._reply(writer, mock.get("status", 200), body, more=more)
        return True

    async def _stream(self, writer: asyncio.StreamWriter, reader: asyncio.StreamReader, mock: dict[str, Any]) -> bool:
        open_end, die = mock.get("open_end", False), mock.get("die")
        framing = "Connection: close" if open_end else "Transfer-Encoding: chunked"
        writer.write(
            f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Engine: {self.name}\r\n{framing}\r\n\r\n".encode()
        )
        if die == "after-headers":
            await writer.drain()
            await asyncio.sleep(0.05)
            return False
        events = stream_events(mock.get("events", 3), self._usage() if mock.get("usage", True) else None)
        for number, event in enumerate(events):
            if reader.at_eof() or writer.transport.is_closing():
                self.abandoned += 1
                return False
            if number == len(events) // 2 and die == "in-event":
                writer.write(_chunk(event[: len(event) // 2]))
                await asyncio.sleep(0.05)
                return False
            if number == len(events) // 2 and die == "between-events":
                await asyncio.sleep(0.05)
                return False
            writer.write(event if open_end else _chunk(event))
            await writer.drain()
            if gap_s := mock.get("gap_s", 0.0):
                with contextlib.suppress(TimeoutError):
                    # A stream must notice that its client is gone: here by the end of what can be read.
                    async with asyncio.timeout(gap_s):
                        await reader.read(1)
        if not open_end:
            writer.write(b"0\r\n\r\n")
        return not open_end

    def _prefills(self) -> str:
        if self.prefills is None:
            return ""
        count, *sums = dataclasses.astuple(self.prefills)
        names = ("request_prompt_tokens", "request_prefill_kv_computed_tokens", "request_prefill_time_seconds")
        return "".join(
            f"vllm:{name}_count {count}\nvllm:{name}_sum {total}\n" for name, total in zip(names, sums, strict=True)
        )

    def _usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": self.prompt_tokens, "completion_tokens": 3}
        usage["total_tokens"] = self.prompt_tokens + 3
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage


def stream_events(number: int, usage: dict[str, Any] | None) -> list[bytes]:
    """The events of a stream, as bytes: ``number`` of them, one with the usage, if there is one, and the end."""
    pieces = [json.dumps({"object": "text_completion", "choices": [{"text": f"w{at} ü"}]}) for at in range(number)]
    if usage is not None:
        pieces.append(json.dumps({"object": "text_completion", "choices": [], "usage": usage}))
    return [f"data: {piece}\n\n".encode() for piece in pieces] + [b"data: [DONE]\n\n"]


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def _main(name: str, port: int) -> None:
    engine = MockEngine(name, port=port)
    await engine.start()
    print(engine.port, flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0))
