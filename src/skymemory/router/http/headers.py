"""Which headers a proxy passes on: all but those that speak of one connection (RFC 9110, section 7.6.1)."""

from __future__ import annotations

from collections.abc import Iterable

from multidict import CIMultiDict, CIMultiDictProxy

DECISION_HEADER = "x-skymemory-decision"
"""Asked with any value by a request, answered with the decision as JSON."""

_OF_ONE_CONNECTION = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
# A body is read whole, unpacked, before it is passed on: its length is set anew, and nobody waits for a "100 Continue".
_NOT_TO_SERVERS = frozenset(
    name.encode()
    for name in _OF_ONE_CONNECTION
    | {"host", "content-length", "content-encoding", "expect", "x-forwarded-for", DECISION_HEADER}
)
_NOT_TO_CLIENTS = _OF_ONE_CONNECTION | {DECISION_HEADER}


def headers_for_server(raw: Iterable[tuple[bytes, bytes]], client: str) -> bytes:
    """Headers of a request as its server gets them, as lines: ``Authorization`` and all, with the client's address.

    ``raw``: as they came; the parser has refused those with line ends or other control characters in them.
    """
    lines: list[bytes] = []
    came_from: list[bytes] = []
    left_out = _NOT_TO_SERVERS
    for name, value in raw:
        if name.lower() == b"connection":
            left_out = left_out | {word.strip().lower() for word in value.split(b",")}
    for name, value in raw:
        lowered = name.lower()
        if lowered not in left_out:
            lines += (name, b": ", value, b"\r\n")
        elif lowered == b"x-forwarded-for":
            came_from.append(value)
    if client:
        came_from.append(client.encode("ascii", "replace"))
    if came_from:
        lines += (b"X-Forwarded-For: ", b", ".join(came_from), b"\r\n")
    return b"".join(lines)


def headers_for_client(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Headers of an answer as its client gets them, those that come more than once too."""
    left_out = _NOT_TO_CLIENTS
    if named := headers.getall("Connection", ()):
        left_out = left_out | {word.strip().lower() for line in named for word in line.split(",")}
    return CIMultiDict([(name, value) for name, value in headers.items() if name.lower() not in left_out])
