"""gRPC over HTTP/2 on asyncio, in one thread: what comes in one read is answered in one write.

`grpcio` does this too. Its server for asyncio hands every message through three threads, which costs a request through
Envoy more than reading its prompt and picking its server (`docs/decisions/router.md` has the figures).

Each call has an object that is told what comes (``Call``) and an ``Answers`` to say what goes back. Messages are bytes:
whoever they are for knows what they mean. Deadlines (`grpc-timeout`) are the caller's to keep; compressed messages are
refused, as gRPC has it for who reads none.

One thread serves all connections, so none may have it for long: a read is at most ``READ_BYTES``, and a connection is
dealt with for ``SLICE_S``. What is left waits, its connection is not read from meanwhile, and those that wait have
their turns one after the other, ``TURN_S`` of them in one turn of the event loop. What a peer may make us keep is
bounded, of one call, one connection and in all; each refusal is told to ``Door.refused`` with its reason.
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
"""Before each message: whether it is compressed, and its length."""
KEEPALIVE_S = 30.0
"""Without a word for so long a peer is asked whether it is there; without an answer in as long again, it is not."""
PREFACE_S = 10.0
"""For whoever connects to say that it speaks HTTP/2."""
READ_BYTES = 64 << 10
"""Of one connection in one turn of the loop: eight requests of 8 KB."""
SLICE_S, TURN_S = 0.001, 0.002
"""A request takes 0.2 ms. Whoever asks after our health waits for about a turn, however many others flood."""
WORK_AT_ONCE = 8
"""Frames between two looks at the clock."""
MESSAGES_AT_ONCE = 32
"""Of one call, likewise: a frame has room for 3,000 empty ones."""
ANSWERS_AT_ONCE = 4
"""Of a long answer, likewise: 62 KB each."""
MOST_UNSENT_BYTES = 1 << 20
"""Of answers that a peer does not take; until it does, it is not listened to."""
MOST_CHOKED = 32
"""Connections that do not take what they asked for. Of more, the first that stopped to is cut off."""
MOST_CONNECTIONS = 1_000
"""A thousand workers of Envoy. One more, and the one that is silent for longest is cut off, if any has no call open."""
MOST_HELD_BYTES = 32 << 20
"""Of messages that have not come whole and bodies that have not ended, of all calls; at least two of the longest. Of
8 KB each, it is 4,000. Beyond, the calls that hold most of it are refused: short ones go on."""
_BEGIN = literals([(b":status", b"200"), (b"content-type", b"application/grpc")])
_NO_GRPC = literals([(b":status", b"415"), (b"content-type", b"text/plain")])
_NO_GRPC_TEXT = b"this is a server of gRPC: POST, with content-type application/grpc\n"
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

    def held_bytes(self) -> int:
        """That it keeps of what it was told, until there is more."""
        return 0

    def too_much(self) -> None:
        """All calls together keep more than is allowed, and this one most of it: answer, and keep nothing."""
        return


@dataclass(eq=False)
class Door:
    """What all connections of a listening address share."""

    methods: Mapping[str, Callable[[Answers], Call]]
    """By path, as ``/grpc.health.v1.Health/Check``."""
    most_message_bytes: int
    most_streams: int
    """Of one connection; more are refused, and may be asked elsewhere. Of all connections, twice as many."""
    faults: Callable[[], None] = lambda: None
    """Told of each exception that a call did not see coming."""
    refused: Callable[[str], None] = lambda reason: None
    """Told of each stream, call or connection that was refused or cut off for its peer's doing, with the reason."""
    keepalive_s: float = KEEPALIVE_S
    preface_s: float = PREFACE_S
    most_connections: int = MOST_CONNECTIONS
    most_held_bytes: int = MOST_HELD_BYTES
    connections: set[Connection] = field(default_factory=set)
    empty: asyncio.Event = field(default_factory=asyncio.Event)
    calls: int = 0
    """Of all connections, under way."""

    def __post_init__(self) -> None:
        self.most_held_bytes = max(self.most_held_bytes, 2 * self.most_message_bytes)
        self.scratch = memoryview(bytearray(READ_BYTES))
        """Where reads go: they are dealt with one by one. A view, since TLS reads into slices of it."""
        self._waiting: deque[Connection] = deque()
        self._choked: dict[Connection, None] = {}
        self._held: dict[Answers, int] = {}
        self._held_bytes = 0
        self._frees = self._turn_comes = False

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

    # Turns

    def wait(self, connection: Connection) -> None:
        """``connection`` has more to be dealt with than it may have dealt with at once."""
        self._waiting.append(connection)
        self._have_a_turn()

    def _have_a_turn(self) -> None:
        if self._waiting and not self._turn_comes:
            self._turn_comes = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_comes = False
        end_s = time.perf_counter() + TURN_S
        try:
            for _ in range(len(self._waiting)):
                connection = self._waiting.popleft()
                if connection.work():
                    self._waiting.append(connection)
                if time.perf_counter() >= end_s:
                    break
        finally:  # whatever became of one of them, the others have theirs
            self._have_a_turn()

    # Limits

    def came(self, connection: Connection) -> bool:
        """Whether there is room for one more."""
        if len(self.connections) >= self.most_connections:
            self.refused("connections")
            idle = [each for each in self.connections if not len(each.http2)]
            if not idle:
                return False
            oldest = min(idle, key=lambda each: each.heard_s)
            oldest.abort()
            self.connections.discard(oldest)
        self.connections.add(connection)
        return True

    def left(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._choked.pop(connection, None)
        self.empty.set()

    def choked(self, connection: Connection) -> None:
        """It does not take its answers."""
        self._choked[connection] = None
        if len(self._choked) > MOST_CHOKED:
            first = next(iter(self._choked))
            del self._choked[first]
            self.refused("unread-answers")
            first.abort()

    def unchoked(self, connection: Connection) -> None:
        self._choked.pop(connection, None)

    def holds(self, answers: Answers, size: int) -> None:
        """``answers`` keeps so many bytes now. Those that keep most are refused, where that is too much in all."""
        self._held_bytes += size - self._held.pop(answers, 0)
        if size:
            self._held[answers] = size
        if self._held_bytes <= self.most_held_bytes or self._frees:
            return
        self._frees = True
        for each in sorted(self._held, key=lambda one: self._held[one], reverse=True):
            if self._held_bytes <= self.most_held_bytes * 7 // 8:  # not again with the next byte
                break
            before = self._held.get(each, 0)
            each.account()  # the peer may have taken some since
            if self._held.get(each, 0) == before > 0:
                self.refused("bytes")
                each.too_much()
        self._frees = False


class Answers:
    """What is said to one call. Once that is over, nothing."""

    __slots__ = (
        "_begun",
        "_buffer",
        "_connection",
        "_ended",
        "_held",
        "_held_bytes",
        "_later",
        "_owed",
        "_stream",
        "call",
    )

    def __init__(self, connection: Connection, stream: int) -> None:
        self._connection, self._stream = connection, stream
        self._begun = self._held = self._ended = False
        self._owed = self._held_bytes = 0
        self._buffer = bytearray()
        self._later: Iterator[bytes] | None = None
        self.call: Call | None = None
        """None when it is over."""

    def send(self, *messages: bytes) -> None:
        """What is sent together goes together."""
        self._say(messages)
        self._connection.flush()

    def send_all(self, messages: Iterable[bytes]) -> None:
        """One after the other, those behind the first in later turns of the loop. What comes meanwhile waits."""
        self._later = iter(messages)
        if self._say_some():
            self._held = True
            self._connection.has_more(self)
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
        if self._later is not None:
            return  # when that is said
        self._held = False
        self._connection.http2.consumed(self._stream, self._owed)
        self._owed = 0
        self._connection.has_more(self)

    def work(self) -> bool:
        """Some of what waits. True: there is more."""
        if self._later is not None:
            if not self._say_some():
                self.go_on()
            return True
        if self._tell() or self._later is not None:
            return True
        self.account()
        if self._ended and not self._held and self.call is not None:
            self._connection.guard(self, self.call.ended)
        return False

    def came(self, data: bytes) -> None:
        """Part of a message, or several."""
        if self._held:
            self._buffer += data
            self._owed += len(data)
            self.account()
            return
        self._connection.http2.consumed(self._stream, len(data))
        if self._buffer:
            self._buffer += data
            more = self._tell()
        else:
            more = self._tell_of(data)
        if more:
            self._connection.has_more(self)
        else:
            self.account()

    def ended(self) -> None:
        self._ended = True
        if not self._held and not self._connection.has_more_of(self) and self.call is not None:
            self._connection.guard(self, self.call.ended)

    def too_much(self) -> None:
        """What it holds is wanted back."""
        if self.call is None:
            return
        theirs = self.call.held_bytes()
        if self._connection.http2.pending(self._stream) > max(theirs, len(self._buffer)):
            self._connection.http2.reset(self._stream, ENHANCE_YOUR_CALM)
            self._connection.forget(self._stream)
            self._connection.flush()
        elif len(self._buffer) > theirs:
            self.finish(RESOURCE_EXHAUSTED, "the server holds as much as it may of messages that have not ended")
        else:
            self._connection.guard(self, self.call.too_much)
            self.account()

    def over(self) -> None:
        """Nothing of it is kept."""
        self._buffer.clear()
        self._later = None
        if self._held_bytes:
            self._held_bytes = 0
            self._connection.door.holds(self, 0)

    def account(self) -> None:
        """Tell the door how much this call keeps."""
        kept = 0
        if self.call is not None:
            kept = len(self._buffer) + self.call.held_bytes()
            if self._connection.http2.pending_bytes:
                kept += self._connection.http2.pending(self._stream)
        if kept != self._held_bytes:
            self._held_bytes = kept
            self._connection.door.holds(self, kept)

    def _say(self, messages: Iterable[bytes]) -> None:
        http2 = self._connection.http2
        if not self._begun:
            self._begun = True
            http2.headers(self._stream, _BEGIN)
        http2.data(self._stream, b"".join([part for each in messages for part in (_HEAD.pack(0, len(each)), each)]))

    def _say_some(self) -> bool:
        """Of ``_later``. True: there is more."""
        assert self._later is not None
        for _ in range(ANSWERS_AT_ONCE):
            message = next(self._later, None)
            if message is None:
                self._later = None
                return False
            self._say((message,))
        return True

    def _tell_of(self, data: bytes) -> bool:
        """Messages that have come whole, with nothing before them; the rest is kept. True: there are more."""
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
        return self._tell()

    def _tell(self) -> bool:
        """As ``_tell_of``, of what was kept."""
        buffer, most = self._buffer, self._connection.door.most_message_bytes
        for _ in range(MESSAGES_AT_ONCE):
            if len(buffer) < HEAD_BYTES or self.call is None or self._held:
                return False
            size = int.from_bytes(buffer[1:HEAD_BYTES], "big")
            if buffer[0]:
                self.finish(UNIMPLEMENTED, "a message that is compressed")
            elif size > most:
                self.finish(RESOURCE_EXHAUSTED, f"a message of {size} bytes; {most} are the most")
            elif len(buffer) < HEAD_BYTES + size:
                return False
            else:
                message = bytes(buffer[HEAD_BYTES : HEAD_BYTES + size])
                del buffer[: HEAD_BYTES + size]
                self._connection.guard(self, self.call.message, message)
        return True


class Connection(asyncio.BufferedProtocol):
    """One connection of a `Door`."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.http2 = Http2(self, door.most_streams)
        self.heard_s = 0.0
        """When something came last, by the loop's clock."""
        self._calls: dict[int, Answers | None] = {}
        """None: what was opened there is no gRPC."""
        self._more: dict[Answers, None] = {}
        """Calls with messages that were not dealt with."""
        self._transport: asyncio.Transport | None = None
        self._inside = self._leaving = self._waits = self._chokes = False
        self._asked_s: float | None = None
        self._look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        if not self.door.came(self):
            self._transport.abort()
            self._transport = None
            return
        self._loop = asyncio.get_running_loop()
        self.heard_s = self._loop.time()
        self._transport.set_write_buffer_limits(high=MOST_UNSENT_BYTES)
        self._look = self._loop.call_later(self.door.preface_s, self._look_after)
        self.flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.door.scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._transport is None:
            return
        self.heard_s = self._loop.time()
        self.http2.receive(bytes(self.door.scratch[:nbytes]))
        if self._waits:
            return
        if self.work() or nbytes == READ_BYTES:
            # There may be more in the socket, and a loop that reads on would not come to others.
            self._waits = True
            self._read_or_not()
            self.door.wait(self)

    def work(self) -> bool:
        """A slice of what came. True: there is more, and whoever called will call again."""
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
            log.debug("a connection of gRPC is closed: %s", self.http2.fault)
            self._close()
            return False
        if self._waits and not more:
            self._waits = False
            self._read_or_not()
        return more

    def connection_lost(self, _: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        self._transport = None
        for stream in list(self._calls):
            self.forget(stream)
        self.http2.drop()
        self.door.left(self)

    def pause_writing(self) -> None:
        self._chokes = True
        self._read_or_not()
        self.door.choked(self)

    def resume_writing(self) -> None:
        self._chokes = False
        self._read_or_not()
        self.door.unchoked(self)

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
        data = self.http2.data_to_send()
        if data:
            self._transport.write(data)
        if self._leaving and not len(self.http2):
            self._close()

    def _read_or_not(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._waits or self._chokes:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _look_after(self) -> None:
        """Whether the peer is still there: one whose computer is gone says nothing, and its calls would never end.

        One that said only half of what it must say first is not there either, nor one that takes no answers.
        """
        silent = self._asked_s is not None and self.heard_s < self._asked_s
        if not self.http2.begun or silent:
            self.door.refused("preface" if not self.http2.begun else "silence")
            self.abort()
            return
        now_s = self._loop.time()
        self._asked_s = None
        if now_s - self.heard_s >= self.door.keepalive_s:
            self._asked_s = now_s
            self.http2.ping()
            self.flush()
        self._look = self._loop.call_later(self.door.keepalive_s, self._look_after)

    # What HTTP/2 tells

    def opened(self, stream: int, headers: Headers) -> None:
        if self.door.calls >= 2 * self.door.most_streams:
            self.door.refused("streams")
            self.http2.reset(stream, REFUSED_STREAM)
            return
        self.door.calls += 1
        told = dict(headers)
        if told.get(b":method") != b"POST" or not told.get(b"content-type", b"").startswith(b"application/grpc"):
            self._calls[stream] = None
            return
        answers = self._calls[stream] = Answers(self, stream)
        make = self.door.methods.get(told[b":path"].decode("latin-1"))
        if make is None:
            answers.finish(UNIMPLEMENTED, f"there is no {told[b':path'].decode('latin-1')}")
        else:
            answers.call = make(answers)

    def came(self, stream: int, data: bytes) -> None:
        answers = self._calls[stream]
        if answers is None:
            self.http2.consumed(stream, len(data))
        else:
            answers.came(data)

    def ended(self, stream: int) -> None:
        answers = self._calls[stream]
        if answers is None:
            self.http2.headers(stream, _NO_GRPC)
            self.http2.data(stream, _NO_GRPC_TEXT)
            self.http2.finish(stream, None)
            self.forget(stream)
        else:
            answers.ended()

    def broke_off(self, stream: int) -> None:
        self.forget(stream)

    def refused(self, reason: str) -> None:
        self.door.refused(reason)

    # What answers need

    def guard(self, answers: Answers, tell: Callable[..., None], *what: bytes) -> None:
        """A fault of ours ends one call, and no other."""
        try:
            tell(*what)
        except Exception:
            log.exception("a call of gRPC ended by a fault")
            self.door.faults()
            answers.finish(UNKNOWN, "a fault of the picker's own; its log says which")

    def has_more(self, answers: Answers) -> None:
        """It has something to be dealt with that did not just come."""
        self._more[answers] = None
        if not self._inside and not self._waits and self._transport is not None:
            self._waits = True
            self._read_or_not()
            self.door.wait(self)

    def has_more_of(self, answers: Answers) -> bool:
        return answers in self._more

    def forget(self, stream: int) -> None:
        if stream not in self._calls:
            return
        self.door.calls -= 1
        answers = self._calls.pop(stream)
        if answers is None:
            return
        self._more.pop(answers, None)
        if answers.call is not None:
            call, answers.call = answers.call, None
            answers.over()
            call.gone()
