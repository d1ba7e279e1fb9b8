"""What servers' certificates are checked against, read again where the file is another."""

from __future__ import annotations

import ssl
from pathlib import Path

from skymemory.errors import InvalidInput

Stamp = tuple[int, int, int]


class Authorities:
    """Contexts for TLS to servers, one per file of certificates; and one with the system's own."""

    def __init__(self) -> None:
        self._known: dict[Path | None, tuple[Stamp | None, ssl.SSLContext]] = {}

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
