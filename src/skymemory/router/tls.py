"""How servers are asked: what their certificates are checked against, and the key that they want to see."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import NamedTuple

from skymemory.errors import InvalidInput
from skymemory.files import read_bounded

Stamp = tuple[int, int, int]
_KEY = re.compile(rb"[!-~]{1,4096}")
_MOST_KEY_BYTES = 8192


class Access(NamedTuple):
    """How one server is asked."""

    tls: ssl.SSLContext | None = None
    """None: not over TLS."""
    key: str = ""
    """Its own, which every request to it carries; empty: it wants none."""

    @property
    def headers(self) -> dict[str, str]:
        """Of requests that the router makes for itself."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


class Authorities:
    """Contexts for TLS to servers, one per file of certificates; and one with the system's own."""

    def __init__(self) -> None:
        self._known: dict[Path | None, tuple[Stamp | None, ssl.SSLContext]] = {}

    def access(self, url: str, ca: Path | None, key_file: Path | None) -> Access:
        """To a server at ``url``, files read as they are now.

        Raises:
            InvalidInput: ``ca`` cannot be read or holds no certificate; ``key_file`` cannot be read or holds no key.
        """
        return Access(self.context(url, ca), "" if key_file is None else _key_in(key_file))

    def context(self, url: str, ca: Path | None) -> ssl.SSLContext | None:
        """For a server at ``url``; None where it is not asked over TLS. The same object while the file is the same.

        Raises:
            InvalidInput: ``ca`` cannot be read, or holds no certificate.
        """
        if not url.startswith("https:"):
            return None
        try:
            stamp = None if ca is None else _stamp(ca)
            known = self._known.get(ca)
            if known is None or known[0] != stamp:
                known = self._known[ca] = stamp, ssl.create_default_context(cafile=ca)
        except OSError as error:  # an SSLError is one
            why = error.strerror if not isinstance(error, ssl.SSLError) else "it holds no certificate in PEM"
            raise InvalidInput(f"ca {str(ca)!r}: {why}") from error
        return known[1]


def _stamp(file: Path) -> Stamp:
    found = file.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _key_in(file: Path) -> str:
    try:
        key = read_bounded(file, _MOST_KEY_BYTES).strip()
    except OSError as error:
        raise InvalidInput(f"api_key_file {str(file)!r}: {error.strerror or error}") from error
    if not _KEY.fullmatch(key):
        raise InvalidInput(f"api_key_file {str(file)!r}: expected the server's key on one line, in ASCII")
    return key.decode("ascii")
