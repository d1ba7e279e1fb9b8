"""Redis tier: values in a Redis or Valkey server, which evicts as configured (``maxmemory-policy``).

A value is one string: its bytes, a mark and a CRC-32 of key and value. A failing server costs a counted miss.
"""

from __future__ import annotations

import importlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from skymemory.errors import InvalidInput, SkyMemoryError, ValueTooLarge, missing_extra
from skymemory.forks import Owner
from skymemory.kv.value import crc_by_header
from skymemory.metrics import SharedCounters
from skymemory.native import crc32
from skymemory.reasons import Miss
from skymemory.store.base import (
    Buffer,
    KeyReport,
    LoadReport,
    LoadTicket,
    Presence,
    RemoteStore,
    StoreTicket,
    check_ttl,
)
from skymemory.units import format_size

NAMESPACE = b"skymemory:"
_MARK = b"SKV1"  # mark of a value; its last byte is the version, a digit
TRAILER_BYTES = 8
_LARGEST_BYTES = (512 << 20) - TRAILER_BYTES  # limit of a string in Redis (``proto-max-bulk-len``)

_LEAST_AT_ONCE, _MOST_AT_ONCE, _BYTES_AT_ONCE = 8, 64, 8 << 20  # values in flight: least, most, and bytes in between
_QUESTIONS_AT_ONCE = 512
_MOST_LATER = 1 << 16


