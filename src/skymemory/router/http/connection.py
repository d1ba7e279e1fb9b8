"""A client's HTTP/1.1 connection: requests in (parsed by llhttp, through httptools), responses out, in order.

1. ``data_received`` feeds the parser; callbacks build an ``Incoming``. The head is checked before any body is read.
2. A complete request goes to ``handle``. Pipelined requests wait, unread.
3. ``respond``, or ``write`` and ``end``, answer it.

Requests that could be understood in two ways (request smuggling) are refused.

Connections, incomplete requests and unread responses take limited resources (``limits``); ``evict`` and ``turn_away``
free them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from itertools import chain
from typing import Protocol, cast

import httptools

from skymemory import native
from skymemory.native.twin.backend import RawHeaders
from skymemory.router.api_error import OF_CLIENT, ApiError
from skymemory.router.api_keys import Tenant
from skymemory.router.http.codings import CHUNKED, transfer_codings
from skymemory.router.limits.connections import ConnectionTable, Seat, State
from skymemory.router.limits.held_bytes import HeldBytes
from skymemory.router.limits.rates import LeastRate
from skymemory.router.limits.shares import holder_of

log = logging.getLogger("skymemory.router")

MAX_HEAD_BYTES = 32_768
"""Limit of request line and headers together."""
MAX_HEADERS = 256
YIELD_BYTES = 250_000
LINGER_S = 2.0
"""Time to drop the rest of a refused body, so that its sender sees the response, not a reset."""
CUT_S = 5.0
"""Time for a client to read the end of a response."""
UNREAD_S = 0.05
"""Time for a busy event loop to deliver bytes."""
_LENGTH_DIGITS = 20
LONG_BODY_BYTES = 1 << 20
"""Size from which threads join bodies: allocating 16 MB may take 50 ms."""
MAX_PIPELINED = 64
SLICE_BYTES = 16_384
SLICED_BYTES = 65_536
DENSE_CHUNKS = 256
CHUNK_FRAMING_BYTES = 12
# RFC 3986, section 3.2.2.
_HOST = re.compile(r"(?:\[[0-9A-Za-z:.%_~-]+\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]{0,5})?")
MAX_FRAMING_BYTES = 16_384
"""Limit of a body's chunk extensions and trailers."""


class Headers(Mapping[str, str]):
    """Headers by lower-case names, the first value of each. ``raw``: lines as received."""

    __slots__ = ("first", "raw")

    def __init__(self, raw: RawHeaders) -> None:
        self.raw = raw
        self.first = native.first_values(raw)

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
            return [first[name]]  # no header is repeated
        return [value for key, value in self.raw if key.lower() == name]

    def words_of(self, name: bytes) -> list[bytes]:
        return [word.strip().lower() for value in self.all_of(name) for word in value.split(b",")]


class RequestHandler(Protocol):
    def client_gone(self) -> None: ...  # it disconnected

    def client_full(self) -> None: ...  # it does not read its response

    def client_ready(self) -> None: ...  # it reads again

    def stop(self) -> None: ...  # the router stops


class Application(Protocol):
    """Owner of the connections: limits, and callbacks."""

    max_body_bytes: int
    client_s: float  # time for a request's whole body, and for a client that reads nothing of its response
    head_s: float  # time for a request's head
    least_rate: int  # bytes a second of a body
    keep_alive_s: float
    draining: bool
    table: ConnectionTable[HttpConnection]
    arriving: HeldBytes[Incoming | HttpConnection]  # request bodies and incomplete heads
    unread: HeldBytes[HttpConnection]  # responses that clients have not read

    def refusal(self, request: Incoming) -> ApiError | None: ...

    def handle(self, request: Incoming) -> None: ...

    def refuse(self, request: Incoming, error: ApiError) -> None: ...

    def opened(self, connection: HttpConnection) -> None: ...

    def evicted(self, limit: str) -> None:
        """Count a connection that was closed because others needed its share of ``limit``."""
        ...

    def closed(self, connection: HttpConnection) -> None: ...

    def fault(self, what: str, error: BaseException | None) -> None: ...


