"""Sockets of the store daemon: a thread for each connection, values received into their place and sent from where they
lie.

A thread that waits for a slow client, or for a satellite, holds up no other connection. What all connections share is
bounded: how many there are, the bytes of values being received and sent, the size of a value. A client that neither
reads nor writes in the middle of a value for ``stall_s``, or takes longer for all of it than ``stall_s`` and its bytes
at ``LEAST_BYTES_PER_S``, is disconnected; one that is idle between requests is not.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import selectors
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from skymemory import native
from skymemory.addresses import ListenAddress
from skymemory.errors import InvalidInput
from skymemory.serving.resp import protocol
from skymemory.serving.resp.commands import Close, Commands, Pieces, Run, Session
from skymemory.serving.resp.protocol import Framed, LargeArgument, NeedData, ProtocolError, RequestParser, Word

log = logging.getLogger("skymemory.store.daemon")

_READ_BYTES, _FRONT_BYTES = 64 << 10, 4 << 10
"""Of one read; and of one where a large value may follow, whose first bytes are copied to their place."""
_CRLF_BYTES = 2
"""Behind a value: received with it, in the same call."""
_MAX_PIECES = 512
"""Of one ``sendmsg``; the system's limit (IOV_MAX) is 1,024."""
_SMALL_BYTES = 16 << 10
"""Smaller replies are collected: several answers to a pipeline go out in one call."""
_PART_BYTES = 1 << 20
"""Of one ``sendmsg``: to a Unix socket it has its timeout for every 32 KiB, and so would go on with a slow reader."""
_SEND_BUFFER_BYTES = 512 << 10
"""Of a Unix socket, or what ``net.core.wmem_max`` allows. With the system's 208 KiB writer and reader wait for each
other 14 times in a value of 2.9 MB; more than this falls out of the processor's cache before it is read.
"""
_UNBOOKED_BYTES = 64 << 10
"""Of a request's small arguments, beside the budget of bytes in flight."""
_DRAINED_BYTES, _MOST_DRAINED_BYTES = 1 << 20, 64 << 20
_STACK_BYTES = 512 << 10
_GRACE_S, _END_S = 2.0, 8.0
"""At the end: for replies under way, and for calls of the store."""

LEAST_BYTES_PER_S = 64 << 10
"""A client in the middle of a value, a request or a reply that is slower over its whole length is disconnected."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one daemon."""

    connections: int = 1024
    value_bytes: int = 256 << 20
    stall_s: float = 30.0


class Pace:
    """The time in which a client must send, or read, what is under way: ``stall_s``, and what its bytes take at
    ``LEAST_BYTES_PER_S``. So one that moves a byte now and then does not hold memory without end.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self.begin()

    def begin(self) -> None:
        self._until_s = time.monotonic() + self._stall_s

    def moved(self, size_bytes: int) -> None:
        """``size_bytes`` more are here, or sent; TimeoutError where that took too long."""
        self._until_s += size_bytes / LEAST_BYTES_PER_S
        if time.monotonic() > self._until_s:
            raise TimeoutError("slower than a client may be in the middle of a request or a reply")

    def allowed_s(self, size_bytes: int) -> float:
        return self._stall_s + size_bytes / LEAST_BYTES_PER_S


@dataclass(slots=True)
class Connection:
    """A client's socket, which TLS replaces by another, and the thread that serves it."""

    sock: socket.socket
    thread: threading.Thread | None = None


