"""Sockets of the store daemon, with a thread for each connection.

A client that stalls within a value for ``stall_s``, or is slower than ``LEAST_BYTES_PER_S``, is disconnected; sooner
while others wait for its memory (``budget``).
"""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import math
import os
import select
import selectors
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from skymemory import native
from skymemory.addresses import ListenAddress
from skymemory.errors import InvalidInput
from skymemory.store.redis_server import protocol
from skymemory.store.redis_server.budget import BRIEF_BYTES, MemoryClaim
from skymemory.store.redis_server.commands import NO_BYTES, Close, Commands, Pieces, Refused, Run, Session, error_reply
from skymemory.store.redis_server.protocol import (
    MAX_BULK_BYTES,
    Framed,
    LargeArgument,
    NeedData,
    ProtocolError,
    RequestParser,
    Stranger,
    Word,
)

log = logging.getLogger("skymemory.store.daemon")

_READ_BYTES, _FRONT_BYTES = 64 << 10, 4 << 10  # bytes of a read; and before a large value, whose first bytes are copied
_CRLF_BYTES = 2
_MAX_PIECES = 512
_SMALL_BYTES = 16 << 10
# Most bytes of a ``sendmsg``. On a Unix socket its timeout is per 32 KiB: a larger call would miss a slow reader.
_PART_BYTES = 1 << 20
# Send buffer of a Unix socket, limited by ``net.core.wmem_max``. With the system's 208 KiB, writer and reader wait 14
# times in a value of 2.9 MB; a larger buffer falls out of the processor's cache.
_SEND_BUFFER_BYTES = 512 << 10
_UNBOOKED_BYTES = 64 << 10
_WHOLE_BYTES = 4 << 20
_DRAINED_BYTES = 1 << 20
_STACK_BYTES = 512 << 10
_BLOCKED_S = 0.1  # time without progress after which input is read
_REPLACED_S = 2.0  # time to wait for other daemons that replace socket files
_GRACE_S, _END_S = 2.0, 8.0  # limits at the end: for pending replies, for store calls

LEAST_BYTES_PER_S = 64 << 10
"""Lowest average speed of a client within a request or reply."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    connections: int = 1024
    value_bytes: int = 256 << 20
    stall_s: float = 30.0


class TransferDeadline:
    """Deadline of a transfer: ``stall_s`` plus its bytes at ``LEAST_BYTES_PER_S``, so that single bytes cannot hold
    memory forever.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self.begin()

    def begin(self) -> None:
        self._until_s = time.monotonic() + self._stall_s

    def moved(self, size_bytes: int) -> None:
        self._until_s += size_bytes / LEAST_BYTES_PER_S
        if time.monotonic() > self._until_s:
            raise TimeoutError("slower than a client may be in the middle of a request or a reply")

    def allowed_s(self, size_bytes: int) -> float:
        return self._stall_s + size_bytes / LEAST_BYTES_PER_S


@dataclass(slots=True)
class ClientConnection:
    sock: socket.socket
    thread: threading.Thread | None = None