class Incoming:
    """A client's request. ``listener`` handles it."""

    # Class attributes as defaults: most requests never set them.
    body: bytes = b""
    body_bytes: int = 0
    expects_continue: bool = False  # the client waits for "100 Continue"
    is_chunked: bool = False
    chunks: int = 0
    framing_bytes: int = 0
    is_body_complete: bool = False
    response_headers: bytes = b""
    is_preflight: bool = False
    has_cors: bool = False  # the router answers CORS, instead of the server
    tenant: Tenant | None = None  # owner of its API key
    refusal: ApiError | None = None  # answer it with this error
    listener: RequestHandler | None = None
    rate: LeastRate | None = None
    rated_bytes: int = 0  # bytes of its body that `rate` has counted
    is_tracked: bool = False  # `arriving` has it as incomplete
    _body_pieces: list[bytes] | None = None

    def __init__(
        self, connection: HttpConnection, method: str, target: str, version: str, headers: Headers, keep_alive: bool
    ) -> None:
        """``target``: path and query, as sent."""
        self.connection, self.method, self.target, self.version = connection, method, target, version
        self.headers, self.keep_alive = headers, keep_alive
        self.path = target.partition("?")[0]
        self.remote = connection.remote
        self.holder = connection.holder  # tenant or client address, whose share of the limits it uses
        self.began_s = time.monotonic()

    def turn_away(self, is_slow: bool) -> None:
        if is_slow:
            error = ApiError(408, "memory for request bodies is short, and this one came too slowly")
        else:
            error = _bodies_too_large()
        self.connection.turn_away(self, error)

    def add(self, piece: bytes) -> None:
        """Add a turn's data, joined: tiny chunks would take many times their bytes."""
        self.body_bytes += len(piece)
        if self._body_pieces is not None:
            self._body_pieces.append(piece)
        elif self.body:
            self._body_pieces = [self.body, piece]
        else:
            self.body = piece

    def drop_body(self) -> None:
        self.body, self._body_pieces, self.body_bytes = b"", None, 0

    def close_body(self) -> None:
        if self._body_pieces is not None and self.body_bytes < LONG_BODY_BYTES:
            self.set_body(self.joined())
        self.is_body_complete = True

    @property
    def is_in_pieces(self) -> bool:
        return self._body_pieces is not None

    def joined(self) -> bytes:
        return b"".join(self._body_pieces or ())

    def set_body(self, body: bytes) -> None:
        self.body, self._body_pieces = body, None