class Daemon:
    """Serves ``commands`` on the listening sockets until ``stop``; once."""

    def __init__(self, commands: Commands, limits: Limits = Limits(), tls: ssl.SSLContext | None = None) -> None:
        self._commands = commands
        self._counters = commands.counters
        self._limits = limits
        self._tls = tls
        self._numbers = count(1)
        self._open: dict[int, Connection] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)

    @property
    def connections(self) -> int:
        return len(self._open)

    def serve(self, listeners: Sequence[socket.socket]) -> None:
        """Accepts connections until ``stop`` is called, from a signal handler or another thread; then ends them all:
        none uses the store afterwards, unless it has not answered for ``_END_S``.
        """
        before = threading.stack_size(_STACK_BYTES)
        in_main = threading.current_thread() is threading.main_thread()
        # A signal that comes right before `select` waits, or to another thread, would else be handled once it returns.
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
            threading.stack_size(before)
            self._stopping.set()
            for listener in (*listeners, self._wake, self._woken):
                listener.close()
            self._end_all()

    def stop(self) -> None:
        self._stopping.set()
        with suppress(OSError):
            self._wake.send(b"\0")

    def _end_all(self) -> None:
        """First nothing more is read, and replies under way are sent; then the connections end."""
        for how, patience_s in ((socket.SHUT_RD, _GRACE_S), (socket.SHUT_RDWR, _END_S)):
            with self._lock:
                rest = list(self._open.values())
            for connection in rest:
                with suppress(OSError):  # by the plain socket's method: TLS's own would first forget its keys
                    socket.socket.shutdown(connection.sock, how)
            ends_s = time.monotonic() + patience_s
            for connection in rest:
                if connection.thread is not None:
                    connection.thread.join(max(0.0, ends_s - time.monotonic()))
        if self._open:
            log.warning("%d connections still wait for the store", len(self._open))

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:  # no descriptors left, or a client that has gone
            log.warning("a connection could not be accepted: %s", error.strerror)
            self._stopping.wait(0.05)
            return
        if len(self._open) >= self._limits.connections:
            self._refuse(sock)
            return
        number = next(self._numbers)
        connection = Connection(sock)
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

    def _run(self, number: int, connection: Connection) -> None:
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
            pass  # the client has gone, or is to go
        except Exception:
            log.exception("connection %d ends by a fault of the daemon", number)
        finally:
            connection.sock.close()
            self._forget(number)

    def _prepare(self, connection: Connection) -> None:
        """Timeouts, and TLS if there is any."""
        sock = connection.sock
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is None or sock.family == socket.AF_UNIX:
            # Timeouts of the system, not of Python: a socket of Python's with a timeout asks ``poll`` before each call.
            stall = struct.pack("@ll", int(self._limits.stall_s), int(self._limits.stall_s % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, stall)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, stall)
            return
        sock.settimeout(self._limits.stall_s)  # TLS begins again where the system's has passed
        secured = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        connection.sock = secured
        secured.do_handshake()


