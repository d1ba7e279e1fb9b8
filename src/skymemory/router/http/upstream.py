"""Connection pools to the servers: keep-alive, one request at a time per connection, parsed by llhttp.

``Pool.ask`` takes a connection for an ``UpstreamCall``; ``UpstreamConnection`` reports the response to its ``Receiver``
and returns to the pool.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from skymemory import native
from skymemory.errors import os_reason, refuses_connections
from skymemory.router.failure.budget import Sends
from skymemory.router.http.codings import CHUNKED, transfer_codings
from skymemory.router.http.connection import YIELD_BYTES, Headers
from skymemory.router.settings import Backend
from skymemory.router.tls import Access, Authorities

KEEP_S = 4.0
"""Maximum idle time; uvicorn, under most engines, closes after 5 s."""
MAX_HEAD_BYTES = 131_072
MAX_CONNECTING = 64
"""Maximum concurrent connects: a burst of a thousand would overflow the server's accept queue."""
FILES_AGAIN_S = 0.02
_FILES_SHORT = (errno.EMFILE, errno.ENFILE)
JOIN_BYTES = 65_536
"""Maximum body sent in one write with its head."""


class UpstreamError(Exception):
    """Missing or incomplete response of a server."""

    def __init__(
        self, why: str, *, connected: bool = True, refused: bool = False, cause: BaseException | None = None
    ) -> None:
        super().__init__(why)
        self.__cause__ = cause  # set here, since the error is seldom raised
        self.connected = connected  # False: no connection was made
        self.refused = refused  # nothing listens there


class ResponseHead:
    """Status and headers. ``framed``: they say where the body ends."""

    __slots__ = ("chunked", "framed", "headers", "reason", "status")

    def __init__(self, status: int, reason: str, headers: Headers) -> None:
        """Check the head.

        Raises:
            UpstreamError: an invalid status, or an unrequested transfer coding.
        """
        if not 200 <= status <= 599:
            raise UpstreamError(f"its status is {status:03d}; expected 100 to 599")
        self.status = status
        self.reason = reason
        self.headers = headers
        self.chunked = False
        self.framed = bool(headers.first.get(b"content-length")) or status in (204, 304)
        if b"transfer-encoding" in headers.first:
            lines = headers.all_of(b"transfer-encoding")
            codings = transfer_codings(lines)
            # The parser reads chunks only if "chunked" is the last word; after "chunked," there is an empty element.
            if codings and (codings != [CHUNKED] or not lines[-1].rstrip().lower().endswith(CHUNKED)):
                # The router requests no other coding, and drops this header: the client could not decode the body.
                quoted = b", ".join(codings)[:100].decode("latin-1")
                raise UpstreamError(f"its Transfer-Encoding is {quoted!r}; expected chunked, or none")
            self.chunked = bool(codings) and status not in (204, 304)
            self.framed = self.framed or self.chunked


class Receiver(Protocol):
    """Callbacks; the last call is ``response_failed``, or ``response_data`` with ``at_end``."""

    def response_begins(self, head: ResponseHead) -> None: ...

    def response_data(self, piece: bytes, at_end: bool) -> None: ...

    def response_failed(self, error: UpstreamError) -> None: ...


@dataclass(slots=True, eq=False)
class UpstreamCall:
    """A request to a server, and the receiver of its response."""

    pool: Pool
    receiver: Receiver | None
    head: bytes  # request line and headers
    body: bytes
    has_body: bool  # the response may have a body
    sends: Sends  # limit of sends, including other servers'
    connection: UpstreamConnection | None = None

    def connect(self) -> None:
        self.connection = None
        self.pool.connect(self)

    def send(self, connection: UpstreamConnection, is_new: bool) -> None:
        self.connection = connection
        connection.ask(self, is_new)

    def lost(self, error: UpstreamError) -> None:
        receiver, self.receiver, self.connection = self.receiver, None, None
        if receiver is not None:
            receiver.response_failed(error)

    def close(self) -> None:
        """Abort, so that the server notices at once."""
        self.receiver = None
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort()

    def pause(self) -> None:
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        if self.connection is not None:
            self.connection.resume()


