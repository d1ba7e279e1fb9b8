"""The Via header (RFC 9110, section 7.6.3): which routers a message has passed, so that none passes it twice.

Two routers that name each other as servers would pass a request round and round, with two connections for each pass,
until one of them has no file handle left. Each router adds its own name, so the first one that sees it again stops.
"""

from __future__ import annotations

import secrets

from skymemory.router.api_error import ApiError
from skymemory.router.http.connection import Headers

MAX_HOPS = 32
"""Proxies that a request may have passed: ends also loops through proxies that forget the name of this router."""


class Via:
    """One router's part of the header, under a name of its own."""

    def __init__(self) -> None:
        self.name = b"skymemory-" + secrets.token_hex(6).encode()
        """Random, since routers behind one address must differ, and no host name is for clients to see."""
        self.lines = {version: b"Via: %s %s\r\n" % (version.encode(), self.name) for version in ("1.0", "1.1")}
        """By the version of HTTP by which a message came, the header line; it goes behind those of other proxies."""

    def refusal(self, headers: Headers) -> ApiError | None:
        """508 for a request that has passed this router before, or ``MAX_HOPS`` proxies."""
        if b"via" not in headers.first:
            return None
        hops = [hop.split() for hop in headers.words_of(b"via") if hop]
        if any(self.name in hop[1:2] for hop in hops):
            why = "the request has come back to this router: a server behind it is a router that has this one behind it"
        elif len(hops) >= MAX_HOPS:
            why = f"the request has passed {len(hops)} proxies; at most {MAX_HOPS - 1} are allowed"
        else:
            return None
        return ApiError(508, f"{why}; remove the loop from the routers' `backends`", code="loop_detected")
