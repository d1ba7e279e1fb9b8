"""Which headers a proxy passes on: all but those that speak of one connection (RFC 9110, section 7.6.1)."""

from __future__ import annotations

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
_NOT_TO_SERVERS = _OF_ONE_CONNECTION | {"host", "content-length", "content-encoding", "expect", DECISION_HEADER}
_NOT_TO_CLIENTS = _OF_ONE_CONNECTION | {DECISION_HEADER}


def headers_for_server(headers: CIMultiDictProxy[str], client: str) -> CIMultiDict[str]:
    """Headers of a request as its server gets them, ``Authorization`` and all, with the client's address added."""
    passed = _without(headers, _NOT_TO_SERVERS)
    if client:
        before = passed.get("X-Forwarded-For")
        passed["X-Forwarded-For"] = f"{before}, {client}" if before else client
    return passed


def headers_for_client(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Headers of an answer as its client gets them, those that come more than once too."""
    return _without(headers, _NOT_TO_CLIENTS)


def _without(headers: CIMultiDictProxy[str], left_out: frozenset[str]) -> CIMultiDict[str]:
    named = headers.getall("Connection", ())
    if named and (more := {word.strip().lower() for line in named for word in line.split(",")} - left_out):
        left_out = left_out | more
    return CIMultiDict([(name, value) for name, value in headers.items() if name.lower() not in left_out])
