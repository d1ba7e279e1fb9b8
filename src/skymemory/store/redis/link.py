"""Commands to a Redis or Valkey server, several at a time, over redis-py's connections; what fails is a reply too.

redis-py packs a command into one new buffer, which for a value of megabytes is a copy and fresh memory. Here the pieces
go to the socket as they are. Its timeouts are for each read: a server that sends a byte now and then is waited for
without end. Here a call as a whole has a deadline (``Patience``).
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from skymemory.errors import InvalidInput, MissingExtra
from skymemory.forks import Owner
from skymemory.metrics import SharedCounters
from skymemory.store.base import Buffer

Argument = bytes | tuple[Buffer, ...]
"""One argument of a command; a tuple is sent piece after piece as one."""

Command = list[Buffer]
"""In the server's protocol, ready to be sent piece after piece."""

_READ_BYTES = 256 << 10
"""So much is asked of the socket at once; redis-py's own 32 KiB are ninety calls for a block of 2.9 MB."""

LEAST_BYTES_PER_S = 1e6
"""Of a link that is slow rather than broken: so much longer a call may take for the bytes it has moved."""

_SMALL_BYTES = 4096
"""Pieces below this are joined: a copy costs less than a call."""

_REST_S = 1.0
"""After a timeout nothing is asked for so long: else every call of a load would wait once more."""


class Unreachable(Exception):
    """The server did not answer in time, or is not there. A reply, never raised to callers."""


def pack(*arguments: Argument) -> Command:
    """A command in the server's protocol (RESP: a list of strings with their lengths), large pieces not copied."""
    pieces: Command = []
    small = bytearray(b"*%d\r\n" % len(arguments))
    for argument in arguments:
        parts = argument if isinstance(argument, tuple) else (argument,)
        small += b"$%d\r\n" % sum(memoryview(part).nbytes for part in parts)
        for part in parts:
            if memoryview(part).nbytes < _SMALL_BYTES:
                small += part
            else:
                pieces += [bytes(small), part]
                small.clear()
        small += b"\r\n"
    return [*pieces, bytes(small)]


class Patience(threading.local):
    """How long the call that this thread is at may still wait: ``timeout_s`` from its beginning, and the time that the
    bytes moved since take at ``LEAST_BYTES_PER_S``. Connecting is part of it.
    """

    def __init__(self) -> None:
        self._until_s = float("-inf")

    def begin(self, timeout_s: float) -> None:
        self._until_s = time.monotonic() + timeout_s

    def moved(self, size_bytes: int) -> None:
        self._until_s += size_bytes / LEAST_BYTES_PER_S

    def left_s(self) -> float:
        """Above 0; else TimeoutError."""
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline of the call has passed")
        return left_s


class _Patient:
    """A socket on which nothing is waited for longer than ``patience`` lasts."""

    def __init__(self, sock: Any, patience: Patience) -> None:
        self._sock = sock
        self._patience = patience

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def recv(self, *how: Any) -> bytes:
        self._sock.settimeout(self._patience.left_s())
        data: bytes = self._sock.recv(*how)
        self._patience.moved(len(data))
        return data

    def recv_into(self, *how: Any) -> int:
        self._sock.settimeout(self._patience.left_s())
        size_bytes: int = self._sock.recv_into(*how)
        self._patience.moved(size_bytes)
        return size_bytes

    def sendall(self, data: Buffer) -> None:
        """Piece by piece: the time that one takes is as long as its bytes."""
        view = memoryview(data).cast("B")
        while view:
            self._sock.settimeout(self._patience.left_s())
            sent = self._sock.send(view)
            self._patience.moved(sent)
            view = view[sent:]


def _patient(kind: Any, patience: Patience) -> Any:
    """redis-py's ``kind`` of connection, with sockets that keep to ``patience``."""

    class Connection(kind):  # type: ignore[misc]
        def _connect(self) -> Any:
            return _Patient(super()._connect(), patience)

        @property
        def socket_connect_timeout(self) -> float:
            """Asked for each address of a name."""
            return patience.left_s()

        @socket_connect_timeout.setter
        def socket_connect_timeout(self, value: object) -> None:
            """It is the call's to say."""

    return Connection


