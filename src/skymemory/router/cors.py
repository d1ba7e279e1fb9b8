"""CORS: the web pages whose scripts may use the router, by the Fetch standard.

A browser lets a page of another origin read a response only where its headers allow it. Most requests to this API
(JSON, ``Authorization``) need a preflight before: OPTIONS with ``Access-Control-Request-Method``, without key or
cookie. So preflights are answered before keys are checked. CORS restricts browsers only, no other client.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from skymemory.config import duration, setting, texts, yes_or_no
from skymemory.errors import InvalidInput

ANY = "*"
METHODS = ("GET", "HEAD", "POST", "OPTIONS")
EXPOSED = (
    "retry-after",
    "x-request-id",
    "x-skymemory-decision",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
)
"""Response headers that pages may read."""
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_MAX_HEADERS = 64
_PREFLIGHT_VARY = "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"


@dataclass(frozen=True, slots=True)
class CorsSettings:
    """CORS: web pages that may use the router."""

    origins: tuple[str, ...] = setting(
        "origins", texts, (), 'their origins, such as https://app.example; "*": any; empty: none'
    )
    headers: tuple[str, ...] = setting("headers", texts, (), "request headers they may send; empty: any they ask for")
    credentials: bool = setting("credentials", yes_or_no, False, "browsers may send cookies and other credentials")
    max_age_s: float = setting("max_age", duration, 600.0, "how long browsers cache the answer to a preflight")

    def __post_init__(self) -> None:
        for origin in self.origins:
            if origin != ANY:
                _check(origin)
        if ANY in self.origins and len(self.origins) > 1:
            raise InvalidInput('origins: "*" is any origin; leave out the others')
        if self.credentials and ANY in self.origins:
            raise InvalidInput('credentials: browsers send none where origins are "*"; name the origins')
        for name in self.headers:
            if not _TOKEN.fullmatch(name):
                raise InvalidInput(f"headers: {name!r} is no name of a header; expected one such as X-Request-Id")


@dataclass(frozen=True, slots=True)
class CorsAnswer:
    headers: tuple[tuple[str, str], ...] = ()
    """Of the response, also of an error: without them a page cannot read it."""
    preflight: bool = False
    """The response is 204 with these headers."""


_NO_CORS = CorsAnswer()


def cors(method: str, headers: Mapping[str, str], settings: CorsSettings) -> CorsAnswer:
    """The answer to a request. ``headers``: by lower-case names."""
    if not settings.origins:
        return _NO_CORS
    origin = headers.get("origin")
    preflight = method == "OPTIONS" and origin is not None and "access-control-request-method" in headers
    any_may = settings.origins == (ANY,)
    answer: list[tuple[str, str]] = []
    if origin is not None and (any_may or origin in settings.origins):
        answer.append(("Access-Control-Allow-Origin", ANY if any_may else origin))
        if settings.credentials:
            answer.append(("Access-Control-Allow-Credentials", "true"))
        if preflight:
            answer.append(("Access-Control-Allow-Methods", ", ".join(METHODS)))
            allowed = settings.headers or _requested(headers.get("access-control-request-headers", ""))
            if allowed:
                answer.append(("Access-Control-Allow-Headers", ", ".join(allowed)))
            answer.append(("Access-Control-Max-Age", str(int(settings.max_age_s))))
        else:
            answer.append(("Access-Control-Expose-Headers", ", ".join(EXPOSED)))
    if preflight:
        answer.append(("Vary", _PREFLIGHT_VARY))
    elif not any_may:
        # A cache must not give one origin's response to another, or to a request without an origin.
        answer.append(("Vary", "Origin"))
    return CorsAnswer(tuple(answer), preflight)


def _requested(names_list: str) -> tuple[str, ...]:
    """The valid names in a list of headers: they are repeated in the response."""
    names = [name.strip() for name in names_list.split(",", _MAX_HEADERS)[:_MAX_HEADERS]]
    return tuple(name for name in names if _TOKEN.fullmatch(name))


def _check(origin: str) -> None:
    try:
        parts = urlsplit(origin)
        whole = parts.scheme and parts.hostname and origin == f"{parts.scheme}://{parts.netloc}" and parts.port != 0
    except ValueError:
        whole = False
    if not whole or "@" in origin or "*" in origin or origin != origin.lower():
        raise InvalidInput(
            f"origins: {origin!r} is no origin: expected scheme and host in lower case and nothing after them, "
            "such as https://app.example or http://localhost:3000"
        )