class UpstreamConnection(asyncio.Protocol):
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._call: UpstreamCall | None = None
        self._transport: asyncio.Transport | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self.on_header = native.pairs_into(self._headers)
        self._parser = httptools.HttpResponseParser(self)
        self._reason = b""
        self._head: ResponseHead | None = None
        self._pieces: list[bytes] = []
        self._is_paused_by_caller = self._is_yielding = False
        self.gone = False  # it can carry no further request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def ask(self, call: UpstreamCall, is_new: bool) -> None:
        """Send a request. A failed kept connection (not ``is_new``) is replaced."""
        transport = self._transport
        if transport is None or self.gone or transport.is_closing():
            self._resend_or_fail(call, is_new, UpstreamError("it closed the connection before the first byte"))
            return
        if not call.sends.take():
            self._pool.give_back(self)
            call.lost(UpstreamError("it was sent as often as allowed", connected=False))
            return
        self._call = call
        self._is_new_connection = is_new
        self._head = None
        self._head_bytes = 0
        self._has_answer_begun = self._has_answer_ended = self._was_closed_properly = self._body_ends_at_eof = (
            self._is_http_1_0
        ) = False
        if len(call.body) <= JOIN_BYTES:
            transport.write(call.head + call.body)
        else:
            transport.write(call.head)
            transport.write(call.body)

    # -- from the event loop

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:
            self.abort()  # data without a request
            return
        if len(data) >= YIELD_BYTES:
            self._yield_to_loop()
        head_before = self._head
        self._has_answer_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._abort_call("it switched to another protocol, though none was requested")
            return
        except httptools.HttpParserCallbackError as error:
            self._abort_call(f"its response cannot be read: {error.__context__}")
            return
        except httptools.HttpParserError as error:
            if not self._has_answer_ended:
                self._abort_call(f"malformed HTTP response: {error}")
                return
            self.gone = True  # data after the response
        if self._head is None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._abort_call(f"its response's head is longer than {MAX_HEAD_BYTES} bytes")
            return
        if self._headers:
            self._headers.clear()  # trailers are not passed on
        receiver = call.receiver
        if receiver is None:
            self.abort()
            return
        if head_before is None:
            receiver.response_begins(self._head)
            if self._call is not call:
                return  # the receiver has cancelled it
        self._deliver(call, receiver)

    def _yield_to_loop(self) -> None:
        """Read no more in this turn of the event loop, which would else read up to 8 MB."""
        if not self._is_yielding and not self._is_paused_by_caller and self._transport is not None:
            self._is_yielding = True
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._read_after_yield)

    def _read_after_yield(self) -> None:
        self._is_yielding = False
        if not self._is_paused_by_caller and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _deliver(self, call: UpstreamCall, receiver: Receiver) -> None:
        pieces, is_complete = self._pieces, self._has_answer_ended
        if not pieces and not is_complete:
            return
        piece = b"" if not pieces else pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._pieces = []
        if is_complete:
            self._return_to_pool(call)
        receiver.response_data(piece, is_complete)

    def _return_to_pool(self, call: UpstreamCall) -> None:
        self._call = call.connection = call.receiver = None
        if self._is_paused_by_caller:
            self.resume()
        self._pool.give_back(self)

    def eof_received(self) -> bool:
        self._was_closed_properly = self._transport is not None and _is_whole_tls(self._transport)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Report the end of an answer without length, or a failure."""
        self.gone = True
        del self._parser  # it refers to this object, which refers to the buffers of TLS
        call, self._call = self._call, None
        if call is None:
            return
        head, receiver = self._head, call.receiver
        if self._body_ends_at_eof and self._was_closed_properly and error is None and receiver is not None:
            call.receiver = call.connection = None
            receiver.response_data(b"".join(self._pieces), True)
            return
        when = "before the first byte" if head is None else "in the middle of its response"
        how = "reset" if isinstance(error, ConnectionResetError) else "closed"
        why = f"it {how} the connection {when}"
        if error is not None and how != "reset":
            why += f": {error}"
        cause = error or ConnectionResetError() if head is None else None
        self._resend_or_fail(call, self._is_new_connection or self._has_answer_begun, UpstreamError(why, cause=cause))

    def _resend_or_fail(self, call: UpstreamCall, is_final: bool, error: UpstreamError) -> None:
        # The server may have closed a kept connection while it was idle. It may also have read the request, so sending
        # it again counts.
        if not is_final and call.receiver is not None and call.sends.remaining:
            call.connect()
        else:
            call.lost(error)

    # -- from the parser

    # A connection with further bytes after the response is never reused, and those bytes are not read.

    def on_message_begin(self) -> None:
        if self._has_answer_ended:
            self.gone = True

    def on_status(self, reason: bytes) -> None:
        if not self._has_answer_ended:
            self._reason += reason

    def on_headers_complete(self) -> None:
        if self._has_answer_ended:
            return
        status = self._parser.get_status_code()
        headers = self._headers.copy()
        self._headers.clear()
        reason, self._reason = self._reason, b""
        version = self._parser.get_http_version()
        if version != "1.1":
            if version != "1.0":
                raise UpstreamError(f"it speaks HTTP/{version}; expected 1.0 or 1.1")
            self._is_http_1_0 = True
        if 100 <= status < 200:
            return  # informational
        self._head = ResponseHead(status, reason.decode("latin-1"), Headers(headers))
        self._body_ends_at_eof = not self._head.framed  # the receiver may change how the client's response is framed
        if self._call is not None and not self._call.has_body:
            self._has_answer_ended = True
            self.gone = True  # the parser would wait for a body

    def on_body(self, piece: bytes) -> None:
        if not self._has_answer_ended:
            self._pieces.append(piece)

    def on_message_complete(self) -> None:
        if self._head is None or self._has_answer_ended:
            return
        self._has_answer_ended = True
        if not self._parser.should_keep_alive() or (
            self._is_http_1_0 and b"transfer-encoding" in self._head.headers.first
        ):
            self.gone = True  # HTTP/1.0 has no chunks: do not trust later data (RFC 9112, section 6.1)

    # -- from the caller

    def pause(self) -> None:
        if not self._is_paused_by_caller and self._transport is not None and not self._transport.is_closing():
            self._is_paused_by_caller = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused_by_caller and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._is_paused_by_caller = False

    def abort(self) -> None:
        self.gone = True
        self._call = None
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        self.gone = True
        if self._transport is not None:
            self._transport.close()

    @property
    def is_free(self) -> bool:
        transport = self._transport
        return (
            not self.gone
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()  # else the last request was answered before it was sent
        )

    def _abort_call(self, why: str) -> None:
        call = self._call
        self.abort()
        if call is not None:
            call.lost(UpstreamError(why))


def _is_whole_tls(transport: asyncio.Transport) -> bool:
    """Return True if the server itself ended the stream. With TLS it must have sent close_notify; otherwise any host on
    the path could truncate the response (RFC 9112, section 9.8).
    """
    tls = transport.get_extra_info("ssl_object")
    if tls is None:
        return True
    try:
        return not tls.read(1)
    except ssl.SSLZeroReturnError:
        return True
    except ssl.SSLError:  # it waits for more
        return False


class Pool:
    def __init__(self, url: str, connect_s: float, access: Access = Access()) -> None:  # noqa: B008 - never changed
        parts = urlsplit(url)
        self.host = parts.netloc.encode("ascii")
        self.path = parts.path.rstrip("/").encode("ascii")
        self.connect_s = connect_s
        self._name = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = access.tls or (ssl.create_default_context() if parts.scheme == "https" else None)
        # Header line with the server's key; empty: the client's is passed on.
        self.authorization = b"Authorization: Bearer %s\r\n" % access.key.encode("ascii") if access.key else b""
        self._idle: deque[tuple[float, UpstreamConnection]] = deque()  # since when, oldest first
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.on_files_short: Callable[[], None] = lambda: None
        self._connecting: set[asyncio.Task[None]] = set()
        self._waiting_calls: deque[UpstreamCall] = deque()  # beyond `MAX_CONNECTING`

    def ask(
        self, receiver: Receiver, head: bytes, body: bytes, has_body: bool = True, sends: Sends | None = None
    ) -> UpstreamCall:
        """Send a request.

        Args:
            head: request line and headers, with the empty line.
            has_body: the response may have a body.
            sends: limit; None: once, and again after a failed kept connection.
        """
        call = UpstreamCall(self, receiver, head, body, has_body, sends or Sends(2))
        connection = self.take_idle()
        if connection is not None:
            call.send(connection, is_new=False)
        else:
            self.connect(call)
        return call

    def take_idle(self) -> UpstreamConnection | None:
        """Return the last used idle connection, so that superfluous connections expire."""
        while self._idle:
            since_s, connection = self._idle.pop()
            if connection.is_free and monotonic() - since_s < KEEP_S:
                return connection
            connection.close()
        return None

    def give_back(self, connection: UpstreamConnection) -> None:
        if self._is_closed or not connection.is_free:
            connection.close()
            return
        if self._waiting_calls and (call := self._take_waiting_call()) is not None:
            call.send(connection, is_new=False)
            return
        self._idle.append((monotonic(), connection))
        if self._expiry_timer is None:
            self._expiry_timer = asyncio.get_running_loop().call_later(KEEP_S, self._close_expired)

    def close(self) -> None:
        self._is_closed = True
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
        self.close_idle()

    def connect(self, call: UpstreamCall) -> None:
        if len(self._connecting) >= MAX_CONNECTING:
            self._waiting_calls.append(call)
            return
        task = asyncio.get_running_loop().create_task(self._connect(call))
        self._connecting.add(task)
        task.add_done_callback(self._on_connect_end)

    def _on_connect_end(self, task: asyncio.Task[None]) -> None:
        self._connecting.discard(task)
        if (call := self._take_waiting_call()) is not None:
            self.connect(call)

    def _take_waiting_call(self) -> UpstreamCall | None:
        while self._waiting_calls:
            call = self._waiting_calls.popleft()
            if call.receiver is not None:
                return call
        return None

    async def _connect(self, call: UpstreamCall) -> None:
        try:
            async with asyncio.timeout(self.connect_s):
                connection = await self._open_connection()
        except TimeoutError as error:
            call.lost(UpstreamError(f"no connection within {self.connect_s:g} s", connected=False, cause=error))
        except OSError as error:
            why, refused = f"no connection: {os_reason(error)}", refuses_connections(error)
            call.lost(UpstreamError(why, connected=False, refused=refused, cause=error))
        else:
            if call.receiver is None:
                self.give_back(connection)
            else:
                call.send(connection, is_new=True)

    async def _open_connection(self) -> UpstreamConnection:
        """Open a connection; if files are short, retry after closing idle connections."""
        loop = asyncio.get_running_loop()
        for is_last in (False, True):
            try:
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self), self._name, self._port, ssl=self._tls
                )
            except OSError as error:
                if is_last or error.errno not in _FILES_SHORT:
                    raise
                self.on_files_short()
                await asyncio.sleep(FILES_AGAIN_S)  # the event loop closes files in its next turns
            else:
                return connection
        raise AssertionError

    def close_idle(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()

    def _close_expired(self) -> None:
        self._expiry_timer = None
        before_s = monotonic() - KEEP_S
        while self._idle and self._idle[0][0] <= before_s:
            self._idle.popleft()[1].close()
        if self._idle:
            self._expiry_timer = asyncio.get_running_loop().call_later(KEEP_S, self._close_expired)


class Pools:
    def __init__(self) -> None:
        self._pools: dict[str, Pool] = {}
        self._authorities = Authorities()
        self._backends: dict[str, Backend] = {}
        self.access: dict[str, Access] = {}
        self.on_files_short: Callable[[], None] = lambda: None

    def __getitem__(self, name: str) -> Pool:
        return self._pools[name]

    def set(self, backends: Sequence[Backend], connect_s: float) -> None:
        """Add and update pools. Pools of other servers stay until ``drop``.

        Raises:
            InvalidInput: unreadable certificates or keys; nothing has changed.
        """
        access = {
            backend.name: self._authorities.access(backend.url, backend.ca, backend.api_key_file)
            for backend in backends
        }
        for pool in self._pools.values():
            pool.connect_s = connect_s
        for backend in backends:
            name = backend.name
            old = self._backends.get(name)
            if old is None or old.url != backend.url or self.access[name] != access[name]:
                if name in self._pools:
                    self._pools[name].close()
                self._pools[name] = Pool(backend.url, connect_s, access[name])
                self._pools[name].on_files_short = self._close_idle
            self._backends[name], self.access[name] = backend, access[name]

    def _close_idle(self) -> None:
        for pool in self._pools.values():
            pool.close_idle()
        self.on_files_short()

    def drop(self, name: str) -> None:
        self._backends.pop(name, None)
        self.access.pop(name, None)
        pool = self._pools.pop(name, None)
        if pool is not None:
            pool.close()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
