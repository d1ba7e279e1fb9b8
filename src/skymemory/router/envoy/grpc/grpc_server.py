"""gRPC server on asyncio, in one thread. The messages of one read are answered in one write.

1. ``GrpcConnection`` feeds bytes to ``Http2``, which reports streams.
2. ``Answers`` splits a stream into messages for the handler's ``GrpcCall``, and sends answers.
3. ``GrpcServer`` shares time and memory among connections.

`docs/decisions/router.md` says why not `grpcio`. Deadlines are left to the caller; compressed messages are refused.

A read is at most ``READ_BYTES``, and a connection is served for ``SLICE_S``. If input remains, its socket is not read
until its next turn; turns take ``TURN_S`` per turn of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast
from urllib.parse import quote

from skymemory.router.envoy.grpc.http2 import ENHANCE_YOUR_CALM, REFUSED_STREAM, Headers, Http2, literals

OK, UNKNOWN, NOT_FOUND, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 0, 2, 5, 8, 12, 13, 14
_HEAD = struct.Struct(">BL")
HEAD_BYTES = _HEAD.size
KEEPALIVE_S = 30.0
"""Silence before a PING, and again before an abort."""
PREFACE_S = 10.0
READ_BYTES = 64 << 10
SLICE_S, TURN_S = 0.001, 0.002
"""A request takes 0.2 ms; a health check waits for about one turn in a flood."""
WORK_AT_ONCE = 8
"""Frames between two checks of the clock."""
MESSAGES_AT_ONCE = 32
"""Messages of a call between two checks."""
ANSWERS_AT_ONCE = 4
"""Pieces of a long answer (62 KB each) between two checks."""
MAX_UNSENT_BYTES = 1 << 20
MAX_BLOCKED = 32
"""Limit of connections with a full write buffer; above it, the longest blocked is aborted."""
MAX_CONNECTIONS = 1_000
"""Limit; above it, the longest silent connection without calls is aborted."""
MAX_HELD_BYTES = 32 << 20
"""Limit of incomplete messages and bodies; above it, the calls that hold most are refused."""
_BEGIN = literals([(b":status", b"200"), (b"content-type", b"application/grpc")])
_NO_GRPC = literals([(b":status", b"415"), (b"content-type", b"text/plain")])
_NO_GRPC_TEXT = b"this is a server of gRPC: POST, with content-type application/grpc\n"
_END = literals([(b"grpc-status", b"0")])
log = logging.getLogger("skymemory.router")


class GrpcCall(Protocol):
    def message(self, data: bytes) -> None: ...

    def on_messages_end(self) -> None: ...

    def on_closed(self) -> None:
        """Clean up. This is the last callback."""
        ...

    def held_bytes(self) -> int:
        return 0

    def too_much(self) -> None:
        """Answer with an error, and free the memory: this call holds most."""
        return


@dataclass(eq=False)
class GrpcServer:
    methods: Mapping[str, Callable[[Answers], GrpcCall]]
    most_message_bytes: int
    most_streams: int  # limit per connection, and half of all
    faults: Callable[[], None] = lambda: None
    # Called with the reason of each refusal or abort because of a peer.
    refused: Callable[[str], None] = lambda reason: None
    keepalive_s: float = KEEPALIVE_S
    preface_s: float = PREFACE_S
    most_connections: int = MAX_CONNECTIONS
    most_held_bytes: int = MAX_HELD_BYTES
    connections: set[GrpcConnection] = field(default_factory=set)
    empty: asyncio.Event = field(default_factory=asyncio.Event)
    calls: int = 0

    def __post_init__(self) -> None:
        self.most_held_bytes = max(self.most_held_bytes, 2 * self.most_message_bytes)
        # Read buffer of all connections: reads are consumed at once. A view: TLS reads into slices.
        self.scratch = memoryview(bytearray(READ_BYTES))
        self._waiting: deque[GrpcConnection] = deque()  # connections with work left
        self._blocked: dict[GrpcConnection, None] = {}  # connections with a full write buffer
        self._held: dict[Answers, int] = {}  # memory by call
        self._held_bytes = 0
        self._frees = self._turn_comes = False  # in `holds`; a turn is scheduled

    def connect(self) -> GrpcConnection:
        return GrpcConnection(self)

    async def close(self, grace_s: float) -> None:
        """Refuse new calls, and give calls in flight ``grace_s`` to end. Close the listener first."""
        for connection in list(self.connections):
            connection.leave()
        try:
            async with asyncio.timeout(grace_s):
                while self.connections:
                    self.empty.clear()
                    await self.empty.wait()
        except TimeoutError:
            for connection in list(self.connections):
                connection.abort()
            await asyncio.sleep(0)  # asyncio reports their end in the next turn of the loop

    # Turns: a connection with work left after its slice is in `_waiting`, once, and its socket is not read meanwhile.
    # So a flood on a connection delays the others by one slice per turn, and its own bytes back up in the kernel.

    def wait(self, connection: GrpcConnection) -> None:
        self._waiting.append(connection)
        self._schedule_turn()

    def _schedule_turn(self) -> None:
        if self._waiting and not self._turn_comes:
            self._turn_comes = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Let waiting connections work, for ``TURN_S``."""
        self._turn_comes = False
        end_s = time.perf_counter() + TURN_S
        try:
            for _ in range(len(self._waiting)):
                connection = self._waiting.popleft()
                if connection.work():
                    self._waiting.append(connection)
                if time.perf_counter() >= end_s:
                    break
        finally:  # an exception of a connection must not stop the others
            self._schedule_turn()

    # Limits

    def admit(self, connection: GrpcConnection) -> bool:
        """Admit a connection, if need be instead of the longest silent idle connection."""
        if len(self.connections) >= self.most_connections:
            self.refused("connections")
            idle = [connection for connection in self.connections if not len(connection.http2)]
            if not idle:
                return False
            oldest = min(idle, key=lambda idle_connection: idle_connection.heard_s)
            oldest.abort()
            self.connections.discard(oldest)
        self.connections.add(connection)
        return True

    def remove(self, connection: GrpcConnection) -> None:
        self.connections.discard(connection)
        self._blocked.pop(connection, None)
        self.empty.set()

    def blocked(self, connection: GrpcConnection) -> None:
        self._blocked[connection] = None
        if len(self._blocked) > MAX_BLOCKED:
            first = next(iter(self._blocked))
            del self._blocked[first]
            self.refused("unread-answers")
            first.abort()

    def unblocked(self, connection: GrpcConnection) -> None:
        self._blocked.pop(connection, None)

    def holds(self, answers: Answers, size: int) -> None:
        """Record a call's memory, and refuse the largest calls if necessary."""
        self._held_bytes += size - self._held.pop(answers, 0)
        if size:
            self._held[answers] = size
        if self._held_bytes <= self.most_held_bytes or self._frees:
            return
        self._frees = True
        for largest in sorted(self._held, key=lambda call: self._held[call], reverse=True):
            if self._held_bytes <= self.most_held_bytes * 7 // 8:  # a margin, or the next byte would exceed it again
                break
            before = self._held.get(largest, 0)
            largest.account()  # some of it may have been sent in the meantime
            if self._held.get(largest, 0) == before > 0:
                self.refused("bytes")
                largest.too_much()
        self._frees = False


