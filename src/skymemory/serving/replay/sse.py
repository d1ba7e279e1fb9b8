"""Server-sent events out of the pieces in which they come (WHATWG HTML, §9.2.6), without I/O."""

from __future__ import annotations

MOST_LINE_BYTES = 8 << 20


class NotEvents(ValueError):
    """The bytes are no server-sent events."""


class EventReader:
    """``feed`` with what came; it gives the data of the events that ended with it.

    An event ends with an empty line; one that the stream cuts short is never given, as the standard has it. Fields
    other than ``data`` are passed over.

    Raises NotEvents where a line is not UTF-8 or has no end, and where text is no field at all.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._first = True

    @property
    def unfinished(self) -> bool:
        """What came last is the beginning of an event."""
        return bool(self._rest or self._data)

    def feed(self, piece: bytes) -> list[str]:
        waiting = self._rest + piece
        if self._first:
            if len(waiting) < 3 and b"\xef\xbb\xbf".startswith(waiting):
                self._rest = waiting
                return []
            self._first = False
            waiting = waiting.removeprefix(b"\xef\xbb\xbf")
        # A carriage return at the very end may be half of a line's end: it is looked at when more has come.
        held = waiting.endswith(b"\r")
        lines = (waiting[:-1] if held else waiting).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + (b"\r" if held else b"")
        if len(self._rest) > MOST_LINE_BYTES:
            raise NotEvents(f"a line of more than {MOST_LINE_BYTES} bytes")
        events = []
        for line in lines:
            if line:
                self._take(line)
            elif self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events

    def _take(self, line: bytes) -> None:
        try:
            field, colon, value = line.decode().partition(":")
        except UnicodeDecodeError as error:
            raise NotEvents(f"a line that is not UTF-8: {line[:60]!r}") from error
        if field == "data":
            self._data.append(value.removeprefix(" "))
        elif not colon and field not in ("event", "id", "retry"):
            raise NotEvents(f"a line that is no field: {line[:60].decode(errors='replace')!r}")
