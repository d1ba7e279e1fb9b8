"""Text that fits its output: lines wrapped at words, tables cut into blocks."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

PIPED_WIDTH = 100
LEAST_WIDTH = 20
_GAP = "  "


def is_terminal(stream: TextIO) -> bool:
    """Return True for a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def has_colour(stream: TextIO) -> bool:
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def size_of(stream: TextIO) -> tuple[int, int]:
    """Return the terminal's columns and rows; ``COLUMNS`` and ``LINES`` take precedence."""
    if not stream.isatty():
        return PIPED_WIDTH, 24
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        columns, rows = 0, 0
    environment = [os.environ.get(name, "") for name in ("COLUMNS", "LINES")]
    columns, rows = (
        int(text) if text.isdecimal() else actual for text, actual in zip(environment, (columns, rows), strict=True)
    )
    return columns or 80, rows or 24


def width_of(stream: TextIO | None = None) -> int:
    return max(LEAST_WIDTH, size_of(sys.stdout if stream is None else stream)[0])


def wrapped(words: str, width: int, hanging: str | int = "") -> list[str]:
    """Wrap at spaces; continuation lines begin with ``hanging``, or as many spaces."""
    after = " " * hanging if isinstance(hanging, int) else hanging
    lines: list[str] = []
    for line in words.split("\n"):
        if len(line) <= width:
            lines.append(line)
            continue
        text = line.lstrip()
        lead = line[: len(line) - len(text)]
        lines += textwrap.wrap(
            text,
            max(width, LEAST_WIDTH),
            initial_indent=lead,
            subsequent_indent=lead + after,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def flowed(items: Iterable[str], width: int, gap: str = "   ") -> list[str]:
    """Fill lines with unbroken items."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(gap) + len(item) <= width:
            lines[-1] += gap + item
        else:
            lines.append(item)
    return lines


def command_lines(notes: Mapping[str, str], width: int) -> list[str]:
    """Return indented commands with their notes; a command is not wrapped, so that it can be copied."""
    note_at = max((len(command) for command, remark in notes.items() if remark), default=0)
    lines = [f"  {command:<{note_at}}   {remark}".rstrip() for command, remark in notes.items()]
    if max(map(len, lines), default=0) <= width:
        return lines
    return [
        line
        for command, remark in notes.items()
        for line in (f"  {command}", *(wrapped(f"      {remark}", width) if remark else ()))
    ]


def as_displayed(text: str, stream: TextIO) -> str:
    """Return ``text`` as shown: the stream's error handler may replace characters."""
    encoding, errors = getattr(stream, "encoding", None), getattr(stream, "errors", None)
    if not encoding or text.isascii():
        return text
    try:
        return text.encode(encoding, errors or "strict").decode(encoding)
    except (LookupError, UnicodeError):
        return text


def write(words: str, stream: TextIO | None = None, hanging: str | int = "") -> None:
    out = sys.stdout if stream is None else stream
    out.write("\n".join(wrapped(as_displayed(words, out), width_of(out), hanging)) + "\n")
    out.flush()


def write_line(words: str, stream: TextIO | None = None, hanging: str | int = "") -> None:
    """Print ``words``, wrapped only on a terminal."""
    out = sys.stdout if stream is None else stream
    out.write("\n".join(wrapped(as_displayed(words, out), width_of(out), hanging) if out.isatty() else [words]) + "\n")
    out.flush()


# A table that is too wide is cut between its columns into blocks below each other, each beginning with the same key
# columns. So every row stays a single line, and figures stay aligned. Only a column of words that is still too wide is
# wrapped within its cells.
@dataclass(frozen=True, slots=True)
class Table:
    """Head and rows; columns of ``left`` are words."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int] = (0,)
    keys: int = 1
    """Leading columns that each block repeats."""

    def lines(self, width: int, indent: str = "") -> list[str]:
        room = width - len(indent)
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        # Key columns of words shrink to half of the width, but not below their longest words.
        least = sum(self._longest_word(at) if at in self.left else widths[at] for at in range(self.keys))
        gaps = len(_GAP) * self.keys
        fixed = min(sum(widths[: self.keys]) + gaps, max(LEAST_WIDTH, room // 2, least + gaps))
        lines: list[str] = []
        for block in self._blocks(widths, room - fixed):
            if lines:
                lines.append("")
            limits = self._limits(widths, block, room)
            # After the first block, rows without cells in this block are left out.
            rows = [row for row in self.rows if not lines or any(row[at] for at in block)]
            for row in (self.head, *rows):
                lines += [f"{indent}{line}".rstrip() for line in self._row(row, block, limits)]
        return lines

    def print(self, stream: TextIO | None = None, indent: str = "") -> None:
        out = sys.stdout if stream is None else stream
        rows = [[as_displayed(cell, out) for cell in row] for row in (self.head, *self.rows)]
        table = Table(rows[0], rows[1:], self.left, self.keys)
        out.write("\n".join(table.lines(width_of(out), indent)) + "\n")
        out.flush()

    def _blocks(self, widths: Sequence[int], room: int) -> list[list[int]]:
        blocks: list[list[int]] = [[]]
        used = 0
        for at in range(self.keys, len(widths)):
            # Words may be wrapped; a column of words stays in the block if some width is left for it.
            least = min(widths[at], LEAST_WIDTH) if at in self.left else widths[at]
            if blocks[-1] and used + least > room:
                blocks.append([])
                used = 0
            blocks[-1].append(at)
            used += widths[at] + len(_GAP)
        return blocks

    def _limits(self, widths: Sequence[int], block: Sequence[int], room: int) -> dict[int, int]:
        limits = {at: widths[at] for at in (*range(self.keys), *block)}
        while (over := sum(limits.values()) + len(_GAP) * (len(limits) - 1) - room) > 0:
            shrinkable = [at for at in limits if at in self.left and limits[at] > self._longest_word(at)]
            if not shrinkable:
                break
            widest = max(shrinkable, key=lambda at: limits[at])
            limits[widest] = max(self._longest_word(widest), limits[widest] - over)
        return limits

    def _longest_word(self, at: int) -> int:
        return max((len(word) for row in (self.head, *self.rows) for word in row[at].split()), default=1)

    def _row(self, row: Sequence[str], block: Sequence[int], limits: dict[int, int]) -> Iterable[str]:
        columns = (*range(self.keys), *block)
        cells = [_folded(row[at], limits[at]) for at in columns]
        for number in range(max(map(len, cells))):
            parts = []
            for at, lines in zip(columns, cells, strict=True):
                text = lines[number] if number < len(lines) else ""
                parts.append(text.ljust(limits[at]) if at in self.left else text.rjust(limits[at]))
            yield _GAP.join(parts)


def _folded(text: str, width: int) -> list[str]:
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