class Answers:
    def __init__(self, connection: GrpcConnection, stream: int) -> None:
        self._connection, self._stream = connection, stream
        self._begun = self._held = self._ended = False  # answer begun; input held back; input ended
        self._owed = self._held_bytes = 0  # held input to return to the window; memory reported to the server
        self._buffer = bytearray()  # incomplete message
        self._later: Iterator[bytes] | None = None  # answers still to be sent
        self.call: GrpcCall | None = None

    def send(self, *messages: bytes) -> None:
        self._write(messages)
        self._connection.flush()

    def send_all(self, messages: Iterable[bytes]) -> None:
        """Send messages over several turns; input waits meanwhile."""
        self._later = iter(messages)
        if self._write_some():
            self._held = True
            self._connection.has_more(self)
        self._connection.flush()

    def finish(self, status: int = OK, why: str = "") -> None:
        block = b"" if self._begun else _BEGIN
        if status:
            block += literals([(b"grpc-status", b"%d" % status), (b"grpc-message", quote(why, safe=" ,:;").encode())])
        else:
            block += _END
        self._connection.http2.finish(self._stream, block)
        self._connection.forget(self._stream)
        self._connection.flush()

    def hold(self) -> None:
        """Buffer input until ``go_on``; flow control stops its sender."""
        self._held = True

    def go_on(self) -> None:
        if self._later is not None:
            return  # `work` calls this again when that is sent
        self._held = False
        self._connection.http2.consumed(self._stream, self._owed)
        self._owed = 0
        self._connection.has_more(self)

    def work(self) -> bool:
        """Do some waiting work; return True if there is more."""
        if self._later is not None:
            if not self._write_some():
                self.go_on()
            return True
        if self._dispatch_buffer() or self._later is not None:
            return True
        self.account()
        if self._ended and not self._held and self.call is not None:
            self._connection.guard(self, self.call.on_messages_end)
        return False

    def on_data(self, data: bytes) -> None:
        """Process input, or buffer it while held."""
        if self._held:
            self._buffer += data
            self._owed += len(data)
            self.account()
            return
        self._connection.http2.consumed(self._stream, len(data))
        if self._buffer:
            self._buffer += data
            more = self._dispatch_buffer()
        else:
            more = self._dispatch(data)
        if more:
            self._connection.has_more(self)
        else:
            self.account()

    def on_stream_end(self) -> None:
        self._ended = True
        if not self._held and not self._connection.has_more_of(self) and self.call is not None:
            self._connection.guard(self, self.call.on_messages_end)

    def too_much(self) -> None:
        """Free the memory: end the call, or let its handler end it."""
        if self.call is None:
            return
        handler_bytes = self.call.held_bytes()
        if self._connection.http2.pending(self._stream) > max(handler_bytes, len(self._buffer)):
            self._connection.http2.reset(self._stream, ENHANCE_YOUR_CALM)
            self._connection.forget(self._stream)
            self._connection.flush()
        elif len(self._buffer) > handler_bytes:
            self.finish(RESOURCE_EXHAUSTED, "the server's memory for incomplete messages is full")
        else:
            self._connection.guard(self, self.call.too_much)
            self.account()

    def over(self) -> None:
        self._buffer.clear()
        self._later = None
        if self._held_bytes:
            self._held_bytes = 0
            self._connection.server.holds(self, 0)

    def account(self) -> None:
        held_bytes = 0
        if self.call is not None:
            held_bytes = len(self._buffer) + self.call.held_bytes()
            if self._connection.http2.pending_bytes:
                held_bytes += self._connection.http2.pending(self._stream)
        if held_bytes != self._held_bytes:
            self._held_bytes = held_bytes
            self._connection.server.holds(self, held_bytes)  # it may refuse the calls that hold most

    def _write(self, messages: Iterable[bytes]) -> None:
        http2 = self._connection.http2
        if not self._begun:
            self._begun = True
            http2.headers(self._stream, _BEGIN)
        http2.data(
            self._stream, b"".join([part for message in messages for part in (_HEAD.pack(0, len(message)), message)])
        )

    def _write_some(self) -> bool:
        assert self._later is not None
        for _ in range(ANSWERS_AT_ONCE):
            message = next(self._later, None)
            if message is None:
                self._later = None
                return False
            self._write((message,))
        return True

    def _dispatch(self, data: bytes) -> bool:
        """Dispatch complete messages, and buffer the rest. Return True if there are more. The buffer must be empty."""
        at, size = 0, len(data)
        for _ in range(MESSAGES_AT_ONCE):
            end = at + HEAD_BYTES
            if end > size or self.call is None or self._held:
                break
            end += int.from_bytes(data[at + 1 : end], "big")
            if data[at] or end > size:
                break
            message = data[at + HEAD_BYTES : end]
            at = end
            self._connection.guard(self, self.call.message, message)
        if at == size or self.call is None:
            return False
        self._buffer += data[at:]
        return self._dispatch_buffer()

    def _dispatch_buffer(self) -> bool:
        """Pass complete messages to the handler; return True if there may be more."""
        buffer, most = self._buffer, self._connection.server.most_message_bytes
        for _ in range(MESSAGES_AT_ONCE):
            if len(buffer) < HEAD_BYTES or self.call is None or self._held:
                return False
            size = int.from_bytes(buffer[1:HEAD_BYTES], "big")
            if buffer[0]:
                self.finish(UNIMPLEMENTED, "compressed messages are not supported")
            elif size > most:
                self.finish(RESOURCE_EXHAUSTED, f"a message of {size} bytes; at most {most} are allowed")
            elif len(buffer) < HEAD_BYTES + size:
                return False
            else:
                message = bytes(buffer[HEAD_BYTES : HEAD_BYTES + size])
                del buffer[: HEAD_BYTES + size]
                self._connection.guard(self, self.call.message, message)
        return True


