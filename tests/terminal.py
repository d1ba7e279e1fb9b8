"""A terminal that tests run programs in: an emulator (pyte) shows the bytes of a pty, and counts what goes wrong."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from typing import Any

import pyte
from pyte.modes import DECAWM

_TOP = b"\x1b[H"
_ALTERNATE = 1049 << 5
"""Private mode of the second screen, as pyte numbers it."""


class Emulated(pyte.Screen):
    """pyte's screen with the alternate one beside it, that counts what a line too wide does: it goes on in the next."""

    def __init__(self, columns: int, rows: int) -> None:
        self.wrapped: list[str] = []
        """Rows that were full when another character came."""
        self.alternate = False
        self._normal: tuple[Any, Any] | None = None
        super().__init__(columns, rows)

    def draw(self, data: str) -> None:
        for character in data:
            if self.cursor.x == self.columns and DECAWM in self.mode:
                self.wrapped.append(self.display[self.cursor.y])
            super().draw(character)

    def resize(self, lines: int | None = None, columns: int | None = None) -> None:
        super().resize(lines, columns)
        # pyte leaves the cursor where it was, in the midst of a frame below the last row.
        self.cursor.x, self.cursor.y = min(self.cursor.x, self.columns), min(self.cursor.y, self.lines - 1)

    def set_mode(self, *modes: int, **options: Any) -> None:
        super().set_mode(*modes, **options)
        if options.get("private") and _ALTERNATE >> 5 in modes and not self.alternate:
            self.alternate = True
            self._normal = copy.deepcopy(self.buffer), (self.cursor.x, self.cursor.y)
            self.erase_in_display(2)

    def reset_mode(self, *modes: int, **options: Any) -> None:
        super().reset_mode(*modes, **options)
        if options.get("private") and _ALTERNATE >> 5 in modes and self._normal is not None:
            self.alternate = False
            self.buffer, (self.cursor.x, self.cursor.y) = self._normal
            self._normal = None
            self.cursor.x, self.cursor.y = min(self.cursor.x, self.columns - 1), min(self.cursor.y, self.lines - 1)


class Terminal:
    """A command in a terminal of this size.

    Attributes:
        scrolled: rows that left the normal screen at its top.
    """

    def __init__(self, command: Sequence[str], columns: int = 80, rows: int = 24, **variables: str) -> None:
        plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.screen = Emulated(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.frames: list[list[str]] = []
        """The screen whenever the program paused, or was to draw it again from its top."""
        self.written = b""
        self._ours, theirs = pty.openpty()
        self._set_size(columns, rows)
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**plain, "TERM": "xterm-256color", **variables},
            start_new_session=True,
        )
        os.close(theirs)

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns: int, rows: int) -> None:
        """Change the size, as a user who drags the window's corner. What was drawn until then is of the old size."""
        self._read(0.0)
        self._set_size(columns, rows)
        self.screen.resize(rows, columns)

    @property
    def rows(self) -> list[str]:
        """The rows of the screen now, without spaces at their ends."""
        return [row.rstrip() for row in self.screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.rows)

    def _read(self, wait_s: float) -> bool:
        """Show what was written within ``wait_s``; False at the end."""
        if not select.select([self._ours], [], [], wait_s)[0]:
            return True
        try:
            data = os.read(self._ours, 1 << 16)
        except OSError:  # the other end is closed
            return False
        self.written += data
        first, *again = data.split(_TOP)
        self._stream.feed(first)
        for part in again:
            self._keep()
            self._stream.feed(_TOP + part)
        if not select.select([self._ours], [], [], 0.02)[0]:
            self._keep()
        return bool(data)

    def _keep(self) -> None:
        if not self.frames or self.frames[-1] != self.rows:
            self.frames.append(self.rows)

    def until(self, reached: Callable[[str], bool], timeout_s: float) -> bool:
        """Show what comes until the screen's text satisfies ``reached``; whether it did before the end."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if reached(self.text):
                return True
            if not self._read(0.2):
                break
        return reached(self.text)

    def finish(self, timeout_s: float) -> int:
        """Show all to the end; the exit code. A program that is late is killed."""
        deadline_s = time.monotonic() + timeout_s
        while self._read(0.2) and time.monotonic() < deadline_s:
            pass
        try:
            return self.process.wait(max(1.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()
        finally:
            os.close(self._ours)

    def check(self) -> None:
        """No row was continued by the terminal, the cursor is to be seen, and the normal screen is back."""
        assert self.screen.wrapped == [], self.screen.wrapped[:3]
        assert not self.screen.cursor.hidden and not self.screen.alternate
        assert "Traceback" not in self.text
