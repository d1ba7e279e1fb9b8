"""Web pages that a router on loopback must not serve.

- ``Origin`` must be the router's own, a page on this computer, or allowed by CORS. Schemes of programs (browser
  extensions) are allowed.
- ``Host``: a page may let its own name resolve to 127.0.0.1 (DNS rebinding). So only names that no stranger can own are
  allowed: an address, a name without a dot or with a reserved ending, or a name in ``hosts``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

ANY = "*"
_RESERVED = (".localhost", ".local", ".internal", ".test", ".home.arpa")
_MAX_REMEMBERED_HOSTS = 256


class Strangers:
    def __init__(self, hosts: Collection[str] = (), origins: Collection[str] = ()) -> None:
        """``hosts``: further names of the router; ``origins``: allowed by CORS. ``*``: any."""
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origins)
        self._allowed_hosts: set[bytes] = set()

    def refusal(self, host: bytes | None, origin: bytes | None) -> str | None:
        """Return the reason to refuse a request; None: allowed."""
        if host is not None and host not in self._allowed_hosts:
            if not self._is_own_name(_name_of(host)):
                return (
                    f"this router listens on loopback without keys, and does not go by the name {_quoted(host)}: call "
                    "it by localhost or its address, or add the name to `hosts` of [door] in its settings"
                )
            if len(self._allowed_hosts) < _MAX_REMEMBERED_HOSTS:
                self._allowed_hosts.add(host)
        if origin is None or self._is_origin_allowed(origin, host):
            return None
        return (
            f"a web page of another origin ({_quoted(origin)}) asks; if it may, allow it with `origins` of "
            "[cors] in the settings"
        )

    def _is_own_name(self, name: str) -> bool:
        """Return True for a name that no stranger can own."""
        if ANY in self._hosts or name in self._hosts or "." not in name or name.endswith(_RESERVED):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_origin_allowed(self, origin: bytes, host: bytes | None) -> bool:
        """Return True for own pages, local pages, programs, and what CORS allows."""
        words = origin.decode("latin-1").strip()
        if ANY in self._origins or words in self._origins:
            return True
        scheme, _, authority = words.partition("://")
        if not authority:
            return False  # "null": a sandboxed page, or a file
        if scheme.lower() not in ("http", "https"):
            return True
        if host is not None and authority.lower() == host.decode("latin-1").lower():
            return True
        try:
            name = urlsplit(words).hostname or ""
        except ValueError:
            return False
        if name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


def _name_of(host: bytes) -> str:
    words = host.decode("latin-1").strip().lower()
    if words.startswith("["):
        return words[1:].partition("]")[0]
    return words.partition(":")[0].removesuffix(".")


def _quoted(header: bytes) -> str:
    return repr(header[:80].decode("latin-1"))
