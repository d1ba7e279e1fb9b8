"""Daemons in processes of their own, and in a thread of the test."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skymemory.addresses import ListenAddress
from skymemory.store.base import Store
from skymemory.store.memory import MemoryStore
from skymemory.store.redis_server.commands import Commands
from skymemory.store.redis_server.daemon import Daemon, ServerLimits, listen_at


@contextmanager
def daemon(address: str, *options: str) -> Iterator[str]:
    """The socket of a daemon over the store at ``address``; it must end well and leave no socket behind."""
    folder = Path(tempfile.mkdtemp())  # a socket's path must be short
    command = [sys.executable, "-m", "skymemory", "store", "serve", address, "--listen", f"unix://{folder}/s", *options]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None and "is served at" in process.stdout.readline()
                yield f"{folder}/s"
            finally:
                process.terminate()
            assert process.wait(20) == 0 and not (folder / "s").exists()
    finally:
        shutil.rmtree(folder)


@contextmanager
def serving(
    store: Store, folder: Path, limits: ServerLimits | None = None, **options: Any
) -> Iterator[tuple[str, Daemon, Commands]]:
    """The path of the socket, the daemon and its commands."""
    address = ListenAddress.parse(f"unix://{folder / 'store.sock'}", unix=True)
    commands = Commands(store, **options)
    daemon = Daemon(commands, limits or ServerLimits())
    thread = threading.Thread(target=daemon.serve, args=([listen_at(address)],))
    thread.start()
    try:
        yield address.path, daemon, commands
    finally:
        daemon.stop()
        thread.join(60)
        assert not thread.is_alive()


class Forgetful(MemoryStore):
    """Leases nothing, and loses all that it holds on demand."""

    @property
    def leases(self) -> bool:
        return False

    def lose(self) -> None:
        self.delete(list(self._values))


def until(condition: Callable[[], bool], patience_s: float = 60.0) -> None:
    ends_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


class Elsewhere(MemoryStore):
    """A memory store that the daemon takes for any other: it collects what is pipelined (``Run``)."""


def request(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


@contextmanager
def connected(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(path)
        yield sock


def replies_to(path: str, *data: bytes) -> bytes:
    """All that the daemon answers to ``data``, sent in these pieces, until it or the client has said all."""
    with connected(path) as sock:
        try:
            for piece in data:
                sock.sendall(piece)
            sock.shutdown(socket.SHUT_WR)
        except OSError:  # it has ended the connection
            pass
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))
