"""Connections to servers: kept, one request at a time on each, parsed by aiohttp's own machinery.

aiohttp's ``ClientSession`` does much that a proxy has no use for (cookies, redirects, URLs, a task per body), and costs
more than all else here together. This is what is left without it: the head as bytes, one write, ``ResponseHandler``
with the C parser and its flow control, and a pool.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from time import monotonic
from urllib.parse import urlsplit

import aiohttp
from aiohttp import StreamReader
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_parser import RawResponseMessage

KEEP_S = 4.0
"""How long an unused connection is kept: less than the 5 s after which uvicorn closes it, under most engines."""
READ_BYTES = 65_536
MAX_LINE_BYTES = 65_536
JOIN_BYTES = 65_536
"""A body up to this goes out in one write with its head; it is copied for that."""


class Answer:
    """The head of an answer, and its body as it comes. To be closed: one that came whole is kept by then."""

    __slots__ = ("_pool", "_protocol", "content", "headers", "reason", "status")

    def __init__(
        self, message: RawResponseMessage, content: StreamReader, protocol: ResponseHandler, pool: Pool
    ) -> None:
        self.status = message.code
        self.reason = message.reason
        self.headers = message.headers
        self.content = content
        self._protocol: ResponseHandler | None = protocol
        self._pool = pool
        content.on_eof(self._came_whole)

    def _came_whole(self) -> None:
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            self._pool.give_back(protocol)

    def close(self) -> None:
        """Its server sees at once that nobody listens, if it was not done."""
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.abort()


class Pool:
    """Connections to one server."""

    def __init__(self, url: str, connect_s: float, tls: ssl.SSLContext | None = None) -> None:
        """``tls``: what an https server's certificate is checked against, if not the system's authorities."""
        parts = urlsplit(url)
        self.host = parts.netloc.encode("ascii")
        """As requests name it."""
        self.path = parts.path.rstrip("/").encode("ascii")
        """Under which requests are put."""
        self.connect_s = connect_s
        self._name = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = tls or (ssl.create_default_context() if parts.scheme == "https" else None)
        self._idle: deque[tuple[float, ResponseHandler]] = deque()
        self._reaping: asyncio.TimerHandle | None = None
        self._closed = False

    async def request(self, head: bytes, body: bytes, has_answer_body: bool = True) -> Answer:
        """Send a request (``head`` whole, with the empty line) and wait for the head of its answer.

        Raises:
            ConnectionRefusedError, OSError: no connection.
            aiohttp.ConnectionTimeoutError: none in time.
            aiohttp.ClientError: the server hung up before its answer, or what came is no answer.
        """
        kept = self._kept()
        if kept is not None:
            try:
                return await self._ask(kept, head, body, has_answer_body)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                pass  # it was closed while nobody used it; that says nothing of the server
        return await self._ask(await self._connect(), head, body, has_answer_body)

    async def _ask(self, protocol: ResponseHandler, head: bytes, body: bytes, has_answer_body: bool) -> Answer:
        try:
            protocol.set_response_params(
                skip_payload=not has_answer_body,
                read_until_eof=True,
                auto_decompress=False,
                read_bufsize=READ_BYTES,
                max_line_size=MAX_LINE_BYTES,
                max_field_size=MAX_LINE_BYTES,
            )
            transport = protocol.transport
            if transport is None:
                raise aiohttp.ServerDisconnectedError
            if len(body) <= JOIN_BYTES:
                transport.write(head + body)
            else:
                transport.write(head)
                transport.write(body)
            while True:
                message, content = await protocol.read()
                if message.code >= 200:
                    break
                if message.code == 101:
                    raise aiohttp.ClientPayloadError("it changes to another protocol, which nobody asked for")
        except aiohttp.http_exceptions.HttpProcessingError as error:
            protocol.abort()
            raise aiohttp.ClientPayloadError(f"what came is no answer: {error.message}") from error
        except BaseException:
            protocol.abort()
            raise
        return Answer(message, content, protocol, self)

    def give_back(self, protocol: ResponseHandler) -> None:
        """Keep it for the next request, if it can serve one."""
        transport = protocol.transport
        if (
            self._closed
            or transport is None
            or protocol.should_close
            or transport.is_closing()
            or transport.get_write_buffer_size()  # answered before the request was sent: the rest would still go out
        ):
            protocol.close()
            return
        self._idle.append((monotonic(), protocol))
        if self._reaping is None:
            self._reaping = asyncio.get_running_loop().call_later(KEEP_S, self._reap)

    def close(self) -> None:
        """Those in use are closed when they are given back."""
        self._closed = True
        if self._reaping is not None:
            self._reaping.cancel()
        while self._idle:
            self._idle.pop()[1].close()

    def _kept(self) -> ResponseHandler | None:
        """The one that was used last, so that others can grow old."""
        while self._idle:
            since_s, protocol = self._idle.pop()
            if protocol.is_connected() and not protocol.should_close and monotonic() - since_s < KEEP_S:
                return protocol
            protocol.close()
        return None

    async def _connect(self) -> ResponseHandler:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_s):
                _, protocol = await loop.create_connection(
                    lambda: ResponseHandler(loop), self._name, self._port, ssl=self._tls
                )
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"no connection in {self.connect_s:g} s") from error
        return protocol

    def _reap(self) -> None:
        self._reaping = None
        before_s = monotonic() - KEEP_S
        while self._idle and self._idle[0][0] <= before_s:
            self._idle.popleft()[1].close()
        if self._idle:
            self._reaping = asyncio.get_running_loop().call_later(KEEP_S, self._reap)