class Conversation:
    """One client's requests and replies."""

    def __init__(
        self, number: int, sock: socket.socket, commands: Commands, limits: Limits, stopping: threading.Event
    ) -> None:
        self._sock = sock
        self._commands = commands
        self._limits = limits
        self._stopping = stopping
        self._session = Session(number, authenticated=not commands.asks_password)
        self._parser = RequestParser(limits.value_bytes, trusted=self._session.authenticated)
        self._pace = Pace(limits.stall_s)
        self._outbox = Outbox(sock, limits.stall_s)
        self._read_bytes = _READ_BYTES
        self._booked_bytes = 0
        """Of the budget, for what has been received of the request under way."""
        self._booked_small_bytes = 0
        self._collected: Run | None = None
        """Requests that have come and are not answered: another of the kind seems to follow."""
        self._collected_bytes = 0
        """Of the budget, for these."""
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def run(self) -> None:
        try:
            while not (self._session.quits or self._stopping.is_set()):
                try:
                    request = self._parser.next()
                except ProtocolError as error:
                    self._end_with(protocol.error(f"Protocol error: {error}"))
                    return
                if isinstance(request, NeedData | LargeArgument):
                    if self._collected is not None and not self._follows(self._collected):
                        self._answer_collected()
                    if not (self._receive(request) if isinstance(request, LargeArgument) else self._read()):
                        break
                elif not self._collect(request):
                    self._answer(self._commands.call(self._session, request))
                    del request  # the values in it
            self._answer_collected()
            self._outbox.flush()
        except OSError:  # in the middle of a value: those that have come whole are stored
            self._answer_collected()
            raise
        finally:
            self._give_back()

    def _collect(self, words: list[Word]) -> bool:
        """Keep the request for a run; False for one that is to be answered now, as those before it are."""
        found = self._commands.run_key(self._session, words)
        if self._collected is not None and not (found and self._collected.takes(found[0])):
            self._answer_collected()
        if found is None:
            return False
        verb, key = found
        self._collected = self._collected or Run(verb)
        self._collected.add(key, words)
        self._collected_bytes, self._booked_small_bytes = self._booked_bytes, 0
        return True

    def _follows(self, run: Run) -> bool:
        """Whether more has come than what was parsed."""
        if run.verb == b"GET" and self._parser.idle:
            return False  # GETs arrive in one read
        return (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0) or bool(self._readable.poll(0))

    def _answer_collected(self) -> None:
        run, self._collected = self._collected, None
        if run is not None:
            self._send_all(self._commands.call_run(self._session, run))
            self._commands.budget.give_back(self._collected_bytes)
            self._booked_bytes -= self._collected_bytes
            self._collected_bytes = 0

    def _answer(self, replies: Iterator[Pieces]) -> None:
        self._send_all(replies)
        self._give_back()
        self._parser.trusted = self._session.authenticated

    def _send_all(self, replies: Iterator[Pieces]) -> None:
        for pieces in replies:
            self._outbox.send(pieces)
        self._pace.begin()

    def _read(self) -> bool:
        """Some more of a request; False where the client has gone, or is to go."""
        self._outbox.flush()
        held_bytes = self._parser.held_bytes - self._booked_small_bytes
        if held_bytes > _UNBOOKED_BYTES:
            if not self._book(held_bytes):
                return False
            self._booked_small_bytes += held_bytes
        idle = self._parser.idle
        try:
            data = self._sock.recv(self._read_bytes)
        except (BlockingIOError, TimeoutError):
            # Between requests a client may take its time; in the middle of one it may not stall.
            if not idle:
                raise
            return True
        if len(data) == self._read_bytes:
            self._read_bytes = _READ_BYTES
        if idle:
            self._pace.begin()
        self._pace.moved(len(data))
        self._parser.feed(data)
        return bool(data)

    def _receive(self, large: LargeArgument) -> bool:
        """The rest of a large argument, into one piece of memory with what is stored in front of it; False where the
        client is to go.
        """
        self._outbox.flush()
        missing_bytes = large.size_bytes - len(large.head)
        try:
            front, end_bytes = self._commands.frame(large.words, large.size_bytes)
        except InvalidInput as wrong:  # a key that is none
            self._end_with(protocol.error(str(wrong)), missing_bytes)
            return False
        if not self._book(large.size_bytes, missing_bytes):
            return False
        body_bytes = large.size_bytes - end_bytes
        head, end = large.head[:body_bytes], large.head[body_bytes:]
        tail = bytearray(end_bytes - len(end) + _CRLF_BYTES if missing_bytes else 0)
        data = receive_all(self._sock, front + head, body_bytes - len(head), self._pace.allowed_s(missing_bytes), tail)
        end, behind = end + tail[: end_bytes - len(end)], tail[end_bytes - len(end) :]
        self._parser.deliver(Framed(data, bytes(end)) if front or end_bytes else data, behind)
        self._read_bytes = _FRONT_BYTES
        self._pace.begin()
        return True

    def _book(self, size_bytes: int, coming_bytes: int = 0) -> bool:
        """Room in the budget; False where there is none; the client learns of it."""
        taken = self._commands.budget.take(size_bytes, 0.0 if self._collected is not None else self._limits.stall_s)
        if not taken and self._collected is not None:  # no connection waits for room while holding some
            self._answer_collected()
            taken = self._commands.budget.take(size_bytes, self._limits.stall_s)
        if taken:
            self._booked_bytes += size_bytes
            return True
        self._commands.counters.add("busy")
        self._end_with(protocol.error("too many bytes in flight: other clients are slow", "BUSY"), coming_bytes)
        return False

    def _give_back(self) -> None:
        self._commands.budget.give_back(self._booked_bytes)
        self._booked_bytes = self._booked_small_bytes = self._collected_bytes = 0

    def _end_with(self, last: bytes, coming_bytes: int = 0) -> None:
        """Says ``last``, and lets the client read it: closing with bytes of its own unread would reset the connection.
        ``coming_bytes`` of a value may be on their way.
        """
        self._answer_collected()
        self._outbox.send([last])
        self._outbox.flush()
        socket.socket.shutdown(self._sock, socket.SHUT_WR)
        left_bytes = min(coming_bytes, _MOST_DRAINED_BYTES) + _DRAINED_BYTES
        self._pace.begin()
        while left_bytes > 0 and (data := self._sock.recv(_READ_BYTES)):
            left_bytes -= len(data)
            self._pace.moved(len(data))