class GrpcConnection(asyncio.BufferedProtocol):
    def __init__(self, server: GrpcServer) -> None:
        self.server = server
        self.http2 = Http2(self, server.most_streams)
        self.heard_s = 0.0
        self._calls: dict[int, Answers | None] = {}  # calls by stream; None: the request is not gRPC
        self._more: dict[Answers, None] = {}  # calls with work left
        self._transport: asyncio.Transport | None = None
        # In `work`; closing; waiting for its turn; write buffer full:
        self._inside = self._leaving = self._waits = self._is_blocked = False
        self._pinged_s: float | None = None
        self._keepalive: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        if not self.server.admit(self):
            self._transport.abort()
            self._transport = None
            return
        self._loop = asyncio.get_running_loop()
        self.heard_s = self._loop.time()
        self._transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self._keepalive = self._loop.call_later(self.server.preface_s, self._check_alive)
        self.flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.server.scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._transport is None:
            return
        self.heard_s = self._loop.time()
        self.http2.receive(bytes(self.server.scratch[:nbytes]))
        if self._waits:
            return
        if self.work() or nbytes == READ_BYTES:
            # The socket may have more input, and asyncio would go on reading it before serving other connections.
            self._waits = True
            self._update_reading()
            self.server.wait(self)

    def work(self) -> bool:
        """Work for one slice; return True if the caller must call again."""
        if self._transport is None:
            return False
        end_s = time.perf_counter() + SLICE_S
        self._inside = True
        try:
            more = True
            while more:
                more = self.http2.handle(WORK_AT_ONCE, self.heard_s)
                if self._more:
                    answers = next(iter(self._more))
                    del self._more[answers]
                    if answers.work():
                        self._more[answers] = None
                more = more or bool(self._more)
                if time.perf_counter() >= end_s:
                    break
        finally:
            self._inside = False
        self.flush()
        if self.http2.fault is not None:
            log.debug("gRPC connection closed: %s", self.http2.fault)
            self._close()
            return False
        if self._waits and not more:
            self._waits = False
            self._update_reading()
        return more

    def connection_lost(self, _: Exception | None) -> None:
        if self._keepalive is not None:
            self._keepalive.cancel()
        self._transport = None
        for stream in list(self._calls):
            self.forget(stream)
        self.http2.drop()
        self.server.remove(self)

    def pause_writing(self) -> None:
        self._is_blocked = True
        self._update_reading()
        self.server.blocked(self)

    def resume_writing(self) -> None:
        self._is_blocked = False
        self._update_reading()
        self.server.unblocked(self)

    def leave(self) -> None:
        self._leaving = True
        self.http2.leave()
        self.flush()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def flush(self) -> None:
        if self._inside or self._transport is None:
            return  # `work` flushes once at its end
        data = self.http2.data_to_send()
        if data:
            self._transport.write(data)
        if self._leaving and not len(self.http2):
            self._close()

    def _update_reading(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._waits or self._is_blocked:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _check_alive(self) -> None:
        """Abort a connection without a preface or an answer to a PING: its calls would never end."""
        silent = self._pinged_s is not None and self.heard_s < self._pinged_s
        if not self.http2.begun or silent:
            self.server.refused("preface" if not self.http2.begun else "silence")
            self.abort()
            return
        now_s = self._loop.time()
        self._pinged_s = None
        if now_s - self.heard_s >= self.server.keepalive_s:
            self._pinged_s = now_s
            self.http2.ping()
            self.flush()
        self._keepalive = self._loop.call_later(self.server.keepalive_s, self._check_alive)

    # Callbacks of HTTP/2

    def opened(self, stream: int, headers: Headers) -> None:
        if self.server.calls >= 2 * self.server.most_streams:
            self.server.refused("streams")
            self.http2.reset(stream, REFUSED_STREAM)
            return
        self.server.calls += 1
        values = dict(headers)
        if values.get(b":method") != b"POST" or not values.get(b"content-type", b"").startswith(b"application/grpc"):
            self._calls[stream] = None
            return
        answers = self._calls[stream] = Answers(self, stream)
        path = values[b":path"].decode("latin-1")
        make = self.server.methods.get(path)
        if make is None:
            answers.finish(UNIMPLEMENTED, f"unknown method {path}")
        else:
            answers.call = make(answers)

    def on_data(self, stream: int, data: bytes) -> None:
        answers = self._calls[stream]
        if answers is None:
            self.http2.consumed(stream, len(data))
        else:
            answers.on_data(data)

    def on_stream_end(self, stream: int) -> None:
        answers = self._calls[stream]
        if answers is None:
            self.http2.headers(stream, _NO_GRPC)
            self.http2.data(stream, _NO_GRPC_TEXT)
            self.http2.finish(stream, None)
            self.forget(stream)
        else:
            answers.on_stream_end()

    def aborted(self, stream: int) -> None:
        self.forget(stream)

    def refused(self, reason: str) -> None:
        self.server.refused(reason)

    # Interface of ``Answers``

    def guard(self, answers: Answers, callback: Callable[..., None], *arguments: bytes) -> None:
        """Run a handler's callback. An exception ends only its call."""
        try:
            callback(*arguments)
        except Exception:
            log.exception("a gRPC call failed")
            self.server.faults()
            answers.finish(UNKNOWN, "internal error of the endpoint picker; see its log")

    def has_more(self, answers: Answers) -> None:
        self._more[answers] = None
        if not self._inside and not self._waits and self._transport is not None:
            self._waits = True
            self._update_reading()
            self.server.wait(self)

    def has_more_of(self, answers: Answers) -> bool:
        return answers in self._more

    def forget(self, stream: int) -> None:
        if stream not in self._calls:
            return
        self.server.calls -= 1
        answers = self._calls.pop(stream)
        if answers is None:
            return
        self._more.pop(answers, None)
        if answers.call is not None:
            call, answers.call = answers.call, None
            answers.over()
            call.on_closed()
