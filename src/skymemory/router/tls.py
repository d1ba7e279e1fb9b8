"""TLS and keys: the certificate that the router shows, what it checks servers' certificates against, servers' keys."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import NamedTuple

from skymemory.errors import InvalidInput, os_reason
from skymemory.files import read_bounded

Stamp = tuple[int, int, int]
_KEY = re.compile(rb"[!-~]{1,4096}")
_MAX_KEY_BYTES = 8192


class Certificate:
    """The HTTP proxy's certificate, reloaded without a restart: new connections use the new one."""

    def __init__(self, chain: Path, key: Path) -> None:
        """
        Raises:
            InvalidInput: an unreadable file, no PEM, or another certificate's key.
        """
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self.load(chain, key)

    def load(self, chain: Path, key: Path) -> None:
        # Checked first: a context with the new chain and the old key could serve no client.
        self.check(chain, key)
        _load(self.context, chain, key)

    @staticmethod
    def check(chain: Path, key: Path) -> None:
        """Raise what ``load`` would raise, and change nothing."""
        _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), chain, key)


def _load(context: ssl.SSLContext, chain: Path, key: Path) -> None:
    try:
        context.load_cert_chain(chain, key)
    except ssl.SSLError as error:
        raise InvalidInput(
            f"door: tls_cert {str(chain)!r} and tls_key {str(key)!r} are no pair in PEM: {error.reason or error}"
        ) from error
    except OSError as error:
        raise InvalidInput(f"door: tls_cert {str(chain)!r}, tls_key {str(key)!r}: {os_reason(error)}") from error


class Access(NamedTuple):
    """How requests to one server are secured."""

    tls: ssl.SSLContext | None = None
    """None: plain HTTP."""
    key: str = ""
    """API key in every request to it; empty: none."""

    @property
    def headers(self) -> dict[str, str]:
        """Of the router's own requests, such as health checks."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


class Authorities:
    """TLS contexts for requests to servers: one per file of certificates, and one with the system's."""

    def __init__(self) -> None:
        self._known: dict[Path | None, tuple[Stamp | None, ssl.SSLContext]] = {}

    def access(self, url: str, ca: Path | None, key_file: Path | None) -> Access:
        """Access to the server at ``url``, by the files' present content.

        Raises:
            InvalidInput: ``ca`` is unreadable or has no certificate; ``key_file`` is unreadable or has no key.
        """
        return Access(self.context(url, ca), "" if key_file is None else _key_in(key_file))

    def context(self, url: str, ca: Path | None) -> ssl.SSLContext | None:
        """The context for the server at ``url``; None for plain HTTP. It stays the same while the file does.

        Raises:
            InvalidInput: ``ca`` is unreadable, or has no certificate.
        """
        if not url.startswith("https:"):
            return None
        try:
            stamp = None if ca is None else _stamp(ca)
            known = self._known.get(ca)
            if known is None or known[0] != stamp:
                known = self._known[ca] = stamp, ssl.create_default_context(cafile=ca)
        except OSError as error:  # an SSLError is one
            why = os_reason(error) if not isinstance(error, ssl.SSLError) else "it has no certificate in PEM"
            raise InvalidInput(f"ca {str(ca)!r}: {why}") from error
        return known[1]


def _stamp(file: Path) -> Stamp:
    found = file.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _key_in(file: Path) -> str:
    try:
        key = read_bounded(file, _MAX_KEY_BYTES).strip()
    except OSError as error:
        raise InvalidInput(f"api_key_file {str(file)!r}: {os_reason(error)}") from error
    if not _KEY.fullmatch(key):
        raise InvalidInput(f"api_key_file {str(file)!r}: expected the server's key on one line, in ASCII")
    return key.decode("ascii")