class HttpConnection(asyncio.Protocol):
    __slots__ = (
        "_app",
        "_body_pieces",
        "_current_request",
        "_has_started_in_turn",
        "_headers",
        "_held_head_bytes",
        "_incomplete_request",
        "_is_discarding_input",
        "_is_in_head",
        "_is_reading_paused",
        "_is_yielding",
        "_loop",
        "_parsed_bytes",
        "_parsed_chunks",
        "_parser",
        "_partial_head_bytes",
        "_pipelined_requests",
        "_seat",
        "_slice_bytes",
        "_slice_has_message_end",
        "_target",
        "_transport",
        "_unparsed_input",
        "_unread_bytes",
        "_unread_holder",
        "accepted",
        "closing",
        "deadline",
        "full",
        "holder",
        "made",
        "on_body",
        "on_header",
        "remote",
    )

    def __init__(self, app: Application, loop: asyncio.AbstractEventLoop) -> None:
        self._app = app
        self._loop = loop
        self._body_pieces: list[bytes] = []
        self.on_body = self._body_pieces.append  # a C callback: no Python frame per chunk
        self._headers: list[tuple[bytes, bytes]] = []  # head lines, or trailers
        self.on_header = native.pairs_into(self._headers)
        self._unparsed_input: memoryview | None = None
        self._target = b""
        self._partial_head_bytes = 0
        self._is_in_head = False
        self._incomplete_request: Incoming | None = None
        self._current_request: Incoming | None = None
        self._pipelined_requests: deque[Incoming] = deque()
        self._has_started_in_turn = False  # a request started in this turn; the next waits
        self._is_reading_paused = False
        self._is_yielding = False
        self._is_discarding_input = False  # no further request is read or answered
        self.closing = False
        self.full = False  # the client does not read its response
        self.remote = ""
        self.holder = ""  # client address or IPv6 network, whose share it uses
        self.made = False  # `connection_made` was called: after a TLS handshake
        self.accepted: socket.socket | None = None
        self._seat: Seat[HttpConnection] | None = None
        self._held_head_bytes = 0
        # Bytes of the current slice; chunks and bytes of bodies in it.
        self._slice_bytes = self._parsed_chunks = self._parsed_bytes = 0
        self._slice_has_message_end = False
        self._unread_bytes = 0
        self._unread_holder = ""

    # -- from the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self.made = True
        self.deadline = MovingTimeout(self._loop)
        self.accepted = None
        if self.closing:  # evicted meanwhile
            self._transport.abort()
            return
        if self._seat is None:
            peer = transport.get_extra_info("peername")
            self.sit(str(peer[0]) if isinstance(peer, tuple) and peer else "")
        self._app.opened(self)
        self._set_idle_deadline()

    def connection_lost(self, error: Exception | None) -> None:
        self.closing = self._is_discarding_input = True
        self.deadline.close()
        self.leave()
        self._release_head()
        self._release_unread()
        self._release_body(self._incomplete_request)
        self._incomplete_request = None
        self._release_waiting()
        self._take_unparsed_input()
        current, self._current_request = self._current_request, None
        self._release_body(current)
        if current is not None and current.listener is not None:
            current.listener.client_gone()
        self._app.closed(self)
        del self._parser  # it refers to this object, which refers to the buffers of TLS

    def eof_received(self) -> bool:
        return False  # close: no client half-closes and waits for a response

    def pause_writing(self) -> None:
        self.full = True
        self._move_seat(State.UNREAD)
        if self._current_request is not None and self._current_request.listener is not None:
            self._current_request.listener.client_full()
        self._hold_unread_bytes()

    def resume_writing(self) -> None:
        self.full = False
        self._release_unread()
        if self._current_request is not None:
            self._move_seat(State.BUSY)
            if self._current_request.listener is not None:
                self._current_request.listener.client_ready()
        elif not self.closing and (self._pipelined_requests or not self._is_discarding_input):
            self._wait_for_next_request()

    def data_received(self, data: bytes) -> None:
        if len(data) >= YIELD_BYTES:
            self._yield_to_loop()
        if self._is_discarding_input:
            return
        self._has_started_in_turn = False
        if self._unparsed_input is not None:  # not expected while reading is paused
            data = bytes(self._take_unparsed_input()) + data
        if len(data) >= SLICED_BYTES:
            self._parse_slices(memoryview(data), SLICE_BYTES)
        elif (unparsed := self._parse_slice(data)) is not None:
            self._parse_slices(memoryview(unparsed), len(unparsed))
        elif self._incomplete_request is not None:
            self._track_incomplete_body()

    def _yield_to_loop(self) -> None:
        if not self._is_yielding and not self._transport.is_closing():
            self._is_yielding = True
            self._transport.pause_reading()
            self._loop.call_soon(self._read_after_yield)

    def _read_after_yield(self) -> None:
        self._is_yielding = False
        if self._unparsed_input is not None:
            self._has_started_in_turn = False
            self._parse_slices(self._take_unparsed_input(), SLICE_BYTES)
        if (
            self._unparsed_input is None
            and not self._is_yielding
            and not self._is_reading_paused
            and not self._transport.is_closing()
        ):
            self._transport.resume_reading()

    def _parse_slices(self, data: memoryview, slice_bytes: int) -> None:
        """Parse input; leave the rest to later turns of the event loop if it has many chunks or requests."""
        while data and not self._is_discarding_input:
            reading = self._incomplete_request
            size = len(data) if reading is not None and not reading.is_chunked else slice_bytes
            piece, data = data[:size], data[size:]
            waiting = len(self._pipelined_requests)
            if (unparsed := self._parse_slice(piece)) is not None:
                data = memoryview(bytes(unparsed) + bytes(data))
            is_dense = self._parsed_chunks > DENSE_CHUNKS or len(self._pipelined_requests) > waiting
            if data and is_dense and not self._is_discarding_input:
                self._unparsed_input = data
                self._app.arriving.limit.change(self.holder, len(data))
                self._yield_to_loop()
                break
        if self._incomplete_request is not None:
            self._track_incomplete_body()

    def _take_unparsed_input(self) -> memoryview:
        unparsed, self._unparsed_input = self._unparsed_input or memoryview(b""), None
        self._app.arriving.limit.change(self.holder, -len(unparsed))
        return unparsed

    def _parse_slice(self, data: bytes | memoryview) -> bytes | None:
        """Return bytes to parse again after a declined upgrade."""
        before = self._incomplete_request
        self._slice_has_message_end = before is not None
        self._parsed_chunks = 0
        self._slice_bytes = len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._add_body_pieces(self._incomplete_request)
            return self._decline_upgrade(bytes(data[upgrade.args[0] :]))
        except httptools.HttpParserCallbackError as error:
            self._app.fault("connection aborted: fault while parsing", error.__context__)
            self.abort()
            return None
        except httptools.HttpParserError as error:
            self._body_pieces.clear()
            if not self._is_discarding_input:  # after "Connection: close" anything may follow
                self._refuse_incomplete_request(ApiError(400, f"malformed or ambiguous HTTP request: {error}"))
            return None
        if self._body_pieces:
            self._add_body_pieces(self._incomplete_request)
        else:
            self._parsed_bytes = 0
        if self._is_discarding_input:
            return None
        if self._is_in_head:
            # If the slice also has the end of another request, count only the parsed part of the head.
            head_bytes = _size_of(self._target, self._headers) if self._slice_has_message_end else len(data)
            self._partial_head_bytes += head_bytes
            if self._partial_head_bytes > MAX_HEAD_BYTES or len(self._headers) > MAX_HEADERS:
                self._refuse_incomplete_request(_head_too_long())
                return None
            if self._partial_head_bytes == head_bytes:
                self._set_arrival_deadline()
            self._hold_head_bytes(head_bytes)
        elif (request := self._incomplete_request) is not None and request is before and request.is_chunked:
            request.framing_bytes += len(data) - self._parsed_bytes
            if request.framing_bytes > MAX_FRAMING_BYTES + CHUNK_FRAMING_BYTES * request.chunks:
                self._refuse_incomplete_request(_framing_too_long())
        return None

    # -- from the parser

    def on_message_begin(self) -> None:
        self._is_in_head = not self._is_discarding_input

    def on_url(self, target: bytes) -> None:
        if not self._is_discarding_input:
            self._target += target

    def on_headers_complete(self) -> None:
        """Create the request, or refuse it before its body."""
        self._is_in_head = False
        if self._is_discarding_input:
            return
        if self._held_head_bytes:
            self._release_head()
        parser = self._parser
        raw, target = self._headers.copy(), self._target
        headers = Headers(raw)
        head_bytes = self._partial_head_bytes + self._slice_bytes
        if head_bytes > MAX_HEAD_BYTES:  # may include bytes of other messages
            head_bytes = _size_of(target, raw)
        self._headers.clear()
        self._target, self._partial_head_bytes = b"", 0
        request = self._incomplete_request = Incoming(
            self,
            parser.get_method().decode("ascii"),
            target.decode("ascii", "replace"),
            parser.get_http_version(),
            headers,
            parser.should_keep_alive(),
        )
        refusal = (
            _head_too_long()
            if head_bytes > MAX_HEAD_BYTES or len(raw) > MAX_HEADERS
            else _check_head(request, self._app.max_body_bytes) or self._app.refusal(request)
        )
        request.is_chunked = b"transfer-encoding" in headers.first
        if request.tenant is not None:
            request.holder = request.tenant.name
        if refusal is not None:
            self._refuse_incomplete_request(refusal)
        elif headers.first.get(b"expect") and request.version != "1.0":
            request.expects_continue = True
            if self._current_request is None:
                self._send_continue(request)

    def _add_body_pieces(self, request: Incoming | None) -> None:
        pieces = self._body_pieces
        if not pieces:
            self._parsed_bytes = 0
            return
        count = len(pieces)
        joined = pieces[0] if count == 1 else b"".join(pieces)
        self._parsed_chunks += count
        pieces.clear()
        self._parsed_bytes = size_bytes = len(joined)
        if request is None or self._is_discarding_input:
            return
        app = self._app
        has_room = app.arriving.limit.add(request.holder, size_bytes)
        request.add(joined)
        request.chunks += count
        if request.body_bytes > app.max_body_bytes:
            self._refuse_incomplete_request(too_large(app.max_body_bytes))
        elif not has_room and not self._make_room(request, request.holder) and self._incomplete_request is request:
            self._refuse_incomplete_request(_bodies_too_large())

    def on_message_complete(self) -> None:
        self._slice_has_message_end = True
        if self._headers:
            self._headers.clear()  # trailers: no known API uses them
        request = self._incomplete_request
        if request is None or self._is_discarding_input:
            return
        if request.headers.first.get(b"upgrade") and self._parser.should_upgrade():
            return  # `_decline_upgrade` parses it again
        self._add_body_pieces(request)
        if self._incomplete_request is not request:
            return  # refused
        self._incomplete_request = None
        if request.is_tracked:
            request.is_tracked = False
            self._app.arriving.untrack(request, request.holder)
        request.close_body()
        self._enqueue(request)

    # -- limits shared with other connections

    def sit(self, address: str) -> None:
        self.remote, self.holder = address, holder_of(address)
        self._seat = self._app.table.open(self, self.holder, time.monotonic())

    def leave(self) -> None:
        seat, self._seat = self._seat, None
        if seat is not None:
            self._app.table.close(seat)

    def _move_seat(self, to: State) -> None:
        if self._seat is not None:
            self._app.table.move(self._seat, to, time.monotonic())

    def evict(self) -> None:
        """Close at once to free resources; an incomplete request gets 408."""
        self.leave()
        if not self.made:
            self._is_discarding_input = self.closing = True
            if self.accepted is not None:
                with contextlib.suppress(OSError):
                    self.accepted.shutdown(socket.SHUT_RDWR)  # ends the handshake
            return
        if (
            not self._is_discarding_input
            and not self.full
            and (self._is_in_head or self._incomplete_request is not None)
        ):
            self._refuse_incomplete_request(ApiError(408, "connections are short, and this request came too slowly"))
            if self._transport.get_extra_info("ssl_object") is None:
                self.close()
                return
        # Abort, because a TLS close waits for the peer.
        self._is_discarding_input = self.closing = True
        self._transport.abort()

    def turn_away(self, request: Incoming | None, error: ApiError) -> None:
        """Refuse the incomplete request or head (None), unless it has ended."""
        if (
            self._incomplete_request is request
            and not self._is_discarding_input
            and (request is not None or self._is_in_head)
        ):
            self._refuse_incomplete_request(error)

    def _make_room(self, item: Incoming | HttpConnection, holder: str) -> bool:
        """Refuse incomplete requests until the holder has room; False: refuse ``item``."""
        arriving, now_s = self._app.arriving, time.monotonic()
        while not arriving.limit.has_room(holder, 0):
            victim = arriving.victim(holder, now_s)
            if victim is None or victim.item is item:
                self._app.evicted("arriving")
                return False
            self._app.evicted("arriving")
            payer = victim.item
            if isinstance(payer, Incoming):
                arriving.untrack(payer, payer.holder)
                payer.turn_away(victim.is_slow)
            else:
                arriving.untrack(payer, payer.holder)
                payer.turn_away(None, ApiError(408, "memory for requests is short, and this head came too slowly"))
        return True

    def _track_incomplete_body(self) -> None:
        request = self._incomplete_request
        if request is None or self._is_discarding_input:
            return
        request.is_tracked = True
        self._app.arriving.track(request, request.holder, request.body_bytes, time.monotonic())
        self._set_arrival_deadline()

    def _hold_head_bytes(self, more_bytes: int) -> None:
        app = self._app
        self._held_head_bytes += more_bytes
        has_room = app.arriving.limit.add(self.holder, more_bytes)
        app.arriving.track(self, self.holder, self._held_head_bytes, time.monotonic())
        if not has_room and not self._make_room(self, self.holder):
            self.turn_away(None, _bodies_too_large())

    def _release_head(self) -> None:
        if self._held_head_bytes:
            self._app.arriving.untrack(self, self.holder)
            self._app.arriving.limit.change(self.holder, -self._held_head_bytes)
            self._held_head_bytes = 0

    def _hold_unread_bytes(self) -> None:
        """Count the response's unread bytes; evict clients while there are too many."""
        self._release_unread()
        current, unread = self._current_request, self._app.unread
        holder = self._unread_holder = self.holder if current is None else current.holder
        size_bytes = self._unread_bytes = self._transport.get_write_buffer_size()
        has_room, now_s = unread.limit.add(holder, size_bytes), time.monotonic()
        unread.track(self, holder, size_bytes, now_s)
        while not has_room:
            victim = unread.victim(holder, now_s)
            if victim is None:
                return
            self._app.evicted("unread")
            victim.item._release_unread()
            victim.item.evict()
            has_room = unread.limit.has_room(holder, 0)

    def _release_unread(self) -> None:
        if self._unread_bytes:
            self._app.unread.untrack(self, self._unread_holder)
            self._app.unread.limit.change(self._unread_holder, -self._unread_bytes)
            self._unread_bytes = 0

    # -- requests: `_incomplete_request` (body arrives) -> `_pipelined_requests` (complete) -> `_current_request` (being
    # answered). Responses leave in the order of the requests, so only one request is current. A second request of the
    # same read starts in the next turn of the event loop: a client that pipelines must not delay others.

    def _enqueue(self, request: Incoming) -> None:
        """Start a complete request, or let it wait for earlier responses."""
        if not request.keep_alive:
            self._is_discarding_input = True
        elif len(self._pipelined_requests) == MAX_PIPELINED:
            request.refusal = ApiError(429, f"{MAX_PIPELINED} pipelined requests wait on this connection already")
            request.keep_alive, self._is_discarding_input = False, True
        if (
            self._current_request is None
            and not self._has_started_in_turn
            and not self._pipelined_requests
            and not self.full
        ):
            self._has_started_in_turn = True
            self._start_request(request)
            return
        self._pipelined_requests.append(request)
        if self._current_request is None and len(self._pipelined_requests) == 1:
            self._loop.call_soon(self._start_next_request)
        self._pause_reading()

    def _start_request(self, request: Incoming) -> None:
        self._current_request = request
        if self._seat is not None:
            self._seat.is_busy = True
        self.deadline.clear()
        if request.refusal is not None:
            self._app.refuse(request, request.refusal)
        else:
            self._app.handle(request)

    def _start_next_request(self) -> None:
        self._has_started_in_turn = False
        if self._current_request is not None or self.closing or self.full:
            return
        if self._pipelined_requests:
            self._start_request(self._pipelined_requests.popleft())
        else:
            self._resume_reading()

    def _refuse_incomplete_request(self, error: ApiError) -> None:
        """Answer the incomplete request in its turn, and read no more."""
        if self._is_discarding_input:
            return  # no further request is answered
        request = self._incomplete_request
        if request is None:
            request = Incoming(self, "", "", "1.1", Headers(()), False)
        self._incomplete_request = None
        self._release_body(request)
        self._release_head()
        request.refusal = error
        request.keep_alive = False
        self._enqueue(request)

    def _decline_upgrade(self, remainder: bytes) -> bytes | None:
        """Return the request without its upgrade, to parse it again."""
        request, self._incomplete_request = self._incomplete_request, None
        self._parser = httptools.HttpRequestParser(self)
        if request is None:  # refused
            return None
        lines = [f"{request.method} {request.target} HTTP/{request.version}\r\n".encode()]
        for name, value in request.headers.raw:
            if name.lower() not in (b"upgrade", b"http2-settings"):
                lines += (name, b": ", value, b"\r\n")
        return b"".join((*lines, b"\r\n", remainder))

    def _send_continue(self, request: Incoming) -> None:
        request.expects_continue = False
        self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _pause_reading(self) -> None:
        if not self._is_reading_paused:
            self._is_reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._is_reading_paused:
            self._is_reading_paused = False
            self._transport.resume_reading()

    def replace_body(self, request: Incoming, body: bytes) -> None:
        """Set the decompressed body, or raise ``ApiError`` (503) if the memory for bodies is full."""
        if self.closing:
            return  # its memory is no longer counted
        has_room = self._app.arriving.limit.add(request.holder, len(body) - request.body_bytes)
        request.body, request.body_bytes = body, len(body)
        if not has_room and not self._make_room(request, request.holder):
            raise _bodies_too_large()

    def hold(self, request: Incoming, more_bytes: int) -> None:
        """Count further memory of a complete request, or raise ``ApiError`` (503)."""
        has_room = self._app.arriving.limit.add(request.holder, more_bytes)
        request.body_bytes += more_bytes
        if not has_room and not self._make_room(request, request.holder):
            raise _bodies_too_large()

    # -- time

    def _set_idle_deadline(self) -> None:
        self.deadline.set(self._app.keep_alive_s, self._close_if_idle)

    def has_input(self) -> bool:
        return self.made and _is_readable(self._transport)

    def _close_if_idle(self) -> None:
        if self.has_input():
            self.deadline.set(UNREAD_S, self._close_if_idle)
        else:
            self.close()

    def last_call(self) -> None:
        if self.is_idle and not self.closing:
            self._set_idle_deadline()

    def _set_arrival_deadline(self) -> None:
        if self._current_request is not None:
            return
        app, request = self._app, self._incomplete_request
        if request is None:
            self._move_seat(State.HEAD)
            self.deadline.set(app.head_s, self._head_timeout)
            return
        self._move_seat(State.BODY)
        # Arriving bytes move the body's deadline, but not beyond `client_s` after the request's begin.
        now_s = time.monotonic()
        if request.rate is None:
            request.rate = LeastRate(now_s)
        due_s = request.rate.add(request.body_bytes - request.rated_bytes, app.least_rate, now_s)
        request.rated_bytes = request.body_bytes
        self.deadline.set(max(0.0, min(due_s, request.began_s + app.client_s) - now_s), self._body_timeout)

    def _head_timeout(self) -> None:
        if self._is_in_head:
            self._refuse_incomplete_request(
                ApiError(408, f"the request's head did not arrive within {self._app.head_s:g} s")
            )

    def _body_timeout(self) -> None:
        request, app = self._incomplete_request, self._app
        if request is not None and time.monotonic() - request.began_s < app.client_s:
            self._refuse_incomplete_request(
                ApiError(408, f"the request body came more slowly than {app.least_rate} bytes per second")
            )
        elif request is not None:
            self._refuse_incomplete_request(ApiError(408, f"the request body did not arrive within {app.client_s:g} s"))

    # -- responses

    @property
    def is_idle(self) -> bool:
        return (
            self._current_request is None
            and self._incomplete_request is None
            and not self._pipelined_requests
            and not self._is_in_head
        )

    @property
    def current(self) -> Incoming | None:
        return self._current_request

    def respond(self, status: int, headers: bytes, body: bytes, *, close: bool = False) -> None:
        """Write a complete response. ``headers``: lines with line ends."""
        request = self._current_request
        if request is None or self.closing:
            return
        keep = self.keeps(True) and not close
        length = b"" if status == 204 else b"Content-Length: %d\r\n" % len(body)
        ends = _date(int(time.time())) + length + connection_line(request, keep)
        head = b"".join((status_line(status), headers, request.response_headers, ends, b"\r\n"))
        self._transport.write(head if request.method == "HEAD" else head + body)
        self.end(keep)

    def keeps(self, framed: bool) -> bool:
        """Return True if it stays open. ``framed``: the head says where the body ends."""
        request = self._current_request
        return framed and request is not None and request.keep_alive and not self._app.draining

    def write(self, data: bytes) -> None:
        if not self.closing:
            self._transport.write(data)

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def end(self, keep: bool) -> None:
        """End the response; ``keep`` the connection or close it."""
        request, self._current_request = self._current_request, None
        self._release_body(request)
        if request is not None:
            request.listener = None
        if self.closing:
            return
        if not keep or (self._is_discarding_input and not self._pipelined_requests):
            self._close_after(request)
            return
        if self.full:  # the client has to read this response before the next
            self._pause_reading()
            self.deadline.set(self._app.client_s, self.abort)
        else:
            self._wait_for_next_request()

    def _wait_for_next_request(self) -> None:
        """Set the deadline for the next request, or start it if it has arrived."""
        reading = self._incomplete_request
        if reading is not None and reading.expects_continue:
            self._send_continue(reading)
        if reading is not None or self._is_in_head:
            if reading is not None:
                reading.rate = None  # its time starts now
            self._set_arrival_deadline()
        else:
            if self._seat is not None:
                self._app.table.mark_idle(self._seat, time.monotonic())
            self._set_idle_deadline()
        if self._pipelined_requests or self._is_reading_paused:
            self._loop.call_soon(self._start_next_request)

    def _close_after(self, request: Incoming | None) -> None:
        """Close after the response. Input is still read: unread bytes would cause a reset, which may cost the client
        the response.
        """
        self._is_discarding_input = True
        self._move_seat(State.HEAD)
        if request is None or request.is_body_complete or self._transport.is_closing():
            self.close()
            return
        self._resume_reading()
        self._release_waiting()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self.deadline.set(LINGER_S, self.close)

    def _release_waiting(self) -> None:
        for request in self._pipelined_requests:
            self._release_body(request)
        self._pipelined_requests.clear()

    def close(self) -> None:
        self.closing = self._is_discarding_input = True
        self._transport.close()
        self.deadline.set(CUT_S, self._transport.abort)

    def cut(self, framed: bool) -> None:
        """End an incomplete response. Unless ``framed``, the connection is reset: a close would be a proper end."""
        self._drop_current_request()
        if framed:
            self.close()
            return
        self._reset_at_close()
        if self._transport.get_extra_info("ssl_object") is None:
            self.close()
        else:
            self.abort()  # TLS's close_notify would be a proper end, too

    def _reset_at_close(self) -> None:
        tcp_socket = self._transport.get_extra_info("socket")
        if tcp_socket is not None:
            tcp_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def abort(self) -> None:
        """Close at once; an unfinished response ends with a reset."""
        if self._current_request is not None and not self.closing:
            self._reset_at_close()
        self._drop_current_request()
        self.closing = self._is_discarding_input = True
        self._transport.abort()

    def _drop_current_request(self) -> None:
        self._release_body(self._current_request)
        if self._current_request is not None:
            self._current_request.listener = None
            self._current_request = None

    def _release_body(self, request: Incoming | None) -> None:
        if request is not None:
            if request.body_bytes:
                self._app.arriving.limit.change(request.holder, -request.body_bytes)
            if request.is_tracked:
                request.is_tracked = False
                self._app.arriving.untrack(request, request.holder)
            request.drop_body()


