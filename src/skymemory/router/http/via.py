"""The Via header (RFC 9110, section 7.6.3).

Routers that name each other as servers would forward a request forever.
"""

from __future__ import annotations

import secrets

from skymemory.router.api_error import ApiError
from skymemory.router.http.connection import Headers

MAX_HOPS = 32
"""Limit of loops through proxies that remove this name."""


class Via:
    """``Via`` header of this router, to detect requests that come back."""

    def __init__(self) -> None:
        # Random: routers must differ, and clients should not see host names.
        self.name = b"skymemory-" + secrets.token_hex(6).encode()
        self.lines = {version: b"Via: %s %s\r\n" % (version.encode(), self.name) for version in ("1.0", "1.1")}

    def refusal(self, headers: Headers) -> ApiError | None:
        """Return 508 for a request that has passed this router, or ``MAX_HOPS`` proxies."""
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
