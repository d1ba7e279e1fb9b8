"""Server side of the Redis serialization protocol, versions 2 and 3: requests in, replies out. No I/O.

For an argument of ``LARGE_BYTES`` or more, ``next`` returns a ``LargeArgument``: the caller receives its other bytes
into their final buffer, or lets ``discard`` skip the request.

Source: redis.io/docs/latest/develop/reference/protocol-spec.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from skymemory import native
from skymemory.errors import SkyMemoryError
from skymemory.store.base import Buffer
from skymemory.store.redis_server import inline

LARGE_BYTES = 32 << 10
"""Size from which an argument is received separately."""
MAX_LINE_BYTES = 64 << 10
MAX_BULK_BYTES = 10**12 - 1
MAX_ARGUMENTS = 1 << 16
MAX_SMALL_BYTES = 64 << 20
"""Limit of a request's small arguments, together."""
# Limits before authentication, as in Redis: arguments, and bytes of each.
_STRANGERS_ARGUMENTS, _STRANGERS_BYTES = 10, 16 << 10
_WORD_BYTES = 64

_CRLF = b"\r\n"


class ProtocolError(SkyMemoryError):
    """Malformed request, or a limit exceeded; ends the connection."""


class Stranger(ProtocolError):
    """Request of another protocol: nothing more is executed."""


@dataclass(frozen=True, slots=True)
class Framed:
    """Value received as it is stored: after its header, or without its ``trailer``."""

    data: bytes
    trailer: bytes = b""


Word = Buffer | Framed


@dataclass(frozen=True, slots=True)
class LargeArgument:
    """Announcement of an argument. ``head``: its first bytes."""

    words: tuple[Word, ...]
    size_bytes: int
    head: bytes


class NeedData:
    """Result of ``next`` without a complete request."""


NEED_DATA = NeedData()


