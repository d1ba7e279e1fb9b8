"""gRPC over HTTP/2 on asyncio, in one thread: what comes in one read is answered in one write.

`grpcio` does this too. Its server for asyncio hands every message through three threads, which costs a request through
Envoy more than reading its prompt and picking its server (`docs/decisions.md` has the figures).

Each call has an object that is told what comes (``Call``) and an ``Answers`` to say what goes back. Messages are bytes:
whoever they are for knows what they mean. Deadlines (`grpc-timeout`) are the caller's to keep; compressed messages are
refused, as gRPC has it for who reads none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast
from urllib.parse import quote

from skymemory.router.http2 import Http2
from skymemory.router.http2_frames import literals

OK, UNKNOWN, NOT_FOUND, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 0, 2, 5, 8, 12, 13, 14
HEAD_BYTES = 5
"""Before each message: whether it is compressed, and its length."""
KEEPALIVE_S = 30.0
"""Without a word for so long a peer is asked whether it is there; without an answer in as long again, it is not."""
PREFACE_S = 10.0
"""For whoever connects to say that it speaks HTTP/2."""
MOST_UNSENT_BYTES = 4 << 20
"""Of answers that a peer does not take; until it does, it is not listened to."""
_BEGIN = literals([(b":status", b"200"), (b"content-type", b"application/grpc")])
_NO_GRPC = literals([(b":status", b"415")])
_END = literals([(b"grpc-status", b"0")])
log = logging.getLogger("skymemory.router")


class Call(Protocol):
    """One call, seen from the server."""

    def message(self, data: bytes) -> None: ...

    def ended(self) -> None:
        """The caller has said all."""
        ...

    def gone(self) -> None:
        """It is over, however it ended. Comes once, after all else."""
        ...


@dataclass(eq=False)
class Door:
    """What all connections of a listening address share."""

    methods: Mapping[str, Callable[[Answers], Call]]
    """By path, as ``/grpc.health.v1.Health/Check``."""
    most_message_bytes: int
    most_streams: int
    """Of one connection; more are refused, and may be asked elsewhere."""
    faults: Callable[[], None] = lambda: None
    """Told of each exception that a call did not see coming."""
    keepalive_s: float = KEEPALIVE_S
    preface_s: float = PREFACE_S
    connections: set[Connection] = field(default_factory=set)
    empty: asyncio.Event = field(default_factory=asyncio.Event)

    def connect(self) -> Connection:
        return Connection(self)

    async def close(self, grace_s: float) -> None:
        """No new calls; those under way have ``grace_s`` to end. Whoever listens for new connections has stopped."""
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
            await asyncio.sleep(0)  # they are told in the loop's next turn


class Answers:
    """What is said to one call. Once that is over, nothing."""

    __slots__ = ("_begun", "_buffer", "_connection", "_ended", "_held", "_owed", "_stream", "call")

    def __init__(self, connection: Connection, stream: int) -> None:
        self._connection, self._stream = connection, stream
        self._begun = self._held = self._ended = False
        self._owed = 0
        self._buffer = bytearray()
        self.call: Call | None = None
        """None when it is over."""

    def send(self, message: bytes) -> None:
        http2 = self._connection.http2
        if not self._begun:
            self._begun = True
            http2.headers(self._stream, _BEGIN)
        http2.data(self._stream, b"\0" + len(message).to_bytes(4, "big") + message)
        self._connection.flush()

    def finish(self, status: int = OK, why: str = "") -> None:
        """No more is said, nor heard. ``status`` is one of gRPC's."""
        block = b"" if self._begun else _BEGIN
        if status:
            block += literals([(b"grpc-status", b"%d" % status), (b"grpc-message", quote(why, safe=" ,:;").encode())])
        else:
            block += _END
        self._connection.http2.finish(self._stream, block)
        self._connection.forget(self._stream)
        self._connection.flush()

    def hold(self) -> None:
        """What comes waits from now on, where it is much at its sender's, until ``go_on``."""
        self._held = True

    def go_on(self) -> None:
        self._held = False
        self._connection.http2.consumed(self._stream, self._owed)
        self._owed = 0
        self._tell()
        if self._ended and not self._held and self.call is not None:
            self._connection.guard(self, self.call.ended)
        self._connection.flush()

    def came(self, data: bytes) -> None:
        """Part of a message, or several."""
        self._buffer += data
        if self._held:
            self._owed += len(data)
            return
        self._connection.http2.consumed(self._stream, len(data))
        self._tell()

    def ended(self) -> None:
        self._ended = True
        if not self._held and self.call is not None:
            self._connection.guard(self, self.call.ended)

    def _tell(self) -> None:
        """Messages that have come whole."""
        buffer, most = self._buffer, self._connection.door.most_message_bytes
        while len(buffer) >= HEAD_BYTES and self.call is not None and not self._held:
            size = int.from_bytes(buffer[1:HEAD_BYTES], "big")
            if buffer[0]:
                self.finish(UNIMPLEMENTED, "a message that is compressed")
            elif size > most:
                self.finish(RESOURCE_EXHAUSTED, f"a message of {size} bytes; {most} are the most")
            elif len(buffer) < HEAD_BYTES + size:
                return
            else:
                message = bytes(buffer[HEAD_BYTES : HEAD_BYTES + size])
                del buffer[: HEAD_BYTES + size]
                self._connection.guard(self, self.call.message, message)


