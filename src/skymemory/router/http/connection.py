"""A client's HTTP/1.1 connection: requests in (parsed by llhttp, through httptools), responses out, in order.

1. ``data_received`` feeds the parser; its callbacks build an ``Incoming``. The head is checked before any body is read.
2. A whole request goes to the application (``handle``). Pipelined requests wait, and reading pauses meanwhile.
3. The application answers with ``respond``, or with ``write`` and ``end``; then the next request has its turn.

The parser is strict: what two readers could understand in two ways (request smuggling) is refused. ``_check_head``
refuses what the parser lets pass.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from itertools import chain
from typing import Protocol, cast

import httptools

from skymemory import native
from skymemory.native.twin.backend import RawHeaders
from skymemory.router.api_error import ApiError
from skymemory.router.api_keys import Tenant
from skymemory.router.http.codings import CHUNKED, transfer_codings

log = logging.getLogger("skymemory.router")

MAX_HEAD_BYTES = 32_768
"""Limit of the request line and the headers together."""
LINGER_S = 2.0
"""How long the rest of a refused body is read and dropped, so that its sender sees the response and no reset."""
CUT_S = 5.0
"""For a client to read the last bytes of a response; then its connection is aborted."""
UNREAD_S = 0.05
"""For the event loop to deliver bytes that arrived while it was busy."""
_LENGTH_DIGITS = 20
"""Of a Content-Length: 64 bits."""
MAX_PIPELINED = 64
"""Requests that may wait on one connection. Event loops deliver at most 256 KiB at once, so this bounds what is parsed
in one turn, too.
"""


class Headers(Mapping[str, str]):
    """Headers by lower-case names. Of a repeated one, the first; ``all_of`` gives all.

    ``raw``: as they came. The parser has refused line ends and other control characters in them.
    """

    __slots__ = ("first", "raw")

    def __init__(self, raw: RawHeaders) -> None:
        self.raw = raw
        self.first = native.first_values(raw)
        """As bytes."""

    def __getitem__(self, name: str) -> str:
        return self.first[name.encode()].decode("utf-8", "surrogateescape")

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]
        value = self.first.get(name.encode())
        return default if value is None else value.decode("utf-8", "surrogateescape")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.encode() in self.first

    def __iter__(self) -> Iterator[str]:
        return (name.decode("ascii") for name in self.first)

    def __len__(self) -> int:
        return len(self.first)

    def all_of(self, name: bytes) -> list[bytes]:
        first = self.first
        if name not in first:
            return []
        if len(first) == len(self.raw):
            return [first[name]]  # none is repeated
        return [value for each, value in self.raw if each.lower() == name]

    def words_of(self, name: bytes) -> list[bytes]:
        """The lower-case words of a comma-separated list, from all its lines."""
        return [word.strip().lower() for value in self.all_of(name) for word in value.split(b",")]


class Listener(Protocol):
    """The handler of a request, from ``handle`` to its response's end."""

    def client_gone(self) -> None: ...

    def client_full(self) -> None:
        """Backpressure: write nothing until ``client_ready``."""
        ...

    def client_ready(self) -> None: ...

    def stop(self) -> None:
        """The router stops before the request has ended."""
        ...


class Application(Protocol):
    """Handles the requests of all connections."""

    max_body_bytes: int
    client_s: float
    keep_alive_s: float
    draining: bool
    held_bytes: int
    """Of request bodies in memory, complete or not."""
    most_held_bytes: int

    def refusal(self, request: Incoming) -> ApiError | None:
        """Called when the head has come, before any of the body is read."""
        ...

    def handle(self, request: Incoming) -> None:
        """The request is complete. Answer with its connection's ``respond``, or with ``write`` and ``end``."""
        ...

    def refuse(self, request: Incoming, error: ApiError) -> None: ...

    def opened(self, connection: Connection) -> None: ...

    def closed(self, connection: Connection) -> None: ...


