"""Drawing of the animated demos."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from skymemory.text import as_displayed, is_terminal, size_of, width_of, wrapped

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live

    from skymemory.progress import Progress

Draw = Callable[[int], Sequence[str]]
"""Picture for a terminal of this width; lines may have ANSI colours."""

LEAST_COLUMNS, LEAST_ROWS = 40, 12
_INDENT = " " * 10
_REDRAWN_PER_S = 4.0  # redraws without a new frame, for resized terminals


class Screen:
    """Frame redrawn in place (``live``), or pictures at events and a line of figures every few seconds."""

    def __init__(
        self, stream: TextIO, began_s: float, line_every_s: float = 2.0, progress: Progress | None = None
    ) -> None:
        columns, rows = size_of(stream)
        self.live = is_terminal(stream) and columns >= LEAST_COLUMNS and rows >= LEAST_ROWS
        self._stream = stream
        self._progress = progress
        self._began_s = began_s
        self._line_every_s = line_every_s
        self._next_line_s = 0.0
        self._events: list[str] = []
        self._draw: Draw | None = None
        self._figures: Sequence[str] = ()
        self._live: Live | None = None

    @property
    def width(self) -> int:
        return width_of(self._stream)

    def say(self, words: str, picture: Draw | None = None) -> None:
        """Report an event, with ``picture`` if no frames are drawn."""
        event = as_displayed(f"[{time.monotonic() - self._began_s:5.1f} s] {words}", self._stream)
        if self._live is not None:
            self._events.append(event)
            return
        lines = wrapped(event, self.width, _INDENT)
        if picture is not None and not self.live:
            lines += [f"  {line}".rstrip() for line in picture(self.width - 2)]
        self._print(lines)

    def show(self, picture: Draw, figures: Sequence[str] = ()) -> None:
        """Draw the moment; without a terminal, print its figures now and then."""
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
        figures = [
            line for figure in self._figures for line in wrapped(as_displayed(figure, self._stream), width, "  ")
        ]
        return [*(as_displayed(line, self._stream) for line in self._draw(width)), *figures]

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
        """Return the frame below the latest events."""
        frame = self._frame(width)
        free_rows = rows - len(frame) - 1
        events = [line for event in self._events for line in wrapped(event, width, _INDENT)]
        return [*events[-free_rows:], "", *frame] if events and free_rows > 0 else frame


class _Whole:
    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        for line in self._screen.render(options.max_width, options.height or options.size.height):
            text = Text.from_ansi(line, no_wrap=True, overflow="crop", end="")
            text.truncate(options.max_width)
            yield text
            yield Text("\n", end="")
