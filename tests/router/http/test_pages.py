"""The router's own requests to servers: limits, words of their errors, and which connections they use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from skymemory.router.engines.engine_metrics import NoAnswer
from skymemory.router.http.pages import Pages, get_status, reason_of
from skymemory.router.http.upstream import UpstreamError
from skymemory.router.tls import Access

GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\npage"


class Server:
    """Answers each request on each connection with the same bytes; None: not at all; empty: closes."""

    def __init__(self, answer: bytes | None) -> None:
        self._answer = answer
        self.connections = 0
        self.heads: list[bytes] = []

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heads.append(head)
                if self._answer == b"":
                    break
                if self._answer is not None:
                    writer.write(self._answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    def run(self, ask: Callable[[str], Awaitable[object]]) -> None:
        async def start() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            async with server:
                await ask(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a?b=c")

        asyncio.run(start())


async def fetch(url: str, pages: Pages | None = None, timeout_s: float = 20.0, key: str = "") -> bytes:
    return await (pages or Pages()).fetch(url, Access(key=key), timeout_s=timeout_s, max_bytes=1000)


def test_a_page_is_read_over_a_kept_connection_with_the_servers_key() -> None:
    async def ask(url: str) -> None:
        pages = Pages()
        assert [await fetch(url, pages, key="secret") for _ in range(3)] == [b"page"] * 3
        assert server.connections == 1
        await fetch(url, pages, key="other")
        pages.keep_only([url.removesuffix("/a?b=c")])
        await fetch(url, pages, key="other")
        assert server.connections == 2
        pages.keep_only(["http://elsewhere"])
        await fetch(url, pages, key="other")
        assert server.connections == 3

    server = Server(GOOD)
    server.run(ask)
    assert (
        server.heads[0].startswith(b"GET /a?b=c HTTP/1.1\r\n")
        and b"Authorization: Bearer secret\r\n" in server.heads[0]
    )
    assert b"Bearer other" in server.heads[-1]


def test_each_check_opens_a_connection() -> None:
    async def ask(url: str) -> None:
        assert [await get_status(url, Access(), 20.0) for _ in range(3)] == [200] * 3

    server = Server(GOOD)
    server.run(ask)
    assert server.connections == 3


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "did not answer within 0.2 s"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npage", "did not answer within 0.2 s"),
        (b"HTTP/1.1 302 Found\r\nLocation: /b\r\nContent-Length: 0\r\n\r\n", "answered 302"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\npage", "answered compressed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n" + b"x" * 1001, "answered more than 1000 B"),
        (b"", "connection closed by the other side before it answered"),
        (b"what\r\n\r\n", "malformed HTTP response"),
    ],
)
def test_a_page_that_cannot_be_read_says_why(answer: bytes | None, why: str) -> None:
    async def ask(url: str) -> None:
        with pytest.raises(NoAnswer, match=why):
            await fetch(url, timeout_s=0.2 if "0.2" in why else 20.0)

    Server(answer).run(ask)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:1/a", "connection refused: nothing listens there"),
        ("http://no-such-name.invalid/a", "its name is not known"),
        ("http://127.0.0.1:1a/b", "could not be cast to integer"),
        ("http://127.0.0.1:1/a b", "expected printable ASCII"),
    ],
)
def test_a_server_that_cannot_be_reached_says_why(url: str, why: str) -> None:
    with pytest.raises(NoAnswer, match=why):
        asyncio.run(fetch(url))


def test_a_check_says_whether_the_server_was_reached_or_refused() -> None:
    async def ask(url: str) -> UpstreamError:
        with pytest.raises(UpstreamError) as failed:
            await get_status(url, Access(), 20.0)
        return failed.value

    async def ask_closing(url: str) -> None:
        error = await ask(url)
        assert error.connected and not error.refused and "closed by the other side" in reason_of(error)

    async def ask_silent(url: str) -> None:
        with pytest.raises(TimeoutError):
            await get_status(url, Access(), 0.2)

    refused = asyncio.run(ask("http://127.0.0.1:1/health"))
    assert refused.refused and not refused.connected
    unknown = asyncio.run(ask("http://no-such-name.invalid/health"))
    assert not unknown.refused and not unknown.connected
    Server(b"").run(ask_closing)
    Server(None).run(ask_silent)