@dataclass(slots=True, eq=False)
class Incoming:
    """A client's request."""

    connection: Connection
    method: str
    target: str
    """Path and query, as sent."""
    version: str
    headers: Headers
    keep_alive: bool
    path: str = ""
    began_s: float = field(default_factory=time.monotonic)
    """When its head was complete."""
    body: bytes = b""
    body_bytes: int = 0
    expects: bool = False
    """The client sends its body after "100 Continue"."""
    has_come: bool = False
    response_headers: bytes = b""
    """Further header lines of its response, whatever that is."""
    is_preflight: bool = False
    """It is a CORS preflight."""
    has_cors: bool = False
    """The router answers CORS; servers' CORS headers are dropped."""
    tenant: Tenant | None = None
    """The tenant of its API key."""
    refusal: ApiError | None = None
    """Set where it is refused before it is complete."""
    listener: Listener | None = None
    _pieces: list[bytes] | None = None

    def __post_init__(self) -> None:
        self.path = self.target.partition("?")[0]

    @property
    def remote(self) -> str:
        """The client's IP address."""
        return self.connection.remote

    def add(self, piece: bytes) -> None:
        self.body_bytes += len(piece)
        if self._pieces is not None:
            self._pieces.append(piece)
        elif self.body:
            self._pieces = [self.body, piece]
        else:
            self.body = piece

    def drop_body(self) -> None:
        self.body, self._pieces, self.body_bytes = b"", None, 0

    def close_body(self) -> None:
        if self._pieces is not None:
            self.body, self._pieces = b"".join(self._pieces), None
        self.has_come = True


