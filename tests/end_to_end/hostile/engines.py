"""Scripted engines, several in one process: ``python -m tests.end_to_end.hostile.engines COUNT`` prints their ports.

``GET /script/MODE`` sets what an engine does with prompts: ``ok``, ``hang`` (it answers nothing, also no checks),
``500``, ``429``, ``503``. ``GET /script/counts`` says how many prompts it got and how often each ``x-id`` was among
them. A prompt's headers: ``x-mode: close`` (the connection is closed without an answer), ``x-hold: SECONDS``,
``x-answer: BYTES``, slowly, or ``x-stream: BYTES``, as fast as they are taken.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from typing import cast

TOOK_S = 0.02
EVENTS = 5
MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
USAGE = {"prompt_tokens": 200, "completion_tokens": 5, "total_tokens": 205}
WHOLE = json.dumps(
    {"object": "text_completion", "choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}], "usage": USAGE}
).encode()
LONG_EVENT = b'data: {"choices": [{"index": 0, "text": "%b"}]}\n\n' % (b"w" * 8000)
PIECE, PIECE_S = 65_536, 0.05
"""Of answers of a given size, and the pause after each."""


def reply(body: bytes, status: int = 200, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d So\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n%b" % (
        status,
        more,
        len(body),
        body,
    )


def chunk(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


class Engine:
    def __init__(self) -> None:
        self.mode = "ok"
        self.prompts = 0
        self.by_id: Counter[str] = Counter()


class Connection(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._received = b""
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            line, *fields = self._received[:end].decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in fields)}
            total = end + 4 + int(headers.get("content-length", 0))
            if len(self._received) < total:
                return
            body, self._received = self._received[end + 4 : total], self._received[total:]
            method, path, _ = line.split(" ", 2)
            if path.startswith("/script/"):
                self._script(path.removeprefix("/script/"))
            elif method == "GET":
                if self._engine.mode != "hang":
                    self._transport.write(reply(MODELS if path == "/v1/models" else b"{}"))
            else:
                self._prompt(headers, b'"stream": true' in body)

    def _script(self, word: str) -> None:
        engine = self._engine
        if word == "counts":
            self._transport.write(reply(json.dumps({"prompts": engine.prompts, "by_id": engine.by_id}).encode()))
            return
        engine.mode = word
        self._transport.write(reply(b"{}"))

    def _prompt(self, headers: dict[str, str], streams: bool) -> None:
        engine = self._engine
        engine.prompts += 1
        engine.by_id[headers.get("x-id", "")] += 1
        if headers.get("x-mode") == "close":
            self._transport.close()
        elif engine.mode == "hang":
            pass
        elif engine.mode != "ok":
            more = b"" if engine.mode == "500" else b"Retry-After: 1\r\n"
            self._transport.write(reply(b'{"error":{"message":"no"}}', int(engine.mode), more))
        else:
            self._task = asyncio.get_running_loop().create_task(self._answer(headers, streams))

    async def _answer(self, headers: dict[str, str], streams: bool) -> None:
        await asyncio.sleep(float(headers.get("x-hold", TOOK_S)))
        write = self._transport.write
        if size := int(headers.get("x-stream", 0)):
            write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(size // len(LONG_EVENT)):
                await self._can_write.wait()
                write(chunk(LONG_EVENT))
            write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        elif size := int(headers.get("x-answer", 0)):
            write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % size)
            for at in range(0, size, PIECE):
                await self._can_write.wait()
                write(bytes(min(PIECE, size - at)))
                await asyncio.sleep(PIECE_S)
        elif streams:
            write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(EVENTS):
                write(chunk(b'data: {"object": "text_completion", "choices": [{"index": 0, "text": "w"}]}\n\n'))
                await asyncio.sleep(TOOK_S / 2)
            write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            write(reply(WHOLE))


async def main(count: int) -> None:
    servers = []
    for _ in range(count):
        engine = Engine()
        servers.append(
            await asyncio.get_running_loop().create_server(
                lambda engine=engine: Connection(engine),  # type: ignore[misc]
                "127.0.0.1",
                0,
                backlog=4096,
            )
        )
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    try:
        from uvloop import run
    except ImportError:
        from asyncio import run
    run(main(int(sys.argv[1])))