class Daemon:
    """Server of ``commands`` on the listening sockets until ``stop``."""

    def __init__(
        self, commands: Commands, limits: ServerLimits = ServerLimits(), tls: ssl.SSLContext | None = None
    ) -> None:
        self._commands = commands
        self._counters = commands.counters
        self._limits = limits
        self._tls = tls
        self._numbers = count(1)  # of connections
        self._open: dict[int, ClientConnection] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._wake, self._woken = socket.socketpair()  # a byte ends the wait for connections
        self._wake.setblocking(False)

    @property
    def connections(self) -> int:
        return len(self._open)

    def serve(self, listeners: Sequence[socket.socket]) -> None:
        """Accept connections until ``stop`` (from any thread or a signal handler); then end them. None uses the store
        afterwards, unless it is silent for ``_END_S``.
        """
        previous_size = threading.stack_size(_STACK_BYTES)
        in_main = threading.current_thread() is threading.main_thread()
        # Without the wakeup descriptor, a signal that arrives just before `select` waits, or in another thread, would
        # be handled only after it returns.
        fd = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False) if in_main else -1
        try:
            with selectors.DefaultSelector() as selector:
                for listener in (*listeners, self._woken):
                    selector.register(listener, selectors.EVENT_READ)
                while not self._stopping.is_set():
                    for key, _ in selector.select():
                        if key.fileobj is self._woken:
                            self._woken.recv(64)
                        else:
                            self._accept(key.fileobj)  # type: ignore[arg-type]
        finally:
            if in_main:
                signal.set_wakeup_fd(fd)
            threading.stack_size(previous_size)
            self._stopping.set()
            for listener in (*listeners, self._wake, self._woken):
                listener.close()
            self._end_all()

    def stop(self) -> None:
        self._stopping.set()
        with suppress(OSError):
            self._wake.send(b"\0")

    def _end_all(self) -> None:
        """End all connections: let replies be sent, then disconnect the rest."""
        for shutdown_mode, patience_s in ((socket.SHUT_RD, _GRACE_S), (socket.SHUT_RDWR, _END_S)):
            with self._lock:
                connections = list(self._open.values())
            for connection in connections:
                with suppress(OSError):  # the plain socket's method, because TLS's own would first drop its keys
                    socket.socket.shutdown(connection.sock, shutdown_mode)
            deadline_s = time.monotonic() + patience_s
            for connection in connections:
                if connection.thread is not None:
                    connection.thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._open:
            log.warning("%d connections still wait for the store", len(self._open))

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:  # no descriptors left, or a client that has disconnected
            log.warning("a connection could not be accepted: %s", error.strerror)
            self._stopping.wait(0.05)
            return
        if len(self._open) >= self._limits.connections:
            self._refuse(sock)
            return
        number = next(self._numbers)
        connection = ClientConnection(sock)
        connection.thread = threading.Thread(
            target=self._run, args=(number, connection), name=f"client-{number}", daemon=True
        )
        with self._lock:
            self._open[number] = connection
            self._commands.connected = len(self._open)
        try:
            connection.thread.start()
        except RuntimeError as error:  # the system has no thread left
            log.warning("a connection could not be served: %s", error)
            self._forget(number)
            self._refuse(sock)

    def _refuse(self, sock: socket.socket) -> None:
        self._counters.add("refused_connections")
        with suppress(OSError):
            sock.send(protocol.error("max number of clients reached"), socket.MSG_DONTWAIT)
        sock.close()

    def _forget(self, number: int) -> None:
        with self._lock:
            self._open.pop(number, None)
            self._commands.connected = len(self._open)

    def _run(self, number: int, connection: ClientConnection) -> None:
        self._counters.add("connections")
        try:
            self._prepare(connection)
            Conversation(number, connection.sock, self._commands, self._limits, self._stopping).run()
        except ssl.SSLError as error:
            self._counters.add("tls_failures")
            log.info("connection %d: %s", number, error)
        except (BlockingIOError, TimeoutError):
            self._counters.add("stalled_connections")
        except (OSError, Close):
            pass  # the client has disconnected, or must be disconnected
        except Exception:
            log.exception("connection %d ends by a fault of the daemon", number)
        finally:
            connection.sock.close()
            self._forget(number)

    def _prepare(self, connection: ClientConnection) -> None:
        """Set a connection's buffers and timeouts; begin TLS."""
        sock = connection.sock
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is None or sock.family == socket.AF_UNIX:
            # Timeouts of the system, not of Python: a Python socket with a timeout calls ``poll`` before each call.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_BLOCKED_S))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(self._limits.stall_s))
            return
        sock.settimeout(self._limits.stall_s)  # TLS retries after the system's timeout
        secured = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        connection.sock = secured
        secured.do_handshake()


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def _address_of(sock: socket.socket) -> str:
    try:
        peer = sock.getpeername()
    except OSError:  # it has disconnected
        return ""
    return str(peer[0]) if isinstance(peer, tuple) else ""