def _size_of(target: bytes, headers: RawHeaders) -> int:
    return len(target) + sum(map(len, chain.from_iterable(headers))) + 4 * len(headers)


def _check_head(request: Incoming, max_body_bytes: int) -> ApiError | None:
    """Return the error of a head that the parser accepts but the router does not."""
    headers, first = request.headers, request.headers.first
    if request.version not in ("1.1", "1.0"):
        return ApiError(505, f"HTTP/{request.version} is not supported; use 1.1 or 1.0", kind=OF_CLIENT)
    if request.method == "CONNECT":
        return ApiError(405, "CONNECT is not supported: this is not a forward proxy")
    target, host = request.target, first.get(b"host", b"").decode("latin-1")
    is_absolute = not target.startswith("/")
    if is_absolute:
        scheme, _, remainder = target.partition("://")
        if scheme.lower() not in ("http", "https"):
            return ApiError(400, f"{target[:100]!r} is not a path; expected one such as /v1/completions")
        host, _, rest = remainder.partition("/")
        request.target = "/" + rest
        request.path = request.target.partition("?")[0]
    if "#" in target:
        return ApiError(400, "a request's path must not have a fragment (#…)")
    if b"transfer-encoding" in first:
        codings = transfer_codings(headers.all_of(b"transfer-encoding"))
        if request.version == "1.0" or codings != [CHUNKED]:
            quoted = b", ".join(codings)[:100].decode("latin-1")
            is_readable = codings[-1:] == [CHUNKED] and codings.count(CHUNKED) == 1 and request.version == "1.1"
            status = 501 if is_readable else 400  # 501: it says where it ends, but has another coding
            return ApiError(status, f"Transfer-Encoding {quoted!r} is not supported; expected chunked", kind=OF_CLIENT)
    hosts = headers.all_of(b"host")
    if len(hosts) > 1 or (not hosts and request.version == "1.1"):
        return ApiError(400, f"expected one Host header, got {len(hosts)}")
    if _HOST.fullmatch(host) is None or (is_absolute and not host):
        return ApiError(400, f"the host {host[:100]!r} is no name or address, with or without a port")
    if is_absolute and hosts:
        first[b"host"] = host.encode("ascii")  # the target's host counts (RFC 9112, section 3.2.2)
    expected = first.get(b"expect")
    # HTTP/1.0 has no expectations: they are ignored (RFC 9110, section 10.1.1).
    if expected and expected.lower() != b"100-continue" and request.version != "1.0":
        return ApiError(417, f"Expect: {expected[:100].decode('latin-1')!r} is not supported; 100-continue is")
    length = first.get(b"content-length")
    if length:
        digits = length.lstrip(b"0")  # the parser has read them as 64 bits, and lets any number of zeros pass
        if len(digits) > _LENGTH_DIGITS or int(digits or b"0") > max_body_bytes:
            return too_large(max_body_bytes)
    return None


