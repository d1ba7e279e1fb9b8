"""Which headers a proxy passes on: all but those that speak of one connection (RFC 9110, section 7.6.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from skymemory import native
from skymemory.native.twin.http_headers import RawHeaders

DECISION_HEADER = "x-skymemory-decision"
"""Asked with any value by a request, answered with the decision as JSON."""

_OF_ONE_CONNECTION = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# A body is read whole, unpacked, before it is passed on: its length is set anew, and nobody waits for a "100 Continue".
_NOT_TO_SERVERS = _OF_ONE_CONNECTION | {
    b"host",
    b"content-length",
    b"content-encoding",
    b"expect",
    b"x-forwarded-for",
    b"http2-settings",
    DECISION_HEADER.encode(),
}
_NOT_TO_SERVERS_KEYED = _NOT_TO_SERVERS | {b"authorization"}
_KEEP_OR_CLOSE = (b"", b"keep-alive", b"close")
_NOT_TO_CLIENTS = _OF_ONE_CONNECTION | {DECISION_HEADER.encode()}
_NOT_TO_CLIENTS_CORS = _NOT_TO_CLIENTS | {
    b"access-control-allow-origin",
    b"access-control-allow-credentials",
    b"access-control-allow-methods",
    b"access-control-allow-headers",
    b"access-control-expose-headers",
    b"access-control-max-age",
}


class Headers(Mapping[str, str]):
    """Headers by lower-case names. Of one that came more than once, the first; ``all_of`` gives all.

    ``raw``: as they came. The parser has refused those with line ends or other control characters in them.
    """

    __slots__ = ("first", "raw")

    def __init__(self, raw: RawHeaders) -> None:
        self.raw = raw
        self.first = native.first_values(raw)
        """As bytes."""

    def __getitem__(self, name: str) -> str:
        return self.first[name.encode()].decode("utf-8", "surrogateescape")

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]
        value = self.first.get(name.encode())
        return default if value is None else value.decode("utf-8", "surrogateescape")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.encode() in self.first

    def __iter__(self) -> Iterator[str]:
        return (name.decode("ascii") for name in self.first)

    def __len__(self) -> int:
        return len(self.first)

    def all_of(self, name: bytes) -> list[bytes]:
        first = self.first
        if name not in first:
            return []
        if len(first) == len(self.raw):
            return [first[name]]  # none came twice
        return [value for each, value in self.raw if each.lower() == name]

    def words_of(self, name: bytes) -> list[bytes]:
        """The lower-case words of a list, from all the lines it came in."""
        return [word.strip().lower() for value in self.all_of(name) for word in value.split(b",")]


def headers_for_server(headers: Headers, client: str, keyed: bool = False) -> bytes:
    """Headers of a request as its server gets them, as lines, with the client's address: ``Authorization`` and all,
    unless that was a key for us (``keyed``), which is no server's business.
    """
    left_out = _NOT_TO_SERVERS_KEYED if keyed else _NOT_TO_SERVERS
    if headers.first.get(b"connection", b"").lower() not in _KEEP_OR_CLOSE:
        left_out = left_out | set(headers.words_of(b"connection"))
    lines = native.header_lines(headers.raw, left_out)
    came_from = headers.all_of(b"x-forwarded-for")
    if client:
        came_from.append(client.encode("ascii", "replace"))
    return b"%sX-Forwarded-For: %s\r\n" % (lines, b", ".join(came_from)) if came_from else lines


def headers_for_client(headers: Headers, without_cors: bool = False) -> bytes:
    """Headers of an answer as its client gets them, those that come more than once too. ``without_cors``: what its
    server says to browsers is left out, since we do; one of both would be too many for them.
    """
    left_out = _NOT_TO_CLIENTS_CORS if without_cors else _NOT_TO_CLIENTS
    if headers.first.get(b"connection", b"").lower() not in _KEEP_OR_CLOSE:
        left_out = left_out | set(headers.words_of(b"connection"))
    return native.header_lines(headers.raw, left_out)