class Conversation:
    """Conversation with a client: reads requests, batches GETs and SETs, and sends replies."""

    def __init__(
        self, number: int, sock: socket.socket, commands: Commands, limits: ServerLimits, stopping: threading.Event
    ) -> None:
        self._sock = sock
        self._commands = commands
        self._limits = limits
        self._stopping = stopping
        self._claim = MemoryClaim(self._end_for_others, address=_address_of(sock))
        self._session = Session(number, authenticated=not commands.asks_password, claim=self._claim)
        self._parser = RequestParser(MAX_BULK_BYTES, trusted=self._session.authenticated)
        self._pace = TransferDeadline(limits.stall_s)  # of a request
        self._outbox = ReplyBuffer(sock, limits.stall_s, self._claim, self._read_ahead)
        self._read_bytes = _READ_BYTES
        self._booked_bytes = 0  # budget taken for the request
        self._booked_small_bytes = 0  # part of it, for small arguments
        self._queued_bytes = 0  # budget of commands that wait for EXEC
        self._collected: Run | None = None  # unanswered requests: more of the kind seem to follow
        self._collected_bytes = 0  # their budget
        self._ahead_bytes = 0  # budget of input read while replies were sent
        self._is_fed = False  # True if there is such input
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def run(self) -> None:
        """Serve the client until it leaves or the daemon stops."""
        try:
            while not (self._session.quits or self._stopping.is_set()):
                if not self._step():
                    break
            self._answer_collected()
            self._outbox.flush()
        except Stranger as stranger:
            self._on_stranger(stranger)
        except ProtocolError as error:
            self._end_with(protocol.error(f"Protocol error: {error}"))
        except OSError:  # in the middle of a value: values received completely are stored
            self._answer_collected()
            raise
        finally:
            self._session.transaction = None
            self._commands.watches.end(self._session.watch)
            self._settle()
            self._settle_ahead()

    def _step(self) -> bool:
        """Execute the next request or read; False to end the connection."""
        self._is_fed = False
        request = self._parser.next()
        if isinstance(request, NeedData | LargeArgument):
            if self._collected is not None and not self._follows(self._collected):
                self._answer_collected()
            if isinstance(request, NeedData):
                return self._read()
            self._receive(request)
            return True
        if self._parser.is_inline:
            self._commands.check_inline(request)
        if not self._collect(request):
            self._answer(self._commands.call(self._session, request))
        return True

    def _on_stranger(self, stranger: Stranger) -> None:
        level = logging.WARNING if self._commands.on_stranger() else logging.DEBUG
        log.log(
            level,
            "connection %d spoke another protocol (%s) and was ended, as a web page may do; INFO counts further "
            "ones as `strangers`",
            self._session.number,
            stranger,
        )
        self._end_with(protocol.error("this port speaks the Redis protocol: the connection ends"))

    def _end_for_others(self) -> None:
        log.info("connection %d held room that others waited for, and moved too little", self._session.number)
        with suppress(OSError):  # the plain socket's method, because TLS's own would first drop its keys
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def _collect(self, words: list[Word]) -> bool:
        """Add a GET or SET to the batch, after executing a batch that it does not fit; else False."""
        match = self._commands.run_key(self._session, words)
        if self._collected is not None and not (match and self._collected.takes(match[0])):
            self._answer_collected()
        if match is None:
            return False
        verb, key = match
        self._collected = self._collected or Run(verb)
        self._collected.add(key, words)
        self._collected_bytes, self._booked_small_bytes = self._booked_bytes, 0
        return True

    def _follows(self, run: Run) -> bool:
        if run.verb == b"GET" and self._parser.idle:
            return False  # GETs arrive in one read
        return (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0) or bool(self._readable.poll(0))

    def _answer_collected(self) -> None:
        run, self._collected = self._collected, None
        if run is not None:
            self._send_all(self._commands.call_run(self._session, run))
            self._commands.budget.give_back(self._claim, self._collected_bytes)
            self._booked_bytes -= self._collected_bytes
            self._collected_bytes = 0

    def _answer(self, replies: Iterator[Pieces]) -> None:
        self._send_all(replies)
        self._settle()
        self._parser.trusted = self._session.authenticated

    def _send_all(self, replies: Iterator[Pieces]) -> None:
        for pieces in replies:
            self._outbox.send(pieces)
        self._pace.begin()

    def _read(self) -> bool:
        """Read input, with budget for an incomplete request; False to end the connection."""
        self._outbox.flush()
        if self._is_fed:
            return True
        self._settle_ahead()
        held_bytes = self._parser.held_bytes - self._booked_small_bytes
        if held_bytes > _UNBOOKED_BYTES:
            if not self._book(held_bytes):
                self._end_with(error_reply(Refused(NO_BYTES, "BUSY")))
                return False
            self._booked_small_bytes += held_bytes
            if self._is_fed:  # by sending replies for this room
                return True
        idle = self._parser.idle
        if self._claim.held_bytes:
            self._claim.expect(self._read_bytes)
        try:
            data = self._sock.recv(self._read_bytes)
        except (BlockingIOError, TimeoutError):
            # Between requests a client may take its time; within a request it must not stall.
            if not idle:
                raise
            return True
        finally:
            self._claim.due_s = math.inf
        if len(data) == self._read_bytes:
            self._read_bytes = _READ_BYTES
        if idle:
            self._pace.begin()
        self._pace.moved(len(data))
        self._parser.feed(data)
        return bool(data)

    def _read_ahead(self) -> int:
        """Read input while the client does not read: some write a complete pipeline first. Return its bytes."""
        budget = self._commands.budget
        if not budget.take(self._claim, _READ_BYTES, 0.0, brief_bytes=0):
            return 0
        size_bytes = 0
        try:
            data = self._sock.recv(_READ_BYTES)
            size_bytes = len(data)
            self._parser.feed(data)
            self._is_fed = True
        except (BlockingIOError, TimeoutError):  # TLS has received only a part of a record
            pass
        finally:
            self._ahead_bytes += size_bytes
            budget.give_back(self._claim, _READ_BYTES - size_bytes)
        return size_bytes

    def _settle_ahead(self, left_bytes: int = 0) -> None:
        left_bytes = min(left_bytes, self._ahead_bytes)
        self._commands.budget.give_back(self._claim, self._ahead_bytes - left_bytes)
        self._ahead_bytes = left_bytes

    def _receive(self, large: LargeArgument) -> None:
        """Receive a large value into its final buffer, after the header stored with it."""
        self._outbox.flush()
        try:
            front, end_bytes = self._commands.frame(large.words, large.size_bytes, self._limits.value_bytes)
            self._settle_ahead(self._parser.bytes_behind(large))
            if not self._book(large.size_bytes):
                raise Refused(NO_BYTES, "BUSY")
        except (Refused, InvalidInput) as error:
            self._refuse(error_reply(error))
            return
        head = self._parser.head_of(large)
        missing_bytes = large.size_bytes - len(head)
        body_bytes = large.size_bytes - end_bytes
        head, end = head[:body_bytes], head[body_bytes:]
        tail = bytearray(end_bytes - len(end) + _CRLF_BYTES if missing_bytes else 0)
        allowed_s = self._pace.allowed_s(missing_bytes)
        data = receive_all(self._sock, front + head, body_bytes - len(head), allowed_s, tail, self._claim)
        end, following = end + tail[: end_bytes - len(end)], tail[end_bytes - len(end) :]
        self._parser.deliver(Framed(data, bytes(end)) if front or end_bytes else data, following)
        self._read_bytes = _FRONT_BYTES
        self._pace.begin()

    def _refuse(self, reply: bytes) -> None:
        """Reply with an error to a large argument; skip its request."""
        self._answer_collected()
        self._outbox.send([reply])
        self._outbox.flush()
        if self._session.transaction is not None:
            self._session.transaction.refuse("previous errors")
        self._settle()
        self._parser.discard()
        self._pace.begin()

    def _book(self, size_bytes: int) -> bool:
        """Take budget for bytes of the request; False without room."""
        # Collected requests are answered before a wait, so as not to hold budget during it. With commands queued for
        # EXEC, which hold theirs, there is no wait; nothing is collected then (``run_key``). Earlier arguments of this
        # request stay booked: if all holders wait, the budget refuses the largest.
        patience_s = 0.0 if self._collected is not None or self._queued_bytes else self._limits.stall_s
        granted = self._commands.budget.take(self._claim, size_bytes, patience_s)
        if not granted and self._collected is not None:
            self._answer_collected()
            granted = self._commands.budget.take(self._claim, size_bytes, self._limits.stall_s)
        if granted:
            self._booked_bytes += size_bytes
        else:
            self._commands.counters.add("busy")
        return granted

    def _settle(self) -> None:
        """Release an ended request's budget, except for queued commands."""
        budget, transaction = self._commands.budget, self._session.transaction
        booked_bytes = self._booked_bytes + self._queued_bytes
        queued_bytes = 0 if transaction is None else transaction.size_bytes
        self._booked_bytes = self._booked_small_bytes = self._collected_bytes = 0
        if transaction is not None and queued_bytes > booked_bytes:
            brief_bytes = BRIEF_BYTES if queued_bytes <= BRIEF_BYTES else 0
            if not budget.take(self._claim, queued_bytes - booked_bytes, 0.0, brief_bytes=brief_bytes):
                self._commands.counters.add("busy")
                transaction.refuse("too many bytes in flight")
                queued_bytes = 0
            else:
                booked_bytes = queued_bytes
        budget.give_back(self._claim, booked_bytes - queued_bytes)
        self._queued_bytes = queued_bytes

    def _end_with(self, last: bytes) -> None:
        """Send ``last`` and let the client read it, as closing with unread bytes would reset the connection."""
        self._answer_collected()
        self._outbox.send([last])
        self._outbox.flush()
        socket.socket.shutdown(self._sock, socket.SHUT_WR)
        remaining_bytes = _DRAINED_BYTES
        self._pace.begin()
        while remaining_bytes > 0 and (data := self._sock.recv(_READ_BYTES)):
            remaining_bytes -= len(data)
            self._pace.moved(len(data))


