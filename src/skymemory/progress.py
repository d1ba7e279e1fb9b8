"""Progress of long waits: a bar on a terminal, elsewhere a line every few seconds.

Imports rich only for a bar, and no torch: a command's first line must not wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from skymemory.text import write

LINE_EVERY_S = 3.5
"""Silence until a line; below five, because a thread may wait a second while torch loads."""
BAR_AFTER_S = 2.0
_LOOK_S = 0.25
EVENT_INDENT = len("[  0.0 s] ")


class Wait:
    """Wait in progress. Thread-safe."""

    def __init__(self, what: str, expected_s: float | None) -> None:
        self.what = what
        self.began_s = time.monotonic()
        self._expected_s = expected_s
        self._share: float | None = None
        self._words = ""

    def on_progress(self, share: float, words: str = "") -> None:
        """Record the ``share`` of the work, 0 to 1."""
        self._share, self._words = min(1.0, max(0.0, share)), words

    def on_words(self, words: str) -> None:
        self._words = words

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def share(self) -> float | None:
        """Return the share: as reported, else by the expected time."""
        if self._share is not None:
            return self._share
        return min(0.99, self.seconds / self._expected_s) if self._expected_s else None

    @property
    def expects(self) -> str:
        known = f"{self._share:.0%}" if self._share is not None else ""
        expected = f"of about {self._expected_s:.0f} s" if self._expected_s else ""
        return ", ".join(words for words in (self._words or known, expected) if words)

    def line(self) -> str:
        expects = self.expects
        return f"{self.what}: {self.seconds:.0f} s{f' ({expects})' if expects else ''}"


class Progress:
    """Printer of events and waits, with the seconds since ``began_s``."""

    def __init__(self, stream: TextIO, began_s: float | None = None, *, line_every_s: float = LINE_EVERY_S) -> None:
        """Create the printer. ``began_s``: by ``time.monotonic``."""
        self.stream = stream
        self.began_s = time.monotonic() if began_s is None else began_s
        self._line_every_s = line_every_s
        self._lock = threading.RLock()
        self._bar: _ProgressBar | None = None
        self._printed_s = self.began_s

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_s

    def say(self, words: str) -> None:
        self.write(f"[{self.seconds:5.1f} s] {words}", EVENT_INDENT)

    def write(self, line: str, hanging: int = 0) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.erase()
            write(line, self.stream, hanging)
            self._printed_s = time.monotonic()

    @contextmanager
    def wait(self, what: str, expected_s: float | None = None) -> Iterator[Wait]:
        """Show ``what`` until the end of the block. Waits cannot be nested."""
        wait, done = Wait(what, expected_s), threading.Event()
        thread = threading.Thread(target=self._show, args=(wait, done), name="progress", daemon=True)
        thread.start()
        try:
            yield wait
        finally:
            done.set()
            thread.join()

    def _show(self, wait: Wait, done: threading.Event) -> None:
        live = self.stream.isatty()
        try:
            while not done.wait(_LOOK_S):
                with self._lock:
                    if live and wait.seconds > BAR_AFTER_S:
                        self._bar = self._bar or _ProgressBar(self.stream)
                        self._bar.show(wait)
                    elif not live and time.monotonic() - self._printed_s >= self._line_every_s:
                        self.say(wait.line())
        finally:
            with self._lock:
                if self._bar is not None:
                    self._bar.erase()
                self._bar = None


class _ProgressBar:
    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=stream, highlight=False)
        self._stream = stream

    def show(self, wait: Wait) -> None:
        from rich.progress_bar import ProgressBar
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        row = Table.grid(padding=(0, 1))
        row.add_column(no_wrap=True, overflow="ellipsis", max_width=max(12, self._console.width - 45))
        row.add_column(no_wrap=True)
        row.add_column(no_wrap=True, overflow="ellipsis")
        share = wait.share
        bar: Any = Spinner("line") if share is None else ProgressBar(1.0, share, width=16)
        expects = wait.expects
        row.add_row(Text(wait.what), bar, Text(f"{wait.seconds:.0f} s{f' {expects}' if expects else ''}"))
        with self._console.capture() as capture:
            self._console.print(row, end="", overflow="ellipsis", no_wrap=True, crop=True)
        self.erase(capture.get().split("\n")[0].rstrip())

    def erase(self, instead: str = "") -> None:
        self._stream.write(f"\r\x1b[K{instead}")
        self._stream.flush()


Report = Callable[[float, str], None]
"""Callback for share and words."""


def ignore(share: float, words: str) -> None: ...