def _is_readable(transport: asyncio.Transport) -> bool:
    tcp_socket = transport.get_extra_info("socket")
    if tcp_socket is None:
        return False
    poll = select.poll()
    poll.register(tcp_socket.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _head_too_long() -> ApiError:
    return ApiError(
        431, f"request line and headers are too long; at most {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} are allowed"
    )


def _framing_too_long() -> ApiError:
    return ApiError(
        400,
        f"the body's chunks have too much beside its bytes; at most {MAX_FRAMING_BYTES} bytes of extensions and "
        "trailers are allowed",
    )


def too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"the body is too large; at most {most_bytes} bytes are allowed")


def _bodies_too_large() -> ApiError:
    return ApiError(503, "the router's memory for request bodies is full; try again soon", retry_after_s=1)


@lru_cache(maxsize=128)
def status_line(status: int, reason: str = "") -> bytes:
    if not reason:
        try:
            reason = HTTPStatus(status).phrase
        except ValueError:
            reason = "Unknown"
    return f"HTTP/1.1 {status} {reason}\r\n".encode("latin-1")


def connection_line(request: Incoming, keep: bool) -> bytes:
    if request.version == "1.0":
        return b"Connection: keep-alive\r\n" if keep else b""
    return b"" if keep else b"Connection: close\r\n"


@lru_cache(maxsize=2)
def _date(now_s: int) -> bytes:
    return b"Date: %s\r\n" % formatdate(now_s, usegmt=True).encode()


def header_lines(headers: Iterable[tuple[str, str]]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers).encode("latin-1", "replace")


class MovingTimeout:
    """Timeout that is cheap to move: its timer is renewed only when it fires too early."""

    __slots__ = ("_due_s", "_loop", "_on_reached", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due_s = 0.0
        self._on_reached: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float, reached: Callable[[], None]) -> None:
        due_s = self._loop.time() + seconds
        self._due_s, self._on_reached = due_s, reached
        timer = self._timer
        if timer is not None:
            if timer.when() <= due_s:
                return
            timer.cancel()
        self._timer = self._loop.call_at(due_s, self._on_timer)

    def clear(self) -> None:
        self._on_reached = None

    def close(self) -> None:
        self._on_reached = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        reached = self._on_reached
        if reached is None:
            return
        if self._due_s > self._loop.time():
            self._timer = self._loop.call_at(self._due_s, self._on_timer)
            return
        self._on_reached = None
        reached()
