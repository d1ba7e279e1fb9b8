"""Clients of ill will, each in a process of its own: what they send, and what they get for it.

``python -m tests.end_to_end.hostile.causes NAME PORT SECONDS COUNT [KEY]`` does it for this long; the answers that it
got, or how its connections ended, are printed as a JSON object with the number of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

BODY = b'{"model": "m", "prompt": "hello", "max_tokens": 3}'
HELD_BYTES = 16 << 20
AGAIN_S = 1.0
"""Before a connection that was closed is opened again."""
OPENING = 64
"""Connections that are opened at once."""


@dataclass(slots=True)
class Attack:
    port: int
    count: int
    key: str = ""
    ends: Counter[str] = field(default_factory=Counter)

    def head(self, more: str = "", path: str = "/v1/completions", length: int = len(BODY)) -> bytes:
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        return (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{key}{more}"
            f"Content-Length: {length}\r\n\r\n"
        ).encode()


def status_of(answer: bytes) -> str:
    return answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "closed"


async def each(attack: Attack, one: Callable[[Attack, int], Awaitable[str]]) -> None:
    """``one`` for every connection, again and again; ends are counted."""
    opening = asyncio.Semaphore(OPENING)

    async def forever(number: int) -> None:
        while True:
            try:
                async with opening:
                    await asyncio.sleep(0)
                attack.ends[await one(attack, number)] += 1
            except (OSError, asyncio.IncompleteReadError) as error:
                attack.ends[type(error).__name__] += 1
            await asyncio.sleep(AGAIN_S)

    await asyncio.gather(*(forever(number) for number in range(attack.count)))


async def sent_and_held(attack: Attack, data: bytes, rest: bytes = b"") -> str:
    """Send, and wait until the router does something about it; one byte of ``rest`` every two seconds."""
    loop = asyncio.get_running_loop()
    with socket.socket() as raw:
        raw.setblocking(False)
        await loop.sock_connect(raw, ("127.0.0.1", attack.port))
        await loop.sock_sendall(raw, data)
        drip = asyncio.create_task(_drip(raw, rest)) if rest else None
        try:
            return status_of(await loop.sock_recv(raw, 1000))
        finally:
            if drip is not None:
                drip.cancel()


async def _drip(raw: socket.socket, rest: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            await asyncio.sleep(2.0)
            raw.send(rest)


async def request_of_death(attack: Attack) -> None:
    """Three requests at which engines close their connections, renewed every 1.5 s."""

    async def one(attack: Attack, number: int) -> str:
        mark = f"death{number}.{time.monotonic()}"
        await asyncio.sleep(0.5)
        return await sent_and_held(attack, attack.head(f"x-mode: close\r\nx-id: {mark}\r\n") + BODY)

    await each(attack, one)


async def held_bodies(attack: Attack) -> None:
    """Bodies of 16 MiB that lack one byte."""
    held = bytes(HELD_BYTES - 1)
    await each(attack, lambda attack, number: sent_and_held(attack, attack.head(length=HELD_BYTES) + held))


async def half_heads(attack: Attack) -> None:
    """Heads that lack their end, and get a header now and then."""
    half = attack.head()[:-2]
    await each(attack, lambda attack, number: sent_and_held(attack, half, b"X-A: b\r\n"))


async def idle(attack: Attack) -> None:
    """Connections that send one request and then nothing."""

    async def one(attack: Attack, number: int) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", attack.port)
        try:
            writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            await reader.readuntil(b"{}")
            return status_of(await reader.read(1000))
        finally:
            writer.transport.abort()

    await each(attack, one)


async def slow_readers(attack: Attack) -> None:
    """Answers of 50 MB, of which nothing is read."""
    await unread(attack, attack.head("x-answer: 50000000\r\n") + BODY)


async def slow_streams(attack: Attack) -> None:
    """Streams of 50 MB, made as fast as they are taken, of which nothing is read."""
    body = b'{"model": "m", "prompt": "hello", "max_tokens": 3, "stream": true}'
    await unread(attack, attack.head("x-stream: 50000000\r\n", length=len(body)) + body)


async def unread(attack: Attack, request: bytes) -> None:
    async def one(attack: Attack, number: int) -> str:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(raw, ("127.0.0.1", attack.port))
            await loop.sock_sendall(raw, request)
            while True:
                await asyncio.sleep(1.0)
                with contextlib.suppress(BlockingIOError):
                    first = raw.recv(1, socket.MSG_PEEK)
                    if not first:
                        return "closed"
                if raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    return "reset"
        finally:
            raw.close()

    await each(attack, one)


async def half_handshakes(attack: Attack) -> None:
    """The beginning of a TLS handshake, and a byte of it now and then."""
    hello = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost").do_handshake()
    sent = hello.read()
    await each(attack, lambda attack, number: sent_and_held(attack, sent[:60], sent[60:61]))


async def flood(attack: Attack) -> None:
    """Requests that engines work on for half a minute, one on each connection, and bodies that lack one byte."""
    held = bytes(HELD_BYTES - 1)

    async def one(attack: Attack, number: int) -> str:
        if number < 32:
            return await sent_and_held(attack, attack.head(length=HELD_BYTES) + held)
        return await sent_and_held(attack, attack.head("x-hold: 30\r\n") + BODY)

    await each(attack, one)


async def many_items(attack: Attack) -> None:
    """Bodies of 16 KB that unpack to four million prompts."""
    packed = gzip.compress(b'{"model": "m", "prompt": [' + b"[1]," * 4_000_000 + b"[1]]}")
    sent = attack.head("Content-Encoding: gzip\r\n", length=len(packed)) + packed
    await each(attack, lambda attack, number: sent_and_held(attack, sent))


async def tiny_chunks(attack: Attack) -> None:
    """Bodies in chunks of one byte, as fast as they are taken."""

    async def one(attack: Attack, number: int) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", attack.port)
        try:
            head = attack.head("Transfer-Encoding: chunked\r\n").replace(b"Content-Length: %d\r\n" % len(BODY), b"")
            writer.write(head)
            while not reader.at_eof():
                writer.write(b"1\r\n \r\n" * 5000)
                await writer.drain()
            return status_of(await reader.read(1000))
        finally:
            writer.transport.abort()

    await each(attack, one)


CAUSES = {
    kind.__name__: kind
    for kind in (
        request_of_death,
        held_bodies,
        half_heads,
        idle,
        slow_readers,
        slow_streams,
        half_handshakes,
        flood,
        many_items,
        tiny_chunks,
    )
}


async def main(name: str, port: int, seconds: float, count: int, key: str = "") -> None:
    attack = Attack(port, count, key)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await CAUSES[name](attack)
    print(json.dumps(attack.ends), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:]))
