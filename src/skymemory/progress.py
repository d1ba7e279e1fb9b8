"""Progress of long waits: a bar on a terminal, elsewhere a line every few seconds.

Torch need not be loaded, nor is rich before a bar is drawn: the first line of a command must not wait for either.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from skymemory.text import write

LINE_EVERY_S = 3.5
"""Silence after which a wait prints a line. A thread may wait a second for its turn while torch loads: below five."""
BAR_AFTER_S = 2.0
"""Shorter waits draw no bar."""
_LOOK_S = 0.25
EVENT_INDENT = len("[  0.0 s] ")
"""Of the further lines of an event that is wrapped."""


class Wait:
    """One wait in progress; all methods may be called from any thread."""

    def __init__(self, what: str, expected_s: float | None) -> None:
        self.what = what
        self.began_s = time.monotonic()
        self._expected_s = expected_s
        self._share: float | None = None
        self._words = ""

    def on_progress(self, share: float, words: str = "") -> None:
        """Records that ``share`` (0 to 1) of the work is done; ``words`` say it in units of the work."""
        self._share, self._words = min(1.0, max(0.0, share)), words

    def on_words(self, words: str) -> None:
        """Records what is done, if its share is not known."""
        self._words = words

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def share(self) -> float | None:
        """The share that is done: as reported, else by the time expected (never full before its end)."""
        if self._share is not None:
            return self._share
        return min(0.99, self.seconds / self._expected_s) if self._expected_s else None

    @property
    def expects(self) -> str:
        """The words behind the elapsed time: the work that is done, and how long it takes in all."""
        known = f"{self._share:.0%}" if self._share is not None else ""
        expected = f"of about {self._expected_s:.0f} s" if self._expected_s else ""
        return ", ".join(words for words in (self._words or known, expected) if words)

    def line(self) -> str:
        expects = self.expects
        return f"{self.what}: {self.seconds:.0f} s{f' ({expects})' if expects else ''}"


class Progress:
    """Prints events, and what is under way, on ``stream``. Each line begins with the seconds since ``began_s``.

    On a terminal a wait of more than ``BAR_AFTER_S`` is a bar, which is erased at its end; elsewhere a line is printed
    after each ``line_every_s`` in which nothing else was.
    """

    def __init__(self, stream: TextIO, began_s: float | None = None, *, line_every_s: float = LINE_EVERY_S) -> None:
        """``began_s``: on ``time.monotonic``'s clock; by default now."""
        self.stream = stream
        self.began_s = time.monotonic() if began_s is None else began_s
        self._line_every_s = line_every_s
        self._lock = threading.RLock()
        self._bar: _Bar | None = None
        self._printed_s = self.began_s

    @property
    def seconds(self) -> float:
        """Seconds since ``began_s``."""
        return time.monotonic() - self.began_s

    def say(self, words: str) -> None:
        """Prints an event, above the bar if there is one."""
        self.write(f"[{self.seconds:5.1f} s] {words}", EVENT_INDENT)

    def write(self, line: str, hanging: int = 0) -> None:
        """Prints ``line`` as it is, such as a row of a table, above the bar if there is one."""
        with self._lock:
            if self._bar is not None:
                self._bar.erase()
            write(line, self.stream, hanging)
            self._printed_s = time.monotonic()

    @contextmanager
    def wait(self, what: str, expected_s: float | None = None) -> Iterator[Wait]:
        """Shows that ``what`` is under way until the end of the block. Waits are not nested."""
        wait, ended = Wait(what, expected_s), threading.Event()
        thread = threading.Thread(target=self._show, args=(wait, ended), name="progress", daemon=True)
        thread.start()
        try:
            yield wait
        finally:
            ended.set()
            thread.join()

    def _show(self, wait: Wait, ended: threading.Event) -> None:
        live = self.stream.isatty()
        try:
            while not ended.wait(_LOOK_S):
                with self._lock:
                    if live and wait.seconds > BAR_AFTER_S:
                        self._bar = self._bar or _Bar(self.stream)
                        self._bar.show(wait)
                    elif not live and time.monotonic() - self._printed_s >= self._line_every_s:
                        self.say(wait.line())
        finally:
            with self._lock:
                if self._bar is not None:
                    self._bar.erase()
                self._bar = None


class _Bar:
    """One line that is drawn over itself, as wide as the terminal."""

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
"""Takes the share of some work that is done, and the same in words (``Wait.on_progress``)."""


def ignore(share: float, words: str) -> None:
    """Drops the report."""