class RedisStore(RemoteStore):
    """Store of values in the server at ``url``, shared by all its clients.

    A call takes at most ``timeout_s`` plus the time of its bytes at ``MIN_BYTES_PER_S``. ``ca``: PEM file for
    ``rediss://``. Raises InvalidInput for a malformed address, not for an unreachable server; MissingExtra without
    redis-py.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "redis",
        timeout_s: float = 2.0,
        ca: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name, clock)
        self._link = RedisLink(url, timeout_s, clock, ca)
        self._counters = self._link.counters
        self._later: dict[bytes, None] = {}  # keys of a later release's values, not overwritten
        self._value_bytes: float = _BYTES_AT_ONCE  # mean of the last load, to choose how many to request at once

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        sizes = self.sizes(keys)
        pending = self._pending()
        return [
            Presence.HIT if size is not None else Presence.PENDING if key in pending else Presence.MISS
            for key, size in zip(keys, sizes, strict=True)
        ]

    def prefix(self, keys: Sequence[bytes]) -> int:
        sizes = self.sizes(keys)
        return next((i for i, size in enumerate(sizes) if size is None), len(sizes))

    def sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        replies = self._ask_each(b"STRLEN", self._check(keys))
        return [
            reply - TRAILER_BYTES if isinstance(reply, int) and reply >= TRAILER_BYTES else None for reply in replies
        ]

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        """Load in a pipeline; delete corrupt values, remember a later release's."""
        self._check(())
        self._loads.take(ticket)
        started_s = self._clock()
        unique = list(dict.fromkeys(ticket.keys))
        at_once = _at_once(self._value_bytes)
        replies = self._link.ask([pack(b"GET", NAMESPACE + key) for key in unique], at_once)
        outcomes = {key: opened(key, reply) for key, reply in zip(unique, replies, strict=True)}
        seconds = self._clock() - started_s
        loaded_bytes = 0
        corrupt: list[bytes] = []
        for key, value in outcomes.items():
            self._later.pop(key, None)
            if isinstance(value, memoryview):
                loaded_bytes += value.nbytes
            elif value is Miss.CORRUPT:
                corrupt.append(key)
            elif value is Miss.LATER_VERSION:
                self._later[key] = None
                while len(self._later) > _MOST_LATER:
                    self._later.pop(next(iter(self._later)), None)
            if isinstance(value, Miss) and value is not Miss.ABSENT:
                self._counters.add("failed", label=value)
        self._ask_each(b"DEL", corrupt)
        self._rate.learn(loaded_bytes, seconds)
        if loaded_bytes:
            self._value_bytes = loaded_bytes / sum(isinstance(value, memoryview) for value in outcomes.values())
        results = [outcomes[key] for key in ticket.keys]
        self._counters.add("hits", sum(isinstance(value, memoryview) for value in results))
        self._counters.add("misses", sum(isinstance(value, Miss) for value in results))
        ticket.report = LoadReport(
            tuple(
                KeyReport(seconds=seconds, reason=value)
                if isinstance(value, Miss)
                else KeyReport(self._name, value.nbytes, seconds)
                for value in results
            ),
            seconds,
        )
        return [None if isinstance(value, Miss) else value for value in results]

    def release(self, ticket: LoadTicket) -> None:
        self._loads.discard(ticket)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > _LARGEST_BYTES:
            raise ValueTooLarge(
                f"a value of {format_size(size_bytes)} does not fit a string of Redis, at most "
                f"{format_size(_LARGEST_BYTES)}: store smaller values"
            )

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        """Store in a pipeline; a later release's values stay."""
        self._check(())
        started_s = self._clock()
        with self._stores.ending(ticket):
            later = {key for key, _ in ticket.items if key in self._later}
            commands = []
            for key, value in ticket.items:
                if key not in later:
                    data = memoryview(value).cast("B")
                    commands.append(pack(b"SET", NAMESPACE + key, (data, trailer_of(key, data))))
            mean_bytes = sum(memoryview(value).nbytes for _, value in ticket.items) / max(1, len(ticket.items))
            replies = iter(self._link.ask(commands, _at_once(mean_bytes)))
        stored, unanswered = [], set()
        for key, _ in ticket.items:
            reply = Miss.LATER_VERSION if key in later else next(replies)
            stored.append(reply in (b"OK", "OK"))
            if not stored[-1]:
                failure, ticket.reason = Miss.REFUSED, f"the server refused: {reply}"
                if isinstance(reply, Unreachable):
                    unanswered.add(key)
                    failure, ticket.reason = Miss.UNREACHABLE, "the server does not answer"
                self._counters.add("failed", label=reply if isinstance(reply, Miss) else failure)
        self._counters.add("stored", sum(stored))
        ticket.seconds, ticket.unanswered = self._clock() - started_s, frozenset(unanswered)
        return stored

    def touch(self, keys: Sequence[bytes]) -> None:
        self._ask_each(b"TOUCH", self._check(keys)[::-1])

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        """Return False: the server decides what it evicts."""
        check_ttl(ttl_s)
        return [False] * len(self._check(keys))

    def expire(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        keys = self._check(keys)
        if math.isinf(check_ttl(ttl_s)):
            self._ask_each(b"PERSIST", keys)  # the reply is also 0 for a key without a lifetime
            return [size is not None for size in self.sizes(keys)]
        ttl_ms = b"%d" % max(0, math.ceil(ttl_s * 1000))
        return [reply == 1 for reply in self._ask_each(b"PEXPIRE", keys, ttl_ms)]

    def left_s(self, keys: Sequence[bytes]) -> list[float]:
        """Return the lifetimes; infinite if the server does not answer."""
        replies = self._ask_each(b"PTTL", self._check(keys))
        return [reply / 1000 if isinstance(reply, int) and reply >= 0 else math.inf for reply in replies]

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        replies = self._ask_each(b"DEL", self._check(keys))
        for key in keys:
            self._later.pop(key, None)
        return [reply == 1 if type(reply) is int else None for reply in replies]

    def keeps(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._later for key in self._check(keys)]

    def _ask_each(self, verb: bytes, keys: Sequence[bytes], *more: bytes) -> list[object]:
        replies = self._link.ask([pack(verb, NAMESPACE + key, *more) for key in keys], _QUESTIONS_AT_ONCE)
        unanswered = sum(isinstance(reply, Unreachable) for reply in replies)
        if unanswered:
            self._counters.add("questions_unanswered", unanswered)
        return replies

    def stats(self) -> dict[str, int | float]:
        return {
            **{f"{name}_total": value for name, value in self._counters.as_dict().items()},
            "open_leases": len(self._loads) + len(self._stores),
            "read_bytes_per_s": self._rate.bytes_per_s,
        }

    def server_info(self) -> dict[str, str]:
        """Return the reply to INFO, by name; SkyMemoryError if none."""
        (reply,) = self._link.ask([pack(b"INFO")], 1)
        if not isinstance(reply, bytes):
            verb = "does not answer" if isinstance(reply, Unreachable) else "refuses"
            raise SkyMemoryError(f"{self._name} {verb}: {reply}")
        lines = (line.partition(":") for line in reply.decode("utf-8", "replace").splitlines() if ":" in line)
        return {name: value for name, _, value in lines}

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float:
        sizes = self.sizes(keys)
        return sum(math.inf if size is None else size for size in sizes) / self._rate.bytes_per_s

    def close(self) -> None:
        self._closed = True
        self._link.close()


def _at_once(value_bytes: float) -> int:
    return min(_MOST_AT_ONCE, max(_LEAST_AT_ONCE, int(_BYTES_AT_ONCE / max(1.0, value_bytes))))


def trailer_of(key: bytes, value: memoryview) -> bytes:
    # A block's CRC comes from its header: the receiver reads the payload.
    crc = crc_by_header(key, value, crc32(key))
    return _trailer(crc32(value, crc32(key)) if crc is None else crc)


def is_trailer_of(key: bytes, value: Buffer, trailer: Buffer) -> bool:
    return trailer == _trailer(crc32(value, crc32(key)))


def _trailer(crc: int) -> bytes:
    return _MARK + crc.to_bytes(4, "little")


def opened(key: bytes, reply: object) -> memoryview | Miss:
    """Return the value in a reply to GET, checked, without its trailer; or the reason for a miss."""
    if reply is None:
        return Miss.ABSENT
    if isinstance(reply, Unreachable):
        return Miss.UNREACHABLE
    if not isinstance(reply, bytes):
        return Miss.REFUSED
    data = memoryview(reply)
    value, trailer = data[:-TRAILER_BYTES], data[-TRAILER_BYTES:]
    if len(data) < TRAILER_BYTES or not is_trailer_of(key, value, trailer):
        later = trailer[:3] == _MARK[:3] and _MARK[3] < trailer[3] <= ord("9")
        return Miss.LATER_VERSION if later else Miss.CORRUPT
    return value


# Connection. redis-py packs a command into a new buffer, which costs a copy and fresh memory for a value of
# megabytes: here the pieces go to the socket as they are. redis-py's timeouts apply to each read, so a server that
# sends a byte now and then can block a call forever: here the whole call has a deadline (``CallDeadline``).

Argument = bytes | tuple[Buffer, ...]
"""Argument of a command; a tuple's pieces are sent as one."""
Command = list[Buffer]

_READ_BYTES = 256 << 10  # bytes per read: redis-py's 32 KiB take ninety calls for a block of 2.9 MB
MIN_BYTES_PER_S = 1e6
_SMALL_BYTES = 4096  # limit of joined pieces: a copy costs less than a call
_REST_S = 1.0  # silence after a timeout: otherwise every call of a load would wait
_PROBE_S = 30.0


class Unreachable(Exception):
    """Reply in place of a server that did not answer in time."""


def pack(*arguments: Argument) -> Command:
    """Encode a command in RESP, without copying large pieces."""
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


class CallDeadline(threading.local):
    """Deadline of this thread's call, connecting included; bytes moved extend it, at ``MIN_BYTES_PER_S``."""

    def __init__(self) -> None:
        self._until_s = float("-inf")

    def begin(self, timeout_s: float) -> None:
        self._until_s = time.monotonic() + timeout_s

    def moved(self, size_bytes: int) -> None:
        self._until_s += size_bytes / MIN_BYTES_PER_S

    def left_s(self) -> float:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline of the call has passed")
        return left_s


class _DeadlineSocket:
    """Socket whose reads and writes share a call's deadline; redis-py's timeout applies to each alone."""

    def __init__(self, sock: Any, deadline: CallDeadline) -> None:
        self._sock = sock
        self._deadline = deadline
        self._polling = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def settimeout(self, seconds: float | None) -> None:
        self._polling = seconds == 0  # redis-py before 8 polls an idle connection so
        self._sock.settimeout(seconds)

    def _wait(self) -> None:
        if not self._polling:
            self._sock.settimeout(self._deadline.left_s())

    def recv(self, *how: Any) -> bytes:
        self._wait()
        data: bytes = self._sock.recv(*how)
        self._deadline.moved(len(data))
        return data

    def recv_into(self, *how: Any) -> int:
        self._wait()
        size_bytes: int = self._sock.recv_into(*how)
        self._deadline.moved(size_bytes)
        return size_bytes

    def sendall(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        while view:
            self._sock.settimeout(self._deadline.left_s())
            sent = self._sock.send(view)
            self._deadline.moved(sent)
            view = view[sent:]


def _with_deadline(kind: Any, deadline: CallDeadline) -> Any:
    """Return a subclass of redis-py's connection ``kind`` that keeps to ``deadline``."""

    class RedisConnection(kind):  # type: ignore[misc]
        def _connect(self) -> Any:
            return _DeadlineSocket(super()._connect(), deadline)

        @property
        def socket_connect_timeout(self) -> float:
            return deadline.left_s()  # redis-py reads it for each address of a host name

        @socket_connect_timeout.setter
        def socket_connect_timeout(self, value: object) -> None: ...

    return RedisConnection


class RedisLink:
    """Pool of connections to the server at ``url``."""

    def __init__(self, url: str, timeout_s: float, clock: Callable[[], float] = time.monotonic, ca: str = "") -> None:
        try:
            self._redis: Any = importlib.import_module("redis")
            retry, backoff = importlib.import_module("redis.retry"), importlib.import_module("redis.backoff")
        except ModuleNotFoundError as error:
            raise missing_extra("a Redis store", "redis", "redis") from error
        if timeout_s <= 0:
            raise InvalidInput(f"a Redis store needs a timeout above 0 s, got {timeout_s}")
        self._deadline = CallDeadline()
        self.counters = SharedCounters()
        try:
            self._pool = self._redis.ConnectionPool.from_url(
                url,
                decode_responses=False,
                socket_timeout=timeout_s,
                socket_read_size=_READ_BYTES,
                # A retry would double the time that a caller waits; the next call serves as a retry.
                retry=retry.Retry(backoff.NoBackoff(), 0),
                **({"ssl_ca_certs": ca} if ca else {}),
            )
            self._pool.connection_class = _with_deadline(self._pool.connection_class, self._deadline)
        except ValueError as error:
            raise InvalidInput(f"store {url!r}: {error}: expected redis://HOST[:PORT][/DB]") from error
        self._owner = Owner("this connection to Redis", self._let_go)
        self._timeout_s = timeout_s
        self._clock = clock
        self._rest_until_s = float("-inf")  # time until which calls fail at once
        self._probing = threading.Lock()  # held while a probe runs
        self._is_in_doubt = False  # True if a probe ended a silence and no call has succeeded since

    def ask(self, commands: Sequence[Command], at_once: int) -> list[object]:
        """Return a reply per command; ``redis.ResponseError`` or ``Unreachable`` on failure.

        At most ``at_once`` are in flight; the deadline is common, and the first failure ends them all.
        """
        self._owner.check()
        replies: list[object] = []
        if not commands or self._clock() < self._rest_until_s:
            return [Unreachable("resting after a timeout")] * len(commands)
        try:
            self._exchange(commands, at_once, self._timeout_s, replies)
            self._is_in_doubt = False
        except (self._redis.RedisError, OSError) as error:
            if isinstance(error, self._redis.TimeoutError | TimeoutError):
                self._rest_and_probe()
            replies += [Unreachable(str(error))] * (len(commands) - len(replies))
        return replies

    def _exchange(self, commands: Sequence[Command], at_once: int, timeout_s: float, replies: list[object]) -> None:
        """Send commands, at most ``at_once`` in flight, and append to ``replies``, within the deadline."""
        connection = None
        self._deadline.begin(timeout_s)
        try:
            connection = self._connection()
            for first in range(0, len(commands), at_once):
                some = commands[first : first + at_once]
                connection.send_packed_command(_joined(some))
                for _ in some:
                    replies.append(self._reply(connection))
        except BaseException:
            if connection is not None:
                connection.disconnect()  # a late reply must not be taken for the next command's
            raise
        finally:
            if connection is not None:
                self._pool.release(connection)

    def _rest_and_probe(self) -> None:
        """Fail calls at once for a while after a timeout, as each would wait; a probe's answer ends this."""
        self._rest_until_s = self._clock() + _REST_S
        if not self._is_in_doubt and self._probing.acquire(blocking=False):
            try:
                threading.Thread(target=self._probe, name="redis probe", daemon=True).start()
            except RuntimeError:  # no more threads, or interpreter shutdown
                self._probing.release()

    def _probe(self) -> None:
        """Wait patiently for an answer to PING; then calls are sent again."""
        try:
            self._exchange([pack(b"PING")], 1, _PROBE_S, [])
            self._is_in_doubt = True
            self._rest_until_s = float("-inf")
        except (self._redis.RedisError, OSError):
            pass
        finally:
            self._probing.release()

    def _connection(self) -> Any:
        try:
            return self._pool.get_connection()
        except Exception as error:
            self._pool.disconnect(inuse_connections=False)  # otherwise the pool would reuse it
            raise self._strange(error) from error

    def _reply(self, connection: Any) -> object:
        try:
            return connection.read_response(disable_decoding=True)
        except self._redis.ResponseError as error:
            return error
        except Exception as error:
            raise self._strange(error) from error

    def _strange(self, error: Exception) -> Exception:
        # redis-py may raise anything for a foreign server's reply.
        if isinstance(error, self._redis.RedisError | OSError):
            return error
        self.counters.add("strange_replies")
        return ConnectionError(f"a reply that no Redis server gives: {type(error).__name__}: {error}")

    def _let_go(self) -> None:
        self._pool.reset()

    def close(self) -> None:
        self._pool.disconnect()


def _joined(commands: Sequence[Command]) -> Command:
    """Join commands into few pieces to send, copying only small pieces."""
    pieces: Command = []
    for command in commands:
        for piece in command:
            if pieces and memoryview(piece).nbytes < _SMALL_BYTES and isinstance(pieces[-1], bytearray):
                pieces[-1] += piece
            else:
                pieces.append(bytearray(piece) if memoryview(piece).nbytes < _SMALL_BYTES else piece)
    return pieces
