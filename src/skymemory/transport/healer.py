"""A thread that serves a client's timers while somebody is silent, so that it heals with nobody calling.

There is none while all is well: it is started by the operation that met with silence, and ends with it.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress


class Healer:
    """Calls ``step`` when ``readable`` (a socket's number) has something or the time is up that the last step named,
    in seconds; ``step`` answers None to end it.
    """

    def __init__(self, step: Callable[[], float | None], readable: int) -> None:
        self._step = step
        self._stopper, self._stopped = socket.socketpair()
        self._poll = select.poll()
        self._poll.register(readable, select.POLLIN)
        self._poll.register(self._stopped.fileno(), select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="skymemory-healer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it, and wait until it has ended."""
        with suppress(OSError):  # it has ended already
            self._stopper.send(b".")
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        with self._stopper, self._stopped:
            wait_s = self._step()
            while wait_s is not None:
                ready = self._poll.poll(wait_s * 1e3)
                if any(fd == self._stopped.fileno() for fd, _ in ready):
                    return
                wait_s = self._step()