def receive_all(
    sock: socket.socket, head: bytes, size_bytes: int, timeout_s: float, tail: bytearray, claim: MemoryClaim
) -> bytes:
    """Return ``head`` and the next ``size_bytes``; following bytes fill ``tail``. ``claim`` gets a deadline per part.
    OSError if bytes are missing or late.
    """
    secured = isinstance(sock, ssl.SSLSocket)
    try:
        if size_bytes <= _WHOLE_BYTES and not secured:
            claim.expect(size_bytes)
            return native.receive_all(sock.fileno(), head, size_bytes, timeout_s, tail)
        deadline_s = time.monotonic() + timeout_s
        data = io.BytesIO(bytes(len(head) + size_bytes))  # BytesIO neither fills nor copies its memory
        data.getbuffer()[: len(head)] = head
        for remaining in (data.getbuffer()[len(head) :], memoryview(tail)):
            while remaining:
                claim.expect(_PART_BYTES)
                received = sock.recv_into(remaining[:_PART_BYTES], 0, 0 if secured else socket.MSG_WAITALL)
                if not received:
                    raise ConnectionError("the client went in the middle of a value")
                remaining = remaining[received:]
                if remaining and time.monotonic() > deadline_s:
                    raise TimeoutError(f"{len(remaining)} bytes of the value did not come in time")
            del remaining
        return data.getvalue()
    finally:
        claim.due_s = math.inf


