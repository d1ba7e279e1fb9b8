"""Where the moving demo is drawn: in place on a terminal, as plain lines anywhere else."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from typing import TextIO

_HIDE_CURSOR, _SHOW_CURSOR, _ERASE_REST, _ERASE_BELOW = "\x1b[?25l", "\x1b[?25h", "\x1b[K", "\x1b[J"


class Screen:
    """``live`` redraws a frame in place; otherwise maps come at events and a line of figures every few seconds."""

    def __init__(self, stream: TextIO, width: int, began_s: float, line_every_s: float = 2.0) -> None:
        self.live = stream.isatty() and shutil.get_terminal_size().columns >= width
        self._stream = stream
        self._began_s = began_s
        self._line_every_s = line_every_s
        self._next_line_s = 0.0
        self._drawn_lines = 0
        if self.live:
            self._stream.write(_HIDE_CURSOR)

    def say(self, words: str, picture: Sequence[str] = ()) -> None:
        """Prints an event above the drawing; ``picture`` is printed with it where there is no terminal."""
        self._erase()
        print(f"[{time.monotonic() - self._began_s:5.1f} s] {words}", file=self._stream)
        for line in picture if not self.live else ():
            print(f"  {line}".rstrip(), file=self._stream)
        self._stream.flush()

    def show(self, picture: Sequence[str], figures: Sequence[str]) -> None:
        """The moment as it is: drawn over the last one, or its figures as a line now and then."""
        now_s = time.monotonic() - self._began_s
        if not self.live:
            if now_s >= self._next_line_s:
                self._next_line_s = now_s + self._line_every_s
                self.say("; ".join(figures))
            return
        width = shutil.get_terminal_size().columns
        lines = [*picture, *(line[: width - 1] for line in figures)]
        back = f"\x1b[{self._drawn_lines}A" if self._drawn_lines else ""
        self._stream.write(back + "".join(f"{line}{_ERASE_REST}\n" for line in lines) + _ERASE_BELOW)
        self._stream.flush()
        self._drawn_lines = len(lines)

    def close(self) -> None:
        """Leave the last frame standing and the terminal as it was."""
        if self.live:
            self._stream.write(_SHOW_CURSOR)
            self._stream.flush()

    def _erase(self) -> None:
        if self._drawn_lines:
            self._stream.write(f"\x1b[{self._drawn_lines}A{_ERASE_BELOW}")
            self._drawn_lines = 0