class Link:
    """A pool of connections to the server at ``url``, made when they are first needed and anew when they broke.

    Raises:
        InvalidInput: an address that is none.
        MissingExtra: redis-py is not installed.
    """

    def __init__(self, url: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            self._redis: Any = importlib.import_module("redis")
            retry, backoff = importlib.import_module("redis.retry"), importlib.import_module("redis.backoff")
        except ModuleNotFoundError as error:
            raise MissingExtra("a Redis store needs redis: pip install 'skymemory[redis]'") from error
        if timeout_s <= 0:
            raise InvalidInput(f"a Redis store needs a timeout above 0 s, got {timeout_s}")
        self._patience = Patience()
        self.counters = SharedCounters()
        try:
            self._pool = self._redis.ConnectionPool.from_url(
                url,
                decode_responses=False,
                socket_timeout=timeout_s,
                socket_read_size=_READ_BYTES,
                # A second attempt would double the time that a caller waits; the next call is one.
                retry=retry.Retry(backoff.NoBackoff(), 0),
            )
            self._pool.connection_class = _patient(self._pool.connection_class, self._patience)
        except ValueError as error:
            raise InvalidInput(f"store {url!r}: {error}: expected redis://HOST[:PORT][/DB]") from error
        self._owner = Owner("this connection to Redis", self._let_go)
        self._timeout_s = timeout_s
        self._clock = clock
        self._rest_until_s = float("-inf")

    def ask(self, commands: Sequence[Command], at_once: int) -> list[object]:
        """The reply to each; an error in place of one is ``redis.ResponseError`` or ``Unreachable``.

        At most ``at_once`` are on their way together, so that no server has to keep more replies than that. All of it
        has ``timeout_s`` and the time that its bytes take at ``LEAST_BYTES_PER_S``; the first that fails ends them all.
        """
        self._owner.check()
        replies: list[object] = []
        if not commands or self._clock() < self._rest_until_s:
            return [Unreachable("resting after a timeout")] * len(commands)
        connection = None
        self._patience.begin(self._timeout_s)
        try:
            connection = self._connection()
            for first in range(0, len(commands), at_once):
                some = commands[first : first + at_once]
                connection.send_packed_command(_joined(some))
                for _ in some:
                    replies.append(self._reply(connection))
        except BaseException as error:
            if connection is not None:
                connection.disconnect()  # what is still on its way must not be taken for the next one's reply
            if not isinstance(error, self._redis.RedisError | OSError):
                raise
            if isinstance(error, self._redis.TimeoutError | TimeoutError):
                self._rest_until_s = self._clock() + _REST_S
            replies += [Unreachable(str(error))] * (len(commands) - len(replies))
        finally:
            if connection is not None:
                self._pool.release(connection)
        return replies

    def _connection(self) -> Any:
        try:
            return self._pool.get_connection()
        except Exception as error:
            self._pool.disconnect(inuse_connections=False)  # the pool would hand it out again, greeted or not
            raise self._strange(error) from error

    def _reply(self, connection: Any) -> object:
        try:
            return connection.read_response(disable_decoding=True)
        except self._redis.ResponseError as error:
            return error
        except Exception as error:
            raise self._strange(error) from error

    def _strange(self, error: Exception) -> Exception:
        """What redis-py raises over a reply that it did not expect may be anything (an AttributeError over a greeting
        that is no map): what answers so is no Redis server, and counts as unreachable.
        """
        if isinstance(error, self._redis.RedisError | OSError):
            return error
        self.counters.add("strange_replies")
        return ConnectionError(f"a reply that no Redis server gives: {type(error).__name__}: {error}")

    def _let_go(self) -> None:
        """In a forked child: connections are closed there, without a word to the server."""
        self._pool.reset()

    def close(self) -> None:
        self._pool.disconnect()


def _joined(commands: Sequence[Command]) -> Command:
    """Commands one after the other, neighbouring small pieces as one."""
    pieces: Command = []
    for command in commands:
        for piece in command:
            if pieces and memoryview(piece).nbytes < _SMALL_BYTES and isinstance(pieces[-1], bytearray):
                pieces[-1] += piece
            else:
                pieces.append(bytearray(piece) if memoryview(piece).nbytes < _SMALL_BYTES else piece)
    return pieces