class Connection(asyncio.Protocol):
    def __init__(self, app: Application, loop: asyncio.AbstractEventLoop) -> None:
        self._app = app
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._partial_bytes = 0
        """Received of an incomplete head."""
        self._in_head = False
        self._reading: Incoming | None = None
        """The request whose body is being received."""
        self._current: Incoming | None = None
        """The request that is being answered."""
        self._waiting: deque[Incoming] = deque()
        self._started = False
        """A request was begun in this turn of the event loop: the next waits for the next turn."""
        self._paused_reading = False
        self._discarding = False
        """Further input is dropped: the connection closes after the current response."""
        self.closing = False
        self.full = False
        """Its write buffer is full."""
        self.remote = ""
        self.made = False
        """It is established, with TLS after the handshake."""

    # -- from the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.made = True
        self.deadline = Deadline(self._loop)
        peer = transport.get_extra_info("peername")
        self.remote = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        self._app.opened(self)
        self._await_request()

    def connection_lost(self, error: Exception | None) -> None:
        self.closing = self._discarding = True
        self.deadline.close()
        for request in (self._reading, *self._waiting):
            self._release(request)
        self._reading = None
        self._waiting.clear()
        current, self._current = self._current, None
        self._release(current)
        if current is not None and current.listener is not None:
            current.listener.client_gone()
        self._app.closed(self)

    def eof_received(self) -> bool:
        return False  # close: no client half-closes and waits for a response

    def pause_writing(self) -> None:
        self.full = True
        if self._current is not None and self._current.listener is not None:
            self._current.listener.client_full()

    def resume_writing(self) -> None:
        self.full = False
        if self._current is not None and self._current.listener is not None:
            self._current.listener.client_ready()

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            return
        self._started = False
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserCallbackError as error:
            log.error("connection aborted: fault while parsing", exc_info=error.__context__)
            self.abort()
            return
        except httptools.HttpParserError as error:
            if not self._discarding:  # after "Connection: close" anything may follow
                self._refuse(ApiError(400, f"malformed or ambiguous HTTP request: {error}"))
            return
        if self._in_head:
            self._partial_bytes += len(data)
            if self._partial_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_long())
            elif self._partial_bytes == len(data):
                self._await_rest()
        elif self._reading is not None:
            self._await_rest()

    # -- from the parser

    def on_message_begin(self) -> None:
        self._in_head = True

    def on_url(self, target: bytes) -> None:
        self._target += target

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is None:  # else it is a trailer: no known API uses them
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._discarding:
            return
        parser = self._parser
        raw, target = self._headers, self._target
        headers = Headers(raw)
        head_bytes = len(target) + sum(map(len, chain.from_iterable(raw))) + 4 * len(raw)
        self._headers, self._target, self._partial_bytes = [], b"", 0
        request = self._reading = Incoming(
            self,
            parser.get_method().decode("ascii"),
            target.decode("ascii", "replace"),
            parser.get_http_version(),
            headers,
            parser.should_keep_alive(),
        )
        refusal = (
            _head_too_long()
            if head_bytes > MAX_HEAD_BYTES
            else _check_head(request, self._app.max_body_bytes) or self._app.refusal(request)
        )
        if refusal is not None:
            self._refuse(refusal)
        elif headers.first.get(b"expect"):
            request.expects = True
            if self._current is None:
                self._say_continue(request)

    def on_body(self, piece: bytes) -> None:
        request = self._reading
        if request is None or self._discarding:
            return
        app = self._app
        request.add(piece)
        app.held_bytes += len(piece)
        if request.body_bytes > app.max_body_bytes:
            self._refuse(too_large(app.max_body_bytes))
        elif app.held_bytes > app.most_held_bytes:
            self._refuse(_bodies_too_large())

    def on_message_complete(self) -> None:
        request = self._reading
        if request is None or self._discarding:
            return
        if request.headers.first.get(b"upgrade") and self._parser.should_upgrade():
            return  # `_decline_upgrade` reads it again
        self._reading = None
        request.close_body()
        self._enqueue(request)

    # -- requests: `_reading` (its body is coming) -> `_waiting` (complete, pipelined) -> `_current` (is answered).
    # Responses leave in the order of the requests, so one request is current at a time. A second one in the same read
    # begins in the next turn of the event loop: a client that pipelines must not delay the others.

    def _enqueue(self, request: Incoming) -> None:
        if not request.keep_alive:
            self._discarding = True
        elif len(self._waiting) == MAX_PIPELINED:
            request.refusal = ApiError(429, f"{MAX_PIPELINED} pipelined requests wait on this connection already")
            request.keep_alive, self._discarding = False, True
        if self._current is None and not self._started and not self._waiting:
            self._started = True
            self._start(request)
            return
        self._waiting.append(request)
        if self._current is None and len(self._waiting) == 1:
            self._loop.call_soon(self._next)
        self._pause()

    def _start(self, request: Incoming) -> None:
        self._current = request
        self.deadline.clear()
        if request.refusal is not None:
            self._app.refuse(request, request.refusal)
        else:
            self._app.handle(request)

    def _next(self) -> None:
        self._started = False
        if self._current is not None or self.closing:
            return
        if self._waiting:
            self._start(self._waiting.popleft())
        else:
            self._unpause()

    def _refuse(self, error: ApiError) -> None:
        """Answer the incomplete request with an error, in its turn, and read nothing further."""
        request = self._reading
        if request is None:
            request = Incoming(self, "", "", "1.1", Headers(()), False)
        self._reading = None
        self._release(request)
        request.refusal = error
        request.keep_alive = False
        self._enqueue(request)

    def _decline_upgrade(self, rest: bytes) -> None:
        """Serve a request that offers an upgrade as plain HTTP/1.1: parse it again without the offer."""
        request, self._reading = self._reading, None
        self._parser = httptools.HttpRequestParser(self)
        if request is None:  # it was refused
            return
        lines = [f"{request.method} {request.target} HTTP/{request.version}\r\n".encode()]
        for name, value in request.headers.raw:
            if name.lower() not in (b"upgrade", b"http2-settings"):
                lines += (name, b": ", value, b"\r\n")
        self._parse(b"".join((*lines, b"\r\n", rest)))

    def _say_continue(self, request: Incoming) -> None:
        request.expects = False
        self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _pause(self) -> None:
        if not self._paused_reading:
            self._paused_reading = True
            self._transport.pause_reading()

    def _unpause(self) -> None:
        if self._paused_reading:
            self._paused_reading = False
            self._transport.resume_reading()

    def replace_body(self, request: Incoming, body: bytes) -> None:
        """Put the decompressed body in place of what came.

        Raises:
            ApiError: 503, the memory for bodies is full.
        """
        self._app.held_bytes += len(body) - request.body_bytes
        request.body, request.body_bytes = body, len(body)
        if self._app.held_bytes > self._app.most_held_bytes:
            raise _bodies_too_large()

    # -- time

    def _await_request(self) -> None:
        self.deadline.set(self._app.keep_alive_s, self._close_idle)

    def _close_idle(self) -> None:
        """No request came in time: close, unless the event loop has not yet delivered one."""
        if _is_readable(self._transport):
            self.deadline.set(UNREAD_S, self._close_idle)
        else:
            self.close()

    def last_call(self) -> None:
        """Restart the keep-alive timeout of an idle connection: its length has changed."""
        if self.is_idle and not self.closing:
            self._await_request()

    def _await_rest(self) -> None:
        """Limit the time for the rest of a head or body, counted from its beginning."""
        if self._current is not None:
            return
        if self._reading is None:
            self.deadline.set(self._app.client_s, self.close)
            return
        left_s = self._reading.began_s + self._app.client_s - time.monotonic()
        self.deadline.set(max(0.0, left_s), self._body_timeout)

    def _body_timeout(self) -> None:
        if self._reading is not None:
            self._refuse(ApiError(408, f"the request body did not arrive within {self._app.client_s:g} s"))

    # -- responses

    @property
    def is_idle(self) -> bool:
        """No request is under way, not even the first bytes of one."""
        return self._current is None and self._reading is None and not self._waiting and not self._in_head

    @property
    def current(self) -> Incoming | None:
        return self._current

    def respond(self, status: int, headers: bytes, body: bytes, *, close: bool = False) -> None:
        """Answer the current request with a complete response. ``headers``: as lines, each with its end."""
        request = self._current
        if request is None or self.closing:
            return
        keep = self._keeps(request) and not close
        length = b"" if status == 204 else b"Content-Length: %d\r\n" % len(body)
        ends = _date(int(time.time())) + length + connection_line(request, keep)
        head = b"".join((status_line(status), headers, request.response_headers, ends, b"\r\n"))
        self._transport.write(head if request.method == "HEAD" else head + body)
        self.end(keep)

    def keeps(self, framed: bool) -> bool:
        """Whether the connection stays open after a response. ``framed``: its head says where it ends."""
        return framed and self._current is not None and self._keeps(self._current)

    def _keeps(self, request: Incoming) -> bool:
        return request.keep_alive and not self._app.draining

    def write(self, data: bytes) -> None:
        if not self.closing:
            self._transport.write(data)

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def end(self, keep: bool) -> None:
        """The response is written to its end."""
        request, self._current = self._current, None
        self._release(request)
        if request is not None:
            request.listener = None
        if self.closing:
            return
        if not keep or (self._discarding and not self._waiting):
            self._close_after(request)
            return
        if self._reading is not None and self._reading.expects:
            self._say_continue(self._reading)
        if self._reading is not None or self._in_head:
            self._await_rest()
        else:
            self._await_request()
        if self._waiting or self._paused_reading:
            self._loop.call_soon(self._next)

    def _close_after(self, request: Incoming | None) -> None:
        """Close when the write buffer is empty. Input of a client that still sends is read for a while: unread bytes
        would make the kernel send a reset, and the client might not see the response.
        """
        self._discarding = True
        if request is None or request.has_come or self._transport.is_closing():
            self.close()
            return
        self._unpause()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self.deadline.set(LINGER_S, self.close)

    def close(self) -> None:
        """Close when the write buffer is empty."""
        self.closing = self._discarding = True
        self._transport.close()
        self.deadline.set(CUT_S, self._transport.abort)

    def cut(self, framed: bool) -> None:
        """End an incomplete response: send what is written, without the mark of a proper end.

        ``framed``: its head says where it ends. Else the end of the connection would be its end: it is reset.
        """
        self._forget()
        if framed:
            self.close()
            return
        self._reset_at_close()
        if self._transport.get_extra_info("ssl_object") is None:
            self.close()
        else:
            self.abort()  # TLS's close_notify would be a proper end, too

    def _reset_at_close(self) -> None:
        found = self._transport.get_extra_info("socket")
        if found is not None:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def abort(self) -> None:
        """Close at once, and drop what is not yet sent. A response under way ends with a reset."""
        if self._current is not None and not self.closing:
            self._reset_at_close()
        self._forget()
        self.closing = self._discarding = True
        self._transport.abort()

    def _forget(self) -> None:
        self._release(self._current)
        if self._current is not None:
            self._current.listener = None
            self._current = None

    def _release(self, request: Incoming | None) -> None:
        """Drop its body."""
        if request is not None:
            self._app.held_bytes -= request.body_bytes
            request.drop_body()


