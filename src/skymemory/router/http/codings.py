"""Codings of messages: the list of transfer codings, as RFC 9112 writes it, and bodies that clients compress."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skymemory.router.http.connection import Headers

CHUNKED = b"chunked"
_ELEMENTS = re.compile(rb'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')


def transfer_codings(headers: Headers) -> list[bytes]:
    """The transfer codings in the order in which they were applied, in lower case, each with its parameters.

    They are a comma-separated list, which may go on in further header lines, may have empty elements, and may have
    commas in quoted parameters (RFC 9110, section 5.6.1; RFC 9112, section 6.1).
    """
    first = headers.first.get(b"transfer-encoding")
    if first is None:
        return []
    if first == CHUNKED and len(headers.first) == len(headers.raw):
        return [CHUNKED]
    elements = _ELEMENTS.findall(b",".join(headers.all_of(b"transfer-encoding")))
    return [element.strip(b" \t").lower() for element in elements if element.strip(b" \t")]