class ReplyBuffer:
    """Buffer of replies: collects small replies, sends large replies directly."""

    def __init__(self, sock: socket.socket, stall_s: float, claim: MemoryClaim, read_ahead: Callable[[], int]) -> None:
        self._sock = sock
        self._stall_s = stall_s
        self._claim = claim
        self._read_ahead = read_ahead  # reads input while the client does not read
        self._small = bytearray()
        self._pace = TransferDeadline(stall_s)
        self._movable = select.poll()

    def send(self, pieces: Pieces) -> None:
        """Send, at once if large, as the memory may be released afterwards."""
        if sum(memoryview(piece).nbytes for piece in pieces) < _SMALL_BYTES:
            for piece in pieces:
                self._small += piece
            if len(self._small) < _READ_BYTES:
                return
            pieces = []
        small, self._small = self._small, bytearray()
        self._send([memoryview(piece).cast("B") for piece in (small, *pieces) if memoryview(piece).nbytes])

    def flush(self) -> None:
        if self._small:
            small, self._small = self._small, bytearray()
            self._send([memoryview(small)])

    def _send(self, buffers: list[memoryview]) -> None:
        """Send the buffers; TimeoutError if the client is too slow."""
        self._pace.begin()
        self._claim.expect(_PART_BYTES)
        secured = isinstance(self._sock, ssl.SSLSocket)
        if secured:
            self._sock.settimeout(_BLOCKED_S)
        try:
            while buffers:
                part = [buffers[0][:_PART_BYTES]] if secured or len(buffers) == 1 else _part(buffers)
                try:
                    sent = moved_bytes = self._sock.send(part[0]) if len(part) == 1 else self._sock.sendmsg(part)
                except (BlockingIOError, TimeoutError):
                    sent = moved_bytes = 0
                while buffers and sent >= buffers[0].nbytes:
                    sent -= buffers.pop(0).nbytes
                if sent:
                    buffers[0] = buffers[0][sent:]
                if buffers:
                    self._moved(moved_bytes)
                    if not moved_bytes or (not secured and moved_bytes < sum(map(len, part))):
                        self._await_client()
        finally:
            self._claim.due_s = math.inf
            if secured:
                self._sock.settimeout(self._stall_s)

    def _moved(self, size_bytes: int) -> None:
        self._pace.moved(size_bytes)
        self._claim.on_moved(size_bytes)

    def _await_client(self) -> None:
        """Wait until the client reads, reading its input meanwhile; TimeoutError if neither."""
        now_s = time.monotonic()
        deadline_s, read_again_s = now_s + self._stall_s, now_s
        while now_s < deadline_s:
            reads = now_s >= read_again_s
            self._movable.register(self._sock, select.POLLOUT | (select.POLLIN if reads else 0))
            events = self._movable.poll(1000 * (deadline_s - now_s if reads else _BLOCKED_S))
            if any(event & ~select.POLLIN for _, event in events):
                return  # also if it has disconnected: sending reports that
            now_s = time.monotonic()
            if events and (size_bytes := self._read_ahead()):
                self._moved(size_bytes)
                deadline_s = now_s + self._stall_s
            elif events:
                read_again_s = now_s + _BLOCKED_S
        raise TimeoutError("the client neither reads nor writes")