def _check_head(request: Incoming, max_body_bytes: int) -> ApiError | None:
    """Refuse what the parser lets pass but the router does not serve."""
    headers, first = request.headers, request.headers.first
    if request.version not in ("1.1", "1.0"):
        return ApiError(505, f"HTTP/{request.version} is not supported; use 1.1 or 1.0")
    if request.method == "CONNECT":
        return ApiError(405, "CONNECT is not supported: this is not a forward proxy")
    target = request.target
    if not target.startswith("/"):
        scheme, _, rest = target.partition("://")
        if scheme.lower() not in ("http", "https"):
            return ApiError(400, f"{target[:100]!r} is not a path; expected one such as /v1/completions")
        request.target = "/" + rest.partition("/")[2]
        request.path = request.target.partition("?")[0]
    if "#" in target:
        return ApiError(400, "a request's path must not have a fragment (#…)")
    if b"transfer-encoding" in first:
        codings = transfer_codings(headers.all_of(b"transfer-encoding"))
        if request.version == "1.0" or codings != [CHUNKED]:
            shown = b", ".join(codings)[:100].decode("latin-1")
            is_readable = codings[-1:] == [CHUNKED] and codings.count(CHUNKED) == 1 and request.version == "1.1"
            status = 501 if is_readable else 400  # it says where it ends, but is coded; or not even that
            return ApiError(status, f"Transfer-Encoding {shown!r} is not supported; expected chunked")
    hosts = headers.all_of(b"host")
    if len(hosts) > 1 or (not hosts and request.version == "1.1"):
        return ApiError(400, f"expected one Host header, got {len(hosts)}")
    expected = first.get(b"expect")
    if expected and expected.lower() != b"100-continue":
        return ApiError(417, f"Expect: {expected[:100].decode('latin-1')!r} is not supported; 100-continue is")
    length = first.get(b"content-length")
    if length:
        digits = length.lstrip(b"0")  # the parser has read them as 64 bits, and lets any number of zeros pass
        if len(digits) > _LENGTH_DIGITS or int(digits or b"0") > max_body_bytes:
            return too_large(max_body_bytes)
    return None


