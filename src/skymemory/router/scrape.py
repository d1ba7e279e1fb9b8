"""One look at an engine's metrics over HTTP: bounded in time and in bytes."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable

import aiohttp

from skymemory.conductor.fleet import LoadReport
from skymemory.router.engine_metrics import EngineMetrics, UnreadableMetrics, read_metrics

TIMEOUT_S = 2.0
MAX_BYTES = 4 * 1024 * 1024


async def scrape(
    session: aiohttp.ClientSession,
    url: str,
    *,
    timeout_s: float = TIMEOUT_S,
    max_bytes: int = MAX_BYTES,
    clock: Callable[[], float] = time.monotonic,
) -> LoadReport:
    """What the engine at ``url`` (its ``/metrics``) says of itself; see ``fetch_metrics``."""
    return (await fetch_metrics(session, url, timeout_s=timeout_s, max_bytes=max_bytes, clock=clock)).report


async def fetch_metrics(
    session: aiohttp.ClientSession,
    url: str,
    *,
    timeout_s: float = TIMEOUT_S,
    max_bytes: int = MAX_BYTES,
    clock: Callable[[], float] = time.monotonic,
    tls: ssl.SSLContext | None = None,
) -> EngineMetrics:
    """One reading, dated by ``clock`` when it was asked for: an answer that took its time is as old as the question.

    Raises:
        UnreadableMetrics: no answer in ``timeout_s``, no connection, a status other than 200, more than ``max_bytes``,
            or a text in no dialect that is known.
    """
    at_s = clock()
    try:
        async with asyncio.timeout(timeout_s):
            # Compression is not offered: a few bytes could unpack to gigabytes.
            headers = {"Accept-Encoding": "identity"}
            async with session.get(url, headers=headers, allow_redirects=False, ssl=tls or True) as answer:
                if answer.status != 200:
                    raise UnreadableMetrics(f"{url} answered {answer.status}")
                if "Content-Encoding" in answer.headers:
                    raise UnreadableMetrics(f"{url} answered compressed, which was not asked for")
                text = bytearray()
                async for piece in answer.content.iter_chunked(64 * 1024):
                    text += piece
                    if len(text) > max_bytes:
                        raise UnreadableMetrics(f"{url} answered more than {max_bytes} B")
    except TimeoutError as error:
        raise UnreadableMetrics(f"{url} did not answer in {timeout_s:g} s") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise UnreadableMetrics(f"{url}: {error or type(error).__name__}") from error
    return read_metrics(bytes(text), at_s)
