"""Asks one address the same questions over a number of connections, and writes how long each took, as JSON.

A process of its own: ``python benchmarks/_proxy_load.py PORT CONNECTIONS REQUESTS BODY_BYTES SEED [stream]``.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time

import uvloop

PROMPTS = 64
TURNS = 8
"""Prompts share prefixes as turns of conversations do: each of ``PROMPTS`` has ``TURNS`` lengths."""


def bodies(body_bytes: int, seed: int, streams: bool) -> list[bytes]:
    """Requests of exactly ``body_bytes``: prompts that begin alike for a part of their length, in a seeded order."""
    dice = random.Random(seed)
    more: dict[str, object] = {"max_tokens": 40, **({"stream": True} if streams else {})}
    asked = []
    for _ in range(PROMPTS):
        talk = "".join(dice.choices("abcdefghijklmnopqrstuvwxyz     ", k=body_bytes))
        for turn in range(1, TURNS + 1):
            own = dice.randbytes(body_bytes // 2 + 1).hex()
            shell = len(json.dumps({"model": "mock", "prompt": "", **more}))
            letters = body_bytes - shell
            shared = letters * turn // TURNS
            asked.append(json.dumps({"model": "mock", "prompt": talk[:shared] + own[: letters - shared], **more}))
    dice.shuffle(asked)
    return [
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer none\r\nAccept: */*\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        for body in asked
    ]


class Asker(asyncio.Protocol):
    """One connection: from ``ask`` on it asks, waits for the whole answer, and asks again."""

    def __init__(self, asked: list[bytes], first: int, step: int, requests: int, done: asyncio.Future[None]) -> None:
        self._asked, self._at, self._step, self._left, self._done = asked, first, step, requests, done
        self.took_s: list[float] = []
        self._came = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def ask(self) -> None:
        self._came.clear()
        self._began_s = time.perf_counter()
        self._transport.write(self._asked[self._at % len(self._asked)])  # type: ignore[attr-defined]
        self._at += self._step

    def data_received(self, data: bytes) -> None:
        self._came += data
        end = self._came.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._came[:end].lower()
        at = head.find(b"content-length:")
        if at >= 0:
            if len(self._came) < end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0]):
                return
        elif not self._came.endswith(b"0\r\n\r\n"):
            return
        if not head.startswith(b"http/1.1 200"):
            self._done.set_exception(RuntimeError(bytes(self._came[:300]).decode("latin-1")))
            return
        self.took_s.append(time.perf_counter() - self._began_s)
        self._left -= 1
        if self._left:
            self.ask()
        elif not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError("the connection was closed"))


async def main(port: int, connections: int, requests: int, body_bytes: int, seed: int, streams: bool) -> None:
    asked = bodies(body_bytes, seed, streams)
    loop = asyncio.get_running_loop()
    askers = []
    for number in range(connections):
        done: asyncio.Future[None] = loop.create_future()
        made = loop.create_connection(
            lambda number=number, done=done: Asker(asked, number, connections, requests // connections, done),  # type: ignore[misc]
            "127.0.0.1",
            port,
        )
        askers.append(((await made)[1], done))
    began_s = time.perf_counter()  # all are connected: how connections are accepted is another question
    for asker, _ in askers:
        asker.ask()
    await asyncio.wait_for(asyncio.gather(*(done for _, done in askers)), 600)
    wall_s = time.perf_counter() - began_s
    took = sorted(each for asker, _ in askers for each in asker.took_s)
    figures = {"p50": statistics.median(took), "p90": took[int(len(took) * 0.9)], "p99": took[int(len(took) * 0.99)]}
    print(json.dumps({**figures, "mean": statistics.fmean(took), "per_s": len(took) / wall_s, "requests": len(took)}))


if __name__ == "__main__":
    uvloop.run(main(*map(int, sys.argv[1:6]), streams="stream" in sys.argv[6:]))