class Connection(asyncio.Protocol):
    """One connection of a `Door`."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.http2 = Http2(self, door.most_streams)
        self._calls: dict[int, Answers] = {}
        self._transport: asyncio.Transport | None = None
        self._inside = self._leaving = False
        self._heard = self._asked = False
        self._look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._transport.set_write_buffer_limits(high=MOST_UNSENT_BYTES)
        self.door.connections.add(self)
        self._look = asyncio.get_running_loop().call_later(self.door.preface_s, self._look_after)
        self.flush()

    def data_received(self, data: bytes) -> None:
        self._heard, self._inside = True, True
        try:
            self.http2.receive(data)
        finally:
            self._inside = False
        self.flush()
        if self.http2.fault is not None:
            log.debug("a connection of gRPC is closed: %s", self.http2.fault)
            self._close()

    def connection_lost(self, _: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        self._transport = None
        for stream in list(self._calls):
            self.forget(stream)
        self.door.connections.discard(self)
        self.door.empty.set()

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def leave(self) -> None:
        """Take no new calls, and end with the last one."""
        self._leaving = True
        self.http2.leave()
        self.flush()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def flush(self) -> None:
        if self._inside or self._transport is None:
            return
        if self.http2.out:
            self._transport.write(bytes(self.http2.out))
            self.http2.out.clear()
        if self._leaving and not len(self.http2):
            self._close()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _look_after(self) -> None:
        """Whether the peer is still there: one whose computer is gone says nothing, and its calls would never end."""
        if not self.http2.begun or (self._asked and not self._heard):
            self.abort()
            return
        self._asked = not self._heard
        if self._asked:
            self.http2.ping()
            self.flush()
        self._heard = False
        self._look = asyncio.get_running_loop().call_later(self.door.keepalive_s, self._look_after)

    # What HTTP/2 tells

    def opened(self, stream: int, headers: list[tuple[bytes, bytes]]) -> None:
        told = dict(headers)
        path = told.get(b":path", b"").decode("latin-1")
        if told.get(b":method") != b"POST" or not told.get(b"content-type", b"").startswith(b"application/grpc"):
            self.http2.finish(stream, _NO_GRPC)
            return
        answers = self._calls[stream] = Answers(self, stream)
        make = self.door.methods.get(path)
        if make is None:
            answers.finish(UNIMPLEMENTED, f"there is no {path}")
        else:
            answers.call = make(answers)

    def came(self, stream: int, data: bytes) -> None:
        self._calls[stream].came(data)

    def ended(self, stream: int) -> None:
        self._calls[stream].ended()

    def broke_off(self, stream: int) -> None:
        self.forget(stream)

    # What answers need

    def guard(self, answers: Answers, tell: Callable[..., None], *what: bytes) -> None:
        """A fault of ours ends one call, and no other."""
        try:
            tell(*what)
        except Exception:
            log.exception("a call of gRPC ended by a fault")
            self.door.faults()
            answers.finish(UNKNOWN, "a fault of the picker's own; its log says which")

    def forget(self, stream: int) -> None:
        answers = self._calls.pop(stream, None)
        if answers is not None and answers.call is not None:
            call, answers.call = answers.call, None
            call.gone()
