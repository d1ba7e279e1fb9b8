"""Socket of a host arena's owner: a thread that answers its clients, one message at a time.

A client that does not read its answers is disconnected: it would hold up the others.
"""

from __future__ import annotations

import json
import logging
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skymemory.errors import InvalidInput, ValueTooLarge
from skymemory.forks import Owner
from skymemory.kv.block import Place
from skymemory.store.base import Hierarchy, KeyLocks
from skymemory.store.host import messages
from skymemory.store.host.arena import SOCKET
from skymemory.store.host.messages import BELOW, HELLO, MAX_BYTES, VERSION, WELCOME, HostOp, HostStatus, Malformed
from skymemory.store.host.owner import ArenaStore, Client

log = logging.getLogger("skymemory.store.host")

_MOST_UNCHECKED = 1024
"""Values not yet compared with their checksums, beyond which messages wait for that."""
_LARGE_BYTES = 1 << 20
_TICK_S = 1.0
_AWAKE_S, _AWAKE_PAUSE_S = 0.05, 0.0005
"""Time after a store in which the owner looks into slots by itself, and how often it does."""
_END_S = 5.0
_FETCH_S = 10.0
"""Longest wait of a client for another's fetch."""


@dataclass(slots=True, eq=False)
class _Connection:
    sock: socket.socket
    client: Client | None = None
    knows_below: bool = False