def _part(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Return the first ``_PART_BYTES`` of ``buffers``, for one call."""
    part, remaining_bytes = list[memoryview](), _PART_BYTES
    for buffer in buffers[:_MAX_PIECES]:
        part.append(buffer[:remaining_bytes])
        remaining_bytes -= part[-1].nbytes
        if not remaining_bytes:
            break
    return part


# --- listening sockets ---


def listen_at(address: ListenAddress) -> socket.socket:
    """Return a listening socket. A new socket file is private to this user, a stale file replaced. OSError if the
    address is in use, or not of this computer.
    """
    if not address.path:
        return socket.create_server((address.host, address.port), family=address.family, backlog=512)
    path, listener = Path(address.path), socket.socket(socket.AF_UNIX)
    try:
        with _alone_in(path.parent):  # a socket that is bound but not listening yet looks stale
            _remove_stale(path)
            previous_mask = os.umask(0o177)
            try:
                listener.bind(address.path)
            finally:
                os.umask(previous_mask)
            listener.listen(512)
    except BaseException:
        listener.close()
        raise
    return listener


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lock the folder against other daemons; after ``_REPLACED_S`` go on without."""
    fd, deadline_s = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), time.monotonic() + _REPLACED_S
    try:
        while time.monotonic() < deadline_s:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.005)
        yield
    finally:
        os.close(fd)


def _remove_stale(path: Path) -> None:
    """Remove a dead daemon's socket file; OSError if a process listens."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a stopped daemon with a full queue would block this call
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), str(path))
