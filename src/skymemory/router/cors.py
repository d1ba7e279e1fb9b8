"""Which pages of browsers may ask the router: Cross-Origin Resource Sharing, as the Fetch standard has it.

A browser asks for a page of another origin only where the answer says that it may, and for most requests to this API
(JSON, ``Authorization``) asks that before, in a preflight: OPTIONS with ``Access-Control-Request-Method``, without
key or cookie. So preflights are answered before keys are looked at. Nothing here keeps anybody out who is no browser.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from skymemory.errors import InvalidInput
from skymemory.router.setting_values import duration, setting, texts, yes_or_no

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
"""Headers of answers that pages may read."""
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_MOST_HEADERS = 64
_PREFLIGHT_VARY = "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"


@dataclass(frozen=True, slots=True)
class CorsSettings:
    """Pages of browsers that may ask."""

    origins: tuple[str, ...] = setting(
        "origins", texts, (), 'their origins, such as https://app.example; "*": any; empty: none'
    )
    headers: tuple[str, ...] = setting("headers", texts, (), "headers that they may send; empty: those they ask for")
    credentials: bool = setting(
        "credentials", yes_or_no, False, "the browser may send what it keeps of us, cookies and the like"
    )
    max_age_s: float = setting("max_age", duration, 600.0, "how long a browser need not ask again")

    def __post_init__(self) -> None:
        for origin in self.origins:
            if origin != ANY:
                _check(origin)
        if ANY in self.origins and len(self.origins) > 1:
            raise InvalidInput('origins: "*" is any origin, and stands alone')
        if self.credentials and ANY in self.origins:
            raise InvalidInput('credentials: browsers take none where origins are "*"; name the origins')
        for name in self.headers:
            if not _TOKEN.fullmatch(name):
                raise InvalidInput(f"headers: {name!r} is no name of a header")


@dataclass(frozen=True, slots=True)
class CorsAnswer:
    headers: tuple[tuple[str, str], ...] = ()
    """For the answer, whatever it is, errors too: a page is shown no error without them."""
    preflight: bool = False
    """This is all of the answer: 204, and no body."""


_NOTHING = CorsAnswer()


def cors(method: str, headers: Mapping[str, str], settings: CorsSettings) -> CorsAnswer:
    """What to say to a request. ``headers``: by lower-case names, or in any case where the mapping does not mind."""
    if not settings.origins:
        return _NOTHING
    origin = headers.get("origin")
    preflight = method == "OPTIONS" and origin is not None and "access-control-request-method" in headers
    any_may = settings.origins == (ANY,)
    told: list[tuple[str, str]] = []
    if origin is not None and (any_may or origin in settings.origins):
        told.append(("Access-Control-Allow-Origin", ANY if any_may else origin))
        if settings.credentials:
            told.append(("Access-Control-Allow-Credentials", "true"))
        if preflight:
            told.append(("Access-Control-Allow-Methods", ", ".join(METHODS)))
            allowed = settings.headers or _asked_for(headers.get("access-control-request-headers", ""))
            if allowed:
                told.append(("Access-Control-Allow-Headers", ", ".join(allowed)))
            told.append(("Access-Control-Max-Age", str(int(settings.max_age_s))))
        else:
            told.append(("Access-Control-Expose-Headers", ", ".join(EXPOSED)))
    if preflight:
        told.append(("Vary", _PREFLIGHT_VARY))
    elif not any_may:
        # A cache between must not give one origin's answer to another, nor that of a request without one.
        told.append(("Vary", "Origin"))
    return CorsAnswer(tuple(told), preflight)


def _asked_for(said: str) -> tuple[str, ...]:
    """Names of headers, and nothing that is none: it is said again in an answer."""
    names = [name.strip() for name in said.split(",", _MOST_HEADERS)[:_MOST_HEADERS]]
    return tuple(name for name in names if _TOKEN.fullmatch(name))


def _check(origin: str) -> None:
    try:
        parts = urlsplit(origin)
        whole = parts.scheme and parts.hostname and origin == f"{parts.scheme}://{parts.netloc}" and parts.port != 0
    except ValueError:
        whole = False
    if not whole or "@" in origin or "*" in origin or origin != origin.lower():
        raise InvalidInput(
            f"origins: {origin!r} is none: expected scheme and host in small letters and nothing behind them, "
            "such as https://app.example or http://localhost:3000"
        )