class RequestParser:
    """Incremental parser: ``feed``, then ``next`` until it needs data. ``trusted``: authenticated."""

    def __init__(self, max_bulk_bytes: int, *, trusted: bool = True) -> None:
        self.trusted = trusted
        self._max_bulk_bytes = max_bulk_bytes
        self._data = bytearray()
        self._at = 0  # position in the data
        self._words: list[Word] = []
        self._missing = 0  # arguments of the request
        self._small_bytes = 0
        self._large: LargeArgument | None = None
        self._ends = False  # a large argument's line end is next
        self._discards = False  # a refused request is skipped
        self._unread_bytes = 0  # of the argument being skipped
        self.is_inline = False

    def feed(self, data: Buffer) -> None:
        if self._at:
            del self._data[: self._at]
            self._at = 0
        self._data += data

    @property
    def idle(self) -> bool:
        return not self._missing and not self._ends and self._at == len(self._data)

    @property
    def held_bytes(self) -> int:
        return self._small_bytes + _WORD_BYTES * len(self._words)

    def head_of(self, large: LargeArgument) -> bytes:
        more_bytes = len(self._data) - self._at - self.bytes_behind(large)
        with memoryview(self._data) as data:
            rest_of_head = bytes(data[self._at : self._at + more_bytes])
        self._at += more_bytes
        return large.head + rest_of_head

    def bytes_behind(self, large: LargeArgument) -> int:
        return max(0, len(self._data) - self._at - (large.size_bytes - len(large.head)))

    def deliver(self, value: Word, following: Buffer = b"") -> None:
        """Add a large argument's value, and the bytes after it."""
        self._large = None
        self._words.append(value)
        self._missing -= 1
        self._ends = True
        self.feed(following)

    def discard(self) -> None:
        assert self._large is not None
        self._unread_bytes = self._large.size_bytes - len(self._large.head) + len(_CRLF)
        self._large, self._words, self._discards = None, [], True

    def next(self) -> list[Word] | LargeArgument | NeedData:
        """Return the next request's words (none: an empty line), or what it needs."""
        if self._large is not None:
            return self._large
        if self._discards and not self._read_over():
            return NEED_DATA
        self.is_inline = False
        if not self._ends and (words := self._whole_words()) is not None:
            return words
        while True:
            if self._ends:
                if len(self._data) - self._at < 2:
                    return NEED_DATA
                self._expect_crlf(self._at)
                self._at += 2
                self._ends = False
            elif self._missing:
                step = self._argument()
                if step is not None:
                    return step
            else:
                if self._at < len(self._data) and not inline.may_begin_with(self._data[self._at]):
                    raise Stranger("no request and no line of text")
                line = self._line()
                if line is None:
                    return NEED_DATA
                if not line.startswith(b"*"):
                    return self._words_of_line(line)
                most = MAX_ARGUMENTS if self.trusted else _STRANGERS_ARGUMENTS
                self._missing = self._number(line, most, "multibulk")
                self._words, self._small_bytes = [], 0
            if not self._missing and not self._ends:
                return self._finished()

    def _words_of_line(self, line: bytes) -> list[Word]:
        if inline.is_http(line):
            raise Stranger("HTTP")
        words = inline.words_of(line)
        if words is None:
            raise ProtocolError("unbalanced quotes in request")
        self.is_inline = True
        return list(words)

    def _read_over(self) -> bool:
        """Skip a refused request; False: it has not all arrived."""
        while self._missing:
            if not self._unread_bytes:
                line = self._line()
                if line is None:
                    return False
                self._unread_bytes = self._bulk_bytes(line) + len(_CRLF)
            skipped_bytes = min(self._unread_bytes, len(self._data) - self._at)
            self._at += skipped_bytes
            self._unread_bytes -= skipped_bytes
            if self._unread_bytes:
                return False
            self._missing -= 1
        self._discards = False
        return True

    def _whole_words(self) -> list[Word] | None:
        """Parse complete arguments in a native call; return the words of a complete request."""
        most_words = MAX_ARGUMENTS if self.trusted else _STRANGERS_ARGUMENTS
        most_bytes = min(LARGE_BYTES - 1, self._most_bulk_bytes)
        before, under_way = self._at, self._missing
        words, self._at, self._missing = native.request_words(
            self._data, before, under_way, most_words, most_bytes, MAX_SMALL_BYTES - self._small_bytes
        )
        if self._at == before:
            return None
        if not self._missing and not under_way:
            return words  # type: ignore[return-value]
        self._words += words
        self._small_bytes += sum(map(len, words))
        return None if self._missing else self._finished()

    def _finished(self) -> list[Word]:
        words, self._words, self._small_bytes = self._words, [], 0
        return words

    @property
    def _most_bulk_bytes(self) -> int:
        return self._max_bulk_bytes if self.trusted else min(_STRANGERS_BYTES, self._max_bulk_bytes)

    def _argument(self) -> LargeArgument | NeedData | None:
        """Parse an argument; return what is needed first, if anything."""
        begin = self._at
        line = self._line()
        if line is None:
            return NEED_DATA
        size_bytes = self._bulk_bytes(line)
        available_bytes = len(self._data) - self._at
        if size_bytes >= LARGE_BYTES:
            with memoryview(self._data) as data:
                head = bytes(data[self._at : self._at + size_bytes])
            self._at += len(head)
            self._large = LargeArgument(tuple(self._words), size_bytes, head)
            return self._large
        if available_bytes < size_bytes + 2:
            self._at = begin
            return NEED_DATA
        self._expect_crlf(self._at + size_bytes)
        self._small_bytes += size_bytes
        if self._small_bytes > MAX_SMALL_BYTES:
            raise ProtocolError(f"the arguments of one command exceed {MAX_SMALL_BYTES} bytes")
        self._words.append(bytes(self._data[self._at : self._at + size_bytes]))
        self._at += size_bytes + 2
        self._missing -= 1
        return None

    def _bulk_bytes(self, line: bytes) -> int:
        if not line.startswith(b"$"):
            raise ProtocolError(f"expected '$', got '{chr(line[0]) if line else ''}'")
        return self._number(line, self._most_bulk_bytes, "bulk")

    def _line(self) -> bytes | None:
        end = self._data.find(b"\n", self._at, self._at + MAX_LINE_BYTES)
        if end < 0:
            if len(self._data) - self._at >= MAX_LINE_BYTES:
                raise ProtocolError("too big inline request")
            return None
        line = bytes(self._data[self._at : end])
        self._at = end + 1
        return line.removesuffix(b"\r")

    def _expect_crlf(self, at: int) -> None:
        if self._data[at : at + 2] != _CRLF:
            raise ProtocolError("expected CRLF behind a bulk string")

    @staticmethod
    def _number(line: bytes, most: int, what: str) -> int:
        digits = line[1:]
        if what == "multibulk" and digits[:1] == b"-" and digits[1:].isdigit():
            return 0  # not a request, as in Redis
        if not (digits.isdigit() and len(digits) <= 12 and int(digits) <= most):
            raise ProtocolError(f"invalid {what} length, expected 0 to {most}")
        return int(digits)


# --- replies ---


class Reply:
    """Encoder of replies that differ between RESP 2 and 3."""

    def __init__(self, version: int = 2) -> None:
        self.version = version

    def null(self) -> bytes:
        return b"_\r\n" if self.version == 3 else b"$-1\r\n"

    def null_array(self) -> bytes:
        return b"_\r\n" if self.version == 3 else b"*-1\r\n"

    def mapping(self, pairs: Mapping[bytes, bytes]) -> bytes:
        head = b"%%%d\r\n" % len(pairs) if self.version == 3 else array_head(2 * len(pairs))
        return head + b"".join(bulk(key) + value for key, value in pairs.items())


def simple(text: str) -> bytes:
    return b"+%s\r\n" % text.encode()


def error(text: str, code: str = "ERR") -> bytes:
    return f"-{code} {' '.join(text.split())}\r\n".encode()


def integer(number: int) -> bytes:
    return b":%d\r\n" % number


def bulk_head(size_bytes: int) -> bytes:
    return b"$%d\r\n" % size_bytes


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(data), data)


def array_head(length: int) -> bytes:
    return b"*%d\r\n" % length


def array(items: Iterable[bytes]) -> bytes:
    items = list(items)
    return array_head(len(items)) + b"".join(items)
