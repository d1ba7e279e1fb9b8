"""Reads a request's body whole, within a size and a time."""

from __future__ import annotations

import asyncio

from aiohttp import hdrs, web

from skymemory.router.bad_request import BadRequest


async def read_request_body(incoming: web.BaseRequest, most_bytes: int, timeout_s: float) -> bytes:
    """
    Raises:
        BadRequest: it is longer (413, before it is read where its length is told), it does not come in time (408), or
            it is packed in a way that cannot be unpacked (400).
    """
    if (incoming.content_length or 0) > most_bytes:
        raise _too_large(most_bytes)
    if incoming.headers.get(hdrs.EXPECT, "").lower() == "100-continue" and not incoming.content.is_eof():
        transport = incoming.transport
        if transport is not None:
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    content = incoming.content
    if content.is_eof():  # it came with its headers, as most do
        body = await content.read()
        if len(body) > most_bytes:
            raise _too_large(most_bytes)
        return body
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while piece := await content.readany():
                size += len(piece)
                if size > most_bytes:
                    _leave_packed(incoming)
                    raise _too_large(most_bytes)
                pieces.append(piece)
                if hdrs.CONTENT_ENCODING in incoming.headers:
                    await asyncio.sleep(0)  # what is unpacked is there at once, and would let nobody else in between
    except TimeoutError as error:
        raise BadRequest(408, f"the body did not come in {timeout_s:g} s") from error
    except web.RequestPayloadError as error:
        raise BadRequest(400, f"the body cannot be read: {error}") from error
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _leave_packed(incoming: web.BaseRequest) -> None:
    """Unpack no more of a body that is packed: a few bytes may hold gigabytes, and to read them only so that their
    sender sees the refusal would hold up everybody.
    """
    if hdrs.CONTENT_ENCODING in incoming.headers and incoming.transport is not None:
        incoming.content.feed_eof()
        incoming.transport.pause_reading()


def _too_large(most_bytes: int) -> BadRequest:
    return BadRequest(413, f"the body is too large; at most {most_bytes} bytes are taken")