class ArenaServer:
    """Server of ``store`` at ``FOLDER/socket`` until ``close``."""

    def __init__(self, store: ArenaStore, listener: socket.socket) -> None:
        self._store = store
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._unchecked: deque[bytes] = deque(store.stored_keys())
        """Keys of values not yet compared with their checksums."""
        self._owed: queue.SimpleQueue[dict[bytes, Place] | None] = queue.SimpleQueue()
        """Blocks of clients that farther tiers lack."""
        self._large: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        """Keys of large values to be compared with their checksums."""
        self._fetching = KeyLocks()
        self._below: set[socket.socket] = set()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closing = False
        self._tick_s = self._awake_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name="host-arena", daemon=True)
        self._thread.start()
        self._storing = threading.Thread(target=self._store_below, name="host-arena-below", daemon=True)
        self._storing.start()
        self._checking = threading.Thread(target=self._check_large, name="host-arena-check", daemon=True)
        self._checking.start()

    def close(self) -> None:
        self._closing = True
        with suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join(_END_S)
        with suppress(InvalidInput):  # the store was closed
            self._store.end_rooms()
        self._note_entered()
        self._owed.put(None)
        self._storing.join(_END_S)
        self._large.put(None)
        self._checking.join(_END_S)
        for sock in list(self._below):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def tick_soon(self) -> None:
        self._tick_s = 0.0
        with suppress(OSError):
            self._wake.send(b"\0")

    def let_go(self) -> None:
        """Close a forked child's copies of the descriptors: clients see the owner's end by them."""
        for key in list((self._selector.get_map() or {}).values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._wake.close()
        for sock in list(self._below):
            sock.close()

    def _run(self) -> None:
        try:
            while not self._closing:
                events = self._selector.select(self._pause_s())
                for key, _ in events:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._woken:
                        self._woken.recv(64)
                    else:
                        self._receive(key.data)
                if time.monotonic() >= self._tick_s:
                    self._tick_s = time.monotonic() + _TICK_S
                    self._tick()
                self._note_entered()
                if self._unchecked and not self._closing and (not events or len(self._unchecked) > _MOST_UNCHECKED):
                    self._check(self._unchecked.popleft())
        except InvalidInput:  # the store was closed
            pass
        finally:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()
            self._wake.close()

    def _check(self, key: bytes) -> None:
        """Compare a value with its checksum, a large one in a thread: messages do not wait for that."""
        (size_bytes,) = self._store.sizes([key])
        if size_bytes is not None and size_bytes >= _LARGE_BYTES:
            self._large.put(key)
        else:
            self._store.check_next([key])

    def _check_large(self) -> None:
        with suppress(InvalidInput):  # the store was closed
            while (key := self._large.get()) is not None:
                self._store.check_next([key])

    def _pause_s(self) -> float:
        """Return how long to wait for messages. Clients need not wake an owner that pauses shortly."""
        if self._unchecked:
            return 0.0
        if time.monotonic() >= self._awake_until_s and self._store.sleep():
            return _TICK_S
        self._store.enter_posts()
        self._note_entered()
        return 0.0 if self._unchecked else _AWAKE_PAUSE_S

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            log.warning("a client could not be accepted: %s", error.strerror)
            time.sleep(0.05)
            return
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, _Connection(sock))

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(MAX_BYTES)
            if data[:1] == bytes([HostOp.BELOW]) and connection.client is None:
                self._begin_below(connection.sock, data)
                return
            if data[:1] == bytes([HostOp.POSTED]):
                self._store.enter_posts()
                return
            if data:
                connection.sock.send(self._answer(connection, memoryview(data)))
                return
        except BlockingIOError:
            log.warning("client %s does not read its answers and is disconnected", connection.client)
        except Malformed as error:
            log.warning("client %s is disconnected: %s", connection.client, error)
        except OSError:
            pass
        except Exception:  # a fault of ours ends this connection alone
            self._store.count_fault()
            log.exception("client %s is disconnected by a fault of the owner", connection.client)
        self._end(connection)

    def _end(self, connection: _Connection) -> None:
        with suppress(KeyError, ValueError):  # a connection for farther tiers has left the selector
            self._selector.unregister(connection.sock)
        connection.sock.close()
        if connection.client is not None:
            self._store.disconnect(connection.client)

    def _tick(self) -> None:
        """Drop expired values; end connections of clients that have forgotten a reservation, or that were welcomed
        before there were farther tiers.
        """
        self._store.drop_expired()
        for key in list(self._selector.get_map().values()):
            connection = key.data
            client = connection.client if isinstance(connection, _Connection) else None
            if client is not None and (
                self._store.has_forgotten(client) or connection.knows_below != (self._store.below is not None)
            ):
                self._end(connection)

    def _store_below(self) -> None:
        while (places := self._owed.get()) is not None:
            below = self._store.below
            if below is not None:
                try:
                    below.on_nearest_stored(places)
                except InvalidInput:  # the hierarchy was closed
                    pass
                except Exception:  # they stay in the nearest tier
                    self._store.count_fault()
                    log.exception("%d values do not go to farther tiers", len(places))

    def _begin_below(self, sock: socket.socket, message: bytes) -> None:
        if len(message) != BELOW.size or BELOW.unpack(message)[1] != VERSION:
            raise Malformed("BELOW of another release")
        sock.send(bytes([HostStatus.OK]))
        self._selector.unregister(sock)
        sock.setblocking(True)
        self._below.add(sock)
        threading.Thread(target=self._serve_below, args=(sock,), name="host-arena-below", daemon=True).start()

    def _serve_below(self, sock: socket.socket) -> None:
        """Answer a client's questions about farther tiers, until its end."""
        try:
            while data := sock.recv(MAX_BYTES):
                try:
                    sock.send(bytes([HostStatus.OK]) + self._ask_below(data[0], memoryview(data)[1:]))
                except InvalidInput as error:
                    sock.send(bytes([HostStatus.INVALID]) + str(error).encode())
        except Malformed as error:
            log.warning("a client is disconnected: %s", error)
        except OSError:
            pass
        finally:
            self._below.discard(sock)
            sock.close()

    def _ask_below(self, op: int, body: memoryview) -> bytes:
        below = self._store.below
        if below is None:
            raise InvalidInput("there are no farther tiers")
        if op == HostOp.PUT:
            return messages.pack_verdicts(self._put(below, *messages.unpack_put(body)))
        if op == HostOp.ESTIMATE:
            now_s, keys = messages.unpack_seconds(body)
            return messages.pack_seconds([below.estimate_load_s(keys, now_s)])
        keys = messages.unpack_keys(body)
        if op == HostOp.LOOKUP:
            return bytes(presence.value for presence in below.lookup(keys))
        if op == HostOp.SIZES:
            return messages.pack_sizes(below.sizes(keys))
        if op == HostOp.FETCH:
            with self._fetching.exclusive(keys, _FETCH_S):  # what another client fetches is there afterwards
                missing = [key for key, size in zip(keys, self._store.sizes(keys), strict=True) if size is None]
                if missing:
                    below.fill_nearest(missing)
            return b""
        if op == HostOp.DELETE:
            return messages.pack_verdicts(below.delete(keys))
        raise Malformed(f"operation {op}")

    def _put(self, below: Hierarchy, client: int, number: int, crcs: Sequence[int | None]) -> list[bool]:
        """Store what a client wrote into its room in all tiers, in the order of other changes of those keys."""
        withdrawn = self._store.withdraw(client, number, crcs)
        written = [(key, value, place) for key, value, place in withdrawn if value is not None]
        done = below.put_many([(key, value) for key, value, _ in written], [place for *_, place in written])
        stored = {key for (key, *_), ok in zip(written, done, strict=True) if ok}
        return [value is not None and key in stored for key, value, _ in withdrawn]

    def _answer(self, connection: _Connection, message: memoryview) -> bytes:
        try:
            return bytes([HostStatus.OK]) + self._call(connection, message)
        except ValueTooLarge as error:
            return bytes([HostStatus.TOO_LARGE]) + str(error).encode()
        except InvalidInput as error:
            return bytes([HostStatus.INVALID]) + str(error).encode()

    def _call(self, connection: _Connection, message: memoryview) -> bytes:
        op, body, store, client = message[0], message[1:], self._store, connection.client
        if op == HostOp.HELLO:
            if len(message) != HELLO.size or client is not None:
                raise Malformed("HELLO of another release, or a second one")
            _, version, number, instance = HELLO.unpack(message)
            if version != VERSION:
                raise InvalidInput(
                    f"this owner speaks version {VERSION}, the client {version}: use one release for both"
                )
            connection.client = client = store.connect(number, instance)
            connection.knows_below = store.below is not None
            return WELCOME.pack(client.number, store.instance, store.arena_bytes, connection.knows_below)
        if client is None:
            raise Malformed("no HELLO at first")
        if op == HostOp.RESERVE:
            return messages.pack_reserved(*store.reserve(client, *messages.unpack_reserve(body)))
        if op == HostOp.COMMIT:
            number, crcs = messages.unpack_commit(body)
            return messages.pack_verdicts(store.commit(client, number, crcs))
        if op == HostOp.TOUCH:
            store.touch(messages.unpack_keys(body))
            return b""
        if op == HostOp.PIN:
            seconds, keys = messages.unpack_seconds(body)
            return messages.pack_verdicts(store.pin(keys, seconds))
        if op == HostOp.EXPIRE:
            seconds, keys = messages.unpack_seconds(body)
            # Farther tiers would bring the value back: they do not expire values.
            expired = [False] * len(keys) if store.below is not None else store.expire(keys, seconds)
            return messages.pack_verdicts(expired)
        if op == HostOp.DELETE:
            return messages.pack_verdicts(store.delete(messages.unpack_keys(body)))
        if op == HostOp.LEFT:
            return messages.pack_seconds(store.left_s(messages.unpack_keys(body)))
        if op == HostOp.STATS:
            return json.dumps(store.stats()).encode()
        raise Malformed(f"operation {op}")

    def _note_entered(self) -> None:
        blocks: dict[bytes, Place] = {}
        if self._store.entered:
            if time.monotonic() >= self._awake_until_s:
                self._store.wake()
            self._awake_until_s = time.monotonic() + _AWAKE_S
        while self._store.entered:
            key, place = self._store.entered.popleft()
            self._unchecked.append(key)
            if place is not None:
                blocks[key] = place
        if self._store.below is not None and blocks:
            self._owed.put(blocks)


