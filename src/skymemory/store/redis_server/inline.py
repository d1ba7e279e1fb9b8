"""Inline commands, as telnet sends them, and the detection of other protocols.

Web pages may send HTTP and TLS to any port of their user's computer. So these end the connection: a later command would
come from the page.
"""

from __future__ import annotations

import re
import string

_HTTP = re.compile(rb"\sHTTP/[0-9](?:\.[0-9])?\s*$|^\s*host:", re.IGNORECASE)
_FIRST = frozenset(string.printable.encode())
_SPACE = frozenset(string.whitespace.encode())
_ESCAPED = {ord(short): code for short, code in zip("nrtba", b"\n\r\t\b\a", strict=True)}
_HEX = re.compile(rb"x([0-9a-fA-F]{2})")
_UNQUOTED = re.compile(rb"[^\s\"']+")
_BACKSLASH, _QUOTE, _APOSTROPHE = b"\\\"'"


def may_begin_with(byte: int) -> bool:
    return byte in _FIRST  # TLS, HTTP/2, STUN and database greetings do not begin so


def is_http(line: bytes) -> bool:
    return _HTTP.search(line) is not None


def words_of(line: bytes) -> list[bytes] | None:
    r"""Return the words; None if a quote is open or no space follows it. Within ``"…"`` a backslash escapes (``\n``,
    ``\x00`` …), within ``'…'`` only an apostrophe.
    """
    if b'"' not in line and b"'" not in line:
        return line.split()
    words: list[bytes] = []
    at = 0
    while True:
        while at < len(line) and line[at] in _SPACE:
            at += 1
        if at == len(line):
            return words
        word = bytearray()
        while at < len(line) and line[at] not in _SPACE:
            if (unquoted := _UNQUOTED.match(line, at)) is not None:
                word += unquoted[0]
                at = unquoted.end()
                continue
            at = _quoted(line, at, word)
            if at < 0 or (at < len(line) and line[at] not in _SPACE):
                return None
        words.append(bytes(word))


def _quoted(line: bytes, at: int, word: bytearray) -> int:
    """Append the quoted text at ``at`` to ``word``; return the position after it, -1 if the quote is open."""
    quote = line[at]
    at += 1
    while at < len(line):
        byte, following = line[at], line[at + 1] if at + 1 < len(line) else None
        if byte == quote:
            return at + 1
        if byte != _BACKSLASH or following is None:
            word.append(byte)
        elif quote == _APOSTROPHE:
            word.append(_APOSTROPHE if following == _APOSTROPHE else byte)
            at += following == _APOSTROPHE
        elif (code := _HEX.match(line, at + 1)) is not None:
            word.append(int(code[1], 16))
            at += 3
        else:
            word.append(_ESCAPED.get(following, following))
            at += 1
        at += 1
    return -1
