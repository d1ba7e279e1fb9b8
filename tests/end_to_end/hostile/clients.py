"""Clients that do nothing wrong: what each of their requests gets, and how long it takes."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from dataclasses import dataclass, field

LIMIT_S = 10.0
"""For one request; a client gives up then."""


@dataclass(frozen=True, slots=True)
class Result:
    began_s: float
    took_s: float
    what: str
    """The status, or how it failed."""


@dataclass(eq=False)
class Others:
    """Half of them keep their connection, half open one for each request; half of the answers are streams."""

    port: int
    clients: int = 20
    pause_s: float = 0.35
    """Between two requests of one client, on average."""
    tls: ssl.SSLContext | None = None
    key: str = ""
    streams: bool | None = None
    """All of the answers are, or none; None: every other one."""
    results: list[Result] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._ask_forever(number)) for number in range(self.clients)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask_forever(self, number: int) -> None:
        dice, kept = random.Random(number), None
        await asyncio.sleep(dice.random() * self.pause_s)
        asked = 0
        while True:
            began_s = time.monotonic()
            asked += 1
            connection = None
            try:
                async with asyncio.timeout(LIMIT_S):
                    if kept is not None and not kept[0].at_eof() and not kept[1].is_closing():
                        connection, kept = kept, None
                    else:
                        connection = await asyncio.open_connection("127.0.0.1", self.port, ssl=self.tls)
                    streams = asked % 2 == 0 if self.streams is None else self.streams
                    what = await self._ask(*connection, f"o{number}.{asked}", streams)
            except TimeoutError:
                what = "late"
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                what = type(error).__name__
            self.results.append(Result(began_s, time.monotonic() - began_s, what))
            if connection is not None:
                if number % 2 and what == "200":
                    kept = connection
                else:
                    connection[1].transport.abort()
            await asyncio.sleep(dice.uniform(0.5, 1.5) * self.pause_s)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mark: str, streams: bool) -> str:
        body = json.dumps({"model": "m", "prompt": f"{mark} " * 100, "max_tokens": 5, "stream": streams}).encode()
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"x-id: {mark}\r\n{key}Content-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"transfer-encoding: chunked" in answer:
            await reader.readuntil(b"0\r\n\r\n")
        else:
            length = answer.partition(b"content-length:")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
        return answer.split(b" ", 2)[1].decode()