def receive_all(sock: socket.socket, head: bytes, size_bytes: int, timeout_s: float, tail: bytearray) -> bytes:
    """``head`` and the next ``size_bytes`` from the socket; what follows fills ``tail``. OSError where they do not
    come, or not in time.
    """
    if not isinstance(sock, ssl.SSLSocket):
        return native.receive_all(sock.fileno(), head, size_bytes, timeout_s, tail)
    until_s = time.monotonic() + timeout_s
    data = bytearray(len(head) + size_bytes)
    data[: len(head)] = head
    for view in (memoryview(data)[len(head) :], memoryview(tail)):
        while view:
            received = sock.recv_into(view)
            if not received:
                raise ConnectionError("the client went in the middle of a value")
            view = view[received:]
            if view and time.monotonic() > until_s:
                raise TimeoutError(f"{len(view)} bytes of the value did not come in time")
    return bytes(data)


class Outbox:
    """Replies on their way to one client: small ones collected, large ones sent from where they lie."""

    def __init__(self, sock: socket.socket, stall_s: float) -> None:
        self._sock = sock
        self._small = bytearray()
        self._pace = Pace(stall_s)

    def send(self, pieces: Pieces) -> None:
        """Sends ``pieces``, at once if they are large: their memory may be given back afterwards."""
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
        self._pace.begin()
        secured = isinstance(self._sock, ssl.SSLSocket)
        while buffers:
            alone = secured or len(buffers) == 1
            sent = self._sock.send(buffers[0][:_PART_BYTES]) if alone else self._sock.sendmsg(_part(buffers))
            moved_bytes = sent
            while buffers and sent >= buffers[0].nbytes:
                sent -= buffers.pop(0).nbytes
            if sent:
                buffers[0] = buffers[0][sent:]
            if buffers:
                self._pace.moved(moved_bytes)


def _part(buffers: Sequence[memoryview]) -> list[memoryview]:
    part, left_bytes = list[memoryview](), _PART_BYTES
    for buffer in buffers[:_MAX_PIECES]:
        part.append(buffer[:left_bytes])
        left_bytes -= part[-1].nbytes
        if not left_bytes:
            break
    return part


# --- where it listens ---


def listen_at(address: ListenAddress) -> socket.socket:
    """Raises OSError where the address is taken or not ours. A socket file that no process listens at is replaced;
    a new one is for this user alone.
    """
    if not address.path:
        return socket.create_server((address.host, address.port), family=address.family, backlog=512)
    listener = socket.socket(socket.AF_UNIX)
    try:
        _remove_stale(Path(address.path))
        before = os.umask(0o177)
        try:
            listener.bind(address.path)
        finally:
            os.umask(before)
        listener.listen(512)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    """Removes a socket file that a killed daemon left; another that listens there is an error."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a daemon that is stopped, with a full queue, would let us wait
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), str(path))
