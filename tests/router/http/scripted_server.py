"""A server that answers each POST with the bytes that a test gives it, and ends the connection as the test says."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Iterator

FIN, RESET, KEEP, NOTIFY = "fin", "reset", "keep", "notify"


class ScriptedServer:
    """``answer``: to a POST; ``ending``: what follows it. A GET, such as a health check, is answered well."""

    def __init__(self, answer: bytes = b"", ending: str = KEEP, tls: ssl.SSLContext | None = None) -> None:
        self.answer, self.ending = answer, ending
        self.heads: list[bytes] = []
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                raw, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(raw,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        with contextlib.suppress(OSError):
            raw.settimeout(60)
            connection = self._tls.wrap_socket(raw, server_side=True) if self._tls else raw
            while self._serve_one(connection):
                pass
        raw.close()

    def _serve_one(self, connection: socket.socket) -> bool:
        came = b""
        while b"\r\n\r\n" not in came:
            piece = connection.recv(65536)
            if not piece:
                return False
            came += piece
        head, _, body = came.partition(b"\r\n\r\n")
        if head.startswith(b"GET"):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            return True
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        while len(body) < length:
            body += connection.recv(65536)
        self.heads.append(head)
        connection.sendall(self.answer)
        if self.ending == KEEP:
            return True
        if self.ending == RESET:
            # After the client has read it: a reset overtakes what is not yet read.
            threading.Event().wait(0.2)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif self.ending == NOTIFY and isinstance(connection, ssl.SSLSocket):
            connection.unwrap().close()
            return False
        connection.close()
        return False


@contextlib.contextmanager
def scripted(answer: bytes = b"", ending: str = KEEP, tls: ssl.SSLContext | None = None) -> Iterator[ScriptedServer]:
    server = ScriptedServer(answer, ending, tls)
    try:
        yield server
    finally:
        server.close()
