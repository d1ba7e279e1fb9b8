"""The proxy's listening sockets.

A connection counts from its accept, not from the end of its TLS handshake, so that another can be closed in time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable

from skymemory.errors import os_reason
from skymemory.router.http.connection import HttpConnection

log = logging.getLogger("skymemory.router")

BACKLOG = 4096
ACCEPTS = 64
PAUSE_S = 0.1


class Listener:
    def __init__(
        self,
        connection: Callable[[], HttpConnection],
        admit: Callable[[HttpConnection, str], None],
        context: ssl.SSLContext | None,
        handshake_s: Callable[[], float],
        on_files_short: Callable[[], None] = lambda: None,
    ) -> None:
        """``admit`` takes a connection and its address, and may evict connections; ``handshake_s`` limits TLS."""
        self._connection = connection
        self._admit = admit
        self._context = context
        self._handshake_s = handshake_s
        self._on_files_short = on_files_short
        self._are_files_short = False
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._setup_tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port."""
        bound = await self._loop.create_server(self._connection, host, port, start_serving=False)
        try:
            self._sockets = [socket.socket(fileno=os.dup(listening.fileno())) for listening in bound.sockets]
            for listening in self._sockets:
                listening.setblocking(False)
                listening.listen(BACKLOG)
        except OSError:
            self.close()
            raise
        finally:
            bound.close()
        for listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)
        bound_port: int = self._sockets[0].getsockname()[1]
        return bound_port

    @property
    def is_setting_up(self) -> bool:
        return bool(self._setup_tasks)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS):
            try:
                accepted, peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if not self._are_files_short:
                    log.error("cannot accept connections for now: %s", os_reason(error))
                self._are_files_short = True
                self._on_files_short()
                self._loop.remove_reader(listening)
                self._loop.call_later(PAUSE_S, self._resume_accepting, listening)
                return
            self._are_files_short = False
            self._begin_connection(accepted, peer, self._handshake_s())

    def _resume_accepting(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _begin_connection(self, accepted: socket.socket, peer: object, handshake_s: float) -> None:
        accepted.setblocking(False)
        connection = self._connection()
        connection.accepted = accepted
        self._admit(connection, str(peer[0]) if isinstance(peer, tuple) and peer else "")
        if connection.closing:
            accepted.close()
            return
        task = self._loop.create_task(self._set_up(connection, accepted, handshake_s))
        self._setup_tasks.add(task)
        task.add_done_callback(self._setup_tasks.discard)

    async def _set_up(self, connection: HttpConnection, accepted: socket.socket, handshake_s: float) -> None:
        limit_s = None if self._context is None else handshake_s
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=self._context, ssl_handshake_timeout=limit_s
            )
        except OSError:  # includes TLS: the handshake failed or took too long
            pass
        finally:
            if not connection.made:
                connection.accepted = None
                connection.leave()
                accepted.close()

    def stop_accepting(self, handshake_s: float) -> None:
        """Close the listener after accepting its backlog, which closing alone would reset."""
        for listening in self._sockets:
            self._loop.remove_reader(listening)
            while True:
                try:
                    accepted, peer = listening.accept()
                except OSError:  # BlockingIOError: the backlog is empty
                    break
                self._begin_connection(accepted, peer, handshake_s)
            listening.close()
        self._sockets = []

    def close(self) -> None:
        for listening in self._sockets:
            self._loop.remove_reader(listening)
            listening.close()
        self._sockets = []
        for task in list(self._setup_tasks):
            task.cancel()
