"""An answer on its way to a client: framed anew, with bytes as they came, and with two ways to end before its end."""

from __future__ import annotations

from aiohttp import hdrs, web
from multidict import CIMultiDict, CIMultiDictProxy

CUT_S = 5.0
"""For a client to take the last bytes of an answer that was cut; then its connection is broken off."""


class Relayed(web.StreamResponse):
    """Passes on a server's status, headers and body. Its framing is the server's: a length, chunks, or to the end."""

    # Headers wait for the first piece of the body: one packet where there would be two.
    _send_headers_immediately = False

    def __init__(self, status: int, reason: str, headers: CIMultiDict[str], framed: bool = True) -> None:
        """
        Args:
            framed: False where the server marks the end only by closing: then so do we, and whoever could not tell a
                whole answer from a cut one without us cannot with us either.
        """
        super().__init__(status=status, reason=reason or None, _real_headers=headers)
        if not framed:
            self._length_check = False
            self.force_close()

    def cut(self) -> None:
        """End it here, incomplete as it is: what was written goes out, the mark of a proper end does not."""
        request = self._req
        self._eof_sent = True
        self._keep_alive = False
        transport = None if request is None else request.transport
        if transport is not None and request is not None:
            transport.close()
            request.loop.call_later(CUT_S, transport.abort)

    def abort(self) -> None:
        """Break its connection off, with what was not yet taken."""
        request = self._req
        self._eof_sent = True
        self._keep_alive = False
        if request is not None and request.transport is not None:
            request.transport.abort()


def is_framed(headers: CIMultiDictProxy[str], status: int) -> bool:
    """Whether an answer with these headers (as its server sent them) says where it ends."""
    return (
        hdrs.CONTENT_LENGTH in headers
        or "chunked" in headers.get(hdrs.TRANSFER_ENCODING, "").lower()
        or status in (204, 304)
    )
