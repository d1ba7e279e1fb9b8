"""Sockets of the store daemon: a thread for each connection, values received into their place and sent from where they
lie.

A thread that waits for a slow client, or for a satellite, holds up no other connection. What all connections share is
bounded: how many there are, the bytes of values being received and sent, the size of a value. A client that neither
reads nor writes in the middle of a value for ``stall_s`` is disconnected; one that is idle between requests is not.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import selectors
import socket
import ssl
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from skymemory import native
from skymemory.errors import InvalidInput
from skymemory.serving.resp import protocol
from skymemory.serving.resp.commands import Close, Commands, Pieces, Session
from skymemory.serving.resp.protocol import Framed, LargeArgument, NeedData, ProtocolError, RequestParser, Word

log = logging.getLogger("skymemory.store.daemon")

_READ_BYTES = 64 << 10
_MAX_PIECES = 512
"""Of one ``sendmsg``; the system's limit (IOV_MAX) is 1,024."""
_SMALL_BYTES = 16 << 10
"""Smaller replies are collected: several answers to a pipeline go out in one call."""
_DRAINED_READS = 16
_STACK_BYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one daemon."""

    connections: int = 1024
    value_bytes: int = 512 << 20
    stall_s: float = 30.0


class Daemon:
    """Serves ``commands`` on the listening sockets until ``stop``."""

    def __init__(self, commands: Commands, limits: Limits = Limits(), tls: ssl.SSLContext | None = None) -> None:
        self._commands = commands
        self._limits = limits
        self._tls = tls
        self._numbers = count(1)
        self._open: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self.refused_connections = 0

    @property
    def connections(self) -> int:
        return len(self._open)

    def serve(self, listeners: Sequence[socket.socket]) -> None:
        """Accepts connections until ``stop`` is called, from a signal handler or another thread; then ends them all."""
        before = threading.stack_size(_STACK_BYTES)
        try:
            with selectors.DefaultSelector() as selector:
                for listener in (*listeners, self._woken):
                    selector.register(listener, selectors.EVENT_READ)
                while not self._stopping.is_set():
                    for key, _ in selector.select():
                        if key.fileobj is not self._woken:
                            self._accept(key.fileobj)  # type: ignore[arg-type]
        finally:
            threading.stack_size(before)
            for listener in listeners:
                listener.close()
            with self._lock:
                rest = list(self._open.values())
            for sock in rest:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        self._stopping.set()
        with suppress(OSError):
            self._wake.send(b"\0")

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:  # no descriptors left, or a client that has gone
            log.warning("a connection could not be accepted: %s", error.strerror)
            self._stopping.wait(0.05)
            return
        with self._lock:
            full = len(self._open) >= self._limits.connections
            number = next(self._numbers)
            if not full:
                self._open[number] = sock
        if full:
            self.refused_connections += 1
            with suppress(OSError):
                sock.send(protocol.error("max number of clients reached"))
            sock.close()
            return
        threading.Thread(target=self._run, args=(number, sock), name=f"client-{number}", daemon=True).start()

    def _run(self, number: int, sock: socket.socket) -> None:
        try:
            with self._prepared(number, sock) as ready:
                self._serve_one(number, ready)
        except (OSError, Close):
            pass  # the client has gone, stalls, or is to go
        except Exception:
            log.exception("connection %d ends by a fault of the daemon", number)
        finally:
            sock.close()
            with self._lock:
                self._open.pop(number, None)

    def _prepared(self, number: int, sock: socket.socket) -> socket.socket:
        """With its timeouts, and TLS if there is any."""
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Timeouts of the system, not of Python: a socket of Python's with a timeout asks ``poll`` before each call.
        stall = struct.pack("@ll", int(self._limits.stall_s), int(self._limits.stall_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, stall)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, stall)
        if self._tls is None or sock.family == socket.AF_UNIX:
            return sock
        secured = self._tls.wrap_socket(sock, server_side=True)
        with self._lock:
            self._open[number] = secured
        return secured

    def _serve_one(self, number: int, sock: socket.socket) -> None:
        session = Session(number, authenticated=not self._commands.asks_password)
        parser = RequestParser(self._limits.value_bytes)
        outbox = Outbox(sock)
        held_bytes = 0
        """Of values received for the request under way."""
        try:
            while not session.quits:
                try:
                    request = parser.next()
                except ProtocolError as error:
                    outbox.send([protocol.error(f"Protocol error: {error}")])
                    outbox.flush()
                    _end_politely(sock)
                    return
                if isinstance(request, NeedData):
                    outbox.flush()
                    try:
                        data = sock.recv(_READ_BYTES)
                    except (BlockingIOError, ssl.SSLWantReadError):
                        # Between requests a client may take its time; in the middle of one it may not stall.
                        if not parser.idle:
                            raise
                        continue
                    if not data:
                        return
                    parser.feed(data)
                elif isinstance(request, LargeArgument):
                    outbox.flush()
                    if not session.authenticated:
                        raise Close
                    if not self._commands.budget.take(request.size_bytes, self._limits.stall_s):
                        outbox.send([protocol.error("too many bytes in flight: other clients are slow", "BUSY")])
                        break
                    held_bytes += request.size_bytes
                    parser.deliver(self._receive(sock, request))
                else:
                    for pieces in self._commands.call(session, request):
                        outbox.send(pieces)
                    del request  # the values in it
                    self._commands.budget.give_back(held_bytes)
                    held_bytes = 0
            outbox.flush()
        finally:
            self._commands.budget.give_back(held_bytes)

    def _receive(self, sock: socket.socket, large: LargeArgument) -> Word:
        """The rest of a large argument, into one piece of memory with what is stored in front of it."""
        front = self._commands.front(large.words, large.size_bytes)
        data = receive_all(sock, front + large.head, large.size_bytes - len(large.head))
        return Framed(data) if front else data


def receive_all(sock: socket.socket, head: bytes, size_bytes: int) -> bytes:
    """``head`` and the next ``size_bytes`` from the socket; OSError where they do not come."""
    if not isinstance(sock, ssl.SSLSocket):
        return native.receive_all(sock.fileno(), head, size_bytes)
    data = bytearray(len(head) + size_bytes)
    data[: len(head)] = head
    view = memoryview(data)[len(head) :]
    while view:
        received = sock.recv_into(view)
        if not received:
            raise ConnectionError("the client went in the middle of a value")
        view = view[received:]
    return bytes(data)


def _end_politely(sock: socket.socket) -> None:
    """Lets the client read what was said last: closing with unread bytes of its own would reset the connection."""
    sock.shutdown(socket.SHUT_WR)
    for _ in range(_DRAINED_READS):
        if not sock.recv(_READ_BYTES):
            return


class Outbox:
    """Replies on their way to one client: small ones collected, large ones sent from where they lie."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._small = bytearray()

    def send(self, pieces: Pieces) -> None:
        """Sends ``pieces``, at once if they are large: their memory may be given back afterwards."""
        if sum(memoryview(piece).nbytes for piece in pieces) < _SMALL_BYTES:
            for piece in pieces:
                self._small += piece
            if len(self._small) < _READ_BYTES:
                return
            pieces = []
        buffers = [memoryview(piece).cast("B") for piece in (bytes(self._small), *pieces) if memoryview(piece).nbytes]
        self._small.clear()
        if isinstance(self._sock, ssl.SSLSocket):
            for buffer in buffers:
                self._sock.sendall(buffer)
            return
        while buffers:
            sent = self._sock.sendmsg(buffers[:_MAX_PIECES])
            while buffers and sent >= buffers[0].nbytes:
                sent -= buffers.pop(0).nbytes
            if sent:
                buffers[0] = buffers[0][sent:]

    def flush(self) -> None:
        if self._small:
            self._small, small = bytearray(), self._small
            self._sock.sendall(small)


# --- where it listens ---


@dataclass(frozen=True, slots=True)
class Address:
    """``unix:///PATH`` or ``tcp://HOST:PORT``."""

    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        kind, _, rest = text.partition("://")
        host, colon, port = rest.rpartition(":")
        if kind == "unix" and rest:
            return cls(path=rest)
        if kind == "tcp" and host and colon and port.isdecimal() and int(port) < 1 << 16:
            return cls(host=host.strip("[]"), port=int(port))
        raise InvalidInput(f"--listen {text!r}: expected unix:///PATH or tcp://HOST:PORT")

    def __str__(self) -> str:
        return f"unix://{self.path}" if self.path else f"tcp://{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether no other computer can connect."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def listen(self) -> socket.socket:
        """Raises OSError where the address is taken or not ours. A socket file that no process listens at is replaced;
        a new one is for this user alone."""
        if not self.path:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            return socket.create_server((self.host, self.port), family=family, backlog=512)
        listener = socket.socket(socket.AF_UNIX)
        try:
            _remove_stale(Path(self.path))
            before = os.umask(0o177)
            try:
                listener.bind(self.path)
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
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), str(path))
