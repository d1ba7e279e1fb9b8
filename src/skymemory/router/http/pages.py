"""The router's own requests to servers: pages and health checks."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import urlsplit

from skymemory.errors import connection_reason
from skymemory.router.engines.engine_metrics import NoAnswer
from skymemory.router.http.upstream import Pool, ResponseHead, UpstreamError
from skymemory.router.tls import Access

# No compression: a few bytes could expand to gigabytes.
_HEAD = b"GET %b HTTP/1.1\r\nHost: %b\r\nUser-Agent: skymemory\r\nAccept: */*\r\nAccept-Encoding: identity\r\n%b%b\r\n"
_CLOSE = b"Connection: close\r\n"
_TARGET = re.compile(r"/[!-~]*")


class Pages:
    """Page requests, over a pool per page: none delays another."""

    def __init__(self) -> None:
        self._known: dict[str, _Page] = {}

    async def fetch(self, url: str, access: Access, *, timeout_s: float, max_bytes: int) -> bytes:
        response = _PageResponse(max_bytes)
        try:
            page = self._page(url, access)
            page.pool.connect_s = timeout_s
            await _get(page, response, timeout_s)
        except TimeoutError as error:
            raise NoAnswer(f"did not answer within {timeout_s:g} s") from error
        except UpstreamError as error:
            raise NoAnswer(reason_of(error)) from error
        except ValueError as error:
            raise NoAnswer(str(error)) from error
        if not response.is_good:
            raise NoAnswer(f"answered {response.status}")
        if response.is_coded:
            raise NoAnswer("answered compressed, though identity was requested")
        if len(response.body) > max_bytes:
            raise NoAnswer(f"answered more than {max_bytes} B")
        return bytes(response.body)

    def _page(self, url: str, access: Access) -> _Page:
        page = self._known.get(url)
        if page is None or page.access != access:
            if page is not None:
                page.pool.close()
            page = self._known[url] = _page(url, access)
        return page

    def keep_only(self, servers: Collection[str]) -> None:
        prefixes = tuple(f"{server}/" for server in servers)
        for url in [url for url in self._known if not url.startswith(prefixes)]:
            self._known.pop(url).pool.close()

    def close(self) -> None:
        self.keep_only(())


async def get_status(url: str, access: Access, timeout_s: float) -> int:
    """Return the status over a new connection: a kept connection does not prove that the server accepts any.

    Raises:
        TimeoutError: no status within ``timeout_s``.
        UpstreamError: no connection, or no response.
        ValueError: a malformed URL.
    """
    page, response = _page(url, access, timeout_s, _CLOSE), _PageResponse(0)
    try:
        await _get(page, response, timeout_s)
    finally:
        page.pool.close()
    return response.status


def reason_of(error: UpstreamError) -> str:
    return str(error) if error.__cause__ is None else connection_reason(error.__cause__)


class _Page(NamedTuple):
    access: Access
    pool: Pool
    head: bytes


def _page(url: str, access: Access, connect_s: float = 0.0, more: bytes = b"") -> _Page:
    parts = urlsplit(url)
    target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
    if not _TARGET.fullmatch(target):
        raise ValueError(f"its path is {target!r}; expected printable ASCII without spaces, from a slash on")
    pool = Pool(url, connect_s, access)
    return _Page(access, pool, _HEAD % (target.encode("ascii"), pool.host, pool.authorization, more))


async def _get(page: _Page, response: _PageResponse, timeout_s: float) -> None:
    """Wait for the complete response, or raise ``TimeoutError`` or ``UpstreamError``."""
    call = page.pool.ask(response, page.head, b"")
    timeout = asyncio.get_running_loop().call_later(timeout_s, response.expire)
    try:
        await response.ended
    finally:
        timeout.cancel()
        call.close()
    if response.error is not None:
        # The connect timeout counts as the same timeout.
        raise TimeoutError if isinstance(response.error.__cause__, TimeoutError) else response.error


class _PageResponse:
    """Receiver of a page, until ``ended``."""

    __slots__ = ("_max_bytes", "body", "ended", "error", "is_coded", "is_good", "status")

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes`` 0: only the head is read."""
        self._max_bytes = max_bytes
        self.ended = asyncio.get_running_loop().create_future()
        self.error: UpstreamError | TimeoutError | None = None
        self.status = 0
        self.is_good = self.is_coded = False
        self.body = bytearray()

    def response_begins(self, head: ResponseHead) -> None:
        self.status = head.status
        self.is_good, self.is_coded = 200 <= head.status < 300, b"content-encoding" in head.headers.first
        if not self.is_good or self.is_coded or not self._max_bytes:
            self._end()

    def response_data(self, piece: bytes, at_end: bool) -> None:
        self.body += piece
        if at_end or len(self.body) > self._max_bytes:
            self._end()

    def response_failed(self, error: UpstreamError) -> None:
        self._end(error)

    def expire(self) -> None:
        self._end(TimeoutError())

    def _end(self, error: UpstreamError | TimeoutError | None = None) -> None:
        if not self.ended.done():
            self.error = error
            self.ended.set_result(None)
