"""Text that fits where it is printed: lines wrapped at words, tables cut into blocks, never wider than the terminal."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

PIPED_WIDTH = 100
"""Columns of what is printed into a file or a pipe."""
LEAST_WIDTH = 20
"""No line is wrapped to fewer columns than these."""
_GAP = "  "


def is_terminal(stream: TextIO) -> bool:
    """Whether the stream is a terminal that can move its cursor (not ``TERM=dumb``)."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def has_colour(stream: TextIO) -> bool:
    """Whether text to the stream may have colours: a terminal, and no ``NO_COLOR`` in the environment."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def size_of(stream: TextIO) -> tuple[int, int]:
    """Columns and rows of the terminal behind the stream, now; ``PIPED_WIDTH`` by 24 where there is none.

    ``COLUMNS`` and ``LINES`` are obeyed on a terminal.
    """
    if not stream.isatty():
        return PIPED_WIDTH, 24
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        columns, rows = 0, 0
    given = [os.environ.get(name, "") for name in ("COLUMNS", "LINES")]
    columns, rows = (int(text) if text.isdecimal() else now for text, now in zip(given, (columns, rows), strict=True))
    return columns or 80, rows or 24


def width_of(stream: TextIO | None = None) -> int:
    """Columns for a line of the stream (default: standard output)."""
    return max(LEAST_WIDTH, size_of(sys.stdout if stream is None else stream)[0])


def wrapped(words: str, width: int, hanging: str | int = "") -> list[str]:
    """The lines of ``words``, each at most ``width`` wide where its words are; those behind the first begin with
    ``hanging``, or with that number of spaces. Line breaks and leading spaces stay.
    """
    after = " " * hanging if isinstance(hanging, int) else hanging
    found: list[str] = []
    for line in words.split("\n"):
        if len(line) <= width:
            found.append(line)
            continue
        text = line.lstrip()
        lead = line[: len(line) - len(text)]
        found += textwrap.wrap(
            text,
            max(width, LEAST_WIDTH),
            initial_indent=lead,
            subsequent_indent=lead + after,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return found


def flowed(items: Iterable[str], width: int, gap: str = "   ") -> list[str]:
    """Lines filled with items, none of which is broken."""
    found: list[str] = []
    for item in items:
        if found and len(found[-1]) + len(gap) + len(item) <= width:
            found[-1] += gap + item
        else:
            found.append(item)
    return found


def command_lines(notes: Mapping[str, str], width: int) -> list[str]:
    """Indented commands, each with its note beside it, or below it if not all fit ``width``.

    Commands are not wrapped: one that is wider than a terminal can still be copied from it, one in two lines cannot.
    """
    beside = max((len(command) for command, note in notes.items() if note), default=0)
    lines = [f"  {command:<{beside}}   {note}".rstrip() for command, note in notes.items()]
    if max(map(len, lines), default=0) <= width:
        return lines
    return [
        line
        for command, note in notes.items()
        for line in (f"  {command}", *(wrapped(f"      {note}", width) if note else ()))
    ]


def shown(text: str, stream: TextIO) -> str:
    """``text`` as the stream will show it: characters that its encoding lacks in the form that its error handler gives,
    which may be wider.
    """
    encoding, errors = getattr(stream, "encoding", None), getattr(stream, "errors", None)
    if not encoding or text.isascii():
        return text
    try:
        return text.encode(encoding, errors or "strict").decode(encoding)
    except (LookupError, UnicodeError):
        return text


def write(words: str, stream: TextIO | None = None, hanging: str | int = "") -> None:
    """Print ``words``, wrapped for the stream (default: standard output)."""
    out = sys.stdout if stream is None else stream
    out.write("\n".join(wrapped(shown(words, out), width_of(out), hanging)) + "\n")
    out.flush()


def write_line(words: str, stream: TextIO | None = None, hanging: str | int = "") -> None:
    """Print ``words`` wrapped on a terminal, as one line elsewhere, for programs that read lines."""
    out = sys.stdout if stream is None else stream
    out.write("\n".join(wrapped(shown(words, out), width_of(out), hanging) if out.isatty() else [words]) + "\n")
    out.flush()


# A table that is too wide is cut between its columns: below the first block comes the next, beginning with the same
# key columns. So every row stays one line, and figures stay below each other. Only a column of words that is too wide
# even then is wrapped within its cells.
@dataclass(frozen=True, slots=True)
class Table:
    """A head and rows of cells. Columns of ``left`` (indices) are words, the others are aligned as numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int] = (0,)
    keys: int = 1
    """Number of leading columns that name a row; each block repeats them."""

    def lines(self, width: int, indent: str = "") -> list[str]:
        """The table in one block if it fits ``width``, else in several, with an empty line between them."""
        room = width - len(indent)
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        # Keys of words give way to half of the width, and to no less than their longest words.
        least = sum(self._longest_word(at) if at in self.left else widths[at] for at in range(self.keys))
        gaps = len(_GAP) * self.keys
        fixed = min(sum(widths[: self.keys]) + gaps, max(LEAST_WIDTH, room // 2, least + gaps))
        found: list[str] = []
        for block in self._blocks(widths, room - fixed):
            if found:
                found.append("")
            limits = self._limits(widths, block, room)
            # Below the first block, rows that have nothing in this one would be noise.
            rows = [row for row in self.rows if not found or any(row[at] for at in block)]
            for row in (self.head, *rows):
                found += [f"{indent}{line}".rstrip() for line in self._row(row, block, limits)]
        return found

    def print(self, stream: TextIO | None = None, indent: str = "") -> None:
        """Write it to the stream (default: standard output), as wide as that is."""
        out = sys.stdout if stream is None else stream
        rows = [[shown(cell, out) for cell in row] for row in (self.head, *self.rows)]
        table = Table(rows[0], rows[1:], self.left, self.keys)
        out.write("\n".join(table.lines(width_of(out), indent)) + "\n")
        out.flush()

    def _blocks(self, widths: Sequence[int], room: int) -> list[list[int]]:
        """The columns of each block, keys left out."""
        blocks: list[list[int]] = [[]]
        used = 0
        for at in range(self.keys, len(widths)):
            # Words may be wrapped; a column of them stays in the block if some width is left for it.
            least = min(widths[at], LEAST_WIDTH) if at in self.left else widths[at]
            if blocks[-1] and used + least > room:
                blocks.append([])
                used = 0
            blocks[-1].append(at)
            used += widths[at] + len(_GAP)
        return blocks

    def _limits(self, widths: Sequence[int], block: Sequence[int], room: int) -> dict[int, int]:
        """Width of each column of a block; the widest columns of words give way until all fit."""
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
