"""Requests at a steady rate over TLS, each sent once, and what became of each: answered, refused unsent, or lost.

A client of its own, on plain streams: it has to know whether a request had been sent when its connection broke, and
must not try again in secret, as clients do.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Load:
    """Half of the requests stream; half come on a connection of their own, the others on ones that are kept."""

    port: int
    key: Callable[[], str]
    authority: str
    patience_s: float = 30.0
    statuses: Counter[int] = field(default_factory=Counter)
    refused: int = 0
    """No connection, or none that TLS was agreed upon: nothing of the request had been sent."""
    sent: int = 0
    lost: list[str] = field(default_factory=list)
    serials: set[str] = field(default_factory=set)
    """Of certificates that were shown."""
    _free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=list)
    _number: int = 0

    def __post_init__(self) -> None:
        self._tls = ssl.create_default_context(cafile=self.authority)

    async def run(self, rate: float, until: asyncio.Event) -> None:
        """Open loop: one each ``1 / rate`` s, however long answers take, and then the end of all."""
        began_s, tasks = time.monotonic(), []
        while not until.is_set():
            tasks.append(asyncio.create_task(self._one(self._number)))
            self._number += 1
            await asyncio.sleep(max(0.0, began_s + len(tasks) / rate - time.monotonic()))
        await asyncio.gather(*tasks)
        for _, writer in self._free:
            writer.close()

    async def _one(self, number: int) -> None:
        stream, own = number % 2 == 0, number % 4 < 2
        kept = None if own or not self._free else self._free.pop()
        if kept is not None and (kept[0].at_eof() or kept[1].is_closing()):
            kept = None  # it was closed before: any client sees that, and asks on another
        if kept is None:
            try:
                kept = await asyncio.open_connection("localhost", self.port, ssl=self._tls)
            except OSError:
                self.refused += 1
                return
            peer = kept[1].get_extra_info("peercert")
            self.serials.add(str(peer["serialNumber"]))
        reader, writer = kept
        body = json.dumps(
            {
                "model": "small",
                "prompt": f"{number} " * 20,
                "stream": stream,
                "mock": {"first_byte_s": 0.02, "events": 4, "gap_s": 0.03},
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self.key()}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.sent += 1
        began_s = time.monotonic()
        try:
            writer.write(head.encode() + body)
            async with asyncio.timeout(self.patience_s):
                status, close, answer = await _read(reader)
        except (OSError, EOFError, TimeoutError) as error:
            how = "kept" if reader is not None and not own else "new"
            took_ms = (time.monotonic() - began_s) * 1000
            self.lost.append(f"{number}, on a {how} connection, after {took_ms:.0f} ms: {error!r}")
            writer.close()
            return
        self.statuses[status] += 1
        if status == 200 and not (answer.endswith(b"data: [DONE]\n\n") if stream else json.loads(answer)["choices"]):
            self.lost.append(f"{number}: not whole: {answer[-100:]!r}")
        if own or close:
            writer.close()
        else:
            self._free.append((reader, writer))


async def _read(reader: asyncio.StreamReader) -> tuple[int, bool, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:] if line)
    body = b""
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    return int(head[0].split(" ")[1]), headers.get("connection") == "close", body
