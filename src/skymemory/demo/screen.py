"""Where the moving demos are drawn: in place on a terminal, as plain lines anywhere else.

A drawing has the whole terminal (the alternate screen) to itself while it moves: so a terminal that is resized leaves
no pieces of older frames behind. When it ends, the terminal is as it was before, with what was reported and the last
frame printed below.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from skymemory.text import is_terminal, shown, size_of, width_of, wrapped

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live

    from skymemory.progress import Progress

Draw = Callable[[int], Sequence[str]]
"""The picture for a terminal of this width; its lines may have ANSI colours."""

LEAST_COLUMNS, LEAST_ROWS = 40, 12
"""A smaller terminal gets lines of words."""
_INDENT = " " * 10
_REDRAWN_PER_S = 4.0
"""Without a new frame, so that one that no longer fits a resized terminal is cut soon."""


class Screen:
    """``live`` redraws a frame in place; otherwise pictures come at events and a line of figures every few seconds.

    Attributes:
        live: whether frames are drawn.
    """

    def __init__(
        self, stream: TextIO, began_s: float, line_every_s: float = 2.0, progress: Progress | None = None
    ) -> None:
        """``progress``: of the same stream, if it may show a wait while lines are printed: they go above its bar."""
        columns, rows = size_of(stream)
        self.live = is_terminal(stream) and columns >= LEAST_COLUMNS and rows >= LEAST_ROWS
        self._stream = stream
        self._progress = progress
        self._began_s = began_s
        self._line_every_s = line_every_s
        self._next_line_s = 0.0
        self._events: list[str] = []
        """Reported while a frame is drawn."""
        self._draw: Draw | None = None
        self._figures: Sequence[str] = ()
        self._live: Live | None = None

    @property
    def width(self) -> int:
        """Columns of the terminal now, or of lines."""
        return width_of(self._stream)

    def say(self, words: str, picture: Draw | None = None) -> None:
        """Report an event; ``picture`` is printed with it where no frames are drawn."""
        event = shown(f"[{time.monotonic() - self._began_s:5.1f} s] {words}", self._stream)
        if self._live is not None:
            self._events.append(event)
            return
        lines = wrapped(event, self.width, _INDENT)
        if picture is not None and not self.live:
            lines += [f"  {line}".rstrip() for line in picture(self.width - 2)]
        self._print(lines)

    def show(self, picture: Draw, figures: Sequence[str] = ()) -> None:
        """Draw the moment over the last one; without a terminal, print its figures as a line now and then."""
        if self.live:
            self._draw, self._figures = picture, figures
            if self._live is None:
                self._live = self._begin()
            self._live.refresh()
            return
        now_s = time.monotonic() - self._began_s
        if figures and now_s >= self._next_line_s:
            self._next_line_s = now_s + self._line_every_s
            self.say("; ".join(figures))

    def close(self) -> None:
        """Give the terminal back, with the events and the last frame below what was there before."""
        if self._live is None:
            return
        self._live.stop()
        self._live = None
        events = [line for event in self._events for line in wrapped(event, self.width, _INDENT)]
        self._events.clear()
        self._print([*events, "", *self._frame(self.width)])

    def _print(self, lines: Sequence[str]) -> None:
        if self._progress is not None and not self.live:
            self._progress.write("\n".join(lines))
            return
        self._stream.write("\n".join(lines) + "\n")
        self._stream.flush()

    def _frame(self, width: int) -> list[str]:
        assert self._draw is not None
        figures = [line for figure in self._figures for line in wrapped(shown(figure, self._stream), width, "  ")]
        return [*(shown(line, self._stream) for line in self._draw(width)), *figures]

    def _begin(self) -> Live:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self._stream, force_terminal=True, color_system="256", legacy_windows=False)
        live = Live(
            _Whole(self),
            console=console,
            screen=True,
            refresh_per_second=_REDRAWN_PER_S,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        live.start()
        return live

    def render(self, width: int, rows: int) -> list[str]:
        """The frame with the latest events above it, as many as there is room for."""
        frame = self._frame(width)
        left = rows - len(frame) - 1
        events = [line for event in self._events for line in wrapped(event, width, _INDENT)]
        return [*events[-left:], "", *frame] if events and left > 0 else frame


class _Whole:
    """What rich draws: the screen's frame at the size that the terminal has now."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        for line in self._screen.render(options.max_width, options.height or options.size.height):
            text = Text.from_ansi(line, no_wrap=True, overflow="crop", end="")
            text.truncate(options.max_width)
            yield text
            yield Text("\n", end="")