def _is_readable(transport: asyncio.Transport) -> bool:
    """Whether the kernel has bytes for us, or the peer's close."""
    found = transport.get_extra_info("socket")
    if found is None:
        return False
    poll = select.poll()
    poll.register(found.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _head_too_long() -> ApiError:
    return ApiError(431, f"request line and headers are too long; at most {MAX_HEAD_BYTES} bytes are allowed")


def too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"the body is too large; at most {most_bytes} bytes are allowed")


def _bodies_too_large() -> ApiError:
    return ApiError(503, "the router's memory for request bodies is full; try again soon")


@lru_cache(maxsize=128)
def status_line(status: int, reason: str = "") -> bytes:
    if not reason:
        try:
            reason = HTTPStatus(status).phrase
        except ValueError:
            reason = "Unknown"
    return f"HTTP/1.1 {status} {reason}\r\n".encode("latin-1")


def connection_line(request: Incoming, keep: bool) -> bytes:
    """The Connection header, where the HTTP version's default says otherwise."""
    if request.version == "1.0":
        return b"Connection: keep-alive\r\n" if keep else b""
    return b"" if keep else b"Connection: close\r\n"


@lru_cache(maxsize=2)
def _date(now_s: int) -> bytes:
    return b"Date: %s\r\n" % formatdate(now_s, usegmt=True).encode()


def header_lines(headers: Iterable[tuple[str, str]]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers).encode("latin-1", "replace")


class Deadline:
    """A timeout that is moved at every step of a connection and seldom reached: moving it costs two assignments, since
    the event-loop timer is renewed only when it fires early.
    """

    __slots__ = ("_due_s", "_loop", "_reached", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due_s = 0.0
        self._reached: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float, reached: Callable[[], None]) -> None:
        """Call ``reached`` in this many seconds; replaces the former callback."""
        due_s = self._loop.time() + seconds
        self._due_s, self._reached = due_s, reached
        timer = self._timer
        if timer is not None:
            if timer.when() <= due_s:
                return
            timer.cancel()
        self._timer = self._loop.call_at(due_s, self._fire)

    def clear(self) -> None:
        self._reached = None

    def close(self) -> None:
        self._reached = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        reached = self._reached
        if reached is None:
            return
        if self._due_s > self._loop.time():
            self._timer = self._loop.call_at(self._due_s, self._fire)
            return
        self._reached = None
        reached()