class ServedArena(ArenaStore):
    """Host arena that clients reach at ``FOLDER/socket``. Parameters and errors as ``ArenaStore``.

    ``is_nearest``: of a hierarchy, which clients have to know of from the first; it is served once that is set.
    """

    def __init__(self, folder: Path, budget_bytes: int, *, is_nearest: bool = False, **options: Any) -> None:
        super().__init__(folder, budget_bytes, **options)
        self._server: ArenaServer | None = None
        self._process = Owner(f"the {self.name} store", self._let_go)
        if not is_nearest:
            self._serve()

    def _serve(self) -> None:
        try:
            self._server = ArenaServer(self, listen_in(self.folder))
        except BaseException:
            super().close()
            raise

    def _on_below(self) -> None:
        if self._server is None:
            self._serve()
        else:
            self._server.tick_soon()

    def end_sharing(self) -> None:
        if self._server is not None and not self._process.elsewhere:
            self._server.close()

    def _let_go(self) -> None:
        if self._server is not None:
            self._server.let_go()
        self._arena.let_go()

    def close(self) -> None:
        self.end_sharing()
        super().close()


def listen_in(folder: Path) -> socket.socket:
    """Return the listening socket of the folder's owner, which alone may call this."""
    path = folder / SOCKET
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(128)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
